// A token alongside the one before it, over packed sequences, on the device: y_j[t] = x[t] + (x[t-1] - x[t]) m_j, and
//   dx[t] = sum_j dy_j[t] (1 - m_j) + dy_j[t+1] m_j     dm_j = sum_t dy_j[t] (x[t-1] - x[t])
// The row before a sequence is its tail's, or zeros. A thread has neighbouring columns of a run of tokens; runs have a
// fixed length, so that the order of the sums is that of the shape alone.
#include "base/error.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/conv_tails.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr unsigned kThreads = 128;
constexpr int kColumns = 4;

template <class T>
struct ShiftArgs {
  Mat<const T> x, dy;
  Mat<T> to;  // y or dx
  const float* mix;
  PassSequences sequences;
  const T* tail;
  float* dmix;  // partial sums [runs, count cols]
};

template <class T, int N>
FW_DEVICE void load_row(const T* from, float (&x)[N]) {
  Packet<T, N> packet;
  packet.load(from);
  packet.get(x);
}
template <class T, int N>
FW_DEVICE void store_row(T* to, const float (&x)[N]) {
  Packet<T, N> packet;
  packet.set(x);
  packet.store(to);
}

// The row before token t of sequence n.
template <class T, int N>
FW_DEVICE void load_before(const ShiftArgs<T>& a, int64_t n, int64_t t, int64_t column, float (&x)[N]) {
  if (t > a.sequences.offsets[n]) {
    load_row(a.x.data + (t - 1) * a.x.stride + column, x);
  } else if (a.tail != nullptr) {
    load_row(a.tail + n * a.x.cols + column, x);
  } else {
    FW_UNROLL for (int i = 0; i < N; ++i) x[i] = 0;
  }
}

// body(token, sequence) of this thread's run.
template <class T, class Body>
FW_DEVICE void for_run(const ShiftArgs<T>& a, const Body& body) {
  int64_t t = int64_t{block_index_x()} * kShiftRun;
  const int64_t end = min(t + kShiftRun, a.x.rows);
  int64_t n = a.sequences.sequence_of(t);
  for (; t < end; ++t) {
    while (a.sequences.offsets[n + 1] <= t) ++n;
    body(t, n);
  }
}

template <class T, int N, int kCount>
__global__ void __launch_bounds__(kThreads) token_shift_forward_kernel(const ShiftArgs<T> a) {
  follow();
  const int64_t column = (int64_t{block_index_y()} * kThreads + thread_index()) * N, d = a.x.cols;
  if (column >= d) return;
  float mix[kCount][N];
  FW_UNROLL for (int j = 0; j < kCount; ++j) {
    FW_UNROLL for (int i = 0; i < N; ++i) mix[j][i] = a.mix[j * d + column + i];
  }
  for_run(a, [&](int64_t t, int64_t n) {
    float here[N], before[N];
    load_row(a.x.data + t * a.x.stride + column, here);
    load_before(a, n, t, column, before);
    FW_UNROLL for (int j = 0; j < kCount; ++j) {
      float y[N];
      FW_UNROLL for (int i = 0; i < N; ++i) y[i] = here[i] + (before[i] - here[i]) * mix[j][i];
      store_row(a.to.data + t * a.to.stride + j * d + column, y);
    }
  });
}

