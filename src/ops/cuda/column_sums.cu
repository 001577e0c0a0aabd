// A block sums 32 columns: its warp w the rows w, w + 32, ..., of which several are on their way at a time, then one warp the sums of the warps, in order.
// The kernel in front, which leaves the partial sums, takes much longer than this: it begins before that one is over, and what starting it costs is hidden.
#include "ops/cuda/column_sums.h"
#include "ops/cuda/overlap.cuh"
#include "scan/cuda/machine/ptx.cuh"

namespace fw::cuda {
namespace {

constexpr int kWarps = 32;

template <bool kAdd>
__global__ void __launch_bounds__(kWarps * 32) column_sums_kernel(const float* partial, int64_t rows, int64_t cols, float* to) {
  follow();
  constexpr int kLoads = 16;
  float* sums = reinterpret_cast<float*>(shared_memory());  // [kWarps, 32]
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int64_t c = int64_t{block_index_x()} * 32 + lane;
  float sum = 0, old = 0;
  if (kAdd && warp == 0 && c < cols) old = to[c];  // on its way with the others
  if (c < cols) {
    for (int64_t first = warp; first < rows; first += kLoads * kWarps) {
      float x[kLoads];
      FW_UNROLL for (int i = 0; i < kLoads; ++i) {
        const int64_t r = first + i * kWarps;
        x[i] = r < rows ? partial[r * cols + c] : 0.0f;
      }
      FW_UNROLL for (int i = 0; i < kLoads; ++i) sum += x[i];
    }
  }
  sums[warp * 32 + lane] = sum;
  sync_threads();
  if (warp > 0 || c >= cols) return;
  float total = sums[lane];
  FW_UNROLL for (int w = 1; w < kWarps; ++w) total += sums[w * 32 + lane];
  to[c] = kAdd ? old + total : total;
}

// A warp has a group.
__global__ void __launch_bounds__(32) group_sums_kernel(const float* sums, int64_t cols, int64_t group, float* to) {
  follow();
  const int64_t begin = int64_t{block_index_x()} * group, end = min(cols, begin + group);
  float sum = 0;
  for (int64_t c = begin + lane_index(); c < end; c += 32) sum += sums[c];
  sum = warp_sum(sum);
  if (lane_index() == 0) to[block_index_x()] += sum;
}

template <bool kAdd>
void column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream) {
  launch_overlapped(column_sums_kernel<kAdd>, Dim3{static_cast<unsigned>((cols + 31) / 32)}, kWarps * 32, kWarps * 32 * sizeof(float), stream, partial, rows,
                    cols, to);
}

}  // namespace

void add_column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream) {
  if (rows > 0) column_sums<true>(partial, rows, cols, to, stream);
}

void set_column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream) { column_sums<false>(partial, rows, cols, to, stream); }

void add_group_sums(const float* partial, int64_t rows, int64_t cols, int64_t group, float* to, Arena& arena, void* stream) {
  if (rows == 0) return;
  const Arena::Mark mark = arena.mark();
  float* sums = arena.alloc<float>(cols);
  set_column_sums(partial, rows, cols, sums, stream);
  launch_overlapped(group_sums_kernel, Dim3{static_cast<unsigned>((cols + group - 1) / group)}, 32, 0, stream, sums, cols, group, to);
  arena.rewind(mark);
}

}  // namespace fw::cuda
