#include "nn/norm.h"

namespace fw {

template <class T>
RowNorm<T>::RowNorm(const NormSpec& spec, const std::string& name, Params<Wide<T>>& params)
    : spec_(spec), eps_(static_cast<Wide<T>>(spec.eps)) {
  std::vector<ParamSpec> list = norm_parameters(spec, name);
  weight_ = params.declare(std::move(list[0]));
  if (spec.kind == NormKind::kLayer) bias_ = params.declare(std::move(list[1]));
}

template <class T>
void RowNorm<T>::forward(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Wide<T>* rstd) const {
  const Params<Wide<T>>& params = pass.params;
  if (spec_.kind == NormKind::kRms) {
    pass.exec.rmsnorm_forward(x, params.scale(weight_), eps_, y, rstd);
  } else {
    pass.exec.group_norm_forward(x, spec_.size, params.scale(weight_), params.value(bias_), eps_, y, rstd);
  }
}

template <class T>
void RowNorm<T>::product(const Pass<T>& pass, Mat<const T> x, Weight<Wide<T>> weight, const Wide<T>* bias, bool swiglu,
                         const SigmoidColumns& gates, Mat<T> y) const {
  pass.exec.normed_linear_forward(x, pass.params.scale(weight_), eps_, weight, bias, swiglu, gates, y);
}

template <class T>
void RowNorm<T>::add_forward(const Pass<T>& pass, Mat<T> x, Mat<const T> delta, Mat<T> y, Wide<T>* rstd) const {
  if (spec_.kind == NormKind::kRms) {
    pass.exec.add_rmsnorm_forward(x, delta, pass.params.scale(weight_), eps_, y, rstd);
  } else {
    pass.exec.add_rows(delta, x);
    forward(pass, x, y, rstd);
  }
}

template <class T>
void RowNorm<T>::backward(const Pass<T>& pass, Mat<const T> dy, Mat<const T> x, const Wide<T>* rstd, Mat<T> dx,
                          Write write) const {
  Params<Wide<T>>& params = pass.params;
  if (spec_.kind == NormKind::kRms) {
    pass.exec.rmsnorm_backward(dy, x, params.scale(weight_), rstd, dx, params.grad(weight_), write);
  } else {
    pass.exec.group_norm_backward(dy, x, spec_.size, params.scale(weight_), rstd, dx, params.grad(weight_),
                                  params.grad(bias_), write);
  }
}

template class RowNorm<float>;
template class RowNorm<double>;
template class RowNorm<Bf16>;

}  // namespace fw
