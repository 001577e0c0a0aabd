// Where the chunks of a Mamba-3 layer's angles lie, and a turn's cosine and sine.
#pragma once

#include "gpu/ptx.cuh"
#include "ops/ops.h"

namespace fw::cuda {

// The chunks of all sequences, [rotary_checkpoints]: chunk i of sequence n is at offsets[n] / kRotaryChunk + n + i, so
// that some slots have none.
struct RotaryOffsets {
  const int64_t* offsets;  // [count + 1]
  int64_t count;
  explicit RotaryOffsets(const PassLayout& layout) : offsets(layout.offsets), count(layout.host.count()) {}

  struct Chunk {
    int64_t begin = 0;
    int count = 0;
  };
  FW_DEVICE int64_t first_mark(int64_t n) const { return offsets[n] / kRotaryChunk + n; }
  FW_DEVICE int64_t chunks(int64_t n) const { return (offsets[n + 1] - offsets[n] + kRotaryChunk - 1) / kRotaryChunk; }
  FW_DEVICE Chunk chunk(int64_t mark) const {
    int64_t low = 0, high = count;  // the last sequence whose checkpoints begin at or before this one
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first_mark(middle) <= mark ? low : high) = middle;
    }
    const int64_t begin = offsets[low] + (mark - first_mark(low)) * kRotaryChunk, left = offsets[low + 1] - begin;
    return {begin, static_cast<int>(min(left, kRotaryChunk))};
  }
};

// Cosine and sine of a part of a turn in [-1/2, 1/2], by the series about the nearest quarter, to float's last places.
FW_DEVICE float2 circle_of(float rotation) {
  constexpr float kTwoPi = 6.28318530717958648f;
  const float quarters = rintf(4.0f * rotation), x = kTwoPi * (rotation - 0.25f * quarters), square = x * x;
  float sine = 1.0f / 362880.0f;
  sine = sine * square - 1.0f / 5040.0f;
  sine = sine * square + 1.0f / 120.0f;
  sine = sine * square - 1.0f / 6.0f;
  sine = sine * square * x + x;
  float cosine = 1.0f / 40320.0f;
  cosine = cosine * square - 1.0f / 720.0f;
  cosine = cosine * square + 1.0f / 24.0f;
  cosine = cosine * square - 0.5f;
  cosine = cosine * square + 1.0f;
  const int quarter = static_cast<int>(quarters);
  const bool odd = (quarter & 1) != 0;
  const float c = odd ? sine : cosine, s = odd ? cosine : sine;
  return make_float2(((quarter + 1) & 2) != 0 ? -c : c, (quarter & 2) != 0 ? -s : s);
}

}  // namespace fw::cuda
