// Rows of the state in registers: a warp has kRows neighbouring value rows, lane l of it the kN channels from l kN on,
// K <= 32 kN. Channels and rows past the end are 0 and never stored. One token of the recurrence on such rows.
#pragma once

#include "scan/cuda/common/state/token_key.cuh"

namespace fw::cuda {

// The state [K, V] of one sequence and head. data null: absent.
struct StateRef {
  char* data = nullptr;
  int64_t stride_k = 0, stride_v = 0;
  int32_t bf16 = 0;
};

FW_DEVICE StateRef state_of(const StateArg& a, int64_t n, int head) {
  if (a.data == nullptr) return {};
  return {static_cast<char*>(a.data) + (n * a.stride_n + head * a.stride_h) * (a.bf16 != 0 ? 2 : 4), a.stride_k,
          a.stride_v, a.bf16};
}

// kCount (2, 4, 8) neighbouring numbers at an address that is a multiple of their size or of 16. The bf16 form leaves
// them packed, so that several loads are under way before the first is waited for.
template <int kCount>
FW_DEVICE void load_wide(const char* p, float (&x)[kCount]) {
  if constexpr (kCount == 2) {
    const float2 a = *reinterpret_cast<const float2*>(p);
    x[0] = a.x, x[1] = a.y;
  } else {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(p + 4 * j);
      x[j] = a.x, x[j + 1] = a.y, x[j + 2] = a.z, x[j + 3] = a.w;
    }
  }
}
template <int kCount>
FW_DEVICE void load_wide(const char* p, uint32_t (&x)[kCount / 2]) {
  if constexpr (kCount == 2) {
    x[0] = *reinterpret_cast<const uint32_t*>(p);
  } else if constexpr (kCount == 4) {
    const uint2 a = *reinterpret_cast<const uint2*>(p);
    x[0] = a.x, x[1] = a.y;
  } else {
    const uint4 a = *reinterpret_cast<const uint4*>(p);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
  }
}
template <int kCount>
FW_DEVICE void store_wide(char* p, int32_t bf16, const float (&x)[kCount]) {
  if (bf16 == 0) {
    if constexpr (kCount == 2) {
      *reinterpret_cast<float2*>(p) = make_float2(x[0], x[1]);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; j += 4)
        *reinterpret_cast<float4*>(p + 4 * j) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
    }
    return;
  }
  if constexpr (kCount == 2) {
    *reinterpret_cast<uint32_t*>(p) = pack_bf16(x[0], x[1]);
  } else if constexpr (kCount == 4) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
  } else {
    *reinterpret_cast<uint4*>(p) =
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
}

// How the memory of a state is reached from these rows: by vectors of kN channels, by vectors of kRows values, one by
// one.
enum class StatePath { kChannels, kValues, kElements };

template <int kN, int kRows>
FW_DEVICE StatePath state_path(const StateRef& s, int v0, int V, int K) {
  const int size = s.bf16 != 0 ? 2 : 4;
  // Vectors lie at multiples of their size, a power of two, or of 16.
  const uintptr_t channels = static_cast<uintptr_t>(kN * size < 16 ? kN * size : 16) - 1,
                  values = static_cast<uintptr_t>(kRows * size < 16 ? kRows * size : 16) - 1;
  const auto base = reinterpret_cast<uintptr_t>(s.data);
  if (s.stride_k == 1 && K % kN == 0 && ((base | static_cast<uintptr_t>(s.stride_v * size)) & channels) == 0)
    return StatePath::kChannels;
  if (s.stride_v == 1 && v0 + kRows <= V &&
      (((base + static_cast<uintptr_t>(v0 * size)) | static_cast<uintptr_t>(s.stride_k * size)) & values) == 0)
    return StatePath::kValues;
  return StatePath::kElements;
}

template <int kN, int kRows>
FW_DEVICE void load_state_elements(const StateRef& state, int v0, int V, int K, int lane, float (&s)[kRows][kN]) {
  const int first = lane * kN;
  float slow[kRows * kN];  // in local memory: this path shall not cost the others registers
  FW_NO_UNROLL
  for (int e = 0; e < kRows * kN; ++e) {
    const int i = e / kN, j = e % kN;
    slow[e] = 0;
    if (v0 + i < V && first + j < K) {
      const int64_t at = (v0 + i) * state.stride_v + (first + j) * state.stride_k;
      slow[e] = state.bf16 != 0 ? bf16_value(reinterpret_cast<const uint16_t*>(state.data)[at])
                                : reinterpret_cast<const float*>(state.data)[at];
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) s[i][j] = slow[i * kN + j];
  }
}

template <int kN, int kRows>
FW_DEVICE void load_state(const StateRef& state, int v0, int V, int K, int lane, float (&s)[kRows][kN]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) s[i][j] = 0;
  }
  if (state.data == nullptr) return;
  const int first = lane * kN, size = state.bf16 != 0 ? 2 : 4;
  const StatePath path = state_path<kN, kRows>(state, v0, V, K);
  if (path == StatePath::kChannels) {
    const char* p = state.data + (v0 * state.stride_v + first) * size;
    const int64_t step = state.stride_v * size;
    if (state.bf16 == 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (v0 + i < V && first < K) load_wide<kN>(p + i * step, s[i]);
      }
    } else {
      uint32_t words[kRows][kN / 2] = {};
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (v0 + i < V && first < K) load_wide<kN>(p + i * step, words[i]);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kN; j += 2) s[i][j] = bf16_low(words[i][j / 2]), s[i][j + 1] = bf16_high(words[i][j / 2]);
      }
    }
    return;
  }
  if (path == StatePath::kValues) {
    const char* p = state.data + (first * state.stride_k + v0) * size;
    const int64_t step = state.stride_k * size;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      float column[kRows] = {};
      if (first + j < K) {
        if (state.bf16 == 0) {
          load_wide<kRows>(p + j * step, column);
        } else {
          uint32_t words[kRows / 2];
          load_wide<kRows>(p + j * step, words);
#pragma unroll
          for (int i = 0; i < kRows; i += 2)
            column[i] = bf16_low(words[i / 2]), column[i + 1] = bf16_high(words[i / 2]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) s[i][j] = column[i];
    }
    return;
  }
  load_state_elements<kN, kRows>(state, v0, V, K, lane, s);
}

