#include "train/optimizer.h"

#include <algorithm>
#include <cmath>

namespace fw {

template <class T>
void BasicAdamW<T>::square_norm(const Exec<T>& exec, const Params<W>& params, double* sum) const {
  exec.square_sum(params.grads().data(), params.pieces(), sum);
}

template <class T>
void BasicAdamW<T>::update(const Exec<T>& exec, Params<W>& params, double lr, double grad_scale) {
  const double t = static_cast<double>(updates_ + 1);
  AdamWStep<W> step = {};
  step.beta1 = static_cast<W>(config_.beta1);
  step.one_minus_beta1 = static_cast<W>(1 - config_.beta1);
  step.beta2 = static_cast<W>(config_.beta2);
  step.one_minus_beta2 = static_cast<W>(1 - config_.beta2);
  step.eps = static_cast<W>(config_.eps);
  step.grad_scale = static_cast<W>(grad_scale);
  step.step = static_cast<W>(lr / (1 - std::pow(config_.beta1, t)));
  step.inv_sqrt_debias2 = static_cast<W>(1 / std::sqrt(1 - std::pow(config_.beta2, t)));
  step.decay = static_cast<W>(lr * config_.weight_decay);
  exec.adamw(step, params.pieces(), params.grads().data(), params.values().data(), first_.data(), second_.data());
  ++updates_;
}

template class BasicAdamW<float>;
template class BasicAdamW<double>;

double clip_factor(double norm, double clip) { return clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0; }

}  // namespace fw
