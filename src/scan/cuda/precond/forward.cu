// The diagonal preconditioner forward (recurrence.md section 3; rule/precond.h), chunk-parallel: what each chunk does
// to A, the A before every chunk, then M of every token, if it is asked for. One chunk a sequence is one kernel. See
// kernels.h.
//
// Roles, 256 threads (common/precond_rows.cuh): a warp has eight tokens, a lane neighbouring channels; what a warp's
// tokens do to A meets in shared memory (one sync_threads), and each walks over the warps before it. chunk_walk_kernel:
// warp 0 walks, all eight load what the next round of 64 chunks takes and leaves.
#include "gpu/launch.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/precond/chunk.cuh"

namespace fw::cuda {
namespace {

constexpr int min_blocks(int channels, KeyRows rows) { return channels == 8 ? 2 : rows == KeyRows::kFlat ? 5 : 4; }

// What a launch is about, alongside the arguments.
struct ForwardTensors {
  FlatTensor k, g, beta, m;
  PrecondMap<float> map;
  float* products = nullptr;  // [chunks, H]
  int32_t chunks = 0;
  bool by_sequence = false;
};

template <int kN, KeyRows kRows>
__global__ void __launch_bounds__(kPrecondThreads, min_blocks(kN, kRows))
    precond_sums_kernel(const __grid_constant__ PrecondForwardArgs a, const __grid_constant__ ForwardTensors f) {
  const Problem& x = a.problem;
  RunShared<kN>& shared = *reinterpret_cast<RunShared<kN>*>(shared_memory());
  grid_dependency_launch();
  const RunBlock c = run_block<kN>(x, f.chunks, f.by_sequence, false);
  if (c.chunk < 0) return;
  if (skips(a.slots, start_slot(a.slots, c.n))) return;
  const auto put = [&](const RawGates& raw, auto&& key) {
    const RunGates gates = make_gates<kN>(x, raw, c.lane, key);
    put_run<kN>(gates, c.warp, c.lane, shared, key);
  };
  if constexpr (kRows == KeyRows::kFlat) {
    FlatRun<kN> keys;
    keys.load(f.k, c);
    put(load_gates(x, f.g, f.beta, c), [&](int r, float(&row)[kN]) { keys.row(r, row); });
  } else {
    const RunTensor<kN> keys(x, f.k, c, [&] { return key_rows(x.in.k, x.sequences, c.n, c.h); });
    RunRows<kN> k;
    keys.load(0, k);
    const RawGates raw = load_gates(x, f.g, f.beta, c);
    keys.unpack(k);
    put(raw, [&](int r, float(&row)[kN]) {
#pragma unroll
      for (int j = 0; j < kN; ++j) row[j] = k[r][j];
    });
  }
  sync_threads();
  if (c.warp != 0) return;
  float sum[kN] = {};
  const float product = run_start<Direction::kForward, kN>(kRuns, c.lane, shared, sum);
  const int64_t index = static_cast<int64_t>(c.chunk) * x.H + c.h;
  store_lane(a.scratch, index, c.channel, x.K, sum);
  if (c.lane == 0) f.products[index] = product;
}

// alone: every sequence is one chunk, and this kernel all there is.
template <int kN>
__global__ void __launch_bounds__(kPrecondThreads, kN == 8 ? 2 : 3)
    precond_rows_kernel(const __grid_constant__ PrecondForwardArgs a, const __grid_constant__ ForwardTensors f,
                        bool alone) {
  const Problem& x = a.problem;
  RunShared<kN>& shared = *reinterpret_cast<RunShared<kN>*>(shared_memory());
  // From the last chunk on: its keys are what the sums have left in the cache.
  const RunBlock c = run_block<kN>(x, f.chunks, f.by_sequence, true);
  if (c.chunk < 0) return grid_dependency_wait();
  const int slot = start_slot(a.slots, c.n);
  const int64_t index = static_cast<int64_t>(c.chunk) * x.H + c.h;
  if (skips(a.slots, slot)) return grid_dependency_wait();
  const RunTensor<kN> keys(x, f.k, c, [&] { return key_rows(x.in.k, x.sequences, c.n, c.h); });
  RunRows<kN> k;
  keys.load(0, k);
  const RawGates raw = load_gates(x, f.g, f.beta, c);
  grid_dependency_wait();
  float state[kN];
  if (alone) {
#pragma unroll
    for (int j = 0; j < kN; ++j)
      state[j] = c.channel + j < x.K ? load_precond(x.initial_precond, slot, c.h, c.channel + j) : 0.0f;
  } else {
    load_lane(a.boundaries, index, c.channel, x.K, state);
  }
  keys.unpack(k);
  const RunGates gates = make_gates<kN>(x, raw, k, c.lane);
  const auto key = [&](int r, float(&row)[kN]) {
#pragma unroll
    for (int j = 0; j < kN; ++j) row[j] = k[r][j];
  };
  put_run<kN>(gates, c.warp, c.lane, shared, key);
  sync_threads();
  if (alone && c.warp == 0) {
    if (a.boundaries != nullptr) store_lane(a.boundaries, index, c.channel, x.K, state);
    float sum[kN] = {};
    const float product = run_start<Direction::kForward, kN>(kRuns, c.lane, shared, sum);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (c.channel + j < x.K)
        store_precond(a.final_precond, end_slot(a.slots, c.n), c.h, c.channel + j, fmaf(product, state[j], sum[j]));
    }
    if (a.checkpoints.states.data != nullptr) {
      const int to = x.sequences.T > 0 ? checkpoint_after(a.checkpoints, c.n, x.sequences.T) : -1;
      for (int j = 0; j < kN && to >= 0; ++j) {
        if (c.channel + j < x.K)
          store_precond(a.checkpoints.states, to, c.h, c.channel + j, fmaf(product, state[j], sum[j]));
      }
    }
  }
  if (a.m == nullptr) return;
  run_start<Direction::kForward, kN>(c.warp, c.lane, shared, state);
  PrecondMap<float> map = f.map;
  if (x.rule.uses_precond_center()) map.center = x.precond_center[c.h * x.center_stride];
  const RunTensor<kN> out(x, f.m, c, [&] { return key_rows(workspace_rows(x, a.m, x.H), x.sequences, c.n, c.h); });
  with_form(map, [&](const PrecondMap<float>& form) {
#pragma unroll
    for (int r = 0; r < kRunTokens; ++r) {
      const float alpha = of_token(gates.alpha, r), gain = of_token(gates.gain, r);
      float row[kN];
      if (x.precond_rows != nullptr && r < c.count) {
        const int64_t at_row = (c.flat + r) * x.H + c.h;
        store_channels({reinterpret_cast<char*>(x.precond_rows + at_row * x.K), 0, 1}, 0, c.channel, x.K, state);
      }
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float before = state[j];
        state[j] = step_precond(alpha, gain, k[r][j], before);
        row[j] = PrecondElements<FastMath>::value(form, form.previous ? before : state[j]);
      }
      out.store(r, row);
    }
  });
}

