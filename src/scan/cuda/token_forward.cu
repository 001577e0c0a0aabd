// The recurrence one token at a time (recurrence.md section 1) in float32: decode, short inputs, the oracle. A block has a tile of
// value rows of one sequence and value head. Its warps make the key sides of as many tokens as they are, one each, and then each takes
// its own rows of the state through all of them. Where many sequences have one token each, a block has all rows of a head. See kernels.h.
#include <algorithm>

#include "scan/cuda/device/state_load.cuh"
#include "scan/cuda/device/token_gather.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

constexpr int kStateWarps = 4, kFrontWarps = 4;  // of the latter one where every sequence has one token
constexpr int kStateThreads = 32 * kStateWarps;

struct ForwardCut {
  int32_t log_tiles = 0, tile = 0;  // of value rows: tiles is rounded up to a power of two
  int32_t tokens = 0, stage = 0;    // bytes in front of the tokens and of the staged state in shared memory
  bool early = false;               // the next kernel may start at once: there is room for it beside this one
  bool stores_precond = false;      // A is stored here, and not by a kernel of its own after this one
  StateAccess initial = StateAccess::kAbsent, final = StateAccess::kAbsent;
  PrecondMap<float> map;
  TokenGather gather;
};

// Where the warps that make tokens and those that hold the state meet: every warp once a batch of tokens. In shared memory, for they come
// from two places in the code.
struct Meeting {
  uint64_t* barrier;
  int parity = 0;

  FW_DEVICE void sync(int lane) {
    sync_warp();
    if (lane == 0) mbarrier_arrive(barrier);
    mbarrier_wait(barrier, parity);
    parity ^= 1;
  }
};

// A of one sequence and key head.
FW_DEVICE Rows precond_rows(const StateArg& a, int slot, int key_head) {
  if (a.data == nullptr) return {};
  return {static_cast<char*>(a.data) + (slot * a.stride_n + key_head * a.stride_h) * (a.bf16 != 0 ? 2 : 4), 0, a.bf16};
}

struct TokenPlace {
  int n, hv, slot, v_tile;
};

// Token t of the sequence, by a warp, to `to`. tile: as put_token() has it.
template <int kN>
FW_DEVICE void make_token(const TokenForwardArgs& args, const ForwardCut& cut, const TokenPlace& place, int t, int tile, int lane, char* to) {
  const Problem& x = args.problem;
  const SequenceArg& s = x.sequences;
  gather_token(cut.gather, s.offsets != nullptr ? 0 : place.n, (s.offsets != nullptr ? s.offsets[place.n] : 0) + t, place.slot, place.hv, place.v_tile, lane,
               to);
  sync_warp();
  if (cut.gather.makes_m) {
    const int key_head = place.hv / x.group;
    float a[kN];
    make_m<kN>(x, cut.gather, cut.map, key_head, lane, to, a);
    if (cut.stores_precond && place.v_tile == 0 && place.hv == key_head * x.group)
      store_channels(precond_rows(args.final_precond, place.slot, key_head), 0, lane * kN, x.K, a);
  }
  const KeyInputs<kN> in = gathered_inputs<kN>(x, cut.gather, to, lane);
  const KeyToken<kN> k =
      key_token(x, place.hv, in, [&](const TokenArg& gate, int count) { return row_mean(rows_of(gate, s, place.n, place.hv), t, count, lane); });
  put_token(x, cut.gather, k, tile, lane, to);
}

// Threads are bounded by 256, registers so that a multiprocessor holds this many blocks of them.
constexpr int min_blocks(int channels) { return channels == 8 ? 2 : 4; }

