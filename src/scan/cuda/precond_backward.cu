// The adjoint of the preconditioner, chunk-parallel: from the last token of a chunk to the first, with D the gradient of A,
//     D += dM dM/dA_t     dg = alpha D.A_{t-1}     dbeta = D.khat^2     dkhat = 2 beta D khat     D = alpha D (+ dM dM/dA_{t-1}, the forms of the A before)
// A first kernel has what each chunk makes of D = 0, a second D behind every chunk, a third the gradients. See kernels.h.
#include "scan/cuda/device/precond_chunk.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

constexpr int kCenterThreads = 32;

// dm of a run, summed over the group.
FW_DEVICE void load_dm(const Problem& x, const ChunkPlace& c, const float* dm, RunRows& sum) {
  const int64_t token = first_token(x.sequences, c.n) + c.token, stride = static_cast<int64_t>(x.HV) * x.K;
#pragma unroll
  for (int j = 0; j < kRun; ++j) sum[j][0] = sum[j][1] = 0;
  FW_NO_UNROLL
  for (int i = 0; i < x.group; ++i) add_run(dm + token * stride + (c.h * x.group + i) * x.K, stride, c.count, c.channel, x.K, sum);
}

// Up the run from the A before it: dm becomes what M says about the A that it is made of, and dcenter is reduced by what it says about the
// center. kept (may be null): A before each token.
FW_DEVICE void through_m(const PrecondMap<float>& map, const ChunkPlace& c, const ChunkShared& shared, const RunRows& k, float (&state)[2], RunRows& dm,
                         float& dcenter, float2* kept) {
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const float alpha = shared.alpha[c.run * kRun + j], gain = shared.gain[c.run * kRun + j];
    if (kept != nullptr) kept[j * 32 * c.columns] = make_float2(state[0], state[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float before = state[i];
      state[i] = fmaf(alpha, before, gain * k[j][i] * k[j][i]);
      float center = 0;
      const float da = precond_gradient<FastMath>(map, map.previous ? before : state[i], dm[j][i], center);
      const bool real = j < c.count;  // of the others A may be 0, and log(A) infinite
      dm[j][i] = real ? da : 0.0f;
      dcenter += real ? center : 0.0f;
    }
  }
}

// D before the run (its gradients through M: da) from D behind it.
FW_DEVICE float run_back(const PrecondMap<float>& map, const ChunkPlace& c, const ChunkShared& shared, const RunRows& da, int i, float d) {
#pragma unroll
  for (int j = kRun - 1; j >= 0; --j) {
    const float alpha = shared.alpha[c.run * kRun + j];
    d = map.previous ? fmaf(alpha, d, da[j][i]) : alpha * (d + da[j][i]);
  }
  return d;
}

