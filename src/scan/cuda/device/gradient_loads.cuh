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

// A block has its processor to itself (or to two of its kind): while it computes, the memory is idle unless the block that comes next
// there has its tiles and rows brought into the L2 cache. Which one that is, is known well enough.
template <class Shape>
FW_DEVICE void prefetch_rows(const GradientChunk<Shape>& c, const TokenArg& tensor, int n, int hv, int first, int rows, int dim) {
  if (tensor.data == nullptr) return;
  const Rows from = rows_of(tensor, c.args.problem.sequences, n, hv);
  const int size = from.bf16 != 0 ? 2 : 4, lines = (dim * size + 127) / 128;
  for (int item = c.thread; item < rows * lines; item += Shape::kThreads) {
    prefetch_line(from.data + static_cast<int64_t>(first + item / lines) * from.stride * size + item % lines * 128);
  }
}

template <class Shape>
FW_DEVICE void prefetch_next(const GradientChunk<Shape>& c, int blocks) {
  constexpr unsigned kAhead = 132 * Shape::kBlocksPerSm;
  const unsigned index = block_index_x() + kAhead;
  if (index >= grid_size_x()) return;
  const GradientArgs& x = c.args;
  const Problem& p = x.problem;
  const SequenceArg& s = p.sequences;
  if (c.thread == 0) {
    const int64_t at = static_cast<int64_t>(index) * blocks;
    const uint32_t panels = static_cast<uint32_t>(blocks) * kPanelBytes, states = static_cast<uint32_t>(blocks) * Shape::kStateBytes;
    bulk_prefetch(&x.pairs[index], sizeof(PairImage));
    bulk_prefetch(x.w + at * kPanel, panels);
    bulk_prefetch(x.v + at * kPanel, panels);
    bulk_prefetch(x.states + at * (64 * Shape::kKey), states);
    bulk_prefetch(x.d_states + at * (64 * Shape::kKey), states);
  }
  const int chunk = static_cast<int>(index / static_cast<unsigned>(p.HV)), hv = static_cast<int>(index % static_cast<unsigned>(p.HV));
  const int n = sequence_of_chunk(s, chunk), first = (chunk - first_chunk(s, n)) * kChunk, left = sequence_length(s, n) - first;
  const int rows = left < kChunk ? left : kChunk;
  prefetch_rows(c, x.d_o, n, hv, first, rows, p.V);
  prefetch_rows(c, p.in.q, n, hv, first, rows, p.K);
  prefetch_rows(c, p.in.k, n, hv, first, rows, p.K);
  prefetch_rows(c, p.in.v, n, hv, first, rows, p.V);
  prefetch_rows(c, p.in.g, n, hv, first, rows, Shape::kChannel ? p.K : 1);
  prefetch_rows(c, p.in.beta, n, hv, first, rows, 1);
  prefetch_rows(c, p.in.erase_gate, n, hv, first, rows, p.rule.erase == Gate::kScalar ? 1 : p.K);
  prefetch_rows(c, p.in.write_gate, n, hv, first, rows, p.rule.write == Gate::kScalar ? 1 : p.V);
}

FW_DEVICE uint4 pack_8(const float (&x)[8]) { return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])); }

// Without waiting where rows can be copied as they are: wait_d_out() before the barrier that shows the tile to others.
template <class Shape>
FW_DEVICE void load_d_out(const GradientChunk<Shape>& c, int block) {
  const int V = c.args.problem.V;
  const Rows d_out = rows_of(c.args.d_o, c.args.problem.sequences, c.n(), c.hv());
  const int tile = block % Shape::kStages * Shape::kStageBytes + Shape::kOut;
  const bool wide = d_out.data != nullptr && d_out.bf16 != 0 && (d_out.stride | V) % 8 == 0 && (reinterpret_cast<uintptr_t>(d_out.data) & 15) == 0;
  FW_UNROLL
  for (int item = c.thread; item < 512; item += Shape::kThreads) {
    const int row = item / 8, in_block = item % 8 * 8, column = block * kValueBlock + in_block;
    const bool valid = d_out.data != nullptr && row < c.rows() && column < V;
    const int64_t t = c.first() + row;
    if (wide) {
      cp_async_16(c.base + tile + panel_offset(row, in_block), valid ? d_out.data + 2 * (t * d_out.stride + column) : d_out.data, valid);
      continue;
    }
    float x[8] = {};
    if (valid) load_channels(d_out, t, column, V, x);
    *reinterpret_cast<uint4*>(c.memory + tile + panel_offset(row, in_block)) = pack_8(x);
  }
}
FW_DEVICE void wait_d_out() {
  cp_async_commit();
  cp_async_wait<0>();
}

