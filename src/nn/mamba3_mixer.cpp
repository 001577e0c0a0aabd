#include "nn/mamba3_mixer.h"

#include "nn/activations.h"
#include "nn/mamba3_scan.h"

namespace fw {

template <class T>
struct Mamba3Mixer<T>::Context : MixerContext {
  Mat<T> proj;                                  // [T, columns]: z | x | B | C | dt | A | trap | angle
  Mamba3Inputs<T> tokens;                       // B and C after their norm
  Wide<T>*b_rstd = nullptr, *c_rstd = nullptr;  // [T, R G]
  typename Mamba3Scan<T>::Context scan;
  Mat<T> o;                 // [T R, H P]: with D v
  Wide<T>* rstd = nullptr;  // [T R, H], of the output norm
  Mat<T> gated;             // [T, H P]
};

template <class T>
Mamba3Mixer<T>::Mamba3Mixer(const Mamba3Spec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  struct NamedIndex {
    const char* name;
    int* index;
  };
  const NamedIndex named[] = {{"dt_bias", &dt_bias_},        {"D", &skip_},
                              {"B_bias", &b_bias_},          {"C_bias", &c_bias_},
                              {"in_proj.weight", &in_proj_}, {"B_norm.weight", &b_norm_},
                              {"C_norm.weight", &c_norm_},   {"out_proj.weight", &out_proj_},
                              {"mimo_x", &mimo_x_},          {"mimo_z", &mimo_z_},
                              {"mimo_o", &mimo_o_},          {"norm.weight", &norm_}};
  for (ParamSpec& p : mixer_parameters(spec, prefix)) {
    const std::string name = p.name.substr(prefix.size());
    const int index = params.declare(std::move(p));
    for (const NamedIndex& entry : named) {
      if (name == entry.name) *entry.index = index;
    }
  }
}

namespace {

// The parts of the projection, or of its gradient.
template <class T>
struct Parts {
  Mat<T> z, x, b, c, dt, a, trap, angle;
  Parts(const Mamba3Spec& spec, Mat<T> proj) {
    int64_t at = 0;
    const auto take = [&](int64_t count) {
      at += count;
      return proj.col_range(at - count, count);
    };
    z = take(spec.inner());
    x = take(spec.inner());
    b = take(spec.shared());
    c = take(spec.shared());
    dt = take(spec.heads);
    a = take(spec.heads);
    trap = take(spec.heads);
    angle = take(spec.angles);
  }
};

template <class T>
const T* value_or_null(const Params<T>& params, int index) {
  return index < 0 ? nullptr : params.value(index);
}
template <class T>
T* grad_or_null(Params<T>& params, int index) {
  return index < 0 ? nullptr : params.grad(index);
}

}  // namespace

template <class T>
MixerContext* Mamba3Mixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  using W = Wide<T>;
  const Params<W>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = x.rows, inner = spec_.inner(), R = spec_.rank(), norms = R * spec_.groups;
  const W eps = static_cast<W>(spec_.norm_eps);
  const Mamba3Shape shape = spec_.shape();
  Context* kept = pass.keep ? new (exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;
  c.proj = new_matrix<T>(arena, tokens, spec_.columns());
  exec.linear_forward(x, params.weight(in_proj_, spec_.columns(), spec_.hidden), nullptr, c.proj, Write::kOverwrite);
  const Parts<T> parts(spec_, c.proj);

  Mamba3Inputs<T>& in = c.tokens;
  const auto norm = [&](Mat<const T> from, int weight, W*& rstd) {
    const Mat<T> to = new_matrix<T>(arena, tokens, spec_.shared());
    rstd = arena.alloc<W>(tokens * norms);
    exec.gated_rmsnorm_forward(from, Mat<const T>(), nullptr, params.value(weight), eps, spec_.state, GateKind::kNone,
                               to, rstd);
    return to;
  };
  in.k = norm(parts.b, b_norm_, c.b_rstd);
  in.q = norm(parts.c, c_norm_, c.c_rstd);
  in.dt = new_matrix<T>(arena, tokens, spec_.heads);
  in.g = new_matrix<W>(arena, tokens, spec_.heads);
  exec.mamba3_time_forward(spec_.decay, parts.dt, parts.a, params.value(dt_bias_), in.dt, in.g);
  in.trap = parts.trap;
  in.angle = parts.angle;
  in.v = parts.x;
  if (mimo_x_ >= 0) {
    in.v = new_matrix<T>(arena, tokens * R, inner);
    exec.mamba3_expand_forward(shape, parts.x, params.value(mimo_x_), in.v);
  }

  c.o = new_matrix<T>(arena, tokens * R, inner);
  const Mamba3State<T> remembered{state.wide(0), state.data(1), state.data(2), state.wide(3)};
  Mamba3Scan<T>(shape).forward(exec, pass.recurrences, pass.layout, pass.form, in,
                               {params.value(c_bias_), params.value(b_bias_), params.value(skip_)}, remembered,
                               pass.keep, c.scan, c.o);
  if (spec_.output_norm) c.rstd = arena.alloc<W>(tokens * R * spec_.heads);
  c.gated = new_matrix<T>(arena, tokens, inner);
  exec.mamba3_gate_forward(shape, c.o, parts.z, value_or_null(params, mimo_z_), value_or_null(params, mimo_o_),
                           value_or_null(params, norm_), eps, c.gated, c.rstd);
  if (y.data != nullptr)
    exec.linear_forward(c.gated, params.weight(out_proj_, spec_.hidden, inner), nullptr, y, Write::kOverwrite);
  return kept;
}

template <class T>
void Mamba3Mixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                              Mat<T> dx) const {
  using W = Wide<T>;
  Context& c = *static_cast<Context*>(context);
  Params<W>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = dy.rows, inner = spec_.inner(), R = spec_.rank();
  const Mamba3Shape shape = spec_.shape();
  const Mat<T> dproj = new_matrix<T>(arena, tokens, spec_.columns()), dgated = new_matrix<T>(arena, tokens, inner),
               d_o = new_matrix<T>(arena, tokens * R, inner);
  const Parts<T> parts(spec_, c.proj), d_parts(spec_, dproj);
  exec.linear_backward(dy, c.gated, params.weight(out_proj_, spec_.hidden, inner), dgated,
                       params.grad_matrix(out_proj_, spec_.hidden, inner), nullptr, Write::kOverwrite);
  exec.mamba3_gate_backward(shape, dgated, c.o, parts.z, value_or_null(params, mimo_z_), value_or_null(params, mimo_o_),
                            value_or_null(params, norm_), c.rstd, d_o, d_parts.z, grad_or_null(params, mimo_z_),
                            grad_or_null(params, mimo_o_), grad_or_null(params, norm_));

  Mamba3Inputs<T> d;
  d.q = new_matrix<T>(arena, tokens, spec_.shared());
  d.k = new_matrix<T>(arena, tokens, spec_.shared());
  d.v = mimo_x_ >= 0 ? new_matrix<T>(arena, tokens * R, inner) : d_parts.x;
  d.dt = new_matrix<T>(arena, tokens, spec_.heads);
  d.g = new_matrix<W>(arena, tokens, spec_.heads);
  d.trap = d_parts.trap;
  d.angle = d_parts.angle;
  Mamba3Scan<T>(shape).backward(exec, pass.recurrences, pass.layout, pass.form, c.tokens,
                                {params.value(c_bias_), params.value(b_bias_), params.value(skip_)}, c.scan, d_o,
                                nullptr, d, {params.grad(c_bias_), params.grad(b_bias_), params.grad(skip_)}, {});
  if (mimo_x_ >= 0)
    exec.mamba3_expand_backward(shape, d.v, parts.x, params.value(mimo_x_), d_parts.x, params.grad(mimo_x_));
  exec.mamba3_time_backward(spec_.decay, d.dt, d.g, parts.dt, parts.a, params.value(dt_bias_), d_parts.dt, d_parts.a,
                            params.grad(dt_bias_));
  exec.gated_rmsnorm_backward(d.k, parts.b, Mat<const T>(), nullptr, params.value(b_norm_), c.b_rstd, spec_.state,
                              GateKind::kNone, d_parts.b, Mat<T>(), params.grad(b_norm_));
  exec.gated_rmsnorm_backward(d.q, parts.c, Mat<const T>(), nullptr, params.value(c_norm_), c.c_rstd, spec_.state,
                              GateKind::kNone, d_parts.c, Mat<T>(), params.grad(c_norm_));
  exec.linear_backward(dproj, x, params.weight(in_proj_, spec_.columns(), spec_.hidden), dx,
                       params.grad_matrix(in_proj_, spec_.columns(), spec_.hidden), nullptr, Write::kOverwrite);
}

template class Mamba3Mixer<float>;
template class Mamba3Mixer<double>;
template class Mamba3Mixer<Bf16>;

}  // namespace fw
