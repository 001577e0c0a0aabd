// y = x + (conv(x) + bias) gate over packed sequences on the device, conv causal and depthwise: c[t] = sum_j w_j
// x[t-j], w_j = weight[., W-1-j], inputs before a sequence from its tail or zero. With dc = dy gate:
//   dx[t] = dy[t] + sum_j w_j dc[t+j]     dgate = dy (c + bias)     dw_j = sum_t dc[t] x[t-j]     dbias = sum_t dc[t]
// A thread has neighbouring columns of a run of tokens. Of the usual width it keeps the last inputs in registers, and
// in backward the sums of the dx that later tokens add to. Each row is read once, W-1 of them around the run again.
// Memory limits both as long as the rows of several tokens are on their way. Of any other width a thread has one
// column, and the rows around each token come from the cache. Runs have a fixed length: the order of the sums is that
// of the shape alone.
#include "ops/cuda/column_sums.h"
#include "ops/cuda/conv_tails.cuh"
#include "ops/cuda/conv_window.cuh"
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
  PassSequences sequences;
  const T* tail;
  float *dweight, *dbias;  // partial sums [runs, width, cols], of tap after tap, and [runs, cols]
  int64_t run = kRun;      // forward: tokens of a thread; one where each sequence has one
};

// The tokens of a thread's run, sequence by sequence: body(sequence, its begin, the first token, after the last, after
// the sequence).
template <class T, class Body>
FW_DEVICE void for_sequences(const GatedConvArgs<T>& a, int64_t run, const Body& body) {
  int64_t t = int64_t{block_index_x()} * run;
  const int64_t end = min(t + run, a.x.rows);
  for (int64_t n = a.sequences.sequence_of(t); t < end; ++n) {
    const int64_t begin = a.sequences.offsets[n], next = a.sequences.offsets[n + 1], stop = min(end, next);
    if (t < stop) body(n, begin, t, stop, next);
    t = max(t, stop);
  }
}

// step(i, row) for i from 0 to count, of which the next kAhead are on their way: load(i, row).
template <int kAhead, class Row, class Load, class Step>
FW_DEVICE void for_rows_ahead(int count, const Load& load, const Step& step) {
  Row rows[kAhead];
  FW_UNROLL for (int k = 0; k < kAhead; ++k) {
    if (k < count) load(k, rows[k]);
  }
  for (int first = 0; first < count; first += kAhead) {
    FW_UNROLL for (int k = 0; k < kAhead; ++k) {
      const int i = first + k;
      if (i >= count) break;
      const Row row = rows[k];
      if (i + kAhead < count) load(i + kAhead, rows[k]);
      step(i, row);
    }
  }
}

template <class T, int N, int W>
__global__ void __launch_bounds__(kThreads, 4) gated_conv_forward_kernel(const GatedConvArgs<T> a) {
  constexpr int kAhead = 6;
  const int64_t column = (int64_t{block_index_y()} * kThreads + thread_index()) * N;
  float taps[W][N], bias[N];
  if (column < a.x.cols) {  // parameters, which no kernel in front writes
    load_taps<N, W>(a.weight + column * W, taps);
    load_floats(a.bias + column, bias);
  }
  follow();
  if (column >= a.x.cols) return;
  struct Row {
    Packet<T, N> x, gate;
  };
  for_sequences(a, a.run, [&](int64_t n, int64_t begin, int64_t first, int64_t stop, int64_t) {
    Columns<N, W> window;
    load_history(a.x.data, a.x.stride, a.tail, a.x.cols, column, n, begin, first, window);
    const T *x = a.x.data + first * a.x.stride + column, *gate = a.gate.data + first * a.gate.stride + column;
    T* y = a.y.data + first * a.y.stride + column;
    for_rows_ahead<kAhead, Row>(
        static_cast<int>(stop - first),
        [&](int i, Row& row) {
          row.x.load(x + i * a.x.stride);
          row.gate.load(gate + i * a.gate.stride);
        },
        [&](int i, const Row& row) {
          float now[N], gates[N];
          row.x.get(now);
          row.gate.get(gates);
          window.push(now);
          FW_UNROLL for (int k = 0; k < N; ++k) {
            float c = bias[k];
            FW_UNROLL for (int j = 0; j < W; ++j) c += taps[j][k] * window.v[j][k];
            now[k] += c * gates[k];
          }
          Packet<T, N> out;
          out.set(now);
          out.store_at_once(y + i * a.y.stride);
        });
  });
}

