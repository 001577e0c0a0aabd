// Causal depthwise convolution and SiLU over packed sequences on the device; with p[t] = sum_j w_j x[t-j] + b (w_j =
// weight[c, W-1-j]; b 0 where there is no bias):
//   y[t] = silu(p[t])     dp[t] = dy[t] silu'(p[t])     dx[t] = sum_j w_j dp[t+j]     dw_j = sum_t dp[t] x[t-j]     db = sum_t dp[t]
// A thread has four columns and a run of tokens, whose last W inputs (backward: and dp) it keeps in registers: each row
// is read once, and W-1 rows around the run again. Forward reads x and writes y, backward reads x and dy and writes dx.
// Memory limits both, so the packets of several tokens are asked for before the first is used, and the sigmoid is the
// fast one. Runs have a fixed length: the order of the sums of dw is that of the shape alone.
#include <type_traits>

#include "gpu/launch.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/conv_tails.cuh"
#include "ops/cuda/conv_window.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"
#include "ops/short_conv.h"

namespace fw::cuda {
namespace {

constexpr unsigned kThreads = 128;
// Of a thread, where rows are aligned; eight bf16 values to a load keep so much in registers that too few warps hide
// the memory (measured).
constexpr int kColumns = 4;
constexpr int64_t kForwardRun = 64, kBackwardRun = kConvRun;  // tokens

template <class T>
struct ConvArgs {
  int64_t tokens = 0, cols = 0;
  PassSequences sequences;
  const T* x = nullptr;
  const T* dy = nullptr;  // backward
  T* y = nullptr;         // dx in backward
  int64_t x_stride = 0, dy_stride = 0, y_stride = 0;
  const float* weight = nullptr;
  const T* tail = nullptr;        // [N, W-1, cols] or null
  float* partial = nullptr;       // backward: [runs, cols, W]
  const float* bias = nullptr;    // [cols] or null
  float* partial_bias = nullptr;  // backward, with a bias: [runs, cols]
  int64_t run = kForwardRun;      // forward: tokens of a thread; one where each sequence has one
  T* tail_out = nullptr;          // forward, where each sequence has one token: its new tail, which may be `tail`
};

template <class T, int N>
FW_DEVICE void load_bias(const ConvArgs<T>& a, int64_t column, float (&bias)[N]) {
  FW_UNROLL for (int i = 0; i < N; ++i) bias[i] = a.bias != nullptr ? a.bias[column + i] : 0.0f;
}

template <class T, int N, int W>
__global__ void __launch_bounds__(kThreads) short_conv_forward_kernel(const ConvArgs<T> a) {
  const int64_t column = (int64_t{block_index_y()} * kThreads + thread_index()) * N;
  constexpr int kAhead = 4;
  float taps[W][N], bias[N];
  if (column < a.cols) {  // parameters, which no kernel in front writes
    load_taps<N, W>(a.weight + column * W, taps);
    load_bias<T, N>(a, column, bias);
  }
  follow();
  if (column >= a.cols) return;
  int64_t t = int64_t{block_index_x()} * a.run;
  const int64_t end = min(t + a.run, a.tokens);
  for (int64_t n = a.sequences.sequence_of(t); t < end; ++n) {
    const int64_t begin = a.sequences.begin_of(n), stop = min(end, a.sequences.begin_of(n + 1));
    if (t >= stop) continue;  // an empty sequence
    Packet<T, N> only;        // of a decoded token, loaded with its tail
    if (a.sequences.single) only.load(a.x + t * a.x_stride + column);
    Columns<N, W> window;
    load_history(a.x, a.x_stride, a.tail, a.cols, column, n, begin, t, window);
    const auto step = [&](const Packet<T, N>& packet, T* y) {
      float x[N];
      packet.get(x);
      window.push(x);
      FW_UNROLL for (int i = 0; i < N; ++i) {
        float p = bias[i];
        FW_UNROLL for (int j = 0; j < W; ++j) p += taps[j][i] * window.v[j][i];
        x[i] = p * sigmoid(p);
      }
      Packet<T, N> out;
      out.set(x);
      out.store_at_once(y);
    };
    const T* x = a.x + t * a.x_stride + column;
    T* y = a.y + t * a.y_stride + column;
    if (a.sequences.single) {
      step(only, y);
      ++t;
    }
    Packet<T, N> packets[kAhead];
    const auto load_ahead = [&](const T* from) {
      FW_UNROLL for (int i = 0; i < kAhead; ++i) packets[i].load(from + i * a.x_stride);
    };
    if (t + kAhead <= stop) load_ahead(x);
    while (t + kAhead <= stop) {
      Packet<T, N> now[kAhead];
      FW_UNROLL for (int i = 0; i < kAhead; ++i) now[i] = packets[i];
      t += kAhead, x += kAhead * a.x_stride;
      if (t + kAhead <= stop) load_ahead(x);  // on its way while these are used
      FW_UNROLL for (int i = 0; i < kAhead; ++i) step(now[i], y + i * a.y_stride);
      y += kAhead * a.y_stride;
    }
    for (; t < stop; ++t, x += a.x_stride, y += a.y_stride) {
      Packet<T, N> packet;
      packet.load(x);
      step(packet, y);
    }
    if (a.tail_out == nullptr) continue;
    FW_UNROLL for (int j = 0; j < W - 1; ++j) {
      Packet<T, N> kept;
      kept.set(window.v[j]);  // as it was read
      kept.store(a.tail_out + (n * (W - 1) + W - 2 - j) * a.cols + column);
    }
  }
}

template <class T, int N, int W>
__global__ void __launch_bounds__(kThreads) short_conv_backward_kernel(const ConvArgs<T> a) {
  const int64_t column = (int64_t{block_index_y()} * kThreads + thread_index()) * N;
  if (column >= a.cols) return;
  constexpr int kAhead = 4;
  float taps[W][N], dtaps[W][N] = {}, bias[N], dbias[N] = {};
  load_taps<N, W>(a.weight + column * W, taps);
  load_bias<T, N>(a, column, bias);
  int64_t t = int64_t{block_index_x()} * kBackwardRun;
  const int64_t end = min(t + kBackwardRun, a.tokens);
  for (int64_t n = a.sequences.sequence_of(t); t < end; ++n) {
    const int64_t begin = a.sequences.offsets[n], next = a.sequences.offsets[n + 1], first = t, stop = min(end, next);
    if (t >= stop) continue;
    Columns<N, W> window, dp;
    load_history(a.x, a.x_stride, a.tail, a.cols, column, n, begin, t, window);
    FW_UNROLL for (int j = 0; j < W; ++j) { FW_UNROLL for (int i = 0; i < N; ++i) dp.v[j][i] = 0; }
    // dx of the token W-1 before t: nothing later reaches it.
    const auto store_dx = [&](int64_t of) {
      if (of < first || of >= stop) return;
      float dx[N];
      FW_UNROLL for (int i = 0; i < N; ++i) {
        dx[i] = 0;
        FW_UNROLL for (int j = 0; j < W; ++j) dx[i] += taps[j][i] * dp.v[W - 1 - j][i];
      }
      Packet<T, N> packet;
      packet.set(dx);
      packet.store_at_once(a.y + of * a.y_stride + column);
    };
    const auto step = [&](const Packet<T, N>& xs, const Packet<T, N>& dys, bool own) {
      float x[N], d[N];
      xs.get(x);
      dys.get(d);
      window.push(x);
      FW_UNROLL for (int i = 0; i < N; ++i) {
        float p = bias[i];
        FW_UNROLL for (int j = 0; j < W; ++j) p += taps[j][i] * window.v[j][i];
        const float s = sigmoid(p);
        d[i] *= s * (1.0f + p * (1.0f - s));
        if (own) {
          FW_UNROLL for (int j = 0; j < W; ++j) dtaps[j][i] += d[i] * window.v[j][i];
          dbias[i] += d[i];
        }
      }
      dp.push(d);
      store_dx(t - (W - 1));
    };
    const T* x = a.x + t * a.x_stride + column;
    const T* dy = a.dy + t * a.dy_stride + column;
    Packet<T, N> xs[kAhead], dys[kAhead];
    const auto load_ahead = [&] {
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        xs[i].load(x + i * a.x_stride);
        dys[i].load(dy + i * a.dy_stride);
      }
    };
    if (t + kAhead <= stop) load_ahead();
    while (t + kAhead <= stop) {
      Packet<T, N> x_now[kAhead], dy_now[kAhead];
      FW_UNROLL for (int i = 0; i < kAhead; ++i) x_now[i] = xs[i], dy_now[i] = dys[i];
      x += kAhead * a.x_stride, dy += kAhead * a.dy_stride;
      if (t + 2 * kAhead <= stop) load_ahead();  // on its way while these are used
      FW_UNROLL for (int i = 0; i < kAhead; ++i, ++t) step(x_now[i], dy_now[i], true);
    }
    for (; t < stop; ++t, x += a.x_stride, dy += a.dy_stride) {
      Packet<T, N> one_x, one_dy;
      one_x.load(x);
      one_dy.load(dy);
      step(one_x, one_dy, true);
    }
    // What the tokens after the run (of the same sequence) owe to its last ones.
    FW_UNROLL for (int j = 0; j < W - 1; ++j, ++t, x += a.x_stride, dy += a.dy_stride) {
      if (t < next) {
        Packet<T, N> one_x, one_dy;
        one_x.load(x);
        one_dy.load(dy);
        step(one_x, one_dy, false);
      } else {
        const float none[N] = {};
        dp.push(none);
        store_dx(t - (W - 1));
      }
    }
    t = stop;
  }
  float* partial = a.partial + (int64_t{block_index_x()} * a.cols + column) * W;
  FW_UNROLL for (int i = 0; i < N; ++i) {
    FW_UNROLL for (int j = 0; j < W; ++j) partial[i * W + W - 1 - j] = dtaps[j][i];
  }
  if (a.partial_bias != nullptr) {
    FW_UNROLL for (int i = 0; i < N; ++i) a.partial_bias[int64_t{block_index_x()} * a.cols + column + i] = dbias[i];
  }
}

Dim3 grid_of(int64_t x, int64_t columns) {
  return {static_cast<unsigned>(x), static_cast<unsigned>((columns + kThreads - 1) / kThreads)};
}

// Calls run(N, W) with numbers of the compiler.
template <class T, class Run>
void with_form(const ConvArgs<T>& a, int64_t width, const Run& run) {
  const auto with_width = [&]<int W>() {
    constexpr bool kNarrow = W <= 4;  // wider windows do not fit into the registers in packets
    const bool packets = a.cols % kPacket<T> == 0 && in_packets<T>(a.x, a.x_stride) && in_packets<T>(a.y, a.y_stride) &&
                         (a.dy == nullptr || in_packets<T>(a.dy, a.dy_stride)) &&
                         (a.tail == nullptr || in_packets<T>(a.tail, a.cols)) &&
                         (a.tail_out == nullptr || in_packets<T>(a.tail_out, a.cols));
    if (kNarrow && packets) {
      run(std::integral_constant<int, (kNarrow ? kColumns : 1)>{}, std::integral_constant<int, W>{});
    } else {
      run(std::integral_constant<int, 1>{}, std::integral_constant<int, W>{});
    }
  };
  switch (width) {
    case 1:
      return with_width.template operator()<1>();
    case 2:
      return with_width.template operator()<2>();
    case 3:
      return with_width.template operator()<3>();
    case 4:
      return with_width.template operator()<4>();
    case 5:
      return with_width.template operator()<5>();
    case 6:
      return with_width.template operator()<6>();
    case 7:
      return with_width.template operator()<7>();
    case 8:
      return with_width.template operator()<8>();
    default:
      fail_usage("conv_size: expected at most {} on CUDA, got {}", kMostConvWidth, width);
  }
}

}  // namespace

