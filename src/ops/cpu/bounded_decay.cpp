// A log-decay with a learned lower bound (HGRN2): a = b + (1 - b) s(x), g = log a, in forms without an exponent above
// zero:
//   1 - a = (1 - b) s(-x)        a = (b + e^x) / (1 + e^x)        dg/dx = (1 - b) s(x) s(-x) / a        dg/db = s(-x) / a
#include <cmath>
#include <vector>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw {
namespace {

// The softmax over the layers of every channel, [layers, n].
template <class T>
std::vector<T> shares_of(Mat<const T> bounds) {
  std::vector<T> shares(static_cast<size_t>(bounds.rows * bounds.cols));
  for (int64_t c = 0; c < bounds.cols; ++c) {
    T most = bounds.row(0)[c], sum = 0;
    for (int64_t i = 1; i < bounds.rows; ++i) most = std::max(most, bounds.row(i)[c]);
    for (int64_t i = 0; i < bounds.rows; ++i)
      sum += shares[static_cast<size_t>(i * bounds.cols + c)] = std::exp(bounds.row(i)[c] - most);
    for (int64_t i = 0; i < bounds.rows; ++i) shares[static_cast<size_t>(i * bounds.cols + c)] /= sum;
  }
  return shares;
}

template <class T>
std::vector<T> bounds_of(const std::vector<T>& shares, int64_t n, int64_t layer) {
  std::vector<T> b(static_cast<size_t>(n), T(0));
  for (int64_t i = 1; i <= layer; ++i) {
    for (int64_t c = 0; c < n; ++c) b[static_cast<size_t>(c)] += shares[static_cast<size_t>(i * n + c)];
  }
  return b;
}

template <class T>
T log_decay(T x, T b) {
  const T e = std::exp(-std::abs(x));
  const T taken = (T(1) - b) * (x >= 0 ? e : T(1)) / (T(1) + e);  // 1 - a
  if (taken < T(0.5)) return std::log1p(-taken);
  if (b == T(0)) return x - std::log1p(e);  // x < 0: above it, 1 - a is below 1/2
  return std::log((b + std::exp(x)) / (T(1) + std::exp(x)));
}

// dg/dx and dg/db.
template <class T>
struct Slopes {
  T x, b;
};
template <class T>
Slopes<T> slopes(T x, T b) {
  const T e = std::exp(-std::abs(x));
  if (x >= 0) {
    const T of_b = e / (T(1) + b * e);
    return {(T(1) - b) * of_b / (T(1) + e), of_b};
  }
  // the first layer, whose bound is no parameter: nobody takes the second
  if (b == T(0)) return {T(1) / (T(1) + e), T(1) / e};
  return {(T(1) - b) * e / ((T(1) + e) * (b + e)), T(1) / (b + e)};
}

}  // namespace

namespace cpu {

template <class T>
void bounded_decay_forward(const Exec<T>&, Mat<const T> x, Mat<const T> bounds, int64_t layer, Mat<T> g) {
  const std::vector<T> b = bounds_of(shares_of(bounds), x.cols, layer);
  for_row_blocks(RowBlocks::cut(x.rows, x.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < x.cols; ++c) g.row(t)[c] = log_decay(x.row(t)[c], b[static_cast<size_t>(c)]);
    }
  });
}

template <class T>
void bounded_decay_backward(const Exec<T>&, Mat<const T> dg, Mat<const T> x, Mat<const T> bounds, int64_t layer,
                            Mat<T> dx, Mat<T> dbounds) {
  const int64_t n = x.cols;
  const std::vector<T> shares = shares_of(bounds), b = bounds_of(shares, n, layer);
  const RowBlocks blocks = RowBlocks::cut(x.rows, n);
  PartialSums<T> partial(blocks.count(), n);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    T* sum = partial.block(block);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < n; ++c) {
        const Slopes<T> slope = slopes(x.row(t)[c], b[static_cast<size_t>(c)]);
        const T grad = dg.row(t)[c];
        dx.row(t)[c] = grad * slope.x;
        if (layer > 0) sum[c] += grad * slope.b;
      }
    }
  });
  if (layer == 0 || x.rows == 0) return;
  // Through the sum of shares and the softmax: d logit_i = share_i (db [1 <= i <= layer] - db b).
  const T* db = partial.total();
  for (int64_t i = 0; i < bounds.rows; ++i) {
    for (int64_t c = 0; c < n; ++c) {
      const T inside = i >= 1 && i <= layer ? T(1) : T(0);
      dbounds.row(i)[c] += shares[static_cast<size_t>(i * n + c)] * db[c] * (inside - b[static_cast<size_t>(c)]);
    }
  }
}

template void bounded_decay_forward(const Exec<float>&, Mat<const float>, Mat<const float>, int64_t, Mat<float>);
template void bounded_decay_forward(const Exec<double>&, Mat<const double>, Mat<const double>, int64_t, Mat<double>);
template void bounded_decay_backward(const Exec<float>&, Mat<const float>, Mat<const float>, Mat<const float>, int64_t,
                                     Mat<float>, Mat<float>);
template void bounded_decay_backward(const Exec<double>&, Mat<const double>, Mat<const double>, Mat<const double>,
                                     int64_t, Mat<double>, Mat<double>);

}  // namespace cpu
}  // namespace fw
