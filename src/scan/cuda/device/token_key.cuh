// The key side of one token of one value head, by a warp: lane l has the kN channels from l kN on. Loading is apart from what is made of
// the numbers, which stay as they lie in memory until then: so that all loads of a token, and others, are under way at once.
#pragma once

#include "rule/decay.h"
#include "scan/cuda/device/front_rows.cuh"

namespace fw::cuda {

// kN channels: floats as bits, or bf16 numbers in the first kN / 2 words.
template <int kN>
using RawChannels = uint32_t[kN];

template <int kWords>
FW_DEVICE void load_words(const char* p, uint32_t* x) {
  if constexpr (kWords == 1) {
    x[0] = *reinterpret_cast<const uint32_t*>(p);
  } else if constexpr (kWords == 2) {
    const uint2 a = *reinterpret_cast<const uint2*>(p);
    x[0] = a.x, x[1] = a.y;
  } else {
#pragma unroll
    for (int j = 0; j < kWords; j += 4) {
      const uint4 a = *reinterpret_cast<const uint4*>(p + 4 * j);
      x[j] = a.x, x[j + 1] = a.y, x[j + 2] = a.z, x[j + 3] = a.w;
    }
  }
}

// wide: wide_front() said so.
template <int kN>
FW_DEVICE void load_raw(const Rows& rows, int64_t t, int i, int limit, bool wide, RawChannels<kN>& x) {
  const int size = rows.bf16 != 0 ? 2 : 4;
  const char* p = rows.data + (t * rows.stride + i) * size;
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] = 0;
  if (wide) {
    if (i < limit && rows.bf16 != 0) load_words<kN / 2>(p, x);
    if (i < limit && rows.bf16 == 0) load_words<kN>(p, x);
    return;
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (i + j >= limit) break;
    if (rows.bf16 != 0) {
      x[j / 2] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(p + 2 * j)) << (16 * (j % 2));
    } else {
      x[j] = *reinterpret_cast<const uint32_t*>(p + 4 * j);
    }
  }
}
template <int kN>
FW_DEVICE void channel_values(bool bf16, const RawChannels<kN>& raw, float (&x)[kN]) {
#pragma unroll
  for (int j = 0; j < kN; j += 2) {
    x[j] = bf16 ? bf16_low(raw[j / 2]) : bits_float(raw[j]);
    x[j + 1] = bf16 ? bf16_high(raw[j / 2]) : bits_float(raw[j + 1]);
  }
}

FW_DEVICE uint32_t load_raw_element(const Rows& rows, int64_t t, int i) {
  const char* p = rows.data + (t * rows.stride + i) * (rows.bf16 != 0 ? 2 : 4);
  return rows.bf16 != 0 ? *reinterpret_cast<const uint16_t*>(p) : *reinterpret_cast<const uint32_t*>(p);
}
FW_DEVICE float raw_element(const TokenArg& a, uint32_t raw) { return bits_float(a.bf16 != 0 ? raw << 16 : raw); }

// Whether every row of kN channels that the key side of a token has may be loaded as a whole. Host.
inline bool wide_rows(const TokenArg& a, int channels) {
  const int64_t size = a.bf16 != 0 ? 2 : 4, vector = channels * size < 16 ? channels * size : 16;
  return ((static_cast<int64_t>(reinterpret_cast<uintptr_t>(a.data)) | (a.stride_b | a.stride_t | a.stride_h) * size) & (vector - 1)) == 0;
}
inline bool wide_front(const Problem& x, int channels) {
  const auto good = [&](bool used, const TokenArg& a) { return !used || wide_rows(a, channels); };
  return x.K % channels == 0 && good(true, x.in.q) && good(true, x.in.k) && good(x.rule.decay == Decay::kChannel, x.in.g) &&
         good(x.rule.uses_erase_key(), x.in.erase_key) && good(x.rule.uses_erase_gate() && x.rule.erase == Gate::kChannel, x.in.erase_gate) &&
         reinterpret_cast<uintptr_t>(x.m) % 16 == 0;
}

