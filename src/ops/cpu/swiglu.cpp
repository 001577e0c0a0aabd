// SwiGLU: y = silu(gate) * up, and its gradients; one pass over each row.
#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/swiglu.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_SWIGLU_KERNELS
#define FW_OPS_CPU_SWIGLU_KERNELS
namespace fw {
template <class T>
struct SwigluKernels {
  cpu::Kernel<&cpu::swiglu_forward<T>> forward;
  cpu::Kernel<&cpu::swiglu_backward<T>> backward;
};
}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

template <class T>
void swiglu_forward_rows(Mat<const T> gate, Mat<const T> up, Mat<T> y) {
  for_row_blocks(RowBlocks::cut(y.rows, y.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      const T* g = gate.row(t);
      const T* u = up.row(t);
      T* out = y.row(t);
      for_lanes(d, y.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto x = m.load(d, g + i);
        m.store(d, hn::Mul(hn::Mul(x, sigmoid(d, x)), m.load(d, u + i)), out + i);
      });
    }
  });
}

template <class T>
void swiglu_backward_rows(Mat<const T> dy, Mat<const T> gate, Mat<const T> up, Mat<T> dgate, Mat<T> dup) {
  for_row_blocks(RowBlocks::cut(dy.rows, dy.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      const T* in = dy.row(t);
      const T* g = gate.row(t);
      const T* u = up.row(t);
      T* dg = dgate.row(t);
      T* du = dup.row(t);
      for_lanes(d, dy.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto x = m.load(d, g + i);
        const auto grad = m.load(d, in + i);
        const auto s = sigmoid(d, x);
        const auto dsilu = hn::Mul(grad, m.load(d, u + i));
        m.store(d, hn::Mul(grad, hn::Mul(x, s)), du + i);
        m.store(d, hn::Mul(dsilu, silu_slope(d, x, s)), dg + i);
      });
    }
  });
}

SwigluKernels<float> swiglu_kernels_f32() { return {swiglu_forward_rows<float>, swiglu_backward_rows<float>}; }
SwigluKernels<double> swiglu_kernels_f64() { return {swiglu_forward_rows<double>, swiglu_backward_rows<double>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(swiglu_kernels_f32);
HWY_EXPORT(swiglu_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(swiglu_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(swiglu_kernels_f64)();
  }
}

}  // namespace

namespace cpu {

template <class T>
void swiglu_forward(const Exec<T>&, Mat<const T> gate, Mat<const T> up, Mat<T> y) {
  kernels<T>().forward(gate, up, y);
}

template <class T>
void swiglu_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> gate, Mat<const T> up, Mat<T> dgate, Mat<T> dup) {
  kernels<T>().backward(dy, gate, up, dgate, dup);
}

template void swiglu_forward(const Exec<float>&, Mat<const float>, Mat<const float>, Mat<float>);
template void swiglu_forward(const Exec<double>&, Mat<const double>, Mat<const double>, Mat<double>);
template void swiglu_backward(const Exec<float>&, Mat<const float>, Mat<const float>, Mat<const float>, Mat<float>,
                              Mat<float>);
template void swiglu_backward(const Exec<double>&, Mat<const double>, Mat<const double>, Mat<const double>, Mat<double>,
                              Mat<double>);

}  // namespace cpu
}  // namespace fw
#endif