template <int kN, int kRows>
FW_DEVICE void store_state_channels(const StateRef& state, int v0, int V, int K, int lane,
                                    const float (&s)[kRows][kN]) {
  const int first = lane * kN, size = state.bf16 != 0 ? 2 : 4;
  char* p = state.data + (v0 * state.stride_v + first) * size;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (v0 + i < V && first < K) store_wide<kN>(p + i * state.stride_v * size, state.bf16, s[i]);
  }
}

template <int kN, int kRows>
FW_DEVICE void store_state_elements(const StateRef& state, int v0, int V, int K, int lane,
                                    const float (&s)[kRows][kN]) {
  const int first = lane * kN;
  float slow[kRows * kN];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) slow[i * kN + j] = s[i][j];
  }
  FW_NO_UNROLL
  for (int e = 0; e < kRows * kN; ++e) {
    const int i = e / kN, j = e % kN;
    if (v0 + i < V && first + j < K) {
      const int64_t at = (v0 + i) * state.stride_v + (first + j) * state.stride_k;
      if (state.bf16 != 0) {
        reinterpret_cast<uint16_t*>(state.data)[at] = bf16_bits(slow[e]);
      } else {
        reinterpret_cast<float*>(state.data)[at] = slow[e];
      }
    }
  }
}

template <int kN, int kRows>
FW_DEVICE void store_state(const StateRef& state, int v0, int V, int K, int lane, const float (&s)[kRows][kN]) {
  if (state.data == nullptr) return;
  const int first = lane * kN, size = state.bf16 != 0 ? 2 : 4;
  const StatePath path = state_path<kN, kRows>(state, v0, V, K);
  if (path == StatePath::kChannels) return store_state_channels<kN, kRows>(state, v0, V, K, lane, s);
  if (path == StatePath::kValues) {
    char* p = state.data + (first * state.stride_k + v0) * size;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      float column[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) column[i] = s[i][j];
      if (first + j < K) store_wide<kRows>(p + j * state.stride_k * size, state.bf16, column);
    }
    return;
  }
  store_state_elements<kN, kRows>(state, v0, V, K, lane, s);
}

// Sums over the warp of kCount (a power of two, at most 32) numbers a lane: lane l gets that of number l kCount / 32.
// The order of a sum does not depend on kCount.
template <int kCount, int kMask = 16>
FW_DEVICE float scattered_sum(const float (&x)[kCount], int lane) {
  if constexpr (kMask == 0) {
    return x[0];
  } else if constexpr (kCount == 1) {
    const float sum[1] = {x[0] + shuffle_xor(x[0], kMask)};
    return scattered_sum<1, kMask / 2>(sum, lane);
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & kMask) != 0;
    float sums[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float give = upper ? x[i] : x[i + kHalf], keep = upper ? x[i + kHalf] : x[i];
      sums[i] = keep + shuffle_xor(give, kMask);
    }
    return scattered_sum<kHalf, kMask / 2>(sums, lane);
  }
}

// Where a lane finds the row scales (its z, its residual): lanes from row_lane(i) on, and 16 further on, have row i.
template <int kRows>
FW_DEVICE constexpr int row_lane(int i) {
  return i * (16 / kRows);
}
template <int kRows>
FW_DEVICE int row_of_lane(int lane) {
  return (lane & 15) / (16 / kRows);
}
// The lane that loads and stores for its row.
template <int kRows>
FW_DEVICE bool has_row(int lane) {
  return lane < 16 && lane % (16 / kRows) == 0;
}

// S = Diag(alpha) S + w (z - (Diag(alpha) S)^T e)^T. z, the residual that is returned and o: of the lane's row. The
// token's streams are asked for where they are used: e(x), r(x), w(x) and alpha(x) fill this lane's channels.
template <int kN, int kRows, class Token>
FW_DEVICE float token_step(const Token& token, float z, int lane, float (&s)[kRows][kN], float& o) {
  float sums[2 * kRows];
  {
    float alpha[kN], e[kN], r[kN];
    token.alpha(alpha);
    token.e(e);
    token.r(r);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float u = 0, p = 0;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        s[i][j] *= alpha[j];
        u = fmaf(e[j], s[i][j], u);
        p = fmaf(r[j], s[i][j], p);
      }
      sums[i] = u;
      sums[kRows + i] = p;
    }
  }
  const float own = scattered_sum(sums, lane), other = shuffle_xor(own, 16);
  const float residual = z - (lane < 16 ? own : other);
  o = fmaf(token.rw, residual, lane < 16 ? other : own);
  float w[kN];
  token.w(w);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float u = shuffle(residual, row_lane<kRows>(i));
#pragma unroll
    for (int j = 0; j < kN; ++j) s[i][j] = fmaf(w[j], u, s[i][j]);
  }
  return residual;
}

}  // namespace fw::cuda
