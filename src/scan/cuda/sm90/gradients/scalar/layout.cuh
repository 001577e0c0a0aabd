// Scalar decay, and none, where the streams are q and k times scales per row, or sums of the two: shared memory of the
// gradient kernel whose warps 0 .. 15 compute while four more load what the next chunks need. q and k are operands of
// products as they lie in memory; what they are multiplied with goes into the 64 x 64 matrices on their left.
#pragma once

#include "scan/cuda/gradients/work_tiles.cuh"

namespace fw::cuda {

struct ScalarGradientTraits {
  int k_tile = 128;  // 64 or 128
  bool is_delta = true;
  // w (r where the preconditioner is on the read) is k (q) times M, elementwise; kMade: M is made here
  // (sm90/gradients/scalar/precond.cuh)
  RowM m = RowM::kNone;
  ScalarGain gain = ScalarGain::kAny;
  bool has_half_of_keys = false;  // of k256_gradients() (kernels.h)
  // dq and dk of value heads that share keys are added up (head_sums.cuh), in a form of its own: what it takes is 1% of
  // heads alone
  bool sums_heads = false;
};

template <ScalarGradientTraits kTraits>
struct ScalarShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr ScalarGain kGain = kTraits.gain;
  static constexpr bool kMmaSync = false, kChannel = false, kDelta = kTraits.is_delta, kStreams = true,
                        kPrecond = kTraits.m != RowM::kNone, kMakesM = kTraits.m == RowM::kMade, kGates = false,
                        kWhole = false, kTma = false;
  static constexpr bool kHalf = kTraits.has_half_of_keys;
  static_assert(!kHalf || (kTileK == kHalfTileK && !kPrecond));
  static constexpr bool kSumsHeads = kTraits.sums_heads;
  static_assert(!kSumsHeads || (!kHalf && !kPrecond));
  static constexpr bool kUnscaled = kGain == ScalarGain::kUnscaled || kGain == ScalarGain::kUnscaledDecays,
                        kNoDecayFix = kGain == ScalarGain::kUnscaledDecays;
  static constexpr bool kLinear = kDelta && !kPrecond && (kGain == ScalarGain::kAny || kGain == ScalarGain::kTied);
  static constexpr bool kMixes = kLinear && kGain == ScalarGain::kAny;
  static constexpr Residuals kResiduals = kGain == ScalarGain::kAny ? Residuals::kNever : Residuals::kAlways;
  static constexpr int kThreads = 512, kWarps = kThreads / 32, kGroups = 4, kProducers = 64;
  static constexpr bool kFollows = !kHalf;
  static constexpr int kBlocksPerSm = 1;
  static constexpr double kTileTime = kMakesM ? 14.5 : kPrecond ? 14 : 10.5;
  // of a warp in a product [64, kTileK]
  static constexpr int kKeyColumns = kTileK / kGroups, kKeyTiles = kKeyColumns / 8;

  // A stage: what one block of 64 value columns loads.
  static constexpr int kStages = kTileK == 128 ? 2 : 3;
  static constexpr int kStateBytes = 64 * kTileK * 2;
  // numbers from one state in memory to the next
  static constexpr int64_t kStateStep = 64 * (kHalf ? kMaxTileK : kTileK);
  static constexpr int kW = 0, kV = kSw128Bytes, kOut = 2 * kSw128Bytes, kState = 3 * kSw128Bytes,
                       kDState = kState + kStateBytes;
  static constexpr int kStageBytes = kDState + kStateBytes;

  // A and P; dR; q and k of two work tiles; two more tiles, or the rows with M.
  static constexpr int kA = kStages * kStageBytes, kP = kA + kSw128Bytes, kDR = kP + kSw128Bytes;
  static constexpr int kRead = kDR + kSw128Bytes, kKeyBytes = 2 * kStateBytes;
  static constexpr int kExtra = kRead + 2 * kKeyBytes, kScaled = kExtra;
  // The matrices on the left (store_pair_tiles()), once dR is used, and two more, once A and P are.
  static constexpr int kOfQ = kDR, kOfK = kPrecond ? kP : kExtra, kOfR = kA, kOfE = kP;

  // Arrays of 64 floats: of even and odd work tiles, sums G of the log-decay, beta, dG, |q|^2 and |k|^2, the
  // coefficients r_q, w_k, e_k, z_v, r_k, e_q (with unscaled keys: a, b), the other gates ...
  static constexpr int kSmall = kExtra + 2 * kSw128Bytes;
  static constexpr int kG = kSmall, kBeta = kG + 512, kDG = kBeta + 512, kNorms = kDG + 512, kCoefs = kNorms + 1024;
  static constexpr int kCoefCount = kLinear || kUnscaled ? 6 : 4;
  static constexpr int kGateCount = kTokenScalars - 1 + 2;  // but beta; the gates on e and on z
  static constexpr int kGateScalars = kCoefs + 512 * kCoefCount, kDZv = kGateScalars + (kLinear ? 512 * kGateCount : 0),
                       kVDz = kDZv + 256;
  static constexpr int kWarpSums = kVDz + (kNoDecayFix ? 256 : 0), kBarriers = kWarpSums + 128,
                       kCoords = kBarriers + (kStages > 2 ? 160 : 128), kSmallEnd = kCoords + kCoordBytes;
  // ... and sums over a group's columns [sum][group][64 rows].
  static constexpr int kSums = kLinear ? 7 : 3;
  static constexpr int kPartial = kPrecond ? kA : kExtra + kSw128Bytes;
  // Where M is made, of even and odd work tiles: A before rows 16, 32 and 48; decay and gain of rows; products of four
  // decays, and the center; what warps have for the center.
  static constexpr int kStarts = kSmallEnd, kStartsBytes = 3 * 4 * kTileK, kRowGates = kStarts + 2 * kStartsBytes,
                       kRunScalars = kRowGates + 1024;
  static constexpr int kCenterSums = kRunScalars + 256;
  static constexpr int kBytes = kMakesM ? kCenterSums + 128 : kSmallEnd;

