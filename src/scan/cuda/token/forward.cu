// The recurrence one token at a time (recurrence.md section 1) in float32: decode, short inputs, the oracle. A block
// has a tile of value rows of one sequence and value head. Its warps make the key sides of as many tokens as they are,
// one each, and then each takes its own rows of the state through all of them. Where many sequences have one token
// each, a block has half a head or all of it. See kernels.h.
//
// Roles:
//   kernel                 threads             warps 0 to 3                               other warps
//   token_head_kernel      160                 rows of the state through shared memory    4: the key side of the token
//   token_step_kernel      128 + 32 a token    rows of the state in registers             the key side of a token each
//   token_forward_kernel   256                 rows of the state in registers, through    4 to 7: the key sides of the next batch of four
//                                              a batch of four tokens
//   precond_step_kernel    128                 A of a key head each
//   precond_tokens_kernel  128                 A and M of a key head each, token after token
// Keys go to the rows through shared memory and sync_threads(); copies of a head by cp.async groups of each thread.
#include <algorithm>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/common/state/state_load.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/token/gather.cuh"

namespace fw::cuda {
namespace {

constexpr int kStateWarps = 4;
constexpr int kStateThreads = 32 * kStateWarps;

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

// Starts the copies of token t of the sequence to `to`, by a warp.
FW_DEVICE GatheredScalar start_token(const TokenForwardArgs& args, const ForwardCut& cut, const TokenCoord& coord,
                                     int t, int lane, char* to) {
  const SequenceArg& s = args.problem.sequences;
  return start_gather(cut.gather, s.offsets != nullptr ? 0 : coord.n,
                      (s.offsets != nullptr ? s.offsets[coord.n] : 0) + t, coord.slot, coord.hv, coord.v_tile, lane,
                      to);
}
// Makes it of them, by the same warp. tile: as put_token() has it.
template <bool kFused, int kN>
FW_DEVICE void make_token(const TokenForwardArgs& args, const ForwardCut& cut, const TokenCoord& coord, int t, int tile,
                          const GatheredScalar& scalar, const GateScalars<kN>& own, int lane, char* to) {
  const Problem& x = args.problem;
  const int key_head = coord.hv / x.group;
  const float center = cut.gather.makes_m ? precond_center(x, key_head) : 0.0f;
  finish_gather(scalar, to);
  sync_warp();
  if (cut.gather.makes_m) [[unlikely]] {
    float a[kN];
    make_m<kN>(x, cut.gather, cut.map, center, lane, to, a);
    if (cut.stores_precond && coord.v_tile == 0 && coord.hv == key_head * x.group)
      store_channels(precond_rows(args.final_precond, coord.slot, key_head), 0, lane * kN, x.K, a);
  }
  const KeyInputs<kN> in = gathered_inputs<kFused>(x, cut.gather, own, to, lane);
  const KeyToken<kN> k = key_token(x, coord.hv, in, [&](const TokenArg& gate, int count) {
    return row_mean(rows_of(gate, x.sequences, coord.n, coord.hv), t, count, lane);
  });
  put_token<kFused>(x, cut.gather, k, tile, lane, to);
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
  // To a slot, of the final states or of the checkpoints; several times, if there are those or slots of tokens.
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
    if (a.slots.tokens != nullptr || a.checkpoints.states.data != nullptr) named_barrier_sync(1, kStateThreads);
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

// The token in shared memory through a warp's rows. kKeeps: there may be slots of tokens, or checkpoints.
template <bool kKeeps, int kN, int kRows>
FW_DEVICE void step_rows(const TokenForwardArgs& a, const ForwardCut& cut, const TokenCoord& coord, int t,
                         const char* token, int warp, int lane, WarpState<kN, kRows>& state) {
  const int row = row_of_lane<kRows>(lane), v = coord.v_tile + warp * kRows + row;
  float o;
  token_step<kN, kRows>(GatheredToken<kN>(cut.gather, token, lane),
                        reinterpret_cast<const float*>(token + cut.gather.at[kRowV])[warp * kRows + row], lane, state.s,
                        o);
  if (has_row<kRows>(lane) && v < a.problem.V && a.o.data != nullptr)
    store_element(rows_of(a.o, a.problem.sequences, coord.n, coord.hv), t, v, o);
  if (!kKeeps) return;
  const bool checkpoint = a.checkpoints.states.data != nullptr;
  if (!checkpoint && a.slots.tokens == nullptr) return;
  const int slot = checkpoint ? checkpoint_after(a.checkpoints, coord.n, t + 1) : token_slot(a.slots, coord.n, t);
  if (slot >= 0) state.store(a, cut, coord, slot, warp, lane, checkpoint);
}

// The same few tokens of every sequence (at most kStateWarps): a warp each makes them, while the rows of the others are
// on their way. No slots of tokens: for them there are too few registers.
template <int kN, int kRows, bool kFused>
__global__ void __launch_bounds__(2 * kStateThreads, kN == 8 ? 2 : 4)
    token_step_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  TokenCoord coord = tile_coord<kN, kRows>(cut);
  if (cut.initial == StateAccess::kChannels && warp < kStateWarps)
    prefetch_rows(a, coord, coord.v_tile + warp * kRows, coord.v_tile + (warp + 1) * kRows, lane);
  if (cut.initial == StateAccess::kStaged && warp < kStateWarps)
    prefetch_tile(a, coord, 32 * warp + lane, kStateThreads);
  GateScalars<kN> own = {};
  if (kFused && warp >= kStateWarps) own = token_gate_scalars<kN>(a.problem, coord.hv, lane);
  grid_dependency_wait();
  if (cut.early) grid_dependency_launch();
  if (!find_slot(a, cut, coord)) return;
  WarpState<kN, kRows> state;
  if (warp >= kStateWarps) {
    const int t = warp - kStateWarps;
    char* const token = shared_memory() + t * cut.gather.bytes;
    make_token<kFused>(a, cut, coord, t, cut.tile, start_token(a, cut, coord, t, lane, token), own, lane, token);
  } else {
    state.load(a, cut, coord, warp, lane);
    state.arrived();
  }
  sync_threads();
  if (warp >= kStateWarps) return;
  state.finish(a, cut, coord, warp, lane);
  FW_NO_UNROLL
  for (int t = 0; t < a.problem.sequences.T; ++t)
    step_rows<false>(a, cut, coord, t, shared_memory() + t * cut.gather.bytes, warp, lane, state);
  grid_dependency_launch();
  state.store(a, cut, coord, coord.slot, warp, lane);
}

// Any tokens: four warps make the ones of a batch, while the others take their rows through those of the batch before.
template <int kN, int kRows>
__global__ void __launch_bounds__(2 * kStateThreads, kN == 8 ? 1 : 2)
    token_forward_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()) % kStateWarps;
  const bool makes = warp_index() >= kStateWarps;
  grid_dependency_wait();
  TokenCoord coord = tile_coord<kN, kRows>(cut);
  if (!find_slot(a, cut, coord)) return;
  const int length = sequence_length(a.problem.sequences, coord.n), bytes = cut.gather.bytes;
  const int batches = (length + kStateWarps - 1) / kStateWarps;
  WarpState<kN, kRows> state;
  if (!makes) state.load(a, cut, coord, warp, lane);
  FW_NO_UNROLL
  for (int batch = 0; batch <= batches; ++batch) {
    if (makes) {
      const int t = batch * kStateWarps + warp;
      char* const token = shared_memory() + (batch % 2 * kStateWarps + warp) * bytes;
      if (t < length)
        make_token<false>(a, cut, coord, t, cut.tile, start_token(a, cut, coord, t, lane, token), GateScalars<kN>(),
                          lane, token);
    } else if (batch == 0) {
      state.arrived();
    } else {
      const char* const tokens = shared_memory() + (batch - 1) % 2 * kStateWarps * bytes;
      const int t0 = (batch - 1) * kStateWarps;
      FW_NO_UNROLL
      for (int i = 0; i < kStateWarps && t0 + i < length; ++i)
        step_rows<true>(a, cut, coord, t0 + i, tokens + i * bytes, warp, lane, state);
    }
    sync_threads();
    if (batch == 0 && !makes) state.finish(a, cut, coord, warp, lane);
  }
  if (makes) return;
  grid_dependency_launch();
  const int end = a.slots.tokens == nullptr ? end_slot(a.slots, coord.n) : -1;
  if (end >= 0) state.store(a, cut, coord, end, warp, lane);
}

