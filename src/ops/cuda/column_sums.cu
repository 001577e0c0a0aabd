// A block sums 32 columns: its warp w the rows w, w + 8, ..., then one warp the eight sums, in order.
#include "ops/cuda/column_sums.h"
#include "scan/cuda/call/launch.h"
#include "scan/cuda/machine/ptx.cuh"

namespace fw::cuda {
namespace {

constexpr int kWarps = 8;

__global__ void __launch_bounds__(kWarps * 32) column_sums_kernel(const float* partial, int64_t rows, int64_t cols, float* to) {
  float* sums = reinterpret_cast<float*>(shared_memory());  // [kWarps, 32]
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int64_t c = int64_t{block_index_x()} * 32 + lane;
  float sum = 0;
  if (c < cols) {
    for (int64_t r = warp; r < rows; r += kWarps) sum += partial[r * cols + c];
  }
  sums[warp * 32 + lane] = sum;
  sync_threads();
  if (warp > 0 || c >= cols) return;
  float total = sums[lane];
  FW_UNROLL for (int w = 1; w < kWarps; ++w) total += sums[w * 32 + lane];
  to[c] += total;
}

}  // namespace

void add_column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream) {
  if (rows == 0) return;
  launch(column_sums_kernel, Dim3{static_cast<unsigned>((cols + 31) / 32)}, kWarps * 32, kWarps * 32 * sizeof(float), stream, partial, rows, cols, to);
}

}  // namespace fw::cuda
