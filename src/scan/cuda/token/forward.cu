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
#include "scan/cuda/token/ring.h"
#include "scan/cuda/token/step.cuh"

namespace fw::cuda {
namespace {

enum class StatesKept { kLast, kAny };  // kAny: there may be slots of tokens, or checkpoints

// The token in shared memory through a warp's rows.
template <StatesKept kKept, int kN, int kRows>
FW_DEVICE void step_rows(const TokenForwardArgs& a, const ForwardCut& cut, const TokenCoord& coord, int t,
                         const char* token, int warp, int lane, WarpState<kN, kRows>& state) {
  const int row = row_of_lane<kRows>(lane), v = coord.v_tile + warp * kRows + row;
  float o;
  token_step<kN, kRows>(GatheredToken<kN>(cut.gather, token, lane),
                        reinterpret_cast<const float*>(token + cut.gather.at[kRowV])[warp * kRows + row], lane, state.s,
                        o);
  if (has_row<kRows>(lane) && v < a.problem.V && a.o.data != nullptr)
    store_element(rows_of(a.o, a.problem.sequences, coord.n, coord.hv), t, v, o);
  if (kKept == StatesKept::kLast) return;
  const bool checkpoint = a.checkpoints.states.data != nullptr;
  if (!checkpoint && a.slots.tokens == nullptr) return;
  const int slot = checkpoint ? checkpoint_after(a.checkpoints, coord.n, t + 1) : token_slot(a.slots, coord.n, t);
  if (slot >= 0) state.store(a, cut, coord, slot, warp, lane, checkpoint);
}

// The same few tokens of every sequence (at most kStateWarps): a warp each makes them, while the rows of the others are
// on their way. No slots of tokens: for them there are too few registers.
template <int kN, int kRows, TokenGates kGates>
__global__ void __launch_bounds__(2 * kStateThreads, kN == 8 ? 2 : 4)
    token_step_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  TokenCoord coord = tile_coord<kN, kRows>(cut);
  if (cut.initial == StateAccess::kChannels && warp < kStateWarps)
    prefetch_rows(a, coord, coord.v_tile + warp * kRows, coord.v_tile + (warp + 1) * kRows, lane);
  if (cut.initial == StateAccess::kStaged && warp < kStateWarps)
    prefetch_tile(a, coord, 32 * warp + lane, kStateThreads);
  GateScalars<kN> own = {};
  if (kGates == TokenGates::kLogits && warp >= kStateWarps) own = token_gate_scalars<kN>(a.problem, coord.hv, lane);
  grid_dependency_wait();
  if (cut.early) grid_dependency_launch();
  if (!find_slot(a, cut, coord)) return;
  WarpState<kN, kRows> state;
  if (warp >= kStateWarps) {
    const int t = warp - kStateWarps;
    char* const token = shared_memory() + t * cut.gather.bytes;
    make_token<kGates>(a, cut, coord, t, cut.tile, start_token(a, cut, coord, t, lane, token), own, lane, token);
  } else {
    state.load(a, cut, coord, warp, lane);
    state.arrived();
  }
  sync_threads();
  if (warp >= kStateWarps) return;
  state.finish(a, cut, coord, warp, lane);
  FW_NO_UNROLL
  for (int t = 0; t < a.problem.sequences.T; ++t)
    step_rows<StatesKept::kLast>(a, cut, coord, t, shared_memory() + t * cut.gather.bytes, warp, lane, state);
  grid_dependency_launch();
  state.store(a, cut, coord, coord.slot, warp, lane);
}

// Any tokens: four warps make the ones of a batch, while the others take their rows through those of the batch before.
template <int kN, int kRows, TokenGates kGates>
__global__ void __launch_bounds__(2 * kStateThreads, kN == 8 ? 1 : 2)
    token_forward_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()) % kStateWarps;
  const bool makes = warp_index() >= kStateWarps;
  grid_dependency_wait();
  TokenCoord coord = tile_coord<kN, kRows>(cut);
  GateScalars<kN> own = {};
  if (kGates == TokenGates::kLogits && makes) own = token_gate_scalars<kN>(a.problem, coord.hv, lane);
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
        make_token<kGates>(a, cut, coord, t, cut.tile, start_token(a, cut, coord, t, lane, token), own, lane, token);
    } else if (batch == 0) {
      state.arrived();
    } else {
      const char* const tokens = shared_memory() + (batch - 1) % 2 * kStateWarps * bytes;
      const int t0 = (batch - 1) * kStateWarps;
      FW_NO_UNROLL
      for (int i = 0; i < kStateWarps && t0 + i < length; ++i)
        step_rows<StatesKept::kAny>(a, cut, coord, t0 + i, tokens + i * bytes, warp, lane, state);
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

template <int kN, TokenGates kGates>
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
  if (kGates == TokenGates::kLogits && warp == kStateWarps) own = token_gate_scalars<kN>(x, coord.hv, lane);
  grid_dependency_wait();
  if (!find_slot(a, cut, coord)) return;
  const StateRef initial = state_of(x.initial_state, coord.slot, coord.hv);
  char* const stage = shared_memory() + cut.stage - coord.v_tile * row_bytes;  // row v at v row_bytes
  if (warp == kStateWarps) {
    make_token<kGates>(a, cut, coord, 0, 0, start_token(a, cut, coord, 0, lane, token), own, lane, token);
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
    const float z = row < rows ? z_v * gathered_value<kGates>(x, cut.gather, token, v0 - coord.v_tile + row) : 0.0f;
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

// A through the tokens of each sequence, one after the other, and M. A after each token goes to the token's slot or,
// without those, A after the last one to the sequence's. A warp has a key head.
template <int kN>
__global__ void __launch_bounds__(32 * kStepWarps)
    precond_tokens_kernel(const __grid_constant__ PrecondForwardArgs args, PrecondMap<float> map) {
  const Problem& x = args.problem;
  const int lane = static_cast<int>(lane_index());
  const unsigned item = block_index_x() * kStepWarps + warp_index(), heads = static_cast<unsigned>(x.H);
  const int n = static_cast<int>(item / heads), h = static_cast<int>(item % heads);
  const int slot = n >= x.sequences.N ? -1 : start_slot(args.slots, n);
  if (n >= x.sequences.N || skips(args.slots, slot)) return;
  const Rows from = slot < 0 ? Rows() : precond_rows(x.initial_precond, slot, h),
             keys = key_rows(x.in.k, x.sequences, n, h), decays = key_rows(x.in.precond_g, x.sequences, n, h),
             gains = key_rows(x.in.precond_beta, x.sequences, n, h);
  const int length = sequence_length(x.sequences, n);
  const float center = length > 0 ? precond_center(x, h) : 0.0f;  // where there are no tokens, no tensors are given
  const bool keeps = args.final_precond.data != nullptr, tokens = keeps && args.slots.tokens != nullptr,
             checkpoints = args.checkpoints.states.data != nullptr;
  float* const made = args.m + (first_token(x.sequences, n) * x.H + h) * x.K;
  float a[kN] = {};
  if (from.data != nullptr) load_channels(from, 0, lane * kN, x.K, a);
  FW_NO_UNROLL
  for (int t = 0; t < length; ++t) {
    float k[kN], m[kN];
    load_channels(keys, t, lane * kN, x.K, k);
    step_precond(x, map, center, load_element(decays, t, 0), load_element(gains, t, 0), lane, k, a, m);
    store_channels({reinterpret_cast<char*>(made), int64_t{x.H} * x.K, 0}, t, lane * kN, x.K, m);
    const int to = tokens ? token_slot(args.slots, n, t) : -1;
    if (to >= 0) store_channels(precond_rows(args.final_precond, to, h), 0, lane * kN, x.K, a);
    const int kept = checkpoints ? checkpoint_after(args.checkpoints, n, t + 1) : -1;
    if (kept >= 0) store_channels(precond_rows(args.checkpoints.states, kept, h), 0, lane * kN, x.K, a);
  }
  const int end = keeps && !tokens ? end_slot(args.slots, n) : -1;
  if (end >= 0) store_channels(precond_rows(args.final_precond, end, h), 0, lane * kN, x.K, a);
}

template <int kN>
void launch_precond_tokens(const PrecondForwardArgs& args, void* stream) {
  const int64_t items = static_cast<int64_t>(args.problem.sequences.N) * args.problem.H;
  launch(precond_tokens_kernel<kN>, Dim3{static_cast<unsigned>((items + kStepWarps - 1) / kStepWarps)}, 32 * kStepWarps,
         0, stream, args, precond_map_of(args.problem.rule));
}

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
    launch_overlapped(x.fused.any() ? token_step_kernel<kN, kRows, TokenGates::kLogits>
                                    : token_step_kernel<kN, kRows, TokenGates::kValues>,
                      grid, static_cast<unsigned>(kStateThreads + 32 * tokens), shared, stream, args, cut);
    return launch_step<kN>(args, cut, stream);
  }
  cut.gather.makes_m = false;  // there is no token
  launch_overlapped(x.fused.any() ? token_forward_kernel<kN, kRows, TokenGates::kLogits>
                                  : token_forward_kernel<kN, kRows, TokenGates::kValues>,
                    grid, 2 * kStateThreads, shared, stream, args, cut);
}

template <int kN>
void launch_heads(const TokenForwardArgs& args, int parts, void* stream) {
  const Problem& x = args.problem;
  const int64_t blocks = static_cast<int64_t>(x.sequences.N) * x.HV, row = x.K * (x.initial_state.bf16 != 0 ? 2 : 4);
  ForwardCut cut = forward_cut<kN>(args, ((x.V + parts - 1) / parts + 7) / 8 * 8, x.group == 1 && parts == 1);
  cut.stage = after_tokens(cut, 1);
  launch_overlapped(
      x.fused.any() ? token_head_kernel<kN, TokenGates::kLogits> : token_head_kernel<kN, TokenGates::kValues>,
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

void precond_step(const TokenForwardArgs& args, const ForwardCut& cut, int channels, void* stream) {
  channels == 2   ? launch_step<2>(args, cut, stream)
  : channels == 4 ? launch_step<4>(args, cut, stream)
                  : launch_step<8>(args, cut, stream);
}

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
  if (args.ring.data != nullptr) return token_ring(args, choice, stream);
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
