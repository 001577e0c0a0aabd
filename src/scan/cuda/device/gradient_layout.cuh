// Shared memory of the gradient kernel, and what a thread knows of its chunk.
#pragma once

#include "scan/cuda/device/front_rows.cuh"
#include "scan/cuda/device/panels.cuh"
#include "scan/cuda/kernels.h"

namespace fw::cuda {

// The warps lie over a product [64 rows, kKey] as 4 x kGroups tiles of 16 rows x 32 columns.
template <int kKeyDim, bool kChannelDecay, bool kOnlineSolve>
struct GradientShape {
  static constexpr int kKey = kKeyDim;
  static constexpr bool kChannel = kChannelDecay, kOnline = kOnlineSolve;
  static constexpr int kThreads = 4 * kKey, kWarps = kThreads / 32, kGroups = kKey / 32, kPairs = kKey / 2;
  static constexpr int kBlocksPerSm = kKey == 128 ? 1 : 2;

  // A stage: what one block of 64 value columns brings.
  static constexpr int kStages = kKey == 128 ? 2 : 1;
  static constexpr int kStateBytes = 64 * kKey * 2;
  static constexpr int kW = 0, kV = kPanelBytes, kOut = 2 * kPanelBytes, kState = 3 * kPanelBytes, kDState = kState + kStateBytes;
  static constexpr int kStageBytes = kDState + kStateBytes;

  // float32 [64, kKey]; the stride keeps the accumulators' rows on different banks.
  static constexpr int kPlaneStride = kKey + 8, kPlaneBytes = 64 * kPlaneStride * 4;

  // Byte offsets. The stages make place for the anchored streams (and, where decays were bounded, for what the bound took: sums
  // within 8 rows and of those, [8, kKey]), then for the planes dr, de, dw.
  static constexpr int kAnchored = 0, kExcess = 3 * kStateBytes, kExcessTotals = kExcess + kPlaneBytes;
  static constexpr int kAnchoredBytes = kExcessTotals + 8 * kKey * 4;
  static constexpr int kRingUsed = kStages * kStageBytes > kAnchoredBytes || !kChannel ? kStages * kStageBytes : kAnchoredBytes;
  static constexpr int kRing = (kRingUsed + 1023) / 1024 * 1024;
  // A and P, later dP and dT.
  static constexpr int kA = kRing, kP = kA + kPanelBytes;
  // r, e, w in bf16.
  static constexpr int kStreams = kP + kPanelBytes;
  // Channel decay: factors from the anchors, later dG.
  static constexpr int kFactors = kStreams + 3 * kStateBytes;
  static constexpr int kSmall = kFactors + (kChannel ? kPlaneBytes : 0);
  // Small arrays of floats: sums G of the decay (scalar), z_v and the part of its gradient, diag P's gradient, dG of rows, sums of
  // warps (channel decay: whether a warp bounded a decay).
  static constexpr int kG = kSmall, kZv = kG + 256, kDZv = kZv + 256, kDiagonal = kDZv + 256, kDG = kDiagonal + 256, kWarpSums = kDG + 256;
  static constexpr int kBarriers = kWarpSums + 64, kPlace = kBarriers + 32;
  // Channel decay: decay over 8 rows [8, kKey], from each anchor to the next [5, kKey], sums of D (.) S0 [8, kKey], tails [4, kKey].
  static constexpr int kHalves = kBarriers + 64, kRatios = kHalves + 8 * kKey * 4, kStateDots = kRatios + 5 * kKey * 4, kTails = kStateDots + 8 * kKey * 4;
  static constexpr int kBytes = kChannel ? kTails + 4 * kKey * 4 : kHalves;
  // In the place of dP and dT once those are used: sums of dG over blocks of 8 rows [8, kKey].
  static constexpr int kBlockSums = kStreams - 8 * kKey * 4;

  static_assert(3 * kPlaneBytes <= (kChannel ? kBlockSums : kStreams));
  static_assert(kBytes + 1024 <= 228 * 1024 / kBlocksPerSm && kBytes <= 227 * 1024);
};

template <class Shape>
struct GradientChunk {
  const GradientArgs& args;
  char* memory;
  uint32_t base;
  int thread, lane, warp;

  FW_DEVICE explicit GradientChunk(const GradientArgs& a) : args(a) {
    memory = shared_memory();
    base = shared_address(memory);
    thread = static_cast<int>(thread_index());
    lane = static_cast<int>(lane_index());
    warp = static_cast<int>(warp_index());
  }

  // Sequence, value head, first token within the sequence, tokens. They come from shared memory each time, so that a phase makes
  // its addresses again and none of them sits in a register through the products.
  FW_DEVICE int n() const { return place()[0]; }
  FW_DEVICE int hv() const { return place()[1]; }
  FW_DEVICE int first() const { return place()[2]; }
  FW_DEVICE int rows() const { return place()[3]; }
  // By one thread, before a barrier.
  FW_DEVICE void find_place() const {
    const SequenceArg& s = args.problem.sequences;
    const int chunk = static_cast<int>(block_index_x() / static_cast<unsigned>(args.problem.HV));
    const int sequence = sequence_of_chunk(s, chunk), from = (chunk - first_chunk(s, sequence)) * kChunk, left = sequence_length(s, sequence) - from;
    place()[0] = sequence;
    place()[1] = static_cast<int>(block_index_x() % static_cast<unsigned>(args.problem.HV));
    place()[2] = from;
    place()[3] = left < kChunk ? left : kChunk;
  }
  FW_DEVICE int* place() const { return reinterpret_cast<int*>(memory + Shape::kPlace); }

  FW_DEVICE float* floats(int offset) const { return reinterpret_cast<float*>(memory + offset); }
  FW_DEVICE uint64_t* barrier(int stage) const { return reinterpret_cast<uint64_t*>(memory + Shape::kBarriers) + stage; }
  FW_DEVICE uint32_t& word(int tile_offset, int row, int column) const {
    return *reinterpret_cast<uint32_t*>(memory + tile_offset + panel_offset(row, column));
  }
  // The two numbers of a product's fragment at row() + 8 half, columns 8 (granule + j) + 2 (lane % 4) and the next; granule: a multiple of
  // the number of the j.
  FW_DEVICE uint32_t& fragment_at(int tile_offset, int half, int granule, int j) const {
    const int in_row = ((granule & 7) << 4) ^ ((lane & 28) << 2);
    return *reinterpret_cast<uint32_t*>(memory + (tile_offset + half * 1024) +
                                        ((granule >> 3) * kPanelBytes + row() * 128 + (lane & 3) * 4 + (in_row ^ (j << 4))));
  }
  // At column() + 8 j.
  FW_DEVICE uint32_t& fragment(int tile_offset, int half, int j) const { return fragment_at(tile_offset, half, 4 * group(), j); }
  // Where the warp's tile of a product lies, and the first of the places that this lane has in it: rows row, row + 8.
  FW_DEVICE int block_row() const { return warp & 3; }
  FW_DEVICE int group() const { return warp >> 2; }
  FW_DEVICE int row() const { return 16 * block_row() + (lane >> 2); }
  FW_DEVICE int column() const { return 32 * group() + 2 * (lane & 3); }
};

// Log-decays in units of log 2. Below -150 a step leaves nothing of a float: the bound keeps sums finite.
FW_DEVICE float log2_decay(float g) {
  const float x = g * kLog2E;
  return x > -150.0f ? x : -150.0f;
}

}  // namespace fw::cuda
