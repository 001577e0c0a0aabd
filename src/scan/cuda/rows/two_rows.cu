// A token's tensors as two rows of another rule, and its gradients of theirs. See rows/kernels.h.
//
// Roles, 256 threads: a warp has one token and head at a time and goes through all tensors, a lane every 32nd channel; nothing is shared.
#include <algorithm>
#include <cmath>

#include "scan/cuda/call/device.h"
#include "scan/cuda/call/launch.h"
#include "scan/cuda/machine/tokens.cuh"
#include "scan/cuda/rows/kernels.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

struct Shape {
  int64_t rows;  // tokens times heads
  unsigned batch, heads;
};

FW_DEVICE Rows row_of(const TokenArg& x, unsigned b, unsigned t, unsigned h) {
  const int64_t at = b * x.stride_b + t * x.stride_t + h * x.stride_h;
  return {static_cast<char*>(x.data) + at * (x.bf16 != 0 ? 2 : 4), x.stride_t, x.bf16};
}

// body(b, t, h) of every token and head of this warp.
template <class Body>
FW_DEVICE void for_tokens(const Shape& shape, const Body& body) {
  const int64_t step = int64_t{grid_size_x()} * (kThreads / 32);
  for (int64_t row = int64_t{block_index_x()} * (kThreads / 32) + warp_index(); row < shape.rows; row += step) {
    const unsigned token = static_cast<unsigned>(row / shape.heads), b = token / shape.batch;
    body(b, token - b * shape.batch, static_cast<unsigned>(row - int64_t{token} * shape.heads));
  }
}

FW_DEVICE float bounded(float g) { return fmaxf(g, kLeastRowDecay); }

__global__ void __launch_bounds__(kThreads, 4) spread_rows_kernel(const __grid_constant__ SpreadArgs args, Shape shape) {
  for_tokens(shape, [&](unsigned b, unsigned t, unsigned h) {
    FW_NO_UNROLL
    for (int i = 0; i < args.count; ++i) {
      const SpreadTask& task = args.tasks[i];
      if (h >= static_cast<unsigned>(task.heads)) continue;
      const bool has_other = task.other.data != nullptr;
      const Rows from = row_of(task.from, b, t, h), other = has_other ? row_of(task.other, b, t, h) : Rows{}, to = row_of(task.to, b, 2 * t, h);
      for (int c = static_cast<int>(lane_index()); c < task.dim; c += 32) {
        const float x = load_element(from, 0, c), y = has_other ? load_element(other, 0, task.other_dim == 1 ? 0 : c) : 0.0f;
        float first = 0, second = 0;
        if (task.kind == RowsOf::kBoth) first = second = x;
        if (task.kind == RowsOf::kFirst) first = x;
        if (task.kind == RowsOf::kSecond) second = x;
        if (task.kind == RowsOf::kPair) first = y, second = x;
        if (task.kind == RowsOf::kDecay) first = bounded(x);
        if (task.kind == RowsOf::kErase) first = x * expf(-bounded(y));
        store_element(to, 0, c, first);
        store_element(to, 1, c, second);
      }
    }
  });
}

__global__ void __launch_bounds__(kThreads, 4) join_rows_kernel(const __grid_constant__ JoinArgsOfRows args, Shape shape) {
  for_tokens(shape, [&](unsigned b, unsigned t, unsigned h) {
    const int lane = static_cast<int>(lane_index());
    FW_NO_UNROLL
    for (int i = 0; i < args.count; ++i) {
      const JoinTask& task = args.tasks[i];
      if (h >= static_cast<unsigned>(task.heads)) continue;
      const bool has_g = task.g.data != nullptr, has_rows = task.rows.data != nullptr, plain = task.kind == RowsBack::kPlain;
      const Rows rows = has_rows ? row_of(task.rows, b, 2 * t, h) : Rows{}, g = has_g ? row_of(task.g, b, t, h) : Rows{}, to = row_of(task.to, b, t, h);
      const Rows erased = plain ? Rows{} : row_of(task.erased, b, 2 * t, h), p = task.kind == RowsBack::kDecay ? row_of(task.p, b, t, h) : Rows{};
      const auto decay = [&](int c) { return has_g ? load_element(g, 0, task.g_dim == 1 ? 0 : c) : 0.0f; };
      const auto through = [&](int c) { return load_element(p, 0, c) * expf(-bounded(decay(c))) * load_element(erased, 0, c); };
      float all = 0;
      if (task.kind == RowsBack::kDecay && task.dim == 1) {
        for (int c = lane; c < task.key_dim; c += 32) all += through(c);
        all = warp_sum(all);
      }
      for (int c = lane; c < task.dim; c += 32) {
        float d = has_rows ? task.first * load_element(rows, 0, c) + task.second * load_element(rows, 1, c) : 0.0f;
        if (task.kind == RowsBack::kErase) d += expf(-bounded(decay(c))) * load_element(erased, 0, c);
        if (task.kind == RowsBack::kDecay) d = decay(c) < kLeastRowDecay ? 0.0f : d - (task.dim == 1 ? all : through(c));
        store_element(to, 0, c, d);
      }
    }
  });
}

Shape shape_of(const RowTokens& tokens) {
  return {tokens.all * tokens.heads, static_cast<unsigned>(std::max<int64_t>(tokens.batch, 1)), static_cast<unsigned>(tokens.heads)};
}

Dim3 grid_of(const Shape& shape) {
  constexpr int64_t kRows = kThreads / 32;
  return Dim3{static_cast<unsigned>(std::min((shape.rows + kRows - 1) / kRows, 16 * int64_t{multiprocessors()}))};
}

}  // namespace

void spread_rows(const SpreadArgs& args, const RowTokens& tokens, void* stream) {
  const Shape shape = shape_of(tokens);
  if (args.count > 0) launch(spread_rows_kernel, grid_of(shape), kThreads, 0, stream, args, shape);
}

void join_rows(const JoinArgsOfRows& args, const RowTokens& tokens, void* stream) {
  const Shape shape = shape_of(tokens);
  if (args.count > 0) launch(join_rows_kernel, grid_of(shape), kThreads, 0, stream, args, shape);
}

}  // namespace fw::cuda
