#include "nn/selective_mixer.h"

#include "nn/activations.h"

namespace fw {

template <class T>
struct SelectiveMixer<T>::Context : MixerContext {
  Mat<T> proj;                     // [T, 2 D]: x | z
  Mat<T> u;                        // [T, D]: after the convolution
  Mat<T> keys;                     // [T, R + 2 N]: dt of low rank | k | q
  Mat<T> step;                     // [T, D]: after softplus or sigmoid
  Mat<T> o, gated;                 // [T, D]: what is read and skipped; times SiLU(z)
  Wide<T>* checkpoints = nullptr;  // of the scan
  const T* tail = nullptr;         // before this pass
};

template <class T>
SelectiveMixer<T>::SelectiveMixer(const SelectiveSpec& spec, const std::string& prefix, Params<Wide<T>>& params)
    : spec_(spec) {
  std::vector<ParamSpec> list = mixer_parameters(spec, prefix);
  int* const indices[] = {&a_log_, &skip_, &in_proj_, &conv_, &conv_bias_, &x_proj_, &step_, &step_bias_, &out_proj_};
  const size_t first = spec.law == ScanLaw::kMamba ? 0 : 1;  // without A_log
  for (size_t i = 0; i < list.size(); ++i) *indices[first + i] = params.declare(std::move(list[i]));
}

template <class T>
MixerContext* SelectiveMixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  const Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = x.rows, D = spec_.inner, N = spec_.state, R = spec_.rank, sequences = pass.layout.host.count();
  Context* kept = pass.keep ? new (exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;
  c.proj = new_matrix<T>(arena, tokens, 2 * D);
  exec.linear_forward(x, params.weight(in_proj_, 2 * D, spec_.hidden), nullptr, c.proj, Write::kOverwrite);

  T* tail = spec_.conv_size > 1 ? state.data(1) : nullptr;
  c.tail = pass.keep ? new_copy<T, T>(exec, tail, sequences * (spec_.conv_size - 1) * D) : tail;
  c.u = new_matrix<T>(arena, tokens, D);
  exec.short_conv_forward(c.proj.col_range(0, D), params.value(conv_), params.value(conv_bias_), spec_.conv_size,
                          pass.layout, c.tail, tail, c.u);
  c.keys = new_matrix<T>(arena, tokens, spec_.keys());
  exec.linear_forward(c.u, params.weight(x_proj_, spec_.keys(), D), nullptr, c.keys, Write::kOverwrite);
  c.step = new_matrix<T>(arena, tokens, D);
  exec.linear_forward(c.keys.col_range(0, R), params.weight(step_, D, R), params.value(step_bias_), c.step,
                      Write::kOverwrite);
  if (spec_.law == ScanLaw::kMamba) {
    exec.softplus_forward(c.step, c.step);
  } else {
    exec.sigmoid_gate_forward(c.step, nullptr, Wide<T>(1), c.step);
  }

  Wide<T>* s = state.wide(0);
  if (pass.keep) c.checkpoints = arena.alloc<Wide<T>>(chunk_checkpoints(tokens, sequences) * N * D);
  c.o = new_matrix<T>(arena, tokens, D);
  exec.selective_scan_forward(spec_.law, c.u, c.step, c.keys.col_range(R + N, N), c.keys.col_range(R, N), a_log(params),
                              params.value(skip_), pass.layout, s, s, c.checkpoints, c.o);
  c.gated = new_matrix<T>(arena, tokens, D);
  exec.swiglu_forward(c.proj.col_range(D, D), c.o, c.gated);
  if (y.data != nullptr)
    exec.linear_forward(c.gated, params.weight(out_proj_, spec_.hidden, D), nullptr, y, Write::kOverwrite);
  return kept;
}

template <class T>
void SelectiveMixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                                 Mat<T> dx) const {
  const Context& c = *static_cast<Context*>(context);
  Params<Wide<T>>& params = pass.params;
  const Exec<T>& exec = pass.exec;
  Arena& arena = exec.arena;
  const int64_t tokens = dy.rows, D = spec_.inner, N = spec_.state, R = spec_.rank;
  const Mat<T> dproj = new_matrix<T>(arena, tokens, 2 * D);
  const Mat<T> dgated = new_matrix<T>(arena, tokens, D), d_o = new_matrix<T>(arena, tokens, D);
  exec.linear_backward(dy, c.gated, params.weight(out_proj_, spec_.hidden, D), dgated,
                       params.grad_matrix(out_proj_, spec_.hidden, D), nullptr, Write::kOverwrite);
  exec.swiglu_backward(dgated, c.proj.col_range(D, D), c.o, dproj.col_range(D, D), d_o);

  const Mat<T> du = dgated;  // which nobody reads again
  const Mat<T> dstep = new_matrix<T>(arena, tokens, D), dkeys = new_matrix<T>(arena, tokens, spec_.keys());
  exec.selective_scan_backward(spec_.law, d_o, c.u, c.step, c.keys.col_range(R + N, N), c.keys.col_range(R, N),
                               a_log(params), params.value(skip_), pass.layout, c.checkpoints, nullptr, du, dstep,
                               dkeys.col_range(R + N, N), dkeys.col_range(R, N),
                               a_log_ < 0 ? nullptr : params.grad(a_log_), params.grad(skip_), nullptr);
  if (spec_.law == ScanLaw::kMamba) {
    exec.softplus_backward(dstep, c.step, dstep);
  } else {
    exec.sigmoid_gate_backward(dstep, c.step, Wide<T>(1), dstep, nullptr);
  }
  exec.linear_backward(dstep, c.keys.col_range(0, R), params.weight(step_, D, R), dkeys.col_range(0, R),
                       params.grad_matrix(step_, D, R), params.grad(step_bias_), Write::kOverwrite);
  exec.linear_backward(dkeys, c.u, params.weight(x_proj_, spec_.keys(), D), du,
                       params.grad_matrix(x_proj_, spec_.keys(), D), nullptr, Write::kAccumulate);
  exec.short_conv_backward(du, c.proj.col_range(0, D), params.value(conv_), params.value(conv_bias_), spec_.conv_size,
                           pass.layout, c.tail, dproj.col_range(0, D), params.grad(conv_), params.grad(conv_bias_));
  exec.linear_backward(dproj, x, params.weight(in_proj_, 2 * D, spec_.hidden), dx,
                       params.grad_matrix(in_proj_, 2 * D, spec_.hidden), nullptr, Write::kOverwrite);
}

template class SelectiveMixer<float>;
template class SelectiveMixer<double>;
template class SelectiveMixer<Bf16>;

}  // namespace fw
