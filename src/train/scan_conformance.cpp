#include "train/scan_conformance.h"

#include <fmt/format.h>

#include <cmath>
#include <set>

#include "base/buffer.h"
#include "base/error.h"
#include "base/safetensors.h"
#include "ops/backend.h"

namespace fw {
namespace {

struct ScanRule {
  const char* name;
  ScanLaw law;
  const char *key, *query;  // as the file calls them
};
constexpr ScanRule kRules[] = {{"mamba1", ScanLaw::kMamba, "B", "C"}, {"longhorn_diag", ScanLaw::kLonghorn, "k", "q"}};

// A tensor where the scan reads or writes it.
template <class T>
class Placed {
 public:
  Placed(Device& device, const std::vector<T>& values) : buffer_(device, static_cast<int64_t>(values.size())) {
    buffer_.write(0, values);
  }
  Placed(Device& device, size_t count) : buffer_(device, static_cast<int64_t>(count)) {}  // zeros
  T* data() { return buffer_.data(); }                                                    // null: of nothing
  Mat<T> rows(int64_t count, int64_t width) { return {buffer_.data(), count, width}; }
  std::vector<T> values() const { return buffer_.to_vector(); }

 private:
  Buffer<T> buffer_;
};

// One case of a rule, computed in T.
template <class T>
class ScanCase {
 public:
  ScanCase(const SafetensorsReader& reader, const std::string& path, const ScanRule& rule, const std::string& name,
           Device& device)
      : reader_(reader), path_(path), rule_(rule), name_(name), device_(device) {
    const std::vector<int64_t> u = shape("u", 3), k = shape(rule.key, 3);
    batch_ = u[0], length_ = u[1], channels_ = u[2], states_ = k[2];
    layout_ = SeqLayout::uniform(batch_, length_);
  }

  void compare(Comparison& outputs, Comparison& gradients) {
    const int64_t tokens = batch_ * length_, state_size = batch_ * states_ * channels_;
    std::vector<T> u = read("u"), step = read("dt"), q = read(rule_.query), k = read(rule_.key), skip = read("D");
    std::vector<T> a_log = rule_.law == ScanLaw::kMamba ? read("A") : std::vector<T>();
    for (T& a : a_log) a = std::log(-a);
    std::vector<T> slope(step.size(), T(1));  // of the step in dt
    for (size_t i = 0; i < step.size() && rule_.law == ScanLaw::kLonghorn; ++i) {
      step[i] = 1 / (1 + std::exp(-step[i]));
      slope[i] = step[i] * (1 - step[i]);
    }
    const bool initial = reader_.has(tensor("S0"));
    std::vector<T> s = initial ? read("S0") : std::vector<T>(static_cast<size_t>(state_size));
    const std::vector<T> dy = read("do"), ds = reader_.has(tensor("dS")) ? read("dS") : std::vector<T>(s.size());

    Arena arena(device_), contexts;
    const Exec<T> exec{table_of<T>(device_), device_, arena, contexts};
    const size_t tokens_channels = u.size(), tokens_states = q.size();
    Placed<T> u_at(device_, u), step_at(device_, step), q_at(device_, q), k_at(device_, k), skip_at(device_, skip),
        rates(device_, a_log), s_at(device_, s);
    Placed<T> checkpoints(device_, static_cast<size_t>(chunk_checkpoints(tokens, batch_) * states_ * channels_)),
        y(device_, tokens_channels);
    Buffer<int64_t> offsets(device_, batch_ + 1);
    offsets.write(0, layout_.offsets());
    const PassLayout layout(layout_, offsets.data(), nullptr);
    const auto of_channels = [&](Placed<T>& x) { return x.rows(tokens, channels_); };
    const auto of_states = [&](Placed<T>& x) { return x.rows(tokens, states_); };
    exec.selective_scan_forward(rule_.law, of_channels(u_at), of_channels(step_at), of_states(q_at), of_states(k_at),
                                rates.data(), skip_at.data(), layout, s_at.data(), s_at.data(), checkpoints.data(),
                                of_channels(y));
    add(outputs, "o", y.values());
    add(outputs, "S", s_at.values());

    Placed<T> dy_at(device_, dy), ds_at(device_, ds), du(device_, tokens_channels), dstep_at(device_, tokens_channels),
        dq(device_, tokens_states), dk(device_, tokens_states), da_at(device_, a_log.size()),
        dskip(device_, skip.size()), ds_in(device_, s.size());
    exec.selective_scan_backward(rule_.law, of_channels(dy_at), of_channels(u_at), of_channels(step_at),
                                 of_states(q_at), of_states(k_at), rates.data(), skip_at.data(), layout,
                                 checkpoints.data(), ds_at.data(), of_channels(du), of_channels(dstep_at),
                                 of_states(dq), of_states(dk), da_at.data(), dskip.data(), ds_in.data());
    std::vector<T> dstep = dstep_at.values(), da = da_at.values();
    for (size_t i = 0; i < dstep.size(); ++i) dstep[i] *= slope[i];
    for (size_t i = 0; i < da.size(); ++i) da[i] /= -std::exp(a_log[i]);  // of A itself
    add(gradients, "d_u", du.values());
    add(gradients, "d_dt", dstep);
    add(gradients, fmt::format("d_{}", rule_.query), dq.values());
    add(gradients, fmt::format("d_{}", rule_.key), dk.values());
    add(gradients, "d_D", dskip.values());
    if (!da.empty()) add(gradients, "d_A", da);
    if (initial) add(gradients, "d_S0", ds_in.values());
  }

