// The factors of rows of the kernels whose streams are a chunk's raw q and k times a scale per row, or made of them
// first (scalar.cu, grouped.cu).
#pragma once

#include "scan/cuda/prepare/scalar_parts.cuh"

namespace fw::cuda {

// Factors by row. left: of the rows of P and of T, right: of the columns of both, besides the decays. Gamma, keys: of
// the decays, in the end those of the operands in the chunk tiles q and (with split_keys) Khat; split_erase: those in
// -E. left is also where |q|^2 and |k|^2 wait for the coefficients.
struct ScalarRows {
  float pair[kChunk], left[2][kChunk], right[kChunk], gamma[kChunk], keys[kChunk], z[kChunk];
  SplitFactors split_keys, split_erase;
};
// kHiLo: a and b of unscaled_keys.cuh, 1 where keys are not bare; the factors of the columns of P, where `right` has
// those of T. Where rows are not plain, `left` and `right` have no more than that.
struct HiLoRows {
  float a[kChunk], b[kChunk], right_of_p[kChunk];
};

// Of a row of the chunk.
FW_DEVICE UnscaledCoefs hi_lo_coefs(const Rule& rule, const FrontCoefs<float>& c) {
  return unscaled_keys(rule) ? unscaled_coefs(c) : UnscaledCoefs{c, 1, 1};
}

// LoTiles::scale of a row.
template <int kTileK>
FW_DEVICE void put_scales(const ChunkTiles<kTileK>& out, int row, float of_e, float of_k) {
  out.forward_lo->scale[row] = of_e;
  if (out.backward != nullptr) out.backward_lo->scale[row] = of_k;
}

// Plain rules: the factors of this lane's row, from the norms that wait in `rows`.
template <bool kDelta, bool kHiLo, int kTileK, class ChunkTile>
FW_DEVICE void plain_factors(const Problem& x, const ChunkCoord& coord, int row, const PlainGates& gates,
                             ScalarRows& rows, HiLoRows* hi_lo, const ChunkTiles<kTileK, ChunkTile>& out) {
  const bool valid = row < coord.span.rows;
  FrontCoefs<float> c = plain_coefs(x, gates, rows.left[0][row], rows.left[1][row]);
  const FrontCoefs<float> of_t = c;
  if constexpr (kHiLo) {
    const UnscaledCoefs y = hi_lo_coefs(x.rule, c);
    c = y.primed;
    hi_lo->a[row] = valid ? y.a : 1.0f, hi_lo->b[row] = valid ? y.b : 1.0f,
    hi_lo->right_of_p[row] = valid ? c.w_k : 0.0f;
  }
  const float z = valid ? c.z_v : 0.0f, e = valid ? c.e_k : 0.0f, q = valid ? c.r_q : 0.0f, k = valid ? c.w_k : 0.0f;
  const float gamma = rows.gamma[row], suffix = rows.keys[row];
  rows.left[0][row] = q,
  rows.left[1][row] = !kHiLo  ? e
                      : valid ? of_t.e_k
                              : 0.0f,
  rows.right[row] = !kHiLo  ? k
                    : valid ? of_t.w_k
                            : 0.0f;
  rows.gamma[row] = gamma * q, rows.keys[row] = suffix * k, rows.z[row] = z;
  if constexpr (kHiLo) put_scales(out, row, -gamma * e, suffix * k);
  if constexpr (kHiLo) {
    split_into(rows.split_keys, row, suffix * k);
    split_into(rows.split_erase, row, -gamma * e);
  }
  if constexpr (kDelta && !kHiLo) {
    out.forward->e[row] = -gamma * e, out.forward->q[row] = gamma * q, out.forward->k[row] = suffix * k;
    put_row_scales<false>(out, row, suffix * k, make_float2(-gamma * e, 0), make_float2(0, gamma * q));
  }
  out.forward->z_scale[row] = out.z == nullptr ? z : valid ? 1.0f : 0.0f;
}

}  // namespace fw::cuda
