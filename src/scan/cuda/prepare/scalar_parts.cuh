// What the kernels share that prepare chunks whose channels decay alike: the decays, the products of T and P and their
// factors, chunk tiles that are multiples of raw rows. Factors: a struct of numbers by row, in shared memory, with
// pair: G_i in log2 with the decay of a token bounded from below, so that differences of it keep their digits. What the
// bound cuts off is 1e-12 of a product; gamma and keys: exp(G_i) and exp(G_C - G_i); right: factors of the columns of T
// and P.
#pragma once

#include <type_traits>

#include "scan/cuda/prepare/finish.cuh"

namespace fw::cuda {

inline constexpr float kLowestStep = -40.0f;

// By one warp, two tokens a lane: the log-decays as they lie in memory, so that nothing waits for them yet (kForms: of
// logits, too, with their law), ...
template <bool kForms>
struct ScalarSteps {
  uint32_t bits[2] = {0, 0};
};
template <>
struct ScalarSteps<true> : ScalarSteps<false> {
  DecayScalar law;
};
template <bool kForms>
FW_DEVICE ScalarSteps<kForms> scalar_steps(const Problem& x, const ChunkCoord& coord) {
  ScalarSteps<kForms> steps;
  if (x.rule.decay != Decay::kScalar) return steps;
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * static_cast<int>(lane_index()) + i;
    const void* from = row_address(x.in.g, coord, row);
    if (row >= coord.span.rows) continue;
    if (x.in.g.bf16 != 0) {
      steps.bits[i] = *static_cast<const uint16_t*>(from);
    } else {
      steps.bits[i] = *static_cast<const uint32_t*>(from);
    }
  }
  if constexpr (kForms) {
    if (x.fused.g.given != GateActivation::kValue) steps.law = decay_scalar(x.fused, coord.hv);
  }
  return steps;
}
// ... and what comes of them: pair, gamma and keys of the factors by row. Sums only, no differences: g may be -inf.
template <bool kForms, class Factors>
FW_DEVICE void scalar_decays(const Problem& x, const ChunkCoord& coord, const ScalarSteps<kForms>& steps, Factors& d,
                             float& gamma_end) {
  const int lane = static_cast<int>(lane_index());
  float g[2] = {0, 0};
  if (x.rule.decay == Decay::kScalar) {
    const int shift = x.in.g.bf16 != 0 ? 16 : 0;
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      g[i] = bits_float(steps.bits[i] << shift);
      if constexpr (kForms) {
        if (x.fused.g.given != GateActivation::kValue && 2 * lane + i < coord.span.rows) {
          g[i] = fused_decay(steps.law, g[i]);
          store_scalar(x, coord, 2 * lane + i, x.fused.numbers.g, g[i]);
        }
      }
      g[i] *= kLog2E;
    }
  } else if (x.rule.decay == Decay::kConstant) {  // log(constant_decay(head)) of rule/decay.h
    const float decay = log1pf(-exp2f(-5.0f - static_cast<float>(coord.hv))) * kLog2E;
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (2 * lane + i < coord.span.rows) g[i] = decay;
    }
  }
  const float bounded[2] = {max(g[0], kLowestStep), max(g[1], kLowestStep)};
  float prefix = g[0] + g[1], suffix = g[0] + g[1], pair = bounded[0] + bounded[1];
  FW_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = shuffle_up(prefix, distance), after = shuffle_down(suffix, distance),
                pair_before = shuffle_up(pair, distance);
    if (lane >= distance) prefix += before, pair += pair_before;
    if (lane + distance < 32) suffix += after;
  }
  gamma_end = exp2_fast(shuffle(prefix, 31));
  float before = shuffle_up(prefix, 1), after = shuffle_down(suffix, 1), pair_before = shuffle_up(pair, 1);
  if (lane == 0) before = pair_before = 0;
  if (lane == 31) after = 0;
  *reinterpret_cast<float2*>(d.gamma + 2 * lane) = make_float2(exp2_fast(before + g[0]), exp2_fast(prefix));
  *reinterpret_cast<float2*>(d.keys + 2 * lane) = make_float2(exp2_fast(g[1] + after), exp2_fast(after));
  *reinterpret_cast<float2*>(d.pair + 2 * lane) = make_float2(pair_before + bounded[0], pair);
}

