// Channel decay: the value side of a stage. What is rare is small here: it lies in the way of what is not.
#pragma once

#include "scan/cuda/gradients/channel/phases.cuh"

namespace fw::cuda {

// 8 channels in bf16, those from `limit` on 0.
FW_DEVICE uint4 load_atom(const Rows& rows, int64_t t, int i, int limit) {
  const int64_t at = t * rows.stride + i;
  const char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
  if (i + 8 <= limit && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
    if (rows.bf16 != 0) return *reinterpret_cast<const uint4*>(p);
    const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 16);
    return make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
  }
  uint4 x = make_uint4(0, 0, 0, 0);
  FW_NO_UNROLL
  for (int j = i; j < i + 8; j += 2) {  // words move up: no array that is indexed
    x.x = x.y, x.y = x.z, x.z = x.w;
    x.w = pack_bf16(j < limit ? load_element(rows, t, j) : 0.0f, j + 1 < limit ? load_element(rows, t, j + 1) : 0.0f);
  }
  return x;
}

// Of a tensor with a value a row.
template <class Shape>
FW_DEVICE uint32_t load_row_bits(const ChannelChunk<Shape>& c, const TokenArg& tensor, int work_tile, int row) {
  const Rows from = c.rows_at(tensor, work_tile);
  return load_bits(tensor.bf16 != 0, from.data + (tensor.bf16 != 0 ? 2 : 4) * row * from.stride);
}
// beta of a row by a thread of warps 2 and 3, a work tile ahead.
template <class Shape>
FW_DEVICE uint32_t load_beta(const ChannelChunk<Shape>& c, int work_tile) {
  const TokenArg& beta = c.args.problem.in.beta;
  const bool bf16 = beta.bf16 != 0;
  const int row = c.thread - 64;
  // 1
  if (c.warp < 2 || c.warp > 3 || !c.has(work_tile) || !c.args.problem.rule.uses_beta() || row >= c.rows(work_tile))
    return bf16 ? 0x3f80u : 0x3f800000u;
  return load_row_bits(c, beta, work_tile, row);
}
template <class Shape>
FW_DEVICE void publish_beta(const ChannelChunk<Shape>& c, int work_tile, uint32_t bits) {
  if (c.warp == 2 || c.warp == 3)
    c.work_tile_floats(Shape::kBeta, work_tile)[c.thread - 64] = value_of_bits(c.args.problem.in.beta.bf16 != 0, bits);
}

// Lanes over the rows of a stage: as ValueLanes where there are registers for that.
template <class Shape>
struct ChannelLanes {
  static constexpr int kColumns = Shape::kTileK == 128 ? 8 : 4, kLanes = kValueBlock / kColumns,
                       kRows = Shape::kThreads / kLanes, kPasses = kChunk / kRows;
  static_assert(Shape::kTileK == 64 || kPasses == 1);
  int row, in_block, column;
  FW_DEVICE ChannelLanes(const ChannelChunk<Shape>& c, int block, int pass) {
    row = c.thread / kLanes + pass * kRows, in_block = c.thread % kLanes * kColumns,
    column = block * kValueBlock + in_block;
  }
};
template <int kColumns>
struct ChannelWords {
  uint32_t w[kColumns / 2] = {};
  FW_DEVICE void load(const char* p) {
    if constexpr (kColumns == 8) {
      const uint4 x = *reinterpret_cast<const uint4*>(p);
      w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(p);
      w[0] = x.x, w[1] = x.y;
    }
  }
  FW_DEVICE void store(char* p) const {
    if constexpr (kColumns == 8) {
      *reinterpret_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
      *reinterpret_cast<uint2*>(p) = make_uint2(w[0], w[1]);
    }
  }
};

// The rows of sm90/gradients/channel/rows.cuh have both gates or none.
template <class Shape>
FW_DEVICE bool channel_write_gate(const Rule& r) {
  return Shape::kStreams ? Shape::kGates : r.write == Gate::kChannel;
}

// v, if it is wanted (wants_values()), and a channel write gate of a pass, where they and their gradients are in
// pieces.
template <class Shape>
struct ChannelValueWords {
  ChannelWords<ChannelLanes<Shape>::kColumns> v, gate;

  FW_DEVICE void load(const ChannelChunk<Shape>& c, int work_tile, int block, int pass) {
    const Problem& x = c.args.problem;
    if (!c.wants_values() && !channel_write_gate<Shape>(x.rule)) return;
    const ChannelLanes<Shape> at(c, block, pass);
    if (!c.pieces(kVec16Values) || at.row >= c.rows(work_tile) || at.column >= x.V) return;
    const Rows from = c.rows_at(x.in.v, work_tile);
    if (c.wants_values()) v.load(from.data + 2 * (at.row * from.stride + at.column));
    if (!channel_write_gate<Shape>(x.rule)) return;
    const Rows gates = c.rows_at(x.in.write_gate, work_tile);
    gate.load(gates.data + 2 * (at.row * gates.stride + at.column));
  }
};

