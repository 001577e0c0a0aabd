// The adjoint of the preconditioner, chunk-parallel: from the last token of a chunk to the first, with D the gradient of A,
//     D += dM dM/dA_t     dg = alpha D.A_{t-1}     dbeta = D.khat^2     dkhat = 2 beta D khat     D = alpha D (+ dM dM/dA_{t-1}, the forms of the A before)
// A first kernel has what each chunk makes of D = 0, a second D behind every chunk, a third the gradients. See kernels.h.
#include "scan/cuda/device/precond_chunk.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

constexpr int kCenterThreads = 32;

// Rows of a float32 tensor [tokens, heads, K].
FW_DEVICE RunPlace float_run(const Problem& x, const ChunkPlace& c, const float* p, int heads, int head) {
  const float* rows = p + (first_token(x.sequences, c.n) * heads + head) * x.K;
  return run_place({const_cast<char*>(reinterpret_cast<const char*>(rows)), static_cast<int64_t>(heads) * x.K, 0}, c.token, c.count, c.channel, x.K);
}

// Up the run from the A before it: dm becomes what M says about the A that it is made of, and dcenter is reduced by what it says about the
// center. kept (may be null): A before each token, [kRun][two halves][threads] of four.
template <int kThreads>
FW_DEVICE void through_m(const PrecondMap<float>& map, const ChunkPlace& c, int channels, const float* alphas, const float* gains, const RunRows& k,
                         float (&state)[kOwn], RunRows& dm, float& dcenter, float4* kept) {
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const float alpha = alphas[c.run * kRun + j], gain = gains[c.run * kRun + j];
    if (kept != nullptr) {
      kept[2 * j * kThreads + c.thread] = make_float4(state[0], state[1], state[2], state[3]);
      kept[(2 * j + 1) * kThreads + c.thread] = make_float4(state[4], state[5], state[6], state[7]);
    }
    const bool real = j < c.count;  // of the others A may be 0, and log(A) infinite
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float before = state[i];
      state[i] = fmaf(alpha, before, gain * k[j][i] * k[j][i]);
      float center = 0;
      const float da = precond_gradient<FastMath>(map, map.previous ? before : state[i], dm[j][i], center);
      dm[j][i] = real && i < channels ? da : 0.0f;
      dcenter += real && i < channels ? center : 0.0f;
    }
  }
}

