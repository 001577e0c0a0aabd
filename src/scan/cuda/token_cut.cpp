#include "scan/cuda/token_cut.h"

#include <algorithm>
#include <cmath>

#include "scan/cuda/kernels.h"

namespace fw::cuda {

TokenCut token_cut(int64_t sequences, int32_t HV, int32_t K, int32_t V, int64_t longest, int sm_count) {
  TokenCut c;
  c.channels = K <= 64 ? 2 : K <= 128 ? 4 : 8;
  c.rows = c.channels == 8 ? 4 : 8;
  const int most = c.channels == 8 ? 8 : 16;
  c.warps = std::min(most, (V + c.rows - 1) / c.rows);
  c.tiles = (V + c.warps * c.rows - 1) / (c.warps * c.rows);
  c.stretch = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(longest)))));
  c.stretches = (longest + c.stretch - 1) / c.stretch;
  c.state = static_cast<int64_t>(c.tiles) * c.warps * c.rows * 32 * c.channels;
  c.block = c.state * (c.stretches + c.stretch + 1);
  // Blocks: one an SM, fewer where their workspace together would be more than half a gibibyte.
  constexpr int64_t kFloats = int64_t{1} << 27;
  c.blocks = std::min(sequences * HV, std::clamp<int64_t>(kFloats / c.block, 1, sm_count));
  return c;
}

int64_t token_backward_bytes(int64_t sequences, int32_t HV, int32_t K, int32_t V, int64_t longest, int sm_count) {
  const TokenCut cut = token_cut(sequences, HV, K, V, longest, sm_count);
  return 4 * cut.block * cut.blocks;
}

}  // namespace fw::cuda
