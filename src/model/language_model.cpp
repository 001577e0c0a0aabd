#include "model/language_model.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "model/engine.h"
#include "nn/decode_ring.h"
#include "scan/ring.h"

namespace fw {
namespace {

const ModelConfig& validated(const ModelConfig& config) {
  validate(config);
  return config;
}

}  // namespace

template <class T>
struct LanguageModel<T>::Impl {
  Impl(const ModelConfig& c, Device& d, MasterFormat master_format)
      : config(validated(c)),
        device(d),
        engine(make_engine<T>(config, device, params, master_format)),
        sums(device, 1) {}

  void check(std::span<const int32_t> ids, const SeqLayout& layout, const ModelState<T>* state) const {
    if (static_cast<int64_t>(ids.size()) != layout.tokens())
      fail_usage("ids: expected {} tokens as the layout has, got {}", layout.tokens(), ids.size());
    for (size_t t = 0; t < ids.size(); ++t) {
      if (ids[t] < 0 || ids[t] >= config.vocab_size)
        fail_usage("ids[{}]: expected 0 <= id < vocab_size = {}, got {}", t, config.vocab_size, ids[t]);
    }
    if (state == nullptr) return;
    check(*state);
    if (state->sequences() != layout.count())
      fail_usage("state: expected {} sequences as the layout has, got {}", layout.count(), state->sequences());
  }

  void zero_grads() {
    params.zero_grads();
    if (lora != nullptr) lora->params().zero_grads();
  }

  void check(const ModelState<T>& state) const {
    if (&state.device() != &device)
      fail_usage("state: expected one in the memory of the model's device, got one of another");
    if (state.layers() != config.num_hidden_layers)
      fail_usage("state: expected {} layers, got {}", config.num_hidden_layers, state.layers());
  }

  void check_targets(std::span<const int32_t> ids, std::span<const int32_t> targets) const {
    if (targets.size() != ids.size())
      fail_usage("targets: expected {} as there are ids, got {}", ids.size(), targets.size());
    for (size_t t = 0; t < targets.size(); ++t) {
      if (targets[t] >= config.vocab_size)
        fail_usage("targets[{}]: expected below vocab_size = {}, got {}", t, config.vocab_size, targets[t]);
    }
  }

