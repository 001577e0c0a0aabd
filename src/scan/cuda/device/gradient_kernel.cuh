// One chunk of one value head per block: from what the scans left (tiles.h) and the raw inputs, the gradients of the raw inputs
// (recurrence.md 5). All value blocks go through the stages first; the products over values stay in registers. Then dP and dT,
// with the decay, meet the streams; the sums go through shared memory to rows of lanes, where the front's gradients are elementwise.
#pragma once

#include "scan/cuda/device/gradient_channel.cuh"
#include "scan/cuda/device/gradient_scalar.cuh"
#include "scan/cuda/launch.h"

namespace fw::cuda {

template <class Shape>
FW_DEVICE void store_planes(const GradientChunk<Shape>& c, const StreamSums& sums) {
  FW_UNROLL
  for (int j = 0; j < 4; ++j) {
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      float* at = plane(c, 0, c.row() + 8 * half, c.column() + 8 * j);
      constexpr int kNext = Shape::kPlaneBytes / 4;
      *reinterpret_cast<float2*>(at) = make_float2(sums.r[j][2 * half], sums.r[j][2 * half + 1]);
      if (Shape::kOnline) *reinterpret_cast<float2*>(at + kNext) = make_float2(sums.e[j][2 * half], sums.e[j][2 * half + 1]);
      *reinterpret_cast<float2*>(at + 2 * kNext) = make_float2(sums.w[j][2 * half], sums.w[j][2 * half + 1]);
    }
  }
}

FW_DEVICE float dot_8(const uint4& packed, const float (&x)[8]) {
  return bf16_low(packed.x) * x[0] + bf16_high(packed.x) * x[1] + bf16_low(packed.y) * x[2] + bf16_high(packed.y) * x[3] + bf16_low(packed.z) * x[4] +
         bf16_high(packed.z) * x[5] + bf16_low(packed.w) * x[6] + bf16_high(packed.w) * x[7];
}

template <int kN>
FW_DEVICE void store_rows(const Rows& rows, int t, int i, int limit, const float (&x)[kN]) {
  if (rows.data != nullptr) store_channels(rows, t, i, limit, x);
}

