// What the vectorised operations share, compiled once per instruction set (Highway): loops over columns with a masked
// tail, and the transcendental functions. Unlike Highway's Exp, which turns NaN into 0, these keep NaN, so that a
// diverged step is seen in the loss.
#if defined(FW_OPS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_OPS_CPU_SIMD_INL_H_
#undef FW_OPS_CPU_SIMD_INL_H_
#else
#define FW_OPS_CPU_SIMD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/bf16-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Access to a full vector, and to the last `count` lanes of a row (the others are read as 0 and not written).
struct Whole {
  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, const hn::TFromD<D>* p) const {
    return hn::LoadU(d, p);
  }
  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> v, hn::TFromD<D>* p) const {
    hn::StoreU(v, d, p);
  }
  template <class D>
  HWY_INLINE hn::Vec<D> zero_missing(D, hn::Vec<D> v) const {
    return v;
  }
};

struct Part {
  size_t count;

  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, const hn::TFromD<D>* p) const {
#if HWY_MEM_OPS_MIGHT_FAULT
    HWY_ALIGN hn::TFromD<D> lanes[HWY_MAX_BYTES / sizeof(hn::TFromD<D>)] = {};
    for (size_t i = 0; i < count; ++i) lanes[i] = p[i];
    return hn::Load(d, lanes);
#else
    return hn::MaskedLoad(hn::FirstN(d, count), d, p);
#endif
  }
  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> v, hn::TFromD<D>* p) const {
#if HWY_MEM_OPS_MIGHT_FAULT
    HWY_ALIGN hn::TFromD<D> lanes[HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
    hn::Store(v, d, lanes);
    for (size_t i = 0; i < count; ++i) p[i] = lanes[i];
#else
    hn::BlendedStore(v, hn::FirstN(d, count), d, p);
#endif
  }
  // Zeroes the lanes that do not exist.
  template <class D>
  HWY_INLINE hn::Vec<D> zero_missing(D d, hn::Vec<D> v) const {
    return hn::IfThenElseZero(hn::FirstN(d, count), v);
  }
};

// body(access, i) for the vectors of n columns.
template <class D, class Body>
HWY_INLINE void for_lanes(D d, int64_t n, const Body& body) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(Whole{}, i);
  if (i < n) body(Part{static_cast<size_t>(n - i)}, i);
}

template <class D>
HWY_INLINE hn::TFromD<D> sum_lanes(D d, hn::Vec<D> v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

// exp(x) for x <= 0. NaN stays NaN, and what would be subnormal is 0: subnormal operands slow every later operation
// down a hundredfold. In float 2^n e^r with |r| <= ln(2)/2 and a polynomial within 1e-8 of e^r, half the work of
// Highway's Exp.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_nonpositive(D d, V x) {
  using T = hn::TFromD<D>;
  if constexpr (sizeof(T) == sizeof(float)) {
    const hn::RebindToUnsigned<D> du;
    const V round = hn::Set(d, 12582912.0F);  // 1.5 2^23: adding it leaves the rounded number in the low bits
    const V shifted = hn::MulAdd(x, hn::Set(d, 1.44269504F), round);
    const V n = hn::Sub(shifted, round);
    const V r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4F), hn::NegMulAdd(n, hn::Set(d, 0.693359375F), x));
    V p = hn::MulAdd(hn::Set(d, 0.001278554206F), r, hn::Set(d, 0.008363173343F));
    p = hn::MulAdd(p, r, hn::Set(d, 0.04168368131F));
    p = hn::MulAdd(p, r, hn::Set(d, 0.1666657776F));
    p = hn::MulAdd(p, r, hn::Set(d, 0.4999994934F));
    p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0F));
    const V power = hn::BitCast(d, hn::Add(hn::ShiftLeft<23>(hn::BitCast(du, shifted)), hn::Set(du, 0x3F800000U)));
    return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -86.0F)), hn::Mul(p, power));
  } else {
    return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, T(-708))), hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x)));
  }
}

// 1 / (1 + exp(-x)) from exp(-|x|), which never overflows.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V sigmoid_from_exp(D d, V x, V exp_neg_abs) {
  const V one = hn::Set(d, hn::TFromD<D>(1));
  const V r = hn::Div(one, hn::Add(one, exp_neg_abs));
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Mul(exp_neg_abs, r), r);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V sigmoid(D d, V x) {
  return sigmoid_from_exp(d, x, exp_nonpositive(d, hn::Neg(hn::Abs(x))));
}

// log(1 + exp(x)) from exp(-|x|).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V softplus_from_exp(D d, V x, V exp_neg_abs) {
  return hn::Add(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x), hn::Log1p(d, exp_neg_abs));
}

// d silu(x) / dx, given s = sigmoid(x): s (1 + x (1 - s)).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V silu_slope(D d, V x, V s) {
  return hn::MulAdd(hn::Mul(s, x), hn::Sub(hn::Set(d, hn::TFromD<D>(1)), s), s);
}

// The largest of n >= 1 values. NaN is not a maximum: it has to reach the result another way.
template <class D, class T>
HWY_INLINE T row_max(D d, const T* row, int64_t n) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  T result = row[0];
  int64_t i = 0;
  if (n >= lanes) {
    auto best = hn::LoadU(d, row);
    for (i = lanes; i + lanes <= n; i += lanes) best = hn::Max(best, hn::LoadU(d, row + i));
    result = hn::GetLane(hn::MaxOfLanes(d, best));
  }
  for (; i < n; ++i) result = std::max(result, row[i]);
  return result;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#endif
