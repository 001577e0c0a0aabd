// Scalar decay: the front of rows and its gradients, elementwise. Two forms: FastRows, where r, e and w are q and k, or sums of the two,
// times numbers a row (the tiles of r and w give q and k back), and GeneralRows for any rule and any memory.
#pragma once

#include "scan/cuda/device/gradient_scalar.cuh"

namespace fw::cuda {

// From lane l having words j = 0 .. 3 for columns 8 j + 2 l and the next, to columns 8 l .. 8 l + 7.
FW_DEVICE void transpose_quad(uint32_t (&w)[4], int lane) {
  const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
  const uint32_t a = shuffle_xor(odd ? w[0] : w[1], 1), b = shuffle_xor(odd ? w[2] : w[3], 1);
  const uint32_t x0 = odd ? a : w[0], x1 = odd ? w[1] : a, x2 = odd ? b : w[2], x3 = odd ? w[3] : b;
  const uint32_t c = shuffle_xor(high ? x0 : x2, 2), d = shuffle_xor(high ? x1 : x3, 2);
  w[0] = high ? c : x0, w[1] = high ? d : x1, w[2] = high ? x2 : c, w[3] = high ? x3 : d;
}

// A row's 8 numbers of a thread, columns c.column() + 8 j and the next; all lanes together.
template <class Shape>
FW_DEVICE void store_fragment(const ScalarChunk<Shape>& c, const Rows& out, bool wide, int64_t t, bool valid, const float (&x)[8]) {
  const int limit = c.args.problem.K;
  if (wide) {
    uint32_t w[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
    transpose_quad(w, c.lane);
    const int column = 32 * c.group() + 8 * (c.lane & 3);
    if (valid && column < limit) *reinterpret_cast<uint4*>(out.data + 2 * (t * out.stride + column)) = make_uint4(w[0], w[1], w[2], w[3]);
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

// M of a thread's columns in the products, 1 past K and the last row.
template <class Shape>
struct FragmentM {
  float m[2][8];

  FW_DEVICE FragmentM(const ScalarChunk<Shape>& c, int turn) {
    if constexpr (Shape::kPrecond) {
      const int K = c.args.problem.K;
      const Rows rows = c.workspace_rows(ScalarChunk<Shape>::kM, c.args.problem.H * K, turn);
      FW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = c.row() + 8 * half;
        const float* from = reinterpret_cast<const float*>(rows.data) + row * rows.stride + c.column();
        FW_UNROLL
        for (int j = 0; j < 4; ++j) {
          const bool valid = row < c.rows(turn) && c.column() + 8 * j < K;
          const float2 x = valid ? *reinterpret_cast<const float2*>(from + 8 * j) : make_float2(1, 1);
          m[half][2 * j] = x.x, m[half][2 * j + 1] = x.y;
        }
      }
    }
  }
};

FW_DEVICE float inverse_or_zero(float x) { return x != 0.0f ? rcp_fast(x) : 0.0f; }

struct FastRows {
  // Of even and odd turns: |q|^2, |k|^2 and r.w of rows, then the coefficients r_q, w_k, e_k, r_k, e_q.
  template <class Shape>
  static FW_DEVICE float* scalars(const ScalarChunk<Shape>& c, int turn) {
    return c.floats(Shape::kScalars) + 512 * (turn & 1);
  }
  template <class Shape>
  static FW_DEVICE float* coefficients(const ScalarChunk<Shape>& c, int turn) {
    return scalars(c, turn) + 192;
  }

  // Whether the reduced rule has it all, and whether r_k and e_q are 0.
  template <class Shape>
  static FW_DEVICE bool plain(const ScalarChunk<Shape>& c) {
    return !Shape::kLinear || c.pieces(kPlainRule);
  }
  template <class Shape>
  static FW_DEVICE bool mixed(const ScalarChunk<Shape>& c) {
    return Shape::kLinear && c.pieces(kMixedRule);
  }

  // Of a row: beta and, if not plain, the other numbers.
  template <class Shape>
  static FW_DEVICE void gates(const ScalarChunk<Shape>& c, int turn, int row, FrontScalars<float>& s) {
    s.beta = c.turn_floats(Shape::kBeta, turn)[row];
    if constexpr (Shape::kLinear) {
      if (plain(c)) return;
      const float* x = c.gate_numbers(turn) + row;
      s.lambda = x[0], s.read = x[64], s.erase = x[128], s.write = x[192];
    }
  }
  template <class Shape>
  static FW_DEVICE FrontCoefs<float> coefs(const ScalarChunk<Shape>& c, const FrontScalars<float>& s) {
    const Problem& x = c.args.problem;
    if constexpr (Shape::kLinear) {
      if (!plain(c)) return front_coefs(linear_rule(x.rule), x.scale, s);
    }
    return front_coefs(reduced_rule<true>(x.rule), x.scale, s);
  }

  // r, e, w in the place of q and k and beside them; z_v; the scalars of rows for the gradients.
  template <class Shape>
  static FW_DEVICE void make_streams(const ScalarChunk<Shape>& c, int turn) {
    constexpr int kLanes = Shape::kKey / 16;
    const Problem& x = c.args.problem;
    const int row = c.thread / kLanes, lane = c.thread % kLanes;
    char* q_at = c.memory + Shape::kRead + c.key_offset(turn);
    const bool on_read = x.rule.preconditions_read();
    float m[2][8];
    if constexpr (Shape::kPrecond) {
      const Rows rows = c.workspace_rows(ScalarChunk<Shape>::kM, x.H * x.K, turn);
      const int last = c.rows(turn) - 1;
      FW_UNROLL
      for (int i = 0; i < 2; ++i) load_channels(rows, row < last ? row : last, 8 * (lane + kLanes * i), x.K, m[i]);
      mbarrier_wait(c.key_barrier(turn), turn / 2 & 1);
    }
    uint32_t at[2];
    uint4 q[2], k[2];
    FrontScalars<float> s;
    float q_k = 0;
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      at[i] = panel_offset(row, 8 * (lane + kLanes * i));
      q[i] = *reinterpret_cast<const uint4*>(q_at + at[i]);
      k[i] = *reinterpret_cast<const uint4*>(q_at + Shape::kStateBytes + at[i]);
      s.q2 = dot_16_bytes(q[i], q[i], s.q2);
      s.k2 = dot_16_bytes(k[i], k[i], s.k2);
      if constexpr (!Shape::kPrecond) {
        q_k = dot_16_bytes(q[i], k[i], q_k);
      } else {
        float q_row[8], k_row[8];
        unpack_8(q[i], q_row), unpack_8(k[i], k_row);
        FW_UNROLL
        for (int j = 0; j < 8; ++j) q_k += m[i][j] * q_row[j] * k_row[j];
      }
    }
    s.q2 = group_sum<kLanes>(s.q2);
    s.k2 = group_sum<kLanes>(s.k2);
    q_k = group_sum<kLanes>(q_k);
    gates(c, turn, row, s);
    FrontCoefs<float> f = coefs(c, s);
    if (row >= c.rows(turn)) f = FrontCoefs<float>();
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      float y[8], e[8];
      unpack_8(q[i], y);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) e[j] = f.e_q * y[j], y[j] *= Shape::kPrecond && on_read ? f.r_q * m[i][j] : f.r_q;
      if (mixed(c)) {
        float z[8];
        unpack_8(k[i], z);
        FW_UNROLL
        for (int j = 0; j < 8; ++j) y[j] += f.r_k * z[j];
      }
      *reinterpret_cast<uint4*>(q_at + at[i]) = pack_8(y);
      unpack_8(k[i], y);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) {
        e[j] = f.e_k * y[j] + (Shape::kLinear ? e[j] : 0.0f);
        y[j] *= Shape::kPrecond && !on_read ? f.w_k * m[i][j] : f.w_k;
      }
      *reinterpret_cast<uint4*>(q_at + Shape::kStateBytes + at[i]) = pack_8(y);
      if (Shape::kOnline) *reinterpret_cast<uint4*>(c.memory + Shape::kErase + at[i]) = pack_8(e);
    }
    if (lane == 0) {
      c.floats(Shape::kZv)[row] = f.z_v;
      float* to = scalars(c, turn) + row;
      to[0] = s.q2, to[64] = s.k2, to[128] = f.w_k * (f.r_q * q_k + (Shape::kLinear ? f.r_k * s.k2 : 0.0f));
      to[192] = f.r_q, to[256] = f.w_k, to[320] = f.e_k;
      if constexpr (Shape::kLinear) to[384] = f.r_k, to[448] = f.e_q;
    }
  }

  // Of dr, de, dw with r, e, w: r.dr, w.dw, (w / M).de, e.de; mixed, also w.dr and r.de.
  template <class Shape>
  static FW_DEVICE void sum_rows(const ScalarChunk<Shape>& c, int turn, const StreamSums& d, const FragmentM<Shape>& m) {
    const int key = c.key_offset(turn);
    const bool divide = Shape::kPrecond && !c.args.problem.rule.preconditions_read();
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      float sums[4] = {};
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int i = 2 * half;
        const uint32_t r = c.fragment(Shape::kRead + key, half, j), w = c.fragment(Shape::kWrite + key, half, j);
        sums[0] += bf16_low(r) * d.r[j][i] + bf16_high(r) * d.r[j][i + 1];
        sums[1] += bf16_low(w) * d.w[j][i] + bf16_high(w) * d.w[j][i + 1];
        if (!Shape::kOnline) continue;
        if (divide) {
          sums[2] += inverse_or_zero(m.m[half][2 * j]) * bf16_low(w) * d.e[j][i] + inverse_or_zero(m.m[half][2 * j + 1]) * bf16_high(w) * d.e[j][i + 1];
        } else {
          sums[2] += bf16_low(w) * d.e[j][i] + bf16_high(w) * d.e[j][i + 1];
        }
        const uint32_t e = c.fragment(Shape::kErase, half, j);
        sums[3] += bf16_low(e) * d.e[j][i] + bf16_high(e) * d.e[j][i + 1];
      }
      store_row_sums(c, row, sums);
    }
    if constexpr (Shape::kLinear) {
      if (mixed(c)) sum_mixed_rows(c, turn, d);
    }
  }
  template <class Shape>
  static FW_DEVICE void sum_mixed_rows(const ScalarChunk<Shape>& c, int turn, const StreamSums& d) {
    const int key = c.key_offset(turn);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      float sums[2] = {};
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int i = 2 * half;
        const uint32_t r = c.fragment(Shape::kRead + key, half, j), w = c.fragment(Shape::kWrite + key, half, j);
        sums[0] += bf16_low(w) * d.r[j][i] + bf16_high(w) * d.r[j][i + 1];
        if (Shape::kOnline) sums[1] += bf16_low(r) * d.e[j][i] + bf16_high(r) * d.e[j][i + 1];
      }
      store_row_sums<2, Shape, 4>(c, c.row() + 8 * half, sums);
    }
  }

  // What dq takes of r and w, and dk of w, rows c.row() and c.row() + 8.
  struct Slopes {
    float r[2], w[2], q_w[2];
  };
  // By each warp, two lanes a row: the gradients of the numbers of its 16 rows; the first group's warps store them.
  template <class Shape>
  static FW_DEVICE Slopes row_numbers(const ScalarChunk<Shape>& c, int turn) {
    const int row = 16 * c.block_row() + (c.lane >> 1);
    FrontScalars<float> s;
    s.q2 = scalars(c, turn)[row];
    s.k2 = scalars(c, turn)[64 + row];
    gates(c, turn, row, s);
    const FrontCoefs<float> f = coefs(c, s);
    const float r_inverse = inverse_or_zero(f.r_q), w_inverse = inverse_or_zero(f.w_k);
    // q is r_inverse r + of_q w.
    float of_q = 0, w_dr = 0, r_de = 0;
    if (mixed(c)) {
      of_q = -f.r_k * r_inverse * w_inverse;
      w_dr = pair_sum(c, 4, row) + c.floats(Shape::kDiagonal)[row] * f.w_k * f.w_k * s.k2;
      if (Shape::kOnline) r_de = pair_sum(c, 5, row);
    }
    const float r_dr = pair_sum(c, 0, row), w_dw = pair_sum(c, 1, row);
    const float w_de = Shape::kOnline ? pair_sum(c, 2, row) : 0.0f, e_de = Shape::kOnline ? pair_sum(c, 3, row) : 0.0f;
    const float diagonal = c.floats(Shape::kDiagonal)[row] * scalars(c, turn)[128 + row];
    FrontCoefs<float> d;
    d.r_q = r_inverse * (r_dr + diagonal) + of_q * w_dr;
    d.r_k = w_inverse * w_dr;
    d.w_k = w_inverse * (w_dw + diagonal);
    d.e_k = w_inverse * w_de;
    d.e_q = r_inverse * r_de + of_q * w_de;
    d.z_v = c.floats(Shape::kDZv)[row];
    const FrontScalars<float> ds = scalar_gradients(c, s, d);
    if (c.group() == 0 && (c.lane & 1) == 0) {
      c.floats(Shape::kDG)[row] = r_dr + e_de - w_dw;
      if (row < c.rows(turn)) {
        const TokenArgs& out = c.args.grads.d;
        store_one(c.rows_at(out.beta, turn), row, ds.beta);
        if (!plain(c)) {
          store_one(c.rows_at(out.lambda, turn), row, ds.lambda);
          store_one(c.rows_at(out.read_correction, turn), row, ds.read);
          store_one(c.rows_at(out.erase_gate, turn), row, ds.erase);
          store_one(c.rows_at(out.write_gate, turn), row, ds.write);
        }
      }
    }
    const float of_r = 2.0f * ds.q2 * r_inverse, of_w = 2.0f * ds.k2 * w_inverse, q_of_w = 2.0f * ds.q2 * of_q;
    Slopes slopes;
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int lane = 2 * (c.lane >> 2) + 16 * half;
      slopes.r[half] = shuffle(of_r, lane), slopes.w[half] = shuffle(of_w, lane);
      slopes.q_w[half] = Shape::kLinear ? shuffle(q_of_w, lane) : 0.0f;
    }
    return slopes;
  }
  template <class Shape>
  static FW_DEVICE FrontScalars<float> scalar_gradients(const ScalarChunk<Shape>& c, const FrontScalars<float>& s, const FrontCoefs<float>& d) {
    const Problem& x = c.args.problem;
    if constexpr (Shape::kLinear) {
      if (!plain(c)) return front_coefs_vjp(linear_rule(x.rule), x.scale, s, d);
    }
    return front_coefs_vjp(reduced_rule<true>(x.rule), x.scale, s, d);
  }
  // Over the groups, by two lanes.
  template <class Shape>
  static FW_DEVICE float pair_sum(const ScalarChunk<Shape>& c, int sum, int row) {
    const float* part = c.floats(Shape::kPartial) + (sum * Shape::kGroups + (c.lane & 1) * (Shape::kGroups / 2)) * 64 + row;
    const float x = Shape::kGroups == 4 ? part[0] + part[64] : part[0];
    return x + shuffle_xor(x, 1);
  }

  // Of dq and dk what row_numbers() has no part in, in the place of dr and dw; dM.
  template <class Shape>
  static FW_DEVICE void combine(const ScalarChunk<Shape>& c, int turn, StreamSums& d, const FragmentM<Shape>& m) {
    const int key = c.key_offset(turn);
    const bool on_read = c.args.problem.rule.preconditions_read();
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      const float* f = coefficients(c, turn) + row;
      const float r_q = f[0], w_k = f[64], e_k = f[128], diagonal = c.floats(Shape::kDiagonal)[row];
      const float r_k = Shape::kLinear ? f[192] : 0.0f, e_q = Shape::kLinear ? f[256] : 0.0f;
      float dm[8];
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint32_t r_word = c.fragment(Shape::kRead + key, half, j), w_word = c.fragment(Shape::kWrite + key, half, j);
        FW_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float r = i == 0 ? bf16_low(r_word) : bf16_high(r_word), w = i == 0 ? bf16_low(w_word) : bf16_high(w_word);
          float& dr = d.r[j][2 * half + i];
          float& dw = d.w[j][2 * half + i];
          dr += diagonal * w;
          dw += diagonal * r;
          if constexpr (Shape::kPrecond) {
            const float at = m.m[half][2 * j + i], inverse = inverse_or_zero(at);
            dm[2 * j + i] = inverse * (on_read ? dr * r : dw * w);
            dr *= on_read ? at : 1.0f;
            dw *= on_read ? 1.0f : at;
          }
          dw *= w_k;
          if (Shape::kLinear) dw += r_k * dr;
          dr *= r_q;
          if (Shape::kOnline) dw += e_k * d.e[j][2 * half + i];
          if (Shape::kOnline && Shape::kLinear) dr += e_q * d.e[j][2 * half + i];
        }
      }
      if constexpr (Shape::kPrecond)
        store_fragment(c, c.workspace_rows(ScalarChunk<Shape>::kDM, c.args.problem.HV * c.args.problem.K, turn), false, row, row < c.rows(turn), dm);
    }
  }

  template <class Shape>
  static FW_DEVICE void store_gradients(const ScalarChunk<Shape>& c, int turn, const StreamSums& d, const FragmentM<Shape>& m, const Slopes& slopes) {
    const int key = c.key_offset(turn);
    const HeadGradients& out = c.args.grads;
    const Rows dq = c.rows_at(out.d.q, turn), dk = c.rows_at(out.d.k, turn);
    const bool on_read = c.args.problem.rule.preconditions_read();
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = c.row() + 8 * half;
      const bool valid = row < c.rows(turn);
      const float of_r = slopes.r[half], of_w = slopes.w[half];
      float x[8], y[8];
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint32_t r_word = c.fragment(Shape::kRead + key, half, j), w_word = c.fragment(Shape::kWrite + key, half, j);
        FW_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float w_raw = i == 0 ? bf16_low(w_word) : bf16_high(w_word);
          float r = of_r * (i == 0 ? bf16_low(r_word) : bf16_high(r_word)), w = of_w * w_raw;
          if (Shape::kLinear) r += slopes.q_w[half] * w_raw;
          if constexpr (Shape::kPrecond) {
            const float inverse = inverse_or_zero(m.m[half][2 * j + i]);
            r *= on_read ? inverse : 1.0f;
            w *= on_read ? 1.0f : inverse;
          }
          x[2 * j + i] = d.r[j][2 * half + i] + r;
          y[2 * j + i] = d.w[j][2 * half + i] + w;
        }
      }
      store_fragment(c, dq, c.pieces(kPiecesDQ), row, valid, x);
      store_fragment(c, dk, c.pieces(kPiecesDK), row, valid, y);
    }
  }
};

