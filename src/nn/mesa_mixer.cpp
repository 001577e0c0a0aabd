#include "nn/mesa_mixer.h"

#include "nn/activations.h"
#include "ops/backend.h"

namespace fw {
namespace {

template <class T>
constexpr T kL2Eps = T(1e-6);

// Columns `first` to `first + dim` of every head of `from`, heads `from_width` wide, to heads `to_width` wide at
// `to_first`.
template <class T>
void copy_heads(const Exec<T>& exec, int64_t heads, int64_t dim, Mat<const T> from, int64_t from_width, int64_t first,
                Mat<T> to, int64_t to_width, int64_t to_first) {
  for (int64_t h = 0; h < heads; ++h)
    exec.copy_rows(from.col_range(h * from_width + first, dim), to.col_range(h * to_width + to_first, dim));
}

// to += the same.
template <class T>
void add_heads(const Exec<T>& exec, int64_t heads, int64_t dim, Mat<const T> from, int64_t from_width, int64_t first,
               Mat<T> to) {
  for (int64_t h = 0; h < heads; ++h)
    exec.add_rows(from.col_range(h * from_width + first, dim), to.col_range(h * dim, dim));
}

}  // namespace

template <class T>
struct MesaMixer<T>::Context : MixerContext {
  Mat<T> proj;                 // [T, columns]: q | k | v | gate
  Mat<T> decay_in, gain;       // [T, H]: the decay's projection without its bias; beta
  Mat<T> qk;                   // [T, 2 H K]: after the convolution
  Mat<T> unit;                 // [T, 2 H K]: of unit length
  RecurrenceInputs<T> tokens;  // its query is x
  Mat<T> o, normed;            // [T, H K]
  Wide<T>* rstd = nullptr;     // [T, H]
  void* saved = nullptr;       // of the recurrence
  const T* tail = nullptr;     // before this pass
};

template <class T>
MesaMixer<T>::MesaMixer(const MesaSpec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  for (ParamSpec& p : mixer_parameters(spec, prefix)) {
    const std::string name = p.name.substr(prefix.size());
    const int index = params.declare(std::move(p));
    if (name == "q_proj.weight") stack_ = index;
    if (name == "a_proj.weight") decay_ = index;
    if (name == "a_proj.bias") decay_bias_ = index;
    if (name == "b_proj.weight") gain_ = index;
    if (name == "b_proj.bias") gain_bias_ = index;
    if (name == "q_conv1d.weight") conv_ = index;
    if (name == "lambda_params") lambda_ = index;
    if (name == "o_norm.weight") norm_ = index;
    if (name == "o_proj.weight") out_ = index;
  }
}

template <class T>
const Recurrence<T>& MesaMixer<T>::planned(const Pass<T>& pass) const {
  return pass.recurrences.of({MesaSpec::rule(), spec_.heads, spec_.heads, spec_.dim, 2 * spec_.dim, pass.form, 1.0},
                             pass.layout.host);
}

template <class T>
Mat<T> MesaMixer<T>::solve(const Pass<T>& pass, const Context& c, Mat<const T> rhs) const {
  const Mat<T> x = new_matrix<T>(pass.exec.arena, rhs.rows, spec_.size());
  const MesaShape shape{spec_.heads, spec_.dim, spec_.dim, spec_.least_lambda, spec_.cg_steps, spec_.cg_tolerance};
  pass.exec.mesa_solve(shape, rhs, c.tokens.k, c.tokens.write_gate, c.tokens.g, pass.params.value(lambda_), pass.layout,
                       c.tokens.s, x);
  return x;
}

template <class T>
MixerContext* MesaMixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  const Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = x.rows, H = spec_.heads, K = spec_.dim, size = spec_.size(),
                sequences = pass.layout.host.count();
  Context* kept = pass.keep ? new (exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;
  c.proj = new_matrix<T>(arena, tokens, spec_.columns());
  exec.linear_forward(x, params.weight(stack_, spec_.columns(), spec_.hidden), nullptr, c.proj, Write::kOverwrite);
  c.decay_in = new_matrix<T>(arena, tokens, H);
  exec.linear_forward(x, params.weight(decay_, H, spec_.hidden), nullptr, c.decay_in, Write::kOverwrite);
  c.gain = new_matrix<T>(arena, tokens, H);
  exec.linear_forward(x, params.weight(gain_, H, spec_.hidden), params.value(gain_bias_), c.gain, Write::kOverwrite);
  exec.sigmoid_gate_forward(c.gain, nullptr, Wide<T>(1), c.gain);

  T* tail = spec_.conv_size > 1 ? state.data(1) : nullptr;
  c.tail = pass.keep ? new_copy<T, T>(exec, tail, sequences * (spec_.conv_size - 1) * 2 * size) : tail;
  c.qk = new_matrix<T>(arena, tokens, 2 * size);
  exec.short_conv_forward(c.proj.col_range(0, 2 * size), params.value(conv_), nullptr, spec_.conv_size, pass.layout,
                          c.tail, tail, c.qk);
  c.unit = new_matrix<T>(arena, tokens, 2 * size);
  exec.l2_norm_forward(c.qk, K, kL2Eps<Wide<T>>, c.unit);

  c.tokens.k = c.unit.col_range(size, size);
  c.tokens.v = new_matrix<T>(arena, tokens, 2 * size);
  copy_heads<T>(exec, H, K, c.proj.col_range(2 * size, size), K, 0, c.tokens.v, 2 * K, 0);
  copy_heads<T>(exec, H, K, c.tokens.k, K, 0, c.tokens.v, 2 * K, K);
  c.tokens.write_gate = c.gain;
  c.tokens.g = new_matrix<Wide<T>>(arena, tokens, H);
  exec.log_sigmoid_decay_forward(c.decay_in, params.value(decay_bias_), Wide<T>(1), c.tokens.g);
  Wide<T>* s = state.wide(0);
  c.tokens.s = pass.keep ? new_copy<T, Wide<T>>(exec, s, sequences * H * K * 2 * K) : s;
  c.tokens.q = solve(pass, c, c.unit.col_range(0, size));

  const Recurrence<T>& recurrence = planned(pass);
  if (pass.keep && recurrence.saved_bytes() > 0)
    c.saved = arena.alloc<std::byte>(static_cast<int64_t>(recurrence.saved_bytes()));
  const Mat<T> both = new_matrix<T>(arena, tokens, 2 * size);
  recurrence.forward(c.tokens, both, s, nullptr, c.saved, arena);
  c.o = new_matrix<T>(arena, tokens, size);
  copy_heads<T>(exec, H, K, both, 2 * K, 0, c.o, K, 0);

  c.normed = new_matrix<T>(arena, tokens, size);
  c.rstd = arena.alloc<Wide<T>>(tokens * H);
  const Mat<T> gate = spec_.gate == GateKind::kNone ? Mat<T>() : c.proj.col_range(3 * size, size);
  exec.gated_rmsnorm_forward(c.o, gate, nullptr, params.value(norm_), static_cast<Wide<T>>(spec_.norm_eps), K,
                             spec_.gate, c.normed, c.rstd);
  if (y.data != nullptr)
    exec.linear_forward(c.normed, params.weight(out_, spec_.hidden, size), nullptr, y, Write::kOverwrite);
  return kept;
}

template <class T>
void MesaMixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                            Mat<T> dx) const {
  Context& c = *static_cast<Context*>(context);
  Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = dy.rows, H = spec_.heads, K = spec_.dim, size = spec_.size();
  const Mat<T> dproj = new_matrix<T>(arena, tokens, spec_.columns());
  const Mat<T> dnormed = new_matrix<T>(arena, tokens, size), d_o = new_matrix<T>(arena, tokens, size);
  exec.linear_backward(dy, c.normed, params.weight(out_, spec_.hidden, size), dnormed,
                       params.grad_matrix(out_, spec_.hidden, size), nullptr, Write::kOverwrite);
  const bool gated = spec_.gate != GateKind::kNone;
  const Mat<T> gate = gated ? c.proj.col_range(3 * size, size) : Mat<T>(),
               dgate = gated ? dproj.col_range(3 * size, size) : Mat<T>();
  exec.gated_rmsnorm_backward(dnormed, c.o, gate, nullptr, params.value(norm_), c.rstd, K, spec_.gate, d_o, dgate,
                              params.grad(norm_));

  // The two calls: [do | 0] at x, then [0 | -x] at y.
  const auto gradients = [&] {
    RecurrenceInputs<T> d;
    d.q = new_matrix<T>(arena, tokens, size);
    d.k = new_matrix<T>(arena, tokens, size);
    d.v = new_matrix<T>(arena, tokens, 2 * size);
    d.write_gate = new_matrix<T>(arena, tokens, H);
    d.g = new_matrix<Wide<T>>(arena, tokens, H);
    return d;
  };
  const auto cotangent = [&] {
    const Mat<T> both = new_matrix<T>(arena, tokens, 2 * size);
    exec.device.fill(both.data, 0, static_cast<size_t>(both.rows * both.stride) * sizeof(T));
    return both;
  };
  const Recurrence<T>& recurrence = planned(pass);
  const Mat<T> d_values = cotangent();
  copy_heads<T>(exec, H, K, d_o, K, 0, d_values, 2 * K, 0);
  const RecurrenceInputs<T> d = gradients(), e = gradients();
  recurrence.backward(c.tokens, d_values, d, c.saved, arena);
  const Mat<T> y = solve(pass, c, d.q);
  const Mat<T> d_keys = cotangent();
  for (int64_t h = 0; h < H; ++h)
    exec.subtract_rows(c.tokens.q.col_range(h * K, K), d_keys.col_range(h * 2 * K + K, K));
  RecurrenceInputs<T> read = c.tokens;
  read.q = y;
  recurrence.backward(read, d_keys, e, nullptr, arena);
  exec.mesa_lambda_backward(c.tokens.q, y, params.value(lambda_), params.grad(lambda_));
  exec.add_rows(e.k, d.k);
  exec.add_rows(e.v, d.v);
  exec.add_rows(e.write_gate, d.write_gate);
  wide_exec(exec).add_rows(e.g, d.g);
  add_heads<T>(exec, H, K, d.v, 2 * K, K, d.k);  // k as a value
  copy_heads<T>(exec, H, K, d.v, 2 * K, 0, dproj.col_range(2 * size, size), K, 0);

  const Mat<T> dunit = new_matrix<T>(arena, tokens, 2 * size), dqk = new_matrix<T>(arena, tokens, 2 * size);
  exec.copy_rows(y, dunit.col_range(0, size));
  exec.copy_rows(d.k, dunit.col_range(size, size));
  exec.l2_norm_backward(dunit, c.qk, K, kL2Eps<Wide<T>>, dqk);
  exec.short_conv_backward(dqk, c.proj.col_range(0, 2 * size), params.value(conv_), nullptr, spec_.conv_size,
                           pass.layout, c.tail, dproj.col_range(0, 2 * size), params.grad(conv_), nullptr);
  exec.linear_backward(dproj, x, params.weight(stack_, spec_.columns(), spec_.hidden), dx,
                       params.grad_matrix(stack_, spec_.columns(), spec_.hidden), nullptr, Write::kOverwrite);
  exec.sigmoid_gate_backward(d.write_gate, c.gain, Wide<T>(1), d.write_gate, nullptr);
  exec.linear_backward(d.write_gate, x, params.weight(gain_, H, spec_.hidden), dx,
                       params.grad_matrix(gain_, H, spec_.hidden), params.grad(gain_bias_), Write::kAccumulate);
  const Mat<T> ddecay = new_matrix<T>(arena, tokens, H);
  exec.log_sigmoid_decay_backward(d.g, c.decay_in, params.value(decay_bias_), Wide<T>(1), ddecay,
                                  params.grad(decay_bias_));
  exec.linear_backward(ddecay, x, params.weight(decay_, H, spec_.hidden), dx,
                       params.grad_matrix(decay_, H, spec_.hidden), nullptr, Write::kAccumulate);
}

template class MesaMixer<float>;
template class MesaMixer<double>;
template class MesaMixer<Bf16>;

}  // namespace fw
