// y = x + (conv(x) + bias) gate over packed sequences on the device, conv causal and depthwise: c[t] = sum_j w_j x[t-j], w_j = weight[., W-1-j],
// inputs before a sequence from its tail or zero. With dc = dy gate:
//   dx[t] = dy[t] + sum_j w_j dc[t+j]     dgate = dy (c + bias)     dw_j = sum_t dc[t] x[t-j]     dbias = sum_t dc[t]
// A thread has neighbouring columns of a run of tokens; the rows around each token, which it has just had, come from the cache. For the usual width
// the weights and their sums are in registers. Runs have a fixed length: the order of the sums is that of the shape alone.
#include "ops/cuda/column_sums.h"
#include "ops/cuda/conv_tails.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr unsigned kThreads = 128;
constexpr int64_t kRun = kGatedConvRun;  // tokens
constexpr int kUsualWidth = 4, kUsualColumns = 4;

template <class T>
struct GatedConvArgs {
  Mat<const T> x, gate, dy;
  Mat<T> y, dgate;  // y, or dx and dgate
  const float *weight, *bias;
  int width;
  PassPlaces places;
  const T* tail;
  float *dweight, *dbias;  // partial sums [runs, cols, width] and [runs, cols]
};

// The weights of a thread's columns: in registers where the compiler knows the width.
template <int N, int W>
struct Taps {
  float of[W][N];
  FW_DEVICE Taps(const float* weight, int) {
    FW_UNROLL for (int j = 0; j < W; ++j) { FW_UNROLL for (int i = 0; i < N; ++i) of[j][i] = weight[i * W + W - 1 - j]; }
  }
  FW_DEVICE int width() const { return W; }
  FW_DEVICE float at(int j, int i) const { return of[j][i]; }
};
template <>
struct Taps<1, 0> {
  const float* weight;
  int taps;
  FW_DEVICE Taps(const float* from, int width) : weight(from), taps(width) {}
  FW_DEVICE int width() const { return taps; }
  FW_DEVICE float at(int j, int) const { return weight[taps - 1 - j]; }
};

template <class T, int N>
FW_DEVICE void load_row(const T* from, float (&x)[N]) {
  Packet<T, N> packet;
  packet.load(from);
  packet.get(x);
}

// The input of sequence n at a place that may lie before its first token.
template <class T, int N>
FW_DEVICE void load_input(const GatedConvArgs<T>& a, int64_t n, int64_t begin, int64_t place, int width, int64_t column, float (&x)[N]) {
  if (place >= 0) {
    load_row(a.x.data + (begin + place) * a.x.stride + column, x);
  } else if (a.tail != nullptr) {
    load_row(a.tail + (n * (width - 1) + width - 1 + place) * a.x.cols + column, x);
  } else {
    FW_UNROLL for (int i = 0; i < N; ++i) x[i] = 0;
  }
}

// sums = bias + sum_j w_j x[t-j];  now: x[t];  each(j, x[t-j])
template <class T, int N, int W, class Each>
FW_DEVICE void convolve(const GatedConvArgs<T>& a, const Taps<N, W>& taps, int64_t n, int64_t begin, int64_t t, int64_t column, float (&sums)[N],
                        const Each& each) {
  FW_UNROLL for (int i = 0; i < N; ++i) sums[i] = a.bias[column + i];
  FW_UNROLL for (int j = 0; j < taps.width(); ++j) {
    float x[N];
    load_input(a, n, begin, t - begin - j, taps.width(), column, x);
    FW_UNROLL for (int i = 0; i < N; ++i) sums[i] += taps.at(j, i) * x[i];
    each(j, x);
  }
}

template <class T, int N, int W>
__global__ void __launch_bounds__(kThreads) gated_conv_forward_kernel(const GatedConvArgs<T> a) {
  const int64_t column = (int64_t{block_index_y()} * kThreads + thread_index()) * N;
  if (column >= a.x.cols) return;
  const Taps<N, W> taps(a.weight + column * a.width, a.width);
  int64_t t = int64_t{block_index_x()} * kRun;
  const int64_t end = min(t + kRun, a.x.rows);
  int64_t n = a.places.sequence_of(t);
  for (; t < end; ++t) {
    while (a.places.offsets[n + 1] <= t) ++n;
    float sums[N], now[N] = {}, gate[N];
    convolve(a, taps, n, a.places.offsets[n], t, column, sums, [&](int j, const float(&x)[N]) {
      if (j > 0) return;
      FW_UNROLL for (int i = 0; i < N; ++i) now[i] = x[i];
    });
    load_row(a.gate.data + t * a.gate.stride + column, gate);
    FW_UNROLL for (int i = 0; i < N; ++i) now[i] += sums[i] * gate[i];
    Packet<T, N> out;
    out.set(now);
    out.store(a.y.data + t * a.y.stride + column);
  }
}

