// What the host's operations take from the arena and give back when they return: each asks here, and so does a plan
// (planned.cpp), which computes nothing.
#pragma once

#include "base/arena_mark.h"
#include "ops/exec.h"

namespace fw::cpu {

// Cross-entropy: the logits of a slice of the rows and the losses of its rows.
template <class T>
struct LogitsSlice {
  int64_t rows;
  T *logits, *nll;
  // Between 256 and 1,024 rows: 4 Mi logits at most where the vocabulary allows it.
  LogitsSlice(Arena& arena, int64_t all_rows, int64_t vocab)
      : rows(std::min(std::clamp<int64_t>((int64_t{1} << 22) / std::max<int64_t>(1, vocab), 256, 1024), all_rows)),
        logits(arena.alloc<T>(rows * vocab)),
        nll(arena.alloc<T>(rows)) {}
};

// Attention, backward: rowsum(do o) of every head and query, and the queries' gradients of the parts of the keys.
template <class T>
struct AttentionScratch {
  Mat<T> delta, partial;
  AttentionScratch(Arena& arena, const AttentionShape& shape, int64_t queries, int64_t partial_rows)
      : delta(arena.alloc<T>(shape.heads * queries), shape.heads, queries),
        partial(arena.alloc<T>(partial_rows * columns(shape)), partial_rows, columns(shape)) {}
  static int64_t columns(const AttentionShape& shape) { return shape.heads / shape.kv_heads * shape.dim; }
};
// Rows of `partial`, where the sequences of the pass have no tokens before it.
int64_t attention_partial_rows(const AttentionShape& shape, const PassLayout& layout);

// Selective scan: channels of a task. Its gradients that are sums over channels, by block of them; those that are sums
// over tokens, by group of sequences.
constexpr int64_t kScanBlock = 128;
constexpr int64_t scan_blocks(int64_t channels) { return (channels + kScanBlock - 1) / kScanBlock; }
template <class T>
struct ScanScratch {
  static constexpr int64_t kMostGroups = 8;
  int64_t sequences, groups;
  T *dq, *dk, *square;  // [blocks, T, N]; [blocks, T], of Longhorn's |k|^2
  T *da, *dskip;        // [groups, N, D], of Mamba; [groups, D]
  ScanScratch(Arena& arena, ScanLaw law, int64_t tokens, int64_t count, int64_t channels, int64_t states)
      : sequences(count),
        groups(std::min(count, kMostGroups)),
        dq(arena.alloc<T>(scan_blocks(channels) * tokens * states)),
        dk(arena.alloc<T>(scan_blocks(channels) * tokens * states)),
        square(law == ScanLaw::kLonghorn ? arena.alloc<T>(scan_blocks(channels) * tokens) : nullptr),
        da(law == ScanLaw::kMamba ? arena.alloc<T>(groups * states * channels) : nullptr),
        dskip(arena.alloc<T>(groups * channels)) {}
  int64_t first_sequence(int64_t group) const { return group * sequences / groups; }
};

}  // namespace fw::cpu
