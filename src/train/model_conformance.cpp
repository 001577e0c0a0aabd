#include "train/model_conformance.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "base/bf16.h"
#include "base/error.h"
#include "base/file.h"
#include "base/python_json.h"
#include "base/safetensors.h"
#include "base/stop.h"
#include "model/interop/hf_config.h"
#include "model/language_model.h"
#include "train/step.h"

namespace fw {
namespace {

constexpr int64_t kPrompt = 40;  // ids before the greedy continuation
constexpr double kGradientFloor = 1e-3;

bool is_cuda(const Device* device) { return device != nullptr && device->kind() == FW_DEVICE_CUDA; }

// io.safetensors, read whole tensor by whole tensor in the shapes that it has.
class Io {
 public:
  explicit Io(const std::string& path) : path_(path), reader_(path) {}

  bool has(const std::string& name) const { return reader_.has(name); }
  const std::string& path() const { return path_; }
  std::vector<int64_t> shape(const std::string& name, size_t rank) const {
    const auto it = reader_.tensors().find(name);
    if (it == reader_.tensors().end()) fail_usage("'{}': tensor '{}' is missing", path_, name);
    if (it->second.shape.size() != rank)
      fail_usage("'{}': {}: expected {} dimensions, got {}", path_, name, rank, it->second.shape.size());
    return it->second.shape;
  }
  std::vector<double> numbers(const std::string& name, const std::vector<int64_t>& shape) const {
    return read<double>(name, shape);
  }
  std::vector<int32_t> ids(const std::string& name, const std::vector<int64_t>& shape, int64_t vocab) const {
    const auto it = reader_.tensors().find(name);
    std::vector<int32_t> list;
    if (it != reader_.tensors().end() && it->second.dtype == "I64") {
      const std::vector<int64_t> wide = read<int64_t>(name, shape);
      list.assign(wide.begin(), wide.end());
      if (!std::equal(list.begin(), list.end(), wide.begin(), wide.end()))
        fail_usage("'{}': {}: expected ids below {}", path_, name, vocab);
    } else {
      list = read<int32_t>(name, shape);
    }
    for (const int32_t id : list) {
      if (id < 0 || id >= vocab) fail_usage("'{}': {}: expected ids from 0 to {}, got {}", path_, name, vocab - 1, id);
    }
    return list;
  }

 private:
  template <class T>
  std::vector<T> read(const std::string& name, const std::vector<int64_t>& shape) const {
    int64_t count = 1;
    for (const int64_t n : shape) count *= n;
    // A shape that the caller expects is checked by the reader; one it took from the file fits the file.
    const auto it = reader_.tensors().find(name);
    if (it != reader_.tensors().end() && it->second.shape != shape) count = 0;
    std::vector<T> values(static_cast<size_t>(count));
    reader_.read<T>(name, shape, std::span<T>(values));
    return values;
  }

  std::string path_;
  SafetensorsReader reader_;
};

// Rows of ids as sequences, each predicting its own next ids.
Batch batch_of(std::span<const int32_t> ids, int64_t rows, int64_t length) {
  Batch batch;
  batch.ids.assign(ids.begin(), ids.end());
  batch.layout = SeqLayout::uniform(rows, length);
  for (size_t t = 0; t < ids.size(); ++t)
    batch.targets.push_back((t + 1) % static_cast<size_t>(length) == 0 ? -1 : ids[t + 1]);
  return batch;
}

template <class T>
std::vector<double> widened(std::span<const T> values) {
  return {values.begin(), values.end()};
}

// Of the losses of adapters' training.
constexpr double kAdapterTrace = 1e-4;

class ModelCheck {
 public:
  ModelCheck(std::string folder, std::string subject, const ModelConformanceOptions& options, ModelBounds bounds)
      : folder_(std::move(folder)),
        subject_(std::move(subject)),
        options_(options),
        bounds_(bounds),
        io_(folder_ + "/io.safetensors") {
    if (!on_device() && is_adapter_folder(folder_)) bounds_.trace_loss = std::min(bounds_.trace_loss, kAdapterTrace);
  }

