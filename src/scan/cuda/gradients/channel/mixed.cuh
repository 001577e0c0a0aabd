// Channel decay: the front of rows of any rule in any memory, and its gradients, where the products lie. What the
// streams were made of is read once more for them.
#pragma once

#include "scan/cuda/gradients/channel/row_words.cuh"
#include "scan/cuda/gradients/channel/values.cuh"

namespace fw::cuda {

// Lanes over the rows of the streams: a atom each.
template <class Shape>
struct StreamLanes {
  static constexpr int kLanes = Shape::kTileK / 8, kRows = Shape::kThreads / kLanes, kPasses = kChunk / kRows;
  static_assert(kPasses == 2);
};

// What the streams of a pass are made of, but for q and k.
struct RareWords {
  uint4 p, b;
  float m[8];
};

struct MixedRows {
  static constexpr uint32_t kOnes = 0x3f803f80;

  // q and k of both passes, a work tile ahead.
  template <class Shape>
  static FW_DEVICE RowWords load_words(const ChannelChunk<Shape>& c, int work_tile) {
    using Lanes = StreamLanes<Shape>;
    RowWords x = {};
    if (!c.has(work_tile)) return x;
    const Problem& p = c.args.problem;
    const Rows q = c.rows_at(p.in.q, work_tile), k = c.rows_at(p.in.k, work_tile);
    const int column = 8 * (c.thread % Lanes::kLanes);
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = c.thread / Lanes::kLanes + i * Lanes::kRows;
      if constexpr (Shape::kHalf) x.squares[i] = load_squares(c, work_tile, row);
      if (row >= c.rows(work_tile)) continue;
      x.q[i] = load_atom(q, row, column, p.K);
      x.k[i] = load_atom(k, row, column, p.K);
    }
    return x;
  }

