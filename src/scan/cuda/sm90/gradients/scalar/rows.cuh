// The computing warps' side of sm90/gradients/scalar/kernel.cuh. Let p and t be the gradients of P and T with the decay
// (recurrence.md 5), of rows i (left) and j of q and k. With the coefficients of rule/front.h all of it is in two
// matrices:
//   A = (r_q p + e_q t) w_k      B = (e_k t + r_k p) w_k
//   what q takes of r and e:   gamma (r_q dO - e_q dZ) S0^T + A k
//   what k takes of r and e:   gamma (r_k dO - e_k dZ) S0^T + B k
//   what k takes of w:         a w_k R D^T + A^T q + B^T k, a the decay to the chunk's end
// and the rows' sums of these times q, k and k are dG. With a preconditioner the k after A and B, and the q after A^T,
// is the row times M where w (r) is. Where r or e is a sum of q and k, (p w_k) k and (t w_k) k apart give the gradients
// of the coefficients.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/common/front/token_scalars.cuh"
#include "scan/cuda/gradients/phases.cuh"
#include "scan/cuda/gradients/rows.cuh"
#include "scan/cuda/sm90/gradients/common/head_sums.cuh"
#include "scan/cuda/sm90/gradients/scalar/layout.cuh"

namespace fw::cuda {

// start_product() with addresses below 2^18, as they are: less is made of the descriptors anew.
template <int kColumns, bool kLeftTransposed, bool kRightTransposed, bool kFresh = false>
FW_DEVICE void start_scalar_product(float (&d)[kColumns / 2], uint32_t left, uint32_t right) {
  const auto descriptor = [](uint32_t address, bool transposed, int k) {
    const uint32_t low = (address >> 4) + ((transposed ? kSw128Bytes : 16) >> 4 << 16) + (transposed ? 128 : 2) * k;
    return uint64_t{0x40000000u | 1024 >> 4} << 32 | low;
  };
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    wgmma_ss<kColumns, kLeftTransposed, kRightTransposed>(d, descriptor(left, kLeftTransposed, k),
                                                          descriptor(right, kRightTransposed, k), !kFresh || k > 0);
  }
}

// The warp's tiles of products [64, kTileK].
template <class Shape>
struct ScalarSums {
  float r[Shape::kKeyTiles][4] = {}, e[Shape::kKeyTiles][4] = {}, w[Shape::kKeyTiles][4] = {};
};

// The warp's fragment of 16 columns of values or tokens in a tile at a multiple of 1024: row() + 8 half, columns 16
// group() + 8 j + ..: word 2 j + half.
template <class Shape>
FW_DEVICE uint32_t pair_offset(const ScalarChunk<Shape>& c) {
  return down_then_right(0, 16 * c.block_row(), 16 * c.group(), c.lane);
}
FW_DEVICE void store_words(uint32_t at, const float (&x)[2][4]) {
  const uint32_t words[4] = {pack_bf16(x[0][0], x[0][1]), pack_bf16(x[0][2], x[0][3]), pack_bf16(x[1][0], x[1][1]),
                             pack_bf16(x[1][2], x[1][3])};
  stmatrix_x4(at, words);
}

