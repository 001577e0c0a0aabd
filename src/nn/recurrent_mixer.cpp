#include "nn/recurrent_mixer.h"

#include <type_traits>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "nn/activations.h"
#include "nn/drafts.h"
#include "nn/norm.h"
#include "nn/observer.h"
#include "nn/recurrence.h"
#include "ops/backend.h"
#include "rule/token_scalars.h"

namespace fw {
namespace {

template <class T>
constexpr T kLogSigmoidDivisor = T(16);  // as gated linear attention has it: a gate of 1/2 forgets 4% a token

}  // namespace

// What backward needs. Columns of `proj` hold the raw projections, except that the sigmoid gates replace theirs.
template <class T>
struct RecurrentMixer<T>::Context : MixerContext {
  Mat<T> proj;  // [T, plan.columns]
  Mat<T> qkv;   // [T, conv_channels()] after the convolution, or the same columns of proj
  typename QueryKey<T>::Context query_key;
  Mat<T> decay_in;  // the decay's projection before its gate: columns of proj, or the low-rank product
  typename GainGate<T>::Context gain;
  Mat<T> erase_norm;              // [T, H K]: n of an erase-write vector
  Wide<T>* erase_rstd = nullptr;  // [T, H]
  Mat<T> gate;                    // output gate before its activation: columns of proj, or the low-rank product
  // the way out is a product that norms: the gate has its bias, which the norm adds otherwise
  bool few = false;
  Gates inside;  // gates_inside()
  RecurrenceInputs<T> tokens;
  Mat<T> o, normed;         // [T, HV V]: the recurrence's output; normalised and gated
  Wide<T>* rstd = nullptr;  // [T, HV], or [T] of the whole width
  void* saved = nullptr;    // of the recurrence
  const T* tail = nullptr;  // [N, W-1, channels] before this pass
};

template <class T>
RecurrentMixer<T>::RecurrentMixer(const RecurrentMixerSpec& spec, const std::string& prefix, Params<Wide<T>>& params)
    : spec_(spec), projections_(spec) {
  std::unordered_map<std::string, int> index;
  for (ParamSpec& p : mixer_parameters(spec, prefix)) {
    const std::string name = p.name.substr(prefix.size());
    index[name] = params.declare(std::move(p));
  }
  const auto find = [&](const char* name) {
    const auto it = index.find(name);
    return it == index.end() ? -1 : it->second;
  };
  index_.stack = find("q_proj.weight");
  index_.conv = find("q_conv1d.weight");
  index_.decay_up = find("f_proj.1.weight");
  index_.decay_bias = find(spec.decay_rank > 0 ? "f_proj.1.bias" : "f_proj.bias");
  index_.gate_up = find("g_proj.1.weight");
  index_.gate_bias = find("g_proj.1.bias");
  index_.a_log = find("A_log");
  index_.dt_bias = find("dt_bias");
  index_.lambda_bias = find("l_bias");
  index_.inner_decay = find("decay");
  index_.gain = find("gain");
  index_.correction = find("D");
  index_.erase_norm = find("e_norm.weight");
  index_.atk_a_log = find("A_log_atk");
  index_.atk_dt_bias = find("dt_bias_atk");
  index_.atk_center = find("log_atk_scale");
  index_.o_norm = find("o_norm.weight");
  index_.o_proj = find("o_proj.weight");
  if (spec.bounded_layer >= 0) index_.bounds = params.find(kDecayBounds);
  const std::vector<StateTensor> tensors = mixer_state(spec);
  for (size_t i = 0; i < tensors.size(); ++i) {
    int& member = tensors[i].name == "s" ? state_.s : tensors[i].name == "a" ? state_.a : state_.tail;
    member = static_cast<int>(i);
  }
  gain_ = std::make_unique<GainGate<T>>(spec.gain, spec.v_heads,
                                        spec.gain_doubles() ? static_cast<Wide<T>>(spec.rule.gain_bound) : Wide<T>(1),
                                        index_.gain);
  query_key_ = std::make_unique<QueryKey<T>>(spec.query_key, find("feature_map_q.layer1.weight"),
                                             find("feature_map_k.layer1.weight"));
}

namespace {

template <class T>
Mat<T> columns(Mat<T> stack, const Projection& p) {
  return p.used() ? stack.col_range(p.begin, p.size) : Mat<T>();
}

}  // namespace

// k's own precision inside its norm, as the recurrence's L2 norm has it.
template <class T>
constexpr T kEraseNormEps = T(1e-6);

template <class T>
void RecurrentMixer<T>::erase_write_forward(const Pass<T>& pass, Context& c) const {
  Arena& arena = pass.exec.arena;
  const Mat<T> gate = columns(c.proj, projections_.erase_write);
  c.erase_norm = new_matrix<T>(arena, c.proj.rows, spec_.key_size());
  c.erase_rstd = arena.alloc<Wide<T>>(c.proj.rows * spec_.heads);
  pass.exec.gated_rmsnorm_forward(c.tokens.k, Mat<T>(), nullptr, pass.params.value(index_.erase_norm),
                                  kEraseNormEps<Wide<T>>, spec_.key_dim, GateKind::kNone, c.erase_norm, c.erase_rstd);
  pass.exec.sigmoid_gate_forward(gate, nullptr, Wide<T>(1), gate);
  c.tokens.erase_write = new_matrix<T>(arena, c.proj.rows, spec_.key_size());
  pass.exec.product_forward(c.erase_norm, gate, c.tokens.erase_write);
  if (spec_.rule.uses_erase_key()) c.tokens.erase_key = c.erase_norm;
}

// dgate: the gate's columns of the projections' gradient. d.k takes what reaches k through its norm.
template <class T>
void RecurrentMixer<T>::erase_write_backward(const Pass<T>& pass, const Context& c, Mat<T> dgate,
                                             const RecurrenceInputs<T>& d) const {
  const Mat<T> gate = columns(c.proj, projections_.erase_write), dnorm = d.erase_write;
  pass.exec.product_backward(d.erase_write, c.erase_norm, gate, dnorm, dgate);
  pass.exec.sigmoid_gate_backward(dgate, gate, Wide<T>(1), dgate, nullptr);
  if (spec_.rule.uses_erase_key()) pass.exec.group_mean_backward(d.erase_key, dnorm);  // means of one: adds
  const Mat<T> dk = new_matrix<T>(pass.exec.arena, dnorm.rows, dnorm.cols);
  pass.exec.gated_rmsnorm_backward(dnorm, c.tokens.k, Mat<T>(), nullptr, pass.params.value(index_.erase_norm),
                                   c.erase_rstd, spec_.key_dim, GateKind::kNone, dk, Mat<T>(),
                                   pass.params.grad(index_.erase_norm));
  pass.exec.group_mean_backward(dk, d.k);
}

template <class T>
Gates RecurrentMixer<T>::gates_inside(const Pass<T>& pass) const {
  Gates gates;
  if constexpr (!std::is_same_v<T, Bf16>) return gates;
  const Rule& rule = spec_.rule;
  const bool inside = pass.observer == nullptr && pass.form != FW_FORM_DECODE && projections_.decay.used() &&
                      !rule.uses_precond() && rule.gain_bound <= 1 && !rule.uses_erase_write() &&
                      rule.erase == rule.write && spec_.bounded_layer < 0;
  // Training: what prepare and gradients take as it is.
  const bool trains = pass.keep && rule.decay == Decay::kChannel && rule.is_delta() &&
                      (rule.erase == Gate::kTied || rule.erase == Gate::kChannel) && !rule.uses_erase_key() &&
                      spec_.decay_heads() == spec_.v_heads && spec_.key_dim % 8 == 0 && spec_.key_dim <= 128 &&
                      spec_.key_dim > (rule.erase == Gate::kChannel ? 64 : 0) && spec_.value_dim % 8 == 0;
  // A token of each of few sequences: the step makes them with the token, and two kernels less stand in its way. Of
  // many the two are faster, since each block of a head's would make them (measured).
  const bool decodes = !pass.keep && pass.layout.host.count() <= row_limits(pass.exec.device).decode &&
                       pass.layout.host.single_tokens() && rule.erase != Gate::kAveraged && !spec_.derives_erase_gate();
  const bool takes = inside && (trains || decodes);
  if (!takes) return gates;
  gates.g = spec_.log_sigmoid_decay ? GateActivation::kLogSigmoid : GateActivation::kSoftplus;
  gates.divisor = kLogSigmoidDivisor<double>;
  if (projections_.erase.used()) gates.erase_gate = GateActivation::kSigmoid;
  if (projections_.write.used()) gates.write_gate = GateActivation::kSigmoid;
  return gates;
}

// Activations of the gates: sigmoids in place in proj, log-decays beside it (backward needs their arguments); those
// that the recurrence makes itself stay as they were projected.
template <class T>
void RecurrentMixer<T>::gates_forward(const Pass<T>& pass, Context& c) const {
  const Params<Wide<T>>& params = pass.params;
  const auto sigmoid = [&](const Projection& p, Wide<T> scale, const Wide<T>* bias) {
    const Mat<T> m = columns(c.proj, p);
    if (m.data != nullptr) pass.exec.sigmoid_gate_forward(m, bias, scale, m);
    return m;
  };
  const Wide<T> bound = static_cast<Wide<T>>(spec_.rule.gain_bound);
  if (spec_.rule.uses_beta())
    c.tokens.beta = gain_->forward(pass, columns(c.proj, projections_.beta), c.proj.rows, c.gain);
  if (any_logits(c.inside)) {
    c.tokens.erase_gate = columns(c.proj, projections_.erase);
    c.tokens.write_gate = columns(c.proj, projections_.write);
  } else if (projections_.erase.used() && projections_.write.used() && !spec_.erase_doubles() &&
             projections_.erase.begin + projections_.erase.size == projections_.write.begin) {
    // Side by side with one scale: one kernel, as a decoded token counts them.
    sigmoid({"b_proj, w_proj", projections_.erase.begin, projections_.erase.size + projections_.write.size}, Wide<T>(1),
            nullptr);
    c.tokens.erase_gate = columns(c.proj, projections_.erase);
    c.tokens.write_gate = columns(c.proj, projections_.write);
  } else {
    c.tokens.erase_gate = sigmoid(projections_.erase, spec_.erase_doubles() ? bound : Wide<T>(1), nullptr);
    c.tokens.write_gate = sigmoid(projections_.write, Wide<T>(1), nullptr);
  }
  // The other numbers: sigmoids of their projections, where they have one.
  for_all_scalars<Numbers::kExceptBeta>(
      [&](Mat<T>& to, const Projection& p) {
        to = sigmoid(p, Wide<T>(1), biased(p) ? params.value(index_.lambda_bias) : nullptr);
      },
      c.tokens, projections_);
  if (spec_.derives_erase_gate()) {
    c.tokens.erase_gate = new_matrix<T>(pass.exec.arena, c.proj.rows, spec_.v_heads);
    pass.exec.head_scale_forward(c.tokens.beta, params.value(index_.inner_decay), spec_.v_heads / spec_.heads,
                                 c.tokens.erase_gate);
  }
  if (spec_.makes_erase_write()) erase_write_forward(pass, c);
  if (spec_.scales_erase_key()) {
    c.tokens.erase_key = new_matrix<T>(pass.exec.arena, c.proj.rows, spec_.key_size());
    pass.exec.head_scale_forward(c.tokens.k, params.value(index_.inner_decay), spec_.key_dim, c.tokens.erase_key);
  }
  if (spec_.rule.uses_read_correction()) {
    c.tokens.read_correction = new_matrix<T>(pass.exec.arena, c.proj.rows, spec_.v_heads);
    pass.exec.head_constant_forward(params.value(index_.correction), spec_.v_heads / spec_.heads,
                                    c.tokens.read_correction);
  }
  ranks_forward(pass, c);
  if (projections_.decay.used()) {
    const int64_t group = spec_.rule.decay == Decay::kChannel ? spec_.key_dim : 1;
    if (!any_logits(c.inside)) c.tokens.g = new_matrix<Wide<T>>(pass.exec.arena, c.proj.rows, c.decay_in.cols);
    if (any_logits(c.inside)) {
      c.tokens.g_logits = c.decay_in;
      // inputs, only read
      if (!spec_.log_sigmoid_decay) c.tokens.a_log = const_cast<Wide<T>*>(params.value(index_.a_log));
      c.tokens.dt_bias = const_cast<Wide<T>*>(params.value(decay_offset()));
    } else if (spec_.bounded_layer >= 0) {
      pass.exec.bounded_decay_forward(c.decay_in, params.rows(index_.bounds), spec_.bounded_layer, c.tokens.g);
    } else if (spec_.log_sigmoid_decay) {
      pass.exec.log_sigmoid_decay_forward(c.decay_in, params.value(index_.decay_bias),
                                          Wide<T>(1) / kLogSigmoidDivisor<Wide<T>>, c.tokens.g);
    } else {
      pass.exec.decay_gate_forward(c.decay_in, params.value(index_.a_log), params.value(index_.dt_bias), group,
                                   c.tokens.g);
    }
  }
  if (spec_.rule.uses_g() && spec_.gain.single_gate) {
    c.tokens.g = new_matrix<Wide<T>>(pass.exec.arena, c.proj.rows, spec_.v_heads);
    gain_->log_decay(pass, c.gain, c.tokens.g);
  }
  if (spec_.rule.uses_precond() && index_.atk_center >= 0) {
    if (spec_.exp_precond_center) {
      Arena& arena = pass.exec.arena;
      c.tokens.precond_center = arena.alloc<Wide<T>>(spec_.heads);
      pass.exec.exp_values_forward(params.value(index_.atk_center), spec_.heads, c.tokens.precond_center);
    } else {
      c.tokens.precond_center = const_cast<Wide<T>*>(params.value(index_.atk_center));  // an input, only read
    }
  }
  if (spec_.rule.uses_precond() && spec_.tied_precond) {
    c.tokens.precond_g = new_matrix<Wide<T>>(pass.exec.arena, c.proj.rows, spec_.heads);
    c.tokens.precond_beta = new_matrix<T>(pass.exec.arena, c.proj.rows, spec_.heads);
    wide_exec(pass.exec).group_mean_forward(c.tokens.g, c.tokens.precond_g);
    pass.exec.group_mean_forward(c.tokens.beta, c.tokens.precond_beta);
  }
  if (projections_.precond_decay.used()) {
    c.tokens.precond_g = new_matrix<Wide<T>>(pass.exec.arena, c.proj.rows, spec_.heads);
    pass.exec.decay_gate_forward(columns(c.proj, projections_.precond_decay), params.value(index_.atk_a_log),
                                 params.value(index_.atk_dt_bias), 1, c.tokens.precond_g);
    c.tokens.precond_beta = sigmoid(projections_.precond_beta, Wide<T>(1), nullptr);
  }
}

// The decay's projection and the gate's, each where it has one, or its columns of proj.
template <class T>
void RecurrentMixer<T>::ranks_forward(const Pass<T>& pass, Context& c) const {
  const auto part = [&](Mat<T>& to, const Projection& low, int64_t cols, int64_t rank, int up, const Wide<T>* bias) {
    to = new_matrix<T>(pass.exec.arena, c.proj.rows, cols);
    return LinearPart<T>{columns(c.proj, low), pass.params.weight(up, cols, rank), bias, to};
  };
  std::vector<LinearPart<T>> parts;
  if (projections_.decay.used()) {
    if (index_.decay_up >= 0) {
      parts.push_back(part(c.decay_in, projections_.decay, spec_.decay_heads() * spec_.key_dim, spec_.decay_rank,
                           index_.decay_up, nullptr));
    } else {
      c.decay_in = columns(c.proj, projections_.decay);
    }
  }
  if (projections_.gate.used()) {
    if (index_.gate_up >= 0) {
      parts.push_back(part(c.gate, projections_.gate, spec_.value_size(), spec_.gate_rank, index_.gate_up,
                           c.few ? gate_bias(pass) : nullptr));
    } else {
      c.gate = columns(c.proj, projections_.gate);
    }
  }
  if (parts.size() == 2) return pass.exec.linear_pair_forward(parts[0], parts[1]);
  for (const LinearPart<T>& of : parts) pass.exec.linear_forward(of.x, of.weight, of.bias, of.y, Write::kOverwrite);
}

template <class T>
const Recurrence<T>& RecurrentMixer<T>::planned(const Pass<T>& pass, const Gates& gates, const StepRing& ring,
                                                const StepSlots& slots) const {
  RecurrenceShape shape = recurrence_of(spec_);
  shape.form = pass.form;
  shape.ring = ring;
  shape.slots = slots;
  shape.v_first = pass.exec.device.kind() == FW_DEVICE_CUDA;
  shape.gates = gates;
  return pass.recurrences.of(shape, pass.layout.host);
}

// q, k and v as the gates and the recurrence take them: after the convolution, which leaves its last inputs in `tail`
// (null: nowhere), and what query and key pass after it.
template <class T>
void RecurrentMixer<T>::tokens_forward(const Pass<T>& pass, Context& c, T* tail) const {
  c.qkv = c.proj.col_range(0, spec_.conv_channels());
  if (spec_.conv_size > 0) {
    const Mat<T> raw = c.qkv;
    c.qkv = new_matrix<T>(pass.exec.arena, raw.rows, spec_.conv_channels());
    pass.exec.short_conv_forward(raw, pass.params.value(index_.conv), nullptr, spec_.conv_size, pass.layout, c.tail,
                                 tail, c.qkv);
  }
  c.tokens.q = c.qkv.col_range(0, spec_.key_size());
  if (spec_.rule.uses_k()) c.tokens.k = c.qkv.col_range(spec_.key_size(), spec_.key_size());
  c.tokens.v = c.qkv.col_range(spec_.value_begin(), spec_.value_size());
  query_key_->forward(pass, c.tokens.q, c.tokens.k, c.query_key);
}

template <class T>
void RecurrentMixer<T>::correct_read(const Pass<T>& pass, Context& c) const {
  if (!spec_.raw_read_correction) return;
  pass.exec.head_subtract_forward(spec_.rule.uses_erase_key() ? c.tokens.erase_key : c.tokens.k,
                                  pass.params.value(index_.correction), spec_.key_dim, c.tokens.q);
}

template <class T>
const Wide<T>* RecurrentMixer<T>::gate_bias(const Pass<T>& pass) const {
  return index_.gate_bias >= 0 ? pass.params.value(index_.gate_bias) : nullptr;
}

template <class T>
void RecurrentMixer<T>::output_norm(const Pass<T>& pass, Context& c) const {
  pass.exec.gated_rmsnorm_forward(c.o, c.gate, gate_bias(pass), pass.params.value(index_.o_norm),
                                  static_cast<Wide<T>>(spec_.norm_eps), spec_.norm_size(), spec_.gate, c.normed,
                                  c.rstd);
}

// What pass.recompute left out of the context. Gates are kept: their sigmoids stand where their projections stood.
template <class T>
void RecurrentMixer<T>::complete(const Pass<T>& pass, Context& c) const {
  if (pass.recompute_exec == nullptr) return;
  const Pass<T> there = pass.on_transient_exec();
  Arena& arena = there.exec.arena;
  // Without convolution and maps q and k are columns of the projection, where they were rotated and corrected in place.
  if (spec_.conv_size > 0 || spec_.query_key.map != FeatureMap::kNone) {
    tokens_forward(there, c, nullptr);
    correct_read(pass, c);
  }
  if (pass.recompute >= Recompute::kRecurrence) {
    const Recurrence<T>& recurrence = planned(pass, c.inside);
    c.saved =
        recurrence.saved_bytes() > 0 ? arena.alloc<std::byte>(static_cast<int64_t>(recurrence.saved_bytes())) : nullptr;
    c.o = new_matrix<T>(arena, c.proj.rows, spec_.value_size());
    recurrence.forward(c.tokens, c.o, nullptr, nullptr, c.saved, pass.exec.arena);
  }
  c.normed = new_matrix<T>(arena, c.proj.rows, spec_.value_size());
  output_norm(pass, c);
}

template <class T>
MixerContext* RecurrentMixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  const Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const int64_t tokens = x.rows, sequences = pass.layout.host.count();
  Context* kept = pass.keep ? new (pass.exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;
  c.inside = gates_inside(pass);
  c.few = !pass.keep && y.data != nullptr && tokens <= row_limits(pass.exec.device).decode;
  c.proj = new_matrix<T>(arena, tokens, projections_.columns);
  const SigmoidColumns gain = projections_.beta.used() ? gain_->sigmoid_of(projections_.beta.begin) : SigmoidColumns();
  project(pass, x, params.weight(index_.stack, projections_.columns, spec_.hidden), nullptr, c.proj, gain);

  // Backward needs the tail as it was.
  T* tail = spec_.conv_size > 0
                ? step_tails(pass, Mat<const T>(c.proj.col_range(0, spec_.conv_channels())), state, state_.tail)
                : nullptr;
  c.tail =
      pass.keep ? new_copy<T, T>(pass.exec, tail, sequences * (spec_.conv_size - 1) * spec_.conv_channels()) : tail;
  const Pass<T> there = pass.on_transient_exec();
  tokens_forward(there, c, tail);
  gates_forward(pass, c);
  correct_read(pass, c);

  const Recurrence<T>& recurrence = planned(pass, c.inside, state.step_ring(state_.s), state.slots(state_.s));
  const bool copy_state = pass.keep || pass.observer != nullptr;  // both want the state as it was before the pass
  Wide<T>*s = state.wide(state_.s), *a = state.wide(state_.a);
  c.tokens.s =
      copy_state ? new_copy<T, Wide<T>>(pass.exec, s, sequences * spec_.v_heads * spec_.key_dim * spec_.value_dim) : s;
  c.tokens.a = copy_state ? new_copy<T, Wide<T>>(pass.exec, a, sequences * spec_.heads * spec_.key_dim) : a;
  // A pass that keeps contexts has this buffer also where it is lost again: without it a sequence of one token would
  // take the decode step.
  Arena& of_recurrence = (pass.recompute >= Recompute::kRecurrence ? pass.transient_exec() : pass.exec).arena;
  if (pass.keep && recurrence.saved_bytes() > 0)
    c.saved = of_recurrence.alloc<std::byte>(static_cast<int64_t>(recurrence.saved_bytes()));
  c.o = new_matrix<T>(of_recurrence, tokens, spec_.value_size());
  recurrence.forward(c.tokens, c.o, s, a, c.saved, arena, state.ring(state_.s));
  if (pass.observer != nullptr) {
    pass.observer->recurrence({spec_.rule, pass.layout.host, spec_.heads, spec_.v_heads, spec_.key_dim, spec_.value_dim,
                               c.tokens, c.o, 0, pass.exec.device.kind() == FW_DEVICE_CUDA});
  }

  const Weight<Wide<T>> out = params.weight(index_.o_proj, spec_.hidden, spec_.value_size());
  if (c.few) {
    const bool has_addend = pass.addend.data != nullptr;
    if (has_addend) pass.exec.copy_rows(pass.addend, y);
    pass.exec.gated_linear_forward(c.o, Mat<const T>(c.gate), params.value(index_.o_norm),
                                   static_cast<Wide<T>>(spec_.norm_eps), spec_.norm_size(), spec_.gate, out, y,
                                   has_addend ? Write::kAccumulate : pass.last_write());
    return kept;
  }
  c.rstd = arena.alloc<Wide<T>>(tokens * spec_.v_heads);
  c.normed = pass.keep ? new_matrix<T>(there.exec.arena, tokens, spec_.value_size()) : c.o;
  output_norm(pass, c);
  if (y.data != nullptr) last_product(pass, Mat<const T>(c.normed), out, y);
  return kept;
}

template <class T>
void RecurrentMixer<T>::gates_backward(const Pass<T>& pass, const Context& c, Mat<T> dproj,
                                       const RecurrenceInputs<T>& d) const {
  Params<Wide<T>>& params = pass.params;
  if (spec_.raw_read_correction) {
    const bool own = spec_.rule.uses_erase_key();
    pass.exec.head_subtract_backward(d.q, own ? c.tokens.erase_key : c.tokens.k, params.value(index_.correction),
                                     spec_.key_dim, own ? d.erase_key : d.k, params.grad(index_.correction));
  }
  if (spec_.derives_erase_gate()) {
    pass.exec.head_scale_backward(d.erase_gate, c.tokens.beta, params.value(index_.inner_decay),
                                  spec_.v_heads / spec_.heads, d.beta, params.grad(index_.inner_decay));
  }
  if (spec_.makes_erase_write()) erase_write_backward(pass, c, columns(dproj, projections_.erase_write), d);
  if (spec_.scales_erase_key()) {
    pass.exec.head_scale_backward(d.erase_key, c.tokens.k, params.value(index_.inner_decay), spec_.key_dim, d.k,
                                  params.grad(index_.inner_decay));
  }
  if (spec_.rule.uses_precond() && spec_.tied_precond) {
    wide_exec(pass.exec).group_mean_backward(d.precond_g, d.g);
    pass.exec.group_mean_backward(d.precond_beta, d.beta);
  }
  if (spec_.rule.uses_read_correction())
    pass.exec.head_constant_backward(d.read_correction, spec_.v_heads / spec_.heads, params.grad(index_.correction));
  const auto sigmoid = [&](const Projection& p, Wide<T> scale, Wide<T>* dbias) {
    if (!p.used()) return;
    const Mat<T> dgate = columns(dproj, p);
    pass.exec.sigmoid_gate_backward(dgate, columns(c.proj, p), scale, dgate, dbias);
  };
  const Wide<T> bound = static_cast<Wide<T>>(spec_.rule.gain_bound);
  if (spec_.rule.uses_beta())
    gain_->backward(pass, c.gain, d.beta, spec_.gain.single_gate ? Mat<const Wide<T>>(d.g) : Mat<const Wide<T>>());
  const bool inside = any_logits(c.inside);  // then these are gradients of projections already
  if (!inside) {
    sigmoid(projections_.erase, spec_.erase_doubles() ? bound : Wide<T>(1), nullptr);
    sigmoid(projections_.write, Wide<T>(1), nullptr);
  }
  for_all_scalars<Numbers::kExceptBeta>(
      [&](const Projection& p) { sigmoid(p, Wide<T>(1), biased(p) ? params.grad(index_.lambda_bias) : nullptr); },
      projections_);
  sigmoid(projections_.precond_beta, Wide<T>(1), nullptr);
  if (projections_.decay.used()) {
    const int64_t group = spec_.rule.decay == Decay::kChannel ? spec_.key_dim : 1;
    const Mat<T> dlow = columns(dproj, projections_.decay);
    const Mat<T> din = inside                 ? d.g_logits
                       : index_.decay_up >= 0 ? new_matrix<T>(pass.exec.arena, d.g.rows, d.g.cols)
                                              : dlow;
    if (inside) {
      if (d.a_log != nullptr) pass.exec.add_values(d.a_log, spec_.decay_heads(), params.grad(index_.a_log));
      pass.exec.add_values(d.dt_bias, din.cols, params.grad(decay_offset()));
    } else if (spec_.bounded_layer >= 0) {
      pass.exec.bounded_decay_backward(d.g, c.decay_in, params.rows(index_.bounds), spec_.bounded_layer, din,
                                       params.grad_rows(index_.bounds));
    } else if (spec_.log_sigmoid_decay) {
      pass.exec.log_sigmoid_decay_backward(d.g, c.decay_in, params.value(index_.decay_bias),
                                           Wide<T>(1) / kLogSigmoidDivisor<Wide<T>>, din,
                                           params.grad(index_.decay_bias));
    } else {
      pass.exec.decay_gate_backward(d.g, c.decay_in, params.value(index_.a_log), params.value(index_.dt_bias), group,
                                    din, params.grad(index_.a_log), params.grad(index_.dt_bias));
    }
    if (index_.decay_up >= 0) {
      pass.exec.linear_backward(
          din, columns(c.proj, projections_.decay), params.weight(index_.decay_up, din.cols, spec_.decay_rank), dlow,
          params.grad_matrix(index_.decay_up, din.cols, spec_.decay_rank), nullptr, Write::kOverwrite);
    }
  }
  if (projections_.precond_decay.used()) {
    pass.exec.decay_gate_backward(d.precond_g, columns(c.proj, projections_.precond_decay),
                                  params.value(index_.atk_a_log), params.value(index_.atk_dt_bias), 1,
                                  columns(dproj, projections_.precond_decay), params.grad(index_.atk_a_log),
                                  params.grad(index_.atk_dt_bias));
  }
}

template <class T>
void RecurrentMixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                                 Mat<T> dx) const {
  Context& c = *static_cast<Context*>(context);
  complete(pass, c);
  Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const int64_t tokens = dy.rows;
  const Mat<T> dproj = new_matrix<T>(arena, tokens, projections_.columns);
  const Mat<T> dnormed = new_matrix<T>(arena, tokens, spec_.value_size());
  pass.exec.linear_backward(dy, c.normed, params.weight(index_.o_proj, spec_.hidden, spec_.value_size()), dnormed,
                            params.grad_matrix(index_.o_proj, spec_.hidden, spec_.value_size()), nullptr,
                            Write::kOverwrite);

  const Mat<T> dlow_gate = columns(dproj, projections_.gate);
  const bool low_rank_gate = index_.gate_up >= 0;
  const Mat<T> dgate = low_rank_gate ? new_matrix<T>(arena, tokens, spec_.value_size()) : dlow_gate;
  const Mat<T> d_o = new_matrix<T>(arena, tokens, spec_.value_size());
  pass.exec.gated_rmsnorm_backward(dnormed, c.o, c.gate, gate_bias(pass), params.value(index_.o_norm), c.rstd,
                                   spec_.norm_size(), spec_.gate, d_o, dgate, params.grad(index_.o_norm));
  if (low_rank_gate) {
    pass.exec.linear_backward(dgate, columns(c.proj, projections_.gate),
                              params.weight(index_.gate_up, spec_.value_size(), spec_.gate_rank), dlow_gate,
                              params.grad_matrix(index_.gate_up, spec_.value_size(), spec_.gate_rank),
                              index_.gate_bias >= 0 ? params.grad(index_.gate_bias) : nullptr, Write::kOverwrite);
  }

  RecurrenceInputs<T> d;
  const Mat<T> draw = dproj.col_range(0, spec_.conv_channels());
  const Mat<T> dqkv = spec_.conv_size > 0 ? new_matrix<T>(arena, tokens, spec_.conv_channels()) : draw;
  const Mat<T> dq_in = dqkv.col_range(0, spec_.key_size()),
               dk_in = spec_.rule.uses_k() ? dqkv.col_range(spec_.key_size(), spec_.key_size()) : Mat<T>();
  d.q = query_key_->gradient(pass, dq_in);
  d.k = query_key_->gradient(pass, dk_in);
  d.v = dqkv.col_range(spec_.value_begin(), spec_.value_size());
  d.beta = spec_.rule.uses_beta() && spec_.gain.learned ? new_matrix<T>(arena, tokens, spec_.v_heads)
                                                        : columns(dproj, projections_.beta);
  for_all_scalars<Numbers::kExceptBeta>([&](Mat<T>& to, const Projection& p) { to = columns(dproj, p); }, d,
                                        projections_);
  d.erase_gate = columns(dproj, projections_.erase);
  d.write_gate = columns(dproj, projections_.write);
  d.precond_beta = columns(dproj, projections_.precond_beta);
  if (c.tokens.g.data != nullptr) d.g = new_matrix<Wide<T>>(arena, tokens, c.tokens.g.cols);
  if (any_logits(c.inside)) {
    d.g_logits =
        index_.decay_up >= 0 ? new_matrix<T>(arena, tokens, c.decay_in.cols) : columns(dproj, projections_.decay);
    if (c.tokens.a_log != nullptr) d.a_log = arena.alloc<Wide<T>>(spec_.decay_heads());
    d.dt_bias = arena.alloc<Wide<T>>(c.decay_in.cols);
  }
  if (c.tokens.precond_g.data != nullptr) {
    d.precond_g = new_matrix<Wide<T>>(arena, tokens, spec_.heads);
    if (spec_.tied_precond) d.precond_beta = new_matrix<T>(arena, tokens, spec_.heads);
    if (index_.atk_center >= 0) d.precond_center = arena.alloc<Wide<T>>(spec_.heads);
  }
  if (spec_.derives_erase_gate()) d.erase_gate = new_matrix<T>(arena, tokens, spec_.v_heads);
  if (spec_.rule.uses_erase_key()) d.erase_key = new_matrix<T>(arena, tokens, spec_.key_size());
  if (spec_.makes_erase_write()) d.erase_write = new_matrix<T>(arena, tokens, spec_.key_size());
  if (spec_.rule.uses_read_correction()) d.read_correction = new_matrix<T>(arena, tokens, spec_.v_heads);
  const Recurrence<T>& recurrence = planned(pass, c.inside);
  recurrence.backward(c.tokens, d_o, d, c.saved, arena);
  if (d.precond_center != nullptr) {
    if (spec_.exp_precond_center) {
      pass.exec.exp_values_backward(d.precond_center, c.tokens.precond_center, spec_.heads,
                                    params.grad(index_.atk_center));
    } else {
      pass.exec.add_values(d.precond_center, spec_.heads, params.grad(index_.atk_center));
    }
  }
  gates_backward(pass, c, dproj, d);
  query_key_->backward(pass, c.query_key, d.q, d.k, dq_in, dk_in);  // after the gates, some of which read k
  if (spec_.conv_size > 0) {
    pass.exec.short_conv_backward(dqkv, c.proj.col_range(0, spec_.conv_channels()), params.value(index_.conv), nullptr,
                                  spec_.conv_size, pass.layout, c.tail, draw, params.grad(index_.conv), nullptr);
  }
  pass.exec.linear_backward(dproj, x, params.weight(index_.stack, projections_.columns, spec_.hidden), dx,
                            params.grad_matrix(index_.stack, projections_.columns, spec_.hidden), nullptr,
                            Write::kOverwrite);
}

template class RecurrentMixer<float>;
template class RecurrentMixer<double>;
template class RecurrentMixer<Bf16>;

}  // namespace fw
