// The gates of the mixer: scaled sigmoid and log-decay, forward and backward.
//   sigmoid: y = scale s(x + bias)               dx = dy y (1 - y / scale)
//   decay:   g = -exp(a) softplus(x + delta)     dx = -dg exp(a) s(x + delta)      da = sum of dg g
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/gates.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_GATES_KERNELS
#define FW_OPS_CPU_GATES_KERNELS
namespace fw {
template <class T>
struct GateKernels {
  cpu::Kernel<&cpu::sigmoid_gate_forward<T>> sigmoid_forward;
  cpu::Kernel<&cpu::sigmoid_gate_backward<T>> sigmoid_backward;
  cpu::Kernel<&cpu::decay_gate_forward<T>> decay_forward;
  cpu::Kernel<&cpu::decay_gate_backward<T>> decay_backward;
};

// -exp(a_log) of every column.
template <class T>
const T* decay_rates(const T* a_log, int64_t group, int64_t n, LocalScratch& scratch) {
  T* rates = scratch.alloc<T>(n);
  for (int64_t first = 0; first < n; first += group) {
    const T rate = -std::exp(a_log[first / group]);
    for (int64_t c = first; c < std::min(n, first + group); ++c) rates[c] = rate;
  }
  return rates;
}
}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

template <class T>
void sigmoid_forward_rows(Mat<const T> x, const T* bias, T scale, Mat<T> y) {
  const T shift = bias == nullptr ? T(0) : *bias;
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    const auto b = hn::Set(d, shift);
    const auto factor = hn::Set(d, scale);
    for (int64_t t = begin; t < end; ++t) {
      const T* in = x.row(t);
      T* out = y.row(t);
      for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR {
        m.store(d, hn::Mul(factor, sigmoid(d, hn::Add(m.load(d, in + i), b))), out + i);
      });
    }
  });
}

template <class T>
void sigmoid_backward_rows(Mat<const T> dy, Mat<const T> y, T scale, Mat<T> dx, T* dbias) {
  const RowBlocks blocks = RowBlocks::cut(y.rows, y.cols);
  PartialSums<T> partial(blocks.count(), 1);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    const auto inverse = hn::Set(d, T(1) / scale);
    auto sum = hn::Zero(d);
    for (int64_t t = begin; t < end; ++t) {
      const T* grad = dy.row(t);
      const T* value = y.row(t);
      T* out = dx.row(t);
      for_lanes(d, y.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto v = m.load(d, value + i);
        const auto slope = hn::NegMulAdd(hn::Mul(v, inverse), v, v);
        const auto r = hn::Mul(m.load(d, grad + i), slope);
        sum = hn::Add(sum, r);
        m.store(d, r, out + i);
      });
    }
    *partial.block(block) = sum_lanes(d, sum);
  });
  if (dbias != nullptr) partial.add_to(dbias);
}

template <class T>
void decay_forward_rows(Mat<const T> x, const T* a_log, const T* dt_bias, int64_t group, Mat<T> g) {
  LocalScratch scratch;
  const T* rates = decay_rates(a_log, group, x.cols, scratch);
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    for (int64_t t = begin; t < end; ++t) {
      const T* in = x.row(t);
      T* out = g.row(t);
      for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR {
        const auto v = hn::Add(m.load(d, in + i), m.load(d, dt_bias + i));
        const auto e = exp_nonpositive(d, hn::Neg(hn::Abs(v)));
        m.store(d, hn::Mul(m.load(d, rates + i), softplus_from_exp(d, v, e)), out + i);
      });
    }
  });
}

