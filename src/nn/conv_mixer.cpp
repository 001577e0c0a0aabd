#include "nn/conv_mixer.h"

#include "nn/activations.h"
#include "nn/drafts.h"

namespace fw {

template <class T>
struct ConvMixer<T>::Context : MixerContext {
  Mat<T> gate;              // [T, d]: the projection
  const T* tail = nullptr;  // [N, W-1, d] before this pass
};

template <class T>
ConvMixer<T>::ConvMixer(const ConvSpec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  std::vector<ParamSpec> list = mixer_parameters(spec, prefix);
  conv_ = params.declare(std::move(list[0]));
  conv_bias_ = params.declare(std::move(list[1]));
  projection_ = params.declare(std::move(list[2]));
  projection_bias_ = params.declare(std::move(list[3]));
}

template <class T>
MixerContext* ConvMixer<T>::forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const {
  const Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const int64_t d = spec_.hidden;
  Context* kept = pass.keep ? new (pass.exec.contexts.template alloc<Context>(1)) Context() : nullptr;
  Context local;
  Context& c = kept != nullptr ? *kept : local;
  c.gate = new_matrix<T>(arena, x.rows, d);
  pass.exec.linear_forward(x, params.weight(projection_, d, d), params.value(projection_bias_), c.gate,
                           Write::kOverwrite);
  T* tail = spec_.kernel > 1 ? step_tails(pass, x, state, 0) : nullptr;
  c.tail = pass.keep ? new_copy<T, T>(pass.exec, tail, pass.layout.host.count() * (spec_.kernel - 1) * d) : tail;
  if (y.data != nullptr)
    pass.exec.gated_conv_forward(x, c.gate, params.value(conv_), params.value(conv_bias_), spec_.kernel, pass.layout,
                                 c.tail, tail, y);
  return kept;
}

template <class T>
void ConvMixer<T>::backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy,
                            Mat<T> dx) const {
  const Context& c = *static_cast<Context*>(context);
  Params<Wide<T>>& params = pass.params;
  const int64_t d = spec_.hidden;
  const Mat<T> dgate = new_matrix<T>(pass.exec.arena, dy.rows, d);
  pass.exec.gated_conv_backward(dy, x, c.gate, params.value(conv_), params.value(conv_bias_), spec_.kernel, pass.layout,
                                c.tail, dx, dgate, params.grad(conv_), params.grad(conv_bias_));
  pass.exec.linear_backward(dgate, x, params.weight(projection_, d, d), dx, params.grad_matrix(projection_, d, d),
                            params.grad(projection_bias_), Write::kAccumulate);
}

template class ConvMixer<float>;
template class ConvMixer<double>;
template class ConvMixer<Bf16>;

}  // namespace fw
