// Where tokens stand in their sequences, and rows in their pages, for device code.
#pragma once

#include "gpu/ptx.cuh"
#include "ops/ops.h"

namespace fw::cuda {

// The sequences of a pass, in device memory.
struct PassSequences {
  const int64_t* offsets;    // [count + 1]
  const int64_t* positions;  // [count]: tokens before the pass; null: none
  int64_t count;
  bool single;  // a token each: nothing is looked up, since what is decoded waits for every load

  explicit PassSequences(const PassLayout& layout)
      : offsets(layout.offsets),
        positions(layout.positions),
        count(layout.host.count()),
        single(layout.host.single_tokens()) {}

  // The sequence of token t: the last that begins at or before it.
  FW_DEVICE int64_t sequence_of(int64_t t) const {
    if (single) return t;
    int64_t low = 0, high = count;  // offsets[low] <= t < offsets[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (offsets[middle] <= t ? low : high) = middle;
    }
    return low;
  }
  FW_DEVICE int64_t begin_of(int64_t n) const { return single ? n : offsets[n]; }
  FW_DEVICE int64_t before(int64_t n) const { return positions == nullptr ? 0 : positions[n]; }
  // Of token t, from 0 at the sequence's first, those of earlier passes included.
  FW_DEVICE int64_t position_of(int64_t t) const {
    const int64_t n = sequence_of(t);
    return before(n) + t - begin_of(n);
  }
};

// Pages::row() for device code.
template <class T>
FW_DEVICE T* page_row(const Pages<T>& pages, int64_t n, int64_t position) {
  const int64_t page = n * pages.per_sequence + position / pages.rows % pages.per_sequence;
  return (pages.table != nullptr ? global_memory(pages.table[page]) : pages.first + page * pages.rows * pages.width) +
         position % pages.rows * pages.width;
}

}  // namespace fw::cuda
