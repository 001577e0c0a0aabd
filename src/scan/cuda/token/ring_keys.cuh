// The key side of a step with a ring, in shared memory (scan/ring.h). It has rows of the ring and of the call's tokens,
// what each token finds of those before it, and products of decays. A lane has the kN channels from lane kN on.
#pragma once

#include "scan/cuda/token/step.cuh"
#include "scan/ring.h"

namespace fw::cuda {

// Tokens of the ring whose decays are multiplied with each other first. Groups begin where a token's sums do, so that
// the order of products depends on positions alone.
inline constexpr int kRingGroup = 4;

// Byte offsets in shared memory. A row of channels is 128 kN bytes, the row of values `tile` floats.
struct RingCut {
  int32_t keys = 0;      // token_ring_kernel: w [span]; those of a fold times their decays
  int32_t decays = 0;    // the same: [span], channels or one number
  int32_t groups = 0;    // token_ring_head_kernel: rows of channels, the product of the decays of each group
  int32_t products = 0;  // [tokens + 2] rows of channels: decays of the state for each token, then for two folds
  int32_t coefs = 0;     // float [tokens, 2, span]: of e and of r
  int32_t u = 0;         // [span, tile]
  int32_t end = 0;
  int32_t tile = 0, key_warps = 1;
  bool wide = false;  // rows of the ring in units of 16 bytes
};

// The ring of one sequence and value head. row(j): of token j from the position `base` on, j < rows.
struct RingHead {
  float* data;
  int64_t stride;
  int rows, first;
  FW_DEVICE int index(int j) const { return first + j < rows ? first + j : first + j - rows; }
  FW_DEVICE float* row(int j) const { return data + index(j) * stride; }
};
FW_DEVICE RingHead ring_head(const RingArg& ring, int slot, int hv, int base) {
  return {ring.data + slot * ring.stride_n + hv * ring.stride_h, ring.stride_r, ring.rows,
          static_cast<int>(static_cast<unsigned>(base) % static_cast<unsigned>(ring.rows))};
}
FW_DEVICE RingSpan span_of(const RingArg& ring, int n, int length) {
  return ring_span(ring.tokens, ring.previous != nullptr, ring.positions[n],
                   ring.previous != nullptr ? ring.previous[n] : 0, length);
}

// count floats to `room` ones, zeros behind them, by a warp.
FW_DEVICE void copy_floats(bool wide, const float* from, int count, int room, char* to, int lane) {
  if (wide) {
    const uint32_t base = shared_address(to);
    FW_NO_UNROLL
    for (int at = 4 * lane; at < room; at += 128)
      cp_async_16(base + 4 * static_cast<uint32_t>(at), at < count ? from + at : from, at < count);
  } else {
    FW_NO_UNROLL
    for (int i = lane; i < room; i += 32) reinterpret_cast<float*>(to)[i] = i < count ? from[i] : 0.0f;
  }
}

// Starts the copies of the first `count` rows of the ring that this warp has, one in `warps`.
template <int kN>
FW_DEVICE void load_ring_keys(const Rule& rule, int K, int V, int hv, const RingHead& ring, int count, int warp,
                              int warps, bool wide, int lane, char* keys, char* decays) {
  FW_NO_UNROLL
  for (int j = warp; j < count; j += warps) {
    const float* row = ring.row(j);
    copy_floats(wide, row, K, 32 * kN, keys + 128 * kN * j, lane);
    if (rule.decay == Decay::kChannel) copy_floats(wide, row + K + V, K, 32 * kN, decays + 128 * kN * j, lane);
  }
  cp_async_commit();
  if (rule.decay == Decay::kChannel || rule.decay == Decay::kNone) return;
  for (int j = warp + warps * lane; j < count; j += 32 * warps) {
    reinterpret_cast<float*>(decays)[j] =
        rule.decay == Decay::kScalar ? ring.row(j)[K + V] : static_cast<float>(constant_decay(hv));
  }
}

// The decay of token j of those in shared memory, in this lane's channels.
template <int kN>
FW_DEVICE void ring_decay(const Rule& rule, const char* decays, int j, int lane, float (&alpha)[kN]) {
  if (rule.decay == Decay::kChannel) return load_wide<kN>(decays + 128 * kN * j + 4 * kN * lane, alpha);
  const float one = rule.decay == Decay::kNone ? 1.0f : reinterpret_cast<const float*>(decays)[j];
#pragma unroll
  for (int i = 0; i < kN; ++i) alpha[i] = one;
}

// The streams of a token, which its warp has just put into shared memory, as row j of the keys.
template <int kN>
FW_DEVICE void put_ring_key(const Rule& rule, const GatheredToken<kN>& token, int j, int lane, char* keys,
                            char* decays) {
  float x[kN];
  token.w(x);
  store_wide<kN>(keys + 128 * kN * j + 4 * kN * lane, 0, x);
  if (rule.decay == Decay::kNone) return;
  token.alpha(x);
  if (rule.decay == Decay::kChannel) {
    store_wide<kN>(decays + 128 * kN * j + 4 * kN * lane, 0, x);
  } else if (lane == 0) {
    reinterpret_cast<float*>(decays)[j] = x[0];
  }
}
// The same to its row of the ring.
template <int kN>
FW_DEVICE void store_ring_key(const Rule& rule, int K, int V, const GatheredToken<kN>& token, float* row, int lane) {
  float x[kN];
  token.w(x);
  store_channels({reinterpret_cast<char*>(row), 0, 0}, 0, lane * kN, K, x);
  if (rule.decay != Decay::kScalar && rule.decay != Decay::kChannel) return;
  token.alpha(x);
  store_channels({reinterpret_cast<char*>(row + K + V), 0, 0}, 0, lane * kN, rule.decay == Decay::kChannel ? K : 1, x);
}

// A group of `count` tokens, which load(i, w, alpha) has: keys times the decays after them in the group, and the
// product of all of its decays.
template <int kN, class Load>
FW_DEVICE void make_group(int count, Load&& load, float (&w)[kRingGroup][kN], float (&product)[kN]) {
  float alpha[kRingGroup][kN];
#pragma unroll
  for (int i = 0; i < kRingGroup; ++i) {
#pragma unroll
    for (int c = 0; c < kN; ++c) w[i][c] = 0, alpha[i][c] = 1;
    if (i < count) load(i, w[i], alpha[i]);
  }
#pragma unroll
  for (int c = 0; c < kN; ++c) {
    product[c] = 1;
#pragma unroll
    for (int i = kRingGroup - 1; i >= 0; --i) w[i][c] *= product[c], product[c] *= alpha[i][c];
  }
}
// What a token finds of a group. p: the decays from the group to the token; coefs: of the group's first token.
template <int kN>
FW_DEVICE void group_coefficients(const GatheredToken<kN>& token, const float (&p)[kN],
                                  const float (&w)[kRingGroup][kN], int count, int span, int lane, float* coefs) {
  float e[kN], r[kN], sums[2 * kRingGroup];
  token.e(e);
  token.r(r);
#pragma unroll
  for (int c = 0; c < kN; ++c) e[c] *= p[c], r[c] *= p[c];
#pragma unroll
  for (int i = 0; i < kRingGroup; ++i) {
    sums[i] = sums[kRingGroup + i] = 0;
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      sums[i] = fmaf(w[i][c], e[c], sums[i]);
      sums[kRingGroup + i] = fmaf(w[i][c], r[c], sums[kRingGroup + i]);
    }
  }
  constexpr int kLanes = 32 / (2 * kRingGroup);
  const float own = scattered_sum(sums, lane);
  const int number = lane / kLanes, i = number % kRingGroup;
  if (lane % kLanes == 0 && i < count) coefs[number / kRingGroup * span + i] = own;
}

