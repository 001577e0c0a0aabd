// What the CUDA device's operations take from the arena and give back when they return: each asks here, and so does a plan (ops/planned_cuda.cpp), which
// computes nothing and needs no CUDA. Sizes are functions of the shape; where a kernel's form changes a size a little, that of the largest is taken.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/arena_mark.h"
#include "ops/exec.h"

namespace fw::cuda {

constexpr int64_t parts_of(int64_t rows, int64_t of_part) { return (rows + of_part - 1) / of_part; }

// Gradients of parameters are sums over rows: of a run of rows each, which a second kernel adds.
inline constexpr int64_t kBiasRun = 64, kConvRun = 128, kGatedConvRun = 64;
inline float* partial_sums(Arena& arena, int64_t runs, int64_t cols) { return arena.alloc<float>(runs * cols); }

// Elementwise operations with sums: blocks of kSumRows rows, or more.
inline constexpr int kSumRows = 128;  // or one a thread
inline int64_t elementwise_sum_rows(int64_t rows) { return parts_of(rows, kSumRows); }

// RMS norm, backward. Four blocks for each multiprocessor of a large device: part of the result's bits, so never the device's own number.
inline constexpr int64_t kNormBlocks = 528;
inline int64_t norm_sums(int64_t rows) { return std::min(kNormBlocks, rows); }

// Norm of heads, backward: blocks of at least 8 slots (a row in 32 lanes), each of kHeadNormTurns rows.
inline constexpr int kHeadNormTurns = 16;
inline int64_t head_norm_sums(int64_t rows) { return parts_of(rows, 8 * kHeadNormTurns); }

// Operations on heads with sums (head_rows.cuh), and token_shift: tokens of a run.
inline constexpr int64_t kHeadRun = 64, kShiftRun = 64;

// A sum of squares of each piece of the parameters.
inline double* square_sums(Arena& arena, int64_t pieces) { return arena.alloc<double>(pieces); }

// The decays' lower bounds of a layer, and their gradients.
struct BoundsScratch {
  float *values, *gradients;  // [cols]
  BoundsScratch(Arena& arena, int64_t cols) : values(arena.alloc<float>(cols)), gradients(arena.alloc<float>(cols)) {}
};

// Sampling with a repetition penalty: logits as it changes them.
inline float* penalised_logits(Arena& arena, int64_t sequences, int64_t vocab) { return arena.alloc<float>(sequences * vocab); }

// Embedding, backward: the sort of the tokens by id, and sums of the parts of the sorted list.
inline constexpr int kSortTile = 2048, kSortDigits = 256, kEmbeddingRun = 16;
struct EmbeddingScratch {
  int32_t *histogram, *lists[2];
  float* partial;  // [parts, 2, cols]
  EmbeddingScratch(Arena& arena, int64_t tokens, int64_t cols)
      : histogram(arena.alloc<int32_t>(parts_of(tokens, kSortTile) * kSortDigits)),
        lists{arena.alloc<int32_t>(tokens), arena.alloc<int32_t>(tokens)},
        partial(arena.alloc<float>(2 * parts_of(tokens, kEmbeddingRun) * cols)) {}
};

// Cross-entropy: the logits of a slice of the rows, and their losses where the caller wants none.
template <class T>
struct LogitsSlice {
  int64_t rows;
  Mat<T> logits;  // [rows, vocab]
  float* nll;
  // 128 Mi logits at most where the vocabulary allows it, so that the products are large and the logits small beside the activations.
  LogitsSlice(Arena& arena, int64_t all_rows, int64_t vocab, float* losses)
      : rows(std::min(all_rows, std::max<int64_t>(256, (int64_t{1} << 27) / vocab / 128 * 128))) {
    constexpr int64_t kAlign = 128 / static_cast<int64_t>(sizeof(T));
    const int64_t stride = parts_of(vocab, kAlign) * kAlign;
    logits = Mat<T>(arena.alloc<T>(rows * stride), rows, vocab, stride);
    nll = losses != nullptr ? nullptr : arena.alloc<float>(rows);
  }
};

// Selective scan, backward: channels of a block, groups of sequences whose gradients of parameters are summed apart.
inline constexpr int64_t kScanChannels = 128, kScanGroups = 32;
struct SelectiveScratch {
  float *of_keys, *of_square;  // [blocks, T, 2 N]; [blocks, T], of Longhorn
  float *of_a, *of_skip;       // [groups, D, N], of Mamba; [groups, D]
  SelectiveScratch(Arena& arena, ScanLaw law, int64_t tokens, int64_t sequences, int64_t channels, int64_t states)
      : of_keys(arena.alloc<float>(parts_of(channels, kScanChannels) * tokens * 2 * states)),
        of_square(law == ScanLaw::kMamba ? nullptr : arena.alloc<float>(parts_of(channels, kScanChannels) * tokens)),
        of_a(law == ScanLaw::kMamba ? arena.alloc<float>(std::min(sequences, kScanGroups) * channels * states) : nullptr),
        of_skip(arena.alloc<float>(std::min(sequences, kScanGroups) * channels)) {}
};

// Attention on warp groups takes bf16 rows at multiples of 16 bytes, heads of up to 128 channels, and no keys of earlier passes.
template <class T>
bool in_sixteens(Mat<T> x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride % (16 / static_cast<int64_t>(sizeof(T))) == 0;
}
template <class T, class... Mats>
bool takes_warp_groups(const AttentionShape& shape, const Pages<T>& past, Mats... matrices) {
  if (sizeof(T) != 2 || past || shape.dim % 8 != 0 || shape.dim > 128 || shape.window > INT32_MAX) return false;
  return (in_sixteens(matrices) && ...);
}
// Keys and values of earlier passes are copied in front of those of this one for them, where the host knows how many there are.
struct KeysBefore {
  int64_t sequences = 0, rows = 0;  // of all keys: those before, that may be seen, and those of the pass
  bool any = false;                 // before
  KeysBefore(const PassLayout& layout, int64_t window) : sequences(layout.host.count()), rows(layout.host.tokens()) {
    for (int64_t n = 0; n < sequences; ++n) rows += of(layout, window, n), any = any || of(layout, window, n) > 0;
  }
  static int64_t of(const PassLayout& layout, int64_t window, int64_t n) {
    const int64_t before = layout.host_positions == nullptr ? 0 : layout.host_positions[n];
    return window > 0 ? std::min(before, window - 1) : before;
  }
};
template <class T>
Mat<T> all_keys(Arena& arena, const AttentionShape& shape, int64_t rows) {
  const int64_t width = shape.kv_heads * shape.dim;
  return {arena.alloc<T>(rows * width), rows, width};
}
inline int32_t* key_offsets(Arena& arena, int64_t sequences) { return arena.alloc<int32_t>(sequences + 1); }
inline constexpr int kAttentionTileRows = 128, kAttentionTileNumbers = 5;
inline int64_t attention_tile_count(const PassLayout& layout) {
  int64_t count = 0;
  for (int64_t n = 0; n < layout.host.count(); ++n) count += parts_of(layout.host.length(n), kAttentionTileRows);
  return count;
}
inline int32_t* attention_list(Arena& arena, int64_t tiles) { return arena.alloc<int32_t>(tiles * kAttentionTileNumbers); }
// Decoding: the rows that a token sees are cut into runs of which each has a block: kDecodeRun rows, or more where there would be more than kDecodeRuns.
inline constexpr int64_t kDecodeRun = 128, kDecodeRuns = 64;
template <class T>
int64_t decode_runs(const AttentionShape& shape, const Pages<T>& past) {
  const int64_t room = past.per_sequence * past.rows, most = shape.window > 0 ? std::min(shape.window, room) : room;
  return std::min(kDecodeRuns, parts_of(most, kDecodeRun));
}
// [sequences, heads, runs, dim + 2]: a run's sum of p v, its largest score and its sum of p.
inline float* decode_parts(Arena& arena, const AttentionShape& shape, int64_t sequences, int64_t runs) {
  return arena.alloc<float>(sequences * shape.heads * runs * (shape.dim + 2));
}
// [heads, rows]: of the log-sums, and of delta.
inline float* attention_rows(Arena& arena, const AttentionShape& shape, int64_t rows) { return arena.alloc<float>(shape.heads * rows); }

}  // namespace fw::cuda