template <int kN, int kRows>
__global__ void __launch_bounds__(32 * (kStateWarps + kFrontWarps), min_blocks(kN))
    token_forward_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  constexpr int kLogTile = kRows == 8 ? 5 : 3;
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()), fronts = static_cast<int>(block_size() / 32) - kStateWarps;
  TokenPlace place;
  place.n = static_cast<int>(block_index_x() >> cut.log_tiles), place.hv = static_cast<int>(block_index_y());
  place.v_tile = static_cast<int>(block_index_x() & ((1u << cut.log_tiles) - 1)) << kLogTile;
  Meeting meeting{reinterpret_cast<uint64_t*>(shared_memory())};
  if (thread_index() == 0) mbarrier_init(meeting.barrier, fronts + kStateWarps);
  sync_threads();
  grid_dependency_wait();
  if (cut.early) grid_dependency_launch();
  place.slot = a.slots != nullptr ? a.slots[place.n] : place.n;
  if (place.slot < 0 || place.v_tile >= x.V) return;
  const int length = sequence_length(x.sequences, place.n), batch = fronts * cut.gather.bytes;
  char* const tokens = shared_memory() + cut.tokens;
  if (warp >= kStateWarps) {
    char* to = tokens + (warp - kStateWarps) * cut.gather.bytes;
    FW_NO_UNROLL
    for (int t0 = 0; t0 < length; t0 += fronts) {
      const int t = t0 + warp - kStateWarps;
      if (t < length) make_token<kN>(a, cut, place, t, cut.tile, lane, to);
      to = meeting.parity == 0 ? to + batch : to - batch;
      meeting.sync(lane);
    }
    return;
  }

  const int v0 = place.v_tile + warp * kRows, rows = x.V - v0, thread = static_cast<int>(thread_index());
  const StateRef initial = state_of(x.initial_state, place.slot, place.hv);
  const Stage<kN> stage(shared_memory() + cut.stage, kLogTile, initial.bf16);
  float s[kRows][kN] = {};
  if (cut.initial == StateAccess::kChannels) load_packed_rows<kN, kRows>(initial, v0, rows, x.K, lane, s);
  if (cut.initial == StateAccess::kStaged) stage_in<kN>(initial, stage, place.v_tile, x.V, x.K, thread, kStateThreads);
  if (cut.initial == StateAccess::kElements) load_state_elements<kN, kRows>(initial, v0, x.V, x.K, lane, s);
  const int row = row_of_lane<kRows>(lane);
  const bool writes = has_row<kRows>(lane) && row < rows && a.o.data != nullptr;
  if (length > 0) meeting.sync(lane);
  if (cut.initial == StateAccess::kChannels && initial.bf16 != 0) unpack_rows<kN, kRows>(s);
  if (cut.initial == StateAccess::kStaged) {
    cp_async_wait<0>();
    named_barrier_sync(1, kStateThreads);
    read_stage<kN, kRows>(stage, initial.bf16 != 0, warp * kRows, x.K, lane, s);
  }
  FW_NO_UNROLL
  for (int t = 0, at = 0; t < length; ++t, ++at) {
    if (at == fronts || at == 2 * fronts) {
      meeting.sync(lane);
      if (at != fronts) at = 0;
    }
    const char* token = tokens + at * cut.gather.bytes;
    const GatheredToken<kN> k(cut.gather, token, lane);
    float o;
    token_step<kN, kRows>(k, reinterpret_cast<const float*>(token + cut.gather.at[kRowV])[warp * kRows + row], lane, s, o);
    if (writes) store_element(rows_of(a.o, x.sequences, place.n, place.hv), t, v0 + row, o);
  }
  grid_dependency_launch();
  const StateRef final = state_of(a.final_state, place.slot, place.hv);
  if (cut.final == StateAccess::kChannels) store_rows<kN, kRows>(final, v0, rows, x.K, lane, s);
  if (cut.final == StateAccess::kElements) store_state_elements<kN, kRows>(final, v0, x.V, x.K, lane, s);
  if (cut.final != StateAccess::kStaged) return;
  // In the same layout every thread overwrites what it alone has read.
  const Stage<kN> out(shared_memory() + cut.stage, kLogTile, final.bf16);
  if (cut.initial == StateAccess::kStaged && initial.bf16 != final.bf16) named_barrier_sync(1, kStateThreads);
  write_stage<kN, kRows>(out, final.bf16 != 0, warp * kRows, x.K, lane, s);
  named_barrier_sync(1, kStateThreads);
  stage_out<kN>(final, out, place.v_tile, x.V, x.K, thread, kStateThreads);
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

