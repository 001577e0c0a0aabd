// The time step of a state-space layer and its decay on the device, column by column: dt = softplus(x + bias), g =
// -exp(a) dt.
//   dx = (d_dt - exp(a) dg) s(x + bias)        da = sum of dg g
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

template <int N>
struct StepColumns {
  float rate[N], shift[N];
};

struct TimeStep {
  const float *a_log, *bias;

  template <int N>
  FW_DEVICE StepColumns<N> columns(int64_t c) const {
    StepColumns<N> of;
    FW_UNROLL for (int k = 0; k < N; ++k) of.rate[k] = -exp_fast(a_log[c + k]), of.shift[k] = bias[c + k];
    return of;
  }
  // in: x;  out: dt, g
  template <int N, int I, int O>
  FW_DEVICE void operator()(const StepColumns<N>& of, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      out[0][k] = softplus(in[0][k] + of.shift[k]);
      out[1][k] = of.rate[k] * out[0][k];
    }
  }
  // in: d_dt, dg, x;  sums: of dx, of dg g
  template <int N, int I, int O>
  FW_DEVICE void operator()(const StepColumns<N>& of, int64_t, const float (&in)[I][N], float (&out)[O][N],
                            float (&sums)[2][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float z = in[2][k] + of.shift[k], scaled = in[1][k] * of.rate[k];
      out[0][k] = (in[0][k] + scaled) * sigmoid(z);
      sums[0][k] += out[0][k];
      sums[1][k] += scaled * softplus(z);
    }
  }
};

}  // namespace

namespace ops {

template <class T>
void time_step_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* a_log, const Wide<T>* bias, Mat<T> dt,
                       Mat<Wide<T>> g) {
  elementwise<4>(TimeStep{a_log, bias}, x.rows, x.cols, operands(x), operands(dt, g), exec.device.stream());
}

template <class T>
void time_step_backward(const Exec<T>& exec, Mat<const T> d_dt, Mat<const Wide<T>> dg, Mat<const T> x,
                        const Wide<T>* a_log, const Wide<T>* bias, Mat<T> dx, Wide<T>* da_log, Wide<T>* dbias) {
  void* stream = exec.device.stream();
  elementwise_sums<2, 2>(exec, TimeStep{a_log, bias}, x.rows, x.cols, operands(d_dt, dg, x), operands(dx),
                         [&](const float* partial, int64_t blocks) {
                           add_column_sums(partial, blocks, x.cols, dbias, stream);
                           add_column_sums(partial + blocks * x.cols, blocks, x.cols, da_log, stream);
                         });
}

#define FW_INSTANTIATE(T)                                                                                           \
  template void time_step_forward<T>(const Exec<T>&, Mat<const T>, const float*, const float*, Mat<T>, Mat<float>); \
  template void time_step_backward<T>(const Exec<T>&, Mat<const T>, Mat<const float>, Mat<const T>, const float*,   \
                                      const float*, Mat<T>, float*, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
