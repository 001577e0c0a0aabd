// The gradients of the preconditioner after gradients() has made each chunk's share of them as if no gradient D of A
// reached it from after (PrecondShare). This file makes D after every chunk, and what it adds, which is linear in it.
// With c = of_key of a row and x = D.k^2,
//     dk += 2 c (D - of_norm x) k      dbeta += of_beta x      dg += p D.A + sum over the rows before of c x
// A is that before the chunk and p the product of all its decays. D reaches a row through the decays of those after it,
// and A through those of the rows before. Together they are the decays after the row where A got it. Sums only: a decay
// may be 0.
#pragma once

#include <type_traits>

#include "scan/cuda/kernels.h"
#include "scan/cuda/precond/chunk.cuh"

namespace fw::cuda {

struct CarryTensors {
  FlatTensor k, dk, dg, dbeta;
  const float* behind = nullptr;  // [chunks, H, K]: D
  int32_t chunks = 0;
  bool by_sequence = false;
};

// Of any tensor, one at a time.
template <int kN>
struct AnyRun {
  Rows rows;
  int token, count, channel, K;

  FW_DEVICE void load(const Problem& x, const TokenArg& a, const RunBlock& c) {
    rows = key_rows(a, x.sequences, c.n, c.h), token = c.token, count = c.count, channel = c.channel, K = x.K;
  }
  FW_DEVICE void row(int r, float (&x)[kN]) const {
    if (r < count) return load_channels(rows, token + r, channel, K, x);
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] = 0;
  }
  FW_DEVICE void store(int r, const float (&x)[kN]) const {
    if (r < count) store_channels(rows, token + r, channel, K, x);
  }
};

// A block has a chunk of one key head, as those of the preconditioner's other kernels. KeyRows: of k and dk.
template <int kN, KeyRows kRows>
__global__ void __launch_bounds__(kPrecondThreads, kRows == KeyRows::kFlat ? 3 : 2)
    precond_carry_kernel(const __grid_constant__ PrecondBackwardArgs a, const __grid_constant__ CarryTensors f) {
  const Problem& x = a.problem;
  float* const sums = reinterpret_cast<float*>(shared_memory());  // [warp]: what its rows add to dg of those after
  // From the last chunk on: what the gradients have left in the cache.
  const RunBlock c = run_block<kN>(x, f.chunks, f.by_sequence, true);
  if (c.chunk < 0) return grid_dependency_wait();
  const int64_t index = static_cast<int64_t>(c.chunk) * x.H + c.h;
  std::conditional_t<kRows == KeyRows::kFlat, FlatRun<kN>, AnyRun<kN>> keys, out;
  const bool has_dk = a.dk.data != nullptr;
  if constexpr (kRows == KeyRows::kFlat) {
    keys.load(f.k, c);
  } else {
    keys.load(x, x.in.k, c);
  }
  float d[kN], state[kN], product = 0;
  if (c.warp == 0) load_lane(a.boundaries, index, c.channel, x.K, state);
  grid_dependency_wait();
  if constexpr (kRows == KeyRows::kFlat) {
    if (has_dk) out.load(f.dk, c);
  } else {
    out.load(x, a.dk, c);
  }
  // Of the row lane / 4.
  const int own = c.lane / 4;
  float4 row = make_float4(0, 0, 0, 0);
  float share = 0;
  if (own < c.count) {
    const PrecondShare::Row* const from = a.share.rows + (c.flat + own) * x.H + c.h;
    row = *reinterpret_cast<const float4*>(from);
    share = c.lane % 2 == 0 ? from->dg : from->dbeta;
  }
  if (c.warp == 0) product = a.share.products[index];
  load_lane(f.behind, index, c.channel, x.K, d);

  float parts[kRunTokens];
#pragma unroll
  for (int r = 0; r < kRunTokens; ++r) {
    float k[kN];
    keys.row(r, k);
    parts[r] = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) parts[r] = fmaf(d[j] * k[j], k[j], parts[r]);
  }
  const float with_key = sum_run(parts, c.lane), adds = row.x * with_key;
  if (has_dk) {
    const float factor = 2 * row.x, common = -factor * row.z * with_key;
#pragma unroll
    for (int r = 0; r < kRunTokens; ++r) {
      const float of_d = of_token(factor, r), same = of_token(common, r);
      float k[kN], dk[kN];
      keys.row(r, k), out.row(r, dk);
#pragma unroll
      for (int j = 0; j < kN; ++j) dk[j] = fmaf(fmaf(of_d, d[j], same), k[j], dk[j]);
      if constexpr (kRows == KeyRows::kFlat) {
        out.store(f.dk, c, r, dk);
      } else {
        out.store(r, dk);
      }
    }
  }
  float sum = adds;  // of the warp's rows up to the lane's
#pragma unroll
  for (int delta = 4; delta < 32; delta *= 2) {
    const float before = shuffle_up(sum, delta);
    if (c.lane >= delta) sum += before;
  }
  float start = 0;
  if (c.warp == 0) {
#pragma unroll
    for (int j = 0; j < kN; ++j) start = fmaf(d[j], state[j], start);
    start = product * warp_sum(start);
  }
  if (c.lane == 31) sums[c.warp] = start + sum;
  sync_threads();
  for (int i = 0; i < c.warp; ++i) start += sums[i];
  if (own >= c.count || c.lane % 4 > 1) return;
  const bool of_g = c.lane % 2 == 0;
  const float total = share + (of_g ? start + (sum - adds) : row.y * with_key);
  const FlatTensor to{of_g ? f.dg.data : f.dbeta.data, of_g ? f.dg.step : f.dbeta.step, of_g ? f.dg.head : f.dbeta.head,
                      of_g ? f.dg.bf16 : f.dbeta.bf16};
  if (to.data != nullptr) {
    store_element({flat_address(to, c.flat + own, c.h), 0, to.bf16}, 0, 0, total);
    return;
  }
  const Rows rows = key_rows(of_g ? a.dprecond_g : a.dprecond_beta, x.sequences, c.n, c.h);
  if (rows.data != nullptr) store_element(rows, c.token + own, 0, total);
}

template <int kN>
void launch_carry(const PrecondBackwardArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  CarryTensors f;
  f.k = flat_rows(x, x.in.k, kN), f.dk = flat_rows(x, args.dk, kN);
  f.dg = flat_gates(x, args.dprecond_g), f.dbeta = flat_gates(x, args.dprecond_beta);
  float* const behind = args.scratch + chunks * x.H * x.K;
  f.behind = behind;
  f.chunks = static_cast<int32_t>(chunks);
  f.by_sequence = by_sequence(x);
  walk_chunks<Direction::kReverse>(
      x, {args.share.products, args.share.sums, behind, args.d_final_precond, args.d_initial_precond, {}, {}}, stream);
  const bool flat =
      f.k.data != nullptr && f.k.bf16 != 0 && (args.dk.data == nullptr || (f.dk.data != nullptr && f.dk.bf16 != 0));
  launch_overlapped(flat ? precond_carry_kernel<kN, KeyRows::kFlat> : precond_carry_kernel<kN, KeyRows::kAny>,
                    chunk_grid(x, chunks), kPrecondThreads, sizeof(float) * kRuns, stream, args, f);
}

}  // namespace fw::cuda
