// What the kernels of rules without an erase (e = 0) take straight from the raw tensors. The streams are q, k and v
// times a scale per row, and all channels of a token decay alike. No chunk tiles are prepared (kernels.h).
//
// With F_i = exp(G_i), G the sum of a chunk's log-decays up to and including row i, and the front's coefficients r, w,
// z of a row:
//   P_ij = (q_i . k_j) r_i w_j z_j exp(G_i - G_j), i >= j      read_i = F_i r_i      write_j = exp(G_C - G_j) w_j z_j
//   O = Diag(read) Q S + P V      S = F_C S + K^T Diag(write) V      D = F_C D + Q^T Diag(read) dO, from the end
#pragma once

#include "scan/cuda/common/front/plain.cuh"
#include "scan/cuda/sm90/scan/parts.cuh"

namespace fw::cuda {

// The log-decays of a chunk and what follows from them, two tokens a lane of a warp: rows 2 lane and 2 lane + 1.
struct DecayRows {
  // G_i in log2 with the decay of a token bounded from below, so that differences of it keep their digits; what the
  // bound cuts off is 1e-12 of a product. Without the bound: exp(G_i), exp(G_C - G_i) and the sum of all.
  float2 pair, from_start, to_end;
  float sum;
};
inline constexpr float kLowestDecayStep = -40.0f;

// What a lane reads ahead of a chunk: log-decay and gate of its tokens; neutral past the end.
struct AdditiveScales {
  float2 g, beta;
};
FW_DEVICE AdditiveScales load_row_scales(const Rule& rule, const Rows& g, const Rows& beta, int hv, int first,
                                         int length) {
  AdditiveScales x{make_float2(0, 0), make_float2(1, 1)};
  const int t = first + 2 * static_cast<int>(lane_index());
  const bool one = t < length, two = t + 1 < length;
  if (rule.decay == Decay::kScalar) {
    if (one) x.g.x = load_element(g, t, 0);
    if (two) x.g.y = load_element(g, t + 1, 0);
  } else if (rule.decay == Decay::kConstant) {  // log(constant_decay(head)) of rule/decay.h
    const float decay = log1pf(-exp2f(-5.0f - static_cast<float>(hv)));
    x.g = make_float2(one ? decay : 0.0f, two ? decay : 0.0f);
  }
  if (rule.uses_beta()) {
    if (one) x.beta.x = load_element(beta, t, 0);
    if (two) x.beta.y = load_element(beta, t + 1, 0);
  }
  return x;
}

// By a whole warp. Sums only, no differences: g may be -inf.
FW_DEVICE DecayRows decay_rows(const float2& steps) {
  const int lane = static_cast<int>(lane_index());
  const float g[2] = {steps.x * kLog2E, steps.y * kLog2E};
  const float bounded[2] = {max(g[0], kLowestDecayStep), max(g[1], kLowestDecayStep)};
  float prefix = g[0] + g[1], suffix = prefix, pair = bounded[0] + bounded[1];
  FW_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = shuffle_up(prefix, distance), after = shuffle_down(suffix, distance),
                pair_before = shuffle_up(pair, distance);
    if (lane >= distance) prefix += before, pair += pair_before;
    if (lane + distance < 32) suffix += after;
  }
  DecayRows d;
  d.sum = shuffle(prefix, 31);
  float before = shuffle_up(prefix, 1), after = shuffle_down(suffix, 1), pair_before = shuffle_up(pair, 1);
  if (lane == 0) before = pair_before = 0;
  if (lane == 31) after = 0;
  d.from_start = make_float2(exp2_fast(before + g[0]), exp2_fast(prefix));
  d.to_end = make_float2(exp2_fast(g[1] + after), exp2_fast(after));
  d.pair = make_float2(pair_before + bounded[0], pair);
  return d;
}

FW_DEVICE bool norms_matter(const Rule& rule) { return rule.q_norm == Norm::kL2 || rule.k_norm == Norm::kL2; }

