// Shared memory, barriers and roles of the fused forward (forward.cu). A CTA of 512 threads computes all chunks of one
// sequence and value head, with K = V = 128.
//
//   warps    registers  role                                                                               header
//   0 to 3   72         P of each chunk; warp 0: decays; warp 1: stores of O; warp 2: loads                p_maker.cuh
//   4 to 7   88         A of each chunk                                                                    a_maker.cuh
//   8 to 15  176        the transposed state: each warpgroup has 64 values                                 state.cuh
//
// One lane arrives for its warp, after sync_warp(): 32 arrivals would cost the makers more time than they have.
#pragma once

#include "gpu/sm80/fragments.cuh"
#include "gpu/sm90/fragments.cuh"
#include "gpu/sm90/pipeline.cuh"
#include "gpu/sw128.cuh"
#include "scan/cuda/sm90/scan/rows.cuh"

namespace fw::cuda {

inline constexpr int kFusedStages = 3, kFusedThreads = 512, kGroupThreads = 128;
inline constexpr int kFusedK = 128;

// The step s of a token: of its gate alone, or of |k|^2 too.
enum class FusedStep { kOfGate, kOfKey };

// Scalars of the 64 tokens of a chunk. With G_i the sum of the log-decays (base 2) up to token i, e the last token
// before the 16 rows that i belongs to, and C the last token of the chunk:
struct ChunkScalars {
  float decay[kChunk];       // G_i
  float from_block[kChunk];  // 2^(G_i - G_e)
  // [block - 1]: 2^(G_e - G_j) for columns j on the left of row block `block`. Every exponent is at most 0.
  float to_block[3][kChunk];
  float step[kChunk];   // the gate of the step; 0 past the end
  float gamma[kChunk];  // 2^G_i
  float keys[kChunk];   // 2^(G_C - G_i)
  float erase[kChunk];  // -|k|^-1 gamma, by the maker of A
  float read[kChunk];   // scale |q|^-1 gamma, by the maker of P
  float query[kChunk];  // scale |q|^-1, by the maker of P
  float gamma_end[4];   // 2^G_C, all the same
};

struct FusedBarriers {
  RingBarriers<kFusedStages> stages;  // q, k and v of a chunk
  uint64_t scalars[kFusedStages];     // the decays and steps of ChunkScalars
  uint64_t a_full[2], p_full[2], pair_empty[2];
  uint64_t o_full[2], o_empty[2];  // by 64 values
  FW_DEVICE void init() {
    constexpr int kWarps = 4, kStateWarps = 8;
    stages.init(1, kStateWarps);
    for (int i = 0; i < kFusedStages; ++i) mbarrier_init(scalars + i, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(a_full + i, kWarps);
      mbarrier_init(p_full + i, kWarps);
      mbarrier_init(pair_empty + i, kStateWarps);
      mbarrier_init(o_full + i, kWarps);
      mbarrier_init(o_empty + i, 1);
    }
  }
};

// Where the CTA's sequence and head begin in the tensors, in shared memory: the makers have no registers for it.
struct FusedRows {
  char *q, *k, *v, *o;
  const char *g, *step;  // null: no decay, and a step of 1
  int n, q_head, k_head, v_head, o_head, batch, token;
};

// Bytes in shared memory. Matrices of 128 channels are two SW128 tiles.
struct FusedShape {
  static constexpr int kMatrix = 2 * kSw128Bytes;
  static constexpr int kK = 0, kQ = kMatrix, kV = 2 * kMatrix, kStage = 3 * kMatrix;
  static constexpr int kPairs = kFusedStages * kStage;  // A, P; twice
  static constexpr int kA = 0, kP = kSw128Bytes, kPair = 2 * kSw128Bytes;
  static constexpr int kT = kPairs + 2 * kPair;  // T left of its diagonal blocks, and those blocks' inverses; twice
  static constexpr int kO = kT + 2 * kSw128Bytes;
  static constexpr int kScalars = kO + kMatrix;
  // Of each warp of A's maker: its diagonal block of T, 16 rows of 20 floats; then the inverse, rows of 48 bytes.
  static constexpr int kDiagonalRow = 80, kInverseRow = 48, kDiagonal = 16 * kDiagonalRow;
  static constexpr int kDiagonals = kScalars + kFusedStages * static_cast<int>(sizeof(ChunkScalars));
  static constexpr int kBarriers = kDiagonals + 4 * kDiagonal;
  static constexpr int kRows = kBarriers + static_cast<int>(sizeof(FusedBarriers));
  static constexpr int kShared = kRows + static_cast<int>(sizeof(FusedRows));
  static_assert(kShared <= kMaxSharedBytes && kDiagonals % 16 == 0 && kBarriers % 8 == 0);
};

// What TMA loads and stores.
struct FusedMaps {
  TensorMap q, k, v, o;
};

// What every warp of a CTA knows.
struct FusedBlock {
  const FusedForwardArgs& args;
  const FusedMaps& maps;
  FusedBarriers& barriers;
  const FusedRows& rows;
  char* shared;
  uint32_t base;  // address of `shared`
  int length, chunks;

