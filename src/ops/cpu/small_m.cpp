// Dot products of rows of x with every row of W: each vector of W is loaded once and used for kSmallM rows.
#include "ops/cpu/small_m.h"

#include "ops/cpu/bf16.h"
#include "ops/cpu/row_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/small_m.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

struct Native {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D, hn::Vec<D> w) const {
    return w;
  }
};

struct Rounded {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> w) const {
    return bf16_value(d, w);
  }
};

// Two sums per row hide the latency of the additions; their number does not depend on kRows, so a row's bits do not.
template <int kRows, class Convert, class T>
HWY_INLINE void dot_rows(Mat<const T> x, Mat<const T> weight, Mat<T> y, bool accumulate, int64_t begin, int64_t end,
                         Convert convert) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t n = x.cols;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* in[kRows];
  for (int r = 0; r < kRows; ++r) in[r] = x.row(r);
  for (int64_t o = begin; o < end; ++o) {
    const T* w = weight.row(o);
    V even[kRows];
    V odd[kRows];
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = hn::Zero(d);
    int64_t i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const V w0 = convert(d, hn::LoadU(d, w + i));
      const V w1 = convert(d, hn::LoadU(d, w + i + lanes));
      for (int r = 0; r < kRows; ++r) {
        even[r] = hn::MulAdd(hn::LoadU(d, in[r] + i), w0, even[r]);
        odd[r] = hn::MulAdd(hn::LoadU(d, in[r] + i + lanes), w1, odd[r]);
      }
    }
    for_lanes(d, n - i, [&](auto m, int64_t j) HWY_ATTR {
      const V w0 = convert(d, m.load(d, w + i + j));
      for (int r = 0; r < kRows; ++r) even[r] = hn::MulAdd(m.load(d, in[r] + i + j), w0, even[r]);
    });
    for (int r = 0; r < kRows; ++r) {
      const T sum = sum_lanes(d, hn::Add(even[r], odd[r]));
      T& to = y.row(r)[o];
      to = accumulate ? to + sum : sum;
    }
  }
}

// x has at most kSmallM rows.
template <class Convert, class T>
HWY_INLINE void dot_few_rows(Mat<const T> x, Mat<const T> weight, Mat<T> y, bool accumulate, int64_t begin, int64_t end,
                             Convert convert) {
  switch (x.rows) {
    case 1:
      return dot_rows<1>(x, weight, y, accumulate, begin, end, convert);
    case 2:
      return dot_rows<2>(x, weight, y, accumulate, begin, end, convert);
    case 3:
      return dot_rows<3>(x, weight, y, accumulate, begin, end, convert);
    case 4:
      return dot_rows<4>(x, weight, y, accumulate, begin, end, convert);
    default:
      return;
  }
}

// Blocks of 64 Ki weights: below that one core is faster than waking another.
inline RowBlocks weight_blocks(int64_t rows, int64_t cols) {
  return {rows, std::max<int64_t>(1, 65536 / std::max<int64_t>(1, cols))};
}

template <class Convert, class T>
void product(Mat<const T> x, Mat<const T> weight, Mat<T> y, bool accumulate, Convert convert) {
  // Of many rows of x, kRows stay in the second cache while those of kTile weights in the first pass them.
  constexpr int64_t kTile = 4096, kRows = 64;
  const int64_t tile = x.rows > kSmallM ? std::max<int64_t>(1, kTile / std::max<int64_t>(1, weight.cols)) : weight.rows;
  for_row_blocks(weight_blocks(weight.rows, weight.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t first = 0; first < x.rows; first += kRows) {
      for (int64_t o = begin; o < end; o += tile) {
        for (int64_t t = first; t < std::min(first + kRows, x.rows); t += kSmallM) {
          const int64_t rows = std::min(kSmallM, x.rows - t);
          dot_few_rows(x.row_range(t, rows), weight, y.row_range(t, rows), accumulate, o, std::min(o + tile, end),
                       convert);
        }
      }
    }
  });
}

// Rows are widened one after the other, in the cache of the core that multiplies with them.
template <class Convert>
void widened_product(Mat<const float> x, Mat<const Bf16> weight, Mat<float> y, bool accumulate, Convert convert) {
  for_row_blocks(weight_blocks(weight.rows, weight.cols), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    LocalScratch scratch;
    float* wide = scratch.alloc<float>(weight.cols);
    for (int64_t o = begin; o < end; ++o) {
      widen_bf16(weight.cols, weight.row(o), wide);
      for (int64_t t = 0; t < x.rows; t += kSmallM) {
        const int64_t rows = std::min(kSmallM, x.rows - t);
        dot_few_rows(x.row_range(t, rows), Mat<const float>(wide, 1, weight.cols), y.row_range(t, rows).col_range(o, 1),
                     accumulate, 0, 1, convert);
      }
    }
  });
}

void product_f32(Mat<const float> x, Mat<const float> weight, Mat<float> y, bool accumulate) {
  product(x, weight, y, accumulate, Native());
}
void product_f64(Mat<const double> x, Mat<const double> weight, Mat<double> y, bool accumulate) {
  product(x, weight, y, accumulate, Native());
}
void product_bf16(Mat<const float> x, Mat<const float> weight, Mat<float> y, bool accumulate) {
  product(x, weight, y, accumulate, Rounded());
}
// Rounding leaves the numbers of a bf16 weight as they are.
void widened_product_f32(Mat<const float> x, Mat<const Bf16> weight, Mat<float> y, bool accumulate) {
  widened_product(x, weight, y, accumulate, Native());
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(product_f32);
HWY_EXPORT(product_f64);
HWY_EXPORT(product_bf16);
HWY_EXPORT(widened_product_f32);

}  // namespace

void small_m_product(Mat<const float> x, Mat<const float> weight, Mat<float> y, Precision precision, bool accumulate) {
  if (precision == Precision::kNative) return HWY_DYNAMIC_DISPATCH(product_f32)(x, weight, y, accumulate);
  LocalScratch scratch;
  const Mat<float> rounded(scratch.alloc<float>(x.rows * x.cols), x.rows, x.cols);
  round_to_bf16_values(x, rounded);
  HWY_DYNAMIC_DISPATCH(product_bf16)(rounded, weight, y, accumulate);
}

void small_m_product(Mat<const float> x, Mat<const Bf16> weight, Mat<float> y, Precision precision, bool accumulate) {
  LocalScratch scratch;
  if (precision == Precision::kBf16) {
    const Mat<float> rounded(scratch.alloc<float>(x.rows * x.cols), x.rows, x.cols);
    round_to_bf16_values(x, rounded);
    x = rounded;
  }
  HWY_DYNAMIC_DISPATCH(widened_product_f32)(x, weight, y, accumulate);
}

void small_m_product(Mat<const double> x, Mat<const double> weight, Mat<double> y, Precision, bool accumulate) {
  HWY_DYNAMIC_DISPATCH(product_f64)(x, weight, y, accumulate);
}

}  // namespace fw
#endif