// q and k of the rows that a thread has a part of (as make_streams() and row_gradients() take them), all on the way at once.
template <class Shape>
struct KeyWords {
  static constexpr int kLanes = Shape::kKey / 8, kRows = Shape::kThreads / kLanes, kPasses = kChunk / kRows;
  uint4 q[kPasses], k[kPasses];
  bool wide;  // else nothing is loaded

  FW_DEVICE KeyWords(const GradientChunk<Shape>& c, const FrontRows& front) {
    const auto aligned = [](const Rows& x) { return x.bf16 != 0 && x.stride % 8 == 0 && (reinterpret_cast<uintptr_t>(x.data) & 15) == 0; };
    wide = c.args.problem.K == Shape::kKey && aligned(front.q) && aligned(front.k);
    FW_UNROLL
    for (int i = 0; i < kPasses; ++i) q[i] = k[i] = make_uint4(0, 0, 0, 0);
    if (!wide) return;
    FW_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      const int row = c.thread / kLanes + i * kRows, last = c.rows() - 1;
      const int64_t t = c.first() + (row < last ? row : last);
      const int channel = c.thread % kLanes * 8;
      q[i] = *reinterpret_cast<const uint4*>(front.q.data + 2 * (t * front.q.stride + channel));
      k[i] = *reinterpret_cast<const uint4*>(front.k.data + 2 * (t * front.k.stride + channel));
    }
  }
  // kPlain: as row_gradients().
  template <bool kPlain>
  FW_DEVICE RawKeyRow<8> row(const Problem& x, const FrontRows& front, int pass, int t, int lane) const {
    RawKeyRow<8> raw;
    if (!wide || !kPlain) raw = load_key_row<8>(x, front, t, lane);
    if (kPlain) {
      FW_UNROLL
      for (int j = 0; j < 8; ++j) raw.p[j] = 0, raw.b[j] = raw.m[j] = 1;
    }
    if (wide) {
      const uint32_t words[8] = {q[pass].x, q[pass].y, q[pass].z, q[pass].w, k[pass].x, k[pass].y, k[pass].z, k[pass].w};
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        raw.q[2 * j] = bf16_low(words[j]);
        raw.q[2 * j + 1] = bf16_high(words[j]);
        raw.k[2 * j] = bf16_low(words[4 + j]);
        raw.k[2 * j + 1] = bf16_high(words[4 + j]);
      }
    }
    return raw;
  }
};

FW_DEVICE bool plain_rows(const Rule& rule) { return !rule.uses_erase_key() && rule.erase != Gate::kChannel && !rule.uses_precond(); }

// r, e, w of all rows, and z_v.
template <bool kPlain, class Shape>
FW_DEVICE void make_streams(const GradientChunk<Shape>& c) {
  using Words = KeyWords<Shape>;
  constexpr int kLanes = Words::kLanes;
  const Problem& x = c.args.problem;
  const FrontRows front = front_rows(x, c.n(), c.hv());
  const Words words(c, front);
  const int lane = c.thread % kLanes;
  FW_UNROLL
  for (int pass = 0; pass < Words::kPasses; ++pass) {
    const int row = c.thread / kLanes + pass * Words::kRows;
    const bool valid = row < c.rows();
    const int t = c.first() + (valid ? row : c.rows() - 1);
    const RawKeyRow<8> raw = words.template row<kPlain>(x, front, pass, t, lane);
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

// The gradient of one value a token, or of the channels of a gate that was averaged.
template <int kLanes>
FW_DEVICE void store_gate(const Rows& rows, Gate gate, int t, int lane, int dim, float x) {
  if (rows.data == nullptr) return;
  if (gate == Gate::kScalar && lane == 0) store_element(rows, t, 0, x);
  if (gate == Gate::kAveraged) {
    for (int i = lane; i < dim; i += kLanes) store_element(rows, t, i, x / static_cast<float>(dim));
  }
}

FW_DEVICE void store_one(const Rows& rows, int t, float x) {
  if (rows.data != nullptr) store_element(rows, t, 0, x);
}

}  // namespace fw::cuda
