// What a chunk's gradients start from: tiles by bulk copies, dO, the streams of the rows, the sums of the log-decay.
#pragma once

#include "scan/cuda/device/gradient_layout.cuh"

namespace fw::cuda {

// One thread: the images of value block `block` into its stage, with A and P before the first.
template <class Shape>
FW_DEVICE void load_stage(const GradientChunk<Shape>& c, int block, int blocks) {
  const GradientArgs& x = c.args;
  const int stage = block % Shape::kStages;
  char* to = c.memory + stage * Shape::kStageBytes;
  uint64_t* barrier = c.barrier(stage);
  const int64_t at = static_cast<int64_t>(block_index_x()) * blocks + block;
  const uint32_t pair_bytes = block > 0 ? 0 : (Shape::kOnline ? 2 : 1) * kPanelBytes;
  mbarrier_expect(barrier, pair_bytes + 2 * kPanelBytes + 2 * Shape::kStateBytes);
  if (block == 0) {
    if (Shape::kOnline) bulk_load(c.memory + Shape::kA, x.pairs[block_index_x()].a, kPanelBytes, barrier);
    bulk_load(c.memory + Shape::kP, x.pairs[block_index_x()].p, kPanelBytes, barrier);
  }
  bulk_load(to + Shape::kW, x.w + at * kPanel, kPanelBytes, barrier);
  bulk_load(to + Shape::kV, x.v + at * kPanel, kPanelBytes, barrier);
  bulk_load(to + Shape::kState, x.states + at * (64 * Shape::kKey), Shape::kStateBytes, barrier);
  bulk_load(to + Shape::kDState, x.d_states + at * (64 * Shape::kKey), Shape::kStateBytes, barrier);
}

FW_DEVICE uint4 pack_8(const float (&x)[8]) { return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])); }

template <class Shape>
FW_DEVICE void load_d_out(const GradientChunk<Shape>& c, int block) {
  const Rows d_out = rows_of(c.args.d_o, c.args.problem.sequences, c.n(), c.hv());
  const int tile = block % Shape::kStages * Shape::kStageBytes + Shape::kOut;
  FW_UNROLL
  for (int item = c.thread; item < 512; item += Shape::kThreads) {
    const int row = item / 8, column = item % 8 * 8;
    float x[8] = {};
    if (d_out.data != nullptr && row < c.rows()) load_channels(d_out, c.first() + row, block * kValueBlock + column, c.args.problem.V, x);
    *reinterpret_cast<uint4*>(c.memory + tile + panel_offset(row, column)) = pack_8(x);
  }
}

// r, e, w of all rows, and z_v.
template <class Shape>
FW_DEVICE void make_streams(const GradientChunk<Shape>& c) {
  constexpr int kLanes = Shape::kKey / 8, kRows = Shape::kThreads / kLanes;
  const Problem& x = c.args.problem;
  const FrontRows front = front_rows(x, c.n(), c.hv());
  const int lane = c.thread % kLanes;
  FW_NO_UNROLL
  for (int row = c.thread / kLanes; row < kChunk; row += kRows) {
    const bool valid = row < c.rows();
    const int t = c.first() + (valid ? row : c.rows() - 1);
    const RawKeyRow<8> raw = load_key_row<8>(x, front, t, lane);
    const FrontCoefs<float> coefs = front_coefs(x.rule, x.scale, front_scalars<kLanes>(x, front, raw, t, lane));
    KeyStreams<8> streams = key_streams(x, coefs, raw);
    FW_UNROLL
    for (int j = 0; j < 8; ++j) {
      if (!valid) streams.r[j] = streams.e[j] = streams.w[j] = 0;
    }
    char* at = c.memory + Shape::kStreams + panel_offset(row, 8 * lane);
    *reinterpret_cast<uint4*>(at) = pack_8(streams.r);
    if (Shape::kOnline) *reinterpret_cast<uint4*>(at + Shape::kStateBytes) = pack_8(streams.e);
    *reinterpret_cast<uint4*>(at + 2 * Shape::kStateBytes) = pack_8(streams.w);
    if (lane == 0) {
      c.floats(Shape::kZv)[row] = valid ? coefs.z_v : 0.0f;
      c.floats(Shape::kDZv)[row] = 0;
    }
  }
}

