// Where things of a token lie: sequences, rows of tensors, states.
#pragma once

#include "gpu/ptx.cuh"
#include "scan/cuda/args.h"

namespace fw::cuda {

FW_DEVICE int32_t sequence_length(const SequenceArg& s, int n) {
  return s.offsets != nullptr ? s.offsets[n + 1] - s.offsets[n] : s.T;
}
// Tokens are numbered over all sequences, in order: the index into workspace arrays [tokens, ...].
FW_DEVICE int64_t first_token(const SequenceArg& s, int n) {
  return s.offsets != nullptr ? s.offsets[n] : static_cast<int64_t>(n) * s.T;
}
FW_DEVICE int32_t first_chunk(const SequenceArg& s, int n) {
  return s.chunk_base != nullptr ? s.chunk_base[n] : n * s.chunks;
}
FW_DEVICE int32_t chunk_count(const SequenceArg& s, int n) {
  return s.chunk_base != nullptr ? s.chunk_base[n + 1] - s.chunk_base[n] : s.chunks;
}

// Chunks and tokens that are there, of those that a call has room for.
FW_DEVICE int64_t chunks_there(const SequenceArg& s, int64_t chunks) {
  return s.bounded != 0 && s.chunk_base[s.N] < chunks ? s.chunk_base[s.N] : chunks;
}
FW_DEVICE int64_t tokens_there(const SequenceArg& s, int64_t tokens) {
  return s.bounded != 0 && s.offsets[s.N] < tokens ? s.offsets[s.N] : tokens;
}
FW_DEVICE int64_t tokens_before(const TokenEnd& end, int64_t tokens) {
  if (end.last == nullptr) return tokens;
  const int64_t last = end.wide != 0 ? *static_cast<const int64_t*>(end.last) : *static_cast<const int32_t*>(end.last);
  return last < 0 ? 0 : last < tokens ? last : tokens;
}

// The sequence that has chunk `chunk` of all chunks.
FW_DEVICE int sequence_of_chunk(const SequenceArg& s, int chunk) {
  if (s.chunk_base == nullptr) return chunk / s.chunks;
  int low = 0, high = s.N - 1;  // chunk_base[low] <= chunk; empty sequences are passed over
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (s.chunk_base[middle] <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The slot where sequence n starts, and that of its states after row t; -1: none.
FW_DEVICE int usable_slot(const SlotArg& s, int slot) { return slot < s.first ? -1 : slot; }
FW_DEVICE int column_slot(const SlotArg& s, int n, int column) {
  return column < s.columns ? usable_slot(s, s.tokens[static_cast<int64_t>(n) * s.columns + column]) : -1;
}
FW_DEVICE int token_slot(const SlotArg& s, int n, int t) {
  if (s.token_rows == 1) return column_slot(s, n, t);
  return t % 2 != 0 ? column_slot(s, n, t / 2) : -1;
}
FW_DEVICE int start_slot(const SlotArg& s, int n) {
  if (s.accepted != nullptr) {
    const int token = s.accepted[n] - 1;
    return column_slot(s, n, token < 0 ? 0 : token < s.columns ? token : s.columns - 1);
  }
  return s.own != nullptr ? usable_slot(s, s.own[n]) : n;
}
FW_DEVICE int end_slot(const SlotArg& s, int n) {
  return s.finals != nullptr ? usable_slot(s, s.finals[n]) : start_slot(s, n);
}
FW_DEVICE bool skips(const SlotArg& s, int slot) { return slot < 0 && s.skips != 0; }
FW_DEVICE int state_slot(const StateArg& a, int n) {
  if (a.slots == nullptr) return n;
  return a.slots[n] < a.first_slot ? -1 : a.slots[n];
}
// Where checkpoint i of sequence n goes; -1: nowhere.
FW_DEVICE int checkpoint_index(const CheckpointArg& a, int n, int i) {
  if (a.slots != nullptr) {
    const int slot = i < a.columns ? a.slots[static_cast<int64_t>(n) * a.columns + i] : -1;
    return slot < a.first_slot ? -1 : slot;
  }
  const int64_t interval = static_cast<int64_t>(a.chunks) * kChunk;
  return static_cast<int>(a.whole.offsets != nullptr ? a.whole.offsets[n] / interval : n * (a.whole.T / interval)) + i;
}
// What follows the first `tokens` tokens of sequence n, if that is a checkpoint; -1: it is none, or it is not wanted.
FW_DEVICE int checkpoint_after(const CheckpointArg& a, int n, int tokens) {
  const int interval = a.chunks * kChunk;
  return tokens % interval == 0 ? checkpoint_index(a, n, tokens / interval - 1) : -1;
}
FW_DEVICE bool has_slots(const SlotArg& s) { return s.own != nullptr || s.tokens != nullptr; }

// Rows of one sequence and value head.
struct Rows {
  char* data = nullptr;
  int64_t stride = 0;  // elements
  int32_t bf16 = 0;
};

// Batch and token of a tensor where sequence n begins.
struct SequenceStart {
  int64_t b, t;
};
FW_DEVICE SequenceStart sequence_start(const SequenceArg& s, int n) {
  int64_t b = s.offsets != nullptr ? 0 : n, t = s.offsets != nullptr ? s.offsets[n] : 0;
  if (s.batch > 0) {
    b = t / s.batch;
    t -= b * s.batch;
  }
  return {b, t};
}

// `head`: of the tensor's own.
FW_DEVICE Rows rows_of_head(const TokenArg& a, const SequenceArg& s, int n, int head) {
  if (a.data == nullptr) return {};
  const SequenceStart start = sequence_start(s, n);
  const int64_t offset = start.b * a.stride_b + start.t * a.stride_t + static_cast<int64_t>(head) * a.stride_h;
  return {static_cast<char*>(a.data) + offset * (a.bf16 != 0 ? 2 : 4), a.stride_t, a.bf16};
}
FW_DEVICE Rows rows_of(const TokenArg& a, const SequenceArg& s, int n, int hv) {
  return rows_of_head(a, s, n, a.divisor == 1 ? hv : hv / a.divisor);
}
// The same by key head, for a tensor that has those.
FW_DEVICE Rows key_rows(const TokenArg& a, const SequenceArg& s, int n, int h) { return rows_of_head(a, s, n, h); }

// An element as it lies in memory, and its value: for loads a work tile ahead, since a number that may have been either
// of two is waited for at once.
FW_DEVICE uint32_t load_bits(bool bf16, const char* at) {
  return bf16 ? uint32_t{*reinterpret_cast<const uint16_t*>(at)} : *reinterpret_cast<const uint32_t*>(at);
}
FW_DEVICE float value_of_bits(bool bf16, uint32_t bits) { return bits_float(bf16 ? bits << 16 : bits); }

FW_DEVICE float load_element(const Rows& rows, int64_t t, int i) {
  const int64_t at = t * rows.stride + i;
  return rows.bf16 != 0 ? bf16_value(reinterpret_cast<const uint16_t*>(rows.data)[at])
                        : reinterpret_cast<const float*>(rows.data)[at];
}

FW_DEVICE void store_element(const Rows& rows, int64_t t, int i, float x) {
  const int64_t at = t * rows.stride + i;
  if (rows.bf16 != 0) {
    reinterpret_cast<uint16_t*>(rows.data)[at] = bf16_bits(x);
  } else {
    reinterpret_cast<float*>(rows.data)[at] = x;
  }
}

// kN neighbouring channels from i on, of which those at `limit` and above are 0. Wide loads where the address allows
// it.
template <int kN>
FW_DEVICE void load_channels(const Rows& rows, int64_t t, int i, int limit, float (&x)[kN]) {
  const int64_t at = t * rows.stride + i;
  if constexpr (kN == 8) {
    if (i + 8 <= limit) {
      const char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
      if ((reinterpret_cast<uintptr_t>(p) & 15) == 0) {
        const uint4 a = *reinterpret_cast<const uint4*>(p);
        const uint32_t words[4] = {a.x, a.y, a.z, a.w};
        if (rows.bf16 != 0) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[2 * j] = bf16_low(words[j]);
            x[2 * j + 1] = bf16_high(words[j]);
          }
        } else {
          const float4 low = *reinterpret_cast<const float4*>(p), high = *reinterpret_cast<const float4*>(p + 16);
          x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z,
          x[7] = high.w;
        }
        return;
      }
    }
  }
  if constexpr (kN == 4) {
    if (i + 4 <= limit) {
      const char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
      if (rows.bf16 != 0 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
        const uint2 a = *reinterpret_cast<const uint2*>(p);
        x[0] = bf16_low(a.x), x[1] = bf16_high(a.x), x[2] = bf16_low(a.y), x[3] = bf16_high(a.y);
        return;
      }
      if (rows.bf16 == 0 && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
        const float4 a = *reinterpret_cast<const float4*>(p);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        return;
      }
    }
  }
  if constexpr (kN == 2) {
    if (i + 2 <= limit) {
      const char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
      if (rows.bf16 != 0 && (reinterpret_cast<uintptr_t>(p) & 3) == 0) {
        const uint32_t a = *reinterpret_cast<const uint32_t*>(p);
        x[0] = bf16_low(a), x[1] = bf16_high(a);
        return;
      }
      if (rows.bf16 == 0 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
        const float2 a = *reinterpret_cast<const float2*>(p);
        x[0] = a.x, x[1] = a.y;
        return;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] = i + j < limit ? load_element(rows, t, i + j) : 0.0f;
}

template <int kN>
FW_DEVICE void store_channels(const Rows& rows, int64_t t, int i, int limit, const float (&x)[kN]) {
  const int64_t at = t * rows.stride + i;
  if constexpr (kN == 8) {
    if (i + 8 <= limit) {
      char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
      if ((reinterpret_cast<uintptr_t>(p) & 15) == 0) {
        if (rows.bf16 != 0) {
          *reinterpret_cast<uint4*>(p) =
              make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
        } else {
          *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
          *reinterpret_cast<float4*>(p + 16) = make_float4(x[4], x[5], x[6], x[7]);
        }
        return;
      }
    }
  }
  if constexpr (kN == 2 || kN == 4) {
    if (i + kN <= limit) {
      char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
      if ((reinterpret_cast<uintptr_t>(p) & (rows.bf16 != 0 ? 2 * kN - 1 : 4 * kN - 1)) == 0) {
        if constexpr (kN == 4) {
          if (rows.bf16 != 0) {
            *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
          } else {
            *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
          }
        } else {
          if (rows.bf16 != 0) {
            *reinterpret_cast<uint32_t*>(p) = pack_bf16(x[0], x[1]);
          } else {
            *reinterpret_cast<float2*>(p) = make_float2(x[0], x[1]);
          }
        }
        return;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (i + j < limit) store_element(rows, t, i + j, x[j]);
  }
}

}  // namespace fw::cuda