// The front of a row.
FW_DEVICE FrontCoefs<float> additive_coefs(const Rule& rule, float scale, float beta, float q2, float k2) {
  FrontScalars<float> s;
  s.beta = beta, s.q2 = q2, s.k2 = k2;
  return front_coefs(reduced_rule<true>(rule), scale, s);
}

// Factors of a chunk's rows. P_ij is q_i . k_j times, for j in an earlier block of 16 rows than i, after_i
// before_[block of i - 1]j: of the decay from j to the row before i's block, and from there to i. In the same block
// left_i right_j exp2(pair_i - pair_j).
struct FactorRows {
  float pair[kChunk], left[kChunk], right[kChunk], after[kChunk], before[3][kChunk];
  float write[kChunk], read[kChunk], gamma;

  // By a warp, two rows a lane.
  static FW_DEVICE void store(float* rows, float one, float two) {
    *reinterpret_cast<float2*>(rows + 2 * lane_index()) = make_float2(one, two);
  }
  FW_DEVICE void store_write(const float2& coefs, const float2& decays, float sum) {
    store(write, coefs.x * decays.x, coefs.y * decays.y);
    if (lane_index() == 0) gamma = exp2_fast(sum);
  }
  FW_DEVICE void store_pairs(const DecayRows& d, const float2& of_left, const float2& of_right) {
    const int lane = static_cast<int>(lane_index());
    store(read, of_left.x * d.from_start.x, of_left.y * d.from_start.y);
    store(pair, d.pair.x, d.pair.y);
    store(left, of_left.x, of_left.y);
    store(right, of_right.x, of_right.y);
    const float anchors[3] = {shuffle(d.pair.y, 7), shuffle(d.pair.y, 15), shuffle(d.pair.y, 23)};
    const float anchor = lane < 8 ? 0.0f : lane < 16 ? anchors[0] : lane < 24 ? anchors[1] : anchors[2];
    store(after, of_left.x * exp2_fast(d.pair.x - anchor), of_left.y * exp2_fast(d.pair.y - anchor));
    FW_UNROLL
    for (int b = 0; b < 3; ++b) {  // what is after the anchor is not read
      store(before[b], of_right.x * exp2_fast(min(anchors[b] - d.pair.x, 0.0f)),
            of_right.y * exp2_fast(min(anchors[b] - d.pair.y, 0.0f)));
    }
  }
};

// To P from Q K^T: accumulators of 16 rows, those of `block`, kN / 4 blocks of 8 columns from number first_tile on
// (even). Where Block is a constant nothing is asked of a tile, and all numbers come from shared memory together.
template <class Block, int kN>
FW_DEVICE void scale_pairs(Block block, float (&p)[kN], const FactorRows& rows, int first_tile, int lane) {
  const int i = 16 * block + (lane >> 2);
  const float after[2] = {rows.after[i], rows.after[i + 8]};
  const float* const before = rows.before[block > 0 ? block - 1 : 0] + 2 * (lane % 4) + 8 * first_tile;
  FW_UNROLL
  for (int n = 0; n < kN / 4; ++n) {
    if (first_tile + n >= 2 * block) break;
    const float2 of_column = *reinterpret_cast<const float2*>(before + 8 * n);
    FW_UNROLL
    for (int m = 0; m < 4; ++m) p[4 * n + m] *= after[m / 2] * (m % 2 == 0 ? of_column.x : of_column.y);
  }
  const float g[2] = {rows.pair[i], rows.pair[i + 8]}, left[2] = {rows.left[i], rows.left[i + 8]};
  FW_UNROLL
  for (int n = 0; n < kN / 4; ++n) {
    if (first_tile + n < 2 * block) continue;
    if (first_tile + n > 2 * block + 1) {
      FW_UNROLL
      for (int m = 0; m < 4; ++m) p[4 * n + m] = 0.0f;
      continue;
    }
    const int j = 8 * (first_tile + n) + 2 * (lane % 4);
    const float2 g_column = *reinterpret_cast<const float2*>(rows.pair + j),
                 right = *reinterpret_cast<const float2*>(rows.right + j);
    FW_UNROLL
    for (int m = 0; m < 4; ++m) {
      const float fall = g[m / 2] - (m % 2 == 0 ? g_column.x : g_column.y);
      const float factor = left[m / 2] * (m % 2 == 0 ? right.x : right.y) * exp2_fast(min(fall, 0.0f));
      p[4 * n + m] = i + 8 * (m / 2) >= j + m % 2 ? p[4 * n + m] * factor : 0.0f;
    }
  }
}

