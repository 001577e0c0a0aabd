// y = exp(x) of a parameter's values on the device, and its gradient from y: dx += dy y.
#include "ops/cuda/elementwise.cuh"

namespace fw::cuda {
namespace {

struct Exp : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = expf(in[0][k]);
  }
};

// in: dy, y, dx
struct ExpBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[2][k] + in[0][k] * in[1][k];
  }
};

template <class T>
Mat<T> one_row(T* data, int64_t n) {
  return Mat<T>(data, 1, n);
}

}  // namespace

namespace ops {

template <class T>
void exp_values_forward(const Exec<T>& exec, const Wide<T>* x, int64_t n, Wide<T>* y) {
  if (n == 0) return;
  elementwise<4>(Exp{}, 1, n, operands(one_row(x, n)), operands(one_row(y, n)), exec.device.stream());
}

template <class T>
void exp_values_backward(const Exec<T>& exec, const Wide<T>* dy, const Wide<T>* y, int64_t n, Wide<T>* dx) {
  if (n == 0) return;
  elementwise<4>(ExpBackward{}, 1, n, operands(one_row(dy, n), one_row(y, n), one_row<const Wide<T>>(dx, n)),
                 operands(one_row(dx, n)), exec.device.stream());
}

#define FW_INSTANTIATE(T)                                                             \
  template void exp_values_forward<T>(const Exec<T>&, const float*, int64_t, float*); \
  template void exp_values_backward<T>(const Exec<T>&, const float*, const float*, int64_t, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