// For pairs of columns of a row, as a thread has them in products: c.column() + 8 j and the next.
struct RareRow {
  float m[8];
  uint32_t b[4], p[4], q[4], k[4];  // bf16

  template <class Shape>
  FW_DEVICE RareRow(const ScalarChunk<Shape>& c, const FrontRows& front, int64_t t, int half) {
    const Problem& x = c.args.problem;
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      m[2 * j] = m[2 * j + 1] = 1, b[j] = kOnes, p[j] = 0;
      if constexpr (!Shape::kChannel) q[j] = c.fragment(Shape::kRaw, half, j), k[j] = c.fragment(Shape::kRaw + Shape::kStateBytes, half, j);
    }
    if constexpr (Shape::kChannel) load(c, front.q, t, q), load(c, front.k, t, k);
    if (front.m != nullptr) {
      const Rows rows{reinterpret_cast<char*>(const_cast<float*>(front.m)), front.m_stride, 0};
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float2 y = load_pair(rows, t, c.column() + 8 * j, x.K);
        m[2 * j] = y.x, m[2 * j + 1] = y.y;
      }
    }
    if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel) load(c, front.b, t, b);
    if (x.rule.uses_erase_key()) load(c, front.p, t, p);
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
  static FW_DEVICE void load(const ScalarChunk<Shape>& c, const Rows& rows, int64_t t, uint32_t (&to)[4]) {
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
  static FW_DEVICE void make_streams(const ScalarChunk<Shape>& c, int turn) {
    constexpr int kLanes = Shape::kKey / 8, kRows = Shape::kThreads / kLanes;
    const Problem& x = c.args.problem;
    FrontRows front = c.front(turn);
    const int lane = c.thread % kLanes;
    FW_NO_UNROLL
    for (int row = c.thread / kLanes; row < kChunk; row += kRows) {
      const bool valid = row < c.rows(turn);
      const int t = valid ? row : c.rows(turn) - 1;
      const uint32_t at = panel_offset(row, 8 * lane);
      RawKeyRow<8> raw;
      if constexpr (Shape::kChannel) {
        load_channels(front.q, t, 8 * lane, x.K, raw.q);
        load_channels(front.k, t, 8 * lane, x.K, raw.k);
      } else {
        unpack_8(*reinterpret_cast<const uint4*>(c.memory + Shape::kRaw + at), raw.q);
        unpack_8(*reinterpret_cast<const uint4*>(c.memory + Shape::kRaw + Shape::kStateBytes + at), raw.k);
      }
      FW_UNROLL
      for (int j = 0; j < 8; ++j) raw.p[j] = 0, raw.b[j] = raw.m[j] = 1;
      if (x.rule.uses_erase_key()) load_channels(front.p, t, 8 * lane, x.K, raw.p);
      if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel) load_channels(front.b, t, 8 * lane, x.K, raw.b);
      if (front.m != nullptr) load_channels(Rows{reinterpret_cast<char*>(const_cast<float*>(front.m)), front.m_stride, 0}, t, 8 * lane, x.K, raw.m);
      const FrontScalars<float> s = front_scalars<kLanes>(x, front, raw, t, lane);
      const FrontCoefs<float> f = coefficients(x, s);
      KeyStreams<8> streams = key_streams(x, f, raw);
      FW_UNROLL
      for (int j = 0; j < 8; ++j) {
        if (!valid) streams.r[j] = streams.e[j] = streams.w[j] = 0;
      }
      *reinterpret_cast<uint4*>(c.memory + Shape::kRead + at) = pack_8(streams.r);
      *reinterpret_cast<uint4*>(c.memory + Shape::kWrite + at) = pack_8(streams.w);
      if (Shape::kOnline) *reinterpret_cast<uint4*>(c.memory + Shape::kErase + at) = pack_8(streams.e);
      if (lane == 0) {
        c.floats(Shape::kZv)[row] = valid ? f.z_v : 0.0f;
        reinterpret_cast<FrontScalars<float>*>(c.memory + Shape::kScalars)[row] = s;
        reinterpret_cast<FrontCoefs<float>*>(c.memory + Shape::kCoefs)[row] = f;
      }
    }
  }

  // A row of the turn in the products.
  template <class Shape>
  struct Row {
    const ScalarChunk<Shape>& c;
    const StreamSums& sums;
    int row, half;
    float diagonal;
    RareRow rare;

    FW_DEVICE Row(const ScalarChunk<Shape>& chunk, const StreamSums& d, const FrontRows& front, int turn, int at)
        : c(chunk),
          sums(d),
          row(chunk.row() + 8 * at),
          half(at),
          diagonal(chunk.floats(Shape::kDiagonal)[chunk.row() + 8 * at]),
          rare(chunk, front, chunk.first(turn) + (chunk.row() + 8 * at < chunk.rows(turn) ? chunk.row() + 8 * at : chunk.rows(turn) - 1), at) {}
    FW_DEVICE uint32_t word(int tile, int j) const { return c.fragment(tile, half, j); }
    FW_DEVICE RawKeyRow<2> raw(int j) const { return rare.pair(j); }
    // dr, de, dw of two columns.
    FW_DEVICE KeyStreams<2> gradients(int j) const {
      const uint32_t r = word(Shape::kRead, j), w = word(Shape::kWrite, j);
      KeyStreams<2> y;
      FW_UNROLL
      for (int i = 0; i < 2; ++i) {
        y.r[i] = sums.r[j][2 * half + i] + diagonal * (i == 0 ? bf16_low(w) : bf16_high(w));
        y.e[i] = Shape::kOnline ? sums.e[j][2 * half + i] : 0.0f;
        y.w[i] = sums.w[j][2 * half + i] + diagonal * (i == 0 ? bf16_low(r) : bf16_high(r));
      }
      return y;
    }
  };

  template <class Shape>
  static FW_DEVICE void sum_rows(const ScalarChunk<Shape>& c, int turn, const StreamSums& d, const FragmentM<Shape>&) {
    const Problem& x = c.args.problem;
    const FrontRows front = c.front(turn);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Row<Shape> row(c, d, front, turn, half);
      float sums[Shape::kSums] = {};
      FW_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int i = 2 * half;
        const FrontCoefs<float> f = key_coefficient_gradients(x, row.raw(j), row.gradients(j));
        sums[0] += f.r_q, sums[1] += f.r_k, sums[2] += f.e_k, sums[3] += f.e_q, sums[4] += f.e_p, sums[5] += f.w_k;
        if constexpr (Shape::kChannel) continue;
        const uint32_t r = row.word(Shape::kRead, j), w = row.word(Shape::kWrite, j);
        sums[6] += bf16_low(r) * d.r[j][i] + bf16_high(r) * d.r[j][i + 1] - bf16_low(w) * d.w[j][i] - bf16_high(w) * d.w[j][i + 1];
        if (!Shape::kOnline) continue;
        const uint32_t e = row.word(Shape::kErase, j);
        sums[6] += bf16_low(e) * d.e[j][i] + bf16_high(e) * d.e[j][i + 1];
      }
      store_row_sums(c, row.row, sums);
    }
  }

  template <class Shape>
  static FW_DEVICE void row_numbers(const ScalarChunk<Shape>& c, int turn, int row) {
    const Problem& x = c.args.problem;
    const Rule& rule = x.rule;
    const HeadGradients& out = c.args.grads;
    FrontCoefs<float> d;
    d.r_q = row_sum(c, 0, row), d.r_k = row_sum(c, 1, row), d.e_k = row_sum(c, 2, row), d.e_q = row_sum(c, 3, row), d.e_p = row_sum(c, 4, row);
    d.w_k = row_sum(c, 5, row);
    d.z_v = c.floats(Shape::kDZv)[row];
    if constexpr (!Shape::kChannel) c.floats(Shape::kDG)[row] = row_sum(c, 6, row);
    const FrontScalars<float> s = reinterpret_cast<const FrontScalars<float>*>(c.memory + Shape::kScalars)[row];
    const FrontScalars<float> ds = plain_front(rule) ? front_coefs_vjp(reduced_rule<false>(rule), x.scale, s, d) : front_coefs_vjp(rule, x.scale, s, d);
    *reinterpret_cast<float4*>(c.floats(Shape::kSlopes) + 4 * row) = make_float4(ds.q2, ds.k2, ds.p2, ds.kmk);
    if (row >= c.rows(turn)) return;
    const int t = row;
    store_gate<1>(c.rows_at(out.d.erase_gate, turn), rule.erase, t, 0, x.K, ds.erase);
    store_gate<1>(c.rows_at(out.d.write_gate, turn), rule.write, t, 0, x.V, ds.write);
    store_one(c.rows_at(out.d.beta, turn), t, ds.beta);
    store_one(c.rows_at(out.d.lambda, turn), t, ds.lambda);
    store_one(c.rows_at(out.d.read_correction, turn), t, ds.read);
    store_one(c.workspace_rows(ScalarChunk<Shape>::kDAlpha, x.HV, turn), row, ds.alpha_p * s.alpha_p);
    store_one(c.workspace_rows(ScalarChunk<Shape>::kDBeta, x.HV, turn), row, ds.beta_p);
  }

  template <class Shape>
  static FW_DEVICE void store_gradients(const ScalarChunk<Shape>& c, int turn, const StreamSums& sums, const FragmentM<Shape>&) {
    const Problem& x = c.args.problem;
    const HeadGradients& out = c.args.grads;
    const FrontRows front = c.front(turn);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Row<Shape> row(c, sums, front, turn, half);
      const bool valid = row.row < c.rows(turn);
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
      store(c.rows_at(out.d.q, turn), t, &RawKeyRow<2>::q);
      store(c.rows_at(out.d.k, turn), t, &RawKeyRow<2>::k);
      if (x.rule.uses_erase_key()) store(c.rows_at(out.d.erase_key, turn), t, &RawKeyRow<2>::p);
      if (x.rule.erase == Gate::kChannel) store(c.rows_at(out.d.erase_gate, turn), t, &RawKeyRow<2>::b);
      store(c.workspace_rows(ScalarChunk<Shape>::kDM, x.HV * x.K, turn), t, &RawKeyRow<2>::m);
    }
  }
};

}  // namespace fw::cuda