  FW_DEVICE ChunkScalars& scalars(int slot) const {
    return reinterpret_cast<ChunkScalars*>(shared + FusedShape::kScalars)[slot];
  }
  FW_DEVICE uint32_t stage(int slot) const { return base + static_cast<uint32_t>(slot * FusedShape::kStage); }
  FW_DEVICE uint32_t pair(int buffer) const {
    return base + static_cast<uint32_t>(FusedShape::kPairs + buffer * FusedShape::kPair);
  }
  // Whether TMA can load and store chunk c: it stops at the end of a tensor, not at that of a packed sequence.
  FW_DEVICE bool takes(int c) const {
    return args.problem.sequences.offsets == nullptr || c * kChunk + kChunk <= length;
  }
};

FW_DEVICE void find_fused_rows(const FusedForwardArgs& args, int n, int hv, FusedRows& to) {
  const Problem& x = args.problem;
  const bool packed = x.sequences.offsets != nullptr;
  to.n = n, to.batch = packed ? 0 : n, to.token = packed ? x.sequences.offsets[n] : 0, to.o_head = hv;
  const auto row = [&](const TokenArg& a, int head) {
    const int64_t at = to.batch * a.stride_b + to.token * a.stride_t + head * a.stride_h;
    return a.data == nullptr ? nullptr : static_cast<char*>(a.data) + (a.bf16 != 0 ? 2 : 4) * at;
  };
  to.q_head = hv / x.in.q.divisor, to.k_head = hv / x.in.k.divisor, to.v_head = hv / x.in.v.divisor;
  to.q = row(x.in.q, to.q_head), to.k = row(x.in.k, to.k_head), to.v = row(x.in.v, to.v_head), to.o = row(args.o, hv);
  to.g = row(x.in.g, hv / x.in.g.divisor),
  to.step = x.rule.gain == Gain::kOne ? nullptr : row(x.in.beta, hv / x.in.beta.divisor);
}

// A lane of a group's warp, and what it has of fragments.
struct FusedLane {
  int lane, warp;
  int row, pair;     // of a fragment: row lane / 4 (and 8 below), columns 2 (lane % 4) and the next
  int matrix, line;  // that the lane names to ldmatrix and stmatrix
  FW_DEVICE explicit FusedLane(int own)
      : lane(own),
        warp(shuffle(warp_in_group(), 0)),
        row(lane >> 2),
        pair(2 * (lane & 3)),
        matrix(lane >> 3),
        line(lane & 7) {}
  // Byte of an SW128 tile for ldmatrix of 16 rows from `first` on and 16 columns from 8 `atom` on: matrices below each
  // other first, as a left operand has them ...
  FW_DEVICE uint32_t down(int first, int atom) const {
    return static_cast<uint32_t>((first + (matrix & 1) * 8 + line) * 128 + (((atom + (matrix >> 1)) ^ line) << 4));
  }
  // ... or alongside each other first, as its transpose has them.
  FW_DEVICE uint32_t right(int first, int atom) const {
    return static_cast<uint32_t>((first + (matrix >> 1) * 8 + line) * 128 + (((atom + (matrix & 1)) ^ line) << 4));
  }
};

FW_DEVICE float2 float2_at(const float* from) { return *reinterpret_cast<const float2*>(from); }
FW_DEVICE void put_float2(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }

// X Y^T of two matrices [64, 128] in shared memory; complete after wgmma_wait().
FW_DEVICE void multiply_shared_rows(float (&d)[32], uint32_t x, uint32_t y) {
  const uint64_t left = wgmma_descriptor(x, 16, 1024), right = wgmma_descriptor(y, 16, 1024);
  wgmma_fence();
  FW_UNROLL
  for (int k = 0; k < kFusedK / 16; ++k) {
    const int step = k / 4 * kSw128Bytes + k % 4 * 32;
    wgmma_ss<64, false, false>(d, descriptor_after(left, step), descriptor_after(right, step), k > 0);
  }
  wgmma_commit();
}

// 1 / |x|; 0 of a zero vector where eps is 0 (rule/front.h).
FW_DEVICE float fused_inverse_norm(float squares, float eps) {
  return squares + eps > 0.0f ? rsqrt_fast(squares + eps) : 0.0f;
}

}  // namespace fw::cuda
