// Channel decay: the front of rows whose streams are q and k times a scale per row, and its gradients, where the
// products lie. e is also multiplied by a gate a channel (kGates), or is a row of its own (kOwnKey). What such streams
// were before they were anchored stays in registers.
#pragma once

#include "scan/cuda/common/front/token_scalars.cuh"
#include "scan/cuda/gradients/channel/row_words.cuh"
#include "scan/cuda/sm90/gradients/channel/precond.cuh"
#include "scan/cuda/sm90/gradients/common/head_sums.cuh"

namespace fw::cuda {

// The rules of these rows: any gain. Most have one that does not look at the key.
constexpr bool plain_gain(const Rule& r) { return r.gain == Gain::kOne || r.gain == Gain::kGate; }
// The rule with what the rows of a shape have constant. kAnyGain: else the gain does not look at the key.
template <class Shape, bool kAnyGain>
FW_DEVICE Rule rule_of_rows(const Rule& r) {
  Rule y = reduced_rule<true>(r);
  if (Shape::kGates) y.erase = y.write = Gate::kChannel;
  if (kAnyGain) y.gain = r.gain, y.gain_eps = r.gain_eps;
  return y;
}

// The tensor of the third row: the gate on e, or what e is a multiple of.
template <class Shape>
FW_DEVICE const TokenArg& third_row(const TokenArgs& tensors) {
  if constexpr (Shape::kOwnKey) return tensors.erase_key;
  return tensors.erase_gate;
}

template <class Shape>
FW_DEVICE RowWords load_row_words(const ChannelChunk<Shape>& c, int work_tile) {
  constexpr int kLanes = Shape::kTileK / 16;
  RowWords x = {};
  if (!c.has(work_tile)) return x;
  const int row = c.thread / kLanes, lane = c.thread % kLanes, K = c.args.problem.K;
  const Rows q = c.rows_at(c.args.problem.in.q, work_tile), k = c.rows_at(c.args.problem.in.k, work_tile);
  if constexpr (Shape::kHalf) x.squares[0] = load_squares(c, work_tile, row);
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int column = 8 * (lane + kLanes * i);
    if (row >= c.rows(work_tile) || column >= K) continue;
    x.q[i] = *reinterpret_cast<const uint4*>(q.data + 2 * (row * q.stride + column));
    x.k[i] = *reinterpret_cast<const uint4*>(k.data + 2 * (row * k.stride + column));
    if constexpr (Shape::kThirdRow) {
      const Rows third = c.rows_at(third_row<Shape>(c.args.problem.in), work_tile);
      x.third[i] = *reinterpret_cast<const uint4*>(third.data + 2 * (row * third.stride + column));
    }
    if constexpr (Shape::kMakesM) {
      const Rows states = c.rows_before(work_tile);
      x.before[i] = *reinterpret_cast<const uint4*>(states.data + 2 * (row * states.stride + column));
    } else if constexpr (Shape::kPrecond) {
      const Rows m = c.workspace_rows(WorkTile<Shape>::kM, c.args.problem.H * K, work_tile);
      const float4* from = reinterpret_cast<const float4*>(m.data + 4 * (row * m.stride + column));
      const float4 low = from[0], high = from[1];
      x.m[i][0] = low.x, x.m[i][1] = low.y, x.m[i][2] = low.z, x.m[i][3] = low.w;
      x.m[i][4] = high.x, x.m[i][5] = high.y, x.m[i][6] = high.z, x.m[i][7] = high.w;
    }
  }
  return x;
}

// Whether M is on the read; what is made here is on the read of rules without an erase, on the write of others.
template <class Shape>
FW_DEVICE bool on_read(const Rule& r) {
  return Shape::kMakesM ? !Shape::kDelta : r.preconditions_read();
}

