// What the kernels of the chunk form leave for each other in device memory: tiles of bf16 values in exactly the form in
// which shared memory wants them, so that bulk copies load a stage. C = 64 tokens; rows past a sequence's end are 0.
//
// All are SW128 tiles (gpu/sw128.h). Matrices with kTileK columns (64 or 128: K padded with zeros) are kTileK / 64 of
// them, one after the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/sw128.h"
#include "scan/cuda/args.h"

namespace fw::cuda {

// One chunk of one value head, for the forward scan. gamma = exp(G), and G is the sum of the log-decays of the chunk's
// rows up to and including its own. With A = (I + T)^-1, P = tril(Q Kb^T):
//   W = Z + E S0      O = Q S0 + M W      S_C = Diag(gamma_C) S0 + X^T W
// (where a gain may exceed 1, all of e', z', w', P' and A' of common/front/unscaled_keys.cuh: W, V and the other chunk
// tiles too).
// e: -gamma (.) e (unused by additive rules), q: gamma (.) r, x: A^T Khat with Khat = exp(G_C - G) (.) w, m: P A
// (additive: x = Khat, m = P).
template <int kTileK>
struct FwdTiles {
  uint16_t e[64 * kTileK];     // [64 tokens, kTileK]
  uint16_t q[64 * kTileK];     // [64 tokens, kTileK]
  uint16_t x[64 * kTileK];     // [64 tokens, kTileK]
  uint16_t m[kSw128Elements];  // [64, 64], 0 above the diagonal
  float gamma[kTileK];         // gamma_C
  // Z = z_scale (.) v, rows past the end 0; 1 (0 past the end) where the Z chunk tile is used
  float z_scale[64];
};

// The same of rules whose e and r are raw rows of k and q times a scale per row, and w is not (kRowTiles,
// kernel_ids.h). The forward scan takes those rows where they are, and here are the numbers:
//   W = Z + diag(e) k S0      O = diag(q) q S0 + M W      S_C = gamma_C S0 + X^T W
// Rows past the end: 0.
template <int kTileK>
struct RowTiles {
  uint16_t x[64 * kTileK];
  uint16_t m[kSw128Elements];
  float e[64], q[64], z_scale[64];
  float gamma[4];  // all the same
  float unused[28];
};
// The numbers of a chunk's rows where w is raw rows of k times a scale per row, too (kRowScales,
// kernel_ids.h), and where keys have 129 to 256 channels (sm90/k256/). With the rows where they are, and A and P of
// IntraChunk,
//   W = Z + diag(e) k S0      U = A W      O = diag(q) q S0 + P U      S_C = gamma_C S0 + k^T diag(k) U
// (where streams are sums, mixed_streams(), W has diag(erase_q) q S0 besides and O diag(read_k) k S0). That is a
// product more in the scan's chain than X and M want, which are twice the numbers. q2, k2: |q|^2 and |k|^2, of K above
// 128, if the rule wants them (of sums: RowNorms). Rows past the end: 0.
struct RowScales {
  float e[64], q[64], k[64], z_scale[64];
  float gamma[4];  // all the same
  union {
    float q2[64], erase_q[64];
  };
  union {
    float k2[64], read_k[64];
  };
  float unused[28];
};
inline constexpr size_t kScanScaleBytes = offsetof(RowScales, q2);  // bytes that the scans read ...
// ... and after them, of sums: erase_q and read_k
inline constexpr size_t kSumScaleBytes = 2 * sizeof(RowScales::erase_q);
static_assert(sizeof(RowScales) % 128 == 0 && kScanScaleBytes % 16 == 0 &&
              offsetof(RowScales, read_k) == kScanScaleBytes + kSumScaleBytes / 2);
// |q|^2 and |k|^2 of K above 128 where RowScales has other numbers in their place.
struct RowNorms {
  float q2[64], k2[64];
};
// Each chunk tile begins with a line of the L2 cache if the first one does (workspaces as cudaMalloc gives them):
// copies of others move parts of lines twice.
static_assert(sizeof(FwdTiles<64>) % 128 == 0 && sizeof(FwdTiles<128>) % 128 == 0 && sizeof(RowTiles<64>) % 128 == 0 &&
              sizeof(RowTiles<128>) % 128 == 0);

// A FwdTiles in two parts, of rules with a decay a channel and an erase (stores_k_hat(), rule_traits.h). The reverse
// scan reads the first, too: with A and P of IntraChunk and Khat ([64 tokens, kTileK] as SW128 tiles)
//   dR = P^T dO + Khat D      dZ = A^T dR      D_0 = Diag(gamma_C) D + Q^T dO + E^T dZ
// dZ of a chunk is kept in place of V. BwdTiles has two matrices more, which A and P spare; they cost the scan a
// product more in its chain.
template <int kTileK>
struct QETiles {
  uint16_t e[64 * kTileK], q[64 * kTileK];
  float gamma[kTileK], z_scale[64];
};
template <int kTileK>
struct XMTiles {
  uint16_t x[64 * kTileK];
  uint16_t m[kSw128Elements];
};
static_assert(sizeof(QETiles<64>) % 128 == 0 && sizeof(QETiles<128>) % 128 == 0);

// What FwdTiles is, for the reverse scan over D = the gradient of the state, from the chunk's end to its start:
//   V = k D      D_0 = Diag(gamma_C) D + q^T dO - y^T V
// k: Khat, y: A E (E = gamma (.) e without the sign; unused additive), q: Q - P A E (additive: Q).
template <int kTileK>
struct BwdTiles {
  uint16_t k[64 * kTileK];
  uint16_t y[64 * kTileK];
  uint16_t q[64 * kTileK];
  float gamma[kTileK];
};

// The same of rules whose w is raw rows of k times a scale per row, and e and r such rows of k and q, or sums of both
// (reverse_takes_rows(), rule_traits.h). With A and P of IntraChunk and the rows where they are,
//   dR = P^T dO + diag(k) K D      dZ = A^T dR
//   D_0 = gamma_C D + Q^T (diag(q) dO + diag(erase_q) dZ) + K^T (diag(read_k) dO + diag(e) dZ)
// and dZ of a chunk is kept in place of V. Rows past the end: 0. erase_q, read_k: of mixed_streams(), else not
// there. solved: not 0 where forward has left U = A W in place of W, as the scan from A and P does
// (kIntraChunk, which depends on where forward's tensors were); the same in all chunks.
struct RowScalesBwd {
  float k[64], e[64], q[64];
  float gamma[4];  // all the same
  float solved;
  float unused[27];
  float erase_q[64], read_k[64];
};
inline constexpr size_t kPlainScaleBytes = offsetof(RowScalesBwd, erase_q);  // bytes
static_assert(sizeof(RowScalesBwd) % 128 == 0 && kPlainScaleBytes % 128 == 0);

// Where a gain may exceed 1, what an operand loses in bf16 on its way into the state does not fade but adds up from
// chunk to chunk. There (uses_hi_lo()) S, W, D, V and the chunk tiles that meet them in those products are sums of two
// bf16 values, and e and k have no factors of rows:
//   W = Z + diag(scale) e S0      V = diag(scale) k D
// so that they are the raw keys, exactly, where these are bf16 values (keeps_raw_keys(); with channel decay, e = -gamma
// (.) e and Khat as elsewhere, and scales of 1). lo: what bf16 leaves out of x (y); what it leaves out of e (k) is
// apart, and absent where it is nothing.
template <int kTileK>
struct LoTiles {
  uint16_t lo[64 * kTileK];  // [64 tokens, kTileK]
  float scale[64];
};

// A and P of a chunk for the gradients (additive: A = I, not read).
struct IntraChunk {
  uint16_t a[kSw128Elements];  // [64, 64]: row i, column j
  uint16_t p[kSw128Elements];
};

inline constexpr int kMaxTileK = 256, kHalfTileK = 128;

// Per chunk, value head and block of 64 value columns:
// - Z, W (or U) and V (or dZ): one SW128 tile [64 tokens, 64 values],
// - S^T (at the chunk's start) and D^T (gradient at its end): [64 values, kTileK].
//
// Order everywhere: chunk of all chunks (first_chunk(n) + c), value head, value block.

}  // namespace fw::cuda
