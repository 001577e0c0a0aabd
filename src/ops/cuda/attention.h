// Softmax attention by products of tiles: what its kernels are called with, those with Hopper's instructions and those
// for other GPUs from sm_80 on. bf16 tensors, float32 sums, no T x T matrix, no atomics: the same call gives the same
// bits, and a sequence the same bits alone and packed.
//
//   o_i = sum_j P_ij v_j,  P_ij = exp(scale q_i . k_j - lse_i)  over the keys j that query i sees
//
// Query i of a sequence of N queries and M keys stands at position i + M - N (the last query is at the last key). It
// sees the keys up to its own position, of those the last `window` (0: all).
//
//   attention_forward             o, and lse where it is asked for
//   attention_backward_queries    delta_i = o_i . dO_i and dq
//   attention_backward_keys       dk and dv from delta: after it on the stream
// The two passes back compute the scores twice (7 products instead of 5; on Hopper, of heads above 128 channels, three
// times, 8) so that no sum is made by two blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gpu/tensor_arg.h"

namespace fw::cuda {

inline constexpr int kAttentionRows = 128;     // of a tile: queries, or keys in attention_backward_keys
inline constexpr int kAttentionMostDim = 256;  // channels of a head

// The rows of one sequence that a block owns. Rows of tensors count over all sequences.
struct AttentionTile {
  int32_t query, key;     // the sequence's first row in q, o and in k, v
  int32_t queries, keys;  // of the sequence
  int32_t first;          // row of the sequence, a multiple of kAttentionRows
  int32_t sequence;
};

// One sequence: `queries` rows from `query` on, `keys` >= queries rows from `key` on.
struct AttentionSequence {
  int32_t query, queries, key, keys;
};

// Tiles of all queries (keys), those with most work first; window as below.
std::vector<AttentionTile> attention_tiles(std::span<const AttentionSequence> sequences, bool of_keys, int64_t window);

// Tensors [rows, heads, dim], dim a multiple of 8 up to what is said above, rows and heads at multiples of 16 bytes. Q,
// o, dO, dq have `heads` heads; k, v, dk, dv have kv_heads, each for heads / kv_heads neighbouring heads of q. Device
// memory.
struct AttentionArgs {
  TokenArg q, k, v, o, d_o, dq, dk, dv;
  float* lse = nullptr;                  // [heads, query_rows], of base 2: log2 of the sum of exp(scale q.k)
  float* delta = nullptr;                // [heads, query_rows]
  const AttentionTile* tiles = nullptr;  // in device memory
  int32_t tile_count = 0;
  int32_t heads = 0, kv_heads = 0, dim = 0;
  int32_t window = 0;
  int32_t sm_count = 0;  // of the device: on Hopper so many blocks share the tiles. Bits do not depend on it
  int64_t query_rows = 0, key_rows = 0;
  float scale = 1;
  // Rotary position embedding of whole heads of 64 or 128 channels: q and k come turned, dq and dk are of what they
  // were before. 0: not turned.
  double theta = 0;
  const int64_t* positions = nullptr;  // [sequences]: the position of a sequence's first query; null: 0. Device memory
};

// Tiles of queries for the first two, of keys for the third. Throw Error(kInternal) for tensors that they cannot take,
// before anything is launched.
void attention_forward(const AttentionArgs& args, void* stream);
void attention_backward_queries(const AttentionArgs& args, void* stream);
void attention_backward_keys(const AttentionArgs& args, void* stream);

void check_attention(const AttentionArgs& args);

// What these call, of checked arguments with tiles.
namespace sm80 {
void attention_forward(const AttentionArgs& args, void* stream);
void attention_backward_queries(const AttentionArgs& args, void* stream);
void attention_backward_keys(const AttentionArgs& args, void* stream);
}  // namespace sm80
namespace sm90 {
void attention_forward(const AttentionArgs& args, void* stream);
void attention_backward_queries(const AttentionArgs& args, void* stream);
void attention_backward_keys(const AttentionArgs& args, void* stream);
}  // namespace sm90

}  // namespace fw::cuda