// The rows of a thread's columns, one after the other.
template <class T>
struct Walk {
  T* at;
  int64_t stride;
  FW_DEVICE Walk(Mat<T> m, int64_t row, int64_t column) : at(m.data + row * m.stride + column), stride(m.stride) {}
  FW_DEVICE T* next() {
    T* const here = at;
    at += stride;
    return here;
  }
};

// The dx of a run's last W-1 tokens, where their sequence goes on, is left to the next run, which reads their rows with
// its first ones: a wait less.
template <class T, int N, int W>
__global__ void __launch_bounds__(kThreads, 4) gated_conv_backward_kernel(const GatedConvArgs<T> a) {
  constexpr int kAhead = sizeof(T) == 2 ? 4 : 2;
  follow();
  const int64_t column = (int64_t{block_index_y()} * kThreads + thread_index()) * N;
  if (column >= a.x.cols) return;
  float taps[W][N], dtaps[W][N] = {}, bias[N], dbias[N] = {};
  load_taps<N, W>(a.weight + column * W, taps);
  load_floats(a.bias + column, bias);
  struct Row {
    Packet<T, N> dy, gate, x;
  };
  for_sequences(a, kRun, [&](int64_t n, int64_t begin, int64_t first, int64_t stop, int64_t next) {
    const int count = static_cast<int>(stop - first), before = static_cast<int>(min(first - begin, int64_t{W - 1}));
    Row history[W - 1];  // [j]: j + 1 tokens before the first
    FW_UNROLL for (int j = 0; j < W - 1; ++j) {
      if (j < before) {
        history[j].dy.load(a.dy.data + (first - 1 - j) * a.dy.stride + column);
        history[j].gate.load(a.gate.data + (first - 1 - j) * a.gate.stride + column);
        history[j].x.load(a.x.data + (first - 1 - j) * a.x.stride + column);
      } else if (a.tail != nullptr) {
        history[j].x.load(a.tail + (n * (W - 1) + W - 2 - (j - before)) * a.x.cols + column);
      }
    }
    Walk dys(a.dy, first, column), gates(a.gate, first, column), xs(a.x, first, column);
    Walk dx_to(a.y, first - (W - 1), column), dgate_to(a.dgate, first, column);
    Row rows[kAhead];
    const auto load = [&](int i, Row& row) {
      if (i >= count) {
        row = {};
        return;
      }
      row.dy.load(dys.next());
      row.gate.load(gates.next());
      row.x.load(xs.next());
    };
    FW_UNROLL for (int k = 0; k < kAhead; ++k) load(k, rows[k]);
    Columns<N, W> window, dx;  // dx: of the last tokens, without what later ones add
    FW_UNROLL for (int j = 0; j < W; ++j) { FW_UNROLL for (int k = 0; k < N; ++k) window.v[j][k] = dx.v[j][k] = 0; }
    // What a token adds to the dx of itself and of those before it; that of W-1 tokens ago is then whole.
    const auto add_to_dx = [&](const float(&dy)[N], const float(&dc)[N]) {
      dx.push(dy);
      FW_UNROLL for (int j = 0; j < W; ++j) { FW_UNROLL for (int k = 0; k < N; ++k) dx.v[j][k] += taps[j][k] * dc[k]; }
    };
    FW_UNROLL for (int j = W - 2; j >= 0; --j) {
      float dy[N], dc[N];
      history[j].x.get(window.v[j]);
      history[j].dy.get(dy);
      history[j].gate.get(dc);
      FW_UNROLL for (int k = 0; k < N; ++k) dc[k] *= dy[k];
      add_to_dx(dy, dc);
    }
    // after the sequence there is nothing, which completes its last dx
    const int steps = stop == next ? count + W - 1 : count;
    for (int group = 0; group < steps; group += kAhead) {
      FW_UNROLL for (int r = 0; r < kAhead; ++r) {
        const int i = group + r;
        float dy[N], dc[N], x[N];
        rows[r].dy.get(dy);
        rows[r].gate.get(dc);
        rows[r].x.get(x);
        load(i + kAhead, rows[r]);
        window.push(x);
        FW_UNROLL for (int k = 0; k < N; ++k) {
          dc[k] *= dy[k];
          float c = bias[k];
          FW_UNROLL for (int j = 0; j < W; ++j) {
            c += taps[j][k] * window.v[j][k];
            dtaps[j][k] += dc[k] * window.v[j][k];
          }
          dbias[k] += dc[k];
          x[k] = c * dy[k];
        }
        Packet<T, N> out;
        out.set(x);
        if (i < count) out.store_at_once(dgate_to.at);
        dgate_to.next();
        add_to_dx(dy, dc);
        out.set(dx.v[W - 1]);
        if (i >= W - 1 - before && i < steps) out.store_at_once(dx_to.at);
        dx_to.next();
      }
    }
  });
  FW_UNROLL for (int j = 0; j < W; ++j)
      store_floats_at_once(a.dweight + (int64_t{block_index_x()} * W + j) * a.x.cols + column, dtaps[j]);
  store_floats_at_once(a.dbias + int64_t{block_index_x()} * a.x.cols + column, dbias);
}

