// Feature maps of q and k on the device, elementwise: elu(x) + 1, relu(x), and the product of two matrices.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

// kElu, or kRelu.
template <FeatureMap kMap>
struct Mapped : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float x = in[0][k];
      out[0][k] = kMap == FeatureMap::kRelu ? fmaxf(x, 0.0f) : x > 0 ? x + 1.0f : exp_fast(x);
    }
  }
};

// in: dy, x
template <FeatureMap kMap>
struct MappedBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float x = in[1][k], grad = in[0][k];
      out[0][k] = x > 0 ? grad : kMap == FeatureMap::kRelu ? 0.0f : grad * exp_fast(x);
    }
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
  fail_internal("feature map {}: expected elu or relu", static_cast<int>(map));
}

}  // namespace

namespace ops {

template <class T>
void feature_map_forward(const Exec<T>& exec, FeatureMap map, Mat<const T> x, Mat<T> y) {
  with_map(map, [&]<FeatureMap kMap>() { elementwise<4>(Mapped<kMap>{}, x.rows, x.cols, operands(x), operands(y), exec.device.stream()); });
}

template <class T>
void feature_map_backward(const Exec<T>& exec, FeatureMap map, Mat<const T> dy, Mat<const T> x, Mat<T> dx) {
  with_map(map, [&]<FeatureMap kMap>() { elementwise<2>(MappedBackward<kMap>{}, x.rows, x.cols, operands(dy, x), operands(dx), exec.device.stream()); });
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
