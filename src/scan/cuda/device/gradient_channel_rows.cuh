// Channel decay: the front of rows whose streams are q and k times a number a row, e also times a gate a channel (kGates), and its
// gradients, where the products lie. What such streams were before they were anchored stays in registers.
#pragma once

#include "scan/cuda/device/gradient_channel.cuh"

namespace fw::cuda {

// q, k and the gate on e of the row and the two granules of it that a thread has, a turn ahead.
struct RowWords {
  uint4 q[2], k[2], gate[2];
};
template <class Shape>
FW_DEVICE RowWords load_row_words(const ScalarChunk<Shape>& c, int turn) {
  constexpr int kLanes = Shape::kKey / 16;
  RowWords x = {};
  if (!Shape::kFast || !c.has(turn)) return x;
  const int row = c.thread / kLanes, lane = c.thread % kLanes, K = c.args.problem.K;
  const Rows q = c.rows_at(c.args.problem.in.q, turn), k = c.rows_at(c.args.problem.in.k, turn);
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int column = 8 * (lane + kLanes * i);
    if (row >= c.rows(turn) || column >= K) continue;
    x.q[i] = *reinterpret_cast<const uint4*>(q.data + 2 * (row * q.stride + column));
    x.k[i] = *reinterpret_cast<const uint4*>(k.data + 2 * (row * k.stride + column));
    if (Shape::kGates && c.args.problem.rule.erase == Gate::kChannel) {
      const Rows gate = c.rows_at(c.args.problem.in.erase_gate, turn);
      x.gate[i] = *reinterpret_cast<const uint4*>(gate.data + 2 * (row * gate.stride + column));
    }
  }
  return x;
}

// As FastRows::make_streams, anchored.
template <class Shape>
FW_DEVICE void make_fast_streams(const ScalarChunk<Shape>& c, int turn, const RowWords& words) {
  constexpr int kLanes = Shape::kKey / 16;
  const Problem& x = c.args.problem;
  const int row = c.thread / kLanes, lane = c.thread % kLanes;
  FrontScalars<float> s;
  float q_k = 0;
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    s.q2 = dot_16_bytes(words.q[i], words.q[i], s.q2);
    s.k2 = dot_16_bytes(words.k[i], words.k[i], s.k2);
    q_k = dot_16_bytes(words.q[i], words.k[i], q_k);
  }
  s.q2 = group_sum<kLanes>(s.q2);
  s.k2 = group_sum<kLanes>(s.k2);
  q_k = group_sum<kLanes>(q_k);
  s.beta = c.turn_floats(Shape::kBeta, turn)[row];
  FrontCoefs<float> f = front_coefs(reduced_rule<!Shape::kGates>(x.rule), x.scale, s);
  if (row >= c.rows(turn)) f = FrontCoefs<float>();
  FW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t at = panel_offset(row, 8 * (lane + kLanes * i));
    float r[8], e[8], w[8];
    unpack_8(words.q[i], r);
    unpack_8(words.k[i], w);
    FW_UNROLL
    for (int j = 0; j < 8; ++j) r[j] *= f.r_q, e[j] = f.e_k * w[j], w[j] *= f.w_k;
    if (Shape::kGates && x.rule.erase == Gate::kChannel) {
      float gate[8];
      unpack_8(words.gate[i], gate);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) e[j] *= gate[j];
    }
    anchor_8(*reinterpret_cast<const uint4*>(c.memory + Shape::kFactors + at), r, e, w);
    *reinterpret_cast<uint4*>(c.memory + Shape::kRead + at) = pack_8(r);
    *reinterpret_cast<uint4*>(c.memory + Shape::kWrite + at) = pack_8(w);
    if (Shape::kOnline) *reinterpret_cast<uint4*>(c.memory + Shape::kErase + at) = pack_8(e);
  }
  if (lane == 0) {
    c.floats(Shape::kZv)[row] = f.z_v;
    c.floats(Shape::kScalars)[row] = s.q2;
    c.floats(Shape::kScalars)[64 + row] = s.k2;
    c.floats(Shape::kScalars)[128 + row] = f.r_q * f.w_k * q_k;
  }
}

// As finish_streams, with r and w as they were, and the sums over rows of r.dr, w.dw and w.de.
struct FastParts {
  uint32_t r[2][4], w[2][4], gate[2][4];
  float sums[2][3];
};
// The gate on e, 1 where there is none.
template <class Shape>
FW_DEVICE void load_gates(const ScalarChunk<Shape>& c, int turn, FastParts& parts) {
  constexpr uint32_t kOnes = 0x3f803f80;
  const bool gated = c.args.problem.rule.erase == Gate::kChannel;
  const Rows gate = c.rows_at(c.args.problem.in.erase_gate, turn);
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const bool valid = gated && row < c.rows(turn);
    const char* p = gate.data + 2 * (row * gate.stride + c.column());
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      parts.gate[half][j] = valid && c.column() + 8 * j < c.args.problem.K ? *reinterpret_cast<const uint32_t*>(p + 16 * j) : kOnes;
    }
  }
}
template <class Shape>
FW_DEVICE void finish_fast_streams(const GradientChunk<Shape>& c, StreamSums& sums, float (&d_g)[4][4], FastParts& parts) {
  const int row = 16 * c.block_row(), column = 32 * c.group();
  FW_UNROLL
  for (int half = 0; half < 2; ++half) parts.sums[half][0] = parts.sums[half][1] = parts.sums[half][2] = 0;
  FW_UNROLL
  for (int j = 0; j < 4; j += 2) {
    uint32_t f[4], r[4], e[4], w[4];
    load_left(f, c.base + Shape::kFactors, row, column + 8 * j, c.lane);
    load_left(r, c.base + Shape::kRead, row, column + 8 * j, c.lane);
    if (Shape::kOnline) load_left(e, c.base + Shape::kErase, row, column + 8 * j, c.lane);
    load_left(w, c.base + Shape::kWrite, row, column + 8 * j, c.lane);
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int tile = j + i / 2, half = i % 2;
      float raw_r[2], raw_w[2];
      FW_UNROLL
      for (int k = 0; k < 2; ++k) {
        const auto value = [&](uint32_t word) { return k == 0 ? bf16_low(word) : bf16_high(word); };
        float &dr = sums.r[tile][2 * half + k], &de = sums.e[tile][2 * half + k], &dw = sums.w[tile][2 * half + k];
        const float factor = value(f[i]), inverse = rcp_fast(factor), r_dr = value(r[i]) * dr, w_dw = value(w[i]) * dw;
        raw_r[k] = value(r[i]) * inverse, raw_w[k] = value(w[i]) * factor;
        d_g[tile][2 * half + k] = r_dr - w_dw;
        if (Shape::kOnline) d_g[tile][2 * half + k] += value(e[i]) * de;
        dr *= factor, dw *= inverse;
        parts.sums[half][0] += r_dr;
        parts.sums[half][1] += w_dw;
        if (!Shape::kOnline) continue;
        de *= -factor;
        parts.sums[half][2] += Shape::kGates ? raw_w[k] * value(parts.gate[half][tile]) * de : raw_w[k] * de;
      }
      parts.r[half][tile] = pack_bf16(raw_r[0], raw_r[1]);
      parts.w[half][tile] = pack_bf16(raw_w[0], raw_w[1]);
    }
  }
}

