#include "base/bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "base/bf16.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <cstring>

#include "base/bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kMostLanes = 64;

// step(in, out) makes one vector's worth of results; the last, incomplete one goes through a buffer.
template <class In, class Out, class Step>
HWY_INLINE void for_vectors(int64_t n, int64_t lanes, const In* x, Out* out, const Step& step) {
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) step(x + i, out + i);
  if (i == n) return;
  In tail_in[kMostLanes] = {};
  Out tail_out[kMostLanes];
  std::memcpy(tail_in, x + i, sizeof(In) * static_cast<size_t>(n - i));
  step(tail_in, tail_out);
  std::memcpy(out + i, tail_out, sizeof(Out) * static_cast<size_t>(n - i));
}

using F = hn::CappedTag<float, kMostLanes>;
using U = hn::RebindToUnsigned<F>;

void round_bits(int64_t n, const float* x, Bf16* out) {
  const hn::Rebind<uint16_t, F> half;
  for_vectors(n, static_cast<int64_t>(hn::Lanes(F())), x, out,
              [&](const float* in, Bf16* to) HWY_ATTR { hn::StoreU(hn::TruncateTo(half, bf16_bits(F(), hn::LoadU(F(), in))), half, to); });
}

void round_values(int64_t n, const float* x, float* out) {
  const F d;
  for_vectors(n, static_cast<int64_t>(hn::Lanes(d)), x, out, [&](const float* in, float* to) HWY_ATTR { hn::StoreU(bf16_value(d, hn::LoadU(d, in)), d, to); });
}

void widen(int64_t n, const Bf16* x, float* out) {
  const F d;
  const U du;
  const hn::Rebind<uint16_t, F> half;
  for_vectors(n, static_cast<int64_t>(hn::Lanes(d)), x, out,
              [&](const Bf16* in, float* to) HWY_ATTR { hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(half, in)))), d, to); });
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
