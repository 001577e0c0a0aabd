// The law of gates given as logits (rule/gate_law.h) for rows of numbers, and its adjoint. See kernels.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_gates.cpp"
// The per-target includes must come after foreach_target.h.
// clang-format off
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include "scan/cpu/kernels.h"
#include "scan/cpu/simd_table.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// exp(-|x|), and what it makes: s(x) and softplus(x).
template <class D, class V = hn::Vec<D>>
V falling_exponential(D d, V x) {
  return hn::Exp(
      d, hn::Max(hn::Neg(hn::Abs(x)),
                 hn::Set(d, sizeof(hn::TFromD<D>) == sizeof(float) ? hn::TFromD<D>(-104) : hn::TFromD<D>(-745))));
}
template <class D, class V = hn::Vec<D>>
V sigmoid(D d, V x, V e) {
  const V inverse = hn::Div(hn::Set(d, hn::TFromD<D>(1)), hn::Add(hn::Set(d, hn::TFromD<D>(1)), e));
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Mul(e, inverse), inverse);
}
template <class D, class V = hn::Vec<D>>
V softplus(D d, V x, V e) {
  return hn::Add(hn::Max(x, hn::Zero(d)), hn::Log1p(d, e));
}

template <class T>
void gate_forward(const GateLaw<T>& law, int64_t n, const T* x, const T* bias, const T* rate, T* value) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto factor = hn::Set(d, law.factor);
  for (int64_t i = 0; i < n; i += lanes) {
    const auto y = hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, bias + i)), a = hn::LoadU(d, rate + i);
    auto z = y;
    switch (law.given) {
      case GateActivation::kValue:
        break;
      case GateActivation::kSigmoid:
        z = hn::Mul(factor, sigmoid(d, y, falling_exponential(d, y)));
        break;
      case GateActivation::kSoftplus:
        z = hn::Neg(hn::Mul(a, softplus(d, y, falling_exponential(d, y))));
        break;
      case GateActivation::kLowerBound: {
        const auto ay = hn::Mul(a, y);
        z = hn::Mul(factor, sigmoid(d, ay, falling_exponential(d, ay)));
        break;
      }
      case GateActivation::kLogSigmoid:
        z = hn::Neg(hn::Mul(factor, softplus(d, hn::Neg(y), falling_exponential(d, y))));
        break;
    }
    hn::StoreU(z, d, value + i);
  }
}

template <class T>
void gate_backward(const GateLaw<T>& law, int64_t n, const T* x, const T* bias, const T* rate, const T* dvalue, T* dx,
                   T* dbias, T* drate) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto factor = hn::Set(d, law.factor), one = hn::Set(d, T(1));
  for (int64_t i = 0; i < n; i += lanes) {
    const auto y = hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, bias + i)), a = hn::LoadU(d, rate + i),
               dz = hn::LoadU(d, dvalue + i);
    auto slope = one, of_rate = hn::Zero(d);
    switch (law.given) {
      case GateActivation::kValue:
        break;
      case GateActivation::kSigmoid: {
        const auto s = sigmoid(d, y, falling_exponential(d, y));
        slope = hn::Mul(hn::Mul(factor, s), hn::Sub(one, s));
        break;
      }
      case GateActivation::kSoftplus: {
        const auto e = falling_exponential(d, y), minus = hn::Neg(a);
        slope = hn::Mul(minus, sigmoid(d, y, e));
        of_rate = hn::Mul(minus, softplus(d, y, e));
        break;
      }
      case GateActivation::kLowerBound: {
        const auto ay = hn::Mul(a, y), s = sigmoid(d, ay, falling_exponential(d, ay));
        slope = hn::Mul(hn::Mul(hn::Mul(factor, a), s), hn::Sub(one, s));
        of_rate = hn::Mul(slope, y);
        break;
      }
      case GateActivation::kLogSigmoid: {
        const auto minus = hn::Neg(y);
        slope = hn::Mul(factor, sigmoid(d, minus, falling_exponential(d, y)));
        break;
      }
    }
    const auto r = hn::Mul(dz, slope);
    hn::StoreU(r, d, dx + i);
    hn::StoreU(hn::Add(hn::LoadU(d, dbias + i), r), d, dbias + i);
    hn::StoreU(hn::MulAdd(dz, of_rate, hn::LoadU(d, drate + i)), d, drate + i);
  }
}

template <class T>
const GateKernels<T>& table_of() {
  static const GateKernels<T> table = {&gate_forward<T>, &gate_backward<T>};
  return table;
}

FW_SIMD_MAKE(GateKernels)

}  // namespace fw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw::cpu {

FW_SIMD_EXPORT(GateKernels, gate_kernels)

}  // namespace fw::cpu
#endif
