#include "model/state.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/error.h"
#include "nn/decode_ring.h"
#include "nn/mixers.h"
#include "ops/backend.h"

namespace fw {
namespace {

// Of matrix states; a file has the same text since there are such files, so that old ones load. Rows of tokens add
// theirs.
constexpr const char* kLayout = "S [N, HV, K, V] K-first; A [N, H, K]; tail [N, W-1, q | k | v]; position [N]";
constexpr const char* kRowsLayout = "; ring [N, W, width], position p in row p mod W; cache [sum of positions, width]";
constexpr int64_t kMostTokens = int64_t{1} << 40;  // so that sums of positions do not overflow
constexpr std::string_view kPrefix = "state.";

template <class T>
constexpr const char* kDtypeName = std::is_same_v<T, double> ? "F64" : "F32";

std::string tensor_name(size_t layer, const StateTensor& spec) {
  return fmt::format("{}layers.{}.{}", kPrefix, layer, spec.name);
}

void check_metadata(const SafetensorsReader& reader, const std::string& path, const char* key,
                    const std::string& expected, const char* advice) {
  const auto it = reader.metadata().find(key);
  if (it == reader.metadata().end())
    fail_usage("'{}': metadata '{}' is missing: expected a model state saved by fastweight", path, key);
  if (it->second != expected)
    fail_usage("'{}': {}: expected '{}', got '{}'; {}", path, key, expected, it->second, advice);
}

}  // namespace

template <class T>
ModelState<T>::Tensor::Tensor(const Tensor& other)
    : spec(other.spec), narrow(other.narrow), values(other.values.clone()), pages(other.pages.size()) {
  for (size_t n = 0; n < pages.size(); ++n) {
    for (const Buffer<std::byte>& page : other.pages[n]) pages[n].push_back(page.clone());
  }
}

template <class T>
ModelState<T>::ModelState(const ModelConfig& config, int64_t sequences, Device& device)
    : device_(&device), sequences_(sequences) {
  validate(config);
  if (sequences < 0) fail_usage("model state: expected a number of sequences >= 0, got {}", sequences);
  positions_.assign(static_cast<size_t>(sequences), 0);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    std::vector<Tensor>& layer = layers_.emplace_back();
    for (StateTensor& spec : config.layer_state(i)) {
      Tensor& tensor = layer.emplace_back();
      tensor.spec = std::move(spec);
      tensor.narrow = !tensor.spec.wide && bf16_activations<T>(device);
      if (tensor.spec.kind == StateKind::kCache) {
        tensor.pages.resize(static_cast<size_t>(sequences));
      } else {
        tensor.values = Buffer<std::byte>(device, tensor.bytes(sequences * tensor.spec.size()));
      }
    }
    for (auto& views : views_) views.emplace_back(layer.size());
  }
}

template <class T>
ModelState<T>::ModelState(const ModelState& other) : device_(other.device_), sequences_(other.sequences_) {
  other.fold();
  layers_ = other.layers_;
  views_ = other.views_;
  positions_ = other.positions_;
}

template <class T>
void ModelState<T>::use_rings(const std::optional<int64_t>& tokens) {
  fold();
  rings_.reset();
  if (tokens.value_or(0) == 0) return;
  auto rings = std::make_unique<StateRings<T>>(*device_, sequences_, *tokens);
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (size_t j = 0; j < layers_[i].size(); ++j) {
      const Tensor& tensor = layers_[i][j];
      if (!tensor.spec.recurrence) continue;
      RecurrenceShape shape = *tensor.spec.recurrence;
      shape.v_first = is_v_first(tensor);
      if (choose_ring(tokens, shape.rule, device_->kind()) > 0) rings->add(i, j, shape);
    }
  }
  if (!rings->empty()) rings_ = std::move(rings);
}

template <class T>
void ModelState<T>::use_drafts(int64_t tokens) {
  fold();
  drafts_.reset();
  shown_ = 0;
  if (tokens == 0) return;
  drafts_ = std::make_unique<StateDrafts>(*device_, sequences_, tokens);
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (size_t j = 0; j < layers_[i].size(); ++j) drafts_->add(i, j, layers_[i][j].spec, layers_[i][j].bytes(1));
  }
}

template <class T>
void ModelState<T>::prepare_drafts(int64_t tokens, int64_t ahead) {
  show_drafts(tokens);
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (size_t j = 0; j < layers_[i].size(); ++j) {
      Tensor& tensor = layers_[i][j];
      if (tensor.spec.kind == StateKind::kCache) {
        for (int64_t n = 0; n < sequences_; ++n) grow(tensor, n, positions_[static_cast<size_t>(n)] + tokens + ahead);
      }
      StateView& shown = views_[shown_][i][j];
      shown = view(tensor, shown_, tokens);
      drafts_->show(i, j, tokens, shown);
    }
  }
}

