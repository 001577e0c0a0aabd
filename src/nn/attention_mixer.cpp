#include "nn/attention_mixer.h"

#include <cmath>
#include <utility>

#include "nn/activations.h"
#include "nn/drafts.h"
#include "nn/norm.h"

namespace fw {
namespace {

constexpr int kKeyState = 0, kValueState = 1;  // indices of mixer_state()'s tensors

}  // namespace

template <class T>
struct AttentionMixer<T>::Context : MixerContext {
  // [T, columns()]: q | k | v | output gate. q and k before norms, without norms they are rotated in place; of the gate
  // its sigmoid
  Mat<T> proj;
  Mat<T> qk;                // [T, (H + HK) D]: q | k as attention takes them; columns of proj without norms
  Wide<T>* rstd = nullptr;  // [T, H], then [T, HK]
  Pages<T> past_k, past_v;
  Mat<T> o;          // [T, H D]
  Mat<T> gated;      // [T, H D], what the output projection takes: o times the gate, or o
  Mat<Wide<T>> lse;  // [T, H]
};

template <class T>
AttentionMixer<T>::AttentionMixer(const AttentionSpec& spec, const std::string& prefix, Params<Wide<T>>& params)
    : spec_(spec) {
  for (ParamSpec& p : mixer_parameters(spec, prefix)) {
    const std::string name = p.name.substr(prefix.size());
    const int index = params.declare(std::move(p));
    if (name == "q_proj.weight") stack_ = index;
    if (name == "q_proj.bias") bias_ = index;
    if (name == "q_norm.weight") q_norm_ = index;
    if (name == "k_norm.weight") k_norm_ = index;
    if (name == "o_proj.weight") o_proj_ = index;
  }
}

template <class T>
AttentionShape AttentionMixer<T>::shape() const {
  return {spec_.heads,
          spec_.kv_heads,
          spec_.head_dim,
          spec_.window,
          1.0 / std::sqrt(static_cast<double>(spec_.head_dim)),
          spec_.rope_theta,
          spec_.rotated};
}

// The rows of earlier passes, to be read in this one and in its backward: those of a ring are overwritten meanwhile,
// those of a cache stay where they are.
template <class T>
Pages<T> AttentionMixer<T>::before(const Pass<T>& pass, LayerState<T> state, int index) const {
  Pages<T> pages = state.pages(index);
  if (pass.keep && pages && spec_.window > 0) {
    pages.first = new_copy(pass.exec, std::as_const(pages.first), pass.layout.host.count() * pages.rows * pages.width);
  }
  return pages;
}

// q and k, the first columns of proj, become c.qk: memory of its own in passes that keep contexts.
template <class T>
void AttentionMixer<T>::qk_norm_forward(const Pass<T>& pass, Context& c) const {
  const int64_t tokens = c.proj.rows, queries = spec_.query_size(), keys = spec_.kv_size();
  c.qk = c.proj.col_range(0, queries + keys);
  if (!spec_.qk_norm) return;
  const Mat<T> raw = c.qk;
  if (pass.keep) c.qk = new_matrix<T>(pass.exec.arena, tokens, queries + keys);
  c.rstd = pass.exec.arena.template alloc<Wide<T>>(tokens * (spec_.heads + spec_.kv_heads));
  const Wide<T> eps = static_cast<Wide<T>>(spec_.qk_norm_eps);
  pass.exec.gated_rmsnorm_forward(raw.col_range(0, queries), Mat<const T>(), nullptr, pass.params.scale(q_norm_), eps,
                                  spec_.q_norm_size(), GateKind::kNone, c.qk.col_range(0, queries), c.rstd);
  pass.exec.gated_rmsnorm_forward(raw.col_range(queries, keys), Mat<const T>(), nullptr, pass.params.scale(k_norm_),
                                  eps, spec_.k_norm_size(), GateKind::kNone, c.qk.col_range(queries, keys),
                                  c.rstd + tokens * spec_.heads);
}

template <class T>
void AttentionMixer<T>::qk_norm_backward(const Pass<T>& pass, const Context& c, Mat<const T> dqk, Mat<T> draw) const {
  Params<Wide<T>>& params = pass.params;
  const int64_t queries = spec_.query_size(), keys = spec_.kv_size();
  pass.exec.gated_rmsnorm_backward(dqk.col_range(0, queries), c.proj.col_range(0, queries), Mat<const T>(), nullptr,
                                   params.scale(q_norm_), c.rstd, spec_.q_norm_size(), GateKind::kNone,
                                   draw.col_range(0, queries), Mat<T>(), params.grad(q_norm_));
  pass.exec.gated_rmsnorm_backward(dqk.col_range(queries, keys), c.proj.col_range(queries, keys), Mat<const T>(),
                                   nullptr, params.scale(k_norm_), c.rstd + dqk.rows * spec_.heads, spec_.k_norm_size(),
                                   GateKind::kNone, draw.col_range(queries, keys), Mat<T>(), params.grad(k_norm_));
}

template <class T>
MixerContext* AttentionMixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  const Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const int64_t tokens = x.rows, queries = spec_.query_size(), keys = spec_.kv_size(), D = spec_.head_dim;
  Context* kept = pass.keep ? new (pass.exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;
  c.proj = new_matrix<T>(arena, tokens, spec_.columns());
  project(pass, x, params.weight(stack_, spec_.columns(), spec_.hidden), bias_ >= 0 ? params.value(bias_) : nullptr,
          c.proj);

  const bool step = state && !pass.keep && pass.layout.host.single_tokens();
  AttentionShape shape = this->shape();
  if (step && spec_.qk_norm && !spec_.qk_norm_all_heads) {
    c.qk = c.proj.col_range(0, queries + keys);
    pass.exec.normed_rotary(c.qk.col_range(0, queries), c.qk.col_range(queries, keys), params.scale(q_norm_),
                            params.scale(k_norm_), static_cast<Wide<T>>(spec_.qk_norm_eps), shape, pass.layout);
    shape.rotated = 0;
  } else {
    qk_norm_forward(pass, c);
  }
  const Mat<T> q = c.qk.col_range(0, queries), k = c.qk.col_range(queries, keys),
               v = c.proj.col_range(queries + keys, keys);
  c.past_k = before(pass, state, kKeyState);
  c.past_v = before(pass, state, kValueState);
  c.o = new_matrix<T>(arena, tokens, queries);
  const Mat<T> gate = spec_.output_gate ? c.proj.col_range(spec_.gate_begin(), queries) : Mat<T>();
  const bool drafts = step && state.has_drafts(kKeyState), gated_step = step && spec_.output_gate && !drafts;
  if (gated_step) {
    pass.exec.gated_attention_step(q, k, v, gate, shape, pass.layout, c.past_k, c.past_v, c.o);
  } else if (step) {
    attend_step(pass, q, k, Mat<const T>(v), shape, c.past_k, c.past_v, drafts, c.o);
  } else {
    c.lse = new_matrix<Wide<T>>(arena, tokens, spec_.heads);
    if (shape.turns()) pass.exec.rotary(c.qk, D, shape.rotated, shape.theta, pass.layout, Rotation::kForward);
    pass.exec.attention_forward(q, k, v, shape, pass.layout, c.past_k, c.past_v, c.o, c.lse);
    if (state) {
      pass.exec.store_rows(k, pass.layout, state.pages(kKeyState));
      pass.exec.store_rows(v, pass.layout, state.pages(kValueState));
    }
  }
  c.gated = c.o;
  if (spec_.output_gate && !gated_step) {
    pass.exec.sigmoid_gate_forward(gate, nullptr, Wide<T>(1), gate);
    c.gated = new_matrix<T>(arena, tokens, queries);
    pass.exec.product_forward(c.o, gate, c.gated);
  }
  if (y.data != nullptr) last_product(pass, Mat<const T>(c.gated), params.weight(o_proj_, spec_.hidden, queries), y);
  return kept;
}

template <class T>
void AttentionMixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                                 Mat<T> dx) const {
  const Context& c = *static_cast<Context*>(context);
  Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const int64_t tokens = dy.rows, queries = spec_.query_size(), keys = spec_.kv_size();
  const Mat<T> d_o = new_matrix<T>(arena, tokens, queries);
  pass.exec.linear_backward(dy, c.gated, params.weight(o_proj_, spec_.hidden, queries), d_o,
                            params.grad_matrix(o_proj_, spec_.hidden, queries), nullptr, Write::kOverwrite);
  const Mat<T> dproj = new_matrix<T>(arena, tokens, spec_.columns());
  if (spec_.output_gate) {
    const Mat<T> gate = c.proj.col_range(spec_.gate_begin(), queries),
                 dgate = dproj.col_range(spec_.gate_begin(), queries);
    pass.exec.product_backward(d_o, c.o, gate, d_o, dgate);
    pass.exec.sigmoid_gate_backward(dgate, gate, Wide<T>(1), dgate, nullptr);
  }
  const Mat<T> draw = dproj.col_range(0, queries + keys);
  const Mat<T> dqk = spec_.qk_norm ? new_matrix<T>(arena, tokens, queries + keys) : draw;
  pass.exec.attention_backward(d_o, c.qk.col_range(0, queries), c.qk.col_range(queries, keys),
                               c.proj.col_range(queries + keys, keys), shape(), pass.layout, c.past_k, c.past_v, c.o,
                               c.lse, dqk.col_range(0, queries), dqk.col_range(queries, keys),
                               dproj.col_range(queries + keys, keys));
  if (spec_.qk_norm) qk_norm_backward(pass, c, dqk, draw);
  pass.exec.linear_backward(dproj, x, params.weight(stack_, spec_.columns(), spec_.hidden), dx,
                            params.grad_matrix(stack_, spec_.columns(), spec_.hidden),
                            bias_ >= 0 ? params.grad(bias_) : nullptr, Write::kOverwrite);
}

template class AttentionMixer<float>;
template class AttentionMixer<double>;
template class AttentionMixer<Bf16>;

}  // namespace fw
