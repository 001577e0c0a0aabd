// y = log(1 + exp(x)) and its gradient from y: dx = dy (1 - exp(-y)). Both in place where asked.
#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/softplus.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_SOFTPLUS_KERNELS
#define FW_OPS_CPU_SOFTPLUS_KERNELS
namespace fw {
template <class T>
struct SoftplusKernels {
  cpu::Kernel<&cpu::softplus_forward<T>> forward;
  cpu::Kernel<&cpu::softplus_backward<T>> backward;
};
}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

template <class T>
void softplus_forward_rows(Mat<const T> x, Mat<T> y) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      const T* in = x.row(t);
      T* out = y.row(t);
      for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto v = m.load(d, in + i);
        m.store(d, softplus_from_exp(d, v, exp_nonpositive(d, hn::Neg(hn::Abs(v)))), out + i);
      });
    }
  });
}

template <class T>
void softplus_backward_rows(Mat<const T> dy, Mat<const T> y, Mat<T> dx) {
  for_row_blocks(RowBlocks::cut(y.rows, y.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      const T* grad = dy.row(t);
      const T* out = y.row(t);
      T* to = dx.row(t);
      for_lanes(d, y.cols, [&](auto m, int64_t i) HWY_ATTR {
        // Not 1 - exp(-y), which has no digits left where y is small.
        const auto slope = hn::Neg(hn::Expm1(d, hn::Neg(m.load(d, out + i))));
        m.store(d, hn::Mul(m.load(d, grad + i), slope), to + i);
      });
    }
  });
}

SoftplusKernels<float> softplus_kernels_f32() { return {softplus_forward_rows<float>, softplus_backward_rows<float>}; }
SoftplusKernels<double> softplus_kernels_f64() {
  return {softplus_forward_rows<double>, softplus_backward_rows<double>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(softplus_kernels_f32);
HWY_EXPORT(softplus_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(softplus_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(softplus_kernels_f64)();
  }
}

}  // namespace

namespace cpu {

template <class T>
void softplus_forward(const Exec<T>&, Mat<const T> x, Mat<T> y) {
  kernels<T>().forward(x, y);
}

template <class T>
void softplus_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> y, Mat<T> dx) {
  kernels<T>().backward(dy, y, dx);
}

template void softplus_forward(const Exec<float>&, Mat<const float>, Mat<float>);
template void softplus_forward(const Exec<double>&, Mat<const double>, Mat<double>);
template void softplus_backward(const Exec<float>&, Mat<const float>, Mat<const float>, Mat<float>);
template void softplus_backward(const Exec<double>&, Mat<const double>, Mat<const double>, Mat<double>);

}  // namespace cpu
}  // namespace fw
#endif