template <class T>
void ModelState<T>::begin_drafts(int64_t tokens) {
  drafts_->load(memory(), positions_);
  drafts_->set_positions(tokens, positions_);
  for (int64_t& position : positions_) position += tokens;
}

// A state is the same wherever it lies.
template <class T>
StateDrafts::Values ModelState<T>::memory() const {
  return [this](size_t layer, size_t tensor) { return const_cast<std::byte*>(layers_[layer][tensor].values.data()); };
}

template <class T>
void ModelState<T>::fold() const {
  if (drafts_ != nullptr) drafts_->store(memory(), positions_);
  if (rings_ == nullptr) return;
  rings_->fold([&](size_t layer, size_t tensor) {
    void* states = memory()(layer, tensor);
    return static_cast<T*>(states);
  });
}

template <class T>
size_t ModelState<T>::bytes() const {
  size_t n = (rings_ == nullptr ? 0 : rings_->bytes()) + (drafts_ == nullptr ? 0 : drafts_->bytes());
  for (const std::vector<Tensor>& layer : layers_) {
    for (const Tensor& tensor : layer) {
      n += static_cast<size_t>(tensor.values.size());
      for (const auto& pages : tensor.pages) n += pages.size() * static_cast<size_t>(tensor.bytes(tensor.spec.size()));
    }
  }
  return n + positions_.size() * sizeof(int64_t);
}

template <class T>
void ModelState<T>::reset() {
  for (std::vector<Tensor>& layer : layers_) {
    for (Tensor& tensor : layer) {
      tensor.values.zero();
      for (auto& pages : tensor.pages) pages.clear();
    }
  }
  std::fill(positions_.begin(), positions_.end(), 0);
  if (rings_ != nullptr) rings_->clear();
  if (drafts_ != nullptr) drafts_->clear();
}

template <class T>
void ModelState<T>::grow(Tensor& tensor, int64_t sequence, int64_t tokens) const {
  auto& pages = tensor.pages[static_cast<size_t>(sequence)];
  const int64_t rows = tensor.spec.shape[0];
  const size_t needed = static_cast<size_t>((tokens + rows - 1) / rows);
  while (pages.size() < needed) pages.emplace_back(*device_, tensor.bytes(tensor.spec.size()));
}

template <class T>
StateView ModelState<T>::view(Tensor& tensor, size_t table_index, int64_t repeat) const {
  StateView view;
  if (tensor.spec.kind != StateKind::kMatrix) {
    view.rows = tensor.spec.shape[0];
    view.width = tensor.spec.shape[1];
    view.per_sequence = 1;
  }
  if (tensor.spec.kind != StateKind::kCache) {
    view.data = tensor.values.data();
    view.bytes = tensor.values.size();
    return view;
  }
  size_t most = 1;
  for (const auto& pages : tensor.pages) most = std::max(most, pages.size());
  most = std::bit_ceil(most);  // so that it is seldom allocated anew
  std::vector<void*> pages(static_cast<size_t>(sequences_ * repeat) * most, nullptr);
  for (size_t row = 0; row < static_cast<size_t>(sequences_ * repeat); ++row) {
    auto& of_sequence = tensor.pages[row / static_cast<size_t>(repeat)];
    for (size_t i = 0; i < of_sequence.size(); ++i) pages[row * most + i] = of_sequence[i].data();
  }
  Buffer<void*>& table = tensor.tables[table_index];
  if (table.size() != static_cast<int64_t>(pages.size()))
    table = Buffer<void*>(*device_, static_cast<int64_t>(pages.size()));
  table.write(0, pages);
  view.table = table.data();
  view.per_sequence = static_cast<int64_t>(most);
  return view;
}

// Values in host memory and in the device's type. What is rounded on the way to the device was bf16 when it came from
// one.
template <class T>
std::vector<T> ModelState<T>::read(const Tensor& tensor, const Buffer<std::byte>& from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (!tensor.narrow) {
    from.read(0, std::as_writable_bytes(std::span(values)));
    return values;
  }
  std::vector<Bf16> bits(values.size());
  from.read(0, std::as_writable_bytes(std::span(bits)));
  std::vector<float> wide(values.size());
  widen_bf16(count, bits.data(), wide.data());
  std::copy(wide.begin(), wide.end(), values.begin());
  return values;
}
template <class T>
void ModelState<T>::write(const Tensor& tensor, std::span<const T> values, Buffer<std::byte>& to) {
  if (!tensor.narrow) return to.write(0, std::as_bytes(values));
  const std::vector<float> wide(values.begin(), values.end());
  std::vector<Bf16> bits(wide.size());
  round_to_bf16(static_cast<int64_t>(wide.size()), wide.data(), bits.data());
  to.write(0, std::as_bytes(std::span<const Bf16>(bits)));
}