// In a stage W becomes R = A W. V becomes dR = P^T dO + V and then dZ = A^T dR (additive R = W, dZ = dR). This holds
// where V is not dZ already and W not R. What a group of warps makes of W and V are its own columns, until the end.
// Where nothing is made they meet once a work tile, in its first block: numbers of the work tile before are not read
// any more.
template <class Shape>
FW_DEVICE void make_scalar_tiles(const ScalarChunk<Shape>& c, int block, uint32_t stage) {
  const uint32_t columns = value_columns(c), offset = pair_offset(c);
  if (c.has_dz()) {
    fence_async_shared();
    if (c.has_residuals()) {
      if (block == 0) sync_consumers();
      return;
    }
    float r[2][4];
    wgmma_fence();
    start_scalar_product<16, false, true, true>(flat(r), c.base + Shape::kA, stage + Shape::kW + columns);
    wgmma_commit();
    wgmma_wait<0>();
    keep(flat(r));
    sync_group(c.group());
    store_words(stage + Shape::kW + offset, r);
    fence_async_shared();
    sync_consumers();
    return;
  }
  uint32_t v[4];
  ldmatrix_x4(v, stage + Shape::kV + offset);
  float d[2][4];
  FW_UNROLL
  for (int i = 0; i < 4; ++i) d[i / 2][2 * (i % 2)] = bf16_low(v[i]), d[i / 2][2 * (i % 2) + 1] = bf16_high(v[i]);
  fence_async_shared();  // what was copied and written for this
  keep(flat(d));
  wgmma_fence();
  start_scalar_product<16, true, true>(flat(d), c.base + Shape::kP, stage + Shape::kOut + columns);
  wgmma_commit();
  wgmma_wait<0>();
  keep(flat(d));
  store_words((Shape::kDelta ? c.base + Shape::kDR : stage + Shape::kV) + offset, d);
  if constexpr (Shape::kDelta) {  // one product at a time: registers
    fence_async_shared();
    wgmma_fence();
    start_scalar_product<16, false, true, true>(flat(d), c.base + Shape::kA, stage + Shape::kW + columns);
    wgmma_commit();
    wgmma_wait<0>();
    keep(flat(d));
    sync_group(c.group());
    store_words(stage + Shape::kW + offset, d);
    wgmma_fence();
    start_scalar_product<16, true, true, true>(flat(d), c.base + Shape::kA, c.base + Shape::kDR + columns);
    wgmma_commit();
    wgmma_wait<0>();
    keep(flat(d));
    store_words(stage + Shape::kV + offset, d);
  }
  fence_async_shared();
  sync_consumers();
}

template <class Shape>
FW_DEVICE uint32_t scalar_key_columns(const ScalarChunk<Shape>& c) {
  return (c.key_column() >> 6) * kSw128Bytes + (c.key_column() & 63) * 2;
}

// Adds a stage's values to the products.
template <class Shape>
FW_DEVICE void start_scalar_products(const ScalarChunk<Shape>& c, uint32_t stage, ScalarSums<Shape>& sums,
                                     PairSums<Shape>& pairs) {
  constexpr int kColumns = Shape::kKeyColumns;
  const uint32_t states = stage + Shape::kState + scalar_key_columns(c),
                 r_rows = stage + Shape::kW + value_rows_from(c);
  wgmma_fence();
  start_scalar_product<kColumns, false, true>(flat(sums.r), stage + Shape::kOut, states);
  if (Shape::kDelta) start_scalar_product<kColumns, false, true>(flat(sums.e), stage + Shape::kV, states);
  start_scalar_product<kColumns, false, true>(flat(sums.w), stage + Shape::kW, states + Shape::kStateBytes);
  start_scalar_product<16, false, false>(flat(pairs.p), stage + Shape::kOut, r_rows);
  if (Shape::kDelta) start_scalar_product<16, false, false>(flat(pairs.t), stage + Shape::kV, r_rows);
  wgmma_commit();
}
template <class Shape>
FW_DEVICE void finish_scalar_products(ScalarSums<Shape>& sums, PairSums<Shape>& pairs) {
  wgmma_wait<0>();
  keep(flat(sums.r)), keep(flat(sums.w)), keep(flat(pairs.p));
  if (Shape::kDelta) keep(flat(sums.e)), keep(flat(pairs.t));
}

// Where R makes the gain's gradient, always, and v is not wanted besides: for both there are too few registers.
template <class Shape>
inline constexpr bool kLoadsResiduals = Shape::kResiduals == Residuals::kAlways && !Shape::kNoDecayFix;

