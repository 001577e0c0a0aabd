#include "base/f16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "base/f16.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// In integers, so that every target has the same bits: the processor's own conversions differ in what becomes of NaN,
// and the baseline has none.
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> f16_bits(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x), sign = hn::And(bits, hn::Set(du, 0x80000000u)), size = hn::Xor(bits, sign);
  // A normal number: the exponent's bias becomes 15 and 13 bits of the mantissa are rounded off, which may carry into
  // the exponent, up to infinity.
  const auto even = hn::And(hn::ShiftRight<13>(size), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<13>(hn::Add(size, hn::Add(even, hn::Set(du, 0xFFFu - (112u << 23)))));
  // Below 2^-14 the last place is 2^-24, that of a float of 0.5: the sum rounds to it.
  const auto half = hn::Set(d, 0.5f);
  const auto small = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, size), half)), hn::BitCast(du, half));
  auto y = hn::IfThenElse(hn::Lt(size, hn::Set(du, 113u << 23)), small, normal);
  y = hn::IfThenElse(hn::Lt(size, hn::Set(du, 0x477FF000u)), y, hn::Set(du, 0x7C00u));  // from 65520 on
  y = hn::IfThenElse(hn::Gt(size, hn::Set(du, 0x7F800000u)), hn::Set(du, 0x7E00u), y);  // NaN
  return hn::Or(y, hn::ShiftRight<16>(sign));
}

template <class D>
HWY_INLINE hn::Vec<D> f16_value(D d, hn::Vec<hn::RebindToUnsigned<D>> bits) {
  const hn::RebindToUnsigned<D> du;
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u))), size = hn::And(bits, hn::Set(du, 0x7FFFu));
  const auto normal = hn::Add(hn::ShiftLeft<13>(size), hn::Set(du, 112u << 23));
  // A whole number of 2^-24.
  const auto small =
      hn::BitCast(du, hn::Mul(hn::ConvertTo(d, hn::BitCast(hn::RebindToSigned<D>(), size)), hn::Set(d, 0x1p-24f)));
  const auto other = hn::Or(hn::ShiftLeft<13>(size), hn::Set(du, 0x7F800000u));  // infinity, NaN
  auto y = hn::IfThenElse(hn::Lt(size, hn::Set(du, 0x400u)), small, normal);
  y = hn::IfThenElse(hn::Lt(size, hn::Set(du, 0x7C00u)), y, other);
  return hn::BitCast(d, hn::Or(y, sign));
}

template <class D>
using Half = hn::Rebind<uint16_t, D>;

template <class In, class Out, class Step>
HWY_INLINE void for_vectors(int64_t n, const In* x, Out* out, const Step& step) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> one;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) step(d, x + i, out + i);
  for (; i < n; ++i) step(one, x + i, out + i);
}

void round_f16(int64_t n, const float* x, F16* out) {
  for_vectors(n, x, out, [](auto d, const float* in, F16* to) HWY_ATTR {
    hn::StoreU(hn::TruncateTo(Half<decltype(d)>(), f16_bits(d, hn::LoadU(d, in))), Half<decltype(d)>(), &to->bits);
  });
}

void widen(int64_t n, const F16* x, float* out) {
  for_vectors(n, x, out, [](auto d, const F16* in, float* to) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(d)> du;
    hn::StoreU(f16_value(d, hn::PromoteTo(du, hn::LoadU(Half<decltype(d)>(), &in->bits))), d, to);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(round_f16);
HWY_EXPORT(widen);

}  // namespace

void round_to_f16(int64_t n, const float* x, F16* out) { HWY_DYNAMIC_DISPATCH(round_f16)(n, x, out); }
void widen_f16(int64_t n, const F16* x, float* out) { HWY_DYNAMIC_DISPATCH(widen)(n, x, out); }

}  // namespace fw
#endif
