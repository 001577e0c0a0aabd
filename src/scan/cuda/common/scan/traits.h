// What an instantiation of a scan over chunks computes: template arguments of sm90/scan and sm80.
#pragma once

namespace fw::cuda {

// By what prepare() left (tiles.h); kPairs and kSums with A and P in place of X and M, kSums where E and Q are sums of
// rows. K above 128: kAdditiveRows (W = diag(z) v, P alone), kPairs and kSums.
enum class ForwardForm { kAdditive, kAdditiveRows, kTiles, kSplitTiles, kHiLo, kRows, kPairs, kSums };
// kKeys: QETiles, Khat, A and P; kRows and kSums: rows, A and P. K above 128: these two and kAdditiveRows (without A
// and P), with the numbers of RowScales.
enum class ReverseForm { kAdditive, kAdditiveRows, kTiles, kHiLo, kKeys, kRows, kSums };

struct ForwardTraits {
  int k_tile = 128;  // 64, 128 or (sm80) 256
  ForwardForm form = ForwardForm::kTiles;
  bool writes_o = false;
  bool saves = false;  // S^T, and W or U, of every chunk
};

struct ReverseTraits {
  int k_tile = 128;  // 64, 128 or (sm80) 256
  ReverseForm form = ReverseForm::kTiles;
  bool saves = false;  // D^T, and V or dZ, of every chunk
};

}  // namespace fw::cuda