// What a thread needs for the value rows of a stage, fetched before the products keep shared memory busy: its row and 8
// columns.
struct ValueRow {
  uint4 dz;
  uint4 r;   // of R, kLoadsResiduals
  char* dv;  // of the columns; null: none
  float z_v;
  bool valid;
};
// Of v, if it is wanted and can be read so, before the stage has come.
template <class Shape>
FW_DEVICE bool loads_values(const ScalarChunk<Shape>& c) {
  return c.pieces(kVec16V) && c.wants_values();
}
template <class Shape>
FW_DEVICE uint4 load_value_words(const ScalarChunk<Shape>& c, int work_tile, int block) {
  const int row = c.thread >> 3, column = block * kValueBlock + (c.thread & 7) * 8;
  const Rows v = c.rows_at(c.args.problem.in.v, work_tile);
  if (!loads_values(c) || row >= c.rows(work_tile) || column >= c.args.problem.V) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(v.data + 2 * (row * v.stride + column));
}
template <class Shape>
FW_DEVICE ValueRow load_value_row(const ScalarChunk<Shape>& c, int work_tile, int block, uint32_t stage) {
  const int row = c.thread >> 3, in_block = (c.thread & 7) * 8, column = block * kValueBlock + in_block;
  const Rows dv = c.rows_at(c.args.grads.d.v, work_tile);
  ValueRow x;
  x.valid = row < c.rows(work_tile) && column < c.args.problem.V;
  x.z_v = c.coefficients(work_tile)[ScalarChunk<Shape>::kZv + row];
  x.dv = dv.data != nullptr ? dv.data + (row * dv.stride + column) * (dv.bf16 != 0 ? 2 : 4) : nullptr;
  const char* at = c.memory + (stage - c.base) + sw128_offset(row, in_block);
  x.dz = *reinterpret_cast<const uint4*>(at + Shape::kV);
  if constexpr (kLoadsResiduals<Shape>) x.r = *reinterpret_cast<const uint4*>(at + Shape::kW);
  return x;
}
// dv; adds to the row's sums. words: of load_value_words(); stage: bytes.
template <class Shape>
FW_DEVICE void store_value_gradients(const ScalarChunk<Shape>& c, int work_tile, int block, int stage,
                                     const ValueRow& x, const uint4& words, ValueSums& sums) {
  if (!x.valid) return;
  float dz[8], v[8];
  unpack_8(x.dz, dz);
  const bool residual = c.residual_gains() && gain_by_residual(x.z_v);
  if (c.wants_values() || !residual) {
    if (loads_values(c)) {
      unpack_8(words, v);
    } else {
      load_channels(c.rows_at(c.args.problem.in.v, work_tile), c.thread >> 3, block * kValueBlock + (c.thread & 7) * 8,
                    c.args.problem.V, v);
    }
  }
  if constexpr (Shape::kNoDecayFix) {
    FW_UNROLL
    for (int j = 0; j < 8; ++j) sums.v_dz += v[j] * dz[j];
  }
  if (residual)
    unpack_8(kLoadsResiduals<Shape> ? x.r
                                    : *reinterpret_cast<const uint4*>(c.memory + stage + Shape::kW +
                                                                      sw128_offset(c.thread >> 3, (c.thread & 7) * 8)),
             v);
  FW_UNROLL
  for (int j = 0; j < 8; ++j) {
    sums.gain += v[j] * dz[j];
    dz[j] *= x.z_v;
  }
  if (c.pieces(kVec16DV)) {
    *reinterpret_cast<uint4*>(x.dv) = pack_8(dz);
  } else if (x.dv != nullptr) {
    const Rows dv{x.dv, 0, c.args.grads.d.v.bf16};
    store_channels(dv, 0, 0, c.args.problem.V - block * kValueBlock - (c.thread & 7) * 8, dz);
  }
}