// One token each, the states contiguous [V, K]: a block has a whole head, its state on its way through shared memory.
constexpr int kHeadRows = 8, kHeadBlocks = 6;

// All but the last `pending` copies.
FW_DEVICE void wait_for_copies(int pending) {
  if (pending >= 3) return cp_async_wait<3>();
  if (pending == 2) return cp_async_wait<2>();
  if (pending == 1) return cp_async_wait<1>();
  cp_async_wait<0>();
}

template <int kN, bool kFused>
__global__ void __launch_bounds__(32 * (kStateWarps + 1), kHeadBlocks)
    token_head_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  TokenCoord coord;
  coord.n = static_cast<int>(block_index_x() / static_cast<unsigned>(x.HV)),
  coord.hv = static_cast<int>(block_index_x() % static_cast<unsigned>(x.HV));
  coord.v_tile = static_cast<int>(block_index_y()) * cut.tile;
  char* const token = shared_memory();
  const int row_bytes = x.K * (x.initial_state.bf16 != 0 ? 2 : 4),
            per_warp = (cut.tile + kStateWarps * kHeadRows - 1) / (kStateWarps * kHeadRows) * kHeadRows;
  const int end = coord.v_tile + cut.tile < x.V ? coord.v_tile + cut.tile : x.V;
  const int first = coord.v_tile + warp * per_warp, last = first + per_warp < end ? first + per_warp : end;
  if (warp < kStateWarps) prefetch_rows(a, coord, first, last, lane);
  GateScalars<kN> own = {};
  if (kFused && warp == kStateWarps) own = token_gate_scalars<kN>(x, coord.hv, lane);
  grid_dependency_wait();
  if (!find_slot(a, cut, coord)) return;
  const StateRef initial = state_of(x.initial_state, coord.slot, coord.hv);
  char* const stage = shared_memory() + cut.stage - coord.v_tile * row_bytes;  // row v at v row_bytes
  if (warp == kStateWarps) {
    make_token<kFused>(a, cut, coord, 0, 0, start_token(a, cut, coord, 0, lane, token), own, lane, token);
  } else {
    FW_NO_UNROLL
    for (int v = first; v < last; v += kHeadRows) {
      const int after = (v + kHeadRows < last ? v + kHeadRows : last) * row_bytes;
      for (int at = v * row_bytes + 16 * lane; at < after; at += 512)
        cp_async_16(shared_address(stage + at), initial.data + at, true);
      cp_async_commit();
    }
  }
  grid_dependency_launch();
  sync_threads();
  if (warp == kStateWarps) return;
  const GatheredToken<kN> k(cut.gather, token, lane);
  const float z_v = reinterpret_cast<const float*>(token + cut.gather.rw_at)[1];
  const Rows o_rows = rows_of(a.o, x.sequences, coord.n, coord.hv);
  const int to = a.slots.tokens != nullptr ? token_slot(a.slots, coord.n, 0) : coord.slot;
  const StateRef staged{stage, 1, x.K, initial.bf16}, final = state_of(a.final_state, to, coord.hv);
  const int row = row_of_lane<kHeadRows>(lane);
  const bool writes = has_row<kHeadRows>(lane) && o_rows.data != nullptr;
  FW_NO_UNROLL
  for (int v0 = first; v0 < last; v0 += kHeadRows) {
    const int rows = last - v0;
    wait_for_copies((rows - 1) / kHeadRows);
    sync_warp();
    float s[kHeadRows][kN] = {}, o;
    load_packed_rows<kN, kHeadRows>(staged, v0, rows, x.K, lane, s);
    if (initial.bf16 != 0) unpack_rows<kN, kHeadRows>(s);
    const float z = row < rows ? z_v * gathered_value<kFused>(x, cut.gather, token, v0 - coord.v_tile + row) : 0.0f;
    token_step<kN, kHeadRows>(k, z, lane, s, o);
    if (writes && row < rows) store_element(o_rows, 0, v0 + row, o);
    if (cut.final != StateAccess::kAbsent && to >= 0) store_rows<kN, kHeadRows>(final, v0, rows, x.K, lane, s);
  }
}

