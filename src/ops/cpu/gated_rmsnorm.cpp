// Gated RMSNorm per head: y = n weight act(x) with n = o rstd over the head's columns, x = gate + bias. Backward, with
// h = dy weight act(x):
//   d_o = rstd (h - n mean(h n))     dgate = dy n weight act'(x)     dweight = sum of dy n act(x)
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/gated_rmsnorm.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_GATED_RMSNORM_KERNELS
#define FW_OPS_CPU_GATED_RMSNORM_KERNELS
namespace fw {
template <class T>
struct GatedRmsnormKernels {
  cpu::Kernel<&cpu::gated_rmsnorm_forward<T>> forward;
  cpu::Kernel<&cpu::gated_rmsnorm_backward<T>> backward;
};
}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

// The arguments of act() from column i on.
template <class D, class Lanes, class T>
HWY_INLINE hn::VFromD<D> gate_at(D d, const Lanes& lanes, const T* gate, const T* bias, int64_t i) {
  const auto x = lanes.load(d, gate + i);
  return bias == nullptr ? x : hn::Add(x, lanes.load(d, bias + i));
}

template <GateKind kKind, class T>
void forward_rows(Mat<const T> o, Mat<const T> gate, const T* gate_bias, const T* weight, T eps, int64_t head_dim,
                  Mat<T> y, T* rstd) {
  const int64_t heads = o.cols / head_dim;
  for_row_blocks(RowBlocks::cut(o.rows, o.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const T* in = o.row(t) + h * head_dim;
        const T* g = kKind == GateKind::kNone ? nullptr : gate.row(t) + h * head_dim;
        const T* bias = gate_bias == nullptr ? nullptr : gate_bias + h * head_dim;
        T* out = y.row(t) + h * head_dim;
        auto squares = hn::Zero(d);
        for_lanes(d, head_dim, [&](auto m, int64_t i) HWY_ATTR {
          const auto v = m.load(d, in + i);
          squares = hn::MulAdd(v, v, squares);
        });
        const T scale = T(1) / std::sqrt(sum_lanes(d, squares) / static_cast<T>(head_dim) + eps);
        rstd[t * heads + h] = scale;
        const auto r = hn::Set(d, scale);
        for_lanes(d, head_dim, [&](auto m, int64_t i) HWY_ATTR {
          auto v = hn::Mul(hn::Mul(m.load(d, in + i), r), m.load(d, weight + i));
          if constexpr (kKind != GateKind::kNone) {
            const auto x = gate_at(d, m, g, bias, i);
            v = hn::Mul(v, sigmoid(d, x));
            if constexpr (kKind == GateKind::kSilu) v = hn::Mul(v, x);
          }
          m.store(d, v, out + i);
        });
      }
    }
  });
}

template <GateKind kKind, class T>
void backward_rows(Mat<const T> dy, Mat<const T> o, Mat<const T> gate, const T* gate_bias, const T* weight,
                   const T* rstd, int64_t head_dim, Mat<T> d_o, Mat<T> dgate, T* dweight) {
  const int64_t heads = o.cols / head_dim;
  const RowBlocks blocks = RowBlocks::cut(o.rows, o.cols);
  PartialSums<T> partial(blocks.count(), head_dim);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    T* dw = partial.block(block);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const T* grad = dy.row(t) + h * head_dim;
        const T* in = o.row(t) + h * head_dim;
        const T* g = kKind == GateKind::kNone ? nullptr : gate.row(t) + h * head_dim;
        const T* bias = gate_bias == nullptr ? nullptr : gate_bias + h * head_dim;
        T* out = d_o.row(t) + h * head_dim;
        T* dg = kKind == GateKind::kNone ? nullptr : dgate.row(t) + h * head_dim;
        const T scale = rstd[t * heads + h];
        const auto r = hn::Set(d, scale);
        auto dot = hn::Zero(d);
        // First pass: everything but the projection; d_o holds dy weight act(gate) rstd.
        for_lanes(d, head_dim, [&](auto m, int64_t i) HWY_ATTR {
          const auto w = m.load(d, weight + i);
          const auto n = hn::Mul(m.load(d, in + i), r);
          auto da = m.load(d, grad + i);  // d y / d (n weight), that is dy act(gate)
          if constexpr (kKind != GateKind::kNone) {
            const auto x = gate_at(d, m, g, bias, i);
            const auto s = sigmoid(d, x);
            const auto dact = hn::Mul(hn::Mul(da, n), w);
            if constexpr (kKind == GateKind::kSilu) {
              m.store(d, hn::Mul(dact, silu_slope(d, x, s)), dg + i);
              da = hn::Mul(da, hn::Mul(x, s));
            } else {
              m.store(d, hn::Mul(dact, hn::NegMulAdd(s, s, s)), dg + i);
              da = hn::Mul(da, s);
            }
          }
          const auto dan = hn::Mul(da, n);
          m.store(d, hn::Add(m.load(d, dw + i), dan), dw + i);
          dot = hn::MulAdd(dan, w, dot);
          m.store(d, hn::Mul(hn::Mul(da, w), r), out + i);
        });
        const auto mean = hn::Set(d, scale * scale * (sum_lanes(d, dot) / static_cast<T>(head_dim)));
        for_lanes(d, head_dim, [&](auto m, int64_t i) HWY_ATTR {
          m.store(d, hn::NegMulAdd(mean, m.load(d, in + i), m.load(d, out + i)), out + i);
        });
      }
    }
  });
  partial.add_to(dweight);
}