// M of the words, made where it was not read.
template <class Shape>
FW_DEVICE void make_row_m(const ChannelChunk<Shape>& c, const RowWords& words, int row, bool first, float k2,
                          float (&m)[2][8]) {
  if constexpr (Shape::kMakesM) {
    const RunGates gates = precond_gates(c, row, first, k2);
    const PrecondMap<float> map = precond_of(c);
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      float k[8], a[8];
      unpack_8(words.k[i], k), unpack_8(words.before[i], a);
      const auto shifted = [&](int j) { return step_precond(gates.alpha, gates.gain, k[j], a[j], map.eps); };
      FW_UNROLL
      for (int j = 0; j < 8; j += 2) {
        const float2 both = squashed_m(map, make_float2(shifted(j), shifted(j + 1)));
        m[i][j] = both.x, m[i][j + 1] = both.y;
      }
    }
  } else {
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      FW_UNROLL
      for (int j = 0; j < 8; ++j) m[i][j] = words.m[i][j];
    }
  }
}

// The erase gates of a atom. Fused ones are kept in place of their gradients, for load_third().
template <class Shape>
FW_DEVICE uint4 fused_third(const ChannelChunk<Shape>& c, int work_tile, int row, int column, const uint4& words) {
  if constexpr (Shape::kFused && Shape::kGates) {
    const uint4 values = fused_gates(c.args.problem.fused.erase_gate.factor, words);
    const Rows to = c.rows_at(third_row<Shape>(c.args.grads.d), work_tile);
    if (row < c.rows(work_tile) && column < c.args.problem.K)
      *reinterpret_cast<uint4*>(to.data + 2 * (row * to.stride + column)) = values;
    return values;
  } else {
    return words;
  }
}

// As StreamRows::make_streams, anchored.
template <class Shape>
FW_DEVICE void make_streams(const ChannelChunk<Shape>& c, int work_tile, const RowWords& words) {
  constexpr int kLanes = Shape::kTileK / 16;
  const Problem& x = c.args.problem;
  const int row = c.thread / kLanes, lane = c.thread % kLanes;
  FrontScalars<float> s;
  float q_k = 0;  // where M is on one of them, r.w instead
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    if constexpr (!Shape::kHalf) {
      s.q2 = dot_16_bytes(words.q[i], words.q[i], s.q2);
      s.k2 = dot_16_bytes(words.k[i], words.k[i], s.k2);
    }
    if constexpr (!Shape::kPrecond) q_k = dot_16_bytes(words.q[i], words.k[i], q_k);
  }
  if constexpr (Shape::kHalf) {
    s.q2 = words.squares[0].x, s.k2 = words.squares[0].y;
  } else {
    s.q2 = group_sum<kLanes>(s.q2);
    s.k2 = group_sum<kLanes>(s.k2);
  }
  float m[Shape::kPrecond ? 2 : 1][8];
  if constexpr (Shape::kPrecond) {
    make_row_m(c, words, row, lane == 0, s.k2, m);
  } else {
    q_k = group_sum<kLanes>(q_k);
  }
  s.beta = c.work_tile_floats(Shape::kBeta, work_tile)[row];
  FrontCoefs<float> f = plain_gain(x.rule) ? front_coefs(rule_of_rows<Shape, false>(x.rule), x.scale, s)
                                           : front_coefs(rule_of_rows<Shape, true>(x.rule), x.scale, s);
  if (row >= c.rows(work_tile)) f = FrontCoefs<float>();
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t at = sw128_offset(row, 8 * (lane + kLanes * i));
    float r[8], e[8], w[8];
    unpack_8(words.q[i], r);
    unpack_8(words.k[i], w);
    FW_UNROLL
    for (int j = 0; j < 8; ++j) r[j] *= f.r_q, e[j] = f.e_k * w[j], w[j] *= f.w_k;
    if constexpr (Shape::kPrecond) {
      FW_UNROLL
      for (int j = 0; j < 8; ++j) (on_read<Shape>(x.rule) ? r[j] : w[j]) *= m[i][j], q_k = fmaf(r[j], w[j], q_k);
    }
    if constexpr (Shape::kThirdRow) {
      float third[8];
      unpack_8(fused_third(c, work_tile, row, 8 * (lane + kLanes * i), words.third[i]), third);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) e[j] = (Shape::kOwnKey ? f.e_k : e[j]) * third[j];
    }
    anchor_8(*reinterpret_cast<const uint4*>(c.memory + Shape::kFactors + at), r, e, w);
    *reinterpret_cast<uint4*>(c.memory + Shape::kRead + at) = pack_8(r);
    *reinterpret_cast<uint4*>(c.memory + Shape::kWrite + at) = pack_8(w);
    if (Shape::kDelta) *reinterpret_cast<uint4*>(c.memory + Shape::kErase + at) = pack_8(e);
  }
  q_k = Shape::kPrecond ? group_sum<kLanes>(q_k) : f.r_q * f.w_k * q_k;
  if (lane == 0) {
    c.floats(Shape::kZv)[row] = f.z_v;
    c.floats(Shape::kScalars)[row] = s.q2;
    c.floats(Shape::kScalars)[64 + row] = s.k2;
    c.floats(Shape::kScalars)[128 + row] = q_k;
    float* coefficients = c.floats(Shape::kSlopes) + row;
    coefficients[0] = f.r_q, coefficients[64] = f.w_k, coefficients[128] = f.e_k;
  }
}

