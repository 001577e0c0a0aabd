// SwiGLU on the device: y = silu(gate) up;  dgate = dy up silu'(gate)     dup = dy silu(gate)
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

// in: gate, up
struct Swiglu : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[0][k] * sigmoid(in[0][k]) * in[1][k];
  }
};

// in: dy, gate, up
struct SwigluBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float x = in[1][k], s = sigmoid(x);
      out[0][k] = in[0][k] * in[2][k] * silu_slope(x, s);
      out[1][k] = in[0][k] * x * s;
    }
  }
};

}  // namespace

namespace ops {

template <class T>
void swiglu_forward(const Exec<T>& exec, Mat<const T> gate, Mat<const T> up, Mat<T> y) {
  elementwise<2>(Swiglu{}, y.rows, y.cols, operands(gate, up), operands(y), exec.device.stream());
}

template <class T>
void swiglu_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> gate, Mat<const T> up, Mat<T> dgate,
                     Mat<T> dup) {
  elementwise<2>(SwigluBackward{}, dy.rows, dy.cols, operands(dy, gate, up), operands(dgate, dup),
                 exec.device.stream());
}

#define FW_INSTANTIATE(T)                                                              \
  template void swiglu_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<T>); \
  template void swiglu_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
