// What the CUDA device's operations take from the arena and give back when they return: each asks here, and so does a
// plan (ops/planned_cuda.cpp), which computes nothing and needs no CUDA. Sizes are functions of the shape; where a
// kernel's form changes a size a little, that of the largest is taken.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/arena_mark.h"
#include "ops/exec.h"

namespace fw::cuda {

constexpr int64_t parts_of(int64_t rows, int64_t of_part) { return (rows + of_part - 1) / of_part; }

// Rows at multiples of 16 bytes.
template <class T>
bool in_sixteens(Mat<T> x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride % (16 / static_cast<int64_t>(sizeof(T))) == 0;
}

// Gradients of parameters are sums over rows: of a run of rows each, which a second kernel adds.
inline constexpr int64_t kBiasRun = 64, kConvRun = 128, kGatedConvRun = 64;
inline float* partial_sums(Arena& arena, int64_t runs, int64_t cols) { return arena.alloc<float>(runs * cols); }

// Elementwise operations with sums: blocks of kSumRows rows, or more.
inline constexpr int kSumRows = 128;  // or one a thread
inline int64_t elementwise_sum_rows(int64_t rows) { return parts_of(rows, kSumRows); }

// head_constant, backward: a sum of each head and block of kHeadConstantRows rows, or more.
inline constexpr int64_t kHeadConstantRows = 64;
inline float* head_constant_sums(Arena& arena, int64_t rows, int64_t heads) {
  return partial_sums(arena, parts_of(rows, kHeadConstantRows), heads);
}

// RMS norm, backward. Four blocks for each SM of a large device: part of the result's bits, so never the device's own
// number.
inline constexpr int64_t kNormBlocks = 528;
inline int64_t norm_sums(int64_t rows) { return std::min(kNormBlocks, rows); }

// Norm of heads, backward: blocks of at least 8 slots (a row in 32 lanes), each of kHeadNormRotations rows.
inline constexpr int kHeadNormRotations = 16;
inline int64_t head_norm_sums(int64_t rows) { return parts_of(rows, 8 * kHeadNormRotations); }

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
inline float* penalised_logits(Arena& arena, int64_t sequences, int64_t vocab) {
  return arena.alloc<float>(sequences * vocab);
}

// Embedding, backward: the sort of the tokens by id, and sums of the parts of the sorted list.
inline constexpr int kSortTile = 2048, kSortDigits = 256, kEmbeddingRun = 16;
struct alignas(8) SortedToken {
  int32_t id, index;
};
struct EmbeddingScratch {
  int32_t* histogram;
  SortedToken* lists[2];
  float* partial;  // [parts, 2, cols]
  EmbeddingScratch(Arena& arena, int64_t tokens, int64_t cols)
      : histogram(arena.alloc<int32_t>(parts_of(tokens, kSortTile) * kSortDigits)),
        lists{arena.alloc<SortedToken>(tokens), arena.alloc<SortedToken>(tokens)},
        partial(arena.alloc<float>(2 * parts_of(tokens, kEmbeddingRun) * cols)) {}
};

// Cross-entropy: the logits of a slice of the rows, and their losses where the caller wants none.
template <class T>
struct LogitsSlice {
  int64_t rows;
  Mat<T> logits;  // [rows, vocab]
  float* nll;
  // 128 Mi logits at most where the vocabulary allows it, so that the products are large and the logits small alongside
  // the activations.
  LogitsSlice(Arena& arena, int64_t all_rows, int64_t vocab, float* losses)
      : rows(std::min(all_rows, std::max<int64_t>(256, (int64_t{1} << 27) / vocab / 128 * 128))) {
    constexpr int64_t kAlign = 128 / static_cast<int64_t>(sizeof(T));
    const int64_t stride = parts_of(vocab, kAlign) * kAlign;
    logits = Mat<T>(arena.alloc<T>(rows * stride), rows, vocab, stride);
    nll = losses != nullptr ? nullptr : arena.alloc<float>(rows);
  }
};

// Selective scan: rows of the state, channels of a block, and groups of sequences whose gradients of parameters are
// summed apart. Few blocks are made smaller, so that more SMs have one; what that decides is part of the bits, so it is
// not the device's own number.
inline constexpr int64_t kScanGroups = 32, kScanFewStates = 16, kScanMostStates = 64, kScanBlocks = 264;
inline int64_t scan_channels(int64_t channels, int64_t states, int64_t sequences, bool packets) {
  if (states > kScanFewStates) return 8;
  return packets && parts_of(channels, 64) * sequences >= kScanBlocks ? 64 : 32;
}
template <class... Mats>
bool scan_in_packets(const Mats&... matrices) {
  return ((in_sixteens(matrices) && matrices.cols % (16 / static_cast<int64_t>(sizeof(*matrices.data))) == 0) && ...);
}
// Parts that every sequence is cut into, side by side: exact, for a token's step multiplies the elements of the state.
// Worth a pass more where there would be blocks for half of the machine at most; 1: not cut.
inline int64_t scan_parts(const SeqLayout& layout, int64_t channels, int64_t states, bool packets) {
  constexpr int64_t kLeastParts = 2, kLeastTokens = 512;
  int64_t longest = 0;
  for (int64_t n = 0; n < layout.count(); ++n) longest = std::max(longest, layout.length(n));
  const int64_t blocks = parts_of(channels, scan_channels(channels, states, layout.count(), packets)) * layout.count();
  if (blocks == 0) return 1;
  const int64_t parts = std::min(kScanBlocks / blocks, longest / kLeastTokens);
  return parts < kLeastParts ? 1 : parts;
}
// States between the parts, and what each part multiplies them by.
struct ScanPartsScratch {
  float *states = nullptr, *decays = nullptr;  // [sequences, parts, N, D]; null: not cut
  ScanPartsScratch(Arena& arena, int64_t sequences, int64_t parts, int64_t channels, int64_t states_of_channel) {
    if (parts == 1) return;
    const int64_t count = sequences * parts * channels * states_of_channel;
    states = arena.alloc<float>(count), decays = arena.alloc<float>(count);
  }
};
struct SelectiveScratch {
  float *of_keys, *of_square;  // [blocks, T, 2 N]; [blocks, T], of Longhorn
  float *of_a, *of_skip;       // [groups, D, N], of Mamba; [groups, D]
  // pieces: parts of all sequences.
  SelectiveScratch(Arena& arena, ScanLaw law, int64_t tokens, int64_t pieces, int64_t channels, int64_t states,
                   bool packets) {
    const int64_t groups = std::min(pieces, kScanGroups),
                  blocks = parts_of(channels, scan_channels(channels, states, groups, packets));
    of_keys = arena.alloc<float>(blocks * tokens * 2 * states);
    of_square = law == ScanLaw::kMamba ? nullptr : arena.alloc<float>(blocks * tokens);
    of_a = law == ScanLaw::kMamba ? arena.alloc<float>(groups * channels * states) : nullptr;
    of_skip = arena.alloc<float>(groups * channels);
  }
};

// Turns of a Mamba-3 layer: tanh of the angles [T, columns], sums of the chunks [checkpoints, H NA], and the turns
// before them where the caller wants no checkpoints.
struct RotaryScratch {
  float* tanhs;
  double* totals;
  float* checkpoints;
  RotaryScratch(Arena& arena, const Mamba3Shape& shape, int64_t tokens, int64_t columns, int64_t sequences,
                bool has_checkpoints)
      : tanhs(arena.alloc<float>(tokens * columns)),
        totals(arena.alloc<double>(rotary_checkpoints(tokens, sequences) * shape.heads * shape.angles)),
        checkpoints(has_checkpoints
                        ? nullptr
                        : arena.alloc<float>(rotary_checkpoints(tokens, sequences) * 2 * shape.heads * shape.angles)) {}
};
// Gradients of the skip, [T, H], and of a factor [H, R, P].
inline float* near_sums(Arena& arena, int64_t tokens, int64_t heads) { return arena.alloc<float>(tokens * heads); }
inline float* factor_sums(Arena& arena, const Mamba3Shape& shape) {
  return arena.alloc<float>(shape.rank * shape.heads * shape.head_dim);
}
// Backward: of the biases a block of chunks, of the angles and of dt what a chunk's own tokens give, and the sums of
// the chunks after (mamba3_rotary.cu).
struct RotaryBackwardScratch {
  float *tanhs, *of_q_bias, *of_k_bias, *totals, *behind, *of_dt, *of_angle;
  // Chunks of a block: as many as 256 threads have room for, of a thread for two channels.
  static int64_t chunks_at_once(int64_t state) {
    return 256 / std::min<int64_t>(256, parts_of(parts_of(state, 2), 32) * 32);
  }
  RotaryBackwardScratch(Arena& arena, const Mamba3Shape& shape, int64_t tokens, int64_t columns, int64_t sequences) {
    const int64_t checkpoints = rotary_checkpoints(tokens, sequences), all = shape.heads * shape.angles,
                  blocks = parts_of(checkpoints, chunks_at_once(shape.state));
    tanhs = arena.alloc<float>(tokens * columns);
    of_q_bias = partial_sums(arena, blocks, shape.heads * shape.rank * shape.state);
    of_k_bias = partial_sums(arena, blocks, shape.heads * shape.rank * shape.state);
    totals = arena.alloc<float>(shape.rank * checkpoints * all);
    behind = arena.alloc<float>(checkpoints * all);
    of_dt = arena.alloc<float>(shape.rank * parts_of(shape.angles, 32) * tokens * shape.heads);
    of_angle = arena.alloc<float>(shape.rank * (columns > shape.angles ? 1 : shape.groups) * tokens * columns);
  }
};

// A Mesa layer's solve by chunks (mesa_chunks.cuh). Chunk c of sequence n has slot offsets[n] / 64 + n + c, which is
// no other chunk's. A chunk of one token takes less time than the solve token by token.
inline constexpr int64_t kMesaChunk = 64;
template <class T>
bool takes_mesa_chunks(const MesaShape& shape, Mat<const T> rhs, Mat<const T> k, Mat<T> x) {
  return sizeof(T) == 2 && shape.cg_steps > 0 && (shape.key_dim == 64 || shape.key_dim == 128) && in_sixteens(rhs) &&
         in_sixteens(k) && in_sixteens(x);
}
inline int64_t mesa_slots(int64_t tokens, int64_t sequences) { return tokens / kMesaChunk + sequences; }
// H before each chunk, as two bf16 matrices: [slots, heads, 2, K, K].
inline Bf16* mesa_scratch(Arena& arena, const MesaShape& shape, int64_t tokens, int64_t sequences) {
  return arena.alloc<Bf16>(mesa_slots(tokens, sequences) * shape.heads * 2 * shape.key_dim * shape.key_dim);
}

// Routing: a tile is the choices that a block sorts. The warps of a block, a token each, have 3 E words of shared
// memory each. Few tokens are routed and sorted by one block, without scratch.
inline constexpr int kRouteTile = 1024;
inline constexpr int64_t kFewRouted = 64, kFewChoices = 2048, kMostRouteShared = 200 * 1024;
inline int route_warps(int64_t experts) {
  return static_cast<int>(std::clamp<int64_t>(kMostRouteShared / 2 / (12 * experts), 1, 8));
}
struct RouteScratch {
  int32_t *choices = nullptr, *counts = nullptr;  // [T k]; [tiles, E]; null: one block
  float* weights = nullptr;                       // [T k]
  int warps = 0;
  size_t shared_bytes = 0;  // of the block that chooses

