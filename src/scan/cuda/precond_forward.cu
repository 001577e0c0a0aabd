// The diagonal preconditioner forward (recurrence.md section 3; rule/precond.h), chunk-parallel: what each chunk does to A, the A
// before every chunk, then M of every token. One chunk a sequence is one kernel. See kernels.h.
#include "scan/cuda/device/precond_chunk.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

template <int kLanes>
__global__ void __launch_bounds__(kPrecondThreads<kLanes>, 64 / kLanes) precond_sums_kernel(const __grid_constant__ PrecondForwardArgs a, int chunks) {
  const Problem& x = a.problem;
  ChunkShared<kLanes>& shared = *reinterpret_cast<ChunkShared<kLanes>*>(shared_memory());
  grid_dependency_launch();
  const ChunkPlace c = chunk_place<kLanes>(x, chunks, false);
  if (c.chunk < 0) return;
  if (a.slots != nullptr && a.slots[c.n] < 0) return;
  char* const stage = shared_memory() + sizeof(ChunkShared<kLanes>);
  const RunPlace keys = run_place(key_rows(x.in.k, x.sequences, c.n, c.h), c.token, c.count, c.channel, x.K);
  start_run<kLanes>(keys, c.run, c.lane, stage);
  cp_async_commit();
  const ChunkGates gates = load_gates(x, c);
  RunRows k;
  cp_async_wait<0>();
  sync_warp();
  take_run<kLanes>(keys, c.run, c.lane, stage, k);
  chunk_gates(x, c, gates, k, shared);
  run_sums(c, k, shared);
  if (c.thread >= kOwn * kLanes) return;
  const ChunkMap map = chunk_map<false>(c, shared);
  float* const out = a.scratch + (static_cast<int64_t>(c.chunk) * x.H + c.h) * (x.K + 1);
  if (c.thread == 0) out[0] = map.product;
  if (c.thread < x.K) out[1 + c.thread] = map.sum;
}

// alone: every sequence is one chunk, and this kernel all there is.
template <int kLanes>
__global__ void __launch_bounds__(kPrecondThreads<kLanes>, 64 / kLanes)
    precond_rows_kernel(const __grid_constant__ PrecondForwardArgs a, PrecondMap<float> map, int chunks, bool alone) {
  const Problem& x = a.problem;
  ChunkShared<kLanes>& shared = *reinterpret_cast<ChunkShared<kLanes>*>(shared_memory());
  // From the last chunk on: its keys are what the sums have left in the cache.
  const ChunkPlace c = chunk_place<kLanes>(x, chunks, true);
  if (c.chunk < 0) return grid_dependency_wait();
  const int slot = a.slots != nullptr ? a.slots[c.n] : c.n;
  const int64_t place = static_cast<int64_t>(c.chunk) * x.H + c.h;
  if (slot < 0) return grid_dependency_wait();
  char* const stage = shared_memory() + sizeof(ChunkShared<kLanes>);
  const RunPlace keys = run_place(key_rows(x.in.k, x.sequences, c.n, c.h), c.token, c.count, c.channel, x.K);
  start_run<kLanes>(keys, c.run, c.lane, stage);
  cp_async_commit();
  const ChunkGates gates = load_gates(x, c);
  grid_dependency_wait();
  float start = 0;
  if (c.thread < x.K) start = alone ? load_precond(x.initial_precond, slot, c.h, c.thread) : a.boundaries[place * x.K + c.thread];
  RunRows k;
  cp_async_wait<0>();
  sync_warp();
  take_run<kLanes>(keys, c.run, c.lane, stage, k);
  chunk_gates(x, c, gates, k, shared);
  run_sums(c, k, shared);
  if (alone && c.thread < x.K) {
    if (a.boundaries != nullptr) a.boundaries[place * x.K + c.thread] = start;
    const ChunkMap map = chunk_map<false>(c, shared);
    store_precond(a.final_precond, slot, c.h, c.thread, fmaf(map.product, start, map.sum));
  }
  run_starts<false>(c, start, shared);
  if (c.channel >= x.K) return;
  if (x.rule.uses_precond_center()) map.center = x.precond_center[c.h * x.center_stride];
  float state[kOwn];
  get_own(&shared.sum[c.run][c.channel], state);
  float* const m = a.m + (first_token(x.sequences, c.n) * x.H + c.h) * x.K;
  const RunPlace out = run_place({reinterpret_cast<char*>(m), static_cast<int64_t>(x.H) * x.K, 0}, c.token, c.count, c.channel, x.K);
  with_form(map, [&](const PrecondMap<float>& of) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const float alpha = shared.alpha[c.run * kRun + j], gain = shared.gain[c.run * kRun + j];
      float row[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float before = state[i];
        state[i] = fmaf(alpha, before, gain * k[j][i] * k[j][i]);
        row[i] = precond_value<FastMath>(of, of.previous ? before : state[i]);
      }
      store_run_row(out, j, row);
    }
  });
}

template <int kLanes>
void launch_kernels(const PrecondForwardArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const Dim3 grid = chunk_grid(x, chunks);
  const int count = static_cast<int>(chunks);
  constexpr unsigned kThreads = kPrecondThreads<kLanes>;
  constexpr size_t kShared = sizeof(ChunkShared<kLanes>) + kStageBytes<kLanes>;
  const PrecondMap<float> form = precond_map(x.rule, 0.0f);
  if (x.sequences.offsets == nullptr && x.sequences.chunks == 1)
    return launch(precond_rows_kernel<kLanes>, grid, kThreads, kShared, stream, args, form, count, true);
  launch(precond_sums_kernel<kLanes>, grid, kThreads, kShared, stream, args, count);
  walk_chunks<false>(x, {args.scratch, x.K + 1, args.boundaries, x.K, x.initial_precond, args.final_precond, args.slots}, stream);
  launch_overlapped(precond_rows_kernel<kLanes>, grid, kThreads, kShared, stream, args, form, count, false);
}

}  // namespace

void precond_forward(const PrecondForwardArgs& args, int64_t chunks, void* stream) {
  const int K = args.problem.K;
  if (K <= 64) return launch_kernels<8>(args, chunks, stream);
  if (K <= 128) return launch_kernels<16>(args, chunks, stream);
  if (K <= 256) return launch_kernels<32>(args, chunks, stream);
  fail_internal("precond_forward: expected K <= 256, got {}", K);
}

}  // namespace fw::cuda
