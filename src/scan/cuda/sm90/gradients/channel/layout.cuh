// Channel decay: shared memory of the gradient kernel, whose blocks take turns as those for scalar decay do
// (gradients/channel/chunk.cuh).
#pragma once

#include "scan/cuda/gradients/channel/chunk.cuh"

namespace fw::cuda {

struct ChannelGradientTraits {
  int k_tile = 128;  // 64 or 128
  bool is_delta = true;
  bool has_stream_rows = true;      // as GeneralShape, any gain
  bool has_gated_rows = false;      // the same, but for gates a channel on e and z; else there are none of those
  bool has_own_erase_rows = false;  // e is a row of its own times the gain, which is a gate or none
  bool has_fused_gates = false;     // of stream rows: log-decays and gates are logits (FusedGates)
  bool has_half_of_keys = false;    // of k256_gradients() (kernels.h)
  // as ScalarGradientTraits, where gates are fused; else the same form does both, for no time
  bool sums_heads = true;
  // of rows that are ungated: kMade where all tensors are there and whole (sm90/gradients/channel/precond.cuh)
  RowM m = RowM::kNone;
};

template <ChannelGradientTraits kTraits>
struct ChannelShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr RowM kRowM = kTraits.m;
  static constexpr bool kMmaSync = false, kChannel = true, kDelta = kTraits.is_delta,
                        kStreams = kTraits.has_stream_rows, kUnscaled = false, kNoDecayFix = false;
  static constexpr bool kPrecond = kRowM != RowM::kNone, kMakesM = kRowM == RowM::kMade, kWhole = kMakesM;
  static constexpr bool kGates = kTraits.has_gated_rows || !kStreams, kFused = kTraits.has_fused_gates;
  static constexpr bool kJoinsDecays = true, kSumsInFactors = false;
  static constexpr bool kOwnKey = kTraits.has_own_erase_rows,
                        kThirdRow = kStreams && (kGates || kOwnKey);  // besides q and k
  static constexpr bool kSumsHeads = kTraits.sums_heads && kStreams && !kPrecond && !kTraits.has_half_of_keys;
  static constexpr Residuals kResiduals = Residuals::kOfRule;
  static constexpr int kThreads = 4 * kTileK, kWarps = kThreads / 32, kGroups = kTileK / 32, kPairs = kTileK / 2;
  static constexpr int kBlocksPerSm = kTileK == 128 ? 1 : 2;
  static constexpr bool kHalf = kTraits.has_half_of_keys;
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
  static constexpr int kTails = kStateDots + 8 * kTileK * 4, kGroupSums = kTails + 4 * kTileK * 4,
                       kBoundSums = kGroupSums;
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

}  // namespace fw::cuda