// The front's gradients, from the planes and the diagonal of dP; scalar decay: dG of the rows. kPlain: rules without an erase key of
// their own, a channel gate on it and a preconditioner (fewer registers).
template <bool kPlain, class Shape>
FW_DEVICE void row_gradients(const GradientChunk<Shape>& c) {
  using Words = KeyWords<Shape>;
  constexpr int kLanes = Words::kLanes;
  const Problem& x = c.args.problem;
  const Rule& rule = x.rule;
  const HeadGradients& out = c.args.grads;
  const int lane = c.thread % kLanes, channel = 8 * lane;
  const FrontRows front = front_rows(x, c.n(), c.hv());
  const Words words(c, front);
  FW_UNROLL
  for (int pass = 0; pass < Words::kPasses; ++pass) {
    const int row = c.thread / kLanes + pass * Words::kRows;
    const bool valid = row < c.rows();
    const int t = c.first() + (valid ? row : c.rows() - 1);
    const RawKeyRow<8> raw = words.template row<kPlain>(x, front, pass, t, lane);
    const FrontScalars<float> s = front_scalars<kLanes>(x, front, raw, t, lane);
    const FrontCoefs<float> coefs = front_coefs(rule, x.scale, s);
    KeyStreams<8> d;
    const float* sums = plane(c, 0, row, channel);
    FW_UNROLL
    for (int j = 0; j < 8; ++j) {
      d.r[j] = sums[j];
      d.e[j] = Shape::kOnline ? sums[Shape::kPlaneBytes / 4 + j] : 0.0f;
      d.w[j] = sums[2 * Shape::kPlaneBytes / 4 + j];
    }
    const char* streams = c.memory + Shape::kStreams + panel_offset(row, channel);
    const uint4 r = *reinterpret_cast<const uint4*>(streams), w = *reinterpret_cast<const uint4*>(streams + 2 * Shape::kStateBytes);
    if (!Shape::kChannel) {
      float d_g = dot_8(r, d.r) - dot_8(w, d.w);
      if (Shape::kOnline) d_g += dot_8(*reinterpret_cast<const uint4*>(streams + Shape::kStateBytes), d.e);
      d_g = group_sum<kLanes>(d_g);
      if (lane == 0) c.floats(Shape::kDG)[row] = d_g;
    }
    const float diagonal = c.floats(Shape::kDiagonal)[row];
    const uint32_t r_words[4] = {r.x, r.y, r.z, r.w}, w_words[4] = {w.x, w.y, w.z, w.w};
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      d.r[2 * j] += diagonal * bf16_low(w_words[j]);
      d.r[2 * j + 1] += diagonal * bf16_high(w_words[j]);
      d.w[2 * j] += diagonal * bf16_low(r_words[j]);
      d.w[2 * j + 1] += diagonal * bf16_high(r_words[j]);
    }
    const FrontCoefs<float> d_coefs = sum_coefficient_gradients<kLanes>(key_coefficient_gradients(x, raw, d), lane == 0 ? c.floats(Shape::kDZv)[row] : 0.0f);
    if (!valid) continue;
    const FrontScalars<float> ds = front_coefs_vjp(rule, x.scale, s, d_coefs);
    const RawKeyRow<8> d_raw = key_row_gradients(x, coefs, ds, raw, d);
    const SequenceArg& q = x.sequences;
    store_rows(rows_of(out.d.q, q, c.n(), c.hv()), t, channel, x.K, d_raw.q);
    store_rows(rows_of(out.d.k, q, c.n(), c.hv()), t, channel, x.K, d_raw.k);
    const int64_t token = (first_token(q, c.n()) + t) * x.HV + c.hv();
    if (!kPlain) {
      store_rows(rows_of(out.d.erase_key, q, c.n(), c.hv()), t, channel, x.K, d_raw.p);
      if (rule.erase == Gate::kChannel) store_rows(rows_of(out.d.erase_gate, q, c.n(), c.hv()), t, channel, x.K, d_raw.b);
      if (out.dm != nullptr) store_rows(Rows{reinterpret_cast<char*>(out.dm + token * x.K), x.K, 0}, 0, channel, x.K, d_raw.m);
    }
    store_gate<kLanes>(rows_of(out.d.erase_gate, q, c.n(), c.hv()), rule.erase, t, lane, x.K, ds.erase);
    store_gate<kLanes>(rows_of(out.d.write_gate, q, c.n(), c.hv()), rule.write, t, lane, x.V, ds.write);
    if (lane != 0) continue;
    store_one(rows_of(out.d.beta, q, c.n(), c.hv()), t, ds.beta);
    store_one(rows_of(out.d.lambda, q, c.n(), c.hv()), t, ds.lambda);
    store_one(rows_of(out.d.read_correction, q, c.n(), c.hv()), t, ds.read);
    if (out.dalpha_p != nullptr) out.dalpha_p[token] = ds.alpha_p * s.alpha_p;
    if (out.dbeta_p != nullptr) out.dbeta_p[token] = ds.beta_p;
  }
}

