// The gates of the mixer on the device: scaled sigmoid and log-decay, forward and backward.
//   sigmoid: y = scale s(x + bias)               dx = dy y (1 - y / scale)
//   decay:   g = -exp(a) softplus(x + delta)     dx = -dg exp(a) s(x + delta)      da = sum of dg g
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

struct SigmoidGate {
  const float* bias;
  float scale;

  template <int N>
  FW_DEVICE GroupValues<1> columns(int64_t) const {
    return {{bias == nullptr ? 0.0f : *bias}};
  }
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<1>& shift, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = scale * sigmoid(in[0][k] + shift.of[0]);
  }
};

// in: dy, y
struct SigmoidGateBackward : Plain {
  float inverse;

  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[0][k] * in[1][k] * (1.0f - in[1][k] * inverse);
  }
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing& none, int64_t row, const float (&in)[I][N], float (&out)[O][N],
                            float (&sums)[1][N]) const {
    (*this)(none, row, in, out);
    FW_UNROLL for (int k = 0; k < N; ++k) sums[0][k] += out[0][k];
  }
};

template <int N>
struct DecayColumns {
  float rate[N], shift[N];
};

struct DecayGate {
  const float *a_log, *dt_bias;
  int64_t group;

  template <int N>
  FW_DEVICE DecayColumns<N> columns(int64_t c) const {
    const GroupValues<N> a = group_values<N>(a_log, group, c);
    DecayColumns<N> of;
    FW_UNROLL for (int k = 0; k < N; ++k) of.rate[k] = -exp_fast(a.of[k]), of.shift[k] = dt_bias[c + k];
    return of;
  }
  template <int N, int I, int O>
  FW_DEVICE void operator()(const DecayColumns<N>& of, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = of.rate[k] * softplus(in[0][k] + of.shift[k]);
  }
  // in: dg, x;  sums: of dx, of dg g
  template <int N, int I, int O>
  FW_DEVICE void operator()(const DecayColumns<N>& of, int64_t, const float (&in)[I][N], float (&out)[O][N],
                            float (&sums)[2][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float z = in[1][k] + of.shift[k], scaled = in[0][k] * of.rate[k];
      const float dx = scaled * sigmoid(z);
      out[0][k] = dx;
      sums[0][k] += dx;
      sums[1][k] += scaled * softplus(z);
    }
  }
};

}  // namespace

namespace ops {

template <class T>
void sigmoid_gate_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* bias, Wide<T> scale, Mat<T> y) {
  elementwise<4>(SigmoidGate{bias, scale}, x.rows, x.cols, operands(x), operands(y), exec.device.stream());
}

template <class T>
void sigmoid_gate_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> y, Wide<T> scale, Mat<T> dx,
                           Wide<T>* dbias) {
  const SigmoidGateBackward f{{}, 1.0f / scale};
  if (dbias == nullptr) return elementwise<2>(f, y.rows, y.cols, operands(dy, y), operands(dx), exec.device.stream());
  elementwise_sums<1, 2>(exec, f, y.rows, y.cols, operands(dy, y), operands(dx),
                         [&](const float* partial, int64_t blocks) {
                           add_group_sums(partial, blocks, y.cols, y.cols, dbias, exec.arena, exec.device.stream());
                         });
}

template <class T>
void decay_gate_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* a_log, const Wide<T>* dt_bias,
                        int64_t group, Mat<Wide<T>> g) {
  elementwise<4>(DecayGate{a_log, dt_bias, group}, x.rows, x.cols, operands(x), operands(g), exec.device.stream());
}

template <class T>
void decay_gate_backward(const Exec<T>& exec, Mat<const Wide<T>> dg, Mat<const T> x, const Wide<T>* a_log,
                         const Wide<T>* dt_bias, int64_t group, Mat<T> dx, Wide<T>* da_log, Wide<T>* ddt_bias) {
  void* stream = exec.device.stream();
  elementwise_sums<2, 2>(exec, DecayGate{a_log, dt_bias, group}, x.rows, x.cols, operands(dg, x), operands(dx),
                         [&](const float* partial, int64_t blocks) {
                           add_column_sums(partial, blocks, x.cols, ddt_bias, stream);
                           add_group_sums(partial + blocks * x.cols, blocks, x.cols, group, da_log, exec.arena, stream);
                         });
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void sigmoid_gate_forward<T>(const Exec<T>&, Mat<const T>, const float*, float, Mat<T>);                   \
  template void sigmoid_gate_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, float, Mat<T>, float*);          \
  template void decay_gate_forward<T>(const Exec<T>&, Mat<const T>, const float*, const float*, int64_t, Mat<float>); \
  template void decay_gate_backward<T>(const Exec<T>&, Mat<const float>, Mat<const T>, const float*, const float*,    \
                                       int64_t, Mat<T>, float*, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
