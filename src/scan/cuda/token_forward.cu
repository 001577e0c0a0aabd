// The recurrence one token at a time (recurrence.md section 1) in float32: decode, short inputs, the oracle. A block has a tile of
// value rows of one sequence and value head. Its warps make the key sides of as many tokens as they are, one each, and then each takes
// its own rows of the state through all of them. See kernels.h.
#include <algorithm>

#include "scan/cuda/device/state_load.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

struct ForwardCut {
  int32_t tiles = 0, tile = 0;  // of value rows
  int32_t stage = 0;            // bytes in front of the staged tile in shared memory
  StateAccess initial = StateAccess::kAbsent, final = StateAccess::kAbsent;
  bool wide = false;  // wide_front()
};

// A token in shared memory: the streams e, r and w, alpha, [32 kN] each; r . w; then z of the tile.
template <int kN>
FW_DEVICE constexpr int token_floats(int tile) {
  return 4 * 32 * kN + 4 + tile;
}

template <int kN>
FW_DEVICE void put_token(float* to, const KeyToken<kN>& k, int lane) {
  char* const p = reinterpret_cast<char*>(to + lane * kN);
  constexpr int kStep = 4 * 32 * kN;
  store_wide<kN>(p, 0, k.key.e);
  store_wide<kN>(p + kStep, 0, k.key.r);
  store_wide<kN>(p + 2 * kStep, 0, k.key.w);
  store_wide<kN>(p + 3 * kStep, 0, k.alpha);
  if (lane == 0) to[kStep] = k.rw;
}
template <int kN>
FW_DEVICE KeyToken<kN> get_token(const float* from, int lane) {
  KeyToken<kN> k;
  const char* const p = reinterpret_cast<const char*>(from + lane * kN);
  constexpr int kStep = 4 * 32 * kN;
  load_wide<kN>(p, k.key.e);
  load_wide<kN>(p + kStep, k.key.r);
  load_wide<kN>(p + 2 * kStep, k.key.w);
  load_wide<kN>(p + 3 * kStep, k.alpha);
  k.rw = from[kStep];
  return k;
}

constexpr int kStateWarps = 4, kFrontWarps = 4;  // of the latter one where every sequence has one token

// Makes the tokens of a batch, one a warp, and hands them over at the barrier.
template <int kN>
FW_DEVICE void make_tokens(const Problem& x, const ForwardCut& cut, int n, int hv, int v_tile, int front, int fronts, int length, float* tokens) {
  const int lane = static_cast<int>(lane_index());
  float* to = tokens + front * token_floats<kN>(cut.tile);
  const int batch = fronts * token_floats<kN>(cut.tile);
  const TokenPlace at = token_place(x.sequences, n, hv);
  FW_NO_UNROLL
  for (int t0 = 0; t0 < length; t0 += fronts) {
    const int t = t0 + front;
    if (t < length) {
      const RawToken<kN> raw = load_token<kN>(x, at, t, lane, cut.wide);
      const RawValue value = lane < cut.tile ? load_value(x, at, t, v_tile + lane) : RawValue{};
      const KeyToken<kN> k = key_token(x, at, raw, t, lane);
      put_token(to, k, lane);
      const ValueToken z = value_token(x, value);
      if (lane < cut.tile) to[4 * 32 * kN + 4 + lane] = k.z_v * (z.v * z.gate);
    }
    to = t0 / fronts % 2 == 0 ? to + batch : to - batch;
    sync_threads();
  }
}

// Threads are bounded by 256, registers so that a multiprocessor holds this many blocks of them.
constexpr int min_blocks(int channels, int rows) { return channels == 8 ? 2 : 3; }