// A after the only token of each sequence. Used where it overwrites the A before, and several blocks have made
// M from that one. The kernel before this one has read it when grid_dependency_wait() returns. Nobody writes the
// others. A warp has a key head.
constexpr int kStepWarps = 4;
template <int kN>
__global__ void __launch_bounds__(32 * kStepWarps)
    precond_step_kernel(const __grid_constant__ TokenForwardArgs args, PrecondMap<float> map) {
  const Problem& x = args.problem;
  const int lane = static_cast<int>(lane_index());
  const unsigned item = block_index_x() * kStepWarps + warp_index(), heads = static_cast<unsigned>(x.H);
  const int n = static_cast<int>(item / heads), h = static_cast<int>(item % heads);
  const int slot = n >= x.sequences.N ? -1 : start_slot(args.slots, n);
  // The kernel in front waited before it launched this one, so A and the inputs are there; the next one reads nothing
  // ahead of its wait.
  grid_dependency_launch_first();
  float a[kN];
  if (slot >= 0) {
    const Rows rows = precond_rows(x.initial_precond, slot, h);
#pragma unroll
    for (int j = 0; j < kN; ++j) a[j] = 0;
    if (rows.data != nullptr) load_channels(rows, 0, lane * kN, x.K, a);
    float k[kN], m[kN];
    load_channels(key_rows(x.in.k, x.sequences, n, h), 0, lane * kN, x.K, k);
    const float g = load_element(key_rows(x.in.precond_g, x.sequences, n, h), 0, 0),
                beta = load_element(key_rows(x.in.precond_beta, x.sequences, n, h), 0, 0);
    step_precond(x, map, precond_center(x, h), g, beta, lane, k, a, m);
  }
  grid_dependency_wait();
  if (slot >= 0) store_channels(precond_rows(args.final_precond, slot, h), 0, lane * kN, x.K, a);
}