// Where a sequence and value head are in tensors of tokens. Rows are found when they are loaded: all of them would take a hundred registers.
struct TokenPlace {
  int64_t b, t;  // of the sequence's first token
  int n, hv;
};
FW_DEVICE TokenPlace token_place(const SequenceArg& s, int n, int hv) {
  return {s.offsets != nullptr ? 0 : n, s.offsets != nullptr ? s.offsets[n] : 0, n, hv};
}
FW_DEVICE Rows rows_at(const TokenArg& a, const TokenPlace& at) {
  const unsigned head = static_cast<unsigned>(at.hv), divisor = static_cast<unsigned>(a.divisor);
  const int64_t offset = at.b * a.stride_b + at.t * a.stride_t + static_cast<int64_t>(divisor == 1 ? head : head / divisor) * a.stride_h;
  return {static_cast<char*>(a.data) + offset * (a.bf16 != 0 ? 2 : 4), a.stride_t, a.bf16};
}

template <int kN>
struct RawToken {
  RawChannels<kN> q, k, p, b, m, g;  // g: a scalar decay in g[0]
  uint32_t beta, lambda, read, erase, write, precond_g, precond_beta;
};
template <int kN>
FW_DEVICE RawToken<kN> load_token(const Problem& x, const TokenPlace& at, int t, int lane, bool wide) {
  const Rule& rule = x.rule;
  const TokenArgs& in = x.in;
  const int i = lane * kN;
  const auto channels = [&](const TokenArg& a, RawChannels<kN>& words) { load_raw<kN>(rows_at(a, at), t, i, x.K, wide, words); };
  const auto scalar = [&](const TokenArg& a) { return load_raw_element(rows_at(a, at), t, 0); };
  RawToken<kN> raw;
  channels(in.q, raw.q);
  channels(in.k, raw.k);
  if (rule.decay == Decay::kScalar) raw.g[0] = scalar(in.g);
  if (rule.decay == Decay::kChannel) channels(in.g, raw.g);
  if (rule.uses_beta()) raw.beta = scalar(in.beta);
  if (rule.uses_erase_gate()) {
    if (rule.erase == Gate::kChannel) channels(in.erase_gate, raw.b);
    if (rule.erase == Gate::kScalar) raw.erase = scalar(in.erase_gate);
  }
  if (rule.write == Gate::kScalar) raw.write = scalar(in.write_gate);
  if (rule.uses_erase_key()) channels(in.erase_key, raw.p);
  if (rule.uses_lambda()) raw.lambda = scalar(in.lambda);
  if (rule.uses_read_correction()) raw.read = scalar(in.read_correction);
  if (x.m != nullptr) {
    const float* m = x.m + ((at.b * x.sequences.T + at.t) * x.H + at.hv / x.group) * x.K;
    load_raw<kN>({const_cast<char*>(reinterpret_cast<const char*>(m)), static_cast<int64_t>(x.H) * x.K, 0}, t, i, x.K, wide, raw.m);
    if (rule.normaliser == Normaliser::kGated) raw.precond_g = scalar(in.precond_g), raw.precond_beta = scalar(in.precond_beta);
  }
  return raw;
}

// What a token does to the key side.
template <int kN>
struct KeyToken {
  KeyStreams<kN> key;
  float alpha[kN];
  float rw;   // r . w
  float z_v;  // coefficient of the value
};

