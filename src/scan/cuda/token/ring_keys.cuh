// The key side of a step with a ring, in shared memory (scan/ring.h). It has rows of the ring and of the call's tokens,
// what each token finds of those before it, and products of decays. A lane has the kN channels from lane kN on.
#pragma once

#include "scan/cuda/token/step.cuh"
#include "scan/ring.h"

namespace fw::cuda {

// Byte offsets in shared memory. A row of channels is 128 kN bytes, the row of values `tile` floats.
struct RingCut {
  int32_t keys = 0;      // w [span]; those of a fold times their decays
  int32_t decays = 0;    // [span], channels or one number
  int32_t products = 0;  // [tokens + 2] rows of channels: decays of the state for each token, then for two folds
  int32_t coefs = 0;     // float2 [tokens, span]: of e and of r
  int32_t u = 0;         // [span, tile]
  int32_t end = 0;
  int32_t tile = 0, key_warps = 1;
  bool wide = false;  // rows of the ring in units of 16 bytes
};

// The ring of one sequence and value head. row(at): of the token at position `at`.
struct RingHead {
  float* data;
  int64_t stride;
  int rows;
  FW_DEVICE float* row(int at) const { return data + at % rows * stride; }
};
FW_DEVICE RingHead ring_head(const RingArg& ring, int slot, int hv) {
  return {ring.data + slot * ring.stride_n + hv * ring.stride_h, ring.stride_r, ring.rows};
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

// Starts the copies of the ring's rows `first` to `last` that this warp has, one in `warps`.
template <int kN>
FW_DEVICE void load_ring_keys(const Rule& rule, int K, int V, int hv, const RingHead& ring, int first, int last,
                              int warp, int warps, bool wide, int lane, char* keys, char* decays) {
  FW_NO_UNROLL
  for (int j = warp; j < last - first; j += warps) {
    const float* row = ring.row(first + j);
    copy_floats(wide, row, K, 32 * kN, keys + 128 * kN * j, lane);
    if (rule.decay == Decay::kChannel) {
      copy_floats(wide, row + K + V, K, 32 * kN, decays + 128 * kN * j, lane);
    } else if (lane == 0 && rule.decay != Decay::kNone) {
      reinterpret_cast<float*>(decays)[j] =
          rule.decay == Decay::kScalar ? row[K + V] : static_cast<float>(constant_decay(hv));
    }
  }
  cp_async_commit();
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

// What a token finds of the rows `first` to `last`, from the newest to the oldest, and the decay of the state in front
// of them.
template <int kN>
FW_DEVICE void ring_coefficients(const Rule& rule, const GatheredToken<kN>& token, int first, int last, int lane,
                                 const char* keys, const char* decays, float2* coefs, char* product) {
  constexpr int kBlock = 8;
  float p[kN], e[kN], r[kN];
  token.alpha(p);
  token.e(e);
  token.r(r);
  FW_NO_UNROLL
  for (int end = last; end > first; end -= kBlock) {
    float sums[2 * kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int j = end - 1 - i;
      sums[i] = sums[kBlock + i] = 0;
      if (j < first) continue;
      float w[kN], alpha[kN];
      load_wide<kN>(keys + 128 * kN * j + 4 * kN * lane, w);
      ring_decay(rule, decays, j, lane, alpha);
#pragma unroll
      for (int c = 0; c < kN; ++c) {
        const float decayed = p[c] * w[c];
        sums[i] = fmaf(decayed, e[c], sums[i]);
        sums[kBlock + i] = fmaf(decayed, r[c], sums[kBlock + i]);
        p[c] *= alpha[c];
      }
    }
    const float own = scattered_sum(sums, lane);
    const int number = lane / 2, j = end - 1 - number % kBlock;
    if (lane % 2 == 0 && j >= first) (number < kBlock ? coefs[j].x : coefs[j].y) = own;
  }
  store_wide<kN>(product + 4 * kN * lane, 0, p);
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

// Rows of the state after a fold: keys [count] as fold_ring_keys() leaves them; u(j, values) has u of token j in the
// kRows rows.
template <int kN, int kRows, class Values>
FW_DEVICE void fold_rows(const char* keys, int count, const char* product, int lane, Values&& u,
                         float (&s)[kRows][kN]) {
  float p[kN];
  load_wide<kN>(product + 4 * kN * lane, p);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kN; ++c) s[i][c] *= p[c];
  }
  FW_NO_UNROLL
  for (int j = 0; j < count; ++j) {
    float w[kN], values[kRows];
    load_wide<kN>(keys + 128 * kN * j + 4 * kN * lane, w);
    u(j, values);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < kN; ++c) s[i][c] = fmaf(w[c], values[i], s[i][c]);
    }
  }
}

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
