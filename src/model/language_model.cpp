#include "model/language_model.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "nn/activations.h"
#include "nn/block.h"
#include "nn/head.h"
#include "nn/observer.h"
#include "nn/recurrence.h"
#include "ops/backend.h"

namespace fw {
namespace {

const ModelConfig& validated(const ModelConfig& config) {
  validate(config);
  return config;
}

}  // namespace

template <class T>
struct LanguageModel<T>::Impl {
  Impl(const ModelConfig& c, Device& device)
      : config(validated(c)),
        embedding("model.embeddings.weight", c.vocab_size, c.hidden_size, params),
        blocks(make_blocks(c, params)),
        head("model.norm.weight", "lm_head.weight", c.tie_word_embeddings ? embedding.index() : -1, c.vocab_size, c.hidden_size, c.norm_eps, params),
        sums(device, 1),
        arena(device, kArenaBlock),
        again_arena(device, kArenaBlock),
        exec{ops_of<T>(device), device, arena, contexts_arena},
        again{ops_of<T>(device), device, again_arena, contexts_arena},
        recurrences(device) {
    params.allocate(device);
    contexts.resize(blocks.size());
  }

  static std::vector<Block<T>> make_blocks(const ModelConfig& c, Params<T>& params) {
    for (ParamSpec& spec : shared_parameters(c)) params.declare(std::move(spec));
    std::vector<Block<T>> list;
    list.reserve(static_cast<size_t>(c.num_hidden_layers));
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      list.emplace_back(fmt::format("model.layers.{}.", i), MlpSpec{c.hidden_size, c.mlp_size(), c.init_scheme()}, c.norm_eps, params,
                        [&](const std::string& prefix) { return make_mixer(c.layer_spec(i), prefix, params); });
    }
    return list;
  }

  void check(std::span<const int32_t> ids, const SeqLayout& layout, const ModelState<T>* state) const {
    if (static_cast<int64_t>(ids.size()) != layout.tokens()) fail_usage("ids: expected {} tokens as the layout has, got {}", layout.tokens(), ids.size());
    for (size_t t = 0; t < ids.size(); ++t) {
      if (ids[t] < 0 || ids[t] >= config.vocab_size) fail_usage("ids[{}]: expected 0 <= id < vocab_size = {}, got {}", t, config.vocab_size, ids[t]);
    }
    if (state == nullptr) return;
    if (&state->device() != &exec.device) fail_usage("state: expected one in the memory of the model's device, got one of another");
    if (state->sequences() != layout.count()) fail_usage("state: expected {} sequences as the layout has, got {}", layout.count(), state->sequences());
    if (state->layers() != config.num_hidden_layers) fail_usage("state: expected {} layers, got {}", config.num_hidden_layers, state->layers());
  }

  void check_targets(std::span<const int32_t> ids, std::span<const int32_t> targets) const {
    if (targets.size() != ids.size()) fail_usage("targets: expected {} as there are ids, got {}", ids.size(), targets.size());
    for (size_t t = 0; t < targets.size(); ++t) {
      if (targets[t] >= config.vocab_size) fail_usage("targets[{}]: expected below vocab_size = {}, got {}", t, config.vocab_size, targets[t]);
    }
  }

  // Begins with an empty arena. One that is about to grow starts anew, so that memory is that of the largest pass and not the sum of
  // all sizes there were.
  Pass<T> begin(const SeqLayout& layout, const ModelState<T>* state, bool keep) {
    const int64_t extent = layout.tokens() * (keep ? config.num_hidden_layers : 1);
    if (extent > largest) {
      arena = Arena(exec.device, kArenaBlock);
      again_arena = Arena(exec.device, kArenaBlock);
      largest = extent;
    }
    arena.release();
    again_arena.release();
    contexts_arena.release();
    if (exec.precision == Precision::kBf16) round_operands();
    const int64_t* positions = state == nullptr ? nullptr : upload(std::span<const int64_t>(state->positions()));
    return Pass<T>{params,
                   PassLayout(layout, upload(std::span<const int64_t>(layout.offsets())), positions),
                   exec,
                   recurrences,
                   keep,
                   form,
                   observer,
                   keep ? recompute : Recompute::kNone,
                   keep && recompute != Recompute::kNone ? &again : nullptr};
  }

  void round_operands() {
    if (Bf16* to = params.old_rounded()) {
      const std::span<const T> values = std::as_const(params).values();
      exec.round_values(values.data(), static_cast<int64_t>(values.size()), to);
    }
  }

