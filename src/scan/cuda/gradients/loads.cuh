// Small pieces of rows between memory and registers.
#pragma once

#include "scan/cuda/gradients/layout.cuh"

namespace fw::cuda {

FW_DEVICE uint4 pack_8(const float (&x)[8]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Two neighbouring channels.
FW_DEVICE float2 load_pair(const Rows& rows, int64_t t, int i, int limit) {
  const int64_t at = t * rows.stride + i;
  if (i + 2 <= limit) {
    const char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
    if (rows.bf16 != 0 && (reinterpret_cast<uintptr_t>(p) & 3) == 0) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(p);
      return make_float2(bf16_low(word), bf16_high(word));
    }
    if (rows.bf16 == 0 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) return *reinterpret_cast<const float2*>(p);
  }
  return make_float2(i < limit ? load_element(rows, t, i) : 0.0f, i + 1 < limit ? load_element(rows, t, i + 1) : 0.0f);
}
FW_DEVICE void store_pair(const Rows& rows, int64_t t, int i, int limit, float2 x) {
  const int64_t at = t * rows.stride + i;
  char* p = rows.data + at * (rows.bf16 != 0 ? 2 : 4);
  if (i + 2 <= limit && rows.bf16 != 0 && (reinterpret_cast<uintptr_t>(p) & 3) == 0) {
    *reinterpret_cast<uint32_t*>(p) = pack_bf16(x.x, x.y);
    return;
  }
  if (i + 2 <= limit && rows.bf16 == 0 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    *reinterpret_cast<float2*>(p) = x;
    return;
  }
  if (i < limit) store_element(rows, t, i, x.x);
  if (i + 1 < limit) store_element(rows, t, i + 1, x.y);
}

// The gradient of one value a token, or of the channels of a gate that was averaged.
template <int kLanes>
FW_DEVICE void store_gate(const Rows& rows, Gate gate, int t, int lane, int dim, float x) {
  if (rows.data == nullptr) return;
  if (gate == Gate::kScalar && lane == 0) store_element(rows, t, 0, x);
  if (gate == Gate::kAveraged) {
    for (int i = lane; i < dim; i += kLanes) store_element(rows, t, i, x / static_cast<float>(dim));
  }
}

FW_DEVICE void store_one(const Rows& rows, int t, float x) {
  if (rows.data != nullptr) store_element(rows, t, 0, x);
}

}  // namespace fw::cuda
