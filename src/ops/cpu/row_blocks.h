// How the operations cut their work: blocks of rows whose size depends on the shape only, so that sums over rows are
// taken in the same order whatever the number of threads is. Scratch memory for partial sums comes from an arena of
// the calling thread, so that no operation asks the system for memory in every step.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/local_scratch.h"
#include "base/threads.h"

namespace fw {

struct RowBlocks {
  int64_t rows = 0;
  int64_t size = 1;

  // About 16,384 elements a block (some microseconds of work), but never more than 64 blocks: a block may own a row of
  // partial sums.
  static RowBlocks cut(int64_t rows, int64_t cols) {
    const int64_t by_work = 16384 / std::max<int64_t>(cols, 1);
    return {rows, std::max<int64_t>({by_work, (rows + 63) / 64, 1})};
  }

  int64_t count() const { return (rows + size - 1) / size; }
  int64_t begin(int64_t block) const { return block * size; }
  int64_t end(int64_t block) const { return std::min(rows, (block + 1) * size); }
};

// body(block, begin, end) for every block. A single block runs on the caller without waking any thread.
template <class Body>
void for_row_blocks(const RowBlocks& blocks, const Body& body) {
  const int64_t count = blocks.count();
  if (count == 1) return body(int64_t{0}, int64_t{0}, blocks.rows);
  parallel_for(count, [&](int64_t block) { body(block, blocks.begin(block), blocks.end(block)); });
}

// Gradients of parameters: one row of n partial sums per block (zero at first), added up in the order of the blocks.
template <class T>
class PartialSums {
 public:
  PartialSums(int64_t blocks, int64_t n) : blocks_(blocks), n_(n), sums_(scratch_.alloc_zero<T>(blocks * n)) {}

  T* block(int64_t b) { return sums_ + b * n_; }

  // The total of all blocks, in place of the first block's sums; needs at least one block.
  const T* total() {
    for (int64_t b = 1; b < blocks_; ++b) {
      const T* row = block(b);
      for (int64_t i = 0; i < n_; ++i) sums_[i] += row[i];
    }
    return sums_;
  }
  void add_to(T* out) {
    if (blocks_ == 0) return;
    const T* sums = total();
    for (int64_t i = 0; i < n_; ++i) out[i] += sums[i];
  }

 private:
  LocalScratch scratch_;
  int64_t blocks_;
  int64_t n_;
  T* sums_;
};

}  // namespace fw