template <int kN>
__global__ void __launch_bounds__(32 * (kStateWarps + 1), kHeadBlocks)
    token_head_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  grid_dependency_wait();
  TokenPlace place;
  place.n = static_cast<int>(block_index_x() / static_cast<unsigned>(x.HV)), place.hv = static_cast<int>(block_index_x() % static_cast<unsigned>(x.HV));
  place.v_tile = 0;
  place.slot = a.slots != nullptr ? a.slots[place.n] : place.n;
  if (place.slot < 0) return;
  char* const token = shared_memory() + cut.tokens;
  const StateRef initial = state_of(x.initial_state, place.slot, place.hv);
  const int size = initial.bf16 != 0 ? 2 : 4, row_bytes = x.K * size, per_warp = (x.V + kStateWarps * kHeadRows - 1) / (kStateWarps * kHeadRows) * kHeadRows;
  const int first = warp * per_warp, last = first + per_warp < x.V ? first + per_warp : x.V;
  char* const stage = shared_memory() + cut.stage;
  if (warp == kStateWarps) {
    make_token<kN>(a, cut, place, 0, 0, lane, token);
  } else {
    FW_NO_UNROLL
    for (int v = first; v < last; v += kHeadRows) {
      const int end = (v + kHeadRows < last ? v + kHeadRows : last) * row_bytes;
      for (int at = v * row_bytes + 16 * lane; at < end; at += 512) cp_async_16(shared_address(stage + at), initial.data + at, true);
      cp_async_commit();
    }
  }
  sync_threads();
  if (warp == kStateWarps) return;
  const GatheredToken<kN> k(cut.gather, token, lane);
  const float z_v = reinterpret_cast<const float*>(token + cut.gather.rw_at)[1];
  const Rows o_rows = rows_of(a.o, x.sequences, place.n, place.hv);
  const StateRef staged{stage, 1, x.K, initial.bf16}, final = state_of(a.final_state, place.slot, place.hv);
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
    const float z = row < rows ? z_v * gathered_value(x, cut.gather, token, v0 + row) : 0.0f;
    token_step<kN, kHeadRows>(k, z, lane, s, o);
    if (writes && row < rows) store_element(o_rows, 0, v0 + row, o);
    if (v0 + kHeadRows >= last) grid_dependency_launch();
    if (cut.final != StateAccess::kAbsent) store_rows<kN, kHeadRows>(final, v0, rows, x.K, lane, s);
  }
}

// A after the only token of each sequence, where it takes the place of the A before and several blocks have made M from that: the kernel
// before this one has read it when grid_dependency_wait() returns. The rest nobody writes. A warp has a key head.
constexpr int kStepWarps = 4;
template <int kN>
__global__ void __launch_bounds__(32 * kStepWarps) precond_step_kernel(const __grid_constant__ TokenForwardArgs args, PrecondMap<float> map) {
  const Problem& x = args.problem;
  const int lane = static_cast<int>(lane_index());
  const unsigned item = block_index_x() * kStepWarps + warp_index(), heads = static_cast<unsigned>(x.H);
  const int n = static_cast<int>(item / heads), h = static_cast<int>(item % heads);
  const int slot = n >= x.sequences.N ? -1 : args.slots != nullptr ? args.slots[n] : n;
  grid_dependency_launch();
  float a[kN];
  if (slot >= 0) {
    const Rows rows = precond_rows(x.initial_precond, slot, h);
#pragma unroll
    for (int j = 0; j < kN; ++j) a[j] = 0;
    if (rows.data != nullptr) load_channels(rows, 0, lane * kN, x.K, a);
    float k[kN], m[kN];
    load_channels(key_rows(x.in.k, x.sequences, n, h), 0, lane * kN, x.K, k);
    const float g = load_element(key_rows(x.in.precond_g, x.sequences, n, h), 0, 0), beta = load_element(key_rows(x.in.precond_beta, x.sequences, n, h), 0, 0);
    step_precond(x, map, h, g, beta, lane, k, a, m);
  }
  grid_dependency_wait();
  if (slot >= 0) store_channels(precond_rows(args.final_precond, slot, h), 0, lane * kN, x.K, a);
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
  cut.gather = token_gather(x, kN, tile);
  cut.tokens = 16;
  if (cut.gather.makes_m) cut.map = precond_map(x.rule, 0.0f);
  cut.stores_precond = args.final_precond.data != nullptr && (one_block || args.final_precond.data != x.initial_precond.data);
  return cut;
}
int after_tokens(const ForwardCut& cut, int tokens) { return (cut.tokens + tokens * cut.gather.bytes + 127) / 128 * 128; }

