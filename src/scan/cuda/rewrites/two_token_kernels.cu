// A token's tensors as two rows of another rule, and its gradients of theirs. See rewrites/two_token_kernels.h.
//
// Roles, 256 threads: a block has rows of tokens and heads of one tensor (grid: blocks x tensors), neighbouring lanes
// kOf channels each of a row; nothing is shared.
#include <algorithm>
#include <cmath>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/rewrites/two_token_kernels.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256, kOf = 4;

struct Shape {
  int64_t tokens;
  unsigned batch, heads;  // tokens of a batch; the most heads
};

FW_DEVICE Rows row_of(const TokenArg& x, unsigned b, unsigned t, unsigned h) {
  const int64_t at = b * x.stride_b + t * x.stride_t + h * x.stride_h;
  return {static_cast<char*>(x.data) + at * (x.bf16 != 0 ? 2 : 4), x.stride_t, x.bf16};
}

// body(b, t, h) of the rows of `lanes` (a power of two, at most 32) neighbouring threads.
template <class Body>
FW_DEVICE void for_rows(const Shape& shape, unsigned heads, unsigned lanes, const Body& body) {
  const unsigned groups = kThreads / lanes;
  const int64_t first = int64_t{block_index_x()} * groups + thread_index() / lanes,
                step = int64_t{grid_size_x()} * groups;
  const int64_t tokens = step / heads;
  const unsigned more = static_cast<unsigned>(step - tokens * heads);
  int64_t token = first / heads;
  unsigned head = static_cast<unsigned>(first - token * heads);
  while (token < shape.tokens) {
    const unsigned index = static_cast<unsigned>(token), b = index / shape.batch;
    body(b, index - b * shape.batch, head);
    token += tokens, head += more;
    if (head >= heads) head -= heads, ++token;
  }
}
// Lanes for rows of so many channels.
FW_DEVICE unsigned lanes_of(int dim) {
  unsigned lanes = 1;
  while (lanes < 32 && static_cast<int>(lanes) * kOf < dim) lanes *= 2;
  return lanes;
}

// A log-decay's row, or one number for all of its channels, no less than `least`.
FW_DEVICE void load_decays(const Rows& g, int dim, int c, int limit, float least, float (&x)[kOf]) {
  if (dim == 1) {
    const float one = load_element(g, 0, 0);
    FW_UNROLL
    for (int j = 0; j < kOf; ++j) x[j] = one;
  } else {
    load_channels(g, 0, c, limit, x);
  }
  FW_UNROLL
  for (int j = 0; j < kOf; ++j) x[j] = fmaxf(x[j], least);
}

__global__ void __launch_bounds__(kThreads, 6)
    expand_rows_kernel(const __grid_constant__ ExpandArgs args, Shape shape) {
  const ExpandTask& task = args.tasks[block_index_y()];
  const unsigned lanes = lanes_of(task.dim);
  const int first_channel = static_cast<int>(thread_index() % lanes) * kOf;
  for_rows(shape, static_cast<unsigned>(task.heads), lanes, [&](unsigned b, unsigned t, unsigned h) {
    const Rows from = row_of(task.from, b, t, h), to = row_of(task.to, b, 2 * t, h);
    const bool has_other = task.other.data != nullptr;
    const Rows other = has_other ? row_of(task.other, b, t, h) : Rows{};
    for (int c = first_channel; c < task.dim; c += static_cast<int>(lanes) * kOf) {
      float x[kOf], y[kOf] = {}, first[kOf], second[kOf];
      load_channels(from, 0, c, task.dim, x);
      if (has_other && task.kind == RowsOf::kErase) load_decays(other, task.other_dim, c, task.dim, args.least, y);
      if (has_other && task.kind == RowsOf::kPair) load_channels(other, 0, c, task.dim, y);
      FW_UNROLL
      for (int j = 0; j < kOf; ++j) {
        first[j] = second[j] = 0;
        if (task.kind == RowsOf::kBoth) first[j] = second[j] = x[j];
        if (task.kind == RowsOf::kFirst) first[j] = x[j];
        if (task.kind == RowsOf::kSecond) second[j] = x[j];
        if (task.kind == RowsOf::kPair) first[j] = y[j], second[j] = x[j];
        if (task.kind == RowsOf::kDecay) first[j] = fmaxf(x[j], args.least);
        if (task.kind == RowsOf::kErase) first[j] = x[j] * expf(-y[j]);
      }
      store_channels(to, 0, c, task.dim, first);
      store_channels(to, 1, c, task.dim, second);
    }
  });
}

