// Channel decay: shared memory of the gradient kernel, whose blocks take turns as those for scalar decay do
// (gradients/work_tiles.cuh).
#pragma once

#include <bit>

#include "scan/cuda/gradients/work_tiles.cuh"

namespace fw::cuda {

// Besides kVec16: v, a channel write gate and their gradients, all of them; tensors of a value a channel in pairs of
// neighbouring channels.
enum kChannelPieces : unsigned {
  kVec16DThird = 1u << 16,
  kVec2G = 1u << 17,
  kVec2DG = 1u << 18,
  kVec16Values = 1u << 19
};

// RowM (rule_traits.h), of rows that are ungated: kMade where all tensors are there and whole
// (sm90/gradients/channel/precond.cuh).
//
// kStreamRows: as GeneralShape, any gain. kGatedRows: the same, but for gates a channel on e and z; else there are none
// of those. kOwnRows: e is a row of its own times the gain, which is a gate or none. kFusedGates: of stream rows,
// log-decays and gates that are logits (FusedGates). kHalfOfKeys: of k256_gradients() (kernels.h). kAddsHeads: as
// ScalarShape where gates are fused; else the same form does both, for no time.
template <int kTileKDim, bool kDeltaUpdate, bool kStreamRows, bool kGatedRows = false, RowM kRowM = RowM::kNone,
          bool kOwnRows = false, bool kFusedGates = false, bool kHalfOfKeys = false, bool kAddsHeads = true>
struct ChannelShape {
  static constexpr int kTileK = kTileKDim;
  static constexpr bool kMmaSync = false, kChannel = true, kDelta = kDeltaUpdate, kStreams = kStreamRows,
                        kUnscaled = false, kNoDecayFix = false;
  static constexpr bool kPrecond = kRowM != RowM::kNone, kMakesM = kRowM == RowM::kMade, kWhole = kMakesM;
  static constexpr bool kGates = kGatedRows || !kStreamRows, kFused = kFusedGates;
  static constexpr bool kOwnKey = kOwnRows, kThirdRow = kStreams && (kGates || kOwnKey);  // besides q and k
  static constexpr bool kSumsHeads = kAddsHeads && kStreamRows && kRowM == RowM::kNone && !kHalfOfKeys;
  static constexpr Residuals kResiduals = Residuals::kOfRule;
  static constexpr int kThreads = 4 * kTileK, kWarps = kThreads / 32, kGroups = kTileK / 32, kPairs = kTileK / 2;
  static constexpr int kBlocksPerSm = kTileK == 128 ? 1 : 2;
  static constexpr bool kHalf = kHalfOfKeys;
  static_assert(!kHalf || (kTileK == kHalfTileK && kDelta && !kPrecond && !kOwnKey && !kFused));
  // else there are too few registers
  static constexpr bool kTma = kTileK == 128 || kStreams;
  static constexpr bool kFollows = !kHalf && (kTileK == 128 || (kStreams && kRowM != RowM::kRead));  // (the same)
  static constexpr double kTileTime = !kStreams ? 30 : kMakesM ? 19 : kGates || kOwnKey ? 17.5 : kPrecond ? 17 : 14.5;

  // A stage: what one block of 64 value columns loads.
  static constexpr int kStages = kTileK == 128 ? 2 : 1;
  static constexpr int kStateBytes = 64 * kTileK * 2;
  // numbers from one state in memory to the next
  static constexpr int64_t kStateStep = 64 * (kHalf ? kMaxTileK : kTileK);
  static constexpr int kW = 0, kV = kSw128Bytes, kOut = 2 * kSw128Bytes, kState = 3 * kSw128Bytes,
                       kDState = kState + kStateBytes;
  static constexpr int kStageBytes = kDState + kStateBytes;

  // A and P, later dT and dP; -e, anchored; dR; r and w, anchored until the products with dP and dT are over; the
  // factors from the anchors to the rows. All bf16.
  static constexpr int kA = kStages * kStageBytes, kP = kA + kSw128Bytes, kErase = kP + kSw128Bytes,
                       kDR = kErase + kStateBytes;
  static constexpr int kRead = kDR + kSw128Bytes, kWrite = kRead + kStateBytes, kKeyBytes = 0;
  static constexpr int kFactors = kWrite + kStateBytes;
  // What the streams were before they were anchored stays in their tiles until the work tile's end; else in registers.
  static constexpr bool kPartsInPlace = kThirdRow || kPrecond || kTileK == 64;
  // Once those products are over: dG in float32 [64, kTileK]. Where they are fused, what is summed of it: after the
  // next work tile's A and P, which come meanwhile, if there is room.
  static constexpr int kDecaySums = kA, kFusedSums = kPartsInPlace ? kDecaySums : kRead;

