// Scalar decay: the front of rows and its gradients, elementwise, for any rule and any memory; pieces of it for the
// other kernels.
#pragma once

#include "scan/cuda/gradients/phases.cuh"

namespace fw::cuda {

// A row's 8 numbers of a thread, columns c.column() + 8 j and the next; all lanes together.
template <class Shape>
FW_DEVICE void store_fragment(const WorkTile<Shape>& c, const Rows& out, bool wide, int64_t t, bool valid,
                              const float (&x)[8]) {
  const int limit = c.args.problem.K;
  if (wide) {
    uint32_t w[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
    transpose_quad(w, c.lane);
    const int column = 32 * c.group() + 8 * (c.lane & 3);
    if (valid && column < limit)
      *reinterpret_cast<uint4*>(out.data + 2 * (t * out.stride + column)) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
  if (!valid || out.data == nullptr) return;
  const int64_t at = t * out.stride + c.column();
  float* floats = reinterpret_cast<float*>(out.data) + at;
  const bool pairs = out.bf16 == 0 && limit % 2 == 0 && (reinterpret_cast<uintptr_t>(floats) & 7) == 0;
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    const int column = c.column() + 8 * j;
    if (pairs) {
      if (column < limit) *reinterpret_cast<float2*>(floats + 8 * j) = make_float2(x[2 * j], x[2 * j + 1]);
    } else {
      if (column < limit) store_element(out, t, column, x[2 * j]);
      if (column + 1 < limit) store_element(out, t, column + 1, x[2 * j + 1]);
    }
  }
}

FW_DEVICE float inverse_or_zero(float x) { return x != 0.0f ? rcp_fast(x) : 0.0f; }

// For pairs of columns of a row, as a thread has them in products: c.column() + 8 j and the next.
struct RareRow {
  float m[8];
  uint32_t b[4], p[4], q[4], k[4];  // bf16

  template <class Shape>
  FW_DEVICE RareRow(const WorkTile<Shape>& c, const FrontRows& front, int64_t t, bool valid, int half) {
    const Problem& x = c.args.problem;
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      m[2 * j] = m[2 * j + 1] = 1, b[j] = kOnes, p[j] = 0;
      q[j] = c.fragment(Shape::kRaw, half, j), k[j] = c.fragment(Shape::kRaw + Shape::kStateBytes, half, j);
    }
    // another thread may write dM over M of the row that stands for one beyond the end
    if (front.m != nullptr && valid) {
      const Rows rows{reinterpret_cast<char*>(const_cast<float*>(front.m)), front.m_stride, 0};
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float2 y = load_pair(rows, t, c.column() + 8 * j, x.K);
        m[2 * j] = y.x, m[2 * j + 1] = y.y;
      }
    }
    if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel) load(c, front.erase_gate, t, b);
    if (x.rule.uses_erase_key()) load(c, front.erase_key, t, p);
  }
  FW_DEVICE RawKeyRow<2> pair(int j) const {
    RawKeyRow<2> y;
    y.q[0] = bf16_low(q[j]), y.q[1] = bf16_high(q[j]), y.k[0] = bf16_low(k[j]), y.k[1] = bf16_high(k[j]);
    y.p[0] = bf16_low(p[j]), y.p[1] = bf16_high(p[j]), y.b[0] = bf16_low(b[j]), y.b[1] = bf16_high(b[j]);
    y.m[0] = m[2 * j], y.m[1] = m[2 * j + 1];
    return y;
  }

 private:
  static constexpr uint32_t kOnes = 0x3f803f80;
  template <class Shape>
  static FW_DEVICE void load(const WorkTile<Shape>& c, const Rows& rows, int64_t t, uint32_t (&to)[4]) {
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float2 y = load_pair(rows, t, c.column() + 8 * j, c.args.problem.K);
      to[j] = pack_bf16(y.x, y.y);
    }
  }
};

struct GeneralRows {
  static FW_DEVICE FrontCoefs<float> coefficients(const Problem& x, const FrontScalars<float>& s) {
    return plain_front(x.rule) ? front_coefs(reduced_rule<false>(x.rule), x.scale, s) : front_coefs(x.rule, x.scale, s);
  }