template <class T, int N, int W>
__global__ void __launch_bounds__(kThreads) gated_conv_backward_kernel(const GatedConvArgs<T> a) {
  const int64_t column = (int64_t{block_index_y()} * kThreads + thread_index()) * N, run = block_index_x();
  if (column >= a.x.cols) return;
  const Taps<N, W> taps(a.weight + column * a.width, a.width);
  float* dweight = a.dweight + (run * a.x.cols + column) * a.width;
  constexpr int kKept = W > 0 ? W : 1;
  float dtaps[kKept][N] = {}, dbias[N] = {};
  if constexpr (W == 0) {
    for (int j = 0; j < a.width; ++j) dweight[j] = 0;
  }
  const auto dc_at = [&](int64_t t, float(&dc)[N], float(&dy)[N]) {
    float gate[N];
    load_row(a.dy.data + t * a.dy.stride + column, dy);
    load_row(a.gate.data + t * a.gate.stride + column, gate);
    FW_UNROLL for (int i = 0; i < N; ++i) dc[i] = dy[i] * gate[i];
  };
  int64_t t = run * kRun;
  const int64_t end = min(t + kRun, a.x.rows);
  int64_t n = a.places.sequence_of(t);
  for (; t < end; ++t) {
    while (a.places.offsets[n + 1] <= t) ++n;
    const int64_t begin = a.places.offsets[n], stop = a.places.offsets[n + 1];
    float dc[N], dy[N], sums[N], dx[N];
    dc_at(t, dc, dy);
    convolve(a, taps, n, begin, t, column, sums, [&](int j, const float(&x)[N]) {
      FW_UNROLL for (int i = 0; i < N; ++i) {
        if constexpr (W > 0) {
          dtaps[j][i] += dc[i] * x[i];
        } else {
          dweight[a.width - 1 - j] += dc[i] * x[i];
        }
      }
    });
    FW_UNROLL for (int i = 0; i < N; ++i) {
      dbias[i] += dc[i];
      dx[i] = dy[i] + taps.at(0, i) * dc[i];
      sums[i] *= dy[i];
    }
    FW_UNROLL for (int j = 1; j < taps.width(); ++j) {
      if (t + j >= stop) continue;
      float later[N], unused[N];
      dc_at(t + j, later, unused);
      FW_UNROLL for (int i = 0; i < N; ++i) dx[i] += taps.at(j, i) * later[i];
    }
    Packet<T, N> out;
    out.set(dx);
    out.store(a.y.data + t * a.y.stride + column);
    out.set(sums);
    out.store(a.dgate.data + t * a.dgate.stride + column);
  }
  FW_UNROLL for (int i = 0; i < N; ++i) {
    a.dbias[run * a.x.cols + column + i] = dbias[i];
    if constexpr (W > 0) {
      FW_UNROLL for (int j = 0; j < W; ++j) dweight[i * W + W - 1 - j] = dtaps[j][i];
    }
  }
}

Dim3 grid_of(int64_t tokens, int64_t columns) {
  return {static_cast<unsigned>((tokens + kRun - 1) / kRun), static_cast<unsigned>((columns + kThreads - 1) / kThreads)};
}

// Calls run(N, W) with numbers of the compiler; W 0: any width.
template <class T, class Run>
void with_form(const GatedConvArgs<T>& a, const Run& run) {
  const auto in_rows = [](const auto& x) { return x.data == nullptr || in_packets<T>(x.data, x.stride); };
  const bool packets = a.x.cols % kPacket<T> == 0 && in_rows(a.x) && in_rows(a.gate) && in_rows(a.dy) && in_rows(a.y) && in_rows(a.dgate) &&
                       (a.tail == nullptr || in_packets<T>(a.tail, a.x.cols));
  if (packets && a.width == kUsualWidth) return run.template operator()<kUsualColumns, kUsualWidth>();
  run.template operator()<1, 0>();
}

}  // namespace

namespace ops {

template <class T>
void gated_conv_forward(const Exec<T>& exec, Mat<const T> x, Mat<const T> gate, const Wide<T>* weight, const Wide<T>* bias, int64_t width,
                        const PassLayout& layout, const T* tail_in, T* tail_out, Mat<T> y) {
  void* stream = exec.device.stream();
  const GatedConvArgs<T> a{x, gate, {}, y, {}, weight, bias, static_cast<int>(width), PassPlaces(layout), tail_in, nullptr, nullptr};
  with_form(a, [&]<int N, int W>() { launch(gated_conv_forward_kernel<T, N, W>, grid_of(x.rows, x.cols / N), kThreads, 0, stream, a); });
  store_tails(x, layout, tail_in, width, tail_out, stream);
}

template <class T>
void gated_conv_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, Mat<const T> gate, const Wide<T>* weight, const Wide<T>* bias, int64_t width,
                         const PassLayout& layout, const T* tail_in, Mat<T> dx, Mat<T> dgate, Wide<T>* dweight, Wide<T>* dbias) {
  if (x.rows == 0) return;
  const Arena::Mark mark = exec.arena.mark();
  void* stream = exec.device.stream();
  const int64_t runs = (x.rows + kRun - 1) / kRun;
  float* weight_sums = partial_sums(exec.arena, runs, x.cols * width);
  float* bias_sums = partial_sums(exec.arena, runs, x.cols);
  const GatedConvArgs<T> a{x, gate, dy, dx, dgate, weight, bias, static_cast<int>(width), PassPlaces(layout), tail_in, weight_sums, bias_sums};
  with_form(a, [&]<int N, int W>() { launch(gated_conv_backward_kernel<T, N, W>, grid_of(x.rows, x.cols / N), kThreads, 0, stream, a); });
  add_column_sums(weight_sums, runs, x.cols * width, dweight, stream);
  add_column_sums(bias_sums, runs, x.cols, dbias, stream);
  exec.arena.rewind(mark);
}

#define FW_INSTANTIATE(T)                                                                                                                                \
  template void gated_conv_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, const float*, int64_t, const PassLayout&, const T*, T*,  \
                                      Mat<T>);                                                                                                           \
  template void gated_conv_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, const float*, const float*, int64_t, const PassLayout&, \
                                       const T*, Mat<T>, Mat<T>, float*, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
