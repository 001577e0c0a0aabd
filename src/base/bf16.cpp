#include "base/bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "base/bf16.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "base/bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// step(d, in, out) makes the results of one vector of float lanes; what is left of a row goes lane by lane. (No buffer
// for it on the stack: GCC 12 misaligns vectors there when AddressSanitizer looks for uses after return.)
template <class In, class Out, class Step>
HWY_INLINE void for_vectors(int64_t n, const In* x, Out* out, const Step& step) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> one;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) step(d, x + i, out + i);
  for (; i < n; ++i) step(one, x + i, out + i);
}

template <class D>
using Half = hn::Rebind<uint16_t, D>;

void round_bits(int64_t n, const float* x, Bf16* out) {
  for_vectors(n, x, out, [](auto d, const float* in, Bf16* to) HWY_ATTR {
    hn::StoreU(hn::TruncateTo(Half<decltype(d)>(), bf16_bits(d, hn::LoadU(d, in))), Half<decltype(d)>(), &to->bits);
  });
}

void round_values(int64_t n, const float* x, float* out) {
  for_vectors(n, x, out,
              [](auto d, const float* in, float* to) HWY_ATTR { hn::StoreU(bf16_value(d, hn::LoadU(d, in)), d, to); });
}

void widen(int64_t n, const Bf16* x, float* out) {
  for_vectors(n, x, out, [](auto d, const Bf16* in, float* to) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(d)> du;
    hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(Half<decltype(d)>(), &in->bits)))), d, to);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(round_bits);
HWY_EXPORT(round_values);
HWY_EXPORT(widen);

}  // namespace

void round_to_bf16(int64_t n, const float* x, Bf16* out) { HWY_DYNAMIC_DISPATCH(round_bits)(n, x, out); }
void round_to_bf16_values(int64_t n, const float* x, float* out) { HWY_DYNAMIC_DISPATCH(round_values)(n, x, out); }
void widen_bf16(int64_t n, const Bf16* x, float* out) { HWY_DYNAMIC_DISPATCH(widen)(n, x, out); }

}  // namespace fw
#endif
