// The sum of the gradients of channels 0 to 127 and of the others (kernels.h: K256JoinArgs).
//
// Roles, 256 threads: a warp has one token and value head at a time, its first lanes a number each, then the first half
// of its lanes q and the second k; nothing is shared.
#include <algorithm>
#include <iterator>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/kernels.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256, kN = 8;  // neighbouring channels of a lane
static_assert(16 * kN == kHalfTileK && K256JoinArgs::kNumbers <= 32);

FW_DEVICE Rows row_at(const TokenArg& a, unsigned b, unsigned t, unsigned hv) {
  if (a.data == nullptr) return {};
  const int64_t at =
      b * a.stride_b + t * a.stride_t + static_cast<int64_t>(hv / static_cast<unsigned>(a.divisor)) * a.stride_h;
  return {static_cast<char*>(a.data) + at * (a.bf16 != 0 ? 2 : 4), 0, a.bf16};
}

__global__ void __launch_bounds__(kThreads) k256_join_kernel(const __grid_constant__ K256JoinArgs args) {
  const Problem& x = args.problem;
  const unsigned HV = static_cast<unsigned>(x.HV), step = grid_size_x() * (kThreads / 32),
                 T = x.sequences.T > 0 ? static_cast<unsigned>(x.sequences.T) : 1;
  const unsigned rows = static_cast<unsigned>(tokens_there(x.sequences, static_cast<unsigned>(x.tokens))) * HV;
  const int lane = static_cast<int>(lane_index()), channel = lane % 16 * kN;
  const bool of_k = lane >= 16;  // the other half of the warp has q
  for (unsigned row = block_index_x() * (kThreads / 32) + warp_index(); row < rows; row += step) {
    const unsigned token = row / HV, hv = row - token * HV;
    const unsigned b = x.sequences.offsets != nullptr ? 0 : token / T, t = token - b * T;
    if (lane < K256JoinArgs::kNumbers) {
      const K256JoinArgs::Number& number = args.numbers[lane];
      if (number.parts[0] != nullptr)
        store_element(row_at(number.to, b, t, hv), 0, 0, number.parts[0][row] + number.parts[1][row]);
    }
    if (args.q == nullptr) continue;
    const Rows from = of_k ? row_at(x.in.k, b, t, hv) : row_at(x.in.q, b, t, hv);
    const Rows to = of_k ? row_at(args.d_k, b, t, hv) : row_at(args.d_q, b, t, hv);
    if (to.data == nullptr) continue;
    const float slope = of_k ? args.k[row] : args.q[row];
    float value[kN], gradient[kN];
    load_channels(from, 0, channel, x.K, value);
    load_channels(to, 0, channel, x.K, gradient);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) gradient[j] += slope * value[j];
    store_channels(to, 0, channel, kHalfTileK, gradient);
  }
}

}  // namespace

void k256_join(const K256JoinArgs& args, void* stream) {
  const int64_t rows = args.problem.tokens * args.problem.HV;
  const bool none = std::all_of(std::begin(args.numbers), std::end(args.numbers),
                                [](const auto& number) { return number.parts[0] == nullptr; });
  if (rows == 0 || (none && args.q == nullptr)) return;
  const Dim3 grid{
      static_cast<unsigned>(std::min((rows + kThreads / 32 - 1) / (kThreads / 32), 16 * int64_t{sm_count()}))};
  launch(k256_join_kernel, grid, kThreads, 0, stream, args);
}

}  // namespace fw::cuda
