// The front on rows: one token of one value head whose channels are spread over kLanes neighbouring lanes, kN
// neighbouring channels each (channels past K or V are 0 everywhere). Coefficients and their vector-Jacobian product
// are rule/front.h's; what is here is the elementwise part, for every kernel that makes streams or takes their
// gradients.
#pragma once

#include "rule/front.h"
#include "scan/cuda/common/tokens.cuh"

namespace fw::cuda {

// Sum over the kLanes lanes (a power of two) of an aligned group; all of them get it.
template <int kLanes>
FW_DEVICE float group_sum(float x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// The tensors of one sequence and value head, or their gradients.
struct TokenRows {
#define FW_TOKEN(name, heads, width, used) Rows name;
#include "rule/tokens.def"
};
FW_DEVICE void find_rows(const TokenArgs& tensors, const SequenceArg& s, int n, int hv, TokenRows& rows) {
#define FW_TOKEN(name, heads, width, used) rows.name = rows_of(tensors.name, s, n, hv);
#include "rule/tokens.def"
}

struct FrontRows : TokenRows {
  const float* m = nullptr;  // row of the first token
  int64_t m_stride = 0;
};

FW_DEVICE FrontRows front_rows(const Problem& x, int n, int hv) {
  FrontRows f;
  const SequenceArg& s = x.sequences;
  find_rows(x.in, s, n, hv, f);
  if (x.m != nullptr) {
    f.m = x.m + (first_token(s, n) * x.H + hv / x.group) * x.K;
    f.m_stride = static_cast<int64_t>(x.H) * x.K;
  }
  return f;
}

// The raw key-side row of a token; absent ones are neutral (p 0, b and m 1).
template <int kN>
struct RawKeyRow {
  float q[kN], k[kN], p[kN], b[kN], m[kN];
};

// lane: within the group.
template <int kN>
FW_DEVICE RawKeyRow<kN> load_key_row(const Problem& x, const FrontRows& f, int t, int lane) {
  RawKeyRow<kN> row;
  const int i = lane * kN;
  load_channels(f.q, t, i, x.K, row.q);
  load_channels(f.k, t, i, x.K, row.k);
#pragma unroll
  for (int j = 0; j < kN; ++j) row.p[j] = 0, row.b[j] = row.m[j] = 1;
  if (x.rule.uses_erase_key()) load_channels(f.erase_key, t, i, x.K, row.p);
  if (x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel) load_channels(f.erase_gate, t, i, x.K, row.b);
  if (f.m != nullptr) {
#pragma unroll
    for (int j = 0; j < kN; ++j) row.m[j] = i + j < x.K ? f.m[t * f.m_stride + i + j] : 0.0f;
  }
  return row;
}

// The gates of a token that are one number each.
FW_DEVICE void front_gates(const Problem& x, const FrontRows& f, int t, FrontScalars<float>& s) {
  load_gates(
      x.rule, x.m != nullptr, s, [t](const Rows& rows) { return load_element(rows, t, 0); }, f);
}

// Sums over the group of lanes; every lane gets all of them.
template <int kLanes, int kN>
FW_DEVICE FrontScalars<float> front_scalars(const Problem& x, const FrontRows& f, const RawKeyRow<kN>& row, int t,
                                            int lane) {
  const Rule& rule = x.rule;
  FrontScalars<float> s;
  float q2 = 0, k2 = 0, p2 = 0, kmk = 0;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    q2 += row.q[j] * row.q[j];
    k2 += row.k[j] * row.k[j];
    p2 += row.p[j] * row.p[j];
    kmk += row.m[j] * row.k[j] * row.k[j];
  }
  if (rule.q_norm == Norm::kL2) s.q2 = group_sum<kLanes>(q2);
  if (rule.k_norm == Norm::kL2 || rule.gain_uses_key_norm()) s.k2 = group_sum<kLanes>(k2);
  if (rule.uses_erase_key() && rule.k_norm == Norm::kL2) s.p2 = group_sum<kLanes>(p2);
  if (rule.uses_key_form()) s.kmk = group_sum<kLanes>(kmk);
  front_gates(x, f, t, s);
  if (rule.uses_erase_gate() && rule.erase == Gate::kAveraged) {
    float sum = 0;
    for (int i = lane; i < x.K; i += kLanes) sum += load_element(f.erase_gate, t, i);
    s.erase = group_sum<kLanes>(sum) / static_cast<float>(x.K);
  }
  if (rule.write == Gate::kAveraged) {
    float sum = 0;
    for (int i = lane; i < x.V; i += kLanes) sum += load_element(f.write_gate, t, i);
    s.write = group_sum<kLanes>(sum) / static_cast<float>(x.V);
  }
  return s;
}

// e of a channel before its gate; coefficients of what a rule does not have are 0.
FW_DEVICE float erase_of(float e_k, float e_q, float e_p, float k, float q, float p) {
  return FrontElements<PlainMath<float>>::with_own_key(FrontElements<PlainMath<float>>::erase(e_k, e_q, k, q), e_p, p);
}

template <int kN>
struct KeyStreams {
  float r[kN], e[kN], w[kN];
};

// r, e (0 additive) and w of the row.
template <int kN>
FW_DEVICE KeyStreams<kN> key_streams(const Problem& x, const FrontCoefs<float>& c, const RawKeyRow<kN>& row) {
  KeyStreams<kN> s;
  const bool on_read = x.rule.preconditions_read(), is_delta = x.rule.is_delta();
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float m_r = on_read ? row.m[j] : 1.0f, m_w = on_read ? 1.0f : row.m[j];
    s.r[j] = m_r * FrontElements<PlainMath<float>>::read(c.r_q, c.r_k, row.q[j], row.k[j]);
    s.e[j] = is_delta ? row.b[j] * erase_of(c.e_k, c.e_q, c.e_p, row.k[j], row.q[j], row.p[j]) : 0.0f;
    s.w[j] = m_w * (c.w_k * row.k[j]);
  }
  return s;
}