 private:
  std::string tensor(const std::string& name) const { return fmt::format("{}/{}/{}", rule_.name, name_, name); }
  std::vector<int64_t> shape(const std::string& name, size_t rank) const {
    const auto it = reader_.tensors().find(tensor(name));
    if (it == reader_.tensors().end()) fail_usage("'{}': tensor '{}' is missing", path_, tensor(name));
    if (it->second.shape.size() != rank)
      fail_usage("'{}': {}: expected {} dimensions, got {}", path_, tensor(name), rank, it->second.shape.size());
    return it->second.shape;
  }
  // What the sizes of u and of the key say that a tensor of this name has.
  std::vector<int64_t> expected_shape(std::string name) const {
    if (name.rfind("d_", 0) == 0) name = name.substr(2);
    if (name == "D") return {channels_};
    if (name == "A") return {channels_, states_};
    if (name == "S0" || name == "S" || name == "dS") return {batch_, states_, channels_};
    if (name == rule_.key) return {batch_, length_, states_};
    return {batch_, length_, name == rule_.query ? states_ : channels_};
  }
  std::vector<double> numbers(const std::string& name) const {
    const std::vector<int64_t> sizes = expected_shape(name);
    if (reader_.tensors().find(tensor(name)) == reader_.tensors().end())
      fail_usage("'{}': tensor '{}' is missing", path_, tensor(name));
    int64_t count = 1;
    for (const int64_t n : sizes) count *= n;
    std::vector<double> values(static_cast<size_t>(count));
    reader_.read<double>(tensor(name), sizes, values);
    return values;
  }
  std::vector<T> read(const std::string& name) const {
    const std::vector<double> values = numbers(name);
    return {values.begin(), values.end()};
  }
  void add(Comparison& worst, const std::string& name, const std::vector<T>& got) const {
    const std::vector<double> expected = numbers(name), values(got.begin(), got.end());
    const double error = relative_error(values, expected);
    if (error <= worst.error && !worst.where.empty()) return;
    worst.error = error;
    worst.where = furthest_element(fmt::format("{}/{}", name_, name), expected_shape(name), values, expected);
  }

  const SafetensorsReader& reader_;
  const std::string& path_;
  const ScanRule& rule_;
  const std::string& name_;
  Device& device_;
  int64_t batch_ = 0, length_ = 0, channels_ = 0, states_ = 0;
  SeqLayout layout_;
};

}  // namespace

std::vector<Comparison> check_scans(const std::string& path, ConformanceType type, double bound, Device& device) {
  if (type == ConformanceType::kF64 && device.kind() != FW_DEVICE_CPU)
    fail_usage("type: expected float32 of scans on a CUDA device, got float64");
  const SafetensorsReader reader(path);
  std::vector<Comparison> found;
  for (const ScanRule& rule : kRules) {
    const std::string prefix = fmt::format("{}/", rule.name);
    std::set<std::string> cases;
    for (const auto& [name, info] : reader.tensors()) {
      const size_t last = name.rfind('/');
      if (name.rfind(prefix, 0) == 0 && last > prefix.size())
        cases.insert(name.substr(prefix.size(), last - prefix.size()));
    }
    if (cases.empty()) continue;
    Comparison outputs{rule.name, "outputs", 0, bound, "", ""}, gradients{rule.name, "gradients", 0, bound, "", ""};
    for (const std::string& name : cases) {
      if (type == ConformanceType::kF64) {
        ScanCase<double>(reader, path, rule, name, device).compare(outputs, gradients);
      } else {
        ScanCase<float>(reader, path, rule, name, device).compare(outputs, gradients);
      }
    }
    found.push_back(outputs);
    found.push_back(gradients);
  }
  return found;
}

}  // namespace fw
