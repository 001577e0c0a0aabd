// The diagonal preconditioner forward (recurrence.md section 3; rule/precond.h), chunk-parallel: what each chunk does to A, the A
// before every chunk, then M of every token. One chunk a sequence is one kernel. See kernels.h.
#include "scan/cuda/device/precond_chunk.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

__global__ void __launch_bounds__(512, 1) precond_sums_kernel(const __grid_constant__ PrecondForwardArgs a) {
  const Problem& x = a.problem;
  ChunkShared& shared = *reinterpret_cast<ChunkShared*>(shared_memory());
  const ChunkPlace c = chunk_place(x, block_index_x());
  if (a.slots != nullptr && a.slots[c.n] < 0) return;
  RunRows k;
  load_run(rows_of(x.in.k, x.sequences, c.n, c.h * x.group), c.token, c.count, c.channel, x.K, k);
  chunk_gates(x, c, k, shared);
  run_sums(c, k, shared);
  if (c.run != 0) return;
  const ChunkMap map = chunk_map(c, shared);
  float* const out = a.scratch + (static_cast<int64_t>(c.chunk) * x.H + c.h) * (x.K + 1);
  if (c.channel == 0) out[0] = map.product;
  store_pair(out + 1, c.channel, x.K, map.sum[0], map.sum[1]);
}

// alone: every sequence is one chunk, and this kernel all there is.
__global__ void __launch_bounds__(512, 1) precond_rows_kernel(const __grid_constant__ PrecondForwardArgs a, bool alone) {
  const Problem& x = a.problem;
  ChunkShared& shared = *reinterpret_cast<ChunkShared*>(shared_memory());
  // From the last chunk on: its keys are what the sums have left in the cache.
  const ChunkPlace c = chunk_place(x, static_cast<int64_t>(grid_size_x()) - 1 - block_index_x());
  const int slot = a.slots != nullptr ? a.slots[c.n] : c.n;
  if (slot < 0) return;
  RunRows k;
  load_run(rows_of(x.in.k, x.sequences, c.n, c.h * x.group), c.token, c.count, c.channel, x.K, k);
  const int64_t place = static_cast<int64_t>(c.chunk) * x.H + c.h;
  float state[2];
  if (alone) {
    for (int i = 0; i < 2; ++i) state[i] = c.channel + i < x.K ? load_precond(x.initial_precond, slot, c.h, c.channel + i) : 0.0f;
  } else {
    load_pair(a.boundaries + place * x.K, c.channel, x.K, state);
  }
  chunk_gates(x, c, k, shared);
  run_sums(c, k, shared);
  if (alone && c.run == 0) {
    if (a.boundaries != nullptr) store_pair(a.boundaries + place * x.K, c.channel, x.K, state[0], state[1]);
    const ChunkMap map = chunk_map(c, shared);
    for (int i = 0; i < 2; ++i) {
      if (c.channel + i < x.K) store_precond(a.final_precond, slot, c.h, c.channel + i, fmaf(map.product, state[i], map.sum[i]));
    }
  }
  if (c.channel >= x.K) return;
  const PrecondMap<float> map = precond_map(x.rule, x.rule.uses_precond_center() ? x.precond_center[c.h * x.center_stride] : 0.0f);
  state[0] = run_start(c, shared, c.channel, state[0]);
  state[1] = run_start(c, shared, c.channel + 1, state[1]);
  float* out = a.m + ((first_token(x.sequences, c.n) + c.token) * x.H + c.h) * x.K + c.channel;
  const int64_t step = static_cast<int64_t>(x.H) * x.K;
  const bool wide = x.K % 2 == 0;
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const float alpha = shared.alpha[c.run * kRun + j], gain = shared.gain[c.run * kRun + j];
    float m[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float before = state[i];
      state[i] = fmaf(alpha, before, gain * k[j][i] * k[j][i]);
      m[i] = precond_value<FastMath>(map, map.previous ? before : state[i]);
    }
    if (j < c.count) {
      if (wide) {
        *reinterpret_cast<float2*>(out + j * step) = make_float2(m[0], m[1]);
      } else {
        out[j * step] = m[0];
        if (c.channel + 1 < x.K) out[j * step + 1] = m[1];
      }
    }
  }
}

}  // namespace

void precond_forward(const PrecondForwardArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  if (x.K > 256) fail_internal("precond_forward: expected K <= 256, got {}", x.K);
  const Dim3 grid{static_cast<unsigned>(chunks * x.H)};
  const unsigned threads = static_cast<unsigned>(32 * kRuns * precond_columns(x.K));
  const bool alone = x.sequences.offsets == nullptr && x.sequences.chunks == 1;
  if (!alone) {
    launch(precond_sums_kernel, grid, threads, sizeof(ChunkShared), stream, args);
    walk_chunks<false>(x, {args.scratch, x.K + 1, args.boundaries, x.K, x.initial_precond, args.final_precond, args.slots}, stream);
  }
  launch(precond_rows_kernel, grid, threads, sizeof(ChunkShared), stream, args, alone);
}

}  // namespace fw::cuda
