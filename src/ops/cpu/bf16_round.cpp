// Rounding to bfloat16, vectorised.
#include "ops/cpu/bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/bf16_round.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

void round_rows(Mat<const float> x, Mat<Bf16> out) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint16_t, decltype(d)> half;
  for (int64_t t = 0; t < x.rows; ++t) {
    const float* in = x.row(t);
    Bf16* to = out.row(t);
    for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR { m.store(half, hn::TruncateTo(half, bf16_bits(d, m.load(d, in + i))), to + i); });
  }
}

void round_rows_to_values(Mat<const float> x, Mat<float> out) {
  const hn::ScalableTag<float> d;
  for (int64_t t = 0; t < x.rows; ++t) {
    const float* in = x.row(t);
    float* to = out.row(t);
    for_lanes(d, x.cols, [&](auto m, int64_t i) HWY_ATTR { m.store(d, bf16_value(d, m.load(d, in + i)), to + i); });
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(round_rows);
HWY_EXPORT(round_rows_to_values);

}  // namespace

void round_to_bf16(Mat<const float> x, Mat<Bf16> out) { HWY_DYNAMIC_DISPATCH(round_rows)(x, out); }

void round_to_bf16_values(Mat<const float> x, Mat<float> out) { HWY_DYNAMIC_DISPATCH(round_rows_to_values)(x, out); }

}  // namespace fw
#endif
