#include "nn/rwkv7_mixer.h"

#include <new>

#include "nn/activations.h"
#include "nn/drafts.h"
#include "nn/observer.h"
#include "ops/backend.h"

namespace fw {
template <class T>
struct Rwkv7Mixer<T>::Context : MixerContext {
  Mat<T> shifted;                  // [T, 6 d], in the order of Mix
  Mat<T> k, v_own, value_in;       // [T, d]: keys and values as projected; the logit of the values' mix
  Mat<T> decay_in, rate_in, gate;  // [T, d]: logits of decay and rate; the gate
  Inner decay, value, rate, gate_inner;
  RecurrenceInputs<T> tokens;
  Mat<T> o, normed, gated;  // [T, d]
  Wide<T>* rstd = nullptr;  // [T, H]
  void* saved = nullptr;    // of the recurrence
  const T* tail = nullptr;  // before this pass
};

template <class T>
Rwkv7Mixer<T>::Rwkv7Mixer(const Rwkv7Spec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  decay_.rank = spec.decay_rank;
  decay_.map = FeatureMap::kTanh;
  value_.rank = spec.value_rank;
  rate_.rank = spec.rate_rank;
  gate_.rank = spec.gate_rank;
  gate_.sigmoid = true;
  for (ParamSpec& p : mixer_parameters(spec, prefix)) {
    const std::string name = p.name.substr(prefix.size());
    const int index = params.declare(std::move(p));
    const auto declare_low_rank = [&](const char* low_rank, LowRank& of) {
      const std::string factor = std::string(low_rank) + "_lora.lora.";
      if (name == factor + "0.weight") of.down = index;
      if (name == factor + "2.weight") of.up = index;
      if (name == factor + "2.bias") of.bias = index;
    };
    declare_low_rank("w", decay_);
    declare_low_rank("v", value_);
    declare_low_rank("a", rate_);
    declare_low_rank("g", gate_);
    if (name == "x_r") mix_ = index;
    if (name == "k_k") k_k_ = index;
    if (name == "k_a") k_a_ = index;
    if (name == "r_k") r_k_ = index;
    if (name == "r_proj.weight") r_ = index;
    if (name == "k_proj.weight") k_ = index;
    if (name == "v_proj.weight") v_ = index;
    if (name == "o_proj.weight") o_ = index;
    if (name == "g_norm.weight") norm_ = index;
    if (name == "g_norm.bias") norm_bias_ = index;
  }
}

template <class T>
const Recurrence<T>& Rwkv7Mixer<T>::planned(const Pass<T>& pass, const StepSlots& slots) const {
  RecurrenceShape shape = recurrence_of(spec_);
  shape.form = pass.form;
  shape.slots = slots;
  return pass.recurrences.of(shape, pass.layout.host);
}

template <class T>
Mat<T> Rwkv7Mixer<T>::mixed(const Context& c, Mix mix) const {
  return c.shifted.col_range(mix * spec_.hidden, spec_.hidden);
}

template <class T>
void Rwkv7Mixer<T>::shift(const Pass<T>& pass, Mat<const T> x, T* tail_out, Context& c) const {
  c.shifted = new_matrix<T>(pass.transient_exec().arena, x.rows, kMixes * spec_.hidden);
  pass.exec.token_shift_forward(x, pass.params.value(mix_), kMixes, pass.layout, c.tail, tail_out, c.shifted);
}

template <class T>
Mat<T> Rwkv7Mixer<T>::project(const Pass<T>& pass, int weight, Mat<const T> x) const {
  const Mat<T> y = new_matrix<T>(pass.exec.arena, x.rows, spec_.hidden);
  pass.exec.linear_forward(x, pass.params.weight(weight, spec_.hidden, spec_.hidden), nullptr, y, Write::kOverwrite);
  return y;
}

template <class T>
Mat<T> Rwkv7Mixer<T>::low_rank_forward(const Pass<T>& pass, const LowRank& p, Mat<const T> x, Inner& inner) const {
  const Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  inner.in = inner.out = new_matrix<T>(exec.arena, x.rows, p.rank);
  exec.linear_forward(x, params.weight(p.down, p.rank, spec_.hidden), nullptr, inner.in, Write::kOverwrite);
  if (p.map != FeatureMap::kNone) {
    inner.out = new_matrix<T>(exec.arena, x.rows, p.rank);
    exec.feature_map_forward(p.map, inner.in, inner.out);
  }
  if (p.sigmoid) exec.sigmoid_gate_forward(inner.in, nullptr, Wide<T>(1), inner.out);
  const Mat<T> y = new_matrix<T>(exec.arena, x.rows, spec_.hidden);
  exec.linear_forward(inner.out, params.weight(p.up, spec_.hidden, p.rank),
                      p.bias >= 0 ? params.value(p.bias) : nullptr, y, Write::kOverwrite);
  return y;
}

template <class T>
void Rwkv7Mixer<T>::low_rank_backward(const Pass<T>& pass, const LowRank& p, const Inner& inner, Mat<const T> dy,
                                      Mat<const T> x, Mat<T> dx, Write write) const {
  Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  const Mat<T> dinner = new_matrix<T>(exec.arena, x.rows, p.rank);
  exec.linear_backward(dy, inner.out, params.weight(p.up, spec_.hidden, p.rank), dinner,
                       params.grad_matrix(p.up, spec_.hidden, p.rank), p.bias >= 0 ? params.grad(p.bias) : nullptr,
                       Write::kOverwrite);
  if (p.map != FeatureMap::kNone) exec.feature_map_backward(p.map, dinner, inner.in, dinner);
  if (p.sigmoid) exec.sigmoid_gate_backward(dinner, inner.out, Wide<T>(1), dinner, nullptr);
  exec.linear_backward(dinner, x, params.weight(p.down, p.rank, spec_.hidden), dx,
                       params.grad_matrix(p.down, p.rank, spec_.hidden), nullptr, write);
}

template <class T>
MixerContext* Rwkv7Mixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  const Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = x.rows, H = spec_.heads(), K = spec_.dim, d = spec_.hidden,
                sequences = pass.layout.host.count();
  Context* kept = pass.keep ? new (exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;

  T* tail = step_tails(pass, x, state, 1);
  c.tail = pass.keep ? new_copy<T, T>(exec, tail, sequences * d) : tail;
  shift(pass, x, tail, c);
  c.tokens.q = project(pass, r_, mixed(c, kR));
  c.k = project(pass, k_, mixed(c, kK));
  c.v_own = project(pass, v_, mixed(c, kV));
  c.decay_in = low_rank_forward(pass, decay_, mixed(c, kW), c.decay);
  c.rate_in = low_rank_forward(pass, rate_, mixed(c, kA), c.rate);
  c.gate = low_rank_forward(pass, gate_, mixed(c, kG), c.gate_inner);
  if (spec_.first) {
    exec.copy_rows(c.v_own, pass.first_value->value);
    c.tokens.v = c.v_own;
  } else {
    c.value_in = low_rank_forward(pass, value_, mixed(c, kV), c.value);
    c.tokens.v = new_matrix<T>(arena, tokens, d);
    exec.mixed_value_forward(c.v_own, pass.first_value->value, c.value_in, c.tokens.v);
  }

  const Rwkv7Shape shape{K, spec_.key_eps};
  c.tokens.g = new_matrix<Wide<T>>(arena, tokens, d);
  c.tokens.k = new_matrix<T>(arena, tokens, d);
  c.tokens.erase_key = new_matrix<T>(arena, tokens, d);
  c.tokens.erase_write = new_matrix<T>(arena, tokens, d);
  exec.rwkv7_front_forward(shape, c.decay_in, c.rate_in, c.k, params.value(k_k_), params.value(k_a_), c.tokens.g,
                           c.tokens.erase_key, c.tokens.erase_write, c.tokens.k);
  Wide<T>* s = state.wide(0);
  const bool copy_state = pass.keep || pass.observer != nullptr;  // both want the state as it was before the pass
  c.tokens.s = copy_state ? new_copy<T, Wide<T>>(exec, s, sequences * H * K * K) : s;
  const Recurrence<T>& recurrence = planned(pass, state.slots(0));
  if (pass.keep && recurrence.saved_bytes() > 0)
    c.saved = arena.alloc<std::byte>(static_cast<int64_t>(recurrence.saved_bytes()));
  c.o = new_matrix<T>(arena, tokens, d);
  recurrence.forward(c.tokens, c.o, s, nullptr, c.saved, arena);
  if (pass.observer != nullptr)
    pass.observer->recurrence({Rwkv7Spec::rule(), pass.layout.host, H, H, K, K, c.tokens, c.o, Rwkv7Spec::kScale});

  c.normed = new_matrix<T>(arena, tokens, d);
  c.rstd = arena.alloc<Wide<T>>(tokens * H);
  exec.group_norm_forward(c.o, K, params.value(norm_), params.value(norm_bias_),
                          static_cast<Wide<T>>(static_cast<double>(K) * spec_.norm_eps), c.normed, c.rstd);
  c.gated = new_matrix<T>(arena, tokens, d);
  exec.bonus_gate_forward(c.normed, c.tokens.q, c.tokens.k, c.tokens.v, c.gate, params.value(r_k_), K, c.gated);
  if (y.data != nullptr) exec.linear_forward(c.gated, params.weight(o_, d, d), nullptr, y, Write::kOverwrite);
  return kept;
}

template <class T>
void Rwkv7Mixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                             Mat<T> dx) const {
  Context& c = *static_cast<Context*>(context);
  Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = dy.rows, K = spec_.dim, d = spec_.hidden;
  const auto rows = [&] { return new_matrix<T>(arena, tokens, d); };
  if (pass.recompute_exec != nullptr) shift(pass, x, nullptr, c);

  const Mat<T> dgated = rows(), dnormed = rows(), dgate = rows(), bonus_r = rows(), bonus_key = rows(),
               bonus_v = rows(), d_o = rows();
  exec.linear_backward(dy, c.gated, params.weight(o_, d, d), dgated, params.grad_matrix(o_, d, d), nullptr,
                       Write::kOverwrite);
  exec.bonus_gate_backward(dgated, c.normed, c.tokens.q, c.tokens.k, c.tokens.v, c.gate, params.value(r_k_), K, dnormed,
                           bonus_r, bonus_key, bonus_v, dgate, params.grad(r_k_));
  exec.group_norm_backward(dnormed, c.o, K, params.value(norm_), c.rstd, d_o, params.grad(norm_),
                           params.grad(norm_bias_), Write::kOverwrite);
  RecurrenceInputs<T> d_tokens;
  d_tokens.q = rows();
  d_tokens.k = rows();
  d_tokens.v = rows();
  d_tokens.g = new_matrix<Wide<T>>(arena, tokens, d);
  d_tokens.erase_key = rows();
  d_tokens.erase_write = rows();
  planned(pass).backward(c.tokens, d_o, d_tokens, c.saved, arena);
  exec.add_rows(bonus_r, d_tokens.q);
  exec.add_rows(bonus_key, d_tokens.k);
  exec.add_rows(bonus_v, d_tokens.v);

  const Mat<T> ddecay = rows(), drate = rows(), dk = rows(), dshifted = new_matrix<T>(arena, tokens, kMixes * d);
  const auto of = [&](Mix mix) { return dshifted.col_range(mix * d, d); };
  exec.rwkv7_front_backward(Rwkv7Shape{K, spec_.key_eps}, d_tokens.g, d_tokens.erase_key, d_tokens.erase_write,
                            d_tokens.k, c.decay_in, c.rate_in, c.k, params.value(k_k_), params.value(k_a_), ddecay,
                            drate, dk, params.grad(k_k_), params.grad(k_a_));
  if (spec_.first) {
    exec.add_rows(pass.first_value->d_value, d_tokens.v);
  } else {
    const Mat<T> dvalue_in = rows();
    exec.mixed_value_backward(d_tokens.v, c.v_own, pass.first_value->value, c.value_in, d_tokens.v,
                              pass.first_value->d_value, dvalue_in);
    low_rank_backward(pass, value_, c.value, dvalue_in, mixed(c, kV), of(kV), Write::kOverwrite);
  }
  const auto project_back = [&](int weight, Mat<const T> d_out, Mix mix, Write write) {
    exec.linear_backward(d_out, mixed(c, mix), params.weight(weight, d, d), of(mix), params.grad_matrix(weight, d, d),
                         nullptr, write);
  };
  project_back(r_, d_tokens.q, kR, Write::kOverwrite);
  project_back(k_, dk, kK, Write::kOverwrite);
  project_back(v_, d_tokens.v, kV, spec_.first ? Write::kOverwrite : Write::kAccumulate);
  low_rank_backward(pass, decay_, c.decay, ddecay, mixed(c, kW), of(kW), Write::kOverwrite);
  low_rank_backward(pass, rate_, c.rate, drate, mixed(c, kA), of(kA), Write::kOverwrite);
  low_rank_backward(pass, gate_, c.gate_inner, dgate, mixed(c, kG), of(kG), Write::kOverwrite);
  exec.token_shift_backward(dshifted, x, params.value(mix_), kMixes, pass.layout, c.tail, dx, params.grad(mix_));
}

template class Rwkv7Mixer<float>;
template class Rwkv7Mixer<double>;
template class Rwkv7Mixer<Bf16>;

}  // namespace fw