FW_DEVICE float dot_bf16x2(uint32_t x, uint32_t y, float sum) {
  return sum + bf16_low(x) * bf16_low(y) + bf16_high(x) * bf16_high(y);
}
FW_DEVICE float square_of_16_bytes(const uint4& x, float sum) {
  return dot_bf16x2(x.w, x.w, dot_bf16x2(x.z, x.z, dot_bf16x2(x.y, x.y, dot_bf16x2(x.x, x.x, sum))));
}
// Of a row of SW128 tiles [64, kTileK], by two neighbouring lanes; both get it.
template <int kTileK>
FW_DEVICE float row_square(const char* tile, int row) {
  const int half = static_cast<int>(lane_index()) & 1;
  float sum = 0;
  FW_UNROLL
  for (int i = 0; i < kTileK / 16; ++i) {
    const int piece = 2 * i + half;
    sum = square_of_16_bytes(
        *reinterpret_cast<const uint4*>(tile + piece / 8 * kSw128Bytes + row * 128 + (((piece & 7) ^ (row & 7)) << 4)),
        sum);
  }
  return sum + shuffle_xor(sum, 1);
}

// Rows of one sequence and head as tiles of 64 rows and columns from `column` on; columns at `limit` and above are 0.
FW_DEVICE TileRows tile_of_rows(const TokenArg& a, const SequenceArg& sequences, const ScanCoord& p, int column,
                                int limit) {
  TileRows t = tile_rows(a, sequences, p, limit);
  t.column = column;
  return t;
}

// By kThreads threads, i of them this one: kColumns columns of rows `first` to first + 63 into SW128 tiles. Returns
// whether the copies are on their way: else they are done.
template <int kColumns, int kThreads>
FW_DEVICE bool issue_rows(const TileRows& t, int first, char* sw128_tiles, int i) {
  constexpr int kStep = kThreads / 8;  // rows at a time
  const int piece = i % 8, row = i / 8;
  if (t.wide && t.rows.bf16 != 0) {
    FW_UNROLL
    for (int sw128 = 0; sw128 < kColumns / 64; ++sw128) {
      const int column = t.column + sw128 * 64 + piece * 8, token = first + row;
      const char* from = t.rows.data + (token * t.rows.stride + column) * 2;
      const uint32_t to = shared_address(sw128_tiles) + static_cast<uint32_t>(sw128 * kSw128Bytes + row * 128);
      const bool inside = column < t.V;
      FW_UNROLL
      for (int j = 0; j < 64 / kStep; ++j) {
        const bool valid = inside && token + j * kStep < t.length;
        cp_async_16(to + static_cast<uint32_t>(j * kStep * 128 + ((piece ^ ((row + j * kStep) & 7)) << 4)),
                    valid ? from : t.rows.data, valid);
        from += 2 * kStep * t.rows.stride;
      }
    }
    return true;
  }
  FW_NO_UNROLL
  for (int j = 0; j < 64 / kStep * (kColumns / 64); ++j) {
    const int sw128 = j % (kColumns / 64), at = row + j / (kColumns / 64) * kStep;
    float x[8] = {};
    if (t.rows.data != nullptr && first + at < t.length)
      load_channels(t.rows, first + at, t.column + sw128 * 64 + piece * 8, t.V, x);
    *reinterpret_cast<uint4*>(sw128_tiles + sw128 * kSw128Bytes + at * 128 + ((piece ^ (at & 7)) << 4)) =
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
  return false;
}

}  // namespace fw::cuda
