// Maps of one number on the device, elementwise, and the product of two matrices.
#include <cmath>

#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

// A map of one number, and its slope.
template <FeatureMap kMap>
FW_DEVICE float mapped(float x) {
  if constexpr (kMap == FeatureMap::kRelu) return fmaxf(x, 0.0f);
  if constexpr (kMap == FeatureMap::kElu) return x > 0 ? x + 1.0f : exp_fast(x);
  if constexpr (kMap == FeatureMap::kSilu) return x * sigmoid(x);
  if constexpr (kMap == FeatureMap::kTanh) return tanhf(x);
  if constexpr (kMap == FeatureMap::kSquaredRelu) return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
  return 0;
}
template <FeatureMap kMap>
FW_DEVICE float slope(float x) {
  if constexpr (kMap == FeatureMap::kRelu) return x > 0 ? 1.0f : 0.0f;
  if constexpr (kMap == FeatureMap::kElu) return x > 0 ? 1.0f : exp_fast(x);
  if constexpr (kMap == FeatureMap::kSilu) return silu_slope(x, sigmoid(x));
  if constexpr (kMap == FeatureMap::kTanh) return 1.0f - tanhf(x) * tanhf(x);
  if constexpr (kMap == FeatureMap::kSquaredRelu) return 2.0f * fmaxf(x, 0.0f);
  return 0;
}

template <FeatureMap kMap>
struct Mapped : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = mapped<kMap>(in[0][k]);
  }
};

// in: dy, x
template <FeatureMap kMap>
struct MappedBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[0][k] * slope<kMap>(in[1][k]);
  }
};

// in: a, b
struct Product : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[0][k] * in[1][k];
  }
};

// in: dy, a, b
struct ProductBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[0][k] * in[2][k], out[1][k] = in[0][k] * in[1][k];
  }
};

template <class Run>
void with_map(FeatureMap map, const Run& run) {
  if (map == FeatureMap::kElu) return run.template operator()<FeatureMap::kElu>();
  if (map == FeatureMap::kRelu) return run.template operator()<FeatureMap::kRelu>();
  if (map == FeatureMap::kSilu) return run.template operator()<FeatureMap::kSilu>();
  if (map == FeatureMap::kTanh) return run.template operator()<FeatureMap::kTanh>();
  if (map == FeatureMap::kSquaredRelu) return run.template operator()<FeatureMap::kSquaredRelu>();
  fail_internal("feature map {}: expected a map of one number", static_cast<int>(map));
}

}  // namespace

namespace ops {

template <class T>
void feature_map_forward(const Exec<T>& exec, FeatureMap map, Mat<const T> x, Mat<T> y) {
  with_map(map, [&]<FeatureMap kMap>() {
    elementwise<4>(Mapped<kMap>{}, x.rows, x.cols, operands(x), operands(y), exec.device.stream());
  });
}

template <class T>
void feature_map_backward(const Exec<T>& exec, FeatureMap map, Mat<const T> dy, Mat<const T> x, Mat<T> dx) {
  with_map(map, [&]<FeatureMap kMap>() {
    elementwise<2>(MappedBackward<kMap>{}, x.rows, x.cols, operands(dy, x), operands(dx), exec.device.stream());
  });
}

template <class T>
void product_forward(const Exec<T>& exec, Mat<const T> a, Mat<const T> b, Mat<T> y) {
  elementwise<2>(Product{}, a.rows, a.cols, operands(a, b), operands(y), exec.device.stream());
}

template <class T>
void product_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> a, Mat<const T> b, Mat<T> da, Mat<T> db) {
  elementwise<2>(ProductBackward{}, a.rows, a.cols, operands(dy, a, b), operands(da, db), exec.device.stream());
}

#define FW_INSTANTIATE(T)                                                                                \
  template void feature_map_forward<T>(const Exec<T>&, FeatureMap, Mat<const T>, Mat<T>);                \
  template void feature_map_backward<T>(const Exec<T>&, FeatureMap, Mat<const T>, Mat<const T>, Mat<T>); \
  template void product_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<T>);                  \
  template void product_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
