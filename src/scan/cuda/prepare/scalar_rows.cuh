// The factors of rows of the kernels whose streams are a chunk's raw q and k times a number a row, or made of them first (scalar.cu, grouped.cu).
#pragma once

#include "scan/cuda/prepare/scalar_parts.cuh"

namespace fw::cuda {

// Factors by row. left: of the rows of P and of T, right: of the columns of both, besides the decays; gamma, keys: of the decays, in the end those
// of the operands in the images q and (with split_keys) Khat; split_erase: those in -E. left is also where |q|^2 and |k|^2 wait for the
// coefficients.
struct ScalarRows {
  float pair[kChunk], left[2][kChunk], right[kChunk], gamma[kChunk], keys[kChunk], z[kChunk];
  SplitFactors split_keys, split_erase;
};
// kFine: a and b of bare_keys.cuh, 1 where keys are not bare; the factors of the columns of P, where `right` has those of T. Where rows are not plain, `left`
// and `right` have no more than that.
struct FineRows {
  float a[kChunk], b[kChunk], right_of_p[kChunk];
};

// Of a row of the chunk.
FW_DEVICE BareCoefs fine_coefs(const Rule& rule, const FrontCoefs<float>& c) { return bare_keys(rule) ? bare_coefs(c) : BareCoefs{c, 1, 1}; }

// FineImage::scale of a row.
template <int kKey>
FW_DEVICE void put_scales(const ChunkImages<kKey>& out, int row, float of_e, float of_k) {
  out.forward_fine->scale[row] = of_e;
  if (out.backward != nullptr) out.backward_fine->scale[row] = of_k;
}

// Plain rules: the factors of this lane's row, from the norms that wait in `rows`.
template <bool kOnline, bool kFine, int kKey, class Image>
FW_DEVICE void plain_factors(const Problem& x, const ChunkPlace& place, int row, const PlainGates& gates, ScalarRows& rows, FineRows* fine,
                             const ChunkImages<kKey, Image>& out) {
  const bool valid = row < place.span.rows;
  FrontCoefs<float> c = plain_coefs(x, gates, rows.left[0][row], rows.left[1][row]);
  const FrontCoefs<float> of_t = c;
  if constexpr (kFine) {
    const BareCoefs y = fine_coefs(x.rule, c);
    c = y.primed;
    fine->a[row] = valid ? y.a : 1.0f, fine->b[row] = valid ? y.b : 1.0f, fine->right_of_p[row] = valid ? c.w_k : 0.0f;
  }
  const float z = valid ? c.z_v : 0.0f, e = valid ? c.e_k : 0.0f, q = valid ? c.r_q : 0.0f, k = valid ? c.w_k : 0.0f;
  const float gamma = rows.gamma[row], suffix = rows.keys[row];
  rows.left[0][row] = q, rows.left[1][row] = !kFine ? e : valid ? of_t.e_k : 0.0f, rows.right[row] = !kFine ? k : valid ? of_t.w_k : 0.0f;
  rows.gamma[row] = gamma * q, rows.keys[row] = suffix * k, rows.z[row] = z;
  if constexpr (kFine) put_scales(out, row, -gamma * e, suffix * k);
  if constexpr (kFine) {
    split_into(rows.split_keys, row, suffix * k);
    split_into(rows.split_erase, row, -gamma * e);
  }
  if constexpr (kOnline && !kFine) {
    out.forward->e[row] = -gamma * e, out.forward->q[row] = gamma * q, out.forward->k[row] = suffix * k;
    put_numbers<false>(out, row, suffix * k, make_float2(-gamma * e, 0), make_float2(0, gamma * q));
  }
  out.forward->z_scale[row] = out.z == nullptr ? z : valid ? 1.0f : 0.0f;
}

}  // namespace fw::cuda