// A and B; where r or e is a sum, also p w_k and t w_k.
template <class Shape>
FW_DEVICE void store_pair_tiles(const ScalarChunk<Shape>& c, int work_tile, const PairSums<Shape>& pairs) {
  const uint32_t offset = pair_offset(c);
  using Chunk = ScalarChunk<Shape>;
  const float *g = c.work_tile_floats(Shape::kG, work_tile), *f = c.coefficients(work_tile);
  const bool mixed = c.mixed();
  float p[2][4], t[2][4];
  FW_UNROLL
  for (int j = 0; j < 2; ++j) {
    const int column = pair_column(c) + 8 * j + 2 * (c.lane & 3);
    const float2 g_column = *reinterpret_cast<const float2*>(g + column),
                 w_k = *reinterpret_cast<const float2*>(f + Chunk::kWk + column);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      const float g_row = g[row];
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float fall = g_row - (i == 0 ? g_column.x : g_column.y),
                    factor = exp2_fast(fall < 0.0f ? fall : 0.0f) * (i == 0 ? w_k.x : w_k.y);
        p[j][2 * half + i] = row >= column + i ? pairs.p[j][2 * half + i] * factor : 0.0f;
        if (Shape::kDelta) t[j][2 * half + i] = row > column + i ? -pairs.t[j][2 * half + i] * factor : 0.0f;
      }
    }
  }
  if constexpr (Shape::kLinear) {
    if (mixed) store_words(c.base + Shape::kOfR + offset, p), store_words(c.base + Shape::kOfE + offset, t);
  }
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const float r_q = f[Chunk::kRq + row], e_k = f[Chunk::kEk + row];
    float r_k = 0, e_q = 0;
    if constexpr (Shape::kLinear) {
      if (mixed) r_k = f[Chunk::kRk + row], e_q = f[Chunk::kEq + row];
    }
    FW_UNROLL
    for (int j = 0; j < 2; ++j) {
      FW_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const float p_raw = p[j][i];
        p[j][i] *= r_q;
        if constexpr (!Shape::kDelta) continue;
        if (Shape::kLinear) p[j][i] += e_q * t[j][i];
        t[j][i] *= e_k;
        if (Shape::kLinear) t[j][i] += r_k * p_raw;
      }
    }
  }
  store_words(c.base + Shape::kOfQ + offset, p);
  if (Shape::kDelta) store_words(c.base + Shape::kOfK + offset, t);
}

// Fragments of rows: tile j, row() + 8 half: word [j / 2][2 (j % 2) + half].
template <class Shape>
struct KeyWords {
  uint32_t x[Shape::kKeyTiles / 2][4];

  FW_DEVICE KeyWords(const ScalarChunk<Shape>& c, int tile) {
    FW_UNROLL
    for (int j = 0; j < Shape::kKeyTiles / 2; ++j)
      load_left(x[j], c.base + tile, 16 * c.block_row(), c.key_column() + 16 * j, c.lane);
  }
  FW_DEVICE uint32_t word(int j, int half) const { return x[j / 2][2 * (j % 2) + half]; }
  // i: 2 half, or the next column of it.
  FW_DEVICE float at(int j, int i) const { return i % 2 == 0 ? bf16_low(word(j, i / 2)) : bf16_high(word(j, i / 2)); }
};

// The row times M, where w (r) is: into a tile of its own.
template <class Shape>
FW_DEVICE void make_scaled_rows(const ScalarChunk<Shape>& c, int work_tile) {
  constexpr int kAtoms = Shape::kTileK / 8;
  const Problem& x = c.args.problem;
  const Rows m_rows = c.workspace_rows(WorkTile<Shape>::kM, x.H * x.K, work_tile);
  const int from = Shape::kRead + c.key_offset(work_tile) + (x.rule.preconditions_read() ? 0 : Shape::kStateBytes),
            last = c.rows(work_tile) - 1;
  FW_UNROLL
  for (int item = c.thread; item < 64 * kAtoms; item += Shape::kThreads) {
    const int row = item / kAtoms, column = item % kAtoms * 8;
    float m[8], y[8];
    load_channels(m_rows, row < last ? row : last, column, x.K, m);
    unpack_8(*reinterpret_cast<const uint4*>(c.memory + from + sw128_offset(row, column)), y);
    FW_UNROLL
    for (int j = 0; j < 8; ++j) y[j] *= m[j];
    *reinterpret_cast<uint4*>(c.memory + Shape::kScaled + sw128_offset(row, column)) = pack_8(y);
  }
}
// M of a thread's elements of the products; 1 past K and the last row.
template <class Shape>
struct StreamM {
  float x[Shape::kKeyTiles][4];

