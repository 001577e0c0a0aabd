#include "model/language_model.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "nn/activations.h"
#include "nn/block.h"
#include "nn/head.h"
#include "nn/observer.h"

namespace fw {
namespace {

const ModelConfig& validated(const ModelConfig& config) {
  validate(config);
  return config;
}

template <class T>
const int64_t* positions_of(const ModelState<T>* state) {
  return state == nullptr ? nullptr : state->positions().data();
}

}  // namespace

template <class T>
struct LanguageModel<T>::Impl {
  explicit Impl(const ModelConfig& c)
      : config(validated(c)),
        embedding("model.embeddings.weight", c.vocab_size, c.hidden_size, params),
        blocks(make_blocks(c, params)),
        head("model.norm.weight", "lm_head.weight", c.tie_word_embeddings ? embedding.index() : -1, c.vocab_size, c.hidden_size, c.norm_eps, params) {
    params.allocate();
    contexts.resize(blocks.size());
  }

  static std::vector<Block<T>> make_blocks(const ModelConfig& c, Params<T>& params) {
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
    if (state->sequences() != layout.count()) fail_usage("state: expected {} sequences as the layout has, got {}", layout.count(), state->sequences());
    if (state->layers() != config.num_hidden_layers) fail_usage("state: expected {} layers, got {}", config.num_hidden_layers, state->layers());
  }

  void check_targets(std::span<const int32_t> ids, std::span<const int32_t> targets) const {
    if (targets.size() != ids.size()) fail_usage("targets: expected {} as there are ids, got {}", ids.size(), targets.size());
    for (size_t t = 0; t < targets.size(); ++t) {
      if (targets[t] >= config.vocab_size) fail_usage("targets[{}]: expected below vocab_size = {}, got {}", t, config.vocab_size, targets[t]);
    }
  }

  // An empty arena. One that is about to grow starts anew, so that memory is that of the largest pass and not the sum of
  // all sizes there were.
  Pass<T> begin(const PassLayout& layout, bool keep) {
    const int64_t extent = layout.host.tokens() * (keep ? config.num_hidden_layers : 1);
    if (extent > largest) {
      arena = Arena(kArenaBlock);
      largest = extent;
    }
    arena.release();
    return Pass<T>{params, layout, exec, keep, form, observer};
  }

  // The residual stream after all blocks.
  Residual<T> run(const Pass<T>& pass, std::span<const int32_t> ids, ModelState<T>* state) {
    Residual<T> residual;
    residual.x = new_matrix<T>(arena, pass.layout.host.tokens(), config.hidden_size);
    if (!pass.keep) residual.delta = new_matrix<T>(arena, pass.layout.host.tokens(), config.hidden_size);
    embedding.forward(pass, ids.data(), residual.x);
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
  Arena arena{kArenaBlock};
  int64_t largest = 0;
  Exec<T> exec{host_ops<T>(), arena};
  fw_form form = FW_FORM_AUTO;
  PassObserver<T>* observer = nullptr;
};

template <class T>
LanguageModel<T>::LanguageModel(const ModelConfig& config) : impl_(std::make_unique<Impl>(config)) {}
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
void LanguageModel<T>::set_precision(Precision precision) {
  if (precision == Precision::kBf16 && std::is_same_v<T, double>) fail_usage("precision: bf16 matrix products need a float model, got double");
  impl_->exec.precision = precision;
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
    const T* values = impl_->params.values().data() + spec.offset;
    if constexpr (std::is_same_v<T, float>) {
      sum.add(std::as_bytes(std::span(values, static_cast<size_t>(spec.size()))));
    } else {
      buffer.resize(static_cast<size_t>(spec.size()));
      std::transform(values, values + spec.size(), buffer.begin(), [](T x) { return static_cast<float>(x); });
      sum.add(std::as_bytes(std::span<const float>(buffer)));
    }
  }
  return fmt::format("{:016x}", sum.value());
}

template <class T>
LossSum LanguageModel<T>::forward_backward(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout, double grad_scale,
                                           ModelState<T>* state) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  m.check_targets(ids, targets);
  if (!m.params.has_grads()) m.params.zero_grads();
  if (ids.empty()) return {};
  const PassLayout pass_layout(layout, positions_of(state));
  const Pass<T> pass = m.begin(pass_layout, true);
  Residual<T> residual = m.run(pass, ids, state);
  const Mat<T> dx = new_matrix<T>(m.arena, layout.tokens(), m.config.hidden_size);
  const Arena::Mark mark = m.arena.mark();
  LossSum sum;
  m.head.loss_backward(pass, residual, targets.data(), static_cast<T>(grad_scale), dx, &sum);
  m.arena.rewind(mark);
  for (size_t i = m.blocks.size(); i-- > 0;) m.blocks[i].backward(pass, m.contexts[i], dx);
  m.embedding.backward(pass, ids.data(), dx);
  if (state != nullptr) state->advance(layout);
  return sum;
}

template <class T>
LossSum LanguageModel<T>::evaluate(std::span<const int32_t> ids, std::span<const int32_t> targets, const SeqLayout& layout, ModelState<T>* state, T* nll) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  m.check_targets(ids, targets);
  if (ids.empty()) return {};
  const PassLayout pass_layout(layout, positions_of(state));
  const Pass<T> pass = m.begin(pass_layout, false);
  Residual<T> residual = m.run(pass, ids, state);
  if (state != nullptr) state->advance(layout);
  LossSum sum;
  m.head.loss(pass, residual, targets.data(), nll, &sum);
  return sum;
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
  const PassLayout pass_layout(layout, state.positions().data());
  const Pass<T> pass = m.begin(pass_layout, false);
  const Residual<T> all = m.run(pass, ids, &state);
  state.advance(layout);
  Residual<T> last;
  last.pending = all.pending;
  last.x = new_matrix<T>(m.arena, layout.count(), m.config.hidden_size);
  last.delta = new_matrix<T>(m.arena, layout.count(), m.config.hidden_size);
  m.exec.last_rows(all.x, pass.layout, last.x);
  m.exec.last_rows(all.delta, pass.layout, last.delta);
  m.head.logits(pass, last, logits);
}

template <class T>
void LanguageModel<T>::forward_all(std::span<const int32_t> ids, const SeqLayout& layout, ModelState<T>* state, Mat<T> logits) {
  Impl& m = *impl_;
  m.check(ids, layout, state);
  if (logits.rows != layout.tokens() || logits.cols != m.config.vocab_size) {
    fail_usage("logits: expected [{}, {}], got [{}, {}]", layout.tokens(), m.config.vocab_size, logits.rows, logits.cols);
  }
  if (ids.empty()) return;
  const PassLayout pass_layout(layout, positions_of(state));
  const Pass<T> pass = m.begin(pass_layout, false);
  Residual<T> residual = m.run(pass, ids, state);
  if (state != nullptr) state->advance(layout);
  m.head.logits(pass, residual, logits);
}

template <class T>
size_t LanguageModel<T>::scratch_bytes() const {
  return impl_->arena.reserved_bytes();
}

template class LanguageModel<float>;
template class LanguageModel<double>;

}  // namespace fw