// What a token finds of the rows `first` to `last` in shared memory, from the newest group to the oldest, and the decay
// of the state before them.
template <int kN>
FW_DEVICE void ring_coefficients(const Rule& rule, const GatheredToken<kN>& token, int first, int last, int span,
                                 int lane, const char* keys, const char* decays, float* coefs, char* product) {
  float p[kN];
  token.alpha(p);
  FW_NO_UNROLL
  for (int from = first + (last - first - 1) / kRingGroup * kRingGroup; last > first && from >= first;
       from -= kRingGroup) {
    const int count = last - from < kRingGroup ? last - from : kRingGroup;
    float w[kRingGroup][kN], of_group[kN];
    make_group<kN>(
        count,
        [&](int i, float(&key)[kN], float(&alpha)[kN]) {
          load_wide<kN>(keys + 128 * kN * (from + i) + 4 * kN * lane, key);
          ring_decay(rule, decays, from + i, lane, alpha);
        },
        w, of_group);
    group_coefficients<kN>(token, p, w, count, span, lane, coefs + from);
#pragma unroll
    for (int c = 0; c < kN; ++c) p[c] *= of_group[c];
  }
  store_wide<kN>(product + 4 * kN * lane, 0, p);
}

// Channels of a row of the ring in memory, of which there are K; others are `past`. wide: in units of 16 bytes, and kN
// is at most 4.
template <int kN>
FW_DEVICE void load_ring_channels(bool wide, const float* row, int K, float past, int lane, float (&x)[kN]) {
  const int first = lane * kN;
#pragma unroll
  for (int c = 0; c < kN; ++c) x[c] = past;
  if (wide) {
    if (first < K) load_wide<kN>(reinterpret_cast<const char*>(row + first), x);
    return;
  }
#pragma unroll
  for (int c = 0; c < kN; ++c) {
    if (first + c < K) x[c] = row[first + c];
  }
}