// kSums: the first kernel, else the third.
template <int kLanes, bool kSums>
__global__ void __launch_bounds__(kPrecondThreads<kLanes>, 32 / kLanes)
    precond_backward_kernel(const __grid_constant__ PrecondBackwardArgs a, PrecondMap<float> map, int chunks) {
  constexpr int kThreads = kPrecondThreads<kLanes>;
  const Problem& x = a.problem;
  ChunkShared<kLanes>& shared = *reinterpret_cast<ChunkShared<kLanes>*>(shared_memory());
  if (kSums) grid_dependency_launch();
  // The third from the last chunk on: what the first has left in the cache.
  const ChunkPlace c = chunk_place<kLanes>(x, chunks, !kSums);
  if (c.chunk < 0) return grid_dependency_wait();
  const int64_t place = static_cast<int64_t>(c.chunk) * x.H + c.h;
  float* const maps = a.scratch + place * (2 * x.K + 2);
  // Everything on its way through shared memory: keys, dm of the first value head of the group, and the rest of dk, which is wanted last.
  char* const keys_stage = shared_memory() + sizeof(ChunkShared<kLanes>);
  char *const dm_stage = keys_stage + kStageBytes<kLanes>, *const rest_stage = dm_stage + kStageBytes<kLanes>;
  const RunPlace keys = run_place(key_rows(x.in.k, x.sequences, c.n, c.h), c.token, c.count, c.channel, x.K);
  const RunPlace dm = float_run(x, c, a.grads.dm, x.HV, c.h * x.group);
  start_run<kLanes>(keys, c.run, c.lane, keys_stage);
  start_run<kLanes>(dm, c.run, c.lane, dm_stage);
  cp_async_commit();
  const ChunkGates gates = load_gates(x, c);
  const Rows dk = key_rows(a.dk, x.sequences, c.n, c.h);
  const bool has_rest = !kSums && a.grads.d.k.data != nullptr && dk.data != nullptr;
  RunPlace rest{};
  if (has_rest) {
    rest = run_place(rows_of(a.grads.d.k, x.sequences, c.n, c.h * x.group), c.token, c.count, c.channel, x.K);
    start_run<kLanes>(rest, c.run, c.lane, rest_stage);
  }
  cp_async_commit();
  float start = c.thread < x.K ? a.boundaries[place * x.K + c.thread] : 0.0f, behind = 0;
  if (!kSums) {
    grid_dependency_wait();
    if (c.thread < x.K) behind = maps[x.K + 1 + c.thread];
  }
  RunRows k, da;
  cp_async_wait<1>();
  sync_warp();
  take_run<kLanes>(keys, c.run, c.lane, keys_stage, k);
  take_run<kLanes>(dm, c.run, c.lane, dm_stage, da);
  FW_NO_UNROLL
  for (int i = 1; i < x.group; ++i) add_run(float_run(x, c, a.grads.dm, x.HV, c.h * x.group + i), da);
  chunk_gates(x, c, gates, k, shared);
  run_sums(c, k, shared);
  run_starts<false>(c, start, shared);

  if (x.rule.uses_precond_center()) map.center = x.precond_center[c.h * x.center_stride];
  float state[kOwn];
  get_own(&shared.sum[c.run][c.channel], state);
  float4* const kept = kSums ? nullptr : reinterpret_cast<float4*>(dm_stage);  // dm is in da: all threads have passed barriers since
  float dcenter = 0;
  with_form(map, [&](const PrecondMap<float>& of) { through_m<kThreads>(of, c, x.K - c.channel, shared.alpha, shared.gain, k, state, da, dcenter, kept); });
  if (kSums && a.dcenter_parts != nullptr) {
    const float part = warp_sum(dcenter);
    if (lane_index() == 0) shared.center[warp_index()] = part;
  }
  // D before the run (its gradients through M: da) from 0 behind it.
  float d[kOwn] = {};
#pragma unroll
  for (int j = kRun - 1; j >= 0; --j) {
    const float alpha = shared.alpha[c.run * kRun + j];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) d[i] = map.previous ? fmaf(alpha, d[i], da[j][i]) : alpha * (d[i] + da[j][i]);
  }
  put_own(&shared.sum[c.run][c.channel], d);  // only this thread has read what was there
  sync_threads();

  if constexpr (kSums) {
    if (c.thread >= kOwn * kLanes) return;
    const ChunkMap back = chunk_map<true>(c, shared);
    if (c.thread == 0) maps[0] = back.product;
    if (c.thread < x.K) maps[1 + c.thread] = back.sum;
    if (c.thread == 0 && a.dcenter_parts != nullptr) {
      float total = 0;
      for (int i = 0; i < kThreads / 32; ++i) total += shared.center[i];
      a.dcenter_parts[place] = total;
    }
  } else {
    // D of every token (in da), and the sums over channels that the gates want.
    run_starts<true>(c, behind, shared);
    get_own(&shared.sum[c.run][c.channel], d);
    float sums[2 * kRun];
#pragma unroll
    for (int j = kRun - 1; j >= 0; --j) {
      const float alpha = shared.alpha[c.run * kRun + j];
      float with_state = 0, with_key = 0;
      const float4 low = kept[2 * j * kThreads + c.thread], high = kept[(2 * j + 1) * kThreads + c.thread];
      const float before[kOwn] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float here = map.previous ? d[i] : d[i] + da[j][i];
        d[i] = map.previous ? fmaf(alpha, here, da[j][i]) : alpha * here;
        with_state = fmaf(here, before[i], with_state);
        with_key = fmaf(here, k[j][i] * k[j][i], with_key);
        da[j][i] = here;
      }
      sums[j] = with_state;
      sums[kRun + j] = with_key;
    }
    const float pair = scattered_sum<2 * kRun, kLanes / 2>(sums, c.lane);
    if (c.lane % (kLanes / (2 * kRun)) == 0) shared.pair[c.run][c.lane / (kLanes / (2 * kRun))] = pair;
    sync_threads();
    const int t = c.thread;
    if (t < kChunk) {
      const float with_state = shared.pair[t / kRun][t % kRun], with_key = shared.pair[t / kRun][kRun + t % kRun];
      const float alpha = shared.alpha[t], gain = shared.gain[t], kn2 = shared.kn2[t];
      const bool normalised = x.rule.k_norm == Norm::kL2 && shared.square[t] + static_cast<float>(x.rule.norm_eps) > 0;
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
    cp_async_wait<0>();  // of the rest of dk
    sync_threads();
    if (dk.data == nullptr || c.channel >= x.K) return;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const float own = shared.own[c.run * kRun + j], common = shared.common[c.run * kRun + j];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) da[j][i] = fmaf(own, da[j][i], common) * k[j][i];
    }
    if (has_rest) {
      RunRows more;
      take_run<kLanes>(rest, c.run, c.lane, rest_stage, more);
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) da[j][i] += more[j][i];
      }
      FW_NO_UNROLL
      for (int i = 1; i < x.group; ++i) add_run(run_place(rows_of(a.grads.d.k, x.sequences, c.n, c.h * x.group + i), c.token, c.count, c.channel, x.K), da);
    }
    const RunPlace out = run_place(dk, c.token, c.count, c.channel, x.K);
#pragma unroll
    for (int j = 0; j < kRun; ++j) store_run_row(out, j, da[j]);
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

template <int kLanes>
void launch_kernels(const PrecondBackwardArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const Dim3 grid = chunk_grid(x, chunks);
  const int count = static_cast<int>(chunks);
  constexpr unsigned kThreads = kPrecondThreads<kLanes>;
  constexpr size_t kShared = sizeof(ChunkShared<kLanes>) + 2 * kStageBytes<kLanes>;
  const PrecondMap<float> form = precond_map(x.rule, 0.0f);
  launch(precond_backward_kernel<kLanes, true>, grid, kThreads, kShared, stream, args, form, count);
  ChunkWalk walk{args.scratch, 2 * x.K + 2, args.scratch + x.K + 1, 2 * x.K + 2, args.d_final_precond, args.d_initial_precond, nullptr};
  walk_chunks<true>(x, walk, stream);
  launch_overlapped(precond_backward_kernel<kLanes, false>, grid, kThreads, kShared + kStageBytes<kLanes>, stream, args, form, count);
}

}  // namespace

void precond_backward(const PrecondBackwardArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  if (x.K > 256) fail_internal("precond_backward: expected K <= 256, got {}", x.K);
  if (x.K <= 64) {
    launch_kernels<8>(args, chunks, stream);
  } else if (x.K <= 128) {
    launch_kernels<16>(args, chunks, stream);
  } else {
    launch_kernels<32>(args, chunks, stream);
  }
  if (args.dcenter == nullptr) return;
  launch(precond_center_kernel, Dim3{static_cast<unsigned>(x.H)}, kCenterThreads, 0, stream, args.dcenter_parts, chunks, x.H, args.dcenter,
         args.dcenter_stride);
}

}  // namespace fw::cuda
