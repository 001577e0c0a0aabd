// The general kernel for scalar decay, and none: its shared memory.
#pragma once

#include "scan/cuda/gradients/work_tiles.cuh"

namespace fw::cuda {

struct GeneralGradientTraits {
  int k_tile = 128;  // 64 or 128
  bool is_delta = true;
  bool has_unscaled_keys = false;  // A, P and the chunk tiles are those of unscaled_keys.cuh
};

template <GeneralGradientTraits kTraits>
struct GeneralShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kMmaSync = false, kChannel = false, kDelta = kTraits.is_delta, kStreams = false,
                        kPrecond = false, kGates = true, kUnscaled = kTraits.has_unscaled_keys, kWhole = false,
                        kTma = false;
  static constexpr bool kHalf = false, kSumsHeads = false;
  static constexpr bool kNoDecayFix = kUnscaled;  // NoDecayState; they may have no log-decays
  static constexpr Residuals kResiduals = kUnscaled ? Residuals::kAlways : Residuals::kOfRule;
  static constexpr int kThreads = 4 * kTileK, kWarps = kThreads / 32, kGroups = kTileK / 32;
  static constexpr int kBlocksPerSm = 1;
  static constexpr bool kFollows = true;   // can begin alongside the scan (TilesReady)
  static constexpr double kTileTime = 16;  // launch_gradients()

  // A stage: what one block of 64 value columns loads.
  static constexpr int kStages = kTileK == 128 ? 2 : 1;
  static constexpr int kStateBytes = 64 * kTileK * 2;
  static constexpr int64_t kStateStep = 64 * kTileK;  // numbers from one state in memory to the next
  static constexpr int kW = 0, kV = kSw128Bytes, kOut = 2 * kSw128Bytes, kState = 3 * kSw128Bytes,
                       kDState = kState + kStateBytes;
  static constexpr int kStageBytes = kDState + kStateBytes;

  // A and P, later dT and dP; dR; r and w, q and k, e.
  static constexpr int kA = kStages * kStageBytes, kP = kA + kSw128Bytes, kDR = kP + kSw128Bytes;
  static constexpr int kRead = kDR + kSw128Bytes, kWrite = kRead + kStateBytes, kKeyBytes = 2 * kStateBytes;
  static constexpr int kRaw = kRead + kKeyBytes, kErase = kRead + 2 * kKeyBytes;
  static constexpr int kFrontQ = kRaw, kFrontK = kRaw + kStateBytes;  // where make_streams() takes q and k

  // Arrays of 64 floats: of even and odd work tiles, sums G of the log-decay and beta; dP's diagonal, dG; of the front:
  // z_v ...
  static constexpr int kSmall = kErase + kStateBytes;
  static constexpr int kG = kSmall, kBeta = kG + 512, kDiagonal = kBeta + 512, kDG = kDiagonal + 256, kZv = kDG + 256;
  // ... the other coefficients and scalars of rows, and what dq and dk are made with.
  static constexpr int kFront = kZv + 256;
  static constexpr int kCoefs = kFront, kScalars = kCoefs + static_cast<int>(sizeof(FrontCoefs<float>)) / 4 * 256;
  static constexpr int kSlopes = kScalars + static_cast<int>(sizeof(FrontScalars<float>)) / 4 * 256,
                       kFrontEnd = kSlopes + 4 * 256;
  static constexpr int kWarpSums = kFrontEnd, kBarriers = kWarpSums + 64, kCoords = kBarriers + 64,
                       kSmallEnd = kCoords + kCoordBytes;
  // In place of dR, once it is used: sums over a group's 32 columns [sum][group][64 rows], the gradients of z_v.
  static constexpr int kSums = 7;
  // the latter with unscaled keys
  static constexpr int kPartial = kDR, kDZv = kPartial + kSums * kGroups * 256, kVDz = kDZv + 256;
  static constexpr int kBytes = kSmallEnd;

  static_assert(kSums * kGroups * 256 + 512 <= kSw128Bytes);
  static_assert(kBytes + 1024 <= 228 * 1024 / kBlocksPerSm && kBytes <= 227 * 1024);
};

}  // namespace fw::cuda
