// Sums over the neighbouring columns of a head, for kernels over the rows of [T, heads group]. As many neighbouring
// threads as a head has packets, a power of two and at most 32, have a head, so that its sum over them is shuffles; a
// wider head takes them several times.
#pragma once

#include "ops/cuda/elementwise.cuh"

namespace fw::cuda {

// How threads lie over the heads of a matrix: a Cut whose packets are lanes of heads, `across` of which a block has
// side by side, whole heads always.
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

// Whether heads of `lanes` lanes can be summed as products with ones: packets of eight bf16 values, and the four lanes
// of a row of the left operand have the same head.
template <class T, int N>
inline constexpr bool kHasProductSums = sizeof(T) == 2 && N == 8;
inline constexpr int kProductLanes = 4;

// d[0] += the numbers of four neighbouring lanes, in each of them, and d[2] those of their second packets: two
// instructions in place of 32 a lane. What a tensor core leaves of a sum's lowest bits is below the rounding of its
// bf16 values.
FW_DEVICE void add_products(float (&d)[4], const Packet<Bf16, 8>& first, const Packet<Bf16, 8>& second) {
  constexpr uint32_t kOnes = 0x3f803f80u;
  FW_UNROLL for (int i = 0; i < 4; i += 2) {
    const uint32_t a[4] = {first.words[i], second.words[i], first.words[i + 1], second.words[i + 1]};
    mma_bf16(d, a, kOnes, kOnes);
  }
}

}  // namespace fw::cuda
