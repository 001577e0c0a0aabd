#include "ops/cpu/attention_tile.h"

#include <algorithm>
#include <cmath>
#include <utility>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/attention_tile.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_ATTENTION_TILE_KERNELS
#define FW_OPS_CPU_ATTENTION_TILE_KERNELS
namespace fw {
template <class T>
struct AttentionKernels {
  decltype(&attention_softmax<T>) softmax;
  decltype(&attention_softmax_backward<T>) softmax_backward;
  decltype(&attention_few_scores<T>) few_scores;
  decltype(&attention_few_values<T>) few_values;
};

// The columns [first, second) that row i sees.
template <class T>
std::pair<int64_t, int64_t> seen(const ScoreTile<T>& tile, int64_t i) {
  const int64_t position = tile.query + i;
  const int64_t from = tile.window > 0 ? std::max<int64_t>(position - tile.window + 1 - tile.key, 0) : 0;
  const int64_t to = std::min(position + 1 - tile.key, tile.scores.cols);
  return {std::min(from, tile.scores.cols), std::max(std::min(from, tile.scores.cols), to)};
}
}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

template <class T>
void softmax_tile(const ScoreTile<T>& tile, T* largest, T* sum, Mat<T> o) {
  const hn::ScalableTag<T> d;
  for (int64_t i = 0; i < tile.scores.rows; ++i) {
    const auto bounds = seen(tile, i);  // no structured binding: clang 14 lets no lambda take one
    const int64_t from = bounds.first, to = bounds.second;
    T* row = tile.scores.row(i);
    std::fill(row, row + from, T(0));
    std::fill(row + to, row + tile.scores.cols, T(0));
    if (from >= to) continue;
    const T before = largest[i], now = std::max(before, row_max(d, row + from, to - from));
    const auto shift = hn::Set(d, now);
    auto total = hn::Zero(d);
    for_lanes(d, to - from, [&](auto m, int64_t j) HWY_ATTR {
      const auto e = m.zero_missing(d, exp_nonpositive(d, hn::Sub(m.load(d, row + from + j), shift)));
      total = hn::Add(total, e);
      m.store(d, e, row + from + j);
    });
    T old = sum[i];
    if (now != before) {
      const T factor = std::exp(before - now);
      old *= factor;
      T* out = o.row(i);
      for_lanes(d, o.cols, [&](auto m, int64_t c) HWY_ATTR {
        m.store(d, hn::Mul(m.load(d, out + c), hn::Set(d, factor)), out + c);
      });
      largest[i] = now;
    }
    sum[i] = old + sum_lanes(d, total);
  }
}

template <class T>
void softmax_tile_backward(const ScoreTile<T>& tile, const T* lse, int64_t lse_stride, const T* delta, T scale,
                           Mat<T> dprobs) {
  const hn::ScalableTag<T> d;
  const auto factor = hn::Set(d, scale);
  for (int64_t i = 0; i < tile.scores.rows; ++i) {
    const auto bounds = seen(tile, i);
    const int64_t from = bounds.first, to = bounds.second;
    T* row = tile.scores.row(i);
    T* grad = dprobs.row(i);
    std::fill(row, row + from, T(0));
    std::fill(grad, grad + from, T(0));
    std::fill(row + to, row + tile.scores.cols, T(0));
    std::fill(grad + to, grad + tile.scores.cols, T(0));
    const auto shift = hn::Set(d, lse[i * lse_stride]);
    const auto mean = hn::Set(d, delta[i]);
    for_lanes(d, to - from, [&](auto m, int64_t j) HWY_ATTR {
      const auto p = exp_nonpositive(d, hn::Sub(m.load(d, row + from + j), shift));
      m.store(d, p, row + from + j);
      m.store(d, hn::Mul(hn::Mul(p, factor), hn::Sub(m.load(d, grad + from + j), mean)), grad + from + j);
    });
  }
}

template <class T>
void few_scores(Mat<const T> q, Mat<const T> k, Mat<T> scores) {
  const hn::ScalableTag<T> d;
  for (int64_t j = 0; j < k.rows; ++j) {
    const T* key = k.row(j);
    for (int64_t r = 0; r < q.rows; ++r) {
      const T* query = q.row(r);
      auto dot = hn::Zero(d);
      for_lanes(d, q.cols,
                [&](auto m, int64_t c) HWY_ATTR { dot = hn::MulAdd(m.load(d, query + c), m.load(d, key + c), dot); });
      scores.row(r)[j] = sum_lanes(d, dot);
    }
  }
}

template <class T>
void few_values(Mat<const T> probs, Mat<const T> v, Mat<T> o) {
  const hn::ScalableTag<T> d;
  for (int64_t r = 0; r < probs.rows; ++r) {
    T* out = o.row(r);
    const T* p = probs.row(r);
    for_lanes(d, o.cols, [&](auto m, int64_t c) HWY_ATTR {
      auto sum = m.load(d, out + c);
      for (int64_t j = 0; j < v.rows; ++j) sum = hn::MulAdd(hn::Set(d, p[j]), m.load(d, v.row(j) + c), sum);
      m.store(d, sum, out + c);
    });
  }
}

AttentionKernels<float> attention_kernels_f32() {
  return {softmax_tile<float>, softmax_tile_backward<float>, few_scores<float>, few_values<float>};
}
AttentionKernels<double> attention_kernels_f64() {
  return {softmax_tile<double>, softmax_tile_backward<double>, few_scores<double>, few_values<double>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(attention_kernels_f32);
HWY_EXPORT(attention_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(attention_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(attention_kernels_f64)();
  }
}

}  // namespace

template <class T>
void attention_softmax(const ScoreTile<T>& tile, T* largest, T* sum, Mat<T> o) {
  kernels<T>().softmax(tile, largest, sum, o);
}

template <class T>
void attention_softmax_backward(const ScoreTile<T>& tile, const T* lse, int64_t lse_stride, const T* delta, T scale,
                                Mat<T> dprobs) {
  kernels<T>().softmax_backward(tile, lse, lse_stride, delta, scale, dprobs);
}

template <class T>
void attention_few_scores(Mat<const T> q, Mat<const T> k, Mat<T> scores) {
  kernels<T>().few_scores(q, k, scores);
}

template <class T>
void attention_few_values(Mat<const T> probs, Mat<const T> v, Mat<T> o) {
  kernels<T>().few_values(probs, v, o);
}

#define FW_INSTANTIATE(T)                                                                                \
  template void attention_softmax(const ScoreTile<T>&, T*, T*, Mat<T>);                                  \
  template void attention_softmax_backward(const ScoreTile<T>&, const T*, int64_t, const T*, T, Mat<T>); \
  template void attention_few_scores(Mat<const T>, Mat<const T>, Mat<T>);                                \
  template void attention_few_values(Mat<const T>, Mat<const T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw
#endif
