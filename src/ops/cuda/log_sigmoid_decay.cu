// The log-decay of gated linear attention on the device: g = scale log s(x + bias) = -scale softplus(-(x + bias)).
//   dx = dg scale s(-(x + bias))     dbias = sum of dx
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

struct LogSigmoidDecay {
  const float* bias;
  float scale;

  template <int N>
  FW_DEVICE GroupValues<N> columns(int64_t c) const {
    GroupValues<N> shift;
    FW_UNROLL for (int k = 0; k < N; ++k) shift.of[k] = bias[c + k];
    return shift;
  }
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& shift, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = -scale * softplus(-(in[0][k] + shift.of[k]));
  }
  // in: dg, x
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& shift, int64_t, const float (&in)[I][N], float (&out)[O][N],
                            float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      out[0][k] = in[0][k] * scale * sigmoid(-(in[1][k] + shift.of[k]));
      sums[0][k] += out[0][k];
    }
  }
};

}  // namespace

namespace ops {

template <class T>
void log_sigmoid_decay_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* bias, Wide<T> scale,
                               Mat<Wide<T>> g) {
  elementwise<4>(LogSigmoidDecay{bias, scale}, x.rows, x.cols, operands(x), operands(g), exec.device.stream());
}

template <class T>
void log_sigmoid_decay_backward(const Exec<T>& exec, Mat<const Wide<T>> dg, Mat<const T> x, const Wide<T>* bias,
                                Wide<T> scale, Mat<T> dx, Wide<T>* dbias) {
  elementwise_sums<1, 2>(exec, LogSigmoidDecay{bias, scale}, x.rows, x.cols, operands(dg, x), operands(dx),
                         [&](const float* partial, int64_t blocks) {
                           add_column_sums(partial, blocks, x.cols, dbias, exec.device.stream());
                         });
}

#define FW_INSTANTIATE(T)                                                                                          \
  template void log_sigmoid_decay_forward<T>(const Exec<T>&, Mat<const T>, const float*, float, Mat<float>);       \
  template void log_sigmoid_decay_backward<T>(const Exec<T>&, Mat<const float>, Mat<const T>, const float*, float, \
                                              Mat<T>, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