template <class T, int N, int kCount>
__global__ void __launch_bounds__(kThreads) token_shift_backward_kernel(const ShiftArgs<T> a) {
  const int64_t column = (int64_t{block_index_y()} * kThreads + thread_index()) * N, d = a.x.cols;
  if (column >= d) return;
  float mix[kCount][N], sums[kCount][N] = {};
  FW_UNROLL for (int j = 0; j < kCount; ++j) {
    FW_UNROLL for (int i = 0; i < N; ++i) mix[j][i] = a.mix[j * d + column + i];
  }
  for_run(a, [&](int64_t t, int64_t n) {
    float here[N], before[N], dx[N] = {};
    load_row(a.x.data + t * a.x.stride + column, here);
    load_before(a, n, t, column, before);
    const bool last = t + 1 == a.sequences.offsets[n + 1];
    FW_UNROLL for (int j = 0; j < kCount; ++j) {
      const T* row = a.dy.data + t * a.dy.stride + j * d + column;
      float grad[N], next[N] = {};
      load_row(row, grad);
      if (!last) load_row(row + a.dy.stride, next);
      FW_UNROLL for (int i = 0; i < N; ++i) {
        dx[i] += grad[i] * (1.0f - mix[j][i]) + next[i] * mix[j][i];
        sums[j][i] += grad[i] * (before[i] - here[i]);
      }
    }
    store_row(a.to.data + t * a.to.stride + column, dx);
  });
  float* partial = a.dmix + int64_t{block_index_x()} * kCount * d + column;
  FW_UNROLL for (int j = 0; j < kCount; ++j) { FW_UNROLL for (int i = 0; i < N; ++i) partial[j * d + i] = sums[j][i]; }
}

// Calls run(numbers of a packet, count) with numbers of the compiler: the layers have one mix or six.
template <class T, class Run>
void with_form(const ShiftArgs<T>& a, int64_t count, const Run& run) {
  const auto packets = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % (kColumns * sizeof(T)) == 0 && stride % kColumns == 0;
  };
  const bool wide = a.x.cols % kColumns == 0 && packets(a.x.data, a.x.stride) && packets(a.to.data, a.to.stride) &&
                    packets(a.dy.data, a.dy.stride) && packets(a.tail, 0);
  const auto with_count = [&]<int N>() {
    if (count == 1) return run.template operator()<N, 1>();
    if (count == 6) return run.template operator()<N, 6>();
    fail_internal("token_shift: expected 1 or 6 mixes, got {}", count);
  };
  wide ? with_count.template operator()<kColumns>() : with_count.template operator()<1>();
}

template <class T>
Dim3 grid_of(const ShiftArgs<T>& a, int columns) {
  const int64_t threads = (a.x.cols + columns - 1) / columns;
  return {static_cast<unsigned>(parts_of(a.x.rows, kShiftRun)),
          static_cast<unsigned>((threads + kThreads - 1) / kThreads)};
}

}  // namespace

namespace ops {

template <class T>
void token_shift_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* mix, int64_t count,
                         const PassLayout& layout, const T* tail_in, T* tail_out, Mat<T> y) {
  const ShiftArgs<T> a{x, {}, y, mix, PassSequences(layout), tail_in, nullptr};
  if (x.rows > 0) {
    with_form(a, count, [&]<int N, int kCount>() {
      launch_following(x.rows, token_shift_forward_kernel<T, N, kCount>, grid_of(a, N), kThreads, 0,
                       exec.device.stream(), a);
    });
  }
  store_tails(x, layout, tail_in, 2, tail_out, exec.device.stream());
}

template <class T>
void token_shift_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* mix, int64_t count,
                          const PassLayout& layout, const T* tail_in, Mat<T> dx, Wide<T>* dmix) {
  if (x.rows == 0) return;
  const Arena::Mark mark = exec.arena.mark();
  const int64_t runs = parts_of(x.rows, kShiftRun), columns = count * x.cols;
  const ShiftArgs<T> a{x, dy, dx, mix, PassSequences(layout), tail_in, partial_sums(exec.arena, runs, columns)};
  with_form(a, count, [&]<int N, int kCount>() {
    launch(token_shift_backward_kernel<T, N, kCount>, grid_of(a, N), kThreads, 0, exec.device.stream(), a);
  });
  add_column_sums(a.dmix, runs, columns, dmix, exec.device.stream());
  exec.arena.rewind(mark);
}

#define FW_INSTANTIATE(T)                                                                                      \
  template void token_shift_forward<T>(const Exec<T>&, Mat<const T>, const float*, int64_t, const PassLayout&, \
                                       const T*, T*, Mat<T>);                                                  \
  template void token_shift_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, int64_t,     \
                                        const PassLayout&, const T*, Mat<T>, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