template <int kN>
FW_DEVICE KeyToken<kN> key_token(const Problem& x, const TokenPlace& at, const RawToken<kN>& raw, int t, int lane) {
  const Rule& rule = x.rule;
  RawKeyRow<kN> row;
  channel_values<kN>(x.in.q.bf16 != 0, raw.q, row.q);
  channel_values<kN>(x.in.k.bf16 != 0, raw.k, row.k);
#pragma unroll
  for (int j = 0; j < kN; ++j) row.p[j] = 0, row.b[j] = row.m[j] = 1;
  if (x.m != nullptr) channel_values<kN>(false, raw.m, row.m);
  if (rule.uses_erase_gate() && rule.erase == Gate::kChannel) channel_values<kN>(x.in.erase_gate.bf16 != 0, raw.b, row.b);
  if (rule.uses_erase_key()) channel_values<kN>(x.in.erase_key.bf16 != 0, raw.p, row.p);

  // One round of sums: also r . w comes out of them, as r and w are m_r (r_q q + r_k k) and m_w w_k k with m = m_r m_w.
  FrontScalars<float> s;
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
  s.q2 = q2, s.k2 = k2, s.kmk = kmk;
  if (rule.uses_erase_key() && rule.k_norm == Norm::kL2) {
    float p2 = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) p2 = fmaf(row.p[j], row.p[j], p2);
    s.p2 = group_sum<32>(p2);
  }
  if (rule.uses_beta()) s.beta = raw_element(x.in.beta, raw.beta);
  if (rule.feedback == Feedback::kFixed) s.lambda = static_cast<float>(rule.lambda);
  if (rule.uses_lambda()) s.lambda = raw_element(x.in.lambda, raw.lambda);
  if (rule.uses_read_correction()) s.read = raw_element(x.in.read_correction, raw.read);
  if (rule.uses_erase_gate() && rule.erase == Gate::kScalar) s.erase = raw_element(x.in.erase_gate, raw.erase);
  if (rule.write == Gate::kScalar) s.write = raw_element(x.in.write_gate, raw.write);
  if (rule.normaliser == Normaliser::kGated && x.m != nullptr) {
    s.alpha_p = expf(raw_element(x.in.precond_g, raw.precond_g));
    s.beta_p = raw_element(x.in.precond_beta, raw.precond_beta);
  }
  const auto mean = [&](const TokenArg& arg, int count) {
    const Rows gate = rows_at(arg, at);
    float sum = 0;
    FW_NO_UNROLL
    for (int i = lane; i < count; i += 32) sum += load_element(gate, t, i);
    return group_sum<32>(sum) / static_cast<float>(count);
  };
  if (rule.uses_erase_gate() && rule.erase == Gate::kAveraged) s.erase = mean(x.in.erase_gate, x.K);
  if (rule.write == Gate::kAveraged) s.write = mean(x.in.write_gate, x.V);

  const FrontCoefs<float> c = front_coefs(rule, x.scale, s);
  KeyToken<kN> k;
  k.key = key_streams(x, c, row);
  k.z_v = c.z_v;
  k.rw = c.w_k * fmaf(c.r_k, kmk, c.r_q * qmk);
  if (rule.decay == Decay::kChannel) {
    channel_values<kN>(x.in.g.bf16 != 0, raw.g, k.alpha);
#pragma unroll
    for (int j = 0; j < kN; ++j) k.alpha[j] = expf(k.alpha[j]);
  } else {
    float alpha = 1;
    if (rule.decay == Decay::kScalar) alpha = expf(raw_element(x.in.g, raw.g[0]));
    if (rule.decay == Decay::kConstant) alpha = static_cast<float>(constant_decay(at.hv));
#pragma unroll
    for (int j = 0; j < kN; ++j) k.alpha[j] = alpha;
  }
  return k;
}

// A value as it lies in memory, and its gate.
struct RawValue {
  uint32_t v = 0, gate = 0;
};
// Value v of the head; past V: zero.
FW_DEVICE RawValue load_value(const Problem& x, const TokenPlace& at, int t, int v) {
  RawValue raw;
  if (v >= x.V) return raw;
  raw.v = load_raw_element(rows_at(x.in.v, at), t, v);
  if (x.rule.write == Gate::kChannel) raw.gate = load_raw_element(rows_at(x.in.write_gate, at), t, v);
  return raw;
}
struct ValueToken {
  float v, gate;
};
FW_DEVICE ValueToken value_token(const Problem& x, const RawValue& raw) {
  return {raw_element(x.in.v, raw.v), x.rule.write == Gate::kChannel ? raw_element(x.in.write_gate, raw.gate) : 1.0f};
}

}  // namespace fw::cuda