// Rows `first` to `last` times the decays after them, and all of those decays, by a warp.
template <int kN>
FW_DEVICE void fold_ring_keys(const Rule& rule, int first, int last, int lane, char* keys, const char* decays,
                              char* product) {
  float p[kN];
#pragma unroll
  for (int c = 0; c < kN; ++c) p[c] = 1;
  FW_NO_UNROLL
  for (int j = last - 1; j >= first; --j) {
    float w[kN], alpha[kN];
    char* const at = keys + 128 * kN * j + 4 * kN * lane;
    load_wide<kN>(at, w);
    ring_decay(rule, decays, j, lane, alpha);
#pragma unroll
    for (int c = 0; c < kN; ++c) w[c] *= p[c], p[c] *= alpha[c];
    store_wide<kN>(at, 0, w);
  }
  store_wide<kN>(product + 4 * kN * lane, 0, p);
}

// Rows of the state after a fold of `count` tokens, from the newest to the oldest. key(j, w): w of token j times the
// decays after it; u(j, values): u of token j in the kRows rows.
template <int kN, int kRows, class Key, class Values>
FW_DEVICE void fold_rows(int count, const char* product, int lane, Key&& key, Values&& u, float (&s)[kRows][kN]) {
  float p[kN];
  load_wide<kN>(product + 4 * kN * lane, p);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kN; ++c) s[i][c] *= p[c];
  }
  FW_NO_UNROLL
  for (int j = count - 1; j >= 0; --j) {
    float w[kN], values[kRows];
    key(j, w);
    u(j, values);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < kN; ++c) s[i][c] = fmaf(w[c], values[i], s[i][c]);
    }
  }
}
// Keys in shared memory, as fold_ring_keys() leaves them.
template <int kN>
struct FoldedKeys {
  const char* rows;
  int lane;
  FW_DEVICE void operator()(int j, float (&w)[kN]) const { load_wide<kN>(rows + 128 * kN * j + 4 * kN * lane, w); }
};

// As a state of bf16 would be loaded again.
template <int kN, int kRows>
FW_DEVICE void round_rows(bool bf16, float (&s)[kRows][kN]) {
  if (!bf16) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kN; ++c) s[i][c] = bf16_value(bf16_bits(s[i][c]));
  }
}

}  // namespace fw::cuda
