// Host side of attention (attention.h): how sequences are cut into tiles, and what the kernels can take.
#include <algorithm>

#include "base/error.h"
#include "gpu/device.h"
#include "ops/cuda/attention.h"

namespace fw::cuda {

std::vector<AttentionTile> attention_tiles(std::span<const AttentionSequence> sequences, bool of_keys, int64_t window) {
  struct Weighed {
    AttentionTile tile;
    int64_t work;  // pairs of rows that meet
  };
  std::vector<Weighed> all;
  for (size_t n = 0; n < sequences.size(); ++n) {
    const AttentionSequence& s = sequences[n];
    if (s.queries < 0 || s.keys < s.queries)
      fail_internal("attention: expected as many keys as queries at least, got {} and {}", s.keys, s.queries);
    if (s.queries == 0) continue;
    const int64_t rows = of_keys ? s.keys : s.queries, offset = s.keys - s.queries;
    for (int64_t first = 0; first < rows; first += kAttentionRows) {
      const int64_t end = std::min<int64_t>(first + kAttentionRows, rows);
      int64_t low, high;
      if (of_keys) {
        low = std::max<int64_t>(0, first - offset);
        high = window == 0 ? s.queries : std::min<int64_t>(s.queries, end - 1 + window - offset);
      } else {
        low = window == 0 ? 0 : std::max<int64_t>(0, first + offset - window + 1);
        high = end + offset;
      }
      all.push_back({{s.query, s.key, s.queries, s.keys, static_cast<int32_t>(first), static_cast<int32_t>(n)},
                     std::max<int64_t>(0, high - low)});
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Weighed& a, const Weighed& b) { return a.work > b.work; });
  std::vector<AttentionTile> tiles;
  tiles.reserve(all.size());
  for (const Weighed& one : all) tiles.push_back(one.tile);
  return tiles;
}

void check_attention(const AttentionArgs& args) {
  if (args.dim < 8 || args.dim > kAttentionMostDim || args.dim % 8 != 0)
    fail_internal("attention: head dim: expected a multiple of 8 up to {}, got {}", kAttentionMostDim, args.dim);
  if (args.kv_heads < 1 || args.heads % args.kv_heads != 0) {
    fail_internal("attention: heads: expected a multiple of the key heads, got {} and {}", args.heads, args.kv_heads);
  }
  if (args.theta != 0 && args.dim != 64 && args.dim != 128)
    fail_internal("attention: turned heads: expected dim 64 or 128, got {}", args.dim);
  if (args.sm_count < 1) fail_internal("attention: SMs: expected those of the device, got {}", args.sm_count);
  for (const TokenArg* out : {&args.o, &args.dq, &args.dk, &args.dv}) {
    if (out->data == nullptr) continue;
    if (out->bf16 == 0 || out->stride_t % 8 != 0 || out->stride_h % 8 != 0 ||
        reinterpret_cast<uintptr_t>(out->data) % 16 != 0) {
      fail_internal("attention: expected bf16 rows and heads at multiples of 16 bytes, got strides {} and {}",
                    out->stride_t, out->stride_h);
    }
  }
}

namespace {

using Pass = void (*)(const AttentionArgs&, void*);
void run(const AttentionArgs& args, Pass on_hopper, Pass elsewhere, void* stream) {
  check_attention(args);
  if (args.tile_count == 0) return;
  (current_arch() == Arch::kSm90 ? on_hopper : elsewhere)(args, stream);
}

}  // namespace

void attention_forward(const AttentionArgs& args, void* stream) {
  run(args, sm90::attention_forward, sm80::attention_forward, stream);
}
void attention_backward_queries(const AttentionArgs& args, void* stream) {
  run(args, sm90::attention_backward_queries, sm80::attention_backward_queries, stream);
}
void attention_backward_keys(const AttentionArgs& args, void* stream) {
  run(args, sm90::attention_backward_keys, sm80::attention_backward_keys, stream);
}

}  // namespace fw::cuda