  FW_DEVICE StreamM(const ScalarChunk<Shape>& c, int work_tile) {
    if constexpr (Shape::kPrecond) {
      const int K = c.args.problem.K;
      const Rows rows = c.workspace_rows(WorkTile<Shape>::kM, c.args.problem.H * K, work_tile);
      FW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = c.row() + 8 * half, column = c.key_column() + 2 * (c.lane & 3);
        const float* from = reinterpret_cast<const float*>(rows.data) + row * rows.stride + column;
        FW_UNROLL
        for (int j = 0; j < Shape::kKeyTiles; ++j) {
          const bool valid = row < c.rows(work_tile) && column + 8 * j < K;
          const float2 y = valid ? *reinterpret_cast<const float2*>(from + 8 * j) : make_float2(1, 1);
          x[j][2 * half] = y.x, x[j][2 * half + 1] = y.y;
        }
      }
    }
  }
};

// Sums over the thread's columns of x (.) y; a row each half.
template <class Shape>
FW_DEVICE void dot_rows(const KeyWords<Shape>& x, const float (&y)[Shape::kKeyTiles][4], float& first, float& second) {
  first = second = 0;
  FW_UNROLL
  for (int j = 0; j < Shape::kKeyTiles; ++j) {
    first += x.at(j, 0) * y[j][0] + x.at(j, 1) * y[j][1];
    second += x.at(j, 2) * y[j][2] + x.at(j, 3) * y[j][3];
  }
}

// The products with the states times the coefficients. Returns this thread's part of the sum of w (.) the states' part
// of dw.
template <class Shape>
FW_DEVICE float scale_streams(const ScalarChunk<Shape>& c, int work_tile, ScalarSums<Shape>& sums, int w_side) {
  using Chunk = ScalarChunk<Shape>;
  const KeyWords<Shape> w_words(c, w_side);
  const float *g = c.work_tile_floats(Shape::kG, work_tile), *f = c.coefficients(work_tile);
  const float g_end = g[63];
  const bool mixed = c.mixed();
  float dot = 0;
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const float gamma = exp2_fast(g[row]), of_w = exp2_fast(g_end - g[row]) * f[Chunk::kWk + row];
    const float of_r = mixed ? gamma : gamma * f[Chunk::kRq + row],
                of_e = mixed ? -gamma : -gamma * f[Chunk::kEk + row];
    FW_UNROLL
    for (int j = 0; j < Shape::kKeyTiles; ++j) {
      FW_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        sums.r[j][i] *= of_r;
        sums.e[j][i] *= of_e;
        sums.w[j][i] *= of_w;
        dot += w_words.at(j, i) * sums.w[j][i];
      }
    }
  }
  return dot;
}

// This thread's part of the sums of r (.) and e (.) the states' parts of dr and de, as scale_streams() left them
// (NoDecayState).
template <class Shape>
FW_DEVICE float dot_state_streams(const ScalarChunk<Shape>& c, const ScalarSums<Shape>& sums, int q_tile, int k_tile) {
  float x[4];
  dot_rows(KeyWords<Shape>(c, q_tile), sums.r, x[0], x[1]);
  dot_rows(KeyWords<Shape>(c, k_tile), sums.e, x[2], x[3]);
  return x[0] + x[1] + x[2] + x[3];
}

// Where r or e is a sum: q.dr, k.dr, q.de, k.de, and dr and de become what q and k take of them, without the products
// with A and B.
template <class Shape>
FW_DEVICE void mix_streams(const ScalarChunk<Shape>& c, int work_tile, ScalarSums<Shape>& sums, int q_tile) {
  using Chunk = ScalarChunk<Shape>;
  const int k_tile = q_tile + Shape::kStateBytes;
  float rows[2][4];
  const auto add = [&](int which, const float(&state)[Shape::kKeyTiles][4], int tile) {
    float pair[Shape::kKeyTiles][4], x[2], y[2];
    wgmma_fence();
    start_scalar_product<Shape::kKeyColumns, false, true, true>(flat(pair), c.base + tile,
                                                                c.base + scalar_key_columns(c) + k_tile);
    wgmma_commit();
    const KeyWords<Shape> q(c, q_tile), k(c, k_tile);
    dot_rows(q, state, x[0], x[1]);
    dot_rows(k, state, y[0], y[1]);
    rows[0][which] = x[0], rows[1][which] = x[1], rows[0][which + 1] = y[0], rows[1][which + 1] = y[1];
    wgmma_wait<0>();
    keep(flat(pair));
    dot_rows(q, pair, x[0], x[1]);
    dot_rows(k, pair, y[0], y[1]);
    rows[0][which] += x[0], rows[1][which] += x[1], rows[0][which + 1] += y[0], rows[1][which + 1] += y[1];
  };
  add(0, sums.r, Shape::kOfR);
  add(2, sums.e, Shape::kOfE);
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    store_row_sums<4, Shape, 3>(c, c.row() + 8 * half, rows[half]);
    const float* at = c.coefficients(work_tile) + c.row() + 8 * half;
    const float r_q = at[Chunk::kRq], r_k = at[Chunk::kRk], e_q = at[Chunk::kEq], e_k = at[Chunk::kEk];
    FW_UNROLL
    for (int j = 0; j < Shape::kKeyTiles; ++j) {
      FW_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const float dr = sums.r[j][i], de = sums.e[j][i];
        sums.r[j][i] = r_q * dr + e_q * de;
        sums.e[j][i] = r_k * dr + e_k * de;
      }
    }
  }
}