template <int kN>
void launch_step(const TokenForwardArgs& args, const ForwardCut& cut, void* stream) {
  if (!cut.gather.makes_m || args.final_precond.data == nullptr || cut.stores_precond) return;
  const int64_t items = static_cast<int64_t>(args.problem.sequences.N) * args.problem.H;
  launch_overlapped(precond_step_kernel<kN>, Dim3{static_cast<unsigned>((items + kStepWarps - 1) / kStepWarps)}, 32 * kStepWarps, 0, stream, args, cut.map);
}

template <int kN, int kRows>
void launch_rows(const TokenForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  ForwardCut cut = forward_cut<kN>(args, kRows * kStateWarps, false);
  const bool packed = x.sequences.offsets != nullptr;
  const int fronts = !packed && x.sequences.T <= 1 ? 1 : kFrontWarps, batches = !packed && x.sequences.T <= kFrontWarps ? 1 : 2;
  cut.stage = after_tokens(cut, batches * fronts);
  const int64_t staged = std::max(stage_bytes(x.initial_state, cut.initial, kN, cut.tile), stage_bytes(args.final_state, cut.final, kN, cut.tile));
  const Dim3 grid{static_cast<unsigned>(static_cast<int64_t>(x.sequences.N) << cut.log_tiles), static_cast<unsigned>(x.HV)};
  cut.early = grid.x * grid.y <= 2 * 132;
  launch_overlapped(token_forward_kernel<kN, kRows>, grid, static_cast<unsigned>(32 * (kStateWarps + fronts)), static_cast<size_t>(cut.stage + staged), stream,
                    args, cut);
  launch_step<kN>(args, cut, stream);
}

// Whole heads: enough of them, each contiguous in whole units of 16 bytes, and room for three of them in a multiprocessor.
template <int kN>
bool launch_heads(const TokenForwardArgs& args, void* stream) {
  constexpr int64_t kLeastBlocks = 264, kMostBytes = 64 * 1024;
  const Problem& x = args.problem;
  const int64_t blocks = static_cast<int64_t>(x.sequences.N) * x.HV, row = x.K * (x.initial_state.bf16 != 0 ? 2 : 4);
  if (x.sequences.offsets != nullptr || x.sequences.T != 1 || blocks < kLeastBlocks || row % 16 != 0 || row * x.V > kMostBytes) return false;
  ForwardCut cut = forward_cut<kN>(args, x.V, x.group == 1);
  const auto whole = [](const StateArg& a) {
    return (reinterpret_cast<uintptr_t>(a.data) & 15) == 0 && ((a.stride_n | a.stride_h) * (a.bf16 != 0 ? 2 : 4)) % 16 == 0;
  };
  if (cut.initial != StateAccess::kChannels || x.initial_state.stride_v != x.K || !whole(x.initial_state)) return false;
  if (cut.final != StateAccess::kChannels && cut.final != StateAccess::kAbsent) return false;
  cut.stage = after_tokens(cut, 1);
  launch_overlapped(token_head_kernel<kN>, Dim3{static_cast<unsigned>(blocks)}, 32 * (kStateWarps + 1), static_cast<size_t>(cut.stage + row * x.V), stream,
                    args, cut);
  launch_step<kN>(args, cut, stream);
  return true;
}

template <int kN>
void launch_channels(const TokenForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  constexpr int64_t kBlocks = 264;
  const auto blocks = [&](int tile) { return static_cast<int64_t>(x.sequences.N) * x.HV * ((x.V + tile - 1) / tile); };
  if constexpr (kN < 8) {
    if (launch_heads<kN>(args, stream)) return;
  }
  if (x.V > 8 && blocks(32) >= kBlocks) return launch_rows<kN, 8>(args, stream);
  launch_rows<kN, 2>(args, stream);
}

}  // namespace

// The tile of V is the largest that still gives every multiprocessor two blocks. Bits do not depend on it.
void token_forward(const TokenForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  if (x.rule.uses_precond() && x.m == nullptr && (x.sequences.offsets != nullptr || x.sequences.T > 1)) {
    fail_internal("token_forward: expected M, or one token a sequence, got {} tokens", x.sequences.T);
  }
  if (x.K <= 64) return launch_channels<2>(args, stream);
  if (x.K <= 128) return launch_channels<4>(args, stream);
  if (x.K <= 256) return launch_channels<8>(args, stream);
  fail_internal("token_forward: expected K <= 256, got {}", x.K);
}

}  // namespace fw::cuda