// What finish_streams() leaves besides:
// - r and w as they were (where there are too few registers: in their tiles in memory),
// - the sums over rows of r.dr, w.dw and w.de (k.de where M is made, with kOwnKey p.de).
struct StreamParts {
  uint32_t r[2][4], w[2][4], third[2][4];
  float m[2][8], sums[2][3];
  uint32_t k[2][4];
};
// The gate on e, 1 past K and the last row; what e is a multiple of, 0 there.
template <class Shape>
FW_DEVICE void load_third(const ChannelChunk<Shape>& c, int work_tile, StreamParts& parts) {
  constexpr uint32_t kNone = Shape::kOwnKey ? 0 : 0x3f803f80;
  const Rows third =
      c.rows_at(third_row<Shape>(Shape::kFused && Shape::kGates ? c.args.grads.d : c.args.problem.in), work_tile);
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const bool valid = row < c.rows(work_tile);
    const char* p = third.data + 2 * (row * third.stride + c.column());
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      parts.third[half][j] =
          valid && c.column() + 8 * j < c.args.problem.K ? *reinterpret_cast<const uint32_t*>(p + 16 * j) : kNone;
    }
  }
}
// M, 1 past K and the last row.
template <class Shape>
FW_DEVICE float2 load_m(const ChannelChunk<Shape>& c, int work_tile, int half, int tile) {
  const Problem& x = c.args.problem;
  const Rows m = c.workspace_rows(WorkTile<Shape>::kM, x.H * x.K, work_tile);
  const int row = c.row() + 8 * half, column = c.column() + 8 * tile;
  return row < c.rows(work_tile) && column < x.K
             ? float2_at(reinterpret_cast<const float*>(m.data) + (row * static_cast<int>(m.stride) + column))
             : make_float2(1, 1);
}
template <class Shape>
FW_DEVICE void load_m(const ChannelChunk<Shape>& c, int work_tile, StreamParts& parts) {
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float2 y = load_m(c, work_tile, half, j);
      parts.m[half][2 * j] = y.x, parts.m[half][2 * j + 1] = y.y;
    }
  }
}