// Adds the products with A and B. r_side, w_side: the rows of r and w without their coefficients.
template <class Shape>
FW_DEVICE void finish_streams(const ScalarChunk<Shape>& c, int work_tile, ScalarSums<Shape>& sums, int r_side,
                              int w_side) {
  constexpr int kColumns = Shape::kKeyColumns;
  const uint32_t columns = c.base + scalar_key_columns(c),
                 keys = columns + Shape::kRead + c.key_offset(work_tile) + Shape::kStateBytes;
  keep(flat(sums.r)), keep(flat(sums.w));
  if (Shape::kDelta) keep(flat(sums.e));
  wgmma_fence();
  start_scalar_product<kColumns, false, true>(flat(sums.r), c.base + Shape::kOfQ, columns + w_side);
  start_scalar_product<kColumns, true, true>(flat(sums.w), c.base + Shape::kOfQ, columns + r_side);
  if (Shape::kDelta) {
    start_scalar_product<kColumns, false, true>(flat(sums.e), c.base + Shape::kOfK, columns + w_side);
    start_scalar_product<kColumns, true, true>(flat(sums.w), c.base + Shape::kOfK, keys);
  }
  wgmma_commit();
  wgmma_wait<0>();
  keep(flat(sums.r)), keep(flat(sums.w));
  if (Shape::kDelta) keep(flat(sums.e));
}

// Of what finish_streams() left times r_side, w_side and k.
template <class Shape>
FW_DEVICE void sum_stream_rows(const ScalarChunk<Shape>& c, const ScalarSums<Shape>& d, int k_tile, int r_side,
                               int w_side) {
  constexpr int kSums = Shape::kDelta ? 3 : 2;
  float sums[2][kSums];
  dot_rows(KeyWords<Shape>(c, r_side), d.r, sums[0][0], sums[1][0]);
  const KeyWords<Shape> w(c, w_side);
  dot_rows(w, d.w, sums[0][1], sums[1][1]);
  if constexpr (Shape::kDelta && Shape::kPrecond) dot_rows(KeyWords<Shape>(c, k_tile), d.e, sums[0][2], sums[1][2]);
  if constexpr (Shape::kDelta && !Shape::kPrecond) dot_rows(w, d.e, sums[0][2], sums[1][2]);
  store_row_sums(c, c.row(), sums[0]);
  store_row_sums(c, c.row() + 8, sums[1]);
}

template <class Shape>
FW_DEVICE FrontScalars<float> coefficient_gradients(const ScalarChunk<Shape>& c, const FrontScalars<float>& s,
                                                    const FrontCoefs<float>& d) {
  const Problem& x = c.args.problem;
  if constexpr (Shape::kLinear) {
    if (!c.plain()) return front_coefs_vjp(linear_rule(x.rule), x.scale, s, d);
  }
  return front_coefs_vjp(reduced_rule<true>(x.rule), x.scale, s, d);
}