template <class T>
void ModelState<T>::prepare(const SeqLayout& layout, int64_t ahead, StateWrites writes) {
  if (layout.count() != sequences_)
    fail_internal("model state: {} sequences prepare for a layout of {}", sequences_, layout.count());
  if (drafts_ != nullptr) drafts_->store(memory(), positions_);
  if (writes == StateWrites::kStates) fold();
  shown_ = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (size_t j = 0; j < layers_[i].size(); ++j) {
      Tensor& tensor = layers_[i][j];
      if (tensor.spec.kind == StateKind::kCache) {
        for (int64_t n = 0; n < sequences_; ++n)
          grow(tensor, n, positions_[static_cast<size_t>(n)] + layout.length(n) + ahead);
      }
      views_[0][i][j] = view(tensor, 0, 1);
      if (writes == StateWrites::kRings && rings_ != nullptr) rings_->show(i, j, views_[0][i][j]);
    }
  }
}

template <class T>
void ModelState<T>::put(int64_t n, const ModelState& one) {
  if (one.sequences_ != 1 || n < 0 || n >= sequences_ || one.device_ != device_ || one.layers_.size() != layers_.size())
    fail_internal("model state: a state of {} sequences cannot become sequence {} of {}", one.sequences_, n,
                  sequences_);
  one.fold();
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (size_t j = 0; j < layers_[i].size(); ++j) {
      Tensor& to = layers_[i][j];
      const Tensor& from = one.layers_[i][j];
      if (to.spec.kind != StateKind::kCache) {
        device_->copy(to.values.data() + n * from.values.size(), from.values.data(),
                      static_cast<size_t>(from.values.size()));
        continue;
      }
      auto& pages = to.pages[static_cast<size_t>(n)];
      pages.clear();
      for (const Buffer<std::byte>& page : from.pages[0]) pages.push_back(page.clone());
    }
  }
  positions_[static_cast<size_t>(n)] = one.positions_[0];
  if (rings_ != nullptr) rings_->clear(n);
  if (drafts_ != nullptr) drafts_->clear(n);
}

template <class T>
std::vector<int64_t> ModelState<T>::file_shape(const Tensor& tensor, const std::vector<int64_t>& positions) const {
  if (tensor.spec.kind == StateKind::kCache)
    return {std::accumulate(positions.begin(), positions.end(), int64_t{0}), tensor.spec.shape[1]};
  std::vector<int64_t> shape = {sequences_};
  shape.insert(shape.end(), tensor.spec.shape.begin(), tensor.spec.shape.end());
  return shape;
}

template <class T>
bool ModelState<T>::is_v_first(const Tensor& tensor) const {
  return tensor.spec.v_first && device_->kind() == FW_DEVICE_CUDA;
}

template <class T>
std::vector<T> ModelState<T>::rows(const Tensor& tensor) const {
  if (tensor.spec.kind != StateKind::kCache) {
    std::vector<T> values = read(tensor, tensor.values, sequences_ * tensor.spec.size());
    return is_v_first(tensor) ? transposed(values, tensor.spec.shape[2], tensor.spec.shape[1]) : values;
  }
  std::vector<T> all;
  for (size_t n = 0; n < tensor.pages.size(); ++n) {
    int64_t left = positions_[n] * tensor.spec.shape[1];
    for (const Buffer<std::byte>& page : tensor.pages[n]) {
      const int64_t count = std::min(left, tensor.spec.size());
      const std::vector<T> values = read(tensor, page, count);
      all.insert(all.end(), values.begin(), values.end());
      left -= count;
    }
  }
  return all;
}

template <class T>
std::vector<T> ModelState<T>::values(int64_t layer, const std::string& name) const {
  fold();
  for (const Tensor& tensor : layers_[static_cast<size_t>(layer)]) {
    if (tensor.spec.name == name) return rows(tensor);
  }
  return {};
}

template <class T>
void ModelState<T>::advance(const SeqLayout& layout, StateWrites writes) {
  if (layout.count() != sequences_)
    fail_internal("model state: {} sequences advance by a layout of {}", sequences_, layout.count());
  for (int64_t n = 0; n < sequences_; ++n) positions_[static_cast<size_t>(n)] += layout.length(n);
  if (writes == StateWrites::kRings && rings_ != nullptr) rings_->advance();
}