template <class T>
void conv_forward(Mat<const T> x, const float* weight, const float* bias, int64_t width, const PassLayout& layout,
                  const T* tail_in, T* tail_out, Mat<T> y, void* stream) {
  ConvArgs<T> a{x.rows,  x.cols, PassSequences(layout), x.data, nullptr, y.data, x.stride, 0, y.stride, weight, tail_in,
                nullptr, bias};
  // Decoding: a thread has read all of a tail before it writes it. Otherwise blocks that begin later may still want the
  // old one.
  const bool single = layout.host.single_tokens();
  if (single) a.run = 1, a.tail_out = width > 1 ? tail_out : nullptr;
  with_form(a, width, [&](auto n, auto w) {
    launch_following(x.rows, short_conv_forward_kernel<T, n.value, w.value>,
                     grid_of((x.rows + a.run - 1) / a.run, x.cols / n.value), kThreads, 0, stream, a);
  });
  if (!single) store_tails(x, layout, tail_in, width, tail_out, stream);
}

template <class T>
void conv_backward(Mat<const T> dy, Mat<const T> x, const float* weight, const float* bias, int64_t width,
                   const PassLayout& layout, const T* tail_in, Mat<T> dx, float* dweight, float* dbias, float* partial,
                   float* partial_bias, void* stream) {
  const int64_t runs = parts_of(x.rows, kBackwardRun);
  ConvArgs<T> a{
      x.rows,  x.cols, PassSequences(layout), x.data, dy.data, dx.data, x.stride, dy.stride, dx.stride, weight, tail_in,
      partial, bias};
  if (bias != nullptr) a.partial_bias = partial_bias;
  with_form(a, width, [&](auto n, auto w) {
    launch(short_conv_backward_kernel<T, n.value, w.value>, grid_of(runs, x.cols / n.value), kThreads, 0, stream, a);
  });
  add_column_sums(partial, runs, x.cols * width, dweight, stream);
  if (bias != nullptr) add_column_sums(partial_bias, runs, x.cols, dbias, stream);
}

