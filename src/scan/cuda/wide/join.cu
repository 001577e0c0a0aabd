// What the gradients of both halves of the channels make together (kernels.h: WideJoinArgs).
//
// Roles, 256 threads: a warp has one token and value head at a time; nothing is shared.
#include <algorithm>

#include "scan/cuda/call/device.h"
#include "scan/cuda/call/kernels.h"
#include "scan/cuda/call/launch.h"
#include "scan/cuda/machine/tokens.cuh"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256, kN = 4;  // neighbouring channels of a lane

FW_DEVICE Rows row_at(const TokenArg& a, unsigned b, unsigned t, unsigned hv) {
  const int64_t at = b * a.stride_b + t * a.stride_t + static_cast<int64_t>(hv / static_cast<unsigned>(a.divisor)) * a.stride_h;
  return {static_cast<char*>(a.data) + at * (a.bf16 != 0 ? 2 : 4), 0, a.bf16};
}

FW_DEVICE void add_numbers(const TokenArg& out, const float* first, const float* second, unsigned row, unsigned b, unsigned t, unsigned hv) {
  if (out.data == nullptr) return;
  store_element(row_at(out, b, t, hv), 0, 0, first[row] + second[row]);
}

// d += slope x for the channels of a half.
FW_DEVICE void add_slope(const TokenArg& x, const TokenArg& d, float slope, int half, int K, unsigned b, unsigned t, unsigned hv) {
  if (d.data == nullptr) return;
  const int channel = half * kHalfKey + kN * static_cast<int>(lane_index());
  if (channel >= K) return;
  const Rows from = row_at(x, b, t, hv), to = row_at(d, b, t, hv);
  float value[kN], gradient[kN];
  load_channels(from, 0, channel, K, value);
  load_channels(to, 0, channel, K, gradient);
  FW_UNROLL
  for (int j = 0; j < kN; ++j) gradient[j] += slope * value[j];
  store_channels(to, 0, channel, K, gradient);
}

__global__ void __launch_bounds__(kThreads) wide_join_kernel(const __grid_constant__ WideJoinArgs args) {
  const Problem& x = args.problem;
  const unsigned HV = static_cast<unsigned>(x.HV), step = grid_size_x() * (kThreads / 32), T = x.sequences.T > 0 ? static_cast<unsigned>(x.sequences.T) : 1;
  const unsigned rows = static_cast<unsigned>(tokens_there(x.sequences, static_cast<unsigned>(x.tokens))) * HV;
  for (unsigned row = block_index_x() * (kThreads / 32) + warp_index(); row < rows; row += step) {
    const unsigned token = row / HV, hv = row - token * HV;
    const unsigned b = x.sequences.offsets != nullptr ? 0 : token / T, t = token - b * T;
    if (lane_index() == 0) {
      add_numbers(args.grads.beta, args.halves[0].beta, args.halves[1].beta, row, b, t, hv);
      add_numbers(args.grads.g, args.halves[0].g, args.halves[1].g, row, b, t, hv);
    }
    if (args.halves[0].q == nullptr) continue;
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const WideJoinArgs::Half& other = args.halves[1 - half];
      add_slope(x.in.q, args.grads.q, other.q[row], half, x.K, b, t, hv);
      add_slope(x.in.k, args.grads.k, other.k[row], half, x.K, b, t, hv);
    }
  }
}

}  // namespace

void wide_join(const WideJoinArgs& args, void* stream) {
  const int64_t rows = args.problem.tokens * args.problem.HV;
  if (rows == 0 || (args.grads.beta.data == nullptr && args.grads.g.data == nullptr && args.halves[0].q == nullptr)) return;
  const Dim3 grid{static_cast<unsigned>(std::min((rows + kThreads / 32 - 1) / (kThreads / 32), 16 * int64_t{multiprocessors()}))};
  launch(wide_join_kernel, grid, kThreads, 0, stream, args);
}

}  // namespace fw::cuda
