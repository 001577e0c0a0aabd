// Operations on heads of tokens whose columns meet in sums: norms, and products of two rows. A warp has a head of a
// token at a time, a lane every 32nd column of it. What is summed over tokens, column by column, is kept in shared
// memory by the warp. It is added up over the block's warps in their order and then over the blocks (column_sums.h).
// The run of tokens of a block is fixed, so the order is that of the shape alone.
//
// f is what the operation computes:
//   f(t, first, dim, lane, sums)   of token t, the columns from `first` to first + dim; sums [count, dim]: of this warp, each lane its own columns
#pragma once

#include <algorithm>

#include "gpu/launch.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {

// A matrix as f reads and writes it.
template <class T>
struct Accessor2d {
  T* data = nullptr;
  int64_t stride = 0;
  Accessor2d() = default;
  explicit Accessor2d(Mat<T> m) : data(m.data), stride(m.stride) {}
  FW_DEVICE float get(int64_t t, int64_t c) const { return number(data[t * stride + c]); }
  FW_DEVICE void set(int64_t t, int64_t c, float x) const { data[t * stride + c] = stored<T>(x); }
};

// body(column, its index in the head) of this lane.
template <class Body>
FW_DEVICE void for_head(int64_t first, int dim, int lane, const Body& body) {
  for (int i = lane; i < dim; i += 32) body(first + i, i);
}
// The sum of value(column, index) over the head, in every lane.
template <class Value>
FW_DEVICE float head_sum(int64_t first, int dim, int lane, const Value& value) {
  float sum = 0;
  for_head(first, dim, lane, [&](int64_t c, int i) { sum += value(c, i); });
  return warp_sum(sum);
}

// partial [count, runs, heads dim]; kSums: count > 0
template <bool kSums, class F>
__global__ void head_rows_kernel(const F f, int64_t tokens, int run, int dim, int count, float* partial) {
  follow();
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()),
            warps = static_cast<int>(block_size() / 32);
  const int64_t first = int64_t{block_index_y()} * dim, begin = int64_t{block_index_x()} * run,
                end = min(begin + run, tokens);
  float* const shared = reinterpret_cast<float*>(shared_memory());  // [warps, count, dim]
  float* const sums = kSums ? shared + warp * count * dim : nullptr;
  if constexpr (kSums) {
    for (int i = lane; i < count * dim; i += 32) sums[i] = 0;
    sync_warp();
  }
  for (int64_t t = begin + warp; t < end; t += warps) f(t, first, dim, lane, sums);
  if constexpr (kSums) {
    sync_threads();
    const int64_t columns = int64_t{grid_size_y()} * dim;
    for (int i = static_cast<int>(thread_index()); i < count * dim; i += 32 * warps) {
      float sum = shared[i];
      for (int w = 1; w < warps; ++w) sum += shared[w * count * dim + i];
      partial[(int64_t{i / dim} * grid_size_x() + block_index_x()) * columns + first + i % dim] = sum;
    }
  }
}

// Without sums.
template <class T, class F>
void for_head_rows(const Exec<T>& exec, const F& f, int64_t tokens, int64_t heads, int64_t dim) {
  constexpr int kWarps = 4, kRun = 8;
  if (tokens == 0) return;
  launch_following(tokens, head_rows_kernel<false, F>,
                   Dim3{static_cast<unsigned>(parts_of(tokens, kRun)), static_cast<unsigned>(heads)}, 32 * kWarps, 0,
                   exec.device.stream(), f, tokens, kRun, static_cast<int>(dim), 0, static_cast<float*>(nullptr));
}

// With `count` sums of a column: add(partial, runs) is called with partial [count, runs, heads dim]. They have to fit
// into a block's shared memory.
template <class T, class F, class Add>
void sum_head_rows(const Exec<T>& exec, const F& f, int64_t count, int64_t tokens, int64_t heads, int64_t dim,
                   const Add& add) {
  if (tokens == 0) return;
  constexpr int64_t kShared = 48 << 10;
  const Arena::Mark mark = exec.arena.mark();
  const int64_t runs = parts_of(tokens, kHeadRun), of_warp = count * dim * int64_t{sizeof(float)},
                warps = std::clamp<int64_t>(kShared / of_warp, 1, 8);
  float* const partial = partial_sums(exec.arena, count * runs, heads * dim);
  launch(head_rows_kernel<true, F>, Dim3{static_cast<unsigned>(runs), static_cast<unsigned>(heads)},
         static_cast<unsigned>(32 * warps), static_cast<size_t>(of_warp * warps), exec.device.stream(), f, tokens,
         static_cast<int>(kHeadRun), static_cast<int>(dim), static_cast<int>(count), partial);
  add(partial, runs);
  exec.arena.rewind(mark);
}
template <int kSums, class T, class F, class Add>
void sum_head_rows(const Exec<T>& exec, const F& f, int64_t tokens, int64_t heads, int64_t dim, const Add& add) {
  sum_head_rows(exec, f, kSums, tokens, heads, dim, add);
}

}  // namespace fw::cuda
