// A log-decay with a learned lower bound on the device: a = b + (1 - b) s(x), g = log a, in forms without an exponent
// above zero (ops/cpu/bounded_decay.cpp has their derivation). A thread makes a column's bound b of the layer from the
// softmax over the layers, first; it is then a column's number like a bias.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

constexpr int kThreads = 128;

struct Bounds {
  Mat<const float> logits;  // [layers, n]
  int64_t layer = 0;

  // A column's largest logit and the sum of exponentials alongside it.
  struct Softmax {
    float most, sum;
  };
  FW_DEVICE Softmax softmax(int64_t c) const {
    Softmax of{logits.data[c], 0.0f};
    for (int64_t i = 1; i < logits.rows; ++i) of.most = fmaxf(of.most, logits.data[i * logits.stride + c]);
    for (int64_t i = 0; i < logits.rows; ++i) of.sum += expf(logits.data[i * logits.stride + c] - of.most);
    return of;
  }
  FW_DEVICE float share(const Softmax& of, int64_t i, int64_t c) const {
    return expf(logits.data[i * logits.stride + c] - of.most) / of.sum;
  }
  FW_DEVICE float bound(const Softmax& of, int64_t c) const {
    float b = 0;
    for (int64_t i = 1; i <= layer; ++i) b += share(of, i, c);
    return b;
  }
};

__global__ void __launch_bounds__(kThreads) bounds_kernel(const Bounds bounds, float* b) {
  const int64_t c = int64_t{block_index_x()} * kThreads + thread_index();
  if (c < bounds.logits.cols) b[c] = bounds.bound(bounds.softmax(c), c);
}

// d logit_i = share_i db ([1 <= i <= layer] - b), through the sum of shares and the softmax.
__global__ void __launch_bounds__(kThreads)
    bounds_backward_kernel(const Bounds bounds, const float* db, Mat<float> dlogits) {
  const int64_t c = int64_t{block_index_x()} * kThreads + thread_index();
  if (c >= bounds.logits.cols) return;
  const Bounds::Softmax of = bounds.softmax(c);
  const float b = bounds.bound(of, c);
  for (int64_t i = 0; i < bounds.logits.rows; ++i) {
    dlogits.data[i * dlogits.stride + c] +=
        bounds.share(of, i, c) * db[c] * ((i >= 1 && i <= bounds.layer ? 1.0f : 0.0f) - b);
  }
}

unsigned blocks_of(int64_t columns) { return static_cast<unsigned>((columns + kThreads - 1) / kThreads); }

struct BoundedDecay {
  const float* b;

  template <int N>
  FW_DEVICE GroupValues<N> columns(int64_t c) const {
    GroupValues<N> bound;
    FW_UNROLL for (int k = 0; k < N; ++k) bound.of[k] = b[c + k];
    return bound;
  }
  FW_DEVICE static float log_decay(float x, float b) {
    const float e = expf(-fabsf(x));
    const float taken = (1.0f - b) * (x >= 0.0f ? e : 1.0f) / (1.0f + e);  // 1 - a
    if (taken < 0.5f) return log1pf(-taken);
    if (b == 0.0f) return x - log1pf(e);  // x < 0: above it, 1 - a is below 1/2
    return logf((b + expf(x)) / (1.0f + expf(x)));
  }
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& bound, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = log_decay(in[0][k], bound.of[k]);
  }
  // in: dg, x; sums: dg dg/db
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& bound, int64_t, const float (&in)[I][N], float (&out)[O][N],
                            float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      const float b0 = bound.of[k], x = in[1][k], e = expf(-fabsf(x));
      float of_x, of_b;
      if (x >= 0.0f) {
        of_b = e / (1.0f + b0 * e);
        of_x = (1.0f - b0) * of_b / (1.0f + e);
      } else {
        of_b = b0 == 0.0f ? 0.0f : 1.0f / (b0 + e);  // the first layer's bound is no parameter
        of_x = b0 == 0.0f ? 1.0f / (1.0f + e) : (1.0f - b0) * e / ((1.0f + e) * (b0 + e));
      }
      out[0][k] = in[0][k] * of_x;
      sums[0][k] += in[0][k] * of_b;
    }
  }
};

}  // namespace

namespace ops {

template <class T>
void bounded_decay_forward(const Exec<T>& exec, Mat<const T> x, Mat<const Wide<T>> bounds, int64_t layer,
                           Mat<Wide<T>> g) {
  const Arena::Mark mark = exec.arena.mark();
  float* b = BoundsScratch(exec.arena, x.cols).values;
  launch(bounds_kernel, Dim3{blocks_of(x.cols)}, kThreads, 0, exec.device.stream(), Bounds{bounds, layer}, b);
  elementwise<4>(BoundedDecay{b}, x.rows, x.cols, operands(x), operands(g), exec.device.stream());
  exec.arena.rewind(mark);
}

template <class T>
void bounded_decay_backward(const Exec<T>& exec, Mat<const Wide<T>> dg, Mat<const T> x, Mat<const Wide<T>> bounds,
                            int64_t layer, Mat<T> dx, Mat<Wide<T>> dbounds) {
  const Arena::Mark mark = exec.arena.mark();
  const BoundsScratch scratch(exec.arena, x.cols);
  float *b = scratch.values, *db = scratch.gradients;
  exec.device.fill(db, 0, sizeof(float) * static_cast<size_t>(x.cols));
  launch(bounds_kernel, Dim3{blocks_of(x.cols)}, kThreads, 0, exec.device.stream(), Bounds{bounds, layer}, b);
  elementwise_sums<1, 2>(exec, BoundedDecay{b}, x.rows, x.cols, operands(dg, x), operands(dx),
                         [&](const float* partial, int64_t blocks) {
                           add_column_sums(partial, blocks, x.cols, db, exec.device.stream());
                         });
  if (layer > 0)
    launch(bounds_backward_kernel, Dim3{blocks_of(x.cols)}, kThreads, 0, exec.device.stream(), Bounds{bounds, layer},
           db, dbounds);
  exec.arena.rewind(mark);
}

#define FW_INSTANTIATE(T)                                                                                            \
  template void bounded_decay_forward<T>(const Exec<T>&, Mat<const T>, Mat<const float>, int64_t, Mat<float>);       \
  template void bounded_decay_backward<T>(const Exec<T>&, Mat<const float>, Mat<const T>, Mat<const float>, int64_t, \
                                          Mat<T>, Mat<float>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