// Scalar decay: dg from dG of the rows and the tail, by the first warp.
template <class Shape>
FW_DEVICE void scalar_decay_gradient(const GradientChunk<Shape>& c) {
  const Rows out = rows_of(c.args.grads.d.g, c.args.problem.sequences, c.n(), c.hv());
  if (c.warp != 0 || out.data == nullptr) return;
  float tail = 0;
  for (int i = 0; i < Shape::kWarps; ++i) tail += c.floats(Shape::kWarpSums)[i];
  const float first = c.floats(Shape::kDG)[2 * c.lane], second = c.floats(Shape::kDG)[2 * c.lane + 1];
  float sum = first + second;
  FW_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const float after = shuffle_down(sum, delta);
    if (c.lane + delta < 32) sum += after;
  }
  if (2 * c.lane < c.rows()) store_element(out, c.first() + 2 * c.lane, 0, sum + tail);
  if (2 * c.lane + 1 < c.rows()) store_element(out, c.first() + 2 * c.lane + 1, 0, sum - first + tail);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) gradient_kernel(const __grid_constant__ GradientArgs args) {
  const GradientChunk<Shape> c(args);
  const Problem& x = args.problem;
  const int blocks = (x.V + kValueBlock - 1) / kValueBlock;
  if (c.thread == 0) {
    FW_UNROLL
    for (int i = 0; i < Shape::kStages; ++i) mbarrier_init(c.barrier(i), 1);
    mbarrier_init_fence();
    c.find_place();
  }
  sync_threads();
  if (c.thread == 0) {
    for (int block = 0; block < Shape::kStages && block < blocks; ++block) load_stage(c, block, blocks);
  }
  for (int block = 0; block < Shape::kStages && block < blocks; ++block) load_d_out(c, block);
  plain_rows(x.rule) ? make_streams<true>(c) : make_streams<false>(c);
  prefetch_next(c, blocks);
  if constexpr (Shape::kChannel) {
    sum_channel_decay(c);
  } else {
    sum_decay(c);
  }
  wait_d_out();
  sync_threads();

  StreamSums sums;
  {
    PairSums<Shape> pairs;
    float2 state_dots = make_float2(0, 0);
    FW_NO_UNROLL
    for (int block = 0; block < blocks; ++block) {
      const int stage = block % Shape::kStages * Shape::kStageBytes;
      mbarrier_wait(c.barrier(block % Shape::kStages), block / Shape::kStages & 1);
      make_residuals(c, stage);
      add_products(c, stage, sums, pairs);
      value_gradients(c, block, stage);
      add_state_dots(c, stage, state_dots);
      const int next = block + Shape::kStages;
      if (next >= blocks) continue;
      fence_async_shared();
      sync_threads();
      if (c.thread == 0) load_stage(c, next, blocks);
      load_d_out(c, next);
      wait_d_out();
      sync_threads();
    }
    if constexpr (Shape::kChannel) {
      store_block_pairs(c, pairs);
      *reinterpret_cast<float2*>(c.floats(Shape::kStateDots) + c.thread / Shape::kPairs * Shape::kKey + c.thread % Shape::kPairs * 2) = state_dots;
      sync_threads();
      anchor_streams(c);
    } else {
      store_decayed_pairs(c, pairs);
      const float sum = warp_sum(state_dots.x + state_dots.y) * exp2_fast(c.floats(Shape::kG)[63]);
      if (c.lane == 0) c.floats(Shape::kWarpSums)[c.warp] = sum;
    }
  }
  sync_threads();

  if constexpr (Shape::kChannel) {
    if (decays_are(c, Decays::kBounded)) unbound_states(c, sums);
    float d_g[4][4];
    finish_channel(c, sums, d_g);
    sync_threads();
    store_plane(c, Shape::kFactors, d_g);
    store_planes(c, sums);
    sync_threads();
    channel_decay_gradient(c);
    plain_rows(x.rule) ? row_gradients<true>(c) : row_gradients<false>(c);
  } else {
    const float sum = warp_sum(finish_scalar(c, sums));
    if (c.lane == 0) c.floats(Shape::kWarpSums)[c.warp] += sum;
    if constexpr (3 * Shape::kPlaneBytes > Shape::kRing) sync_threads();  // the planes reach into dP and dT
    store_planes(c, sums);
    sync_threads();
    plain_rows(x.rule) ? row_gradients<true>(c) : row_gradients<false>(c);
    sync_threads();
    scalar_decay_gradient(c);
  }
}

template <class Shape>
void launch_gradients(const GradientArgs& args, int64_t chunks, void* stream) {
  launch(gradient_kernel<Shape>, Dim3{static_cast<unsigned>(chunks * args.problem.HV)}, Shape::kThreads, Shape::kBytes, stream, args);
}

void gradients_scalar(const GradientArgs& args, int key, int64_t chunks, void* stream);
void gradients_channel(const GradientArgs& args, int key, int64_t chunks, void* stream);

}  // namespace fw::cuda