  // Arrays of 64 floats, as GeneralShape.
  static constexpr int kSmall = kFactors + kStateBytes;
  static constexpr int kBeta = kSmall, kDiagonal = kBeta + 512, kZv = kDiagonal + 256, kDZv = kZv + 256;
  static constexpr int kFront = kDZv + 256;
  static constexpr int kCoefs = kFront,
                       kScalars = kCoefs + (kStreams ? 0 : static_cast<int>(sizeof(FrontCoefs<float>)) / 4) * 256;
  static constexpr int kSlopes = kScalars + (kStreams ? 3 : static_cast<int>(sizeof(FrontScalars<float>)) / 4) * 256;
  static constexpr int kFrontEnd = kSlopes + (kStreams ? 5 : 4) * 256;
  // What there is to the decays of each warp's rows.
  static constexpr int kWarpSums = kFrontEnd, kBarriers = kWarpSums + 64, kCoords = kBarriers + 64;
  // Decay over 8 rows [8, kTileK], from each anchor to the next [5, kTileK], sums of D (.) S0 [8, kTileK], tails of dg
  // [4, kTileK], sums over 8 rows of dG, before that of what bounds took [8, kTileK].
  static constexpr int kHalfDecays = kCoords + kCoordBytes, kRatios = kHalfDecays + 8 * kTileK * 4,
                       kStateDots = kRatios + 5 * kTileK * 4;
  static constexpr int kTails = kStateDots + 8 * kTileK * 4, kGroupSums = kTails + 4 * kTileK * 4;
  // What addresses of a work tile are made from: [base, sequence, token, head] of 8 bytes and the value heads of a head
  // [kCoordEntries].
  static constexpr int kOrigins = kGroupSums + 8 * kTileK * 4;
  // What a_log takes of 8 rows [8, kTileK]; what dt_bias takes lies where D (.) S0 did.
  static constexpr int kRateSums = kOrigins + (kStreams ? kCoordEntries * (4 * 8 + 4) : 0);
  static constexpr int kNotes = kRateSums + (kFused ? 8 * kTileK * 4 : 0),
                       kNotesEnd = kNotes + (kTileK == 64 ? 8 * kWarps : 0);
  // Where M is made: seven arrays of 64 floats (RowGateArrays), what warps have for the center's gradient.
  static constexpr int kRowGates = kNotesEnd, kOfCenter = kRowGates + 7 * 256,
                       kBytes = kNotesEnd + (kMakesM ? 7 * 256 + 4 * kWarps : 0);
  // Sums over a group's 32 columns [sum][group][64 rows].
  static constexpr int kSums = kMakesM ? 5 : kStreams ? 3 : 6;
  static constexpr int kPartial = kDR;
  // And D before the first of every 16 rows, of what these give each other [4, kTileK].
  static constexpr int kBlockStarts = kPartial + kSums * kGroups * 256;

  static_assert(64 * kTileK * 4 <= kDR - kA && kSums * kGroups * 256 + (kMakesM ? 4 * kTileK * 4 : 0) <= kSw128Bytes);
  static_assert(kBytes + 1024 <= 228 * 1024 / kBlocksPerSm && kBytes <= 227 * 1024);
};

// The last of `count` sequences that begins at or before a chunk (empty ones are passed over), by a warp: each round
// narrows it down to a 32nd.
FW_DEVICE int last_sequence_from(const int32_t* chunk_base, int count, int chunk, int lane) {
  int first = 0;
  while (count > 1) {
    const int step = (count + 31) / 32, i = lane * step;
    const uint32_t before = warp_ballot(i < count && chunk_base[first + i] <= chunk);  // of lanes from 0 on
    const int skipped = (std::popcount(before) - 1) * step;
    first += skipped;
    count = count - skipped < step ? count - skipped : step;
  }
  return first;
}

template <class Shape>
struct ChannelChunk : WorkTile<Shape> {
  FW_DEVICE explicit ChannelChunk(const GradientKernelArgs& a) : WorkTile<Shape>(a) {}

  // Where registers are few (kTileK 64): the work tile and the number of value blocks, which all phases ask for, in
  // memory. A warp has its own.
  FW_DEVICE volatile int* notes() const {
    return reinterpret_cast<volatile int*>(this->memory + Shape::kNotes) + 2 * this->warp;
  }
  FW_DEVICE void note_tile(int work_tile) const {
    if (this->lane == 0) notes()[0] = work_tile;
    sync_warp();
  }
  FW_DEVICE void note_blocks() const {
    if (this->lane == 0) notes()[1] = this->blocks;
    sync_warp();
  }
  FW_DEVICE int noted_tile() const { return notes()[0]; }
  FW_DEVICE int value_blocks() const { return Shape::kTileK == 64 ? notes()[1] : this->blocks; }