// Scalar decay: G of all rows in units of log 2, by the first warp; rows past the end keep the last one's.
template <class Shape>
FW_DEVICE void sum_decay(const GradientChunk<Shape>& c) {
  if (c.warp != 0) return;
  const Problem& x = c.args.problem;
  const Rows g = rows_of(x.in.g, x.sequences, c.n(), c.hv());
  float step[2];
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * c.lane + i;
    step[i] = 0;
    if (row >= c.rows()) continue;
    if (x.rule.decay == Decay::kScalar) step[i] = log2_decay(load_element(g, c.first() + row, 0));
    if (x.rule.decay == Decay::kConstant) step[i] = log2_decay(log1pf(-exp2f(-5.0f - static_cast<float>(c.hv()))));
  }
  float sum = step[0] + step[1];
  FW_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const float before = shuffle_up(sum, delta);
    if (c.lane >= delta) sum += before;
  }
  c.floats(Shape::kG)[2 * c.lane] = sum - step[1];
  c.floats(Shape::kG)[2 * c.lane + 1] = sum;
}

// Two neighbouring channels.
FW_DEVICE float2 load_pair(const Rows& rows, int64_t t, int i, int limit) {
  const int64_t at = t * rows.stride + i;
  if (i + 2 <= limit) {
    const char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
    if (rows.bf16 != 0 && (reinterpret_cast<uintptr_t>(p) & 3) == 0) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(p);
      return make_float2(bf16_low(word), bf16_high(word));
    }
    if (rows.bf16 == 0 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) return *reinterpret_cast<const float2*>(p);
  }
  return make_float2(i < limit ? load_element(rows, t, i) : 0.0f, i + 1 < limit ? load_element(rows, t, i + 1) : 0.0f);
}
FW_DEVICE void store_pair(const Rows& rows, int64_t t, int i, int limit, float2 x) {
  const int64_t at = t * rows.stride + i;
  char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
  if (i + 2 <= limit && rows.bf16 != 0 && (reinterpret_cast<uintptr_t>(p) & 3) == 0) {
    *reinterpret_cast<uint32_t*>(p) = pack_bf16(x.x, x.y);
    return;
  }
  if (i + 2 <= limit && rows.bf16 == 0 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    *reinterpret_cast<float2*>(p) = x;
    return;
  }
  if (i < limit) store_element(rows, t, i, x.x);
  if (i + 1 < limit) store_element(rows, t, i + 1, x.y);
}

// Channel decay: the steps of block `block` of 8 rows of two channels, in units of log 2.
template <class Shape>
FW_DEVICE void load_decay_steps(const GradientChunk<Shape>& c, int block, int channel, float2 (&step)[8]) {
  const Rows g = rows_of(c.args.problem.in.g, c.args.problem.sequences, c.n(), c.hv());
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int row = 8 * block + i;
    step[i] = make_float2(0, 0);
    if (row >= c.rows()) continue;
    const float2 x = load_pair(g, c.first() + row, channel, c.args.problem.K);
    step[i] = make_float2(log2_decay(x.x), log2_decay(x.y));
  }
}

// Sums of the log-decay within blocks of 8 rows, and what a block leaves of the state.
template <class Shape>
FW_DEVICE void sum_channel_decay(const GradientChunk<Shape>& c) {
  const int block = c.thread / Shape::kPairs, channel = c.thread % Shape::kPairs * 2;
  float2 step[8];
  load_decay_steps(c, block, channel, step);
  float2 sum = make_float2(0, 0);
  FW_UNROLL
  for (int i = 0; i < 8; ++i) {
    sum.x += step[i].x;
    sum.y += step[i].y;
    *reinterpret_cast<float2*>(c.floats(Shape::kFromStart) + (8 * block + i) * Shape::kPlaneStride + channel) = sum;
  }
  *reinterpret_cast<float2*>(c.floats(Shape::kRatio) + block * Shape::kKey + channel) = make_float2(exp2_fast(sum.x), exp2_fast(sum.y));
}

}  // namespace fw::cuda
