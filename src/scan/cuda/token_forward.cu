// The recurrence one token at a time (recurrence.md section 1) in float32: decode, short inputs, the oracle. A block has a tile of
// value rows of one sequence and value head; its warps share nothing. See kernels.h.
#include "scan/cuda/device/state_rows.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

// Threads of a block at most: warps of two rows for tiles of 8 and 16 rows, of eight rows for 32.
constexpr int max_threads(int rows) { return rows == 2 ? 256 : 128; }
// Blocks that a multiprocessor shall hold, which bounds the registers of a thread.
constexpr int min_blocks(int channels, int rows, bool one) { return !one || channels == 8 ? 1 : rows == 2 ? 3 : 5; }

// kOne: every sequence has one token (decoding), where blocks must be small for memory to be busy.
template <int kN, int kRows, bool kOne>
__global__ void __launch_bounds__(max_threads(kRows), min_blocks(kN, kRows, kOne)) token_forward_kernel(const __grid_constant__ TokenForwardArgs a, int tiles) {
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warps = static_cast<int>(block_size() / 32);
  const int64_t item = block_index_x() / static_cast<unsigned>(tiles);
  const int n = static_cast<int>(item / x.HV), hv = static_cast<int>(item % x.HV);
  const int v0 = (static_cast<int>(block_index_x() % static_cast<unsigned>(tiles)) * warps + static_cast<int>(warp_index())) * kRows;
  const int slot = a.slots != nullptr ? a.slots[n] : n;
  if (slot < 0 || v0 >= x.V) return;

  float s[kRows][kN];
  load_state<kN, kRows>(state_of(x.initial_state, slot, hv), v0, x.V, x.K, lane, s);
  const int length = kOne ? 1 : sequence_length(x.sequences, n), v = v0 + row_of_lane<kRows>(lane);
  if (length > 0) {
    const FrontRows f = front_rows(x, n, hv);
    const DecayRows decay = decay_rows(x, n, hv);
    const Rows o_rows = rows_of(a.o, x.sequences, n, hv);
    const bool writes = has_row<kRows>(lane) && v < x.V && o_rows.data != nullptr;
    RawToken<kN> next = load_token<kN>(x, f, decay, 0, lane);
    ValueToken next_value = load_value(x, f, 0, v);
    for (int t = 0; t < length; ++t) {
      const RawToken<kN> raw = next;
      const ValueToken value = next_value;
      if (t + 1 < length) {
        next = load_token<kN>(x, f, decay, t + 1, lane);
        next_value = load_value(x, f, t + 1, v);
      }
      const KeyToken<kN> k = key_token(x, f, decay, raw, t, lane);
      float o;
      token_step<kN, kRows>(k, k.z_v * (value.v * value.gate), lane, s, o);
      if (writes) store_element(o_rows, t, v, o);
    }
  }
  store_state<kN, kRows>(state_of(a.final_state, slot, hv), v0, x.V, x.K, lane, s);
}

template <int kN, bool kOne>
void launch_rows(const TokenForwardArgs& args, int tile, void* stream) {
  const Problem& x = args.problem;
  const int tiles = (x.V + tile - 1) / tile;
  const Dim3 grid{static_cast<unsigned>(static_cast<int64_t>(x.sequences.N) * x.HV * tiles)};
  if (tile == 32) {
    launch(token_forward_kernel<kN, 8, kOne>, grid, 128, 0, stream, args, tiles);
  } else {
    launch(token_forward_kernel<kN, 2, kOne>, grid, static_cast<unsigned>(16 * tile), 0, stream, args, tiles);
  }
}

}  // namespace

// The tile of V is the largest that still gives every multiprocessor two blocks. Bits do not depend on it.
void token_forward(const TokenForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  constexpr int64_t kBlocks = 264;
  const auto blocks = [&](int tile) { return static_cast<int64_t>(x.sequences.N) * x.HV * ((x.V + tile - 1) / tile); };
  int tile = 8;
  while (tile < 32 && tile < x.V && blocks(2 * tile) >= kBlocks) tile *= 2;
  const bool one = x.sequences.offsets == nullptr && x.sequences.T == 1;
  if (x.K <= 64) return one ? launch_rows<2, true>(args, tile, stream) : launch_rows<2, false>(args, tile, stream);
  if (x.K <= 128) return one ? launch_rows<4, true>(args, tile, stream) : launch_rows<4, false>(args, tile, stream);
  if (x.K <= 256) return one ? launch_rows<8, true>(args, tile, stream) : launch_rows<8, false>(args, tile, stream);
  fail_internal("token_forward: expected K <= 256, got {}", x.K);
}

}  // namespace fw::cuda