template <class T>
std::string ModelState<T>::layout() const {
  for (const std::vector<Tensor>& layer : layers_) {
    for (const Tensor& tensor : layer) {
      if (tensor.spec.kind != StateKind::kMatrix) return std::string(kLayout) + kRowsLayout;
    }
  }
  return kLayout;
}

template <class T>
void ModelState<T>::add_to(SafetensorsWriter& writer, const std::string& rule, const std::string& model_hash) const {
  fold();
  writer.set_metadata("state_layout", layout());
  writer.set_metadata("state_dtype", kDtypeName<T>);
  writer.set_metadata("state_rule", rule);
  writer.set_metadata("state_model", model_hash);
  writer.add<int64_t>(fmt::format("{}position", kPrefix), {sequences_}, std::span<const int64_t>(positions_));
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (const Tensor& tensor : layers_[i]) {
      const std::string name = tensor_name(i, tensor.spec);
      writer.add_copy<T>(name, file_shape(tensor, positions_), rows(tensor));
    }
  }
}

template <class T>
void ModelState<T>::read_from(const SafetensorsReader& reader, const std::string& path, const std::string& rule,
                              const std::string& model_hash) {
  check_metadata(reader, path, "state_layout", layout(), "the file is of another version");
  check_metadata(reader, path, "state_dtype", kDtypeName<T>, "load it with a model of that type");
  check_metadata(reader, path, "state_rule", rule, "a state belongs to one model");
  check_metadata(reader, path, "state_model", model_hash, "a state belongs to the parameters that made it");
  std::vector<int64_t> positions(positions_.size());
  const std::string position_name = fmt::format("{}position", kPrefix);
  reader.read<int64_t>(position_name, std::vector<int64_t>{sequences_}, std::span<int64_t>(positions));
  for (const int64_t position : positions) {
    if (position < 0 || position > kMostTokens)
      fail_usage("'{}': {}: expected numbers of tokens from 0 to 2^40, got {}", path, position_name, position);
  }
  std::vector<std::vector<Tensor>> layers = layers_;
  size_t expected = 1;
  for (size_t i = 0; i < layers.size(); ++i) {
    for (Tensor& tensor : layers[i]) {
      const std::string name = tensor_name(i, tensor.spec);
      const std::vector<int64_t> shape = file_shape(tensor, positions);
      const auto it = reader.tensors().find(name);
      if (it != reader.tensors().end() && it->second.dtype != kDtypeName<T>)
        fail_usage("'{}': {}: expected dtype {}, got {}", path, name, kDtypeName<T>, it->second.dtype);
      // Memory for what the file has, not for what its positions promise; read() refuses another shape.
      const bool fits = it != reader.tensors().end() && it->second.shape == shape;
      std::vector<T> values(fits ? static_cast<size_t>(it->second.count()) : 0);
      reader.read<T>(name, shape, std::span<T>(values));
      ++expected;
      if (tensor.spec.kind != StateKind::kCache) {
        if (is_v_first(tensor)) values = transposed(values, tensor.spec.shape[1], tensor.spec.shape[2]);
        write(tensor, values, tensor.values);
        continue;
      }
      const T* from = values.data();
      for (int64_t n = 0; n < sequences_; ++n) {
        tensor.pages[static_cast<size_t>(n)].clear();
        grow(tensor, n, positions[static_cast<size_t>(n)]);
        int64_t left = positions[static_cast<size_t>(n)] * tensor.spec.shape[1];
        for (Buffer<std::byte>& page : tensor.pages[static_cast<size_t>(n)]) {
          const int64_t count = std::min(left, tensor.spec.size());
          write(tensor, {from, static_cast<size_t>(count)}, page);
          from += count;
          left -= count;
        }
      }
    }
  }
  size_t found = 0;
  for (const auto& [name, info] : reader.tensors()) found += name.starts_with(kPrefix) ? 1 : 0;
  if (found != expected)
    fail_usage("'{}': expected {} state tensors for {} layers, got {}", path, expected, layers.size(), found);
  layers_ = std::move(layers);
  positions_ = std::move(positions);
  if (rings_ != nullptr) rings_->clear();
  if (drafts_ != nullptr) drafts_->clear();
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
    if (!name.starts_with(kPrefix))
      fail_usage("'{}': unexpected tensor '{}': expected only state.* tensors of a model state", path, name);
  }
  read_from(reader, path, rule, model_hash);
}

template class ModelState<float>;
template class ModelState<double>;

}  // namespace fw