// By a thread a row: the gradients of the numbers of a row, and what dq and dk are made with.
template <class Shape>
FW_DEVICE void fast_row_numbers(const ScalarChunk<Shape>& c, int turn, int row) {
  const Problem& x = c.args.problem;
  const Rule rule = reduced_rule<!Shape::kGates>(x.rule);
  FrontScalars<float> s;
  s.q2 = c.floats(Shape::kScalars)[row];
  s.k2 = c.floats(Shape::kScalars)[64 + row];
  s.beta = c.turn_floats(Shape::kBeta, turn)[row];
  FrontCoefs<float> f = front_coefs(rule, x.scale, s), d;
  const float r_dr = row_sum(c, 0, row), w_dw = row_sum(c, 1, row), diagonal = c.floats(Shape::kDiagonal)[row] * c.floats(Shape::kScalars)[128 + row];
  const float w_de = Shape::kOnline ? row_sum(c, 2, row) : 0.0f;
  const float r_inverse = inverse_or_zero(f.r_q), w_inverse = inverse_or_zero(f.w_k);
  d.r_q = r_inverse * (r_dr + diagonal);
  d.w_k = w_inverse * (w_dw + diagonal);
  d.e_k = w_inverse * w_de;
  d.z_v = c.floats(Shape::kDZv)[row];
  const FrontScalars<float> ds = front_coefs_vjp(rule, x.scale, s, d);
  float* out = c.floats(Shape::kSlopes) + row;
  out[0] = f.r_q;
  out[64] = f.w_k;
  out[128] = f.e_k;
  out[192] = 2.0f * ds.q2 * r_inverse;
  out[256] = 2.0f * ds.k2 * w_inverse;
  if (row < c.rows(turn)) store_one(c.rows_at(c.args.grads.d.beta, turn), row, ds.beta);
}

// dq, dk and the gradient of the gate.
template <class Shape>
FW_DEVICE void store_fast_gradients(const ScalarChunk<Shape>& c, int turn, const StreamSums& d, const FastParts& parts) {
  const HeadGradients& out = c.args.grads;
  const Rows dq = c.rows_at(out.d.q, turn), dk = c.rows_at(out.d.k, turn);
  const Rows db = Shape::kGates && c.args.problem.rule.erase == Gate::kChannel ? c.rows_at(out.d.erase_gate, turn) : Rows{};
  const bool wide_q = dq.data != nullptr && wide_rows(dq), wide_k = dk.data != nullptr && wide_rows(dk);  // K is a multiple of 8
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = c.row() + 8 * half;
    const bool valid = row < c.rows(turn);
    const float* f = c.floats(Shape::kSlopes) + row;
    const float r_q = f[0], w_k = f[64], e_k = f[128], of_r = f[192], of_w = f[256], diagonal = c.floats(Shape::kDiagonal)[row];
    const float r_w = r_q * diagonal, w_r = w_k * diagonal, e_w = e_k * inverse_or_zero(w_k);
    float x[8], y[8], z[8];  // z: of the gate
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t r_word = parts.r[half][j], w_word = parts.w[half][j];
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float r = i == 0 ? bf16_low(r_word) : bf16_high(r_word), w = i == 0 ? bf16_low(w_word) : bf16_high(w_word);
        x[2 * j + i] = r_q * d.r[j][2 * half + i] + of_r * r + r_w * w;
        y[2 * j + i] = w_k * d.w[j][2 * half + i] + of_w * w + w_r * r;
        if (!Shape::kOnline) continue;
        float de = e_k * d.e[j][2 * half + i];
        if constexpr (Shape::kGates) {
          z[2 * j + i] = e_w * w * d.e[j][2 * half + i];
          de *= i == 0 ? bf16_low(parts.gate[half][j]) : bf16_high(parts.gate[half][j]);
        }
        y[2 * j + i] += de;
      }
    }
    store_fragment(c, dq, wide_q, row, valid, x);
    store_fragment(c, dk, wide_k, row, valid, y);
    if constexpr (!Shape::kGates || !Shape::kOnline) continue;
    if (db.data != nullptr) store_fragment(c, db, wide_rows(db), row, valid, z);
  }
}

}  // namespace fw::cuda