  // name(spec): where the folder has a parameter.
  template <class Name>
  std::vector<Comparison> run(const Name& name) {
    if (on_device() && !lacks().empty()) return {{subject_, "", 0, 0, "", lacks()}};
    const bool in_double = options_.type == ConformanceType::kF64 && !on_device();
    if (in_double) {
      check_pass<double>(name);
    } else {
      check_pass<float>(name);
    }
    if (io_.has("trace/input_ids") && (on_device() || options_.type != ConformanceType::kBf16)) {
      if (in_double) {
        check_trace<double>();
      } else {
        check_trace<float>();
      }
    }
    if (found_.empty())
      fail_usage("'{}': expected logits, loss, grad/..., greedy or trace/..., got none of them", io_.path());
    return found_;
  }

 private:
  void add(const std::string& what, double error, double bound, const std::string& where) {
    found_.push_back({subject_, what, error, bound, where, ""});
  }

  bool on_device() const { return is_cuda(options_.device); }
  bool rounds() const { return on_device() || options_.type == ConformanceType::kBf16; }

  // What the device lacks for this model, in words; a folder that cannot be read is told by the host.
  std::string lacks() const {
    const LanguageModel<float> model = load_model<float>(folder_);
    try {
      const LanguageModel<float> there(model.config(), *options_.device);
      return "";
    } catch (const DeviceError&) {
      throw;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUsage) throw;
      return error.what();
    }
  }

  template <class T>
  LanguageModel<T> load() const {
    LanguageModel<T> model = load_model<T>(folder_, options_.device != nullptr ? *options_.device : host_device());
    model.set_form(options_.form);
    if (options_.type == ConformanceType::kBf16) model.set_precision(Precision::kBf16);
    if (options_.rounded_weights) {
      for (const ParamSpec& spec : model.params().specs()) {
        const HostView<T> exact = model.params().host_values(spec);
        std::vector<float> values(exact.span().begin(), exact.span().end());
        round_to_bf16_values(static_cast<int64_t>(values.size()), values.data(), values.data());
        model.params().write_values(spec, std::vector<T>(values.begin(), values.end()));
      }
    }
    if (is_adapter_folder(folder_)) load_adapters(folder_, model);
    return model;
  }

  template <class T, class Name>
  void check_pass(const Name& name) {
    LanguageModel<T> model = load<T>();
    const int64_t vocab = model.config().vocab_size;
    const std::vector<int64_t> shape = io_.shape("input_ids", 2);
    const Batch batch = batch_of(io_.ids("input_ids", shape, vocab), shape[0], shape[1]);
    if (io_.has("logits")) {
      const std::vector<int64_t> logits_shape = {shape[0], shape[1], vocab};
      const std::vector<double> expected = io_.numbers("logits", logits_shape);
      std::vector<T> logits(expected.size());
      model.forward_all(batch.ids, batch.layout, nullptr, {logits.data(), batch.layout.tokens(), vocab});
      const std::vector<double> got = widened<T>(logits);
      add("logits", relative_error(got, expected), bounds_.logits,
          furthest_element("logits", logits_shape, got, expected));
    }
    const int64_t scored = batch.layout.tokens() - batch.layout.count();
    model.begin_step();
    const LossSum sum = model.forward_backward(batch.ids, batch.targets, batch.layout,
                                               scored > 0 ? 1.0 / static_cast<double>(scored) : 0.0);
    if (io_.has("loss")) {
      const std::vector<double> expected = io_.numbers("loss", {1}), got = {sum.nll / static_cast<double>(sum.count)};
      add("loss", relative_error(got, expected), bounds_.loss,
          fmt::format("{:.9g}, expected {:.9g}", got[0], expected[0]));
    }
    check_gradients<T>(model, name);
    if (io_.has("greedy") && !rounds()) check_greedy(model, batch);
  }