// A through the tokens of each sequence, one after the other, with A after each at the token's slot, and M. A warp has
// a key head.
template <int kN>
__global__ void __launch_bounds__(32 * kStepWarps)
    precond_tokens_kernel(const __grid_constant__ PrecondForwardArgs args, PrecondMap<float> map) {
  const Problem& x = args.problem;
  const int lane = static_cast<int>(lane_index());
  const unsigned item = block_index_x() * kStepWarps + warp_index(), heads = static_cast<unsigned>(x.H);
  const int n = static_cast<int>(item / heads), h = static_cast<int>(item % heads);
  const int slot = n >= x.sequences.N ? -1 : start_slot(args.slots, n);
  if (slot < 0) return;
  const Rows from = precond_rows(x.initial_precond, slot, h), keys = key_rows(x.in.k, x.sequences, n, h),
             decays = key_rows(x.in.precond_g, x.sequences, n, h),
             gains = key_rows(x.in.precond_beta, x.sequences, n, h);
  const float center = precond_center(x, h);
  const int length = sequence_length(x.sequences, n);
  float* const made = args.m + (first_token(x.sequences, n) * x.H + h) * x.K;
  float a[kN] = {};
  if (from.data != nullptr) load_channels(from, 0, lane * kN, x.K, a);
  FW_NO_UNROLL
  for (int t = 0; t < length; ++t) {
    float k[kN], m[kN];
    load_channels(keys, t, lane * kN, x.K, k);
    step_precond(x, map, center, load_element(decays, t, 0), load_element(gains, t, 0), lane, k, a, m);
    store_channels({reinterpret_cast<char*>(made), int64_t{x.H} * x.K, 0}, t, lane * kN, x.K, m);
    const int to = token_slot(args.slots, n, t);
    if (to >= 0 && args.final_precond.data != nullptr)
      store_channels(precond_rows(args.final_precond, to, h), 0, lane * kN, x.K, a);
  }
}

