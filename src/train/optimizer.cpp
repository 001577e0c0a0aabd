#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/optimizer.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"
#include "train/optimizer.h"

#ifndef FW_TRAIN_OPTIMIZER_ONCE
#define FW_TRAIN_OPTIMIZER_ONCE

namespace fw {

// The numbers of one update, the same for every element but for weight decay.
template <class T>
struct AdamWStep {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  T grad_scale;
  T step;              // lr / (1 - beta1^t)
  T inv_sqrt_debias2;  // 1 / sqrt(1 - beta2^t)
  T decay;             // lr * weight_decay, or 0
};

}  // namespace fw

#endif

HWY_BEFORE_NAMESPACE();
namespace fw::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class T>
HWY_INLINE void adamw_lanes(D d, const AdamWStep<T>& s, T* HWY_RESTRICT p, const T* HWY_RESTRICT g, T* HWY_RESTRICT m, T* HWY_RESTRICT v) {
  const auto grad = hn::Mul(hn::LoadU(d, g), hn::Set(d, s.grad_scale));
  const auto value = hn::LoadU(d, p);
  const auto first = hn::MulAdd(hn::Set(d, s.one_minus_beta1), grad, hn::Mul(hn::Set(d, s.beta1), hn::LoadU(d, m)));
  const auto second = hn::MulAdd(hn::Mul(hn::Set(d, s.one_minus_beta2), grad), grad, hn::Mul(hn::Set(d, s.beta2), hn::LoadU(d, v)));
  const auto root = hn::MulAdd(hn::Sqrt(second), hn::Set(d, s.inv_sqrt_debias2), hn::Set(d, s.eps));
  const auto change = hn::MulAdd(hn::Set(d, s.decay), value, hn::Div(hn::Mul(hn::Set(d, s.step), first), root));
  hn::StoreU(first, d, m);
  hn::StoreU(second, d, v);
  hn::StoreU(hn::Sub(value, change), d, p);
}

template <class T>
void adamw_block(const AdamWStep<T>& s, T* HWY_RESTRICT p, const T* HWY_RESTRICT g, T* HWY_RESTRICT m, T* HWY_RESTRICT v, size_t count) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> one;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) adamw_lanes(d, s, p + i, g + i, m + i, v + i);
  for (; i < count; ++i) adamw_lanes(one, s, p + i, g + i, m + i, v + i);
}

void adamw_block_f32(const AdamWStep<float>& s, float* p, const float* g, float* m, float* v, size_t count) { adamw_block(s, p, g, m, v, count); }
void adamw_block_f64(const AdamWStep<double>& s, double* p, const double* g, double* m, double* v, size_t count) { adamw_block(s, p, g, m, v, count); }

}  // namespace fw::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/threads.h"

namespace fw {
namespace {

HWY_EXPORT(adamw_block_f32);
HWY_EXPORT(adamw_block_f64);

void run_block(const AdamWStep<float>& s, float* p, const float* g, float* m, float* v, size_t count) {
  HWY_DYNAMIC_DISPATCH(adamw_block_f32)(s, p, g, m, v, count);
}
void run_block(const AdamWStep<double>& s, double* p, const double* g, double* m, double* v, size_t count) {
  HWY_DYNAMIC_DISPATCH(adamw_block_f64)(s, p, g, m, v, count);
}

// Large enough that a task costs more than its start, small enough that two threads end together.
constexpr int64_t kBlock = 16384;

// Sum of squares in eight lanes whose order is fixed; squares of floats are exact in double.
template <class T>
double sum_of_squares(const T* x, int64_t count) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; ++j) {
      const double value = x[i + j];
      lanes[j] += value * value;
    }
  }
  for (; i < count; ++i) lanes[i % 8] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

}  // namespace

template <class T>
BasicAdamW<T>::BasicAdamW(const AdamWConfig& config, std::span<const ParamSpec> specs, int64_t size)
    : config_(config), first_(static_cast<size_t>(size)), second_(static_cast<size_t>(size)) {
  for (const ParamSpec& spec : specs) {
    if (spec.offset < 0 || spec.offset + spec.size() > size) fail_internal("optimizer: parameter '{}' lies outside the buffer of {} values", spec.name, size);
    for (int64_t begin = 0; begin < spec.size(); begin += kBlock) {
      blocks_.push_back({spec.offset + begin, std::min(kBlock, spec.size() - begin), spec.weight_decay});
    }
  }
}

template <class T>
double BasicAdamW<T>::norm(std::span<const T> grads) const {
  if (grads.size() != first_.size()) fail_internal("optimizer: {} gradients for {} parameters", grads.size(), first_.size());
  std::vector<double> sums(blocks_.size());
  parallel_for(static_cast<int64_t>(blocks_.size()), [&](int64_t i) {
    const Block& block = blocks_[static_cast<size_t>(i)];
    sums[static_cast<size_t>(i)] = sum_of_squares(grads.data() + block.begin, block.count);
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return std::sqrt(total);
}

template <class T>
void BasicAdamW<T>::update(std::span<T> values, std::span<const T> grads, double lr, double grad_scale) {
  if (values.size() != first_.size() || grads.size() != first_.size()) {
    fail_internal("optimizer: {} values and {} gradients for {} parameters", values.size(), grads.size(), first_.size());
  }
  const double t = static_cast<double>(updates_ + 1);
  AdamWStep<T> step = {};
  step.beta1 = static_cast<T>(config_.beta1);
  step.one_minus_beta1 = static_cast<T>(1 - config_.beta1);
  step.beta2 = static_cast<T>(config_.beta2);
  step.one_minus_beta2 = static_cast<T>(1 - config_.beta2);
  step.eps = static_cast<T>(config_.eps);
  step.grad_scale = static_cast<T>(grad_scale);
  step.step = static_cast<T>(lr / (1 - std::pow(config_.beta1, t)));
  step.inv_sqrt_debias2 = static_cast<T>(1 / std::sqrt(1 - std::pow(config_.beta2, t)));
  const float decay = static_cast<T>(lr * config_.weight_decay);

  parallel_for(static_cast<int64_t>(blocks_.size()), [&](int64_t i) {
    const Block& block = blocks_[static_cast<size_t>(i)];
    AdamWStep<T> mine = step;
    mine.decay = block.decay ? decay : T(0);
    const size_t begin = static_cast<size_t>(block.begin);
    run_block(mine, values.data() + begin, grads.data() + begin, first_.data() + begin, second_.data() + begin, static_cast<size_t>(block.count));
  });
  ++updates_;
}

template class BasicAdamW<float>;
template class BasicAdamW<double>;

double clip_factor(double norm, double clip) { return clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0; }

}  // namespace fw

#endif  // HWY_ONCE