template <class T>
void decay_backward_rows(Mat<const T> dg, Mat<const T> x, const T* a_log, const T* dt_bias, int64_t group, Mat<T> dx,
                         T* da_log, T* ddt_bias) {
  const int64_t n = x.cols;
  LocalScratch scratch;
  const T* rates = decay_rates(a_log, group, n, scratch);
  const RowBlocks blocks = RowBlocks::cut(x.rows, n);
  PartialSums<T> partial(blocks.count(), 2 * n);  // of dx, then of dg g
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    T* sum_dx = partial.block(block);
    T* sum_dgg = sum_dx + n;
    for (int64_t t = begin; t < end; ++t) {
      const T* grad = dg.row(t);
      const T* in = x.row(t);
      T* out = dx.row(t);
      for_lanes(d, n, [&](auto m, int64_t i) HWY_ATTR {
        const auto v = hn::Add(m.load(d, in + i), m.load(d, dt_bias + i));
        const auto e = exp_nonpositive(d, hn::Neg(hn::Abs(v)));
        const auto scaled = hn::Mul(m.load(d, grad + i), m.load(d, rates + i));
        const auto r = hn::Mul(scaled, sigmoid_from_exp(d, v, e));
        m.store(d, r, out + i);
        m.store(d, hn::Add(m.load(d, sum_dx + i), r), sum_dx + i);
        m.store(d, hn::MulAdd(scaled, softplus_from_exp(d, v, e), m.load(d, sum_dgg + i)), sum_dgg + i);
      });
    }
  });
  if (blocks.count() == 0) return;
  const T* total = partial.total();
  for (int64_t c = 0; c < n; ++c) {
    ddt_bias[c] += total[c];
    da_log[c / group] += total[n + c];
  }
}

GateKernels<float> gate_kernels_f32() {
  return {sigmoid_forward_rows<float>, sigmoid_backward_rows<float>, decay_forward_rows<float>,
          decay_backward_rows<float>};
}
GateKernels<double> gate_kernels_f64() {
  return {sigmoid_forward_rows<double>, sigmoid_backward_rows<double>, decay_forward_rows<double>,
          decay_backward_rows<double>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(gate_kernels_f32);
HWY_EXPORT(gate_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(gate_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(gate_kernels_f64)();
  }
}

}  // namespace

namespace cpu {

template <class T>
void sigmoid_gate_forward(const Exec<T>&, Mat<const T> x, const T* bias, T scale, Mat<T> y) {
  kernels<T>().sigmoid_forward(x, bias, scale, y);
}

template <class T>
void sigmoid_gate_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> y, T scale, Mat<T> dx, T* dbias) {
  kernels<T>().sigmoid_backward(dy, y, scale, dx, dbias);
}

template <class T>
void decay_gate_forward(const Exec<T>&, Mat<const T> x, const T* a_log, const T* dt_bias, int64_t group, Mat<T> g) {
  kernels<T>().decay_forward(x, a_log, dt_bias, group, g);
}

template <class T>
void decay_gate_backward(const Exec<T>&, Mat<const T> dg, Mat<const T> x, const T* a_log, const T* dt_bias,
                         int64_t group, Mat<T> dx, T* da_log, T* ddt_bias) {
  kernels<T>().decay_backward(dg, x, a_log, dt_bias, group, dx, da_log, ddt_bias);
}

template void sigmoid_gate_forward(const Exec<float>&, Mat<const float>, const float*, float, Mat<float>);
template void sigmoid_gate_forward(const Exec<double>&, Mat<const double>, const double*, double, Mat<double>);
template void sigmoid_gate_backward(const Exec<float>&, Mat<const float>, Mat<const float>, float, Mat<float>, float*);
template void sigmoid_gate_backward(const Exec<double>&, Mat<const double>, Mat<const double>, double, Mat<double>,
                                    double*);
template void decay_gate_forward(const Exec<float>&, Mat<const float>, const float*, const float*, int64_t, Mat<float>);
template void decay_gate_forward(const Exec<double>&, Mat<const double>, const double*, const double*, int64_t,
                                 Mat<double>);
template void decay_gate_backward(const Exec<float>&, Mat<const float>, Mat<const float>, const float*, const float*,
                                  int64_t, Mat<float>, float*, float*);
template void decay_gate_backward(const Exec<double>&, Mat<const double>, Mat<const double>, const double*,
                                  const double*, int64_t, Mat<double>, double*, double*);

}  // namespace cpu
}  // namespace fw
#endif
