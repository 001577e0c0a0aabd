// The key side of one token of one value head, made by a warp: lane l has the kN channels from l kN on.
#pragma once

#include "rule/decay.h"
#include "scan/cuda/common/front/rows.cuh"

namespace fw::cuda {

// What the tensors of the key side say about a token. gates: those that are one number, the others as by default.
template <int kN>
struct KeyInputs {
  RawKeyRow<kN> row;
  float g[kN];  // a scalar decay: in g[0]
  FrontScalars<float> gates;
};

template <int kN>
FW_DEVICE KeyInputs<kN> load_key_inputs(const Problem& x, const FrontRows& f, const Rows& g, int t, int lane) {
  KeyInputs<kN> in;
  in.row = load_key_row<kN>(x, f, t, lane);
  if (x.rule.decay == Decay::kChannel) load_channels(g, t, lane * kN, x.K, in.g);
  if (x.rule.decay == Decay::kScalar) in.g[0] = load_element(g, t, 0);
  front_gates(x, f, t, in.gates);
  return in;
}

// What a token does to the key side.
template <int kN>
struct KeyToken {
  KeyStreams<kN> key;
  float factor[kN];  // alpha
  float rw;          // r . w
  float z_v;         // coefficient of the value

  FW_DEVICE void e(float (&x)[kN]) const { copy(key.e, x); }
  FW_DEVICE void r(float (&x)[kN]) const { copy(key.r, x); }
  FW_DEVICE void w(float (&x)[kN]) const { copy(key.w, x); }
  FW_DEVICE void alpha(float (&x)[kN]) const { copy(factor, x); }

 private:
  FW_DEVICE static void copy(const float (&from)[kN], float (&to)[kN]) {
#pragma unroll
    for (int j = 0; j < kN; ++j) to[j] = from[j];
  }
};

// mean(tensor, count): of a gate's row of this token, in every lane.
template <int kN, class Mean>
FW_DEVICE KeyToken<kN> key_token(const Problem& x, int hv, const KeyInputs<kN>& in, Mean&& mean) {
  const Rule& rule = x.rule;
  const RawKeyRow<kN>& row = in.row;
  // One round of sums: r . w comes out of them too, as r and w are m_r (r_q q + r_k k) and m_w w_k k with m_r m_w = m.
  float q2 = 0, k2 = 0, kmk = 0, qmk = 0;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float mk = row.m[j] * row.k[j];
    q2 = fmaf(row.q[j], row.q[j], q2);
    k2 = fmaf(row.k[j], row.k[j], k2);
    kmk = fmaf(mk, row.k[j], kmk);
    qmk = fmaf(mk, row.q[j], qmk);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    q2 += shuffle_xor(q2, mask);
    k2 += shuffle_xor(k2, mask);
    kmk += shuffle_xor(kmk, mask);
    qmk += shuffle_xor(qmk, mask);
  }
  FrontScalars<float> s = in.gates;
  s.q2 = q2, s.k2 = k2, s.kmk = kmk;
  if (rule.uses_erase_key() && rule.k_norm == Norm::kL2) {
    float p2 = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) p2 = fmaf(row.p[j], row.p[j], p2);
    s.p2 = group_sum<32>(p2);
  }
  if (rule.uses_erase_gate() && rule.erase == Gate::kAveraged) s.erase = mean(x.in.erase_gate, x.K);
  if (rule.write == Gate::kAveraged) s.write = mean(x.in.write_gate, x.V);

  const FrontCoefs<float> c = front_coefs(rule, x.scale, s);
  KeyToken<kN> k;
  k.key = key_streams(x, c, row);
  k.z_v = c.z_v;
  k.rw = c.w_k * fmaf(c.r_k, kmk, c.r_q * qmk);
  if (rule.decay == Decay::kChannel) {
#pragma unroll
    for (int j = 0; j < kN; ++j) k.factor[j] = expf(in.g[j]);
  } else {
    float alpha = 1;
    if (rule.decay == Decay::kScalar) alpha = expf(in.g[0]);
    if (rule.decay == Decay::kConstant) alpha = static_cast<float>(constant_decay(hv));
#pragma unroll
    for (int j = 0; j < kN; ++j) k.factor[j] = alpha;
  }
  return k;
}

// The mean of row t of a gate, by a warp.
FW_DEVICE float row_mean(const Rows& rows, int t, int count, int lane) {
  float sum = 0;
  FW_NO_UNROLL
  for (int i = lane; i < count; i += 32) sum += load_element(rows, t, i);
  return group_sum<32>(sum) / static_cast<float>(count);
}

// What a token does to one value row.
struct ValueToken {
  float v = 0, gate = 1;
};
// lane's row is value v of the head; past V: zero.
FW_DEVICE ValueToken load_value(const Problem& x, const FrontRows& f, int t, int v) {
  ValueToken value;
  if (v >= x.V) return value;
  value.v = load_element(f.v, t, v);
  if (x.rule.write == Gate::kChannel) value.gate = load_element(f.write_gate, t, v);
  return value;
}

}  // namespace fw::cuda
