// The recurrence one token at a time (recurrence.md section 1) in float32: decode, short inputs, the oracle. A block has a tile of
// value rows of one sequence and value head. Its warps make the key sides of as many tokens as they are, one each, and then each takes
// its own rows of the state through all of them. See kernels.h.
#include <algorithm>

#include "scan/cuda/device/state_load.cuh"
#include "scan/cuda/device/token_gather.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

// Where warps that make tokens and warps that hold the state meet: two places in the code, so a named barrier that says how many come.
FW_DEVICE void meet() { named_barrier_sync(2, static_cast<int>(block_size())); }

constexpr int kStateWarps = 4, kFrontWarps = 4;  // of the latter one where every sequence has one token

struct ForwardCut {
  int32_t log_tiles = 0, tile = 0;  // of value rows: tiles is rounded up to a power of two
  int32_t stage = 0;                // bytes in front of the staged tile in shared memory
  bool early = false;               // the next kernel may start at once: there is room for it beside this one
  StateAccess initial = StateAccess::kAbsent, final = StateAccess::kAbsent;
  TokenGather gather;
};

// Makes the tokens of a batch, one a warp, and hands them over at the barrier.
template <int kN>
FW_DEVICE void make_tokens(const Problem& x, const ForwardCut& cut, int n, int hv, int v_tile, int front, int fronts, int length) {
  const int lane = static_cast<int>(lane_index());
  const int64_t b = x.sequences.offsets != nullptr ? 0 : n, first = x.sequences.offsets != nullptr ? x.sequences.offsets[n] : 0;
  char* to = shared_memory() + front * cut.gather.bytes;
  const int batch = fronts * cut.gather.bytes;
  FW_NO_UNROLL
  for (int t0 = 0, turn = 0; t0 < length; t0 += fronts, turn ^= 1) {
    const int t = t0 + front;
    if (t < length) {
      gather_token(cut.gather, b, first + t, hv, v_tile, lane, to);
      sync_warp();
      const KeyInputs<kN> in = gathered_inputs<kN>(x, cut.gather, to, lane);
      const KeyToken<kN> k = key_token(x, hv, in, [&](const TokenArg& gate, int count) { return row_mean(rows_of(gate, x.sequences, n, hv), t, count, lane); });
      put_token(x, cut.gather, k, cut.tile, lane, to);
    }
    to = turn == 0 ? to + batch : to - batch;
    meet();
  }
}

// Threads are bounded by 256, registers so that a multiprocessor holds this many blocks of them.
constexpr int min_blocks(int channels, int rows) { return channels == 8 ? 2 : 4; }

