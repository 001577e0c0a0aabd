// How elementwise kernels move rows: packets of 16 bytes, 4 floats or 8 bf16 values, or of one number where rows do not
// begin at multiples of 16 bytes. A packet stays as it is stored until it is used, so that many of them fit into the
// registers while they are on their way.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "gpu/ptx.cuh"

namespace fw::cuda {

FW_DEVICE float number(float x) { return x; }
FW_DEVICE float number(Bf16 x) { return bf16_value(x.bits); }
template <class T>
FW_DEVICE T stored(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return Bf16{static_cast<uint16_t>(bf16_bits(x))};
  }
}

template <class T>
inline constexpr int kPacket = 16 / static_cast<int>(sizeof(T));

// 8 or 16 bytes in one instruction. Used where the compiler has taken a packet of numbers that were computed apart and
// not put it together again (the convolutions and the embedding's gradient). Look for STG.E without .64 or .128. Not of
// packets that are only moved: the words would be joined as soon as they have come, so that the next load waits (a copy
// of rows takes a sixth longer).
__extension__ using Words4 = unsigned __int128;
FW_DEVICE void store_words(void* to, const uint32_t (&words)[2]) {
  *static_cast<uint64_t*>(to) = words[0] | uint64_t{words[1]} << 32;
}
FW_DEVICE void store_words(void* to, const uint32_t (&words)[4]) {
  const uint64_t low = words[0] | uint64_t{words[1]} << 32, high = words[2] | uint64_t{words[3]} << 32;
  *static_cast<Words4*>(to) = low | Words4{high} << 64;
}

// N numbers in 16 or 8 bytes, or one.
template <class T, int N>
struct Packet {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords == 2 || kWords == 4);
  uint32_t words[kWords] = {};

  FW_DEVICE void load(const T* from) {
    if constexpr (kWords == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x, words[1] = v.y;
    }
  }
  FW_DEVICE void store(T* to) const {
    if constexpr (kWords == 4) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }
  FW_DEVICE void store_at_once(T* to) const { store_words(to, words); }
  FW_DEVICE void get(float (&x)[N]) const {
    FW_UNROLL for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        x[i] = bits_float(words[i]);
      } else {
        x[2 * i] = bf16_low(words[i]);
        x[2 * i + 1] = bf16_high(words[i]);
      }
    }
  }
  FW_DEVICE void set(const float (&x)[N]) {
    FW_UNROLL for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = float_bits(x[i]);
      } else {
        words[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
      }
    }
  }
  // Of numbers of 16 bits: their bits.
  FW_DEVICE void get_u16(uint32_t (&x)[N]) const {
    static_assert(sizeof(T) == 2);
    FW_UNROLL for (int i = 0; i < kWords; ++i) x[2 * i] = words[i] & 0xffffu, x[2 * i + 1] = words[i] >> 16;
  }
  FW_DEVICE void set_u16(const uint32_t (&x)[N]) {
    static_assert(sizeof(T) == 2);
    FW_UNROLL for (int i = 0; i < kWords; ++i) words[i] = x[2 * i] | x[2 * i + 1] << 16;
  }
};

template <class T>
struct Packet<T, 1> {
  T bits{};

  FW_DEVICE void load(const T* from) { bits = *from; }
  FW_DEVICE void store(T* to) const { *to = bits; }
  FW_DEVICE void store_at_once(T* to) const { store(to); }
  FW_DEVICE void get(float (&x)[1]) const { x[0] = number(bits); }
  FW_DEVICE void set(const float (&x)[1]) { bits = stored<T>(x[0]); }
  FW_DEVICE void get_u16(uint32_t (&x)[1]) const { x[0] = bits.bits; }
  FW_DEVICE void set_u16(const uint32_t (&x)[1]) { bits = T{static_cast<uint16_t>(x[0])}; }
};

// N floats at a multiple of min(N, 4) floats.
template <int N>
FW_DEVICE void load_floats(const float* from, float (&x)[N]) {
  if constexpr (N == 1) {
    x[0] = *from;
  } else {
    FW_UNROLL for (int i = 0; i < N; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
  }
}

template <int N>
FW_DEVICE void store_floats(float* to, const float (&x)[N]) {
  if constexpr (N == 1) {
    to[0] = x[0];
  } else {
    FW_UNROLL for (int k = 0; k < N; k += 4) * reinterpret_cast<float4*>(to + k) =
        make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
  }
}
template <int N>
FW_DEVICE void store_floats_at_once(float* to, const float (&x)[N]) {
  if constexpr (N == 1) {
    to[0] = x[0];
  } else {
    FW_UNROLL for (int k = 0; k < N; k += 4)
        store_words(to + k, {float_bits(x[k]), float_bits(x[k + 1]), float_bits(x[k + 2]), float_bits(x[k + 3])});
  }
}

// Whether rows `stride` elements apart can be taken in packets.
template <class T>
bool in_packets(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kPacket<T> == 0;
}

}  // namespace fw::cuda
