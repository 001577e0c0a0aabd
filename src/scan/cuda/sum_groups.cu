// Gradients per value head summed over the group that shares a key head. See kernels.h.
#include <algorithm>

#include "scan/cuda/device/tokens.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

// A thread has kN neighbouring channels of one token and key head.
template <int kN>
__global__ void __launch_bounds__(kThreads) sum_groups_kernel(const float* in, int dim, const __grid_constant__ TokenArg out,
                                                              const __grid_constant__ SequenceArg sequences, int64_t tokens, int H, int group) {
  const int64_t columns = dim / kN, count = tokens * H * columns;
  for (int64_t i = static_cast<int64_t>(block_index_x()) * kThreads + thread_index(); i < count; i += static_cast<int64_t>(grid_size_x()) * kThreads) {
    const int channel = static_cast<int>(i % columns) * kN, h = static_cast<int>(i / columns % H);
    const int64_t token = i / columns / H;
    const float* from = in + (token * H + h) * group * dim + channel;
    float sum[kN] = {};
    for (int j = 0; j < group; ++j, from += dim) {
      if constexpr (kN == 4) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      } else {
        sum[0] += from[0];
      }
    }
    const int64_t b = sequences.offsets != nullptr ? 0 : token / sequences.T, t = sequences.offsets != nullptr ? token : token % sequences.T;
    const int64_t at = b * out.stride_b + t * out.stride_t + h * out.stride_h;
    const Rows row{static_cast<char*>(out.data) + at * (out.bf16 != 0 ? 2 : 4), 0, out.bf16};
    store_channels(row, 0, channel, dim, sum);
  }
}

}  // namespace

void sum_groups(const Problem& x, const float* in, int32_t dim, const TokenArg& out, void* stream) {
  if (out.data == nullptr || x.tokens == 0) return;
  const bool wide = dim % 4 == 0 && reinterpret_cast<uintptr_t>(in) % 16 == 0;
  const int64_t threads = x.tokens * x.H * (wide ? dim / 4 : dim), blocks = (threads + kThreads - 1) / kThreads;
  constexpr int64_t kBlocks = 132 * 16;
  const Dim3 grid{static_cast<unsigned>(std::min(blocks, kBlocks))};
  launch(wide ? sum_groups_kernel<4> : sum_groups_kernel<1>, grid, kThreads, 0, stream, in, dim, out, x.sequences, x.tokens, x.H, x.group);
}

}  // namespace fw::cuda
