// Sums over the neighbouring columns of a head, for kernels over the rows of [T, heads group]. As many neighbouring threads as a head has packets, a power of
// two and at most 32, have a head, so that its sum over them is shuffles; a wider head takes them several times. A thread has the same columns of several
// rows, which are all asked for before the first is used.
#pragma once

#include "ops/cuda/elementwise.cuh"

namespace fw::cuda {

// How threads lie over the heads of a matrix: a Cut whose packets are lanes of heads, `across` of which a block has side by side, whole heads always.
struct HeadCut {
  int heads = 0, group = 0, log_lanes = 0;
  Cut cut;

  HeadCut(int64_t rows, int64_t head_count, int64_t columns, int numbers, int most_across_log)
      : heads(static_cast<int>(head_count)),
        group(static_cast<int>(columns)),
        log_lanes(lanes_log(columns, numbers)),
        cut(rows, head_count << log_lanes, most_across_log, log_lanes) {}
  int64_t blocks(int64_t row_blocks) const { return row_blocks * cut.column_blocks; }

 private:
  static int lanes_log(int64_t columns, int numbers) {
    int log = 0;
    while (log < 5 && (numbers << log) < columns) ++log;
    return log;
  }
};

// sums[i] += what this thread has of its head in the row first + i down.
template <int N, int kRows, class T>
FW_DEVICE void add_columns(const T* x, int64_t stride, const HeadCut& cut, int head, int lane, int64_t first, int64_t down, float (&sums)[kRows]) {
  for (int c = lane * N; c < cut.group; c += N << cut.log_lanes) {
    const T* from = x + first * stride + int64_t{head} * cut.group + c;
    Packet<T, N> packets[kRows];
    FW_UNROLL for (int i = 0; i < kRows; ++i) {
      if (first + i * down < cut.cut.rows) packets[i].load(from + i * down * stride);
    }
    FW_UNROLL for (int i = 0; i < kRows; ++i) {
      float v[N];
      packets[i].get(v);
      FW_UNROLL for (int k = 0; k < N; ++k) sums[i] += v[k];
    }
  }
}

}  // namespace fw::cuda
