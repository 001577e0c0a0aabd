// Gradients per value head summed over the group that shares a key head. See kernels.h.
//
// Roles, 256 threads: a warp has one token and key head at a time; nothing is shared.
#include <algorithm>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/kernels.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

// A warp has one token and key head, a lane kN neighbouring channels.
template <int kN>
__global__ void __launch_bounds__(kThreads, 4)
    sum_groups_kernel(const __grid_constant__ TokenArg in, int dim, const __grid_constant__ TokenArg out,
                      const __grid_constant__ SequenceArg sequences, unsigned rows, unsigned H, int group) {
  const Rows from{static_cast<char*>(in.data), dim, in.bf16};
  rows = static_cast<unsigned>(tokens_there(sequences, rows / H)) * H;
  const unsigned step = grid_size_x() * (kThreads / 32), T = sequences.T > 0 ? static_cast<unsigned>(sequences.T) : 1;
  for (unsigned row = block_index_x() * (kThreads / 32) + warp_index(); row < rows; row += step) {
    const unsigned token = row / H, h = row - token * H;
    const unsigned b = sequences.offsets != nullptr ? 0 : token / T, t = token - b * T;
    const int64_t at = b * out.stride_b + t * out.stride_t + h * out.stride_h;
    const Rows to{static_cast<char*>(out.data) + at * (out.bf16 != 0 ? 2 : 4), 0, out.bf16};
    for (int i = kN * static_cast<int>(lane_index()); i < dim; i += 32 * kN) {
      float sum[kN] = {};
      for (int j = 0; j < group; ++j) {
        float x[kN];
        load_channels(from, static_cast<int64_t>(row) * group + j, i, dim, x);
        FW_UNROLL
        for (int m = 0; m < kN; ++m) sum[m] += x[m];
      }
      store_channels(to, 0, i, dim, sum);
    }
  }
}

}  // namespace

void sum_groups(const Problem& x, const TokenArg& in, int32_t dim, const TokenArg& out, void* stream) {
  if (out.data == nullptr || x.tokens == 0) return;
  const bool wide = dim % 4 == 0 && reinterpret_cast<uintptr_t>(in.data) % 16 == 0;
  const int64_t rows = x.tokens * x.H;
  const int64_t blocks = 16 * int64_t{sm_count()};
  const Dim3 grid{static_cast<unsigned>(std::min((rows + kThreads / 32 - 1) / (kThreads / 32), blocks))};
  launch(wide ? sum_groups_kernel<4> : sum_groups_kernel<1>, grid, kThreads, 0, stream, in, dim, out, x.sequences,
         static_cast<unsigned>(rows), static_cast<unsigned>(x.H), x.group);
}

}  // namespace fw::cuda
