// Maps of q and k and of RWKV-7's layers, elementwise: elu(x) + 1, relu(x), silu(x), tanh(x), relu(x)^2, and the
// product of two matrices.
#include <cmath>

#include "base/error.h"
#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw {
namespace {

// body(row) for all rows, cut by shape.
template <class Body>
void for_rows(int64_t rows, int64_t cols, const Body& body) {
  for_row_blocks(RowBlocks::cut(rows, cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) body(t);
  });
}

void check_elementwise(FeatureMap map) {
  if (map == FeatureMap::kNone || map == FeatureMap::kProduct)
    fail_internal("feature map {}: expected one of elements", static_cast<int>(map));
}

}  // namespace

namespace cpu {

template <class T>
void feature_map_forward(const Exec<T>&, FeatureMap map, Mat<const T> x, Mat<T> y) {
  check_elementwise(map);
  for_rows(x.rows, x.cols, [&](int64_t t) {
    const T* in = x.row(t);
    T* out = y.row(t);
    if (map == FeatureMap::kRelu) {
      for (int64_t c = 0; c < x.cols; ++c) out[c] = std::max(in[c], T(0));
    } else if (map == FeatureMap::kSilu) {
      for (int64_t c = 0; c < x.cols; ++c) out[c] = in[c] / (T(1) + std::exp(-in[c]));
    } else if (map == FeatureMap::kTanh) {
      for (int64_t c = 0; c < x.cols; ++c) out[c] = std::tanh(in[c]);
    } else if (map == FeatureMap::kSquaredRelu) {
      for (int64_t c = 0; c < x.cols; ++c) out[c] = std::max(in[c], T(0)) * std::max(in[c], T(0));
    } else {
      for (int64_t c = 0; c < x.cols; ++c) out[c] = in[c] > 0 ? in[c] + T(1) : std::exp(in[c]);
    }
  });
}

template <class T>
void feature_map_backward(const Exec<T>&, FeatureMap map, Mat<const T> dy, Mat<const T> x, Mat<T> dx) {
  check_elementwise(map);
  for_rows(x.rows, x.cols, [&](int64_t t) {
    const T* in = x.row(t);
    const T* grad = dy.row(t);
    T* out = dx.row(t);
    if (map == FeatureMap::kRelu) {
      for (int64_t c = 0; c < x.cols; ++c) out[c] = in[c] > 0 ? grad[c] : T(0);
    } else if (map == FeatureMap::kSilu) {
      for (int64_t c = 0; c < x.cols; ++c) {
        const T s = T(1) / (T(1) + std::exp(-in[c]));
        out[c] = grad[c] * s * (T(1) + in[c] * (T(1) - s));
      }
    } else if (map == FeatureMap::kTanh) {
      for (int64_t c = 0; c < x.cols; ++c) {
        const T y = std::tanh(in[c]);
        out[c] = grad[c] * (T(1) - y * y);
      }
    } else if (map == FeatureMap::kSquaredRelu) {
      for (int64_t c = 0; c < x.cols; ++c) out[c] = T(2) * std::max(in[c], T(0)) * grad[c];
    } else {
      for (int64_t c = 0; c < x.cols; ++c) out[c] = in[c] > 0 ? grad[c] : grad[c] * std::exp(in[c]);
    }
  });
}

template <class T>
void product_forward(const Exec<T>&, Mat<const T> a, Mat<const T> b, Mat<T> y) {
  for_rows(a.rows, a.cols, [&](int64_t t) {
    for (int64_t c = 0; c < a.cols; ++c) y.row(t)[c] = a.row(t)[c] * b.row(t)[c];
  });
}

template <class T>
void product_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> a, Mat<const T> b, Mat<T> da, Mat<T> db) {
  for_rows(a.rows, a.cols, [&](int64_t t) {
    for (int64_t c = 0; c < a.cols; ++c) {
      const T grad = dy.row(t)[c];
      const T to_a = grad * b.row(t)[c];
      db.row(t)[c] = grad * a.row(t)[c];
      da.row(t)[c] = to_a;
    }
  });
}

template void feature_map_forward(const Exec<float>&, FeatureMap, Mat<const float>, Mat<float>);
template void feature_map_forward(const Exec<double>&, FeatureMap, Mat<const double>, Mat<double>);
template void feature_map_backward(const Exec<float>&, FeatureMap, Mat<const float>, Mat<const float>, Mat<float>);
template void feature_map_backward(const Exec<double>&, FeatureMap, Mat<const double>, Mat<const double>, Mat<double>);
template void product_forward(const Exec<float>&, Mat<const float>, Mat<const float>, Mat<float>);
template void product_forward(const Exec<double>&, Mat<const double>, Mat<const double>, Mat<double>);
template void product_backward(const Exec<float>&, Mat<const float>, Mat<const float>, Mat<const float>, Mat<float>,
                               Mat<float>);
template void product_backward(const Exec<double>&, Mat<const double>, Mat<const double>, Mat<const double>,
                               Mat<double>, Mat<double>);

}  // namespace cpu
}  // namespace fw