// dr, de, dw and dG, which is stored after a barrier; in place of the sums dq and dk but for what
// stream_row_scales() has a part in, and the third row's gradient.
template <class Shape>
FW_DEVICE void finish_streams(const ChannelChunk<Shape>& c, int work_tile, [[maybe_unused]] int stage, StreamSums& sums,
                              StreamParts& parts) {
  const int row = 16 * c.block_row(), column = 32 * c.group();
  uint32_t e_words[2][4];
  if constexpr (Shape::kMakesM) {
    if (c.warp == 0) sum_row_decays(c);
    cp_async_wait<0>();
  }
  FW_UNROLL
  for (int j = 0; j < 2 && Shape::kDelta; ++j)
    load_left(e_words[j], c.base + Shape::kErase, row, column + 16 * j, c.lane);
  sync_threads();  // -e and dP and dT have been read
  const bool reads = on_read<Shape>(c.args.problem.rule);
  FW_UNROLL
  for (int half = 0; half < 2; ++half) parts.sums[half][0] = parts.sums[half][1] = parts.sums[half][2] = 0;
  const float gate_inverse = Shape::kFused && Shape::kGates ? rcp_fast(c.args.problem.fused.erase_gate.factor) : 1.0f;
  PrecondMap<float> map;
  float of_center = 0;
  if constexpr (Shape::kMakesM) map = precond_of(c);
  FW_UNROLL
  for (int j = 0; j < 4; j += 2) {
    uint32_t f[4], r[4], w[4], keys[4], before[4];
    load_left(r, c.base + Shape::kRead, row, column + 8 * j, c.lane);
    load_left(w, c.base + Shape::kWrite, row, column + 8 * j, c.lane);
    load_left(f, c.base + Shape::kFactors, row, column + 8 * j, c.lane);
    if constexpr (Shape::kMakesM) {
      load_left(keys, c.base + key_tile<Shape>(stage), row, column + 8 * j, c.lane);
      load_left(before, c.base + before_tile<Shape>(stage), row, column + 8 * j, c.lane);
    }
    if constexpr (Shape::kPartsInPlace) sync_warp();  // the warp has read what its lanes overwrite
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {  // the row scales are read again for other columns
      const float* at = c.floats(Shape::kSlopes) + c.row() + 8 * half;
      const float r_q = at[0], w_k = at[64], e_k = at[128], diagonal = c.floats(Shape::kDiagonal)[c.row() + 8 * half];
      FW_UNROLL
      for (int tile = j; tile < j + 2; ++tile) {
        const int i = half + 2 * (tile - j);
        float raw_r[2], raw_w[2], d_g[2], d_m[2];
        const uint32_t third = Shape::kThirdRow ? parts.third[half][tile] : 0;
        float2 m_pair = make_float2(1, 1);
        if (Shape::kPrecond && !Shape::kMakesM)
          m_pair = Shape::kTileK == 128 ? make_float2(parts.m[half][2 * tile], parts.m[half][2 * tile + 1])
                                        : load_m(c, work_tile, half, tile);
        FW_UNROLL
        for (int k = 0; k < 2; ++k) {
          const auto value = [&](uint32_t word) { return k == 0 ? bf16_low(word) : bf16_high(word); };
          float &dr = sums.r[tile][2 * half + k], &de = sums.e[tile][2 * half + k], &dw = sums.w[tile][2 * half + k];
          const float factor = value(f[i]), inverse = rcp_fast(factor), at_r = value(r[i]), at_w = value(w[i]);
          raw_r[k] = at_r * inverse, raw_w[k] = at_w * factor;
          d_g[k] = fmaf(at_r, dr, -(at_w * dw));
          if (Shape::kDelta) d_g[k] = fmaf(value(e_words[j / 2][i]), de, d_g[k]);
          parts.sums[half][0] = fmaf(at_r, dr, parts.sums[half][0]),
          parts.sums[half][1] = fmaf(at_w, dw, parts.sums[half][1]);
          dr = fmaf(diagonal, at_w, dr) * factor, dw = fmaf(diagonal, at_r, dw) * inverse;
          if constexpr (Shape::kMakesM) {  // r is left without M, w not at all
            const RowGateArrays<Shape> gates(c);
            const int of_row = c.row() + 8 * half;
            raw_w[k] = value(keys[i]);
            const float shifted =
                step_precond(gates.decay[of_row], gates.gain[of_row], raw_w[k], value(before[i]), map.eps);
            const SquashedPoint p = squashed_point(map, shifted);
            if (reads) {
              d_m[k] = dr * (raw_r[k] * p.slope);
              dr *= p.m, raw_r[k] *= rcp_fast(p.m), dw *= w_k;
            } else {
              dw *= p.m * w_k;
              d_m[k] = dw * (raw_w[k] * p.slope);
            }
            of_center = fmaf(d_m[k], shifted, of_center);
          } else if constexpr (Shape::kPrecond) {  // the same
            const float m = k == 0 ? m_pair.x : m_pair.y, inverse_m = inverse_or_zero(m);
            (reads ? raw_r[k] : raw_w[k]) *= inverse_m;
            d_m[k] = reads ? dr * raw_r[k] : dw * raw_w[k];
            (reads ? dr : dw) *= m;
          }
          dr *= r_q;
          if (!Shape::kMakesM) dw *= w_k;
          if (!Shape::kDelta) continue;
          de *= -factor;
          if constexpr (Shape::kOwnKey) {
            parts.sums[half][2] += value(third) * de;
            de *= e_k;
            continue;
          }
          const float gated = Shape::kGates ? value(third) * de : de;
          parts.sums[half][2] += raw_w[k] * gated;
          dw += e_k * gated;
          if (Shape::kGates) de *= raw_w[k] * (e_k * inverse_or_zero(w_k));
          if (Shape::kFused && Shape::kGates) de *= fmaf(-value(third) * gate_inverse, value(third), value(third));
        }
        if constexpr (Shape::kMakesM) {
          c.fragment(Shape::kFactors, half, tile) = pack_bf16(d_m[0], d_m[1]);
        } else if constexpr (Shape::kPrecond) {
          const int at_row = c.row() + 8 * half, at_column = c.column() + 8 * tile;
          if (at_row < c.rows(work_tile) && at_column < c.args.problem.K) {
            const Rows out = c.workspace_rows(WorkTile<Shape>::kDM, c.args.problem.HV * c.args.problem.K, work_tile);
            store_float2(reinterpret_cast<float*>(out.data) + (at_row * static_cast<int>(out.stride) + at_column),
                         d_m[0], d_m[1]);
          }
        }
        store_float2(decay_sum(c, c.row() + 8 * half, c.column() + 8 * tile), d_g[0], d_g[1]);
        (Shape::kPartsInPlace ? c.fragment(Shape::kRead, half, tile) : parts.r[half][tile]) =
            pack_bf16(raw_r[0], raw_r[1]);
        if constexpr (!Shape::kMakesM)
          (Shape::kPartsInPlace ? c.fragment(Shape::kWrite, half, tile) : parts.w[half][tile]) =
              pack_bf16(raw_w[0], raw_w[1]);
      }
    }
  }
  if constexpr (Shape::kMakesM) {
    of_center = -slope_factor(map) * warp_sum(of_center);
    if (c.lane == 0) c.floats(Shape::kOfCenter)[c.warp] = of_center;
  }
}