  template <class Shape>
  static FW_DEVICE void make_streams(const WorkTile<Shape>& c, int work_tile) {
    constexpr int kLanes = Shape::kTileK / 8, kRows = Shape::kThreads / kLanes;
    const Problem& x = c.args.problem;
    FrontRows front = c.front(work_tile);
    const int lane = c.thread % kLanes;
    FW_NO_UNROLL
    for (int row = c.thread / kLanes; row < kChunk; row += kRows) {
      const bool valid = row < c.rows(work_tile);
      const int t = valid ? row : c.rows(work_tile) - 1;
      const uint32_t at = sw128_offset(row, 8 * lane);
      RawKeyRow<8> raw;
      unpack_8(*reinterpret_cast<const uint4*>(c.memory + Shape::kFrontQ + at), raw.q);
      unpack_8(*reinterpret_cast<const uint4*>(c.memory + Shape::kFrontK + at), raw.k);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) raw.p[j] = 0, raw.b[j] = raw.m[j] = 1;
      if (x.rule.uses_erase_key()) load_channels(front.erase_key, t, 8 * lane, x.K, raw.p);
      if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel)
        load_channels(front.erase_gate, t, 8 * lane, x.K, raw.b);
      if (front.m != nullptr)
        load_channels(Rows{reinterpret_cast<char*>(const_cast<float*>(front.m)), front.m_stride, 0}, t, 8 * lane, x.K,
                      raw.m);
      FrontScalars<float> s = front_scalars<kLanes>(x, front, raw, t, lane);
      if constexpr (Shape::kHalf) {
        const float2 squares = squares_of_row(c, work_tile, t);
        s.q2 = squares.x, s.k2 = squares.y;
      }
      FrontCoefs<float> f = coefficients(x, s);
      if constexpr (Shape::kUnscaled) f = unscaled_coefs(f).primed;
      KeyStreams<8> streams = key_streams(x, f, raw);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) {
        if (!valid) streams.r[j] = streams.e[j] = streams.w[j] = 0;
      }
      *reinterpret_cast<uint4*>(c.memory + Shape::kRead + at) = pack_8(streams.r);
      *reinterpret_cast<uint4*>(c.memory + Shape::kWrite + at) = pack_8(streams.w);
      if (Shape::kDelta) *reinterpret_cast<uint4*>(c.memory + Shape::kErase + at) = pack_8(streams.e);
      if (lane == 0) {
        c.floats(Shape::kZv)[row] = valid ? f.z_v : 0.0f;
        reinterpret_cast<FrontScalars<float>*>(c.memory + Shape::kScalars)[row] = s;
        reinterpret_cast<FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row] = f;
      }
    }
  }

  // A row of the work tile in the products.
  template <class Shape>
  struct Row {
    const WorkTile<Shape>& c;
    const StreamSums& sums;
    int row, half;
    float diagonal;
    RareRow rare;

    FW_DEVICE Row(const WorkTile<Shape>& chunk, const StreamSums& d, const FrontRows& front, int work_tile, int at)
        : c(chunk),
          sums(d),
          row(chunk.row() + 8 * at),
          half(at),
          diagonal(chunk.floats(Shape::kDiagonal)[chunk.row() + 8 * at]),
          rare(chunk, front, chunk.first(work_tile) + min(row, chunk.rows(work_tile) - 1), row < chunk.rows(work_tile),
               at) {}
    FW_DEVICE uint32_t word(int tile, int j) const { return c.fragment(tile, half, j); }
    FW_DEVICE RawKeyRow<2> raw(int j) const { return rare.pair(j); }
    // dr, de, dw of two columns.
    FW_DEVICE KeyStreams<2> gradients(int j) const {
      const uint32_t r = word(Shape::kRead, j), w = word(Shape::kWrite, j);
      KeyStreams<2> y;
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        y.r[i] = sums.r[j][2 * half + i] + diagonal * (i == 0 ? bf16_low(w) : bf16_high(w));
        y.e[i] = Shape::kDelta ? sums.e[j][2 * half + i] : 0.0f;
        y.w[i] = sums.w[j][2 * half + i] + diagonal * (i == 0 ? bf16_low(r) : bf16_high(r));
      }
      return y;
    }
  };

  template <class Shape>
  static FW_DEVICE void sum_rows(const WorkTile<Shape>& c, int work_tile, const StreamSums& d) {
    const Problem& x = c.args.problem;
    const FrontRows front = c.front(work_tile);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Row<Shape> row(c, d, front, work_tile, half);
      float sums[Shape::kSums] = {};
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int i = 2 * half;
        const FrontCoefs<float> f = key_coefficient_gradients(x, row.raw(j), row.gradients(j));
        sums[0] += f.r_q, sums[1] += f.r_k, sums[2] += f.e_k, sums[3] += f.e_q, sums[4] += f.e_p, sums[5] += f.w_k;
        const uint32_t r = row.word(Shape::kRead, j), w = row.word(Shape::kWrite, j);
        sums[6] += bf16_low(r) * d.r[j][i] + bf16_high(r) * d.r[j][i + 1] - bf16_low(w) * d.w[j][i] -
                   bf16_high(w) * d.w[j][i + 1];
        if (!Shape::kDelta) continue;
        const uint32_t e = row.word(Shape::kErase, j);
        sums[6] += bf16_low(e) * d.e[j][i] + bf16_high(e) * d.e[j][i + 1];
      }
      store_row_sums(c, row.row, sums);
    }
  }

  template <class Shape>
  static FW_DEVICE void row_scales(const WorkTile<Shape>& c, int work_tile, int row) {
    const Problem& x = c.args.problem;
    const Rule& rule = x.rule;
    const HeadGradients& out = c.args.grads;
    FrontCoefs<float> d;
    d.r_q = row_sum(c, 0, row), d.r_k = row_sum(c, 1, row), d.e_k = row_sum(c, 2, row), d.e_q = row_sum(c, 3, row),
    d.e_p = row_sum(c, 4, row);
    d.w_k = row_sum(c, 5, row);
    d.z_v = Shape::kHalf && c.args.half.second ? 0.0f : c.floats(Shape::kDZv)[row];  // the first half has it
    float d_g = row_sum(c, 6, row);
    if constexpr (Shape::kNoDecayFix) {
      if (NoDecayState<Shape>(c, work_tile).still) {
        const float r_q = reinterpret_cast<const FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row].r_q;
        d_g = r_q * d.r_q - c.floats(Shape::kZv)[row] * c.floats(Shape::kVDz)[row];
      }
    }
    c.floats(Shape::kDG)[row] = d_g;
    const FrontScalars<float> s = reinterpret_cast<const FrontScalars<float>*>(c.memory + Shape::kScalars)[row];
    const float r_dz = d.z_v, z_v = c.floats(Shape::kZv)[row];
    UnscaledCoefs unscaled;
    const bool residual = c.residual_gains() && gain_by_residual(z_v);
    if constexpr (Shape::kUnscaled) {
      unscaled = unscaled_coefs(coefficients(x, s)), of_unscaled_coefs(d, unscaled.a, unscaled.b);
    } else if (residual) {
      d.z_v = value_coefficient_gradient(
          r_dz, erase_sum(reinterpret_cast<const FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row], d), z_v);
    }
    FrontScalars<float> ds = plain_front(rule) ? front_coefs_vjp(reduced_rule<false>(rule), x.scale, s, d)
                                               : front_coefs_vjp(rule, x.scale, s, d);
    if (Shape::kUnscaled && residual) ds.beta = unscaled_gain_gradient(r_dz, unscaled.a, unscaled.b, s.beta);
    if constexpr (Shape::kHalf) {
      const float2 of = join_half_slopes(c, work_tile, row, true, make_float2(2.0f * ds.q2, 2.0f * ds.k2));
      ds.q2 = 0.5f * of.x, ds.k2 = 0.5f * of.y;
    }
    *reinterpret_cast<float4*>(c.floats(Shape::kSlopes) + 4 * row) = make_float4(ds.q2, ds.k2, ds.p2, ds.kmk);
    if (row >= c.rows(work_tile)) return;
    const int t = row;
    store_gate<1>(c.rows_at(out.d.erase_gate, work_tile), rule.erase, t, 0, x.K, ds.erase);
    store_gate<1>(c.rows_at(out.d.write_gate, work_tile), rule.write, t, 0, x.V, ds.write);
    for_all_scalars([&](const TokenArg& to, float y) { store_one(c.rows_at(to, work_tile), t, y); }, out.d, ds);
    if constexpr (!Shape::kHalf) {
      store_one(c.workspace_rows(WorkTile<Shape>::kDAlpha, x.HV, work_tile), row, ds.alpha_p * s.alpha_p);
      store_one(c.workspace_rows(WorkTile<Shape>::kDBeta, x.HV, work_tile), row, ds.beta_p);
    }
  }

  template <class Shape>
  static FW_DEVICE void store_gradients(const WorkTile<Shape>& c, int work_tile, const StreamSums& sums) {
    const Problem& x = c.args.problem;
    const HeadGradients& out = c.args.grads;
    const FrontRows front = c.front(work_tile);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Row<Shape> row(c, sums, front, work_tile, half);
      const bool valid = row.row < c.rows(work_tile);
      const int t = row.row;
      const FrontCoefs<float> f = reinterpret_cast<const FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row.row];
      const float4 slopes = *reinterpret_cast<const float4*>(c.floats(Shape::kSlopes) + 4 * row.row);
      FrontScalars<float> ds;
      ds.q2 = slopes.x, ds.k2 = slopes.y, ds.p2 = slopes.z, ds.kmk = slopes.w;
      const auto store = [&](const Rows& rows, int64_t token, float(RawKeyRow<2>::*of)[2]) {
        if (rows.data == nullptr) return;
        float y[8];
        FW_UNROLL
        for (int j = 0; j < 4; ++j) {
          const RawKeyRow<2> g = key_row_gradients(x, f, ds, row.raw(j), row.gradients(j));
          y[2 * j] = (g.*of)[0], y[2 * j + 1] = (g.*of)[1];
        }
        store_fragment(c, rows, wide_rows(rows) && x.K % 8 == 0, token, valid, y);
      };
      store(c.rows_at(out.d.q, work_tile), t, &RawKeyRow<2>::q);
      store(c.rows_at(out.d.k, work_tile), t, &RawKeyRow<2>::k);
      if (x.rule.uses_erase_key()) store(c.rows_at(out.d.erase_key, work_tile), t, &RawKeyRow<2>::p);
      if (x.rule.erase == Gate::kChannel) store(c.rows_at(out.d.erase_gate, work_tile), t, &RawKeyRow<2>::b);
      store(c.workspace_rows(WorkTile<Shape>::kDM, x.HV * x.K, work_tile), t, &RawKeyRow<2>::m);
    }
  }
};

}  // namespace fw::cuda