  template <class T, class Name>
  void check_gradients(const LanguageModel<T>& model, const Name& name) {
    struct Gradient {
      std::string name;
      std::vector<int64_t> shape;
      std::vector<double> got, expected;
    };
    std::vector<Gradient> list;
    double square = 0;
    size_t trained = 0;
    const Params<T>& params = model.trained();
    const AdapterRows rows(model);
    for (const ParamSpec& spec : params.specs()) {
      if (spec.buffer) continue;
      ++trained;
      Gradient g;
      HfTensor tensor;
      if (model.adapters() == nullptr) {
        tensor = name(spec);
      } else {
        tensor.name = adapter_tensor(spec);
      }
      g.name = "grad/" + tensor.name;
      if (!io_.has(g.name)) continue;
      g.shape = spec.shape;
      g.expected = io_.numbers(g.name, model.adapters() == nullptr ? whole_shape(tensor, spec) : rows.file_shape(spec));
      rows.reorder(spec, g.expected, false);
      if (tensor.rows > 0) g.expected = part_of<double>(tensor, spec, g.expected);
      g.got = widened<T>(params.host_grads(spec).span());
      square += std::pow(euclidean_norm(g.expected), 2);
      list.push_back(std::move(g));
    }
    if (list.empty()) return;
    if (list.size() != trained) {
      fail_usage("'{}': expected grad/... of all {} parameters or of none, got {}", io_.path(), trained, list.size());
    }
    double worst = -1;
    std::string where;
    for (const Gradient& g : list) {
      const double error = relative_error(g.got, g.expected, kGradientFloor * std::sqrt(square));
      if (error <= worst) continue;
      worst = error;
      where = furthest_element(g.name, g.shape, g.got, g.expected);
    }
    add("gradients", worst, bounds_.gradients, where);
  }

  // Prefill by chunks, then one step a token.
  template <class T>
  void check_greedy(LanguageModel<T>& model, const Batch& batch) {
    const int64_t vocab = model.config().vocab_size;
    const std::vector<int64_t> shape = io_.shape("greedy", 2);
    const std::vector<int32_t> expected = io_.ids("greedy", shape, vocab);
    if (batch.layout.count() < 1 || batch.layout.length(0) < kPrompt) {
      fail_usage("'{}': greedy: expected input_ids of at least {} tokens for it to follow", io_.path(), kPrompt);
    }
    ModelState<T> state(model.config(), 1, model.device());
    std::vector<T> logits(static_cast<size_t>(vocab));
    const Mat<T> row(logits.data(), 1, vocab);
    model.forward_last(std::span(batch.ids).first(kPrompt), SeqLayout({0, kPrompt}), state, row);
    for (size_t i = 0; i < expected.size(); ++i) {
      const int32_t next = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      if (next != expected[i]) {
        add("greedy tokens", 1, 0, fmt::format("token {}: {}, expected {}", i, next, expected[i]));
        return;
      }
      model.forward_last(std::span(&next, 1), SeqLayout({0, 1}), state, row);
    }
    add("greedy tokens", 0, 0, fmt::format("{} tokens", expected.size()));
  }

  // A model and the optimiser of the traces.
  template <class T>
  struct Training {
    explicit Training(LanguageModel<T> loaded)
        : model(std::move(loaded)), optimizer({0.9, 0.95, 1e-8, 0.1}, model.trained()) {
      model.trained().decay_matrices();  // what the traces decay, whatever the layers' papers say
    }
    StepResult step(const Batch& batch, double lr) { return train_step(model, optimizer, {&batch, 1}, lr, 1.0); }
    void set_values(const Params<double>& from) {
      for (size_t i = 0; i < from.specs().size(); ++i) {
        const HostView<double> values = from.host_values(from.specs()[i]);
        model.trained().write_values(model.trained().specs()[i],
                                     std::vector<T>(values.span().begin(), values.span().end()));
      }
    }
    LanguageModel<T> model;
    BasicAdamW<T> optimizer;
  };