// By a thread a row: the gradients of the row scales, and what q and k still enter dq and dk with.
template <class Shape>
FW_DEVICE void stream_row_scales(const ChannelChunk<Shape>& c, int work_tile, int row) {
  const Problem& x = c.args.problem;
  float* coefficients = c.floats(Shape::kSlopes) + row;
  const float r_q = coefficients[0], w_k = coefficients[64], e_k = coefficients[128];
  const float diagonal = c.floats(Shape::kDiagonal)[row] * c.floats(Shape::kScalars)[128 + row];
  const float r_dr = row_sum(c, 0, row) + diagonal, w_dw = row_sum(c, 1, row) + diagonal;
  float w_de = Shape::kDelta ? row_sum(c, 2, row) : 0.0f;
  if (Shape::kMakesM) w_de *= w_k;  // that is the sum of k.de
  const float dz_v = first_half_alone(c, c.floats(Shape::kDZv)[row]);
  const float z_v = c.floats(Shape::kZv)[row];
  const bool residual = !Shape::kGates && c.residual_gains() && gain_by_residual(z_v);
  float of_r, of_w, dbeta;
  if (plain_gain(x.rule)) {  // what is below, written out
    of_r = x.rule.q_norm == Norm::kL2 ? -r_q * inverse_or_zero(x.scale * x.scale) * r_dr : 0.0f;
    of_w = x.rule.k_norm == Norm::kL2 ? -(e_k * w_de + w_k * w_dw) : 0.0f;
    dbeta = Shape::kGates ? 0.0f : residual ? gain_gradient(dz_v, z_v) : w_de + dz_v;
  } else {
    FrontScalars<float> s;
    s.q2 = c.floats(Shape::kScalars)[row];
    s.k2 = c.floats(Shape::kScalars)[64 + row];
    s.beta = c.work_tile_floats(Shape::kBeta, work_tile)[row];
    const float r_inverse = inverse_or_zero(r_q), w_inverse = inverse_or_zero(w_k);
    FrontCoefs<float> d;
    d.r_q = r_inverse * r_dr, d.w_k = w_inverse * w_dw, d.e_k = w_inverse * w_de;
    d.z_v = residual ? value_coefficient_gradient(dz_v, e_k * d.e_k, z_v) : dz_v;
    const FrontScalars<float> ds = front_coefs_vjp(rule_of_rows<Shape, true>(x.rule), x.scale, s, d);
    of_r = 2.0f * ds.q2 * r_inverse, of_w = 2.0f * ds.k2 * w_inverse, dbeta = ds.beta;
  }
  if constexpr (Shape::kMakesM) of_w = of_w * w_k + of_normalised_key(c, row, row_sum(c, 4, row));
  if constexpr (Shape::kHalf) {
    const float2 of = join_half_slopes(c, work_tile, row, true, make_float2(of_r * r_q, of_w * w_k));
    of_r = of.x * inverse_or_zero(r_q), of_w = of.y * inverse_or_zero(w_k);
  }
  coefficients[192] = of_r, coefficients[256] = of_w;  // the latter: of w, or of k where w is not kept
  if constexpr (!Shape::kPrecond && !Shape::kHalf)
    dbeta *= scalar_slope(x.fused.beta, c.work_tile_floats(Shape::kBeta, work_tile)[row]);
  if (row < c.rows(work_tile)) store_one(c.rows_at(c.args.grads.d.beta, work_tile), row, dbeta);
}

