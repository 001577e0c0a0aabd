// What the kernels of a step share (forward.cu, ring.cu): the key side of a token in shared memory, a warp's rows of
// the state, and which sequence and values a block has.
#pragma once

#include <algorithm>

#include "scan/cuda/common/state/state_load.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/token/gather.cuh"

namespace fw::cuda {

inline constexpr int kStateWarps = 4;
inline constexpr int kStateThreads = 32 * kStateWarps;

struct ForwardCut {
  int32_t log_tiles = 0, tile = 0;  // of value rows: tiles is rounded up to a power of two
  int32_t stage = 0;                // bytes before the staged state in shared memory
  bool early = false;               // the next kernel may start at once: there is room for it alongside this one
  bool stores_precond = false;      // A is stored here, and not by a kernel of its own after this one
  StateAccess initial = StateAccess::kAbsent, final = StateAccess::kAbsent, checkpoints = StateAccess::kAbsent;
  PrecondMap<float> map;
  TokenGather gather;
};

// A of one sequence and key head.
FW_DEVICE Rows precond_rows(const StateArg& a, int slot, int key_head) {
  if (a.data == nullptr) return {};
  return {static_cast<char*>(a.data) + (slot * a.stride_n + key_head * a.stride_h) * (a.bf16 != 0 ? 2 : 4), 0, a.bf16};
}

struct TokenCoord {
  int n, hv, slot, v_tile;
};

// All but the last `pending` copies.
FW_DEVICE void wait_for_copies(int pending) {
  if (pending >= 3) return cp_async_wait<3>();
  if (pending == 2) return cp_async_wait<2>();
  if (pending == 1) return cp_async_wait<1>();
  cp_async_wait<0>();
}

// Starts the copies of token t of the sequence to `to`, by a warp.
FW_DEVICE GatheredScalar start_token(const TokenForwardArgs& args, const ForwardCut& cut, const TokenCoord& coord,
                                     int t, int lane, char* to) {
  const SequenceArg& s = args.problem.sequences;
  return start_gather(cut.gather, s.offsets != nullptr ? 0 : coord.n,
                      (s.offsets != nullptr ? s.offsets[coord.n] : 0) + t, coord.slot, coord.hv, coord.v_tile, lane,
                      to);
}
// Makes it of them, by the same warp. tile: as put_token() has it. pending: groups of other copies, started since.
template <TokenGates kGates, int kN>
FW_DEVICE void make_token(const TokenForwardArgs& args, const ForwardCut& cut, const TokenCoord& coord, int t, int tile,
                          const GatheredScalar& scalar, const GateScalars<kN>& own, int lane, char* to,
                          int pending = 0) {
  const Problem& x = args.problem;
  const int key_head = coord.hv / x.group;
  const float center = cut.gather.makes_m ? precond_center(x, key_head) : 0.0f;
  finish_gather(scalar, to);
  wait_for_copies(pending);
  sync_warp();
  if (cut.gather.makes_m) [[unlikely]] {
    float a[kN];
    make_m<kN>(x, cut.gather, cut.map, center, lane, to, a);
    if (cut.stores_precond && coord.v_tile == 0 && coord.hv == key_head * x.group)
      store_channels(precond_rows(args.final_precond, coord.slot, key_head), 0, lane * kN, x.K, a);
  }
  const KeyInputs<kN> in = gathered_inputs<kGates>(x, cut.gather, own, to, lane);
  const KeyToken<kN> k = key_token(x, coord.hv, in, [&](const TokenArg& gate, int count) {
    return row_mean(rows_of(gate, x.sequences, coord.n, coord.hv), t, count, lane);
  });
  put_token<kGates>(x, cut.gather, k, tile, lane, to);
}

// A warp's rows of the state. load() starts, arrived() waits for what this thread copies, and after a barrier of the
// block finish() has them: what is between load() and arrived() costs nothing. By all of the kStateWarps warps.
template <int kN, int kRows>
struct WarpState {
  static constexpr int kLogTile = kRows == 8 ? 5 : 3;
  float s[kRows][kN];

  FW_DEVICE void load(const TokenForwardArgs& a, const ForwardCut& cut, const TokenCoord& coord, int warp, int lane) {
    const Problem& x = a.problem;
    const StateRef initial = state_of(x.initial_state, coord.slot, coord.hv);
    const int v0 = coord.v_tile + warp * kRows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) s[i][j] = 0;
    }
    if (coord.slot < 0) return;
    if (cut.initial == StateAccess::kChannels) load_packed_rows<kN, kRows>(initial, v0, x.V - v0, x.K, lane, s);
    if (cut.initial == StateAccess::kStaged)
      stage_in<kN>(initial, stage(cut, initial), coord.v_tile, x.V, x.K, 32 * warp + lane, kStateThreads);
    if (cut.initial == StateAccess::kElements) load_state_elements<kN, kRows>(initial, v0, x.V, x.K, lane, s);
  }
  FW_DEVICE static void arrived() { cp_async_wait<0>(); }
  FW_DEVICE void finish(const TokenForwardArgs& a, const ForwardCut& cut, const TokenCoord& coord, int warp, int lane) {
    const StateArg& initial = a.problem.initial_state;
    if (coord.slot < 0) return;
    if (cut.initial == StateAccess::kChannels && initial.bf16 != 0) unpack_rows<kN, kRows>(s);
    if (cut.initial != StateAccess::kStaged) return;
    read_stage<kN, kRows>(Stage<kN>(shared_memory() + cut.stage, kLogTile, initial.bf16), initial.bf16 != 0,
                          warp * kRows, a.problem.K, lane, s);
  }
  // To a slot, of the final states or of the checkpoints; several times, if there are those, slots of tokens or a ring.
  FW_DEVICE void store(const TokenForwardArgs& a, const ForwardCut& cut, const TokenCoord& coord, int slot, int warp,
                       int lane, bool checkpoint = false) const {
    const Problem& x = a.problem;
    const StateRef to = state_of(checkpoint ? a.checkpoints.states : a.final_state, slot, coord.hv);
    const StateAccess access = checkpoint ? cut.checkpoints : cut.final;
    const int v0 = coord.v_tile + warp * kRows;
    if (access == StateAccess::kChannels) store_rows<kN, kRows>(to, v0, x.V - v0, x.K, lane, s);
    if (access == StateAccess::kElements) store_state_elements<kN, kRows>(to, v0, x.V, x.K, lane, s);
    if (access != StateAccess::kStaged) return;
    // In the same layout every thread overwrites what it alone has read.
    if (cut.initial == StateAccess::kStaged && x.initial_state.bf16 != to.bf16) named_barrier_sync(1, kStateThreads);
    write_stage<kN, kRows>(stage(cut, to), to.bf16 != 0, warp * kRows, x.K, lane, s);
    named_barrier_sync(1, kStateThreads);
    stage_out<kN>(to, stage(cut, to), coord.v_tile, x.V, x.K, 32 * warp + lane, kStateThreads);
    // before the next one is written there
    if (a.slots.tokens != nullptr || a.checkpoints.states.data != nullptr || a.ring.data != nullptr)
      named_barrier_sync(1, kStateThreads);
  }

 private:
  static FW_DEVICE Stage<kN> stage(const ForwardCut& cut, const StateRef& state) {
    return {shared_memory() + cut.stage, kLogTile, state.bf16};
  }
};