  static_assert(kSums * kGroups * 256 <= kSw128Bytes && kStateBytes <= 2 * kSw128Bytes);
  static_assert(kBytes <= 227 * 1024);
};

template <class Shape>
struct ScalarChunk : WorkTile<Shape> {
  FW_DEVICE explicit ScalarChunk(const GradientKernelArgs& a) : WorkTile<Shape>(a) {}

  // Full and empty: of the stages, of A and P; q and k have come; row scales are there; a work tile is over. Two of an
  // event, for even and odd work tiles, where it may be past twice before a waiting warp has seen it once.
  FW_DEVICE uint64_t* full(int stage) const { return this->barrier(stage); }
  FW_DEVICE uint64_t* empty(int stage) const { return this->barrier(Shape::kStages + stage); }
  FW_DEVICE uint64_t* pairs_full() const { return this->barrier(2 * Shape::kStages); }
  FW_DEVICE uint64_t* pairs_empty() const { return this->barrier(2 * Shape::kStages + 1); }
  FW_DEVICE uint64_t* keys_full(int work_tile) const { return this->barrier(2 * Shape::kStages + 2 + (work_tile & 1)); }
  FW_DEVICE uint64_t* rows_full(int work_tile) const { return this->barrier(2 * Shape::kStages + 4 + (work_tile & 1)); }
  FW_DEVICE uint64_t* is_last_of_tile(int work_tile) const {
    return this->barrier(2 * Shape::kStages + 6 + (work_tile & 1));
  }
  // The coords of work tile + 4 are written; who waits for it loads what work tile + 4 cannot do without, so that four
  // are enough. Of three stages.
  FW_DEVICE uint64_t* coords_ready(int work_tile) const {
    return this->barrier(2 * Shape::kStages + 8 + (work_tile & 3));
  }

  FW_DEVICE float* norms(int work_tile) const { return this->floats(Shape::kNorms) + 128 * (work_tile & 1); }
  // 64 floats each: r_q, w_k, e_k, z_v, r_k, e_q; with unscaled keys those of the primed streams, and a, b in the last
  // two's memory.
  enum { kRq = 0, kWk = 64, kEk = 128, kZv = 192, kRk = 256, kEq = 320, kOfE = 256, kOfW = 320 };
  FW_DEVICE float* coefficients(int work_tile) const {
    return this->floats(Shape::kCoefs) + 64 * Shape::kCoefCount * (work_tile & 1);
  }
  // 64 floats each: the gates on e and on z, and the numbers but beta.
  FW_DEVICE float* gate_scalars(int work_tile) const {
    return this->floats(Shape::kGateScalars) + 64 * Shape::kGateCount * (work_tile & 1);
  }
  FW_DEVICE float* warp_sums(int work_tile) const { return this->floats(Shape::kWarpSums) + 16 * (work_tile & 1); }
  FW_DEVICE float* starts(int work_tile) const {
    return this->floats(Shape::kStarts) + 3 * Shape::kTileK * (work_tile & 1);
  }
  FW_DEVICE float2* row_gates(int work_tile) const {
    return reinterpret_cast<float2*>(this->floats(Shape::kRowGates)) + 64 * (work_tile & 1);
  }
  FW_DEVICE float* run_scalars(int work_tile) const { return this->floats(Shape::kRunScalars) + 32 * (work_tile & 1); }
  FW_DEVICE float* center_sums(int work_tile) const { return this->floats(Shape::kCenterSums) + 16 * (work_tile & 1); }

  // Whether the reduced rule (common/front/plain.cuh) has it all; whether r or e is a sum.
  FW_DEVICE bool plain() const { return !Shape::kLinear || this->pieces(kPlainRule); }
  FW_DEVICE bool mixed() const { return Shape::kMixes && this->pieces(kMixedRule); }

  // Whether A and P are used no more once the value blocks are.
  FW_DEVICE bool pairs_free_early() const { return !Shape::kPrecond && !mixed(); }

  // Whether the stages have dZ in place of V (reverse_takes_rows(), of no rule with a preconditioner or unscaled
  // keys), and R in that of W.
  FW_DEVICE bool has_dz() const { return Shape::kDelta && !Shape::kPrecond && !Shape::kUnscaled && this->args.v_is_dz; }
  FW_DEVICE bool has_residuals() const { return has_dz() && this->solved(); }

  FW_DEVICE int key_column() const { return Shape::kKeyColumns * this->group(); }
};

FW_DEVICE void sync_consumers() { named_barrier_sync(1, 512); }
FW_DEVICE void sync_loaders() { named_barrier_sync(2, 64); }
FW_DEVICE void sync_group(int group) { named_barrier_sync(3 + group, 128); }

}  // namespace fw::cuda
