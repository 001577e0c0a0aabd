// Softmax, negative log-likelihood and their gradient, row by row; one exponential per logit.
#include "ops/cpu/softmax_rows.h"

#include <cmath>

#include "ops/cpu/row_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/softmax_rows.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_SOFTMAX_KERNELS
#define FW_OPS_CPU_SOFTMAX_KERNELS
namespace fw {
template <class T>
struct SoftmaxKernels {
  decltype(&softmax_nll<T>) nll;
  decltype(&softmax_nll_gradient<T>) gradient;
};
}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

template <bool kGradient, class T>
void softmax_rows(Mat<T> logits, const int32_t* targets, T grad_scale, T* nll) {
  const int64_t n = logits.cols;
  for_row_blocks(RowBlocks::cut(logits.rows, n), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      T* row = logits.row(t);
      if (targets[t] < 0) {
        nll[t] = T(0);
        if constexpr (kGradient) std::fill_n(row, n, T(0));
        continue;
      }
      const T largest = row_max(d, row, n);
      const T at_target = row[targets[t]];
      const auto shift = hn::Set(d, largest);
      auto sum = hn::Zero(d);
      for_lanes(d, n, [&](auto m, int64_t i) HWY_ATTR {
        const auto e = m.zero_missing(d, exp_nonpositive(d, hn::Sub(m.load(d, row + i), shift)));
        sum = hn::Add(sum, e);
        if constexpr (kGradient) m.store(d, e, row + i);
      });
      const T total = sum_lanes(d, sum);
      nll[t] = std::log(total) - (at_target - largest);
      if constexpr (kGradient) {
        const auto factor = hn::Set(d, grad_scale / total);
        for_lanes(d, n, [&](auto m, int64_t i) HWY_ATTR { m.store(d, hn::Mul(m.load(d, row + i), factor), row + i); });
        row[targets[t]] -= grad_scale;
      }
    }
  });
}

template <class T>
void nll_rows(Mat<T> logits, const int32_t* targets, T* nll) {
  softmax_rows<false>(logits, targets, T(0), nll);
}

template <class T>
void gradient_rows(Mat<T> logits, const int32_t* targets, T grad_scale, T* nll) {
  softmax_rows<true>(logits, targets, grad_scale, nll);
}

SoftmaxKernels<float> softmax_kernels_f32() { return {nll_rows<float>, gradient_rows<float>}; }
SoftmaxKernels<double> softmax_kernels_f64() { return {nll_rows<double>, gradient_rows<double>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(softmax_kernels_f32);
HWY_EXPORT(softmax_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(softmax_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(softmax_kernels_f64)();
  }
}

}  // namespace

template <class T>
void softmax_nll(Mat<T> logits, const int32_t* targets, T* nll) {
  kernels<T>().nll(logits, targets, nll);
}

template <class T>
void softmax_nll_gradient(Mat<T> logits, const int32_t* targets, T grad_scale, T* nll) {
  kernels<T>().gradient(logits, targets, grad_scale, nll);
}

template void softmax_nll(Mat<float>, const int32_t*, float*);
template void softmax_nll(Mat<double>, const int32_t*, double*);
template void softmax_nll_gradient(Mat<float>, const int32_t*, float, float*);
template void softmax_nll_gradient(Mat<double>, const int32_t*, double, double*);

}  // namespace fw
#endif