// dv, the channel write gate's gradient, and the rows' sums over all blocks of v (.) c (.) dz, or of R (.) dz where
// that makes the gain's gradient.
template <class Shape>
FW_DEVICE void channel_value_rows(const ChannelChunk<Shape>& c, int work_tile, int block, int pass, int stage,
                                  const ChannelValueWords<Shape>& words) {
  using Lanes = ChannelLanes<Shape>;
  const Problem& x = c.args.problem;
  const bool gated = channel_write_gate<Shape>(x.rule);
  const Lanes at(c, block, pass);
  const char *dz_at = c.memory + stage + Shape::kV + sw128_offset(at.row, at.in_block),
             *r_at = dz_at - Shape::kV + Shape::kW;
  float sum = 0;
  if (at.row < c.rows(work_tile) && at.column < x.V) {
    const float z_v = c.floats(Shape::kZv)[at.row];
    const Rows dv = c.rows_at(c.args.grads.d.v, work_tile),
               dc = gated ? c.rows_at(c.args.grads.d.write_gate, work_tile) : Rows{};
    if (c.pieces(kVec16Values)) {
      ChannelWords<Lanes::kColumns> dz, of_v, of_gate, factor = words.v;
      dz.load(dz_at);
      if (c.residual_gains()) {
        factor.load(r_at);  // apart from the other: a pointer that may be either is neither's address space
        if (!gain_by_residual(z_v)) {
          const Rows from = c.rows_at(x.in.v, work_tile);
          factor.load(from.data + 2 * (at.row * from.stride + at.column));
        }
      }
      FW_UNROLL
      for (int j = 0; j < Lanes::kColumns / 2; ++j) {
        float d[2] = {bf16_low(dz.w[j]), bf16_high(dz.w[j])};
        const float v[2] = {bf16_low(factor.w[j]), bf16_high(factor.w[j])};
        if (gated) {
          uint32_t gate = words.gate.w[j];
          float2 slopes = make_float2(z_v, z_v);
          if constexpr (Shape::kFused) {
            const FusedPair fused = fused_pair(x.fused.write_gate.factor, gate);
            slopes = make_float2(z_v * fused.slopes.x, z_v * fused.slopes.y), gate = fused.values;
          }
          of_gate.w[j] = pack_bf16(slopes.x * v[0] * d[0], slopes.y * v[1] * d[1]);
          d[0] *= bf16_low(gate), d[1] *= bf16_high(gate);
        }
        sum += v[0] * d[0] + v[1] * d[1];
        of_v.w[j] = pack_bf16(z_v * d[0], z_v * d[1]);
      }
      if (dc.data != nullptr) of_gate.store(dc.data + 2 * (at.row * dc.stride + at.column));
      if (dv.data != nullptr) of_v.store(dv.data + 2 * (at.row * dv.stride + at.column));
    } else {  // small, for few registers
      const bool residual = c.residual_gains() && gain_by_residual(z_v);
      const Rows from = c.rows_at(x.in.v, work_tile), gates = gated ? c.rows_at(x.in.write_gate, work_tile) : Rows{};
      FW_NO_UNROLL
      for (int j = 0; j < Lanes::kColumns && at.column + j < x.V; ++j) {
        const float v = residual ? bf16_value(reinterpret_cast<const uint16_t*>(r_at)[j])
                                 : load_element(from, at.row, at.column + j);
        float gate = gated ? load_element(gates, at.row, at.column + j) : 1.0f, slope = 1;
        if constexpr (Shape::kFused) {
          const FusedPair fused = fused_pair(x.fused.write_gate.factor, bf16_bits(gate));
          if (gated) slope = fused.slopes.x, gate = bf16_low(fused.values);
        }
        const float dz = bf16_value(reinterpret_cast<const uint16_t*>(dz_at)[j]);
        sum += v * gate * dz;
        if (dc.data != nullptr) store_element(dc, at.row, at.column + j, z_v * v * dz * slope);
        if (dv.data != nullptr) store_element(dv, at.row, at.column + j, z_v * gate * dz);
      }
    }
  }
  sum = group_sum<Lanes::kLanes>(sum);
  float* to = c.floats(Shape::kDZv) + at.row;
  if (c.thread % Lanes::kLanes == 0) *to = block > 0 ? *to + sum : sum;
}

// D (.) S0 over all blocks, in memory: it would be registers alongside the products.
template <class Shape>
FW_DEVICE void sum_state_dots(const ChannelChunk<Shape>& c, int block, int stage) {
  float* to = c.floats(Shape::kStateDots) + c.thread / Shape::kPairs * Shape::kTileK + c.thread % Shape::kPairs * 2;
  float2 sum = block > 0 ? float2_at(to) : make_float2(0, 0);
  add_state_dots(c, stage, sum);
  store_float2(to, sum.x, sum.y);
}

}  // namespace fw::cuda
