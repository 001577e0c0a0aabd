// Scalar decay, and none: shared memory of the gradient kernel, and where a block stands. A block stays on its processor and takes
// every grid-th chunk; its "turns" count them. The tiles and rows of later turns are on the way while it computes.
#pragma once

#include "scan/cuda/device/front_plain.cuh"
#include "scan/cuda/device/gradient_layout.cuh"

namespace fw::cuda {

// kFastRows: rules whose streams are q and k times a number a row, with rows that can be copied as they are.
template <int kKeyDim, bool kOnlineSolve, bool kFastRows>
struct ScalarShape {
  static constexpr int kKey = kKeyDim;
  static constexpr bool kOnline = kOnlineSolve, kFast = kFastRows;
  static constexpr int kThreads = 4 * kKey, kWarps = kThreads / 32, kGroups = kKey / 32;
  static constexpr int kBlocksPerSm = kKey == 128 ? 1 : 2;

  // A stage: what one block of 64 value columns brings.
  static constexpr int kStages = kKey == 128 ? 2 : 1;
  static constexpr int kStateBytes = 64 * kKey * 2;
  static constexpr int kW = 0, kV = kPanelBytes, kOut = 2 * kPanelBytes, kState = 3 * kPanelBytes, kDState = kState + kStateBytes;
  static constexpr int kStageBytes = kDState + kStateBytes;

  // A and P, later dT and dP; dR; q and k, later r and w, of this turn and the next; e.
  static constexpr int kA = kStages * kStageBytes, kP = kA + kPanelBytes, kDR = kP + kPanelBytes;
  static constexpr int kRead = kDR + kPanelBytes, kWrite = kRead + kStateBytes, kKeyBytes = 2 * kStateBytes;
  static constexpr int kErase = kRead + 2 * kKeyBytes;

  // Arrays of 64 floats: sums G of the log-decay, beta, dP's diagonal, dG; of the front: z_v and its gradient ...
  static constexpr int kSmall = kErase + kStateBytes;
  static constexpr int kG = kSmall, kBeta = kG + 256, kDiagonal = kBeta + 256, kDG = kDiagonal + 256, kZv = kDG + 256, kDZv = kZv + 256;
  // ... the other coefficients and scalars of rows, and what dq and dk are made with.
  static constexpr int kFront = kDZv + 256;
  static constexpr int kCoefs = kFront, kScalars = kCoefs + (kFast ? 0 : static_cast<int>(sizeof(FrontCoefs<float>)) / 4) * 256;
  static constexpr int kSlopes = kScalars + (kFast ? 3 : static_cast<int>(sizeof(FrontScalars<float>)) / 4) * 256;
  static constexpr int kFrontEnd = kSlopes + (kFast ? 5 : static_cast<int>(sizeof(FrontScalars<float>)) / 4) * 256;
  static constexpr int kWarpSums = kFrontEnd, kBarriers = kWarpSums + 64, kPlaces = kBarriers + 64, kSmallEnd = kPlaces + 64;
  // Sums over a group's 32 columns [sum][group][64 rows]; if not fast, in the place of the next turn's rows, which are not copied ahead.
  static constexpr int kSums = kFast ? 4 : 7;
  static constexpr int kPartial = kFast ? kSmallEnd : kRead + kKeyBytes;
  static constexpr int kBytes = kSmallEnd + (kFast ? kSums * kGroups * 256 : 0);

  static_assert(kFast || kSums * kGroups * 256 <= kKeyBytes);
  static_assert(kBytes + 1024 <= 228 * 1024 / kBlocksPerSm && kBytes <= 227 * 1024);
};

struct ScalarGradientArgs {
  GradientArgs gradients;
  int64_t tiles = 0;  // chunks times value heads
};

// The products of gradient_products.cuh take its GradientChunk part.
template <class Shape>
struct ScalarChunk : GradientChunk<Shape> {
  int64_t tiles;
  int blocks;  // of values

  FW_DEVICE explicit ScalarChunk(const ScalarGradientArgs& a) : GradientChunk<Shape>(a.gradients), tiles(a.tiles) {
    blocks = (a.gradients.problem.V + kValueBlock - 1) / kValueBlock;
  }

  FW_DEVICE int64_t tile(int turn) const { return block_index_x() + static_cast<int64_t>(turn) * grid_size_x(); }
  FW_DEVICE bool has(int turn) const { return tile(turn) < tiles; }

  // Sequence, value head, first token within the sequence, tokens. Of four turns, so that one can be made while slower threads are
  // still with an earlier one.
  FW_DEVICE const int* place(int turn) const { return reinterpret_cast<const int*>(this->memory + Shape::kPlaces) + 4 * (turn & 3); }
  FW_DEVICE int n(int turn) const { return place(turn)[0]; }
  FW_DEVICE int hv(int turn) const { return place(turn)[1]; }
  FW_DEVICE int first(int turn) const { return place(turn)[2]; }
  FW_DEVICE int rows(int turn) const { return place(turn)[3]; }
  FW_DEVICE void find(int turn) const {
    if (!has(turn)) return;
    const Problem& x = this->args.problem;
    const SequenceArg& s = x.sequences;
    const unsigned at = static_cast<unsigned>(tile(turn)), heads = static_cast<unsigned>(x.HV);
    const int chunk = static_cast<int>(at / heads), sequence = sequence_of_chunk(s, chunk);
    const int from = (chunk - first_chunk(s, sequence)) * kChunk, left = sequence_length(s, sequence) - from;
    int* to = const_cast<int*>(place(turn));
    to[0] = sequence;
    to[1] = static_cast<int>(at % heads);
    to[2] = from;
    to[3] = left < kChunk ? left : kChunk;
  }
  FW_DEVICE Rows rows_at(const TokenArg& tensor, int turn) const { return rows_of(tensor, this->args.problem.sequences, n(turn), hv(turn)); }

  // Barriers: of the stages, of A and P, of q and k of two turns.
  FW_DEVICE uint64_t* pairs_barrier() const { return this->barrier(Shape::kStages); }
  FW_DEVICE uint64_t* key_barrier(int turn) const { return this->barrier(Shape::kStages + 1 + (turn & 1)); }
  static FW_DEVICE int key_offset(int turn) { return Shape::kFast && (turn & 1) != 0 ? Shape::kKeyBytes : 0; }
};

}  // namespace fw::cuda
