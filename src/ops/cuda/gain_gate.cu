// The gain gate on the device where it is no plain sigmoid of a projection: one learned number, factors of a token's
// position, a decay that is what the gain leaves.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/sequences.cuh"

namespace fw::cuda {
namespace {

struct LearnedGate {
  const float* parameter;
  float scale;

  template <int N>
  FW_DEVICE GroupValues<1> columns(int64_t) const {
    return {{scale * sigmoid(*parameter)}};
  }
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<1>& value, int64_t, const float (&)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = value.of[0];
  }
};

struct PositionGate : Plain {
  PassSequences sequences;
  PositionFactor factor;

  PositionGate(const PassLayout& layout, PositionFactor of) : sequences(layout), factor(of) {}

  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t row, const float (&in)[I][N], float (&out)[O][N]) const {
    float f = 1.0f;
    if (factor != PositionFactor::kNone) {
      const float position = static_cast<float>(sequences.position_of(row) + 1);
      f = factor == PositionFactor::kInverse       ? 1.0f / position
          : factor == PositionFactor::kInverseSqrt ? 1.0f / sqrtf(position)
                                                   : 1.0f / logf(position + 1.0f);
    }
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = f * in[0][k];
  }
};

struct SingleGateDecay : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = log_of_complement(in[0][k]);
  }
};

// in: dg, s, dlogit
struct SingleGateDecayBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[2][k] - in[1][k] * in[0][k];
  }
};

}  // namespace

namespace ops {

template <class T>
void learned_gate_forward(const Exec<T>& exec, const Wide<T>* parameter, Wide<T> scale, Mat<T> y) {
  elementwise<4>(LearnedGate{parameter, scale}, y.rows, y.cols, operands(), operands(y), exec.device.stream());
}

template <class T>
void position_factor(const Exec<T>& exec, Mat<const T> s, PositionFactor factor, const PassLayout& layout, Mat<T> y) {
  elementwise<4>(PositionGate(layout, factor), s.rows, s.cols, operands(s), operands(y), exec.device.stream());
}

template <class T>
void single_gate_decay_forward(const Exec<T>& exec, Mat<const T> s, Mat<Wide<T>> g) {
  elementwise<4>(SingleGateDecay{}, s.rows, s.cols, operands(s), operands(g), exec.device.stream());
}

template <class T>
void single_gate_decay_backward(const Exec<T>& exec, Mat<const Wide<T>> dg, Mat<const T> s, Mat<T> dlogit) {
  elementwise<2>(SingleGateDecayBackward{}, dg.rows, dg.cols, operands(dg, s, dlogit), operands(dlogit),
                 exec.device.stream());
}

#define FW_INSTANTIATE(T)                                                                                    \
  template void learned_gate_forward<T>(const Exec<T>&, const float*, float, Mat<T>);                        \
  template void position_factor<T>(const Exec<T>&, Mat<const T>, PositionFactor, const PassLayout&, Mat<T>); \
  template void single_gate_decay_forward<T>(const Exec<T>&, Mat<const T>, Mat<float>);                      \
  template void single_gate_decay_backward<T>(const Exec<T>&, Mat<const float>, Mat<const T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
