#include "model/network.h"

#include <fmt/format.h>

#include <span>
#include <type_traits>
#include <utility>

#include "nn/mixers.h"
#include "nn/observer.h"
#include "ops/new_matrix.h"

namespace fw {
namespace {

template <class T>
std::vector<Block<T>> make_blocks(const ModelConfig& c, Params<Wide<T>>& params) {
  for (ParamSpec& spec : shared_parameters(c)) params.declare(std::move(spec));
  std::vector<Block<T>> list;
  list.reserve(static_cast<size_t>(c.num_hidden_layers));
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const MixerSpec mixer = c.layer_spec(i);
    list.emplace_back(fmt::format("model.layers.{}.", i), c.mlp_spec(i), c.norm_spec(), c.norm_position(i),
                      static_cast<int64_t>(mixer_state(mixer).size()), params,
                      [&](const std::string& prefix) { return make_mixer<T>(mixer, prefix, params); });
  }
  return list;
}

}  // namespace

template <class T>
Network<T>::Network(const ModelConfig& c, Params<W>& params)
    : config_(c),
      params_(params),
      norm_(c.norm_spec()),
      embedding_("model.embeddings.weight", c.vocab_size, c.hidden_size, c.embedding_norm ? &norm_ : nullptr,
                 "model.embeddings_norm", params),
      blocks_(make_blocks<T>(c, params)),
      head_("model.norm", "lm_head.weight", c.tie_word_embeddings ? embedding_.index() : -1, c.vocab_size,
            c.hidden_size, norm_, params),
      contexts_(blocks_.size()) {}

template <class T>
void Network<T>::allocate(Device& device) {
  if (layers_with_experts() == 0) return;
  expert_load_ = Buffer<int64_t>(device, layers_with_experts() * config_.experts.num_experts);
  expert_load_.zero();
}

template <class T>
void Network<T>::refresh_parameters(const Exec<T>& exec) {
  params_.refresh_scales([&](const W* from, int64_t n, W* to) { exec.add_values(from, n, to); });
  const auto round = [&](Params<W>& params) {
    if (std::is_same_v<T, W> && exec.precision != Precision::kBf16) return;
    if (Bf16* to = params.old_rounded()) {
      const std::span<const W> values = std::as_const(params).values();
      exec.round_values(values.data(), static_cast<int64_t>(values.size()), to);
    }
  };
  round(params_);
  if (lora_ == nullptr) return;
  round(lora_->params());
  lora_->attach(params_);
}

template <class T>
void Network<T>::share_first_value(Pass<T>& pass, FirstValue<T>& value) const {
  if (config_.first_rwkv7() < 0) return;
  value.value = new_matrix<T>(pass.exec.arena, pass.layout.host.tokens(), config_.hidden_size);
  pass.first_value = &value;
}

// The pass as a layer takes it.
template <class T>
Pass<T> Network<T>::pass_of(const Pass<T>& pass, size_t layer) {
  const auto i = static_cast<int64_t>(layer);
  Pass<T> of = pass;
  of.recompute = pass.keep ? recompute_.of(i) : Recompute::kNone;
  of.recompute_exec = of.recompute != Recompute::kNone ? recompute_exec_ : nullptr;
  const int64_t expert_layer = i - config_.dense_layers();
  if (pass.keep && expert_layer >= 0) of.expert_load = expert_load_.data() + expert_layer * config_.experts.num_experts;
  return of;
}

template <class T>
Residual<T> Network<T>::forward(const Pass<T>& pass, const int32_t* ids, ModelState<W>* state) {
  Residual<T> residual;
  Arena& arena = pass.exec.arena;
  residual.x = new_matrix<T>(arena, pass.layout.host.tokens(), config_.hidden_size);
  if (!pass.keep) residual.delta = new_matrix<T>(arena, pass.layout.host.tokens(), config_.hidden_size);
  embedding_.forward(pass, ids, residual.x);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (pass.observer != nullptr) pass.observer->begin_layer(static_cast<int64_t>(i));
    blocks_[i].forward(pass_of(pass, i), residual,
                       state == nullptr ? LayerState<T>() : state->template layer<T>(static_cast<int64_t>(i)),
                       &contexts_[i]);
  }
  return residual;
}

template <class T>
void Network<T>::backward(const Pass<T>& pass, const int32_t* ids, Mat<T> dx) {
  for (size_t i = blocks_.size(); i-- > 0;) blocks_[i].backward(pass_of(pass, i), contexts_[i], dx);
  embedding_.backward(pass, ids, dx);
}

template <class T>
std::vector<int64_t> Network<T>::take_expert_load() {
  if (layers_with_experts() == 0) return {};
  std::vector<int64_t> load = expert_load_.to_vector();
  expert_load_.zero();
  return load;
}

template class Network<float>;
template class Network<double>;
template class Network<Bf16>;

}  // namespace fw