// kSums: the first kernel, else the third.
template <bool kSums>
__global__ void __launch_bounds__(512, 1) precond_backward_kernel(const __grid_constant__ PrecondBackwardArgs a) {
  const Problem& x = a.problem;
  ChunkShared& shared = *reinterpret_cast<ChunkShared*>(shared_memory());
  // The third from the last chunk on: what the first has left in the cache.
  const ChunkPlace c = chunk_place(x, kSums ? static_cast<int64_t>(block_index_x()) : static_cast<int64_t>(grid_size_x()) - 1 - block_index_x());
  const int64_t place = static_cast<int64_t>(c.chunk) * x.H + c.h;
  float* const maps = a.scratch + place * (2 * x.K + 2);
  const bool real = c.channel < x.K;
  RunRows k, da;
  load_run(rows_of(x.in.k, x.sequences, c.n, c.h * x.group), c.token, c.count, c.channel, x.K, k);
  load_dm(x, c, a.grads.dm, da);
  float start[2], behind[2] = {0, 0};
  load_pair(a.boundaries + place * x.K, c.channel, x.K, start);
  if (!kSums) load_pair(maps + x.K + 1, c.channel, x.K, behind);
  chunk_gates(x, c, k, shared);
  run_sums(c, k, shared);

  const PrecondMap<float> map = precond_map(x.rule, x.rule.uses_precond_center() ? x.precond_center[c.h * x.center_stride] : 0.0f);
  start[0] = run_start(c, shared, c.channel, start[0]);
  start[1] = run_start(c, shared, c.channel + 1, start[1]);
  // This lane's A before each token of its run.
  float2* const kept = reinterpret_cast<float2*>(shared_memory() + sizeof(ChunkShared)) + (c.run * kRun * c.columns + c.column) * 32 + c.lane;
  float dcenter = 0;
  through_m(map, c, shared, k, start, da, dcenter, kSums ? nullptr : kept);
  if (kSums && a.dcenter_parts != nullptr) {
    const float part = warp_sum(dcenter);
    if (c.lane == 0) shared.center[c.column * kRuns + c.run] = part;
  }
  sync_threads();  // everybody has read the sums of A
  shared.sum[c.run][c.channel] = run_back(map, c, shared, da, 0, 0.0f);
  shared.sum[c.run][c.channel + 1] = run_back(map, c, shared, da, 1, 0.0f);
  sync_threads();

  if constexpr (kSums) {
    if (c.run != 0) return;
    float product = 1, sum[2] = {0, 0};
    for (int i = kRuns - 1; i >= 0; --i) {
      product *= shared.product[i];
      for (int j = 0; j < 2; ++j) sum[j] = fmaf(shared.product[i], sum[j], shared.sum[i][c.channel + j]);
    }
    if (c.channel == 0) maps[0] = product;
    store_pair(maps + 1, c.channel, x.K, sum[0], sum[1]);
    if (thread_index() == 0 && a.dcenter_parts != nullptr) {
      float total = 0;
      for (int i = 0; i < kRuns * c.columns; ++i) total += shared.center[i];
      a.dcenter_parts[place] = total;
    }
  } else {
    // D of every token (in da), and the sums over channels that the gates want.
    for (int i = kRuns - 1; i > c.run; --i) {
      for (int j = 0; j < 2; ++j) behind[j] = fmaf(shared.product[i], behind[j], shared.sum[i][c.channel + j]);
    }
    float sums[2 * kRun];
#pragma unroll
    for (int j = kRun - 1; j >= 0; --j) {
      const float alpha = shared.alpha[c.run * kRun + j];
      float with_state = 0, with_key = 0;
      const float2 pair = kept[j * 32 * c.columns];
      const float before[2] = {pair.x, pair.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float d = map.previous ? behind[i] : behind[i] + da[j][i];
        behind[i] = map.previous ? fmaf(alpha, d, da[j][i]) : alpha * d;
        with_state = fmaf(d, before[i], with_state);
        with_key = fmaf(d, k[j][i] * k[j][i], with_key);
        da[j][i] = d;
      }
      sums[j] = with_state;
      sums[kRun + j] = with_key;
    }
    shared.pair[c.column][c.run][c.lane] = scattered_sum(sums, c.lane);
    sync_threads();
    const int t = static_cast<int>(thread_index());
    if (t < kChunk) {
      float with_state = 0, with_key = 0;
      for (int i = 0; i < c.columns; ++i) {
        with_state += shared.pair[i][t / kRun][t % kRun];
        with_key += shared.pair[i][t / kRun][kRun + t % kRun];
      }
      const float alpha = shared.alpha[t], gain = shared.gain[t], kn2 = shared.kn2[t];
      const bool normalised = x.rule.k_norm == Norm::kL2 && shared.square[0][t] + static_cast<float>(x.rule.norm_eps) > 0;
      shared.own[t] = 2 * gain;
      shared.common[t] = normalised ? -2 * gain * kn2 * with_key : 0.0f;
      if (t < c.rows) {
        const int64_t token = (first_token(x.sequences, c.n) + c.first + t) * x.HV + c.h * x.group;
        float dg = alpha == 0 ? 0.0f : alpha * with_state, dbeta = kn2 * with_key;
        for (int i = 0; i < x.group; ++i) {
          if (a.grads.dalpha_p != nullptr) dg += a.grads.dalpha_p[token + i];
          if (a.grads.dbeta_p != nullptr) dbeta += a.grads.dbeta_p[token + i];
        }
        const Rows dg_rows = key_rows(a.dprecond_g, x.sequences, c.n, c.h), dbeta_rows = key_rows(a.dprecond_beta, x.sequences, c.n, c.h);
        if (dg_rows.data != nullptr) store_element(dg_rows, c.first + t, 0, dg);
        if (dbeta_rows.data != nullptr) store_element(dbeta_rows, c.first + t, 0, dbeta);
      }
    }
    sync_threads();
    const Rows dk = key_rows(a.dk, x.sequences, c.n, c.h);
    if (dk.data == nullptr || !real) return;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const float own = shared.own[c.run * kRun + j], common = shared.common[c.run * kRun + j];
      da[j][0] = fmaf(own, da[j][0], common) * k[j][0];
      da[j][1] = fmaf(own, da[j][1], common) * k[j][1];
    }
    if (a.grads.d.k.data != nullptr) {
      FW_NO_UNROLL
      for (int i = 0; i < x.group; ++i) {
        const Rows rows = rows_of(a.grads.d.k, x.sequences, c.n, c.h * x.group + i);
        add_run(reinterpret_cast<const float*>(rows.data) + c.token * rows.stride, rows.stride, c.count, c.channel, x.K, da);
      }
    }
    store_run(dk, c.token, c.count, c.channel, x.K, da);
  }
}

// Sum over all chunks in an order that their number alone decides.
__global__ void __launch_bounds__(kCenterThreads) precond_center_kernel(const float* parts, int64_t chunks, int H, float* out, int64_t stride) {
  const int h = static_cast<int>(block_index_x());
  float sum = 0;
  for (int64_t i = thread_index(); i < chunks; i += kCenterThreads) sum += parts[i * H + h];
  sum = warp_sum(sum);
  if (thread_index() == 0) out[h * stride] = sum;
}

}  // namespace

void precond_backward(const PrecondBackwardArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  if (x.K > 256) fail_internal("precond_backward: expected K <= 256, got {}", x.K);
  const Dim3 grid{static_cast<unsigned>(chunks * x.H)};
  const int columns = precond_columns(x.K);
  const unsigned threads = static_cast<unsigned>(32 * kRuns * columns);
  launch(precond_backward_kernel<true>, grid, threads, sizeof(ChunkShared), stream, args);
  ChunkWalk walk{args.scratch, 2 * x.K + 2, args.scratch + x.K + 1, 2 * x.K + 2, args.d_final_precond, args.d_initial_precond, nullptr};
  walk_chunks<true>(x, walk, stream);
  const size_t kept = sizeof(float2) * kChunk * 32 * static_cast<size_t>(columns);
  launch(precond_backward_kernel<false>, grid, threads, sizeof(ChunkShared) + kept, stream, args);
  if (args.dcenter == nullptr) return;
  launch(precond_center_kernel, Dim3{static_cast<unsigned>(x.H)}, kCenterThreads, 0, stream, args.dcenter_parts, chunks, x.H, args.dcenter,
         args.dcenter_stride);
}

}  // namespace fw::cuda