template <int kN>
void launch_kernels(const PrecondForwardArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const Dim3 grid = chunk_grid(x, chunks);
  constexpr size_t kShared = sizeof(RunShared<kN>);
  ForwardTensors f;
  f.k = flat_rows(x, x.in.k, kN), f.m = flat_rows(x, workspace_rows(x, args.m, x.H), kN);
  f.g = flat_gates(x, x.in.precond_g), f.beta = flat_gates(x, x.in.precond_beta);
  f.map = precond_map_of(x.rule);
  f.products = args.scratch + chunks * x.H * x.K;
  f.chunks = static_cast<int32_t>(chunks);
  f.by_sequence = by_sequence(x);
  if (args.made) return launch(precond_rows_kernel<kN>, grid, kPrecondThreads, kShared, stream, args, f, false);
  if (x.sequences.offsets == nullptr && x.sequences.chunks == 1)
    return launch(precond_rows_kernel<kN>, grid, kPrecondThreads, kShared, stream, args, f, true);
  const bool flat = f.k.data != nullptr && f.k.bf16 != 0;
  launch(flat ? precond_sums_kernel<kN, KeyRows::kFlat> : precond_sums_kernel<kN, KeyRows::kAny>, grid, kPrecondThreads,
         kShared, stream, args, f);
  walk_chunks<Direction::kForward>(
      x,
      {f.products, args.scratch, args.boundaries, x.initial_precond, args.final_precond, args.slots, args.checkpoints},
      stream);
  if (args.m != nullptr)
    launch_overlapped(precond_rows_kernel<kN>, grid, kPrecondThreads, kShared, stream, args, f, false);
}

}  // namespace

void precond_forward(const PrecondForwardArgs& args, int64_t chunks, void* stream) {
  const int K = args.problem.K;
  if (K <= 64) return launch_kernels<2>(args, chunks, stream);
  if (K <= 128) return launch_kernels<4>(args, chunks, stream);
  if (K <= 256) return launch_kernels<8>(args, chunks, stream);
  fail_internal("precond_forward: expected K <= 256, got {}", K);
}

}  // namespace fw::cuda