namespace ops {

template <class T>
void short_conv_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* weight, const Wide<T>* bias, int64_t width,
                        const PassLayout& layout, const T* tail_in, T* tail_out, Mat<T> y) {
  conv_forward(x, weight, bias, width, layout, tail_in, tail_out, y, exec.device.stream());
}

template <class T>
void short_conv_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* weight,
                         const Wide<T>* bias, int64_t width, const PassLayout& layout, const T* tail_in, Mat<T> dx,
                         Wide<T>* dweight, Wide<T>* dbias) {
  if (x.rows == 0) return;
  const Arena::Mark mark = exec.arena.mark();
  const int64_t runs = parts_of(x.rows, kBackwardRun);
  float* partial = partial_sums(exec.arena, runs, x.cols * width);
  float* partial_bias = bias != nullptr ? partial_sums(exec.arena, runs, x.cols) : nullptr;
  conv_backward(dy, x, weight, bias, width, layout, tail_in, dx, dweight, dbias, partial, partial_bias,
                exec.device.stream());
  exec.arena.rewind(mark);
}

#define FW_INSTANTIATE(T)                                                                                      \
  template void short_conv_forward<T>(const Exec<T>&, Mat<const T>, const float*, const float*, int64_t,       \
                                      const PassLayout&, const T*, T*, Mat<T>);                                \
  template void short_conv_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, const float*, \
                                       int64_t, const PassLayout&, const T*, Mat<T>, float*, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops

#define FW_INSTANTIATE(T)                                                                                            \
  template void conv_forward<T>(Mat<const T>, const float*, const float*, int64_t, const PassLayout&, const T*, T*,  \
                                Mat<T>, void*);                                                                      \
  template void conv_backward<T>(Mat<const T>, Mat<const T>, const float*, const float*, int64_t, const PassLayout&, \
                                 const T*, Mat<T>, float*, float*, float*, float*, void*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE
}  // namespace fw::cuda