  // A of the preconditioner before each token: bf16, groups of one.
  FW_DEVICE Rows rows_before(int work_tile) const {
    const Problem& x = this->args.problem;
    return {this->address(work_tile, WorkTile<Shape>::kBefore), int64_t{x.H} * x.K, 1};
  }

  // What find() takes of the arguments, in bytes; by a warp, before the first one. Read from the arguments each time, a
  // lane its own entry, it would be thousands of cycles in the way of all warps.
  FW_DEVICE void make_origins() const {
    if constexpr (Shape::kStreams) {
      using Chunk = WorkTile<Shape>;
      const GradientArgs& every = this->args;
      const Problem& x = every.problem;
      const SequenceArg& s = x.sequences;
      const int entry = this->lane;
      int64_t data = 0, sequence = 0, token = 0, head = 0;
      int divisor = 1;
      if (entry <= Chunk::kOutputGradient) {
        const TokenArg& a = entry < Chunk::kGradients        ? (&x.in.q)[entry]
                            : entry < Chunk::kOutputGradient ? (&every.grads.d.q)[entry - Chunk::kGradients]
                                                             : every.d_o;
        const int size = a.bf16 != 0 ? 2 : 4;
        data = reinterpret_cast<int64_t>(a.data), sequence = a.stride_b * size, token = a.stride_t * size,
        head = a.stride_h * size;
        divisor = a.divisor;
      } else if (entry <= Chunk::kDBeta) {
        const bool m = entry == Chunk::kM;
        data = reinterpret_cast<int64_t>(m                         ? x.m
                                         : entry == Chunk::kDM     ? every.grads.dm
                                         : entry == Chunk::kDAlpha ? every.grads.dalpha_p
                                                                   : every.grads.dbeta_p);
        head = 4 * static_cast<int64_t>(entry <= Chunk::kDM ? x.K : 1), token = (m ? x.H : x.HV) * head,
        sequence = s.T * token;
        divisor = m ? x.group : 1;
      } else if (Shape::kMakesM && entry <= Chunk::kBefore) {
        const bool share = entry == Chunk::kShare;
        data = share ? reinterpret_cast<int64_t>(every.precond.rows) : reinterpret_cast<int64_t>(x.precond_rows);
        head = share ? int64_t{sizeof(PrecondShare::Row)} : int64_t{2} * x.K, token = x.H * head,
        sequence = s.T * token;
      }
      if (data == 0) sequence = token = head = 0;
      if (s.offsets != nullptr) sequence = 0;
      int64_t* to = reinterpret_cast<int64_t*>(this->memory + Shape::kOrigins) + entry;
      to[0] = data, to[kCoordEntries] = sequence, to[2 * kCoordEntries] = token, to[3 * kCoordEntries] = head;
      reinterpret_cast<int*>(this->memory + Shape::kOrigins + 4 * 8 * kCoordEntries)[entry] = divisor;
    }
  }
  // As WorkTile's.
  FW_DEVICE void find(int work_tile) const {
    if constexpr (!Shape::kStreams) {
      WorkTile<Shape>::find(work_tile);
    } else {
      if (!this->has(work_tile)) return;
      const unsigned index = this->tile_index(work_tile);
      this->wait_for_scan(index);
      const SequenceArg& s = this->args.problem.sequences;
      const unsigned heads = static_cast<unsigned>(this->args.problem.HV), chunk = index / heads;
      const int at = static_cast<int>(chunk), hv = static_cast<int>(index - chunk * heads);
      const bool packed = s.offsets != nullptr, exists = this->there(at);
      const int n = !exists  ? 0
                    : packed ? last_sequence_from(s.chunk_base, s.N, at, this->lane)
                             : static_cast<int>(chunk / static_cast<unsigned>(s.chunks));
      const int first = packed ? s.offsets[n] : 0, end = !exists ? 0 : packed ? s.offsets[n + 1] : s.T;
      const int token = exists ? first + (at - (packed ? s.chunk_base[n] : n * s.chunks)) * kChunk : 0;
      const int64_t* from = reinterpret_cast<const int64_t*>(this->memory + Shape::kOrigins) + this->lane;
      const unsigned divisor =
          reinterpret_cast<const unsigned*>(this->memory + Shape::kOrigins + 4 * 8 * kCoordEntries)[this->lane];
      const int head = divisor == 1 ? hv : static_cast<int>(static_cast<unsigned>(hv) / divisor);
      this->addresses(work_tile)[this->lane] = reinterpret_cast<char*>(
          from[0] + n * from[kCoordEntries] + token * from[2 * kCoordEntries] + head * from[3 * kCoordEntries]);
      if (this->lane != 0) return;
      this->coords(work_tile)[0] = hv;
      this->coords(work_tile)[1] = end - token < kChunk ? end - token : kChunk;
      this->coords(work_tile)[2] = token;
      this->coords(work_tile)[3] = packed ? 0 : n;
    }
  }
};

}  // namespace fw::cuda
