// Keys from the decay and their gradient, elementwise. See key_from_decay.h.
//
// Roles, 256 threads: a warp has one token and key head at a time, a lane four neighbouring channels of every 128;
// nothing is shared.
#include <algorithm>
#include <cmath>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/args.h"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/rewrites/key_from_decay.h"
#include "scan/cuda/scan.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256, kN = 4;

struct Shape {
  unsigned rows, T, H;  // rows: tokens times key heads; T: tokens of a batch, all of them where sequences are packed
  int K;
  TokenEnd end;
};

FW_DEVICE Rows row_of(const TokenArg& x, unsigned b, unsigned t, unsigned h) {
  const int64_t at = b * x.stride_b + t * x.stride_t + h * x.stride_h;
  return {static_cast<char*>(x.data) + at * (x.bf16 != 0 ? 2 : 4), 0, x.bf16};
}

// body(b, t, h) of every row of this warp.
template <class Body>
FW_DEVICE void for_rows(const Shape& shape, const Body& body) {
  const unsigned step = grid_size_x() * (kThreads / 32);
  const unsigned rows = static_cast<unsigned>(tokens_before(shape.end, shape.rows / shape.H)) * shape.H;
  for (unsigned row = block_index_x() * (kThreads / 32) + warp_index(); row < rows; row += step) {
    const unsigned token = row / shape.H, b = token / shape.T;
    body(b, token - b * shape.T, row - token * shape.H);
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    key_from_decay_kernel(const __grid_constant__ TokenArg g, const __grid_constant__ TokenArg k, Shape shape) {
  for_rows(shape, [&](unsigned b, unsigned t, unsigned h) {
    const Rows from = row_of(g, b, t, h), to = row_of(k, b, t, h);
    for (int i = kN * static_cast<int>(lane_index()); i < shape.K; i += 32 * kN) {
      float x[kN];
      load_channels(from, 0, i, shape.K, x);
      FW_UNROLL
      for (float& y : x) y = -expm1f(y);
      store_channels(to, 0, i, shape.K, x);
    }
  });
}

__global__ void __launch_bounds__(kThreads, 4)
    key_from_decay_gradients_kernel(const __grid_constant__ TokenArg g, const __grid_constant__ TokenArg dk,
                                    const __grid_constant__ TokenArg dg, Shape shape) {
  for_rows(shape, [&](unsigned b, unsigned t, unsigned h) {
    const Rows from = row_of(g, b, t, h), grad = row_of(dk, b, t, h), to = row_of(dg, b, t, h);
    for (int i = kN * static_cast<int>(lane_index()); i < shape.K; i += 32 * kN) {
      float x[kN], d[kN], y[kN];
      load_channels(from, 0, i, shape.K, x);
      load_channels(grad, 0, i, shape.K, d);
      load_channels(to, 0, i, shape.K, y);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) y[j] -= expf(x[j]) * d[j];
      store_channels(to, 0, i, shape.K, y);
    }
  });
}

Shape shape_of(const Plan& plan) {
  const int64_t T = plan.packed ? plan.tokens() : plan.T;
  return {static_cast<unsigned>(plan.tokens() * plan.H), static_cast<unsigned>(std::max<int64_t>(T, 1)),
          static_cast<unsigned>(plan.H), static_cast<int>(plan.K), token_end(plan)};
}

Dim3 grid_of(const Shape& shape) {
  constexpr int64_t kRows = kThreads / 32;
  return Dim3{static_cast<unsigned>(std::min((int64_t{shape.rows} + kRows - 1) / kRows, 16 * int64_t{sm_count()}))};
}

}  // namespace

void make_key_from_decay(const Plan& plan, const TokenTensor<float>& g, const TokenTensor<float>& k) {
  const Shape shape = shape_of(plan);
  launch(key_from_decay_kernel, grid_of(shape), kThreads, 0, plan.stream, token_arg(plan, g), token_arg(plan, k),
         shape);
}

void add_key_from_decay(const Plan& plan, const TokenTensor<float>& g, const TokenTensor<float>& dk,
                        const TokenTensor<float>& dg) {
  const Shape shape = shape_of(plan);
  launch(key_from_decay_gradients_kernel, grid_of(shape), kThreads, 0, plan.stream, token_arg(plan, g),
         token_arg(plan, dk), token_arg(plan, dg), shape);
}

}  // namespace fw::cuda