  template <class T>
  void check_trace() {
    Training<T> training(load<T>());
    LanguageModel<T>& model = training.model;
    const std::vector<int64_t> shape = io_.shape("trace/input_ids", 3);
    const std::vector<int32_t> ids = io_.ids("trace/input_ids", shape, model.config().vocab_size);
    const std::vector<double> lr = io_.numbers("trace/lr", {shape[0]}), loss = io_.numbers("trace/loss", {shape[0]});
    const std::vector<double> norm = io_.numbers("trace/norm", {shape[0]});
    // In float the norm is compared at the weights of a training in double. AdamW divides by the size of the gradient.
    // So weights whose gradient float cannot resolve go their own ways within ten steps, and the norm of an
    // ill-conditioned model with them.
    std::optional<Training<double>> exact;
    std::optional<Training<T>> follower;
    if constexpr (std::is_same_v<T, float>) {
      if (!on_device()) {
        exact.emplace(load<double>());
        follower.emplace(load<T>());
      }
    }
    double worst_loss = 0, worst_norm = 0;
    std::string where_loss = "all steps", where_norm = "all steps";
    const size_t row = static_cast<size_t>(shape[1] * shape[2]);
    for (size_t s = 0; s < lr.size(); ++s) {
      stop_point("training", static_cast<int64_t>(s), static_cast<int64_t>(lr.size()), "steps");
      const Batch batch = batch_of(std::span(ids).subspan(s * row, row), shape[1], shape[2]);
      double norm_at_exact_weights = 0;
      if (exact) {
        follower->set_values(exact->model.trained());
        norm_at_exact_weights = follower->step(batch, lr[s]).norm;
        exact->step(batch, lr[s]);
      }
      const StepResult step = training.step(batch, lr[s]);
      const auto compare = [s](double got, double expected, double& worst, std::string& where) {
        const double error = relative_error({&got, 1}, {&expected, 1});
        if (error <= worst) return;
        worst = error;
        where = fmt::format("step {}: {:.9g}, expected {:.9g}", s, got, expected);
      };
      compare(step.nll / static_cast<double>(step.count), loss[s], worst_loss, where_loss);
      compare(exact ? norm_at_exact_weights : step.norm, norm[s], worst_norm, where_norm);
    }
    add("training, loss", worst_loss, bounds_.trace_loss, where_loss);
    if (!on_device()) add("training, norm", worst_norm, bounds_.trace_norm, where_norm);
  }

  std::string folder_, subject_;
  ModelConformanceOptions options_;
  ModelBounds bounds_;
  Io io_;
  std::vector<Comparison> found_;
};

}  // namespace

ModelBounds model_bounds(ConformanceType type) {
  ModelBounds bounds;
  if (type == ConformanceType::kBf16) {
    bounds.logits = 5e-2;
    bounds.loss = 1e-3;
    bounds.gradients = 3e-1;
  }
  return bounds;
}

ModelBounds device_model_bounds() {
  ModelBounds bounds;
  bounds.logits = bounds.loss = bounds.gradients = 3e-2;
  bounds.trace_loss = 5e-3;
  return bounds;
}

bool is_model_folder(const std::string& folder) { return file_exists(folder + "/config.json"); }

std::vector<Comparison> check_model(const std::string& folder, const ModelConformanceOptions& options) {
  const std::string path = folder + "/config.json";
  const nlohmann::json json = parse_python_config(read_file(path, size_t{1} << 20), "'" + path + "'");
  const std::string subject = std::filesystem::path(folder).lexically_normal().filename().string();
  const bool is_hf = is_hf_config(json);
  if (is_hf) {
    const std::string unknown = unknown_hf_model(json);
    if (!unknown.empty()) return {{subject, "", 0, 0, "", unknown}};
  }
  const std::optional<HfNames> names = is_hf ? std::optional<HfNames>(json) : std::nullopt;
  const auto check = [&](const ModelConformanceOptions& how, const ModelBounds& bounds) {
    return ModelCheck(folder, subject, how, bounds).run([&](const ParamSpec& spec) {
      return names ? names->tensor(spec) : HfTensor{spec.name};
    });
  };
  if (!is_cuda(options.device)) return check(options, model_bounds(options.type));
  std::vector<Comparison> found = check(options, device_model_bounds());
  if (std::ranges::any_of(found, [](const Comparison& c) { return c.unknown.empty() && !c.passes(); })) {
    // What bf16 makes of this model without a GPU: of its weights alone in float64, and of the operands of its products
    // in float32.
    std::vector<Comparison> rounded = check({ConformanceType::kF64, options.form, nullptr, true}, ModelBounds());
    // The latter counts where it is within its own bounds: on a machine whose bf16 products go wrong it says nothing of
    // the model.
    for (const Comparison& c : check({ConformanceType::kBf16, options.form}, model_bounds(ConformanceType::kBf16))) {
      if (c.passes()) rounded.push_back(c);
    }
    for (Comparison& c : found) {
      double there = 0;
      for (const Comparison& r : rounded) {
        if (r.what == c.what) there = std::max(there, r.error);
      }
      if (c.passes() || !c.unknown.empty() || !(kDeviceConditioning * there > c.bound)) continue;
      c.bound = kDeviceConditioning * there;
      c.widened = true;
      c.where += fmt::format("; bf16 on the CPU: {:.1e}", there);
    }
  }
  return found;
}

}  // namespace fw
