#include "model/state.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/error.h"

namespace fw {
namespace {

constexpr const char* kLayout = "S [N, HV, K, V] K-first; A [N, H, K]; tail [N, W-1, q | k | v]; position [N]";
constexpr std::string_view kPrefix = "state.";

template <class T>
constexpr const char* kDtypeName = std::is_same_v<T, double> ? "F64" : "F32";

template <class T>
std::vector<T> zeros(int64_t n) {
  return std::vector<T>(static_cast<size_t>(n), T(0));
}

void check_metadata(const SafetensorsReader& reader, const std::string& path, const char* key, const std::string& expected, const char* advice) {
  const auto it = reader.metadata().find(key);
  if (it == reader.metadata().end()) fail_usage("'{}': metadata '{}' is missing: expected a model state saved by fastweight", path, key);
  if (it->second != expected) fail_usage("'{}': {}: expected '{}', got '{}'; {}", path, key, expected, it->second, advice);
}

}  // namespace

template <class T>
ModelState<T>::ModelState(const ModelConfig& config, int64_t sequences) : sequences_(sequences) {
  validate(config);
  if (sequences < 0) fail_usage("model state: expected a number of sequences >= 0, got {}", sequences);
  const RecurrentMixerSpec spec = config.mixer_spec();
  heads_ = spec.heads;
  v_heads_ = spec.v_heads;
  key_dim_ = spec.key_dim;
  value_dim_ = spec.value_dim;
  precond_ = spec.rule.uses_precond();
  tail_rows_ = std::max<int64_t>(spec.conv_size - 1, 0);
  tail_cols_ = spec.conv_channels();
  positions_.assign(static_cast<size_t>(sequences), 0);
  layers_.resize(static_cast<size_t>(config.num_hidden_layers));
  for (Layer& layer : layers_) {
    layer.s = zeros<T>(sequences * v_heads_ * key_dim_ * value_dim_);
    if (precond_) layer.a = zeros<T>(sequences * heads_ * key_dim_);
    layer.tail = zeros<T>(sequences * tail_rows_ * tail_cols_);
  }
}

template <class T>
size_t ModelState<T>::bytes() const {
  size_t n = 0;
  for (const Layer& layer : layers_) n += layer.s.size() + layer.a.size() + layer.tail.size();
  return n * sizeof(T) + positions_.size() * sizeof(int64_t);
}

template <class T>
void ModelState<T>::reset() {
  for (Layer& layer : layers_) {
    std::fill(layer.s.begin(), layer.s.end(), T(0));
    std::fill(layer.a.begin(), layer.a.end(), T(0));
    std::fill(layer.tail.begin(), layer.tail.end(), T(0));
  }
  std::fill(positions_.begin(), positions_.end(), 0);
}

template <class T>
void ModelState<T>::advance(const SeqLayout& layout) {
  if (layout.count() != sequences_) fail_internal("model state: {} sequences advance by a layout of {}", sequences_, layout.count());
  for (int64_t n = 0; n < sequences_; ++n) positions_[static_cast<size_t>(n)] += layout.length(n);
}

template <class T>
void ModelState<T>::add_to(SafetensorsWriter& writer, const std::string& rule, const std::string& model_hash) const {
  writer.set_metadata("state_layout", kLayout);
  writer.set_metadata("state_dtype", kDtypeName<T>);
  writer.set_metadata("state_rule", rule);
  writer.set_metadata("state_model", model_hash);
  writer.add<int64_t>(fmt::format("{}position", kPrefix), {sequences_}, std::span<const int64_t>(positions_));
  for (size_t i = 0; i < layers_.size(); ++i) {
    const std::string prefix = fmt::format("{}layers.{}.", kPrefix, i);
    const Layer& layer = layers_[i];
    writer.add<T>(prefix + "s", {sequences_, v_heads_, key_dim_, value_dim_}, std::span<const T>(layer.s));
    if (precond_) writer.add<T>(prefix + "a", {sequences_, heads_, key_dim_}, std::span<const T>(layer.a));
    if (tail_rows_ > 0) writer.add<T>(prefix + "tail", {sequences_, tail_rows_, tail_cols_}, std::span<const T>(layer.tail));
  }
}

template <class T>
void ModelState<T>::read_from(const SafetensorsReader& reader, const std::string& path, const std::string& rule, const std::string& model_hash) {
  check_metadata(reader, path, "state_layout", kLayout, "the file is of another version");
  check_metadata(reader, path, "state_dtype", kDtypeName<T>, "load it with a model of that type");
  check_metadata(reader, path, "state_rule", rule, "a state belongs to one model");
  check_metadata(reader, path, "state_model", model_hash, "a state belongs to the parameters that made it");
  std::vector<Layer> layers(layers_.size());
  std::vector<int64_t> positions(positions_.size());
  const std::string position_name = fmt::format("{}position", kPrefix);
  reader.read<int64_t>(position_name, std::vector<int64_t>{sequences_}, std::span<int64_t>(positions));
  for (const int64_t position : positions) {
    if (position < 0) fail_usage("'{}': {}: expected numbers of tokens >= 0, got {}", path, position_name, position);
  }
  size_t expected = 1;
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string prefix = fmt::format("{}layers.{}.", kPrefix, i);
    const auto read = [&](const char* name, std::vector<int64_t> shape, size_t count, std::vector<T>& out) {
      out.resize(count);
      const auto it = reader.tensors().find(prefix + name);
      if (it != reader.tensors().end() && it->second.dtype != kDtypeName<T>)
        fail_usage("'{}': {}{}: expected dtype {}, got {}", path, prefix, name, kDtypeName<T>, it->second.dtype);
      reader.read<T>(prefix + name, shape, std::span<T>(out));
      ++expected;
    };
    read("s", {sequences_, v_heads_, key_dim_, value_dim_}, layers_[i].s.size(), layers[i].s);
    if (precond_) read("a", {sequences_, heads_, key_dim_}, layers_[i].a.size(), layers[i].a);
    if (tail_rows_ > 0) read("tail", {sequences_, tail_rows_, tail_cols_}, layers_[i].tail.size(), layers[i].tail);
  }
  size_t found = 0;
  for (const auto& [name, info] : reader.tensors()) found += name.starts_with(kPrefix) ? 1 : 0;
  if (found != expected) fail_usage("'{}': expected {} state tensors for {} layers, got {}", path, expected, layers.size(), found);
  layers_ = std::move(layers);
  positions_ = std::move(positions);
}

template <class T>
void ModelState<T>::save(const std::string& path, const std::string& rule, const std::string& model_hash) const {
  SafetensorsWriter writer;
  add_to(writer, rule, model_hash);
  writer.write(path);
}

template <class T>
void ModelState<T>::load(const std::string& path, const std::string& rule, const std::string& model_hash) {
  const SafetensorsReader reader(path);
  for (const auto& [name, info] : reader.tensors()) {
    if (!name.starts_with(kPrefix)) fail_usage("'{}': unexpected tensor '{}': expected only state.* tensors of a model state", path, name);
  }
  read_from(reader, path, rule, model_hash);
}

template class ModelState<float>;
template class ModelState<double>;

}  // namespace fw
