#include "nn/query_key.h"

#include <cstring>

#include "nn/activations.h"

namespace fw {
namespace {

// [T, H K] without gaps, so that it is [T H, K] too.
template <class T>
Mat<T> by_head(Mat<T> m, int64_t key_dim) {
  return {m.data, m.rows * (m.cols / key_dim), key_dim};
}

template <class T>
Mat<T> new_dense(Arena& arena, int64_t rows, int64_t cols) {
  return {arena.alloc<T>(rows * cols), rows, cols};
}

template <class T>
void copy(Mat<const T> from, Mat<T> to) {
  for (int64_t t = 0; t < from.rows; ++t) std::memcpy(to.row(t), from.row(t), static_cast<size_t>(from.cols) * sizeof(T));
}

}  // namespace

template <class T>
Mat<T> QueryKey<T>::map_forward(const Pass<T>& pass, Mat<T> x, int first, Side& side) const {
  if (spec_.map == FeatureMap::kNone) return x;
  const Mat<T> y = new_dense<T>(pass.arena, x.rows, x.cols);
  if (spec_.map != FeatureMap::kProduct) {
    side.in = x;
    feature_map_forward<T>(spec_.map, x, y);
    return y;
  }
  const Params<T>& params = pass.params;
  const int64_t K = spec_.key_dim;
  const Mat<T> dense = new_dense<T>(pass.arena, x.rows, x.cols);
  copy<T>(x, dense);
  const Mat<T> in = by_head(dense, K);
  side.in = in;
  side.one = new_dense<T>(pass.arena, in.rows, K);
  side.two = new_dense<T>(pass.arena, in.rows, K);
  linear_forward<T>(in, params.matrix(first, K, K), params.value(first + 1), side.one, pass.precision);
  linear_forward<T>(in, params.matrix(first + 2, K, K), params.value(first + 3), side.two, pass.precision);
  product_forward<T>(side.one, side.two, by_head(y, K));
  return y;
}

template <class T>
void QueryKey<T>::map_backward(const Pass<T>& pass, const Side& side, int first, Mat<T> dy, Mat<T> dx) const {
  if (spec_.map == FeatureMap::kNone) return;
  if (spec_.map != FeatureMap::kProduct) {
    feature_map_backward<T>(spec_.map, dy, side.in, dx);
    return;
  }
  Params<T>& params = pass.params;
  const int64_t K = spec_.key_dim;
  const Mat<T> done = by_head(dy, K);
  const Mat<T> dtwo = new_dense<T>(pass.arena, done.rows, K);
  const Mat<T> din = new_dense<T>(pass.arena, dy.rows, dy.cols);
  product_backward<T>(done, side.one, side.two, done, dtwo);
  linear_backward<T>(done, side.in, params.matrix(first, K, K), by_head(din, K), params.grad_matrix(first, K, K), params.grad(first + 1), pass.precision);
  linear_backward<T>(dtwo, side.in, params.matrix(first + 2, K, K), by_head(din, K), params.grad_matrix(first + 2, K, K), params.grad(first + 3),
                     pass.precision, Write::kAccumulate);
  copy<T>(din, dx);
}

template <class T>
void QueryKey<T>::forward(const Pass<T>& pass, Mat<T>& q, Mat<T>& k, Context& c) const {
  q = map_forward(pass, q, q_first_, c.q);
  k = map_forward(pass, k, k_first_, c.k);
  if (spec_.rope_theta == 0) return;
  rotary<T>(q, spec_.key_dim, spec_.rope_theta, pass.layout, pass.positions, Turn::kForth);
  rotary<T>(k, spec_.key_dim, spec_.rope_theta, pass.layout, pass.positions, Turn::kForth);
}

template <class T>
Mat<T> QueryKey<T>::gradient(const Pass<T>& pass, Mat<T> din) const {
  return spec_.map == FeatureMap::kNone ? din : new_dense<T>(pass.arena, din.rows, din.cols);
}

template <class T>
void QueryKey<T>::backward(const Pass<T>& pass, const Context& c, Mat<T> dq, Mat<T> dk, Mat<T> dq_in, Mat<T> dk_in) const {
  if (spec_.rope_theta != 0) {
    rotary<T>(dq, spec_.key_dim, spec_.rope_theta, pass.layout, pass.positions, Turn::kBack);
    rotary<T>(dk, spec_.key_dim, spec_.rope_theta, pass.layout, pass.positions, Turn::kBack);
  }
  map_backward(pass, c.q, q_first_, dq, dq_in);
  map_backward(pass, c.k, k_first_, dk, dk_in);
}

template class QueryKey<float>;
template class QueryKey<double>;

}  // namespace fw
