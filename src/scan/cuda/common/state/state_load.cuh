// How the states of a call come into the registers of a block and go back: by rows of channels, through shared memory
// where values are neighbours, or one by one. What a thread loads it converts later, so that the loads are under way
// while it does other things.
#pragma once

#include "scan/cuda/common/state/state_rows.cuh"
#include "scan/cuda/traits.h"

namespace fw::cuda {

// Shared memory for a staged tile.
inline int64_t stage_bytes(const StateArg& a, StateAccess access, int channels, int tile) {
  return access == StateAccess::kStaged ? int64_t{32} * channels * tile * (a.bf16 != 0 ? 2 : 4) : 0;
}

// A staged tile: [K][tile] in units of 16 bytes, which are swizzled so that lanes that read or write the same
// values of different channels meet different banks.
template <int kN>
struct Stage {
  char* data;
  int log_units;  // of a channel

  // Tiles of 2^log_tile values.
  FW_DEVICE Stage(char* base, int log_tile, int bf16) : data(base), log_units(log_tile - (bf16 != 0 ? 3 : 2)) {}
  // Byte `at` of channel k.
  FW_DEVICE char* address(int k, int at) const {
    constexpr int kLog = kN == 8 ? 3 : kN == 4 ? 2 : 1;
    const int shift = log_units + kLog < 3 ? 3 - log_units : kLog;
    const int unit = ((k << log_units) + at / 16) ^ ((k >> shift) & 7);
    return data + 16 * unit + at % 16;
  }
};

// The tile's numbers on their way into the stage, by `threads` threads of which this is number `thread`.
template <int kN>
FW_DEVICE void stage_in(const StateRef& state, const Stage<kN>& stage, int v_tile, int V, int K, int thread,
                        int threads) {
  const int size = state.bf16 != 0 ? 2 : 4, units = 1 << stage.log_units;
  const uint32_t base = shared_address(stage.data);
  for (int u = thread; u < K * units; u += threads) {
    const int k = u >> stage.log_units, at = 16 * (u & (units - 1)), v = v_tile + (at >> (state.bf16 != 0 ? 1 : 2));
    const char* from = state.data + (k * state.stride_k + v_tile) * size + at;
    cp_async_16(base + static_cast<uint32_t>(stage.address(k, at) - stage.data), v < V ? from : state.data, v < V);
  }
  cp_async_commit();
}
template <int kN>
FW_DEVICE void stage_out(const StateRef& state, const Stage<kN>& stage, int v_tile, int V, int K, int thread,
                         int threads) {
  const int size = state.bf16 != 0 ? 2 : 4, units = 1 << stage.log_units;
  for (int u = thread; u < K * units; u += threads) {
    const int k = u >> stage.log_units, at = 16 * (u & (units - 1));
    if (v_tile + (at >> (state.bf16 != 0 ? 1 : 2)) < V) {
      char* to = state.data + (k * state.stride_k + v_tile) * size + at;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(stage.address(k, at));
    }
  }
}
// Between the stage and the rows from `row` of the tile on.
template <int kN, int kRows>
FW_DEVICE void read_stage(const Stage<kN>& stage, bool bf16, int row, int K, int lane, float (&s)[kRows][kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int k = lane * kN + j;
    float column[kRows] = {};
    if (k < K && bf16) {
      uint32_t words[kRows / 2];
      load_wide<kRows>(stage.address(k, 2 * row), words);
#pragma unroll
      for (int i = 0; i < kRows; i += 2) column[i] = bf16_low(words[i / 2]), column[i + 1] = bf16_high(words[i / 2]);
    }
    if (k < K && !bf16) {
      constexpr int kPart = kRows < 4 ? kRows : 4;
#pragma unroll
      for (int i = 0; i < kRows; i += kPart) {
        float part[kPart];
        load_wide<kPart>(stage.address(k, 4 * (row + i)), part);
#pragma unroll
        for (int l = 0; l < kPart; ++l) column[i + l] = part[l];
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) s[i][j] = column[i];
  }
}
template <int kN, int kRows>
FW_DEVICE void write_stage(const Stage<kN>& stage, bool bf16, int row, int K, int lane, const float (&s)[kRows][kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int k = lane * kN + j;
    if (k >= K) continue;
    constexpr int kPart = kRows < 4 ? kRows : 4;
    if (bf16) {
      float column[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) column[i] = s[i][j];
      store_wide<kRows>(stage.address(k, 2 * row), 1, column);
    } else {
#pragma unroll
      for (int i = 0; i < kRows; i += kPart) {
        float part[kPart];
#pragma unroll
        for (int l = 0; l < kPart; ++l) part[l] = s[i + l][j];
        store_wide<kPart>(stage.address(k, 4 * (row + i)), 0, part);
      }
    }
  }
}

template <int kWords>
FW_DEVICE void load_words(const char* p, float* x) {
  if constexpr (kWords == 1) {
    x[0] = *reinterpret_cast<const float*>(p);
  } else if constexpr (kWords == 2) {
    const float2 a = *reinterpret_cast<const float2*>(p);
    x[0] = a.x, x[1] = a.y;
  } else {
#pragma unroll
    for (int j = 0; j < kWords; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(p + 4 * j);
      x[j] = a.x, x[j + 1] = a.y, x[j + 2] = a.z, x[j + 3] = a.w;
    }
  }
}
// Rows of channels as they lie in memory: a row's bits in s (0 before), bf16 values in the first kN / 2 of them, until
// unpack_rows().
// rows: how many exist.
template <int kN, int kRows>
FW_DEVICE void load_packed_rows(const StateRef& state, int v0, int rows, int K, int lane, float (&s)[kRows][kN]) {
  const int first = lane * kN;
  if (first >= K) return;
  if (state.bf16 != 0) {
    const char* p = state.data + (v0 * state.stride_v + first) * 2;
#pragma unroll
    for (int i = 0; i < kRows; ++i, p += 2 * state.stride_v) {
      if (i < rows) load_words<kN / 2>(p, s[i]);
    }
  } else {
    const char* p = state.data + (v0 * state.stride_v + first) * 4;
#pragma unroll
    for (int i = 0; i < kRows; ++i, p += 4 * state.stride_v) {
      if (i < rows) load_words<kN>(p, s[i]);
    }
  }
}
template <int kN, int kRows>
FW_DEVICE void store_rows(const StateRef& state, int v0, int rows, int K, int lane, const float (&s)[kRows][kN]) {
  const int first = lane * kN;
  if (first >= K) return;
  if (state.bf16 != 0) {
    char* p = state.data + (v0 * state.stride_v + first) * 2;
#pragma unroll
    for (int i = 0; i < kRows; ++i, p += 2 * state.stride_v) {
      if (i < rows) store_wide<kN>(p, 1, s[i]);
    }
  } else {
    char* p = state.data + (v0 * state.stride_v + first) * 4;
#pragma unroll
    for (int i = 0; i < kRows; ++i, p += 4 * state.stride_v) {
      if (i < rows) store_wide<kN>(p, 0, s[i]);
    }
  }
}
template <int kN, int kRows>
FW_DEVICE void unpack_rows(float (&s)[kRows][kN]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = kN - 2; j >= 0; j -= 2) {
      const uint32_t word = float_bits(s[i][j / 2]);
      s[i][j] = bf16_low(word), s[i][j + 1] = bf16_high(word);
    }
  }
}

}  // namespace fw::cuda
