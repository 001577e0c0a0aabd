// What the kernels of a decoded token's attention share: the rows that a token sees, where they lie, and what a run of
// them leaves.
#pragma once

#include "ops/cuda/attention_rows.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {

template <class T>
struct DecodeArgs {
  PlainArgs<T> plain;
  float* parts = nullptr;  // [sequences, heads, runs, dim + 2]
  int runs = 0;
  Mat<const T> gate = {};  // of the output, before its sigmoid; none: data null
  double theta = 0;        // of whole heads of q and k that decode_tiles() turns; 0: they are as they should be
};

// The rows that the token of sequence n sees: [first, last], the last its own, in runs of `run`.
struct SeenRows {
  int64_t last, first, run;
  template <class T>
  FW_DEVICE SeenRows(const PlainArgs<T>& a, int64_t n) {
    last = a.sequences.before(n);
    first = a.window > 0 ? max(int64_t{0}, last - a.window + 1) : 0;
    const int64_t share = (last - first + kDecodeRuns) / kDecodeRuns;  // of last - first + 1 rows, rounded up
    run = max(kDecodeRun, (share + 31) / 32 * 32);
  }
  FW_DEVICE int64_t runs() const { return (last - first) / run + 1; }
};

// Where rows from a position of sequence n on lie, in pages of keys and of values, which lie alike. Divisions take
// longer than a row takes to come, so the run's first page and the one after it, which are most runs, are looked for
// once.
template <class T>
struct RowsFrom {
  const Pages<T>*keys, *values;
  int64_t n;
  uint32_t page, row, rows;  // page and row in it of the first; rows of a page
  T *k[2], *v[2];

  FW_DEVICE RowsFrom(const Pages<T>& of_keys, const Pages<T>& of_values, int64_t sequence, int64_t position)
      : keys(&of_keys), values(&of_values), n(sequence), rows(static_cast<uint32_t>(of_keys.rows)) {
    const uint32_t pages = static_cast<uint32_t>(keys->per_sequence);
    if (position >> 32 == 0) {
      const uint32_t pos = static_cast<uint32_t>(position), before = pos / rows;
      page = before % pages, row = pos - before * rows;
    } else {
      page = static_cast<uint32_t>(position / keys->rows % keys->per_sequence),
      row = static_cast<uint32_t>(position % keys->rows);
    }
    k[0] = begin_of(*keys, page), v[0] = begin_of(*values, page);
    const uint32_t next = page + 1 == pages ? 0 : page + 1;
    k[1] = begin_of(*keys, next), v[1] = begin_of(*values, next);
  }
  FW_DEVICE T* begin_of(const Pages<T>& of, uint32_t at) const {
    const int64_t index = n * of.per_sequence + at;
    return of.table != nullptr ? global_memory(of.table[index]) : of.first + index * of.rows * of.width;
  }
  // Whether `count` rows from row `index` on lie one after the other.
  FW_DEVICE bool together(int index, int count) const {
    const uint32_t beyond = row + static_cast<uint32_t>(index), in_page = beyond < rows ? beyond : beyond - rows;
    return in_page + static_cast<uint32_t>(count) <= rows;
  }
  // Row `index` of those.
  FW_DEVICE void find(int64_t index, T*& key, T*& value) const {
    const uint32_t beyond = row + static_cast<uint32_t>(index);
    if (beyond < rows) {
      const int64_t at = int64_t{beyond} * keys->width;
      key = k[0] + at, value = v[0] + at;
    } else if (beyond < 2 * rows) {
      const int64_t at = int64_t{beyond - rows} * keys->width;
      key = k[1] + at, value = v[1] + at;
    } else {
      const uint32_t step = beyond / rows, there = (page + step) % static_cast<uint32_t>(keys->per_sequence);
      const int64_t at = int64_t{beyond - step * rows} * keys->width;
      key = begin_of(*keys, there) + at, value = begin_of(*values, there) + at;
    }
  }
};

// What the parts of a run, [count] of each of `heads` heads, leave together: their sums of p v, rows(h, g) [dim],
// scores' tops[h][g] and sums of p sums[h][g]. A part without a row has top -inf and counts nothing. By kRowThreads
// threads.
template <class Row>
FW_DEVICE void leave_part(int heads, int count, int dim, const Row& rows, const float* tops, const float* sums,
                          float* first, int64_t stride) {
  const int thread = static_cast<int>(thread_index());
  for (int h = 0; h < heads; ++h) {
    float all = -INFINITY, weight = 0;
    for (int g = 0; g < count; ++g) all = fmaxf(all, tops[h * count + g]);
    float* part = first + h * stride;
    for (int c = thread; c < dim; c += kRowThreads) {
      float out = 0;
      for (int g = 0; g < count; ++g) out += rows(h, g)[c] * exp2_fast(tops[h * count + g] - all);
      part[c] = out;
    }
    if (thread != 0) continue;
    for (int g = 0; g < count; ++g) weight += sums[h * count + g] * exp2_fast(tops[h * count + g] - all);
    part[dim] = all;
    part[dim + 1] = weight;
  }
}

// The runs of bf16 heads of 64, 128 or 256 channels, all at multiples of 16 bytes, by products of warps
// (decode_tiles.cu). Those of 256 have room on Hopper alone.
bool takes_decode_tiles(int dim);
void decode_tiles(const DecodeArgs<Bf16>& of, int64_t sequences, void* stream);

}  // namespace fw::cuda