  // What the host knows of a pass goes to the device once.
  template <class Value>
  const Value* upload(std::span<const Value> values) {
    Value* to = arena.alloc<Value>(static_cast<int64_t>(values.size()));
    exec.device.from_host(to, values.data(), values.size_bytes());
    return to;
  }
  // Rows of the device's become rows of the caller's, which is host memory.
  void download(Mat<const T> from, Mat<T> to) {
    for (int64_t r = 0; r < from.rows; ++r) exec.device.to_host(to.row(r), from.row(r), sizeof(T) * static_cast<size_t>(from.cols));
  }

  // The residual stream after all blocks.
  Residual<T> run(const Pass<T>& pass, const int32_t* ids, ModelState<T>* state) {
    Residual<T> residual;
    residual.x = new_matrix<T>(arena, pass.layout.host.tokens(), config.hidden_size);
    if (!pass.keep) residual.delta = new_matrix<T>(arena, pass.layout.host.tokens(), config.hidden_size);
    embedding.forward(pass, ids, residual.x);
    if (state != nullptr) state->prepare(pass.layout.host);
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (observer != nullptr) observer->begin_layer(static_cast<int64_t>(i));
      blocks[i].forward(pass, residual, state == nullptr ? LayerState<T>() : state->layer(static_cast<int64_t>(i)), &contexts[i]);
    }
    return residual;
  }

  static constexpr size_t kArenaBlock = size_t{4} << 20;

  ModelConfig config;
  uint64_t tokenizer = 0;
  Params<T> params;
  Embedding<T> embedding;
  std::vector<Block<T>> blocks;
  Head<T> head;
  std::vector<typename Block<T>::Context> contexts;
  Buffer<StepSums> sums;
  Arena arena, contexts_arena;
  Arena again_arena;  // of what backward computes again
  int64_t largest = 0;
  Exec<T> exec, again;
  Recurrences<T> recurrences;
  fw_form form = FW_FORM_AUTO;
  Recompute recompute = Recompute::kNone;
  PassObserver<T>* observer = nullptr;
};

template <class T>
LanguageModel<T>::LanguageModel(const ModelConfig& config, Device& device) : impl_(std::make_unique<Impl>(config, device)) {}
template <class T>
LanguageModel<T>::~LanguageModel() = default;
template <class T>
LanguageModel<T>::LanguageModel(LanguageModel&&) noexcept = default;

template <class T>
const ModelConfig& LanguageModel<T>::config() const {
  return impl_->config;
}

template <class T>
void LanguageModel<T>::set_peer(const std::string& peer) {
  impl_->config.peer = peer;
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
const Exec<T>& LanguageModel<T>::exec() const {
  return impl_->exec;
}

template <class T>
Device& LanguageModel<T>::device() const {
  return impl_->exec.device;
}

template <class T>
void LanguageModel<T>::set_precision(Precision precision) {
  if (precision == Precision::kBf16 && std::is_same_v<T, double>) fail_usage("precision: bf16 matrix products need a float model, got double");
  impl_->exec.precision = precision;
  impl_->again.precision = precision;
}

template <class T>
void LanguageModel<T>::set_recompute(Recompute level) {
  if (level != impl_->recompute) impl_->largest = 0;  // the next pass begins with new memory
  impl_->recompute = level;
}

template <class T>
void LanguageModel<T>::set_form(fw_form form) {
  impl_->form = form;
}

template <class T>
void LanguageModel<T>::observe(PassObserver<T>* observer) {
  impl_->observer = observer;
}

template <class T>
std::string LanguageModel<T>::hash() const {
  Checksum sum;
  std::vector<float> buffer;
  for (const ParamSpec& spec : impl_->params.specs()) {
    sum.add(spec.name);
    for (int64_t s : spec.shape) sum.add(fmt::format("[{}]", s));
    const HostView<T> view = impl_->params.host_values(spec);
    if constexpr (std::is_same_v<T, float>) {
      sum.add(std::as_bytes(view.span()));
    } else {
      buffer.resize(view.span().size());
      std::transform(view.span().begin(), view.span().end(), buffer.begin(), [](T x) { return static_cast<float>(x); });
      sum.add(std::as_bytes(std::span<const float>(buffer)));
    }
  }
  return fmt::format("{:016x}", sum.value());
}

template <class T>
void LanguageModel<T>::begin_step() {
  impl_->params.zero_grads();
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
void LanguageModel<T>::accumulate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout, double grad_scale,
                                  ModelState<T>* state) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  m.check_targets(ids, targets);
  if (!m.params.has_grads()) m.params.zero_grads();
  if (ids.empty()) return;
  const Pass<T> pass = m.begin(layout, state, true);
  const int32_t* device_ids = m.upload(ids);
  const int32_t* device_targets = m.upload(targets);
  Residual<T> residual = m.run(pass, device_ids, state);
  const Mat<T> dx = new_matrix<T>(m.arena, layout.tokens(), m.config.hidden_size);
  const Arena::Mark mark = m.arena.mark();
  m.head.loss_backward(pass, residual, device_targets, static_cast<T>(grad_scale), dx, &m.sums.data()->loss);
  m.arena.rewind(mark);
  for (size_t i = m.blocks.size(); i-- > 0;) m.blocks[i].backward(pass, m.contexts[i], dx);
  m.embedding.backward(pass, device_ids, dx);
  if (state != nullptr) state->advance(layout);
}

