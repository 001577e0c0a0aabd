// Erase gates divided by decays and their gradients, elementwise. See erase_over_decay.h.
//
// Roles, 256 threads: a thread has one token and value head at a time; nothing is shared.
#include <algorithm>
#include <cmath>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/args.h"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/rewrites/erase_over_decay.h"
#include "scan/cuda/scan.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

struct Shape {
  unsigned rows, T, HV;  // rows: tokens times heads; T: tokens of a batch, all of them where sequences are packed
  TokenEnd end;
};

FW_DEVICE Rows row_of(const TokenArg& x, unsigned b, unsigned t, unsigned h) {
  const int64_t at = b * x.stride_b + t * x.stride_t + h * x.stride_h;
  return {static_cast<char*>(x.data) + at * (x.bf16 != 0 ? 2 : 4), 0, x.bf16};
}
FW_DEVICE float number_of(const TokenArg& x, unsigned b, unsigned t, unsigned h, float absent) {
  return x.data != nullptr ? load_element(row_of(x, b, t, h), 0, 0) : absent;
}

// body(b, t, h) of every row of this thread.
template <class Body>
FW_DEVICE void for_rows(const Shape& shape, const Body& body) {
  const unsigned step = grid_size_x() * kThreads;
  const unsigned rows = static_cast<unsigned>(tokens_before(shape.end, shape.rows / shape.HV)) * shape.HV;
  for (unsigned row = block_index_x() * kThreads + thread_index(); row < rows; row += step) {
    const unsigned token = row / shape.HV, b = token / shape.T;
    body(b, token - b * shape.T, row - token * shape.HV);
  }
}

__global__ void __launch_bounds__(kThreads)
    divide_erase_gate_kernel(const __grid_constant__ EraseOverDecayArgs args, Shape shape) {
  for_rows(shape, [&](unsigned b, unsigned t, unsigned h) {
    const float g = fmaxf(number_of(args.g, b, t, h, 0), args.least);
    store_element(row_of(args.divided, b, t, h), 0, 0, number_of(args.gate, b, t, h, 1) * expf(-g));
    store_element(row_of(args.decay, b, t, h), 0, 0, g);
  });
}

__global__ void __launch_bounds__(kThreads)
    divide_erase_gate_backward_kernel(const __grid_constant__ EraseOverDecayArgs args, Shape shape) {
  for_rows(shape, [&](unsigned b, unsigned t, unsigned h) {
    const float g = number_of(args.g, b, t, h, 0);
    const float d_share = number_of(args.d_divided, b, t, h, 0) * expf(-fmaxf(g, args.least));
    if (args.d_gate.data != nullptr)
      store_element(row_of(args.d_gate, b, t, h), 0, 0, number_of(args.d_beta, b, t, h, 0) + d_share);
    if (args.d_g.data != nullptr) {
      const float d = number_of(args.d_decay, b, t, h, 0) - d_share * number_of(args.gate, b, t, h, 1);
      store_element(row_of(args.d_g, b, t, h), 0, 0, g < args.least ? 0.0f : d);
    }
  });
}

Shape shape_of(const Plan& plan) {
  const int64_t T = plan.packed ? plan.tokens() : plan.T;
  return {static_cast<unsigned>(plan.tokens() * plan.HV), static_cast<unsigned>(std::max<int64_t>(T, 1)),
          static_cast<unsigned>(plan.HV), token_end(plan)};
}

Dim3 grid_of(const Shape& shape) {
  return Dim3{
      static_cast<unsigned>(std::min((int64_t{shape.rows} + kThreads - 1) / kThreads, 16 * int64_t{sm_count()}))};
}

}  // namespace

void divide_erase_gate(const Plan& plan, const EraseOverDecayArgs& args) {
  const Shape shape = shape_of(plan);
  if (shape.rows == 0) return;
  launch(divide_erase_gate_kernel, grid_of(shape), kThreads, 0, plan.stream, args, shape);
}

void divide_erase_gate_backward(const Plan& plan, const EraseOverDecayArgs& args) {
  const Shape shape = shape_of(plan);
  if (shape.rows == 0) return;
  launch(divide_erase_gate_backward_kernel, grid_of(shape), kThreads, 0, plan.stream, args, shape);
}

}  // namespace fw::cuda