  RouteScratch() = default;
  RouteScratch(Arena& arena, int64_t tokens, const RouterShape& shape) : warps(route_warps(shape.experts)) {
    const int64_t of_warp = 12 * shape.experts, all = tokens * shape.chosen;
    const auto few = static_cast<int>(std::clamp<int64_t>(tokens, 1, 2 * warps));
    const int64_t few_bytes = 8 * all + 4 * (shape.experts + 1) + few * of_warp;
    if (tokens <= kFewRouted && all <= kFewChoices && few_bytes <= kMostRouteShared) {
      warps = few;
      shared_bytes = static_cast<size_t>(few_bytes);
      return;
    }
    shared_bytes = static_cast<size_t>(warps * of_warp);
    choices = arena.alloc<int32_t>(all);
    weights = arena.alloc<float>(all);
    counts = arena.alloc<int32_t>(parts_of(all, kRouteTile) * shape.experts);
  }
};

// Attention by tiles (attention.h) takes bf16 rows at multiples of 16 bytes, heads of up to 256 channels, and
// no keys of earlier passes.
template <class T, class... Mats>
bool takes_attention_tiles(const AttentionShape& shape, const Pages<T>& past, Mats... matrices) {
  if (sizeof(T) != 2 || past || shape.dim % 8 != 0 || shape.dim > 256 || shape.window > INT32_MAX) return false;
  return (in_sixteens(matrices) && ...);
}
// Kernels of attention that turn heads themselves: whole ones of 64 or 128 channels.
inline bool rotates_whole_heads(const AttentionShape& shape) {
  return shape.turns() && shape.rotated == shape.dim && (shape.dim == 64 || shape.dim == 128);
}
// Keys and values of earlier passes are copied before those of this one for them, where the host knows how many there
// are.
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
inline constexpr int kAttentionTileRows = 128, kAttentionTileNumbers = 6;
inline int64_t attention_tile_count(const PassLayout& layout) {
  int64_t count = 0;
  for (int64_t n = 0; n < layout.host.count(); ++n) count += parts_of(layout.host.length(n), kAttentionTileRows);
  return count;
}
inline int32_t* attention_list(Arena& arena, int64_t tiles) {
  return arena.alloc<int32_t>(tiles * kAttentionTileNumbers);
}
// Decoding: the rows that a token sees are cut into runs of which each has a block: kDecodeRun rows, or more where
// there would be more than kDecodeRuns.
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
inline float* attention_rows(Arena& arena, const AttentionShape& shape, int64_t rows) {
  return arena.alloc<float>(shape.heads * rows);
}

}  // namespace fw::cuda