// Of any width: the input of sequence n at a position that may lie before its first token.
template <class T>
FW_DEVICE float input_at(const GatedConvArgs<T>& a, int64_t n, int64_t begin, int64_t position, int64_t column) {
  if (position >= 0) return number(a.x.data[(begin + position) * a.x.stride + column]);
  return a.tail == nullptr ? 0.0f : number(a.tail[(n * (a.width - 1) + a.width - 1 + position) * a.x.cols + column]);
}

// each(j, x[t-j]); returns bias + sum_j w_j x[t-j].
template <class T, class Each>
FW_DEVICE float convolve(const GatedConvArgs<T>& a, int64_t n, int64_t begin, int64_t t, int64_t column,
                         const Each& each) {
  float sum = a.bias[column];
  for (int j = 0; j < a.width; ++j) {
    const float x = input_at(a, n, begin, t - begin - j, column);
    sum += a.weight[column * a.width + a.width - 1 - j] * x;
    each(j, x);
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) any_gated_conv_forward_kernel(const GatedConvArgs<T> a) {
  follow();
  const int64_t column = int64_t{block_index_y()} * kThreads + thread_index();
  if (column >= a.x.cols) return;
  for_sequences(a, a.run, [&](int64_t n, int64_t begin, int64_t first, int64_t stop, int64_t) {
    for (int64_t t = first; t < stop; ++t) {
      const float c = convolve(a, n, begin, t, column, [](int, float) {});
      const float x = number(a.x.data[t * a.x.stride + column]), gate = number(a.gate.data[t * a.gate.stride + column]);
      a.y.data[t * a.y.stride + column] = stored<T>(x + c * gate);
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) any_gated_conv_backward_kernel(const GatedConvArgs<T> a) {
  follow();
  const int64_t column = int64_t{block_index_y()} * kThreads + thread_index();
  if (column >= a.x.cols) return;
  const auto tap = [&](int j) { return a.weight[column * a.width + a.width - 1 - j]; };
  const auto dy_at = [&](int64_t t) { return number(a.dy.data[t * a.dy.stride + column]); };
  const auto dc_at = [&](int64_t t) { return dy_at(t) * number(a.gate.data[t * a.gate.stride + column]); };
  float* dtaps = a.dweight + int64_t{block_index_x()} * a.width * a.x.cols + column;
  for (int j = 0; j < a.width; ++j) dtaps[j * a.x.cols] = 0;
  float dbias = 0;
  for_sequences(a, kRun, [&](int64_t n, int64_t begin, int64_t first, int64_t stop, int64_t next) {
    for (int64_t t = first; t < stop; ++t) {
      const float dy = dy_at(t), dc = dc_at(t);
      const float c = convolve(a, n, begin, t, column, [&](int j, float x) { dtaps[j * a.x.cols] += dc * x; });
      dbias += dc;
      float dx = dy + tap(0) * dc;
      for (int j = 1; j < a.width && t + j < next; ++j) dx += tap(j) * dc_at(t + j);
      a.y.data[t * a.y.stride + column] = stored<T>(dx);
      a.dgate.data[t * a.dgate.stride + column] = stored<T>(c * dy);
    }
  });
  a.dbias[int64_t{block_index_x()} * a.x.cols + column] = dbias;
}

Dim3 grid_of(int64_t runs, int64_t columns) {
  return {static_cast<unsigned>(runs), static_cast<unsigned>(parts_of(columns, kThreads))};
}

// Of the usual width, and rows in packets.
template <class T>
bool is_usual(const GatedConvArgs<T>& a) {
  const auto in_rows = [](const auto& x) { return x.data == nullptr || in_packets<T>(x.data, x.stride); };
  return a.width == kUsualWidth && a.x.cols % kPacket<T> == 0 && in_rows(a.x) && in_rows(a.gate) && in_rows(a.dy) &&
         in_rows(a.y) && in_rows(a.dgate) && (a.tail == nullptr || in_packets<T>(a.tail, a.x.cols)) &&
         in_packets<float>(a.bias, 0);
}

}  // namespace

namespace ops {

template <class T>
void gated_conv_forward(const Exec<T>& exec, Mat<const T> x, Mat<const T> gate, const Wide<T>* weight,
                        const Wide<T>* bias, int64_t width, const PassLayout& layout, const T* tail_in, T* tail_out,
                        Mat<T> y) {
  void* stream = exec.device.stream();
  GatedConvArgs<T> a{x,       gate,    {},     y, {}, weight, bias, static_cast<int>(width), PassSequences(layout),
                     tail_in, nullptr, nullptr};
  if (layout.host.single_tokens()) a.run = 1;
  const int64_t runs = parts_of(x.rows, a.run);
  if (is_usual(a)) {
    launch_following(x.rows, gated_conv_forward_kernel<T, kUsualColumns, kUsualWidth>,
                     grid_of(runs, x.cols / kUsualColumns), kThreads, 0, stream, a);
  } else {
    launch_following(x.rows, any_gated_conv_forward_kernel<T>, grid_of(runs, x.cols), kThreads, 0, stream, a);
  }
  store_tails(x, layout, tail_in, width, tail_out, stream);
}

template <class T>
void gated_conv_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, Mat<const T> gate, const Wide<T>* weight,
                         const Wide<T>* bias, int64_t width, const PassLayout& layout, const T* tail_in, Mat<T> dx,
                         Mat<T> dgate, Wide<T>* dweight, Wide<T>* dbias) {
  if (x.rows == 0) return;
  const Arena::Mark mark = exec.arena.mark();
  void* stream = exec.device.stream();
  const int64_t runs = parts_of(x.rows, kRun);
  float* weight_sums = partial_sums(exec.arena, runs, x.cols * width);
  float* bias_sums = partial_sums(exec.arena, runs, x.cols);
  const GatedConvArgs<T> a{
      x,       gate,        dy,       dx, dgate, weight, bias, static_cast<int>(width), PassSequences(layout),
      tail_in, weight_sums, bias_sums};
  if (is_usual(a)) {
    launch(gated_conv_backward_kernel<T, kUsualColumns, kUsualWidth>, grid_of(runs, x.cols / kUsualColumns), kThreads,
           0, stream, a);
  } else {
    launch(any_gated_conv_backward_kernel<T>, grid_of(runs, x.cols), kThreads, 0, stream, a);
  }
  add_tap_sums(weight_sums, bias_sums, runs, x.cols, width, dweight, dbias, stream);
  exec.arena.rewind(mark);
}

#define FW_INSTANTIATE(T)                                                                                              \
  template void gated_conv_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, const float*, int64_t, \
                                      const PassLayout&, const T*, T*, Mat<T>);                                        \
  template void gated_conv_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, const float*,         \
                                       const float*, int64_t, const PassLayout&, const T*, Mat<T>, Mat<T>, float*,     \
                                       float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