// What dq takes of q and dk of k, rows row() and row() + 8.
struct KeySlopes {
  float q[2], k[2];
};
// By each warp, two lanes a row: the gradients of the numbers of its 16 rows; the first group's warps store them.
template <class Shape>
FW_DEVICE KeySlopes stream_row_scales(const ScalarChunk<Shape>& c, int work_tile) {
  using Chunk = ScalarChunk<Shape>;
  const int row = 16 * c.block_row() + (c.lane >> 1);
  const auto sum = [&](int i) {
    const float* part = c.floats(Shape::kPartial) + (4 * i + 2 * (c.lane & 1)) * 64 + row;
    const float x = part[0] + part[64];
    return x + shuffle_xor(x, 1);
  };
  const float* f = c.coefficients(work_tile) + row;
  const float r = sum(0), w = sum(1), e = Shape::kDelta ? sum(2) : 0.0f;
  FrontCoefs<float> d;
  d.w_k = inverse_or_zero(f[Chunk::kWk]) * w;
  d.z_v = c.floats(Shape::kDZv)[row];
  if (c.mixed()) {
    d.r_q = sum(3), d.r_k = sum(4), d.e_q = sum(5), d.e_k = sum(6);
  } else {
    d.r_q = inverse_or_zero(f[Chunk::kRq]) * r;
    d.e_k = inverse_or_zero(f[Chunk::kEk]) * e;
  }
  if constexpr (Shape::kHalf) {
    if (c.args.half.second) d.z_v = 0;  // the first half has it
  }
  const float r_dz = d.z_v;
  const bool residual = c.residual_gains() && gain_by_residual(f[Chunk::kZv]);
  if constexpr (Shape::kLinear) {
    if (residual) d.z_v = value_coefficient_gradient(r_dz, e, f[Chunk::kZv]);
  }
  if constexpr (Shape::kUnscaled) of_unscaled_coefs(d, f[Chunk::kOfE], f[Chunk::kOfW]);
  FrontScalars<float> s;
  s.q2 = c.norms(work_tile)[row], s.k2 = c.norms(work_tile)[64 + row];
  s.beta = c.work_tile_floats(Shape::kBeta, work_tile)[row];
  if constexpr (Shape::kLinear) {
    if (!c.plain()) {
      const float* gates = c.gate_scalars(work_tile) + row;
      s.erase = gates[0], s.write = gates[64];
      for_all_scalars<Numbers::kExceptBeta>([&, from = gates + 64](float& y) mutable { y = *(from += 64); }, s);
    }
  }
  FrontScalars<float> ds = coefficient_gradients(c, s, d);
  if (!Shape::kLinear && residual) {
    if constexpr (Shape::kUnscaled) {
      ds.beta = unscaled_gain_gradient(r_dz, f[Chunk::kOfE], f[Chunk::kOfW], s.beta);
    } else {
      ds.beta = gain_gradient(r_dz, s.beta);
    }
  }
  if (c.group() == 0 && (c.lane & 1) == 0) {
    float d_g = r + e - w;
    if constexpr (Shape::kNoDecayFix) {
      if (NoDecayState<Shape>(c, work_tile).still) d_g = r - f[Chunk::kZv] * c.floats(Shape::kVDz)[row];
    }
    c.work_tile_floats(Shape::kDG, work_tile)[row] = d_g;
    if (row < c.rows(work_tile)) {
      const TokenArgs& out = c.args.grads.d;
      if constexpr (!Shape::kPrecond && !Shape::kHalf) {
        const FusedGates& fused = c.args.problem.fused;
        if (fused.any()) {  // values, and gradients of logits are wanted
          ds.beta *= scalar_slope(fused.beta, s.beta), ds.lambda *= scalar_slope(fused.lambda, s.lambda);
          ds.erase *= scalar_slope(fused.erase_gate, s.erase), ds.write *= scalar_slope(fused.write_gate, s.write);
        }
      }
      store_one(c.rows_at(out.beta, work_tile), row, ds.beta);
      if (!c.plain()) {
        for_all_scalars<Numbers::kExceptBeta>(
            [&](const TokenArg& to, float y) { store_one(c.rows_at(to, work_tile), row, y); }, out, ds);
        store_one(c.rows_at(out.erase_gate, work_tile), row, ds.erase);
        store_one(c.rows_at(out.write_gate, work_tile), row, ds.write);
      }
    }
  }
  float2 of = make_float2(2.0f * ds.q2, 2.0f * ds.k2);
  if constexpr (Shape::kHalf) of = join_half_slopes(c, work_tile, row, c.group() == 0 && (c.lane & 1) == 0, of);
  KeySlopes slopes;
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int lane = 2 * (c.lane >> 2) + 16 * half;
    slopes.q[half] = shuffle(of.x, lane), slopes.k[half] = shuffle(of.y, lane);
  }
  return slopes;
}