template <class T>
LossSum LanguageModel<T>::forward_backward(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout, double grad_scale,
                                           ModelState<T>* state) {
  impl_->sums.zero();
  accumulate(ids, targets, layout, grad_scale, state);
  return read_sums().loss;
}

template <class T>
LossSum LanguageModel<T>::evaluate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout, ModelState<T>* state, T* nll) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  m.check_targets(ids, targets);
  if (ids.empty()) return {};
  const Pass<T> pass = m.begin(layout, state, false);
  const int32_t* device_targets = m.upload(targets);
  Residual<T> residual = m.run(pass, m.upload(ids), state);
  if (state != nullptr) state->advance(layout);
  m.sums.zero();
  T* device_nll = nll == nullptr ? nullptr : m.arena.template alloc<T>(layout.tokens());
  m.head.loss(pass, residual, device_targets, device_nll, &m.sums.data()->loss);
  if (nll != nullptr) m.exec.device.to_host(nll, device_nll, sizeof(T) * ids.size());
  return read_sums().loss;
}

template <class T>
void LanguageModel<T>::forward_last(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<T>& state, Mat<T> logits) {
  Impl& m = *impl_;
  m.check(ids, layout, &state);
  if (logits.rows != layout.count() || logits.cols != m.config.vocab_size) {
    fail_usage("logits: expected [{}, {}], got [{}, {}]", layout.count(), m.config.vocab_size, logits.rows, logits.cols);
  }
  for (int64_t n = 0; n < layout.count(); ++n) {
    if (layout.length(n) < 1) fail_usage("layout: expected at least one token in every sequence, got none in sequence {}", n);
  }
  if (ids.empty()) return;
  const Pass<T> pass = m.begin(layout, &state, false);
  const Residual<T> all = m.run(pass, m.upload(ids), &state);
  state.advance(layout);
  Residual<T> last;
  last.pending = all.pending;
  last.x = new_matrix<T>(m.arena, layout.count(), m.config.hidden_size);
  last.delta = new_matrix<T>(m.arena, layout.count(), m.config.hidden_size);
  m.exec.last_rows(all.x, pass.layout, last.x);
  m.exec.last_rows(all.delta, pass.layout, last.delta);
  const Mat<T> rows = new_matrix<T>(m.arena, logits.rows, logits.cols);
  m.head.logits(pass, last, rows);
  m.download(rows, logits);
}

template <class T>
void LanguageModel<T>::forward_all(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<T>* state, Mat<T> logits) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  if (logits.rows != layout.tokens() || logits.cols != m.config.vocab_size) {
    fail_usage("logits: expected [{}, {}], got [{}, {}]", layout.tokens(), m.config.vocab_size, logits.rows, logits.cols);
  }
  if (ids.empty()) return;
  const Pass<T> pass = m.begin(layout, state, false);
  Residual<T> residual = m.run(pass, m.upload(ids), state);
  if (state != nullptr) state->advance(layout);
  const Mat<T> rows = new_matrix<T>(m.arena, logits.rows, logits.cols);
  m.head.logits(pass, residual, rows);
  m.download(rows, logits);
}

template <class T>
size_t LanguageModel<T>::scratch_bytes() const {
  return impl_->arena.reserved_bytes() + impl_->again_arena.reserved_bytes();
}

template class LanguageModel<float>;
template class LanguageModel<double>;

}  // namespace fw