// What the gradients of the key-side streams say about the seven coefficients: this lane's part, to be summed over the
// group (z_v is the value side's).
template <int kN>
FW_DEVICE FrontCoefs<float> key_coefficient_gradients(const Problem& x, const RawKeyRow<kN>& row,
                                                      const KeyStreams<kN>& d) {
  FrontCoefs<float> sum;
  const bool on_read = x.rule.preconditions_read(), is_delta = x.rule.is_delta();
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float dr = (on_read ? row.m[j] : 1.0f) * d.r[j], dw = (on_read ? 1.0f : row.m[j]) * d.w[j],
                de = is_delta ? row.b[j] * d.e[j] : 0.0f;
    sum.r_q += row.q[j] * dr;
    sum.r_k += row.k[j] * dr;
    sum.w_k += row.k[j] * dw;
    sum.e_k += row.k[j] * de;
    sum.e_q += row.q[j] * de;
    sum.e_p += row.p[j] * de;
  }
  return sum;
}

// Sum over the group. z_v: this lane's part of sum v (.) c (.) dz.
template <int kLanes>
FW_DEVICE FrontCoefs<float> sum_coefficient_gradients(const FrontCoefs<float>& part, float z_v) {
  FrontCoefs<float> sum;
  sum.r_q = group_sum<kLanes>(part.r_q);
  sum.r_k = group_sum<kLanes>(part.r_k);
  sum.e_k = group_sum<kLanes>(part.e_k);
  sum.e_q = group_sum<kLanes>(part.e_q);
  sum.e_p = group_sum<kLanes>(part.e_p);
  sum.w_k = group_sum<kLanes>(part.w_k);
  sum.z_v = group_sum<kLanes>(z_v);
  return sum;
}

// Gradients of the raw key-side row: through the streams, and through the scalars (ds: front_coefs_vjp's answer).
template <int kN>
FW_DEVICE RawKeyRow<kN> key_row_gradients(const Problem& x, const FrontCoefs<float>& c, const FrontScalars<float>& ds,
                                          const RawKeyRow<kN>& row, const KeyStreams<kN>& d) {
  RawKeyRow<kN> g;
  const bool on_read = x.rule.preconditions_read(), is_delta = x.rule.is_delta();
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float m_r = on_read ? row.m[j] : 1.0f, m_w = on_read ? 1.0f : row.m[j];
    const float dr = m_r * d.r[j], dw = m_w * d.w[j], de = is_delta ? d.e[j] : 0.0f, bde = row.b[j] * de;
    g.q[j] = c.r_q * dr + c.e_q * bde + 2.0f * ds.q2 * row.q[j];
    g.k[j] = c.w_k * dw + c.r_k * dr + c.e_k * bde + 2.0f * (ds.k2 + ds.kmk * row.m[j]) * row.k[j];
    g.p[j] = c.e_p * bde + 2.0f * ds.p2 * row.p[j];
    g.b[j] = de * erase_of(c.e_k, c.e_q, c.e_p, row.k[j], row.q[j], row.p[j]);
    g.m[j] = (on_read ? d.r[j] * FrontElements<PlainMath<float>>::read(c.r_q, c.r_k, row.q[j], row.k[j])
                      : d.w[j] * c.w_k * row.k[j]) +
             ds.kmk * row.k[j] * row.k[j];
  }
  return g;
}

}  // namespace fw::cuda