// A row's numbers of a thread, columns key_column() + 8 j + 2 (lane % 4) and the next; all lanes together.
template <class Shape>
FW_DEVICE void store_key_row(const ScalarChunk<Shape>& c, const Rows& out, bool wide, int row, bool valid,
                             const float (&x)[Shape::kKeyTiles][4], int half) {
  const int limit = c.args.problem.K;
  if constexpr (Shape::kKeyTiles == 4) {
    float y[8];
    FW_UNROLL
    for (int j = 0; j < 4; ++j) y[2 * j] = x[j][2 * half], y[2 * j + 1] = x[j][2 * half + 1];
    store_fragment(c, out, wide, row, valid, y);
  } else {
    if (!valid || out.data == nullptr) return;
    FW_UNROLL
    for (int j = 0; j < Shape::kKeyTiles; ++j) {
      const int column = c.key_column() + 8 * j + 2 * (c.lane & 3);
      store_pair(out, row, column, limit, make_float2(x[j][2 * half], x[j][2 * half + 1]));
    }
  }
}

// Of half `part % 2` of the tiles, of dq or dk: add_heads().
template <class Shape>
FW_DEVICE bool sum_heads_of_rows(const ScalarChunk<Shape>& c, int work_tile, int part,
                                 float (&x)[Shape::kKeyTiles][4]) {
  constexpr int kN = 2 * Shape::kKeyTiles;
  const int half = part % 2;
  float y[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) y[j] = x[j / 2][2 * half + j % 2];
  const bool all = add_heads(c, work_tile, kN * part, y);
  FW_UNROLL
  for (int j = 0; j < kN; ++j) x[j / 2][2 * half + j % 2] = y[j];
  return all;
}

template <class Shape>
FW_DEVICE void store_stream_gradients(const ScalarChunk<Shape>& c, int work_tile, ScalarSums<Shape>& d,
                                      const KeySlopes& slopes) {
  const StreamM<Shape> m(c, work_tile);
  const int q_tile = Shape::kRead + c.key_offset(work_tile);
  const KeyWords<Shape> q(c, q_tile), k(c, q_tile + Shape::kStateBytes);
  const HeadGradients& out = c.args.grads;
  const Rows dq = c.rows_at(out.d.q, work_tile), dk = c.rows_at(out.d.k, work_tile);
  const bool on_read = c.args.problem.rule.preconditions_read();
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const bool valid = row < c.rows(work_tile);
    FW_UNROLL
    for (int j = 0; j < Shape::kKeyTiles; ++j) {
      FW_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        float &x = d.r[j][i], &y = d.w[j][i];
        const float q_value = q.at(j, i), k_value = k.at(j, i), de = d.e[j][i];
        if constexpr (Shape::kPrecond) {
          d.e[j][i] = on_read ? x * q_value : y * k_value;
          x *= on_read ? m.x[j][i] : 1.0f;
          y *= on_read ? 1.0f : m.x[j][i];
        }
        x += slopes.q[half] * q_value;
        y += slopes.k[half] * k_value;
        if (Shape::kDelta) y += de;
      }
    }
    if constexpr (Shape::kSumsHeads) {
      if (!sum_heads_of_rows(c, work_tile, half, d.r) | !sum_heads_of_rows(c, work_tile, 2 + half, d.w)) continue;
    }
    store_key_row(c, dq, c.pieces(kVec16DQ), row, valid, d.r, half);
    store_key_row(c, dk, c.pieces(kVec16DK), row, valid, d.w, half);
    if constexpr (Shape::kPrecond)
      store_key_row(c, c.workspace_rows(WorkTile<Shape>::kDM, c.args.problem.HV * c.args.problem.K, work_tile), false,
                    row, valid, d.e, half);
  }
}

}  // namespace fw::cuda
