// y = log(1 + exp(x)) on the device, and its gradient from y: dx = dy (1 - exp(-y)).
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

struct Softplus : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = softplus(in[0][k]);
  }
};

// in: dy, y
struct SoftplusBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[0][k] * -expm1f(-in[1][k]);
  }
};

}  // namespace

namespace ops {

template <class T>
void softplus_forward(const Exec<T>& exec, Mat<const T> x, Mat<T> y) {
  elementwise<4>(Softplus{}, x.rows, x.cols, operands(x), operands(y), exec.device.stream());
}

template <class T>
void softplus_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> y, Mat<T> dx) {
  elementwise<2>(SoftplusBackward{}, y.rows, y.cols, operands(dy, y), operands(dx), exec.device.stream());
}

#define FW_INSTANTIATE(T)                                                  \
  template void softplus_forward<T>(const Exec<T>&, Mat<const T>, Mat<T>); \
  template void softplus_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