// p exp(-g) e of kOf channels: what the decay has of the rows of the erase vector.
FW_DEVICE void erase_shares(const JoinTask& task, float least, const Rows& p, const Rows& g, const Rows& erased, int c,
                            float (&x)[kOf]) {
  float decay[kOf], e[kOf];
  load_channels(p, 0, c, task.key_dim, x);
  load_decays(g, task.g_dim, c, task.key_dim, least, decay);
  load_channels(erased, 0, c, task.key_dim, e);
  FW_UNROLL
  for (int j = 0; j < kOf; ++j) x[j] *= expf(-decay[j]) * e[j];
}

__global__ void __launch_bounds__(kThreads, 4)
    reduce_rows_kernel(const __grid_constant__ ReduceRowsArgs args, Shape shape) {
  const JoinTask& task = args.tasks[block_index_y()];
  const bool sums = task.kind == RowsBack::kDecay && task.dim == 1;  // over the channels of p, by a warp
  const unsigned lanes = sums ? 32 : lanes_of(task.dim);
  const int lane = static_cast<int>(thread_index() % lanes), step = static_cast<int>(lanes) * kOf;
  for_rows(shape, static_cast<unsigned>(task.heads), lanes, [&](unsigned b, unsigned t, unsigned h) {
    const bool has_g = task.g.data != nullptr, has_rows = task.rows.data != nullptr,
               plain = task.kind == RowsBack::kPlain;
    const Rows rows = has_rows ? row_of(task.rows, b, 2 * t, h) : Rows{}, g = has_g ? row_of(task.g, b, t, h) : Rows{},
               to = row_of(task.to, b, t, h);
    const Rows erased = plain ? Rows{} : row_of(task.erased, b, 2 * t, h),
               p = task.kind == RowsBack::kDecay ? row_of(task.p, b, t, h) : Rows{};
    if (sums) {
      float all = 0;
      for (int c = lane * kOf; c < task.key_dim; c += step) {
        float x[kOf];
        erase_shares(task, args.least, p, g, erased, c, x);
        FW_UNROLL
        for (int j = 0; j < kOf; ++j) all += x[j];
      }
      all = warp_sum(all);
      if (lane != 0) return;
      const float own =
          has_rows ? task.first * load_element(rows, 0, 0) + task.second * load_element(rows, 1, 0) : 0.0f;
      store_element(to, 0, 0, load_element(g, 0, 0) < args.least ? 0.0f : own - all);
      return;
    }
    for (int c = lane * kOf; c < task.dim; c += step) {
      float d[kOf] = {};
      if (has_rows) {
        float second[kOf] = {};
        if (task.first != 0) load_channels(rows, 0, c, task.dim, d);
        if (task.second != 0) load_channels(rows, 1, c, task.dim, second);
        FW_UNROLL
        for (int j = 0; j < kOf; ++j) d[j] = task.first * d[j] + task.second * second[j];
      }
      if (task.kind == RowsBack::kErase) {
        float e[kOf], decay[kOf] = {};
        load_channels(erased, 0, c, task.dim, e);
        if (has_g) load_decays(g, task.g_dim, c, task.dim, args.least, decay);
        FW_UNROLL
        for (int j = 0; j < kOf; ++j) d[j] += expf(-decay[j]) * e[j];
      }
      if (task.kind == RowsBack::kDecay) {
        float x[kOf], decay[kOf];
        erase_shares(task, args.least, p, g, erased, c, x);
        load_channels(g, 0, c, task.dim, decay);
        FW_UNROLL
        for (int j = 0; j < kOf; ++j) d[j] = decay[j] < args.least ? 0.0f : d[j] - x[j];
      }
      store_channels(to, 0, c, task.dim, d);
    }
  });
}

Shape shape_of(const RowTokens& tokens) {
  return {tokens.all, static_cast<unsigned>(std::max<int64_t>(tokens.batch, 1)), static_cast<unsigned>(tokens.heads)};
}

// For rows of a warp.
Dim3 grid_of(const Shape& shape, int tasks) {
  constexpr int64_t kRows = kThreads / 32;
  const int64_t blocks = (shape.tokens * shape.heads + kRows - 1) / kRows;
  return Dim3{static_cast<unsigned>(std::min(blocks, 16 * int64_t{sm_count()})), static_cast<unsigned>(tasks)};
}

}  // namespace

void expand_rows(const ExpandArgs& args, const RowTokens& tokens, void* stream) {
  const Shape shape = shape_of(tokens);
  launch(expand_rows_kernel, grid_of(shape, args.count), kThreads, 0, stream, args, shape);
}

void reduce_rows(const ReduceRowsArgs& args, const RowTokens& tokens, void* stream) {
  const Shape shape = shape_of(tokens);
  launch(reduce_rows_kernel, grid_of(shape, args.count), kThreads, 0, stream, args, shape);
}

}  // namespace fw::cuda