// By one warp: those, and gamma of the chunk tiles.
template <int kTileK, bool kForms, class ChunkTile, class Factors>
FW_DEVICE void put_decays(const Problem& x, const ChunkCoord& coord, const ScalarSteps<kForms>& steps, Factors& rows,
                          const ChunkTiles<kTileK, ChunkTile>& out) {
  constexpr int kForward = sizeof(out.forward->gamma) / sizeof(float);  // one for each channel, or few
  float gamma_end;
  scalar_decays(x, coord, steps, rows, gamma_end);
  FW_UNROLL
  for (int j = 0; j < kTileK / 32; ++j) {
    const int channel = static_cast<int>(lane_index()) + 32 * j;
    if (channel < kForward) out.forward->gamma[channel] = gamma_end;
    if (out.backward != nullptr) out.backward->gamma[channel] = gamma_end;
  }
  if (out.numbers != nullptr && lane_index() < 4) out.numbers->gamma[lane_index()] = gamma_end;
  if (out.numbers != nullptr && lane_index() == 4)
    out.numbers->solved = std::is_same_v<ChunkTile, RowScales> ? 1.0f : 0.0f;
}

// Chunk tiles that are multiples of the raw rows `raw`, of `count` groups of four rows from group `first` on, by one
// warp. They go to `a` with factors a_rows, and to b, if not null, with b_rows. Factors that are null: 1.
template <int kTileK>
FW_DEVICE void plain_tiles_of(const char* raw, int first, int count, const float* a_rows, void* a, const float* b_rows,
                              void* b) {
  const int lane = static_cast<int>(lane_index());
  FW_NO_UNROLL
  for (int group = first; group < first + count; ++group) {
    const int row = 4 * group + (lane >> 3);
    const uint32_t at = static_cast<uint32_t>(row * 128 + (lane & 7) * 16);
    uint4 x[kTileK / 64];
    FW_UNROLL
    for (uint32_t sw128 = 0; sw128 < kTileK / 64; ++sw128)
      x[sw128] = *reinterpret_cast<const uint4*>(raw + at + sw128 * kSw128Bytes);
    const SplitFactor f = split_factor(a_rows != nullptr ? a_rows[row] : 1.0f);
    FW_UNROLL
    for (uint32_t sw128 = 0; sw128 < kTileK / 64; ++sw128)
      *reinterpret_cast<uint4*>(static_cast<char*>(a) + at + sw128 * kSw128Bytes) = times(x[sw128], f);
    if (b == nullptr) continue;
    const SplitFactor g = split_factor(b_rows != nullptr ? b_rows[row] : 1.0f);
    FW_UNROLL
    for (uint32_t sw128 = 0; sw128 < kTileK / 64; ++sw128)
      *reinterpret_cast<uint4*>(static_cast<char*>(b) + at + sw128 * kSw128Bytes) = times(x[sw128], g);
  }
}

// Which products a warp has. delta, warps 0 to 3 have the blocks of 16 rows of T and 4 to 7 those of P; additive the
// groups have every second block of columns of P. The two warps of one scheduler share its work evenly.
template <bool kDelta>
struct PairWork {
  int block, half;
  bool strict;
  FW_DEVICE explicit PairWork(int warp)
      : block(warp < 4 ? warp : 7 - warp), half(warp >> 2), strict(kDelta && warp < 4) {}
  // block of 16 columns
  FW_DEVICE bool has(int column) const { return column <= block && (kDelta || (column & 1) == half); }
  // of this lane; another is 8 below
  FW_DEVICE int row() const { return 16 * block + (static_cast<int>(lane_index()) >> 2); }
};

