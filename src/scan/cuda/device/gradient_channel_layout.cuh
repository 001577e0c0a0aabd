// Channel decay: shared memory of the gradient kernel, whose blocks take turns as those for scalar decay do (gradient_scalar_layout.cuh).
#pragma once

#include "scan/cuda/device/gradient_scalar_layout.cuh"

namespace fw::cuda {

// Besides kPieces: v, a channel write gate and their gradients, all of them; tensors of a value a channel in pairs of neighbouring channels.
enum kChannelPieces : unsigned { kPiecesDGate = 1u << 16, kPairsG = 1u << 17, kPairsDG = 1u << 18, kPiecesValues = 1u << 19 };

// kFastRows: as ScalarShape, any gain. kGatedRows: the same, but for gates a channel on e and z; else there are none of those. kPreconditioned: ungated, and
// times M.
template <int kKeyDim, bool kOnlineSolve, bool kFastRows, bool kGatedRows = false, bool kPreconditioned = false>
struct ChannelShape {
  static constexpr int kKey = kKeyDim;
  static constexpr bool kChannel = true, kOnline = kOnlineSolve, kFast = kFastRows, kPrecond = kPreconditioned;
  static constexpr bool kGates = kGatedRows || !kFastRows;
  static constexpr int kThreads = 4 * kKey, kWarps = kThreads / 32, kGroups = kKey / 32, kPairs = kKey / 2;
  static constexpr int kBlocksPerSm = kKey == 128 ? 1 : 2;

  // A stage: what one block of 64 value columns brings.
  static constexpr int kStages = kKey == 128 ? 2 : 1;
  static constexpr int kStateBytes = 64 * kKey * 2;
  static constexpr int kW = 0, kV = kPanelBytes, kOut = 2 * kPanelBytes, kState = 3 * kPanelBytes, kDState = kState + kStateBytes;
  static constexpr int kStageBytes = kDState + kStateBytes;

  // A and P, later dT and dP; -e, anchored; dR; r and w, anchored until the products with dP and dT are over; the factors from the
  // anchors to the rows. All bf16.
  static constexpr int kA = kStages * kStageBytes, kP = kA + kPanelBytes, kErase = kP + kPanelBytes, kDR = kErase + kStateBytes;
  static constexpr int kRead = kDR + kPanelBytes, kWrite = kRead + kStateBytes, kKeyBytes = 0;
  static constexpr int kFactors = kWrite + kStateBytes;
  // Once those products are over: dG in float32 [64, kKey].
  static constexpr int kDecaySums = kA;

  // Arrays of 64 floats, as ScalarShape.
  static constexpr int kSmall = kFactors + kStateBytes;
  static constexpr int kBeta = kSmall, kDiagonal = kBeta + 512, kZv = kDiagonal + 256, kDZv = kZv + 256;
  static constexpr int kFront = kDZv + 256;
  static constexpr int kCoefs = kFront, kScalars = kCoefs + (kFast ? 0 : static_cast<int>(sizeof(FrontCoefs<float>)) / 4) * 256;
  static constexpr int kSlopes = kScalars + (kFast ? 3 : static_cast<int>(sizeof(FrontScalars<float>)) / 4) * 256;
  static constexpr int kFrontEnd = kSlopes + (kFast ? 5 : 4) * 256;
  // What there is to the decays of each warp's rows.
  static constexpr int kWarpSums = kFrontEnd, kBarriers = kWarpSums + 64, kPlaces = kBarriers + 64;
  // Decay over 8 rows [8, kKey], from each anchor to the next [5, kKey], sums of D (.) S0 [8, kKey], tails of dg [4, kKey], sums over 8
  // rows of dG, before that of what bounds took [8, kKey].
  static constexpr int kHalves = kPlaces + kPlacesBytes, kRatios = kHalves + 8 * kKey * 4, kStateDots = kRatios + 5 * kKey * 4;
  static constexpr int kTails = kStateDots + 8 * kKey * 4, kGroupSums = kTails + 4 * kKey * 4;
  static constexpr int kBytes = kGroupSums + 8 * kKey * 4;
  // Sums over a group's 32 columns [sum][group][64 rows].
  static constexpr int kSums = kFast ? 3 : 6;
  static constexpr int kPartial = kDR;

  static_assert(64 * kKey * 4 <= kDR - kA && kSums * kGroups * 256 <= kPanelBytes);
  static_assert(kBytes + 1024 <= 228 * 1024 / kBlocksPerSm && kBytes <= 227 * 1024);
};

}  // namespace fw::cuda