template <int kN>
void launch_precond_tokens(const PrecondForwardArgs& args, void* stream) {
  const int64_t items = static_cast<int64_t>(args.problem.sequences.N) * args.problem.H;
  launch(precond_tokens_kernel<kN>, Dim3{static_cast<unsigned>((items + kStepWarps - 1) / kStepWarps)}, 32 * kStepWarps,
         0, stream, args, precond_map_of(args.problem.rule));
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
int after_tokens(const ForwardCut& cut, int tokens) { return (tokens * cut.gather.bytes + 127) / 128 * 128; }

template <int kN>
void launch_step(const TokenForwardArgs& args, const ForwardCut& cut, void* stream) {
  if (!cut.gather.makes_m || args.final_precond.data == nullptr || cut.stores_precond) return;
  const int64_t items = static_cast<int64_t>(args.problem.sequences.N) * args.problem.H;
  launch_overlapped(precond_step_kernel<kN>, Dim3{static_cast<unsigned>((items + kStepWarps - 1) / kStepWarps)},
                    32 * kStepWarps, 0, stream, args, cut.map);
}

template <int kN, int kRows>
void launch_rows(const TokenForwardArgs& args, bool few, int sm_count, void* stream) {
  const Problem& x = args.problem;
  ForwardCut cut = forward_cut<kN>(args, kRows * kStateWarps, false);
  const int tokens = x.sequences.T;
  cut.stage = after_tokens(cut, few ? tokens : 2 * kStateWarps);
  const int64_t staged = std::max({stage_bytes(x.initial_state, cut.initial, kN, cut.tile),
                                   stage_bytes(args.final_state, cut.final, kN, cut.tile),
                                   stage_bytes(args.checkpoints.states, cut.checkpoints, kN, cut.tile)});
  const size_t shared = static_cast<size_t>(cut.stage + staged);
  const Dim3 grid{static_cast<unsigned>(static_cast<int64_t>(x.sequences.N) << cut.log_tiles),
                  static_cast<unsigned>(x.HV)};
  if (few) {
    cut.early = grid.x * grid.y <= 2 * static_cast<unsigned>(sm_count);
    launch_overlapped(x.fused.any() ? token_step_kernel<kN, kRows, true> : token_step_kernel<kN, kRows, false>, grid,
                      static_cast<unsigned>(kStateThreads + 32 * tokens), shared, stream, args, cut);
    return launch_step<kN>(args, cut, stream);
  }
  if (x.fused.any())
    fail_internal("token_forward: expected values of gates where tokens are many, or at slots of their own");
  cut.gather.makes_m = false;  // there is no token
  launch_overlapped(token_forward_kernel<kN, kRows>, grid, 2 * kStateThreads, shared, stream, args, cut);
}

template <int kN>
void launch_heads(const TokenForwardArgs& args, int parts, void* stream) {
  const Problem& x = args.problem;
  const int64_t blocks = static_cast<int64_t>(x.sequences.N) * x.HV, row = x.K * (x.initial_state.bf16 != 0 ? 2 : 4);
  ForwardCut cut = forward_cut<kN>(args, ((x.V + parts - 1) / parts + 7) / 8 * 8, x.group == 1 && parts == 1);
  cut.stage = after_tokens(cut, 1);
  launch_overlapped(x.fused.any() ? token_head_kernel<kN, true> : token_head_kernel<kN, false>,
                    Dim3{static_cast<unsigned>(blocks), static_cast<unsigned>((x.V + cut.tile - 1) / cut.tile)},
                    32 * (kStateWarps + 1), static_cast<size_t>(cut.stage + row * cut.tile), stream, args, cut);
  launch_step<kN>(args, cut, stream);
}

template <int kN>
void launch_channels(const TokenForwardArgs& args, const TokenChoice& choice, int sm_count, void* stream) {
  if constexpr (kN < 8) {
    if (choice.kernel == TokenKernel::kHeads) return launch_heads<kN>(args, choice.parts, stream);
  }
  const bool few = choice.kernel == TokenKernel::kStep;
  choice.rows == 8 ? launch_rows<kN, 8>(args, few, sm_count, stream) : launch_rows<kN, 2>(args, few, sm_count, stream);
}

}  // namespace

void precond_tokens(const PrecondForwardArgs& args, void* stream) {
  const int K = args.problem.K;
  if (K > 256) fail_internal("precond_tokens: expected K <= 256, got {}", K);
  K <= 64    ? launch_precond_tokens<2>(args, stream)
  : K <= 128 ? launch_precond_tokens<4>(args, stream)
             : launch_precond_tokens<8>(args, stream);
}

void token_forward(const TokenForwardArgs& args, const TokenChoice& choice, void* stream) {
  const Problem& x = args.problem;
  if (x.rule.uses_precond() && x.m == nullptr && x.tokens > 0 &&
      (x.sequences.offsets != nullptr || x.sequences.T > 1)) {
    fail_internal("token_forward: expected M, or one token a sequence, got {} tokens", x.sequences.T);
  }
  if (x.K > 256) fail_internal("token_forward: expected K <= 256, got {}", x.K);
  const int sms = sm_count();
  switch (choice.channels) {
    case 2:
      return launch_channels<2>(args, choice, sms, stream);
    case 4:
      return launch_channels<4>(args, choice, sms, stream);
    default:
      return launch_channels<8>(args, choice, sms, stream);
  }
}

}  // namespace fw::cuda