template <int kN, int kRows>
__global__ void __launch_bounds__(32 * (kStateWarps + kFrontWarps), min_blocks(kN, kRows))
    token_forward_kernel(const __grid_constant__ TokenForwardArgs a, const __grid_constant__ ForwardCut cut) {
  constexpr int kThreads = 32 * kStateWarps;
  const Problem& x = a.problem;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()), fronts = static_cast<int>(block_size() / 32) - kStateWarps;
  const unsigned item = block_index_x() / static_cast<unsigned>(cut.tiles), heads = static_cast<unsigned>(x.HV);
  const int v_tile = static_cast<int>(block_index_x() - item * static_cast<unsigned>(cut.tiles)) * cut.tile;
  const int n = static_cast<int>(item / heads), hv = static_cast<int>(item - static_cast<unsigned>(n) * heads);
  float* const tokens = reinterpret_cast<float*>(shared_memory());
  grid_dependency_wait();
  grid_dependency_launch();
  const int slot = a.slots != nullptr ? a.slots[n] : n;
  if (slot < 0) return;
  const int length = sequence_length(x.sequences, n);
  if (warp >= kStateWarps) return make_tokens<kN>(x, cut, n, hv, v_tile, warp - kStateWarps, fronts, length, tokens);

  const int v0 = v_tile + warp * kRows, thread = static_cast<int>(thread_index());
  const StateRef initial = state_of(x.initial_state, slot, hv);
  const Stage<kN> stage(shared_memory() + cut.stage, cut.tile * (x.initial_state.bf16 != 0 ? 2 : 4));
  float s[kRows][kN] = {};
  if (cut.initial == StateAccess::kChannels) load_packed_rows<kN, kRows>(initial, v0, x.V, x.K, lane, s);
  if (cut.initial == StateAccess::kStaged) stage_in<kN>(initial, stage, v_tile, x.V, x.K, thread, kThreads);
  if (cut.initial == StateAccess::kElements) load_state_elements<kN, kRows>(initial, v0, x.V, x.K, lane, s);
  const Rows o_rows = rows_of(a.o, x.sequences, n, hv);
  const int v = v0 + row_of_lane<kRows>(lane);
  const bool writes = has_row<kRows>(lane) && v < x.V && o_rows.data != nullptr;
  if (length > 0) sync_threads();
  if (cut.initial == StateAccess::kChannels && initial.bf16 != 0) unpack_rows<kN, kRows>(s);
  if (cut.initial == StateAccess::kStaged) {
    cp_async_wait<0>();
    named_barrier_sync(1, kThreads);
    read_stage<kN, kRows>(stage, initial.bf16 != 0, warp * kRows, x.K, lane, s);
  }
  const int floats = token_floats<kN>(cut.tile);
  for (int t = 0, place = 0; t < length; ++t, ++place) {
    if (t > 0 && t % fronts == 0) {
      sync_threads();
      if (place == 2 * fronts) place = 0;
    }
    const float* from = tokens + place * floats;
    const KeyToken<kN> k = get_token<kN>(from, lane);
    float o;
    token_step<kN, kRows>(k, from[4 * 32 * kN + 4 + warp * kRows + row_of_lane<kRows>(lane)], lane, s, o);
    if (writes) store_element(o_rows, t, v, o);
  }
  const StateRef final = state_of(a.final_state, slot, hv);
  if (cut.final == StateAccess::kChannels) store_state_channels<kN, kRows>(final, v0, x.V, x.K, lane, s);
  if (cut.final == StateAccess::kElements) store_state_elements<kN, kRows>(final, v0, x.V, x.K, lane, s);
  if (cut.final != StateAccess::kStaged) return;
  // In the same layout every thread overwrites what it alone has read.
  const Stage<kN> out(shared_memory() + cut.stage, cut.tile * (final.bf16 != 0 ? 2 : 4));
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
  cut.tiles = (x.V + cut.tile - 1) / cut.tile;
  cut.initial = state_access(x.initial_state, x.K, x.V, kN, cut.tile);
  cut.final = state_access(args.final_state, x.K, x.V, kN, cut.tile);
  cut.wide = wide_front(x, kN);
  const int fronts = x.sequences.offsets == nullptr && x.sequences.T <= 1 ? 1 : kFrontWarps;
  const int batches = x.sequences.offsets == nullptr && x.sequences.T <= kFrontWarps ? 1 : 2;
  cut.stage = (batches * fronts * token_floats<kN>(cut.tile) * 4 + 127) / 128 * 128;
  const int64_t staged = std::max(stage_bytes(x.initial_state, cut.initial, kN, cut.tile), stage_bytes(args.final_state, cut.final, kN, cut.tile));
  const Dim3 grid{static_cast<unsigned>(static_cast<int64_t>(x.sequences.N) * x.HV * cut.tiles)};
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