  template <class Shape>
  static FW_DEVICE RareWords load_rare(const ChannelChunk<Shape>& c, int work_tile, int row) {
    const Problem& x = c.args.problem;
    const int column = 8 * (c.thread % StreamLanes<Shape>::kLanes), last = c.rows(work_tile) - 1,
              t = row < last ? row : last;
    RareWords y;
    y.p = make_uint4(0, 0, 0, 0), y.b = make_uint4(kOnes, kOnes, kOnes, kOnes);
    FW_UNROLL
    for (int j = 0; j < 8; ++j) y.m[j] = 1;
    if (x.rule.uses_erase_key()) y.p = load_atom(c.rows_at(x.in.erase_key, work_tile), t, column, x.K);
    if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel)
      y.b = load_atom(c.rows_at(x.in.erase_gate, work_tile), t, column, x.K);
    if (x.m != nullptr) load_channels(c.workspace_rows(WorkTile<Shape>::kM, x.H * x.K, work_tile), t, column, x.K, y.m);
    return y;
  }

  // r, e and w, anchored; z_v, the coefficients and scalars of rows. Of kPart in two calls: the coefficients and all
  // else of a row's scalars, and after that the streams.
  enum class Part { kAll, kScalars, kStreams };
  template <Part kPart = Part::kAll, class Shape>
  static FW_DEVICE void make_streams(const ChannelChunk<Shape>& c, int work_tile, RowWords words) {
    using Lanes = StreamLanes<Shape>;
    const Problem& x = c.args.problem;
    const Rule& rule = x.rule;
    const int lane = c.thread % Lanes::kLanes;
    RareWords rare = load_rare(c, work_tile, c.thread / Lanes::kLanes);
    FW_NO_UNROLL
    for (int row = c.thread / Lanes::kLanes; row < kChunk; row += Lanes::kRows) {
      const bool valid = row < c.rows(work_tile);
      const int t = valid ? row : c.rows(work_tile) - 1;
      RawKeyRow<8> raw;
      unpack_8(words.q[0], raw.q), unpack_8(words.k[0], raw.k), unpack_8(rare.p, raw.p), unpack_8(rare.b, raw.b);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) raw.m[j] = rare.m[j];
      words.q[0] = words.q[1], words.k[0] = words.k[1];
      if (row + Lanes::kRows < kChunk) rare = load_rare(c, work_tile, row + Lanes::kRows);
      if constexpr (kPart == Part::kStreams) {
        store_streams(c, row, lane, reinterpret_cast<const FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row], raw);
        continue;
      }

      FrontScalars<float> s;
      float kmk = 0;
      FW_UNROLL
      for (int j = 0; j < 8; ++j)
        s.q2 += raw.q[j] * raw.q[j], s.k2 += raw.k[j] * raw.k[j], s.p2 += raw.p[j] * raw.p[j],
            kmk += raw.m[j] * raw.k[j] * raw.k[j];
      if constexpr (Shape::kHalf) {
        s.q2 = words.squares[0].x, s.k2 = words.squares[0].y;
        words.squares[0] = words.squares[1];
      } else {
        s.q2 = group_sum<Lanes::kLanes>(s.q2);
        s.k2 = group_sum<Lanes::kLanes>(s.k2);
      }
      if (rule.uses_erase_key()) s.p2 = group_sum<Lanes::kLanes>(s.p2);
      if (rule.uses_key_form()) s.kmk = group_sum<Lanes::kLanes>(kmk);
      s.beta = c.work_tile_floats(Shape::kBeta, work_tile)[row];
      FrontCoefs<float> f;
      if (plain_front(rule) && rule.erase == Gate::kTied && rule.write == Gate::kTied) {
        f = front_coefs(reduced_rule<true>(rule), x.scale, s);
      } else {
        rare_scalars<Lanes::kLanes>(c, work_tile, t, lane, s);
        f = front_coefs(rule, x.scale, s);
      }
      if (!valid) f = FrontCoefs<float>();

      if constexpr (kPart == Part::kAll) store_streams(c, row, lane, f, raw);
      if (lane == 0) {
        c.floats(Shape::kZv)[row] = f.z_v;
        reinterpret_cast<FrontScalars<float>*>(c.memory + Shape::kScalars)[row] = s;
        reinterpret_cast<FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row] = f;
      }
    }
  }

  // dr, de, dw and dG, which is stored after a barrier; in place of the sums dq, dk and the gradient of an own
  // erase key but for what row_scales() has a part in. Q and k in place of r and w; the sums of rows; the
  // gradients of a channel erase gate and of M, the latter but for the normaliser's part.
  template <class Shape>
  static FW_DEVICE void finish_streams(ChannelChunk<Shape>& c, int work_tile, StreamSums& sums) {
    const Problem& x = c.args.problem;
    const Rule& rule = x.rule;
    const bool on_read = rule.preconditions_read(), own = rule.uses_erase_key();
    const bool gated = rule.uses_erase_gate() && rule.erase == Gate::kChannel;
    uint32_t e_words[2][4];
    FW_UNROLL
    for (int j = 0; j < 2 && Shape::kDelta; ++j)
      load_left(e_words[j], c.base + Shape::kErase, 16 * c.block_row(), 32 * c.group() + 16 * j, c.lane);
    sync_threads();  // -e and dP and dT have been read
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      c.refresh();
      const int row = c.row() + 8 * half;
      const bool valid = row < c.rows(work_tile);
      const FrontCoefs<float>& f = reinterpret_cast<const FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row];
      {
        uint32_t q_words[4], k_words[4];
        float m[8];
        fragment_words(c, c.rows_at(x.in.q, work_tile), work_tile, row, q_words);
        fragment_words(c, c.rows_at(x.in.k, work_tile), work_tile, row, k_words);
        fragment_m(c, work_tile, row, m);
        const float r_q = f.r_q, r_k = f.r_k, w_k = f.w_k, diagonal = c.floats(Shape::kDiagonal)[row];
        float q_dr = 0, k_dr = 0, k_dw = 0;
        FW_UNROLL
        for (int j = 0; j < 4; ++j) {
          uint32_t &r_word = c.fragment(Shape::kRead, half, j), &w_word = c.fragment(Shape::kWrite, half, j);
          const uint32_t factors = c.fragment(Shape::kFactors, half, j);
          float d_g[2], dm[2];
          FW_UNROLL
          for (int i = 0; i < 2; ++i) {
            const auto value = [&](uint32_t word) { return i == 0 ? bf16_low(word) : bf16_high(word); };
            float &dr = sums.r[j][2 * half + i], &de = sums.e[j][2 * half + i], &dw = sums.w[j][2 * half + i];
            const float factor = value(factors), inverse = rcp_fast(factor), r = value(r_word), w = value(w_word);
            d_g[i] = r * dr - w * dw;
            if (Shape::kDelta) d_g[i] += value(e_words[j / 2][half + j % 2 * 2]) * de, de *= -factor;
            dr = dr * factor + diagonal * (w * factor);
            dw = dw * inverse + diagonal * (r * inverse);
            const float q = value(q_words[j]), k = value(k_words[j]), at = m[2 * j + i];
            const float mdr = on_read ? at * dr : dr, mdw = on_read ? dw : at * dw;
            dm[i] = on_read ? dr * FrontElements<PlainMath<float>>::read(r_q, r_k, q, k) : dw * w_k * k;
            q_dr += q * mdr, k_dr += k * mdr, k_dw += k * mdw;
            dr = r_q * mdr, dw = w_k * mdw + r_k * mdr;
          }
          store_float2(decay_sum(c, row, c.column() + 8 * j), d_g[0], d_g[1]);
          r_word = q_words[j], w_word = k_words[j];
          if (x.m != nullptr && valid)
            store_pair(c.workspace_rows(WorkTile<Shape>::kDM, x.HV * x.K, work_tile), row, c.column() + 8 * j, x.K,
                       make_float2(dm[0], dm[1]));
        }
        store_row_sum(c, 0, row, q_dr), store_row_sum(c, 1, row, k_dr), store_row_sum(c, 5, row, k_dw);
      }
      if (!Shape::kDelta) continue;
      c.refresh();
      uint32_t p[4] = {}, b[4] = {kOnes, kOnes, kOnes, kOnes};
      if (own) fragment_words(c, c.rows_at(x.in.erase_key, work_tile), work_tile, row, p);
      if (gated) fragment_words(c, c.rows_at(x.in.erase_gate, work_tile), work_tile, row, b);
      const Rows db_rows = gated ? c.rows_at(c.args.grads.d.erase_gate, work_tile) : Rows{};
      const float e_k = f.e_k, e_q = f.e_q, e_p = f.e_p;
      float k_de = 0, q_de = 0, p_de = 0;
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint32_t q_word = c.fragment(Shape::kRead, half, j), k_word = c.fragment(Shape::kWrite, half, j);
        float db[2];
        FW_UNROLL
        for (int i = 0; i < 2; ++i) {
          const auto value = [&](uint32_t word) { return i == 0 ? bf16_low(word) : bf16_high(word); };
          float& de = sums.e[j][2 * half + i];
          const float q = value(q_word), k = value(k_word), key = value(p[j]), bde = value(b[j]) * de;
          db[i] = de * erase_of(e_k, e_q, e_p, k, q, key);
          k_de += k * bde, q_de += q * bde, p_de += key * bde;
          sums.r[j][2 * half + i] += e_q * bde, sums.w[j][2 * half + i] += e_k * bde, de = e_p * bde;
        }
        if (gated && valid && db_rows.data != nullptr)
          store_pair(db_rows, row, c.column() + 8 * j, x.K, make_float2(db[0], db[1]));
      }
      store_row_sum(c, 2, row, k_de), store_row_sum(c, 3, row, q_de), store_row_sum(c, 4, row, p_de);
    }
  }

  // By a thread a row.
  template <class Shape>
  static FW_DEVICE void row_scales(const ChannelChunk<Shape>& c, int work_tile, int row) {
    const Problem& x = c.args.problem;
    const Rule& rule = x.rule;
    const HeadGradients& out = c.args.grads;
    FrontCoefs<float> d;
    d.r_q = row_sum(c, 0, row), d.r_k = row_sum(c, 1, row), d.w_k = row_sum(c, 5, row);
    if (Shape::kDelta) d.e_k = row_sum(c, 2, row), d.e_q = row_sum(c, 3, row), d.e_p = row_sum(c, 4, row);
    const float z_v = c.floats(Shape::kZv)[row];
    d.z_v = first_half_alone(c, c.floats(Shape::kDZv)[row]);
    if (c.residual_gains() && gain_by_residual(z_v))
      d.z_v = value_coefficient_gradient(
          d.z_v, erase_sum(reinterpret_cast<const FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row], d), z_v);
    const FrontScalars<float> s = reinterpret_cast<const FrontScalars<float>*>(c.memory + Shape::kScalars)[row];
    const bool valid = row < c.rows(work_tile);
    FrontScalars<float> ds;
    if (plain_front(rule) && rule.erase == Gate::kTied && rule.write == Gate::kTied) {
      ds = front_coefs_vjp(reduced_rule<true>(rule), x.scale, s, d);
    } else {
      ds = front_coefs_vjp(rule, x.scale, s, d);
      if (valid) {
        store_gate<1>(c.rows_at(out.d.erase_gate, work_tile), rule.erase, row, 0, x.K, ds.erase);
        store_gate<1>(c.rows_at(out.d.write_gate, work_tile), rule.write, row, 0, x.V, ds.write);
        for_all_scalars<Numbers::kExceptBeta>(
            [&](const TokenArg& to, float y) { store_one(c.rows_at(to, work_tile), row, y); }, out.d, ds);
        if constexpr (!Shape::kHalf) {
          store_one(c.workspace_rows(WorkTile<Shape>::kDAlpha, x.HV, work_tile), row, ds.alpha_p * s.alpha_p);
          store_one(c.workspace_rows(WorkTile<Shape>::kDBeta, x.HV, work_tile), row, ds.beta_p);
        }
      }
    }
    if (valid) store_one(c.rows_at(out.d.beta, work_tile), row, ds.beta);
    if (x.m == nullptr) ds.k2 += ds.kmk;  // k.(M k) is |k|^2
    float2 of = make_float2(2 * ds.q2, 2 * ds.k2);
    if constexpr (Shape::kHalf) of = join_half_slopes(c, work_tile, row, true, of);
    *reinterpret_cast<float4*>(c.floats(Shape::kSlopes) + 4 * row) = make_float4(of.x, of.y, 2 * ds.p2, ds.kmk);
  }

  // dq, dk, the gradient of an own erase key, and what is left of M's.
  template <class Shape>
  static FW_DEVICE void store_gradients(const ChannelChunk<Shape>& c, int work_tile, const StreamSums& sums) {
    const Problem& x = c.args.problem;
    const HeadGradients& out = c.args.grads;
    const bool own = x.rule.uses_erase_key(), normalised = x.rule.uses_key_form() && x.m != nullptr;
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      const bool valid = row < c.rows(work_tile);
      const float4 of = *reinterpret_cast<const float4*>(c.floats(Shape::kSlopes) + 4 * row);
      float q[8], k[8];
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint32_t q_word = c.fragment(Shape::kRead, half, j), k_word = c.fragment(Shape::kWrite, half, j);
        q[2 * j] = sums.r[j][2 * half] + of.x * bf16_low(q_word),
              q[2 * j + 1] = sums.r[j][2 * half + 1] + of.x * bf16_high(q_word);
        k[2 * j] = sums.w[j][2 * half] + of.y * bf16_low(k_word),
              k[2 * j + 1] = sums.w[j][2 * half + 1] + of.y * bf16_high(k_word);
      }
      if (normalised) {
        const Rows dm = c.workspace_rows(WorkTile<Shape>::kDM, x.HV * x.K, work_tile);
        float m[8];
        fragment_m(c, work_tile, row, m);
        FW_UNROLL
        for (int j = 0; j < 4; ++j) {
          const uint32_t k_word = c.fragment(Shape::kWrite, half, j);
          const float low = bf16_low(k_word), high = bf16_high(k_word);
          k[2 * j] += 2 * of.w * m[2 * j] * low, k[2 * j + 1] += 2 * of.w * m[2 * j + 1] * high;
          if (!valid) continue;
          const float2 before = load_pair(dm, row, c.column() + 8 * j, x.K);
          store_pair(dm, row, c.column() + 8 * j, x.K,
                     make_float2(before.x + of.w * low * low, before.y + of.w * high * high));
        }
      }
      store(c, c.rows_at(out.d.q, work_tile), row, valid, q);
      store(c, c.rows_at(out.d.k, work_tile), row, valid, k);
      if (!Shape::kDelta || !own) continue;
      uint32_t p[4];
      float y[8];
      fragment_words(c, c.rows_at(x.in.erase_key, work_tile), work_tile, row, p);
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        y[2 * j] = sums.e[j][2 * half] + of.z * bf16_low(p[j]),
              y[2 * j + 1] = sums.e[j][2 * half + 1] + of.z * bf16_high(p[j]);
      }
      store(c, c.rows_at(out.d.erase_key, work_tile), row, valid, y);
    }
  }

 private:
  // 8 channels of a row.
  template <class Shape>
  static FW_DEVICE void store_streams(const ChannelChunk<Shape>& c, int row, int lane, const FrontCoefs<float>& f,
                                      const RawKeyRow<8>& raw) {
    KeyStreams<8> streams = key_streams(c.args.problem, f, raw);
    const uint32_t at = sw128_offset(row, 8 * lane);
    anchor_8(*reinterpret_cast<const uint4*>(c.memory + Shape::kFactors + at), streams.r, streams.e, streams.w);
    *reinterpret_cast<uint4*>(c.memory + Shape::kRead + at) = pack_8(streams.r);
    *reinterpret_cast<uint4*>(c.memory + Shape::kWrite + at) = pack_8(streams.w);
    if (Shape::kDelta) *reinterpret_cast<uint4*>(c.memory + Shape::kErase + at) = pack_8(streams.e);
  }

  // As store_row_sums(). kSumsInFactors: a row's factors of the group's columns have been read by those four lanes
  // alone, and the sums take their place.
  template <class Shape>
  static FW_DEVICE float& sum_at(const ChannelChunk<Shape>& c, int sum, int group, int row) {
    if constexpr (Shape::kSumsInFactors) {
      return reinterpret_cast<float&>(c.word(Shape::kFactors, row, 32 * group + 2 * sum));
    } else {
      return c.floats(Shape::kPartial)[(sum * Shape::kGroups + group) * 64 + row];
    }
  }
  template <class Shape>
  static FW_DEVICE void store_row_sum(const ChannelChunk<Shape>& c, int sum, int row, float x) {
    x += shuffle_xor(x, 1);
    x += shuffle_xor(x, 2);
    if constexpr (Shape::kSumsInFactors) sync_warp();
    if ((c.lane & 3) == 0) sum_at(c, sum, c.group(), row) = x;
  }
  template <class Shape>
  static FW_DEVICE float row_sum(const ChannelChunk<Shape>& c, int sum, int row) {
    if constexpr (Shape::kSumsInFactors) {
      float y = sum_at(c, sum, 0, row);
      FW_UNROLL
      for (int i = 1; i < Shape::kGroups; ++i) y += sum_at(c, sum, i, row);
      return y;
    } else {
      return fw::cuda::row_sum(c, sum, row);
    }
  }

  // As front_gates, but for beta; the means of averaged gates.
  template <int kLanes, class Shape>
  static FW_DEVICE void rare_scalars(const ChannelChunk<Shape>& c, int work_tile, int t, int lane,
                                     FrontScalars<float>& s) {
    const Problem& x = c.args.problem;
    const Rule& rule = x.rule;
    const auto mean = [&](const TokenArg& from, int dim) {
      const Rows rows = c.rows_at(from, work_tile);
      float sum = 0;
      FW_NO_UNROLL
      for (int i = lane; i < dim; i += kLanes) sum += load_element(rows, t, i);
      return group_sum<kLanes>(sum) / static_cast<float>(dim);
    };
    load_gates<Numbers::kExceptBeta>(
        rule, x.m != nullptr, s, [&](const TokenArg& from) { return load_element(c.rows_at(from, work_tile), t, 0); },
        x.in);
    if (rule.uses_erase_gate() && rule.erase == Gate::kAveraged) s.erase = mean(x.in.erase_gate, x.K);
    if (rule.write == Gate::kAveraged) s.write = mean(x.in.write_gate, x.V);
  }

  // A row's words in the products: columns c.column() + 8 j and the next; 0 past the last row. All lanes together.
  template <class Shape>
  static FW_DEVICE void fragment_words(const ChannelChunk<Shape>& c, const Rows& rows, int work_tile, int row,
                                       uint32_t (&words)[4]) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < c.rows(work_tile)) x = load_atom(rows, row, 32 * c.group() + 8 * (c.lane & 3), c.args.problem.K);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    transpose_quad(words, c.lane);
  }
  // 1 where there is none.
  template <class Shape>
  static FW_DEVICE void fragment_m(const ChannelChunk<Shape>& c, int work_tile, int row, float (&m)[8]) {
    const Problem& x = c.args.problem;
    const Rows rows = c.workspace_rows(WorkTile<Shape>::kM, x.H * x.K, work_tile);
    const bool there = rows.data != nullptr && row < c.rows(work_tile);
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float2 y = there ? load_pair(rows, row, c.column() + 8 * j, x.K) : make_float2(1, 1);
      m[2 * j] = y.x, m[2 * j + 1] = y.y;
    }
  }
  template <class Shape>
  static FW_DEVICE void store(const ChannelChunk<Shape>& c, const Rows& rows, int row, bool valid,
                              const float (&x)[8]) {
    store_fragment(c, rows, rows.data != nullptr && wide_rows(rows) && c.args.problem.K % 8 == 0, row, valid, x);
  }
};

}  // namespace fw::cuda