template <int kN, int kRows>
__global__ void __launch_bounds__(32 * (kStateWarps + kFrontWarps), min_blocks(kN, kRows))
    token_forward_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  constexpr int kThreads = 32 * kStateWarps, kLogTile = kRows == 8 ? 5 : 3;
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()), fronts = static_cast<int>(block_size() / 32) - kStateWarps;
  const int n = static_cast<int>(block_index_x() >> cut.log_tiles), hv = static_cast<int>(block_index_y());
  const int v_tile = static_cast<int>(block_index_x() & ((1u << cut.log_tiles) - 1)) << kLogTile;
  grid_dependency_wait();
  if (cut.early) grid_dependency_launch();
  const int slot = a.slots != nullptr ? a.slots[n] : n;
  if (slot < 0 || v_tile >= x.V) return;
  const int length = sequence_length(x.sequences, n);
  if (warp >= kStateWarps) return make_tokens<kN>(x, cut, n, hv, v_tile, warp - kStateWarps, fronts, length);

  const int v0 = v_tile + warp * kRows, rows = x.V - v0, thread = static_cast<int>(thread_index());
  const StateRef initial = state_of(x.initial_state, slot, hv);
  const Stage<kN> stage(shared_memory() + cut.stage, kLogTile, initial.bf16);
  float s[kRows][kN] = {};
  if (cut.initial == StateAccess::kChannels) load_packed_rows<kN, kRows>(initial, v0, rows, x.K, lane, s);
  if (cut.initial == StateAccess::kStaged) stage_in<kN>(initial, stage, v_tile, x.V, x.K, thread, kThreads);
  if (cut.initial == StateAccess::kElements) load_state_elements<kN, kRows>(initial, v0, x.V, x.K, lane, s);
  const int row = row_of_lane<kRows>(lane);
  const bool writes = has_row<kRows>(lane) && row < rows && a.o.data != nullptr;
  if (length > 0) meet();
  if (cut.initial == StateAccess::kChannels && initial.bf16 != 0) unpack_rows<kN, kRows>(s);
  if (cut.initial == StateAccess::kStaged) {
    cp_async_wait<0>();
    named_barrier_sync(1, kThreads);
    read_stage<kN, kRows>(stage, initial.bf16 != 0, warp * kRows, x.K, lane, s);
  }
  FW_NO_UNROLL
  for (int t = 0, place = 0; t < length; ++t, ++place) {
    if (place == fronts || place == 2 * fronts) {
      meet();
      if (place != fronts) place = 0;
    }
    const char* token = shared_memory() + place * cut.gather.bytes;
    const GatheredToken<kN> k(cut.gather, token, lane);
    float o;
    token_step<kN, kRows>(k, reinterpret_cast<const float*>(token + cut.gather.at[kRowV])[warp * kRows + row], lane, s, o);
    if (writes) store_element(rows_of(a.o, x.sequences, n, hv), t, v0 + row, o);
  }
  grid_dependency_launch();
  const StateRef final = state_of(a.final_state, slot, hv);
  if (cut.final == StateAccess::kChannels) store_rows<kN, kRows>(final, v0, rows, x.K, lane, s);
  if (cut.final == StateAccess::kElements) store_state_elements<kN, kRows>(final, v0, x.V, x.K, lane, s);
  if (cut.final != StateAccess::kStaged) return;
  // In the same layout every thread overwrites what it alone has read.
  const Stage<kN> out(shared_memory() + cut.stage, kLogTile, final.bf16);
  if (cut.initial == StateAccess::kStaged && initial.bf16 != final.bf16) named_barrier_sync(1, kThreads);
  write_stage<kN, kRows>(out, final.bf16 != 0, warp * kRows, x.K, lane, s);
  named_barrier_sync(1, kThreads);
  stage_out<kN>(final, out, v_tile, x.V, x.K, thread, kThreads);
}

template <int kN, int kRows>
void launch_rows(const TokenForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  ForwardCut cut;
  cut.tile = kRows * kStateWarps;
  while (cut.tile << cut.log_tiles < x.V) ++cut.log_tiles;
  cut.initial = state_access(x.initial_state, x.K, x.V, kN, cut.tile);
  cut.final = state_access(args.final_state, x.K, x.V, kN, cut.tile);
  cut.gather = token_gather(x, kN, cut.tile);
  const bool packed = x.sequences.offsets != nullptr;
  const int fronts = !packed && x.sequences.T <= 1 ? 1 : kFrontWarps, batches = !packed && x.sequences.T <= kFrontWarps ? 1 : 2;
  cut.stage = (batches * fronts * cut.gather.bytes + 127) / 128 * 128;
  const int64_t staged = std::max(stage_bytes(x.initial_state, cut.initial, kN, cut.tile), stage_bytes(args.final_state, cut.final, kN, cut.tile));
  const Dim3 grid{static_cast<unsigned>(static_cast<int64_t>(x.sequences.N) << cut.log_tiles), static_cast<unsigned>(x.HV)};
  cut.early = grid.x * grid.y <= 2 * 132;
  launch_overlapped(token_forward_kernel<kN, kRows>, grid, static_cast<unsigned>(32 * (kStateWarps + fronts)), static_cast<size_t>(cut.stage + staged), stream,
                    args, cut);
}

template <int kN>
void launch_channels(const TokenForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  constexpr int64_t kBlocks = 264;
  const auto blocks = [&](int tile) { return static_cast<int64_t>(x.sequences.N) * x.HV * ((x.V + tile - 1) / tile); };
  if (x.V > 8 && blocks(32) >= kBlocks) return launch_rows<kN, 8>(args, stream);
  launch_rows<kN, 2>(args, stream);
}

}  // namespace

// The tile of V is the largest that still gives every multiprocessor two blocks. Bits do not depend on it.
void token_forward(const TokenForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  if (x.K <= 64) return launch_channels<2>(args, stream);
  if (x.K <= 128) return launch_channels<4>(args, stream);
  if (x.K <= 256) return launch_channels<8>(args, stream);
  fail_internal("token_forward: expected K <= 256, got {}", x.K);
}

}  // namespace fw::cuda