// Load rows of a contiguous state into the L2 cache: allowed before grid_dependency_wait(), for that is where the
// kernel before this one writes too. Of a state that is staged ([K, V]) the lines of a tile of values, one a key, by
// threads.
FW_DEVICE void prefetch_tile(const TokenForwardArgs& a, const TokenCoord& coord, int thread, int threads) {
  const Problem& x = a.problem;
  if (has_slots(a.slots) || x.initial_state.stride_v != 1 || coord.v_tile >= x.V) return;
  const StateRef state = state_of(x.initial_state, coord.n, coord.hv);
  const int size = state.bf16 != 0 ? 2 : 4;
  for (int k = thread; k < x.K; k += threads)
    prefetch_line(state.data + (k * x.initial_state.stride_k + coord.v_tile) * size);
}
// Of a state [V, K] whole rows, by a warp.
FW_DEVICE void prefetch_rows(const TokenForwardArgs& a, const TokenCoord& coord, int first, int last, int lane) {
  const Problem& x = a.problem;
  if (has_slots(a.slots) || x.initial_state.stride_v != x.K) return;
  const StateRef state = state_of(x.initial_state, coord.n, coord.hv);
  const int row = x.K * (state.bf16 != 0 ? 2 : 4), end = (last < x.V ? last : x.V) * row;
  FW_NO_UNROLL
  for (int at = first * row + 128 * lane; at < end; at += 4096) prefetch_line(state.data + at);
}

template <int kN, int kRows>
FW_DEVICE TokenCoord tile_coord(const ForwardCut& cut) {
  TokenCoord coord;
  coord.n = static_cast<int>(block_index_x() >> cut.log_tiles), coord.hv = static_cast<int>(block_index_y());
  coord.v_tile = static_cast<int>(block_index_x() & ((1u << cut.log_tiles) - 1)) << WarpState<kN, kRows>::kLogTile;
  return coord;
}
// Whether the block has anything to do: values of a sequence that is not skipped. If not, the output is zero if it is
// to be.
FW_DEVICE bool find_slot(const TokenForwardArgs& a, const ForwardCut& cut, TokenCoord& coord) {
  const Problem& x = a.problem;
  if (coord.v_tile >= x.V) return false;
  coord.slot = start_slot(a.slots, coord.n);
  if (!skips(a.slots, coord.slot)) return true;
  const Rows o = rows_of(a.o, x.sequences, coord.n, coord.hv);
  if (a.slots.clears == 0 || o.data == nullptr) return false;
  const int columns = x.V - coord.v_tile < cut.tile ? x.V - coord.v_tile : cut.tile,
            count = sequence_length(x.sequences, coord.n) * columns;
  FW_NO_UNROLL
  for (int i = static_cast<int>(thread_index()); i < count; i += static_cast<int>(block_size()))
    store_element(o, i / columns, coord.v_tile + i % columns, 0);
  return false;
}

// What the kernels have in common. A kernel of one block a head stores A itself.
template <int kN>
ForwardCut forward_cut(const TokenForwardArgs& args, int tile, bool one_block) {
  const Problem& x = args.problem;
  ForwardCut cut;
  cut.tile = tile;
  while (tile << cut.log_tiles < x.V) ++cut.log_tiles;
  cut.initial = state_access(x.initial_state, x.K, x.V, kN, tile);
  cut.final = state_access(args.final_state, x.K, x.V, kN, tile);
  cut.checkpoints = state_access(args.checkpoints.states, x.K, x.V, kN, tile);
  cut.gather = token_gather(x, kN, tile);
  if (cut.gather.makes_m) cut.map = precond_map_of(x.rule);
  cut.stores_precond =
      args.final_precond.data != nullptr && (one_block || args.final_precond.data != x.initial_precond.data);
  return cut;
}
inline int after_tokens(const ForwardCut& cut, int tokens) { return (tokens * cut.gather.bytes + 127) / 128 * 128; }

// A after the only token of each sequence, where the kernel of the step has not stored it: queued after that. channels:
// of a lane.
void precond_step(const TokenForwardArgs& args, const ForwardCut& cut, int channels, void* stream);

}  // namespace fw::cuda
