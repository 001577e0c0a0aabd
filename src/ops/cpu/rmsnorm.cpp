// RMSNorm: y = x rstd weight with rstd = 1/sqrt(mean(x^2) + eps); the variant that adds to the residual stream first.
//   with n = x rstd and h = dy weight:   dx = rstd (h - n mean(h n))     dweight = sum over rows of dy n
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/rmsnorm.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_RMSNORM_KERNELS
#define FW_OPS_CPU_RMSNORM_KERNELS
namespace fw {
template <class T>
struct RmsnormKernels {
  cpu::Kernel<&cpu::rmsnorm_forward<T>> forward;
  cpu::Kernel<&cpu::add_rmsnorm_forward<T>> add_forward;
  cpu::Kernel<&cpu::rmsnorm_backward<T>> backward;
};
}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

template <class D, class T>
HWY_INLINE T inverse_rms(D d, hn::Vec<D> squares, int64_t cols, T eps) {
  return T(1) / std::sqrt(sum_lanes(d, squares) / static_cast<T>(cols) + eps);
}

template <class D, class T>
HWY_INLINE void scale_row(D d, const T* x, const T* weight, T rstd, int64_t cols, T* y) {
  const auto r = hn::Set(d, rstd);
  for_lanes(d, cols, [&](auto m, int64_t i) HWY_ATTR {
    m.store(d, hn::Mul(hn::Mul(m.load(d, x + i), r), m.load(d, weight + i)), y + i);
  });
}

template <class T>
void rmsnorm_forward_rows(Mat<const T> x, const T* weight, T eps, Mat<T> y, T* rstd) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      const T* in = x.row(t);
      auto squares = hn::Zero(d);
      for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto v = m.load(d, in + i);
        squares = hn::MulAdd(v, v, squares);
      });
      rstd[t] = inverse_rms(d, squares, x.cols, eps);
      scale_row(d, in, weight, rstd[t], x.cols, y.row(t));
    }
  });
}

template <class T>
void add_rmsnorm_forward_rows(Mat<T> x, Mat<const T> delta, const T* weight, T eps, Mat<T> y, T* rstd) {
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      T* in = x.row(t);
      const T* add = delta.row(t);
      auto squares = hn::Zero(d);
      for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto v = hn::Add(m.load(d, in + i), m.load(d, add + i));
        m.store(d, v, in + i);
        squares = hn::MulAdd(v, v, squares);
      });
      rstd[t] = inverse_rms(d, squares, x.cols, eps);
      scale_row(d, in, weight, rstd[t], x.cols, y.row(t));
    }
  });
}

template <class T>
void rmsnorm_backward_rows(Mat<const T> dy, Mat<const T> x, const T* weight, const T* rstd, Mat<T> dx, T* dweight,
                           Write write) {
  const RowBlocks blocks = RowBlocks::cut(x.rows, x.cols);
  PartialSums<T> partial(blocks.count(), x.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    T* dw = partial.block(block);
    for (int64_t t = begin; t < end; ++t) {
      const T* in = x.row(t);
      const T* grad = dy.row(t);
      T* out = dx.row(t);
      const auto r = hn::Set(d, rstd[t]);
      auto dot = hn::Zero(d);
      for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto gn = hn::Mul(m.load(d, grad + i), hn::Mul(m.load(d, in + i), r));
        dot = hn::MulAdd(gn, m.load(d, weight + i), dot);
        m.store(d, hn::Add(m.load(d, dw + i), gn), dw + i);
      });
      // dx = rstd h - (rstd^2 mean(h n)) x
      const auto mean = hn::Set(d, rstd[t] * rstd[t] * (sum_lanes(d, dot) / static_cast<T>(x.cols)));
      for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto h = hn::Mul(hn::Mul(m.load(d, grad + i), m.load(d, weight + i)), r);
        auto v = hn::NegMulAdd(mean, m.load(d, in + i), h);
        if (write == Write::kAccumulate) v = hn::Add(v, m.load(d, out + i));
        m.store(d, v, out + i);
      });
    }
  });
  partial.add_to(dweight);
}

RmsnormKernels<float> rmsnorm_kernels_f32() {
  return {rmsnorm_forward_rows<float>, add_rmsnorm_forward_rows<float>, rmsnorm_backward_rows<float>};
}
RmsnormKernels<double> rmsnorm_kernels_f64() {
  return {rmsnorm_forward_rows<double>, add_rmsnorm_forward_rows<double>, rmsnorm_backward_rows<double>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(rmsnorm_kernels_f32);
HWY_EXPORT(rmsnorm_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(rmsnorm_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(rmsnorm_kernels_f64)();
  }
}

}  // namespace

namespace cpu {

template <class T>
void rmsnorm_forward(const Exec<T>&, Mat<const T> x, const T* weight, T eps, Mat<T> y, T* rstd) {
  kernels<T>().forward(x, weight, eps, y, rstd);
}

template <class T>
void add_rmsnorm_forward(const Exec<T>&, Mat<T> x, Mat<const T> delta, const T* weight, T eps, Mat<T> y, T* rstd) {
  kernels<T>().add_forward(x, delta, weight, eps, y, rstd);
}

template <class T>
void rmsnorm_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, const T* weight, const T* rstd, Mat<T> dx,
                      T* dweight, Write write) {
  kernels<T>().backward(dy, x, weight, rstd, dx, dweight, write);
}

template void rmsnorm_forward(const Exec<float>&, Mat<const float>, const float*, float, Mat<float>, float*);
template void rmsnorm_forward(const Exec<double>&, Mat<const double>, const double*, double, Mat<double>, double*);
template void add_rmsnorm_forward(const Exec<float>&, Mat<float>, Mat<const float>, const float*, float, Mat<float>,
                                  float*);
template void add_rmsnorm_forward(const Exec<double>&, Mat<double>, Mat<const double>, const double*, double,
                                  Mat<double>, double*);
template void rmsnorm_backward(const Exec<float>&, Mat<const float>, Mat<const float>, const float*, const float*,
                               Mat<float>, float*, Write);
template void rmsnorm_backward(const Exec<double>&, Mat<const double>, Mat<const double>, const double*, const double*,
                               Mat<double>, double*, Write);

}  // namespace cpu
}  // namespace fw
#endif