template <int kTileK, bool kDelta>
FW_DEVICE void add_pair_products(const PairWork<kDelta>& work, uint32_t left, uint32_t right, float (&c)[8][4],
                                 int lane = static_cast<int>(lane_index())) {
  FW_UNROLL
  for (int k = 0; k < kTileK / 16; ++k) {
    uint32_t a[4];
    ldmatrix_x4(a, a_fragment(left, 16 * work.block, 2 * k, static_cast<uint32_t>(lane)));
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (!work.has(j)) continue;
      uint32_t b[4];
      ldmatrix_x4(b, b_fragment(right, 16 * j, 2 * k));
      mma_bf16(c[2 * j], a, b[0], b[1]);
      mma_bf16(c[2 * j + 1], a, b[2], b[3]);
    }
  }
}

template <int kTileK, bool kDelta>
FW_DEVICE void pair_products(const PairWork<kDelta>& work, uint32_t left, uint32_t right, float (&c)[8][4],
                             int lane = static_cast<int>(lane_index())) {
  clear_tiles(c);
  add_pair_products<kTileK>(work, left, right, c, lane);
}

// The decays and factors of a lane's rows, between blocks by way of the row before the later one. factor: of the rows
// of this lane; of_columns: in place of rows.right.
template <bool kDelta, class Factors>
struct PairScales {
  const PairWork<kDelta>& work;
  const Factors& rows;
  const float* of_columns;
  float factor[2], row[2], anchor, after[2];

  FW_DEVICE PairScales(const PairWork<kDelta>& w, const Factors& r, const float (&f)[2], const float* columns)
      : work(w), rows(r), of_columns(columns) {
    const int i = work.row();
    factor[0] = f[0], factor[1] = f[1];
    row[0] = rows.pair[i], row[1] = rows.pair[i + 8];
    anchor = work.block > 0 ? rows.pair[16 * work.block - 1] : 0.0f;
    after[0] = factor[0] * exp2_fast(row[0] - anchor), after[1] = factor[1] * exp2_fast(row[1] - anchor);
  }
  // Tile n, which the warp has.
  FW_DEVICE void scale(int n, float (&c)[4]) const {
    const int j = 8 * n + 2 * (static_cast<int>(lane_index()) & 3);
    const float2 column = *reinterpret_cast<const float2*>(rows.pair + j),
                 right = *reinterpret_cast<const float2*>(of_columns + j);
    if (n / 2 < work.block) {
      const float before[2] = {right.x * exp2_fast(anchor - column.x), right.y * exp2_fast(anchor - column.y)};
      FW_UNROLL
      for (int m = 0; m < 4; ++m) c[m] *= after[m / 2] * before[m % 2];
    } else {  // above the diagonal the difference is positive, and what comes of it is thrown away
      const float difference[4] = {row[0] - column.x, row[0] - column.y, row[1] - column.x, row[1] - column.y};
      FW_UNROLL
      for (int m = 0; m < 4; ++m)
        c[m] *= exp2_fast(min(difference[m], 0.0f)) * (factor[m / 2] * (m % 2 == 0 ? right.x : right.y));
      if (work.strict) {
        cut_tile<true>(n % 2, c);
      } else {
        cut_tile<false>(n % 2, c);
      }
    }
  }
};

template <bool kDelta, class Factors>
FW_DEVICE void scale_pairs(const PairWork<kDelta>& work, const Factors& rows, const float (&factor)[2],
                           const float* of_columns, float (&c)[8][4]) {
  const PairScales<kDelta, Factors> scales(work, rows, factor, of_columns);
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    if (work.has(n / 2)) scales.scale(n, c[n]);
  }
}

template <bool kDelta, class Factors>
FW_DEVICE void scale_pairs(const PairWork<kDelta>& work, const Factors& rows, const float (&factor)[2],
                           float (&c)[8][4]) {
  scale_pairs(work, rows, factor, rows.right, c);
}

template <bool kDelta, bool kHiLo>
FW_DEVICE void store_pairs(const PairWork<kDelta>& work, char* t, char* p, char* p_low, const float (&c)[8][4]) {
  const TriangleRows triangle = triangle_rows(t, work.block);
  const uint32_t sw128 = sw128_rows(work.block);
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    if (!work.has(n / 2)) continue;
    if (work.strict) {
      store_tile(triangle, n, c[n]);
    } else {
      store_tile(p, sw128, n, c[n]);
      if constexpr (kHiLo) store_lo(p_low, sw128, n, c[n]);
    }
  }
}

}  // namespace fw::cuda
