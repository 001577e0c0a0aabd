#include "nn/ssd_mixer.h"

#include "nn/activations.h"
#include "nn/drafts.h"
#include "nn/recurrence.h"

namespace fw {

template <class T>
struct SsdMixer<T>::Context : MixerContext {
  Mat<T> proj;  // [T, columns]: z | x B C | dt
  Mat<T> xbc;   // [T, channels]: after the convolution
  RecurrenceInputs<T> tokens;
  Mat<T> o, gated, normed;  // [T, H P]: o + D x; times SiLU(z); normalised
  Wide<T>* rstd = nullptr;  // [groups, T]
  void* saved = nullptr;    // of the recurrence
  const T* tail = nullptr;  // before this pass
};

template <class T>
SsdMixer<T>::SsdMixer(const SsdSpec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  std::vector<ParamSpec> list = mixer_parameters(spec, prefix);
  int* const indices[] = {&a_log_, &skip_, &dt_bias_, &in_proj_, &conv_, &conv_bias_, &norm_, &out_proj_};
  for (size_t i = 0; i < list.size(); ++i) *indices[i] = params.declare(std::move(list[i]));
}

namespace {

template <class T>
const Recurrence<T>& planned(const Pass<T>& pass, const SsdSpec& spec, const StepRing& ring = {},
                             const StepSlots& slots = {}) {
  RecurrenceShape shape = recurrence_of(spec);
  shape.form = pass.form;
  shape.ring = ring;
  shape.slots = slots;
  return pass.recurrences.of(shape, pass.layout.host);
}

// Views of what the convolution gives, or of the gradient of it.
template <class T>
void take_tokens(const SsdSpec& spec, Mat<T> xbc, RecurrenceInputs<T>& tokens) {
  const int64_t inner = spec.inner(), shared = spec.groups * spec.state;
  tokens.v = xbc.col_range(0, inner);
  tokens.k = xbc.col_range(inner, shared);
  tokens.q = xbc.col_range(inner + shared, shared);
}

}  // namespace

template <class T>
MixerContext* SsdMixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  const Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = x.rows, inner = spec_.inner(), channels = spec_.conv_channels(),
                sequences = pass.layout.host.count();
  Context* kept = pass.keep ? new (exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;
  c.proj = new_matrix<T>(arena, tokens, spec_.columns());
  exec.linear_forward(x, params.weight(in_proj_, spec_.columns(), spec_.hidden), nullptr, c.proj, Write::kOverwrite);

  T* tail = spec_.conv_size > 1 ? step_tails(pass, Mat<const T>(c.proj.col_range(inner, channels)), state, 1) : nullptr;
  c.tail = pass.keep ? new_copy<T, T>(exec, tail, sequences * (spec_.conv_size - 1) * channels) : tail;
  c.xbc = new_matrix<T>(arena, tokens, channels);
  exec.short_conv_forward(c.proj.col_range(inner, channels), params.value(conv_), params.value(conv_bias_),
                          spec_.conv_size, pass.layout, c.tail, tail, c.xbc);
  take_tokens(spec_, c.xbc, c.tokens);
  c.tokens.write_gate = new_matrix<T>(arena, tokens, spec_.heads);
  c.tokens.g = new_matrix<Wide<T>>(arena, tokens, spec_.heads);
  exec.time_step_forward(c.proj.col_range(inner + channels, spec_.heads), params.value(a_log_), params.value(dt_bias_),
                         c.tokens.write_gate, c.tokens.g);

  const Recurrence<T>& recurrence = planned(pass, spec_, state.step_ring(0), state.slots(0));
  Wide<T>* s = state.wide(0);
  c.tokens.s = pass.keep ? new_copy<T, Wide<T>>(exec, s, sequences * spec_.heads * spec_.state * spec_.head_dim) : s;
  if (pass.keep && recurrence.saved_bytes() > 0)
    c.saved = arena.alloc<std::byte>(static_cast<int64_t>(recurrence.saved_bytes()));
  c.o = new_matrix<T>(arena, tokens, inner);
  recurrence.forward(c.tokens, c.o, s, nullptr, c.saved, arena, state.ring(0));
  exec.head_add_forward(c.tokens.v, params.value(skip_), spec_.head_dim, c.o);

  c.gated = new_matrix<T>(arena, tokens, inner);
  exec.swiglu_forward(c.proj.col_range(0, inner), c.o, c.gated);
  c.normed = new_matrix<T>(arena, tokens, inner);
  c.rstd = arena.alloc<Wide<T>>(spec_.groups * tokens);
  const int64_t group = inner / spec_.groups;
  for (int64_t i = 0; i < spec_.groups; ++i) {
    exec.rmsnorm_forward(c.gated.col_range(i * group, group), params.value(norm_) + i * group,
                         static_cast<Wide<T>>(spec_.norm_eps), c.normed.col_range(i * group, group),
                         c.rstd + i * tokens);
  }
  if (y.data != nullptr)
    exec.linear_forward(c.normed, params.weight(out_proj_, spec_.hidden, inner), nullptr, y, Write::kOverwrite);
  return kept;
}

template <class T>
void SsdMixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                           Mat<T> dx) const {
  Context& c = *static_cast<Context*>(context);
  Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = dy.rows, inner = spec_.inner(), channels = spec_.conv_channels();
  const Mat<T> dproj = new_matrix<T>(arena, tokens, spec_.columns());
  const Mat<T> dnormed = new_matrix<T>(arena, tokens, inner), dgated = new_matrix<T>(arena, tokens, inner),
               d_o = new_matrix<T>(arena, tokens, inner);
  exec.linear_backward(dy, c.normed, params.weight(out_proj_, spec_.hidden, inner), dnormed,
                       params.grad_matrix(out_proj_, spec_.hidden, inner), nullptr, Write::kOverwrite);
  const int64_t group = inner / spec_.groups;
  for (int64_t i = 0; i < spec_.groups; ++i) {
    exec.rmsnorm_backward(dnormed.col_range(i * group, group), c.gated.col_range(i * group, group),
                          params.value(norm_) + i * group, c.rstd + i * tokens, dgated.col_range(i * group, group),
                          params.grad(norm_) + i * group, Write::kOverwrite);
  }
  exec.swiglu_backward(dgated, c.proj.col_range(0, inner), c.o, dproj.col_range(0, inner), d_o);

  RecurrenceInputs<T> d;
  const Mat<T> dxbc = new_matrix<T>(arena, tokens, channels);
  take_tokens(spec_, dxbc, d);
  d.write_gate = new_matrix<T>(arena, tokens, spec_.heads);
  d.g = new_matrix<Wide<T>>(arena, tokens, spec_.heads);
  planned(pass, spec_).backward(c.tokens, d_o, d, c.saved, arena);
  exec.head_add_backward(d_o, c.tokens.v, params.value(skip_), spec_.head_dim, d.v, params.grad(skip_));
  exec.time_step_backward(d.write_gate, d.g, c.proj.col_range(inner + channels, spec_.heads), params.value(a_log_),
                          params.value(dt_bias_), dproj.col_range(inner + channels, spec_.heads), params.grad(a_log_),
                          params.grad(dt_bias_));
  exec.short_conv_backward(dxbc, c.proj.col_range(inner, channels), params.value(conv_), params.value(conv_bias_),
                           spec_.conv_size, pass.layout, c.tail, dproj.col_range(inner, channels), params.grad(conv_),
                           params.grad(conv_bias_));
  exec.linear_backward(dproj, x, params.weight(in_proj_, spec_.columns(), spec_.hidden), dx,
                       params.grad_matrix(in_proj_, spec_.columns(), spec_.hidden), nullptr, Write::kOverwrite);
}

template class SsdMixer<float>;
template class SsdMixer<double>;
template class SsdMixer<Bf16>;

}  // namespace fw
