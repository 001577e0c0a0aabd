// Rounding to bfloat16 inside SIMD code; included once per target (after foreach_target.h).
#if defined(FW_BASE_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_BASE_BF16_INL_H_
#undef FW_BASE_BF16_INL_H_
#else
#define FW_BASE_BF16_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The bits of a float rounded to bfloat16 (to nearest even), in the lower half of each lane. NaN
// gets its quiet bit, so that dropping the lower half cannot make it an infinity.
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> bf16_bits(D, V x) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto even = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(even, hn::Set(du, 0x7FFFu)));
  const auto nan = hn::RebindMask(du, hn::IsNaN(x));
  return hn::ShiftRight<16>(hn::IfThenElse(nan, hn::Or(bits, hn::Set(du, 0x400000u)), rounded));
}

// The same number as a float.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V bf16_value(D d, V x) {
  return hn::BitCast(d, hn::ShiftLeft<16>(bf16_bits(d, x)));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#endif