// dq, dk and the gradient of the third row.
template <class Shape>
FW_DEVICE void store_stream_gradients(const ChannelChunk<Shape>& c, int work_tile, const StreamSums& d,
                                      const StreamParts& parts) {
  const HeadGradients& out = c.args.grads;
  const Rows dq = c.rows_at(out.d.q, work_tile), dk = c.rows_at(out.d.k, work_tile);
  const Rows d_third = Shape::kThirdRow ? c.rows_at(third_row<Shape>(out.d), work_tile) : Rows{};
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const bool valid = row < c.rows(work_tile);
    const float of_r = c.floats(Shape::kSlopes)[192 + row], of_w = c.floats(Shape::kSlopes)[256 + row];
    float x[8], y[8], z[8];  // z: of the third row
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t r = Shape::kPartsInPlace ? c.fragment(Shape::kRead, half, j) : parts.r[half][j];
      const uint32_t w = Shape::kMakesM         ? parts.k[half][j]
                         : Shape::kPartsInPlace ? c.fragment(Shape::kWrite, half, j)
                                                : parts.w[half][j];
      x[2 * j] = d.r[j][2 * half] + of_r * bf16_low(r), x[2 * j + 1] = d.r[j][2 * half + 1] + of_r * bf16_high(r);
      y[2 * j] = d.w[j][2 * half] + of_w * bf16_low(w), y[2 * j + 1] = d.w[j][2 * half + 1] + of_w * bf16_high(w);
      z[2 * j] = d.e[j][2 * half], z[2 * j + 1] = d.e[j][2 * half + 1];
    }
    const bool all_of_q = add_heads(c, work_tile, 8 * half, x), all_of_k = add_heads(c, work_tile, 16 + 8 * half, y);
    if (all_of_q && all_of_k) {
      store_fragment(c, dq, c.pieces(kVec16DQ), row, valid, x);
      store_fragment(c, dk, c.pieces(kVec16DK), row, valid, y);
    }
    if constexpr (!Shape::kThirdRow || !Shape::kDelta) continue;
    if (d_third.data != nullptr) store_fragment(c, d_third, c.pieces(kVec16DThird), row, valid, z);
  }
}

}  // namespace fw::cuda
