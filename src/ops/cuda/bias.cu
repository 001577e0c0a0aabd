// A thread has a column (bias) and a run of rows: neighbours have neighbouring columns, so that a warp reads whole
// lines.
#include <algorithm>

#include "gpu/launch.h"
#include "ops/cuda/bias.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kRun = kBiasRun;  // rows of a block
constexpr int kAhead = 8;           // rows that are on their way at a time

struct ColumnRun {
  int64_t column, first, end;
};
FW_DEVICE ColumnRun column_run(int64_t rows, int64_t cols, int64_t run) {
  const int64_t blocks = (cols + kThreads - 1) / kThreads, block = block_index_x();
  const int64_t first = block / blocks * run;
  return {block % blocks * kThreads + thread_index(), first, min(rows, first + run)};
}
unsigned grid(int64_t rows, int64_t cols, int64_t run) {
  return static_cast<unsigned>((cols + kThreads - 1) / kThreads * ((rows + run - 1) / run));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(const float* bias, T* y, int64_t rows, int64_t cols, int64_t stride, int64_t run) {
  const ColumnRun at = column_run(rows, cols, run);
  const float b = at.column < cols ? bias[at.column] : 0.0f;
  follow();
  if (at.column >= cols) return;
  for (int64_t first = at.first; first < at.end; first += kAhead) {
    T x[kAhead];
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (first + i < at.end) x[i] = y[(first + i) * stride + at.column];
    }
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (first + i < at.end) y[(first + i) * stride + at.column] = stored<T>(number(x[i]) + b);
    }
  }
}

// partial [runs, cols]
template <class T>
__global__ void __launch_bounds__(kThreads)
    bias_sums_kernel(const T* dy, int64_t rows, int64_t cols, int64_t stride, float* partial) {
  const ColumnRun at = column_run(rows, cols, kRun);
  if (at.column >= cols) return;
  float sum = 0;
  for (int64_t first = at.first; first < at.end; first += kAhead) {
    T x[kAhead];
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (first + i < at.end) x[i] = dy[(first + i) * stride + at.column];
    }
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (first + i < at.end) sum += number(x[i]);
    }
  }
  partial[at.first / kRun * cols + at.column] = sum;
}

}  // namespace

template <class T>
void add_bias(const Exec<T>& exec, const float* bias, Mat<T> y) {
  // A decoded token's few rows are one turn a block.
  const int64_t run = y.rows <= kOverlappedRows ? kAhead : kRun;
  launch_following(y.rows, add_bias_kernel<T>, Dim3{grid(y.rows, y.cols, run)}, kThreads, 0, exec.device.stream(), bias,
                   y.data, y.rows, y.cols, y.stride, run);
}

template <class T>
void add_bias_gradient(const Exec<T>& exec, Mat<const T> dy, float* dbias) {
  const Arena::Mark mark = exec.arena.mark();
  const int64_t runs = (dy.rows + kRun - 1) / kRun;
  float* partial = partial_sums(exec.arena, runs, dy.cols);
  launch(bias_sums_kernel<T>, Dim3{grid(dy.rows, dy.cols, kRun)}, kThreads, 0, exec.device.stream(), dy.data, dy.rows,
         dy.cols, dy.stride, partial);
  add_column_sums(partial, runs, dy.cols, dbias, exec.device.stream());
  exec.arena.rewind(mark);
}

template void add_bias(const Exec<float>&, const float*, Mat<float>);
template void add_bias(const Exec<Bf16>&, const float*, Mat<Bf16>);
template void add_bias_gradient(const Exec<float>&, Mat<const float>, float*);
template void add_bias_gradient(const Exec<Bf16>&, Mat<const Bf16>, float*);

}  // namespace fw::cuda