template <class T>
void gated_forward(Mat<const T> o, Mat<const T> gate, const T* gate_bias, const T* weight, T eps, int64_t head_dim,
                   GateKind kind, Mat<T> y, T* rstd) {
  switch (kind) {
    case GateKind::kNone:
      return forward_rows<GateKind::kNone>(o, gate, gate_bias, weight, eps, head_dim, y, rstd);
    case GateKind::kSilu:
      return forward_rows<GateKind::kSilu>(o, gate, gate_bias, weight, eps, head_dim, y, rstd);
    case GateKind::kSigmoid:
      return forward_rows<GateKind::kSigmoid>(o, gate, gate_bias, weight, eps, head_dim, y, rstd);
  }
}

template <class T>
void gated_backward(Mat<const T> dy, Mat<const T> o, Mat<const T> gate, const T* gate_bias, const T* weight,
                    const T* rstd, int64_t head_dim, GateKind kind, Mat<T> d_o, Mat<T> dgate, T* dweight) {
  switch (kind) {
    case GateKind::kNone:
      return backward_rows<GateKind::kNone>(dy, o, gate, gate_bias, weight, rstd, head_dim, d_o, dgate, dweight);
    case GateKind::kSilu:
      return backward_rows<GateKind::kSilu>(dy, o, gate, gate_bias, weight, rstd, head_dim, d_o, dgate, dweight);
    case GateKind::kSigmoid:
      return backward_rows<GateKind::kSigmoid>(dy, o, gate, gate_bias, weight, rstd, head_dim, d_o, dgate, dweight);
  }
}

GatedRmsnormKernels<float> gated_rmsnorm_kernels_f32() { return {gated_forward<float>, gated_backward<float>}; }
GatedRmsnormKernels<double> gated_rmsnorm_kernels_f64() { return {gated_forward<double>, gated_backward<double>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(gated_rmsnorm_kernels_f32);
HWY_EXPORT(gated_rmsnorm_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(gated_rmsnorm_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(gated_rmsnorm_kernels_f64)();
  }
}

}  // namespace

namespace cpu {

template <class T>
void gated_rmsnorm_forward(const Exec<T>&, Mat<const T> o, Mat<const T> gate, const T* gate_bias, const T* weight,
                           T eps, int64_t head_dim, GateKind kind, Mat<T> y, T* rstd) {
  kernels<T>().forward(o, gate, gate_bias, weight, eps, head_dim, kind, y, rstd);
}

template <class T>
void gated_rmsnorm_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> o, Mat<const T> gate, const T* gate_bias,
                            const T* weight, const T* rstd, int64_t head_dim, GateKind kind, Mat<T> d_o, Mat<T> dgate,
                            T* dweight) {
  kernels<T>().backward(dy, o, gate, gate_bias, weight, rstd, head_dim, kind, d_o, dgate, dweight);
}

template void gated_rmsnorm_forward(const Exec<float>&, Mat<const float>, Mat<const float>, const float*, const float*,
                                    float, int64_t, GateKind, Mat<float>, float*);
template void gated_rmsnorm_forward(const Exec<double>&, Mat<const double>, Mat<const double>, const double*,
                                    const double*, double, int64_t, GateKind, Mat<double>, double*);
template void gated_rmsnorm_backward(const Exec<float>&, Mat<const float>, Mat<const float>, Mat<const float>,
                                     const float*, const float*, const float*, int64_t, GateKind, Mat<float>,
                                     Mat<float>, float*);
template void gated_rmsnorm_backward(const Exec<double>&, Mat<const double>, Mat<const double>, Mat<const double>,
                                     const double*, const double*, const double*, int64_t, GateKind, Mat<double>,
                                     Mat<double>, double*);

}  // namespace cpu
}  // namespace fw
#endif