  ModelConfig config;
  Device& device;
  uint64_t tokenizer = 0;
  Params<T> params;
  std::unique_ptr<Engine<T>> engine;
  Buffer<StepSums> sums;
  AdapterConfig adapters;
  std::unique_ptr<Lora<T>> lora;  // null: none
};

template <class T>
LanguageModel<T>::LanguageModel(const ModelConfig& config, Device& device, MasterFormat master_format)
    : impl_(std::make_unique<Impl>(config, device, master_format)) {}
template <class T>
LanguageModel<T>::~LanguageModel() = default;
template <class T>
LanguageModel<T>::LanguageModel(LanguageModel&&) noexcept = default;

template <class T>
const ModelConfig& LanguageModel<T>::config() const {
  return impl_->config;
}

template <class T>
void LanguageModel<T>::set_hf(const std::string& hf) {
  impl_->config.hf = hf;
}

template <class T>
uint64_t LanguageModel<T>::tokenizer() const {
  return impl_->tokenizer;
}

template <class T>
void LanguageModel<T>::set_tokenizer(uint64_t checksum) {
  impl_->tokenizer = checksum;
}

template <class T>
Params<T>& LanguageModel<T>::params() {
  return impl_->params;
}

template <class T>
const Params<T>& LanguageModel<T>::params() const {
  return impl_->params;
}

template <class T>
void LanguageModel<T>::add_adapters(const AdapterConfig& config) {
  Impl& m = *impl_;
  if (m.lora != nullptr) fail_internal("add_adapters: the model has adapters");
  std::vector<LoraTarget> targets =
      chosen_targets(lora_targets(m.config, m.params.specs(), config.hf_names), config.lora.modules);
  if (targets.empty()) fail_usage("lora: expected a model with projections to adapt, got one without");
  m.params.freeze();
  m.adapters = config;
  m.lora = std::make_unique<Lora<T>>(std::move(targets), config.lora.rank, config.lora.scale(), m.params);
  m.engine->adapt(m.lora.get());
}

template <class T>
const AdapterConfig* LanguageModel<T>::adapters() const {
  return impl_->lora == nullptr ? nullptr : &impl_->adapters;
}

template <class T>
std::span<const LoraTarget> LanguageModel<T>::adapter_targets() const {
  if (impl_->lora == nullptr) return {};
  return impl_->lora->targets();
}

template <class T>
Params<T>& LanguageModel<T>::trained() {
  return impl_->lora == nullptr ? impl_->params : impl_->lora->params();
}

template <class T>
const Params<T>& LanguageModel<T>::trained() const {
  return impl_->lora == nullptr ? impl_->params : impl_->lora->params();
}

template <class T>
std::vector<LoraTarget> LanguageModel<T>::merge_adapters() {
  Impl& m = *impl_;
  m.lora->merge_into(m.params);
  m.params.clear_low_rank();
  std::vector<LoraTarget> targets = m.lora->targets();
  m.engine->adapt(nullptr);
  m.lora.reset();
  return targets;
}

template <class T>
const Exec<T>& LanguageModel<T>::exec() const {
  return impl_->engine->over_parameters();
}

template <class T>
Device& LanguageModel<T>::device() const {
  return impl_->device;
}

template <class T>
void LanguageModel<T>::set_precision(Precision precision) {
  if (precision == Precision::kBf16 && std::is_same_v<T, double>)
    fail_usage("precision: bf16 matrix products need a float model, got double");
  impl_->engine->set_precision(precision);
}

template <class T>
void LanguageModel<T>::set_recompute(RecomputeLayers what) {
  impl_->engine->set_recompute(what);
}

template <class T>
void LanguageModel<T>::set_form(fw_form form) {
  impl_->engine->set_form(form);
}

template <class T>
void LanguageModel<T>::set_decode_bits(bool on) {
  for (int64_t i = 0; on && i < config().num_hidden_layers; ++i) {
    const LayerKind kind = config().layer_kind(i);
    const bool on_gpu = device().kind() != FW_DEVICE_CPU;
    if (on_gpu && kind == LayerKind::kRecurrent && parse_rule(config().layer_rule(i)).uses_precond()) {
      fail_usage("decode_bits: expected a rule without a preconditioner on a GPU, got '{}' as layer {}",
                 config().layer_rule(i), i);
    }
    if (kind != LayerKind::kMesa && kind != LayerKind::kMamba3) continue;
    fail_usage(
        "decode_bits: expected a model without layers of mesa and mamba3, which round other sums when they decode, got "
        "{} as layer {}",
        kind == LayerKind::kMesa ? "mesa" : "mamba3", i);
  }
  impl_->engine->set_decode_bits(on);
}

template <class T>
void LanguageModel<T>::set_decode_ring(const std::optional<int64_t>& tokens) {
  const int64_t given = tokens.value_or(0);
  if (given < 0 || given > kMostRingTokens)
    fail_usage("decode ring: expected 0 to {} tokens, got {}", kMostRingTokens, given);
  bool used = given == 0;
  for (int64_t i = 0; !used && i < config().num_hidden_layers; ++i) {
    for (const StateTensor& tensor : config().layer_state(i))
      used = used || (tensor.recurrence && has_ring(tensor.recurrence->rule, device().kind()));
  }
  if (!used) {
    fail_usage("decode ring: expected 0 with this model, none of whose layers has a recurrence with a ring, got {}",
               given);
  }
  impl_->engine->set_decode_ring(tokens);
}

template <class T>
const std::optional<int64_t>& LanguageModel<T>::decode_ring() const {
  return impl_->engine->decode_ring();
}

template <class T>
void LanguageModel<T>::observe(PassObserver<T>* observer) {
  impl_->engine->observe(observer);
}

template <class T>
bool LanguageModel<T>::parameters_finite() const {
  const Params<T>& params = trained();   // what is frozen stays what it was
  Buffer<double> sum(impl_->device, 1);  // of squares: finite if they are, in double
  if (const Bf16* rounded = params.split_rounded()) {
    exec().bf16_square_sum(rounded, params.pieces(), sum.data());
  } else {
    exec().square_sum(params.values().data(), params.pieces(), sum.data());
  }
  double value = 0;
  sum.read(0, {&value, 1});
  return std::isfinite(value);
}

template <class T>
std::string LanguageModel<T>::hash() const {
  Checksum sum;
  std::vector<float> buffer;
  const auto add = [&](const Params<T>& params, const ParamSpec& spec) {
    sum.add(spec.name);
    for (int64_t s : spec.shape) sum.add(fmt::format("[{}]", s));
    const HostView<T> view = params.host_values(spec);
    if constexpr (std::is_same_v<T, float>) {
      sum.add(std::as_bytes(view.span()));
    } else {
      buffer.resize(view.span().size());
      std::transform(view.span().begin(), view.span().end(), buffer.begin(), [](T x) { return static_cast<float>(x); });
      sum.add(std::as_bytes(std::span<const float>(buffer)));
    }
  };
  for (const ParamSpec& spec : params().specs()) add(params(), spec);
  if (impl_->lora != nullptr) {
    sum.add(fmt::format("{}", impl_->adapters.lora.scale()));
    for (const ParamSpec& spec : trained().specs()) add(trained(), spec);
  }
  return fmt::format("{:016x}", sum.value());
}

template <class T>
void LanguageModel<T>::begin_step() {
  impl_->zero_grads();
  impl_->sums.zero();
}

template <class T>
StepSums* LanguageModel<T>::step_sums() {
  return impl_->sums.data();
}

template <class T>
StepSums LanguageModel<T>::read_sums() const {
  StepSums sums;
  impl_->sums.read(0, {&sums, 1});
  return sums;
}

template <class T>
void LanguageModel<T>::accumulate(std::span<const int32_t> ids, std::span<const int32_t> targets,
                                  const SeqLayout& layout, double grad_scale, ModelState<T>* state) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  m.check_targets(ids, targets);
  if (!trained().has_grads()) m.zero_grads();
  if (ids.empty()) return;
  m.engine->accumulate(ids, targets, layout, static_cast<T>(grad_scale), state, &m.sums.data()->loss);
}

