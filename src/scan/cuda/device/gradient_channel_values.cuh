// Channel decay: the value side of a stage. What is rare is small here: it lies in the way of what is not.
#pragma once

#include "scan/cuda/device/gradient_channel.cuh"

namespace fw::cuda {

// 8 channels in bf16, those from `limit` on 0.
FW_DEVICE uint4 load_granule(const Rows& rows, int64_t t, int i, int limit) {
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

FW_DEVICE void store_granule(const Rows& rows, int64_t t, int i, int limit, float (&x)[8]) {
  const int64_t at = t * rows.stride + i;
  char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
  if (i + 8 <= limit && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
    if (rows.bf16 != 0) {
      *reinterpret_cast<uint4*>(p) = pack_8(x);
    } else {
      *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
      *reinterpret_cast<float4*>(p + 16) = make_float4(x[4], x[5], x[6], x[7]);
    }
    return;
  }
  FW_NO_UNROLL
  for (int j = i; j < i + 8 && j < limit; ++j) {
    store_element(rows, t, j, x[0]);
    FW_UNROLL
    for (int l = 0; l < 7; ++l) x[l] = x[l + 1];
  }
}

// v and a channel write gate of a pass.
template <class Shape>
struct ChannelValueWords {
  using Lanes = ValueLanes<Shape>;
  uint4 v = make_uint4(0, 0, 0, 0), gate = v;

  FW_DEVICE void load(const ScalarChunk<Shape>& c, int turn, int block, int pass) {
    const Problem& x = c.args.problem;
    const int row = c.thread / Lanes::kLanes + pass * Lanes::kRows, column = block * kValueBlock + c.thread % Lanes::kLanes * 8;
    if (row >= c.rows(turn) || column >= x.V) return;
    const Rows from = c.rows_at(x.in.v, turn);
    v = c.pieces(kPiecesV) ? *reinterpret_cast<const uint4*>(from.data + 2 * (row * from.stride + column)) : load_granule(from, row, column, x.V);
    if (Shape::kGates && x.rule.write == Gate::kChannel) {
      const Rows gates = c.rows_at(x.in.write_gate, turn);
      gate = Shape::kFast ? *reinterpret_cast<const uint4*>(gates.data + 2 * (row * gates.stride + column)) : load_granule(gates, row, column, x.V);
    }
  }
};

// dv, the channel write gate's gradient, and the rows' sums of v (.) c (.) dz over all blocks.
template <class Shape>
FW_DEVICE void channel_value_rows(const ScalarChunk<Shape>& c, int turn, int block, int pass, int stage, const ChannelValueWords<Shape>& words) {
  using Lanes = ValueLanes<Shape>;
  const Problem& x = c.args.problem;
  const int row = c.thread / Lanes::kLanes + pass * Lanes::kRows, in_block = c.thread % Lanes::kLanes * 8, column = block * kValueBlock + in_block;
  float sum = 0;
  if (row < c.rows(turn) && column < x.V) {
    float dz[8], v[8];
    unpack_8(*reinterpret_cast<const uint4*>(c.memory + stage + Shape::kV + panel_offset(row, in_block)), dz);
    unpack_8(words.v, v);
    const float z_v = c.floats(Shape::kZv)[row];
    if (Shape::kGates && x.rule.write == Gate::kChannel) {
      float gate[8], y[8];
      unpack_8(words.gate, gate);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) {
        y[j] = z_v * v[j] * dz[j];
        dz[j] *= gate[j];
      }
      const Rows dc = c.rows_at(c.args.grads.d.write_gate, turn);
      if (dc.data != nullptr) store_granule(dc, row, column, x.V, y);
    }
    FW_UNROLL
    for (int j = 0; j < 8; ++j) {
      sum += v[j] * dz[j];
      dz[j] *= z_v;
    }
    const Rows dv = c.rows_at(c.args.grads.d.v, turn);
    if (c.pieces(kPiecesDV)) {
      *reinterpret_cast<uint4*>(dv.data + 2 * (row * dv.stride + column)) = pack_8(dz);
    } else if (dv.data != nullptr) {
      store_granule(dv, row, column, x.V, dz);
    }
  }
  sum = group_sum<Lanes::kLanes>(sum);
  float* to = c.floats(Shape::kDZv) + row;
  if (c.thread % Lanes::kLanes == 0) *to = block > 0 ? *to + sum : sum;
}

// D (.) S0 over all blocks, in memory: it would be registers beside the products.
template <class Shape>
FW_DEVICE void sum_state_dots(const ScalarChunk<Shape>& c, int block, int stage) {
  float* to = c.floats(Shape::kStateDots) + c.thread / Shape::kPairs * Shape::kKey + c.thread % Shape::kPairs * 2;
  float2 sum = block > 0 ? float2_at(to) : make_float2(0, 0);
  add_state_dots(c, stage, sum);
  store_float2(to, sum.x, sum.y);
}

}  // namespace fw::cuda
