#include "nn/query_key.h"

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

}  // namespace

template <class T>
Mat<T> QueryKey<T>::map_forward(const Pass<T>& pass, Mat<T> x, int first, Side& side) const {
  if (spec_.map == FeatureMap::kNone || x.data == nullptr) return x;
  const Mat<T> y = new_dense<T>(pass.exec.arena, x.rows, x.cols);
  if (spec_.map != FeatureMap::kProduct) {
    side.in = x;
    pass.exec.feature_map_forward(spec_.map, x, y);
    return y;
  }
  const Params<Wide<T>>& params = pass.params;
  const int64_t K = spec_.key_dim;
  const Mat<T> dense = new_dense<T>(pass.exec.arena, x.rows, x.cols);
  pass.exec.copy_rows(x, dense);
  const Mat<T> in = by_head(dense, K);
  side.in = in;
  side.one = new_dense<T>(pass.exec.arena, in.rows, K);
  side.two = new_dense<T>(pass.exec.arena, in.rows, K);
  pass.exec.linear_forward(in, params.weight(first, K, K), params.value(first + 1), side.one, Write::kOverwrite);
  pass.exec.linear_forward(in, params.weight(first + 2, K, K), params.value(first + 3), side.two, Write::kOverwrite);
  pass.exec.product_forward(side.one, side.two, by_head(y, K));
  return y;
}

template <class T>
void QueryKey<T>::map_backward(const Pass<T>& pass, const Side& side, int first, Mat<T> dy, Mat<T> dx) const {
  if (spec_.map == FeatureMap::kNone || dy.data == nullptr) return;
  if (spec_.map != FeatureMap::kProduct) {
    pass.exec.feature_map_backward(spec_.map, dy, side.in, dx);
    return;
  }
  Params<Wide<T>>& params = pass.params;
  const int64_t K = spec_.key_dim;
  const Mat<T> done = by_head(dy, K);
  const Mat<T> dtwo = new_dense<T>(pass.exec.arena, done.rows, K);
  const Mat<T> din = new_dense<T>(pass.exec.arena, dy.rows, dy.cols);
  pass.exec.product_backward(done, side.one, side.two, done, dtwo);
  pass.exec.linear_backward(done, side.in, params.weight(first, K, K), by_head(din, K), params.grad_matrix(first, K, K),
                            params.grad(first + 1), Write::kOverwrite);
  pass.exec.linear_backward(dtwo, side.in, params.weight(first + 2, K, K), by_head(din, K),
                            params.grad_matrix(first + 2, K, K), params.grad(first + 3), Write::kAccumulate);
  pass.exec.copy_rows(din, dx);
}

template <class T>
void QueryKey<T>::forward(const Pass<T>& pass, Mat<T>& q, Mat<T>& k, Context& c) const {
  q = map_forward(pass, q, q_first_, c.q);
  k = map_forward(pass, k, k_first_, c.k);
  if (spec_.rope_theta == 0) return;
  pass.exec.rotary(q, spec_.key_dim, spec_.key_dim, spec_.rope_theta, pass.layout, Rotation::kForward);
  if (k.data != nullptr)
    pass.exec.rotary(k, spec_.key_dim, spec_.key_dim, spec_.rope_theta, pass.layout, Rotation::kForward);
}

template <class T>
Mat<T> QueryKey<T>::gradient(const Pass<T>& pass, Mat<T> din) const {
  return spec_.map == FeatureMap::kNone || din.data == nullptr ? din
                                                               : new_dense<T>(pass.exec.arena, din.rows, din.cols);
}

template <class T>
void QueryKey<T>::backward(const Pass<T>& pass, const Context& c, Mat<T> dq, Mat<T> dk, Mat<T> dq_in,
                           Mat<T> dk_in) const {
  if (spec_.rope_theta != 0) {
    pass.exec.rotary(dq, spec_.key_dim, spec_.key_dim, spec_.rope_theta, pass.layout, Rotation::kBackward);
    if (dk.data != nullptr)
      pass.exec.rotary(dk, spec_.key_dim, spec_.key_dim, spec_.rope_theta, pass.layout, Rotation::kBackward);
  }
  map_backward(pass, c.q, q_first_, dq, dq_in);
  map_backward(pass, c.k, k_first_, dk, dk_in);
}

template class QueryKey<float>;
template class QueryKey<double>;
template class QueryKey<Bf16>;

}  // namespace fw