template <class T>
LossSum LanguageModel<T>::forward_backward(std::span<const int32_t> ids, std::span<const int32_t> targets,
                                           const SeqLayout& layout, double grad_scale, ModelState<T>* state) {
  impl_->sums.zero();
  accumulate(ids, targets, layout, grad_scale, state);
  return read_sums().loss;
}

template <class T>
LossSum LanguageModel<T>::evaluate(std::span<const int32_t> ids, std::span<const int32_t> targets,
                                   const SeqLayout& layout, ModelState<T>* state, T* nll) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  m.check_targets(ids, targets);
  if (ids.empty()) return {};
  m.sums.zero();
  m.engine->evaluate(ids, targets, layout, state, nll, &m.sums.data()->loss);
  return read_sums().loss;
}

template <class T>
void LanguageModel<T>::forward_last(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<T>& state,
                                    Mat<T> logits) {
  Impl& m = *impl_;
  m.check(ids, layout, &state);
  if (logits.rows != layout.count() || logits.cols != m.config.vocab_size) {
    fail_usage("logits: expected [{}, {}], got [{}, {}]", layout.count(), m.config.vocab_size, logits.rows,
               logits.cols);
  }
  for (int64_t n = 0; n < layout.count(); ++n) {
    if (layout.length(n) < 1)
      fail_usage("layout: expected at least one token in every sequence, got none in sequence {}", n);
  }
  if (ids.empty()) return;
  m.engine->forward_last(ids, layout, state, logits);
}

template <class T>
void LanguageModel<T>::forward_all(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<T>* state,
                                   Mat<T> logits) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  if (logits.rows != layout.tokens() || logits.cols != m.config.vocab_size) {
    fail_usage("logits: expected [{}, {}], got [{}, {}]", layout.tokens(), m.config.vocab_size, logits.rows,
               logits.cols);
  }
  if (ids.empty()) return;
  m.engine->forward_all(ids, layout, state, logits);
}

template <class T>
void LanguageModel<T>::likeliest(std::span<const int32_t> ids, std::span<const int64_t> rows, const SeqLayout& layout,
                                 ModelState<T>* state, std::span<int32_t> likeliest) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  if (likeliest.size() != rows.size())
    fail_usage("likeliest: expected {} as there are rows, got {}", rows.size(), likeliest.size());
  int64_t before = -1;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] <= before || rows[i] >= layout.tokens()) {
      fail_usage("rows[{}]: expected a position above {} and below the layout's {} tokens, got {}", i, before,
                 layout.tokens(), rows[i]);
    }
    before = rows[i];
  }
  if (!ids.empty()) m.engine->likeliest(ids, rows, layout, state, likeliest.data());
}

template <class T>
std::unique_ptr<Decoder<T>> LanguageModel<T>::decoder(ModelState<T>& state) {
  impl_->check(state);
  return impl_->engine->decoder(state);
}

template <class T>
void LanguageModel<T>::require_drafts(int64_t drafts) const {
  if (drafts < 1 || drafts > kMostDrafts) fail_usage("drafts: expected 1 to {}, got {}", kMostDrafts, drafts);
  if (const int64_t ring = decode_ring().value_or(0); ring > 0)
    fail_usage("drafts: expected none with a decode ring of {} tokens, got {}", ring, drafts);
  impl_->engine->require_drafts(drafts);
}

template <class T>
std::unique_ptr<DraftDecoder<T>> LanguageModel<T>::draft_decoder(ModelState<T>& state, int64_t drafts) {
  impl_->check(state);
  require_drafts(drafts);
  return impl_->engine->draft_decoder(state, drafts);
}

template <class T>
std::vector<int64_t> LanguageModel<T>::take_expert_load() {
  return impl_->engine->take_expert_load();
}

template <class T>
size_t LanguageModel<T>::scratch_bytes() const {
  return impl_->engine->scratch_bytes();
}

template <class T>
Scratch LanguageModel<T>::planned_scratch() const {
  return impl_->engine->planned_scratch();
}

template <class T>
void LanguageModel<T>::reserve_scratch(Scratch bytes) {
  impl_->engine->reserve_scratch(bytes);
}

template class LanguageModel<float>;
template class LanguageModel<double>;

}  // namespace fw
