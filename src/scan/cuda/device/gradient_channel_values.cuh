// Channel decay: the value side of a stage, for the fast rows whose write gate may be one of its own a channel. Its rows, like v's, come early.
#pragma once

#include "scan/cuda/device/gradient_channel.cuh"

namespace fw::cuda {

// v, and the gate where rows are fast and gated, as they lie in memory.
template <class Shape>
struct ChannelValueWords {
  using Lanes = ValueLanes<Shape>;
  static constexpr bool kWithGate = Shape::kFast && Shape::kGates;
  ValueWords<Shape> v;
  uint4 gate[Lanes::kPasses];

  FW_DEVICE void load(const ScalarChunk<Shape>& c, int turn, int block) {
    v.load(c, turn, block);
    const Problem& x = c.args.problem;
    if (!kWithGate || x.rule.write != Gate::kChannel) return;
    const Rows rows = c.rows_at(x.in.write_gate, turn);
    const int column = block * kValueBlock + c.thread % Lanes::kLanes * 8;
    FW_UNROLL
    for (int i = 0; i < Lanes::kPasses; ++i) {
      const int row = c.thread / Lanes::kLanes + i * Lanes::kRows;
      gate[i] = make_uint4(0, 0, 0, 0);
      if (row < c.rows(turn) && column < x.V) gate[i] = *reinterpret_cast<const uint4*>(rows.data + 2 * (row * rows.stride + column));
    }
  }
};

// Sums that blocks of values add to, in memory: they would be registers beside the products.
template <class Shape>
FW_DEVICE void sum_state_dots(const ScalarChunk<Shape>& c, int block, int stage) {
  float* to = c.floats(Shape::kStateDots) + c.thread / Shape::kPairs * Shape::kKey + c.thread % Shape::kPairs * 2;
  float2 sum = block > 0 ? float2_at(to) : make_float2(0, 0);
  add_state_dots(c, stage, sum);
  store_float2(to, sum.x, sum.y);
}
template <class Shape>
FW_DEVICE void sum_z(const ScalarChunk<Shape>& c, int block, const float (&sums)[ValueLanes<Shape>::kPasses]) {
  using Lanes = ValueLanes<Shape>;
  FW_UNROLL
  for (int i = 0; i < Lanes::kPasses; ++i) {
    const float sum = group_sum<Lanes::kLanes>(sums[i]);
    float* to = c.floats(Shape::kDZv) + c.thread / Lanes::kLanes + i * Lanes::kRows;
    if (c.thread % Lanes::kLanes == 0) *to = block > 0 ? *to + sum : sum;
  }
}

// As value_rows(), with the sums over all value blocks.
template <class Shape>
FW_DEVICE void channel_value_rows(const ScalarChunk<Shape>& c, int turn, int block, int stage, const ChannelValueWords<Shape>& words) {
  using Lanes = ValueLanes<Shape>;
  float sums[Lanes::kPasses] = {};
  if constexpr (!ChannelValueWords<Shape>::kWithGate) {
    value_rows(c, turn, block, stage, words.v, sums);
  } else {
    const Problem& x = c.args.problem;
    const bool gated = x.rule.write == Gate::kChannel;
    const int in_block = c.thread % Lanes::kLanes * 8, column = block * kValueBlock + in_block;
    const Rows dv = c.rows_at(c.args.grads.d.v, turn), dc = gated ? c.rows_at(c.args.grads.d.write_gate, turn) : Rows{};
    FW_UNROLL
    for (int i = 0; i < Lanes::kPasses; ++i) {
      const int row = c.thread / Lanes::kLanes + i * Lanes::kRows;
      if (row >= c.rows(turn) || column >= x.V) continue;
      float dz[8], v[8];
      unpack_8(*reinterpret_cast<const uint4*>(c.memory + stage + Shape::kV + panel_offset(row, in_block)), dz);
      if (words.v.wide) {
        unpack_8(words.v.v[i], v);
      } else {
        load_channels(c.rows_at(x.in.v, turn), row, column, x.V, v);
      }
      const float z_v = c.floats(Shape::kZv)[row];
      if (gated) {
        float gate[8], y[8];
        unpack_8(words.gate[i], gate);
        FW_UNROLL
        for (int j = 0; j < 8; ++j) {
          y[j] = z_v * v[j] * dz[j];
          dz[j] *= gate[j];
        }
        if (dc.data != nullptr) store_channels(dc, row, column, x.V, y);
      }
      FW_UNROLL
      for (int j = 0; j < 8; ++j) {
        sums[i] += v[j] * dz[j];
        dz[j] *= z_v;
      }
      if (c.pieces(kPiecesDV)) {
        *reinterpret_cast<uint4*>(dv.data + 2 * (row * dv.stride + column)) = pack_8(dz);
      } else if (dv.data != nullptr) {
        store_channels(dv, row, column, x.V, dz);
      }
    }
  }
  sum_z(c, block, sums);
}

}  // namespace fw::cuda
