// Softmax attention of the engine's list. bf16 tensors of this pass alone go to the kernels by tiles (attention.h);
// everything else comes here: float32, head dimensions those do not take, keys in pages. The same contract: no T x T
// matrix, no atomics, a sequence has the same bits alone and packed.
//
//   forward, and first pass back   a block has a query of a head: its threads in groups of as many neighbours as a row has packets take keys in turn,
//                                  each group with sums of its own, which are added up in the order of the groups
//   second pass back               a block has a key of a key/value head, and its groups take the queries that see it, of all the heads that share it
#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "gpu/upload.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/attention_rows.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

// grid: tokens x heads
template <class T, int N, int kVectors>
__global__ void __launch_bounds__(kRowThreads) plain_forward_kernel(const PlainArgs<T> a) {
  const Group group(a.lanes);
  float* rows = reinterpret_cast<float*>(shared_memory());  // [groups, dim], then [groups] tops, sums
  float *tops = rows + group.count * a.dim, *sums = tops + group.count;
  const int head = static_cast<int>(block_index_x()) % a.heads, column = head / a.group * a.dim;
  const int64_t t = block_index_x() / static_cast<unsigned>(a.heads);
  const Stand stand(a, t);
  using Part = RowPart<N, kVectors>;
  Part q, total;
  q.load(a.q.data + t * a.q.stride + int64_t{head} * a.dim, group.lane, a.lanes, a.dim);
  total.clear();
  float top = -INFINITY, sum = 0;
  // Groups of a warp take part in each other's shuffles, so all of them take as many turns.
  for (int64_t first = stand.first; first <= stand.last; first += group.count) {
    const int64_t position = first + group.index;
    const bool has = position <= stand.last;
    Part k, v;
    k.clear(), v.clear();
    if (has) {
      k.load(stand.row(a.k, a.past_k, position, column), group.lane, a.lanes, a.dim);
      v.load(stand.row(a.v, a.past_v, position, column), group.lane, a.lanes, a.dim);
    }
    const float score = kLog2E * a.scale * q.dot(k, a.lanes);
    if (!has) continue;
    const float higher = fmaxf(top, score), factor = exp2_fast(top - higher), p = exp2_fast(score - higher);
    top = higher;
    sum = sum * factor + p;
    FW_UNROLL for (int i = 0; i < kVectors; ++i) { FW_UNROLL for (int j = 0; j < N; ++j) total.of[i][j] *= factor; }
    total.add(p, v);
  }
  total.put(rows + group.index * a.dim, group.lane, a.lanes, a.dim);
  if (group.lane == 0) tops[group.index] = top, sums[group.index] = sum;
  sync_threads();
  float all = -INFINITY, weight = 0;
  for (int g = 0; g < group.count; ++g) all = fmaxf(all, tops[g]);
  for (int g = 0; g < group.count; ++g) weight += exp2_fast(tops[g] - all) * sums[g];
  sync_threads();
  for (int g = static_cast<int>(thread_index()); g < group.count; g += kRowThreads) tops[g] = exp2_fast(tops[g] - all);
  sync_threads();
  leave_sum(rows, group.count, a.dim, tops, 1.0f / weight, a.out.data + t * a.out.stride + int64_t{head} * a.dim);
  if (thread_index() == 0) a.lse.data[t * a.lse.stride + head] = (all + log2f(weight)) / kLog2E;
}

// delta = rowsum(o do) and dq = scale sum of ds k, ds = p (do . v - delta).  grid: tokens x heads
template <class T, int N, int kVectors>
__global__ void __launch_bounds__(kRowThreads) plain_backward_queries_kernel(const PlainArgs<T> a) {
  const Group group(a.lanes);
  float* rows = reinterpret_cast<float*>(shared_memory());  // [groups, dim]
  const int head = static_cast<int>(block_index_x()) % a.heads, column = head / a.group * a.dim;
  const int64_t t = block_index_x() / static_cast<unsigned>(a.heads), own = int64_t{head} * a.dim;
  const Stand stand(a, t);
  using Part = RowPart<N, kVectors>;
  Part q, d_o, o, dq;
  q.load(a.q.data + t * a.q.stride + own, group.lane, a.lanes, a.dim);
  d_o.load(a.d_o.data + t * a.d_o.stride + own, group.lane, a.lanes, a.dim);
  o.load(a.o.data + t * a.o.stride + own, group.lane, a.lanes, a.dim);
  dq.clear();
  const float delta = d_o.dot(o, a.lanes), lse = kLog2E * a.lse.data[t * a.lse.stride + head];
  if (thread_index() == 0) a.delta[t * a.heads + head] = delta;
  for (int64_t first = stand.first; first <= stand.last; first += group.count) {
    const int64_t position = first + group.index;
    const bool has = position <= stand.last;
    Part k, v;
    k.clear(), v.clear();
    if (has) {
      k.load(stand.row(a.k, a.past_k, position, column), group.lane, a.lanes, a.dim);
      v.load(stand.row(a.v, a.past_v, position, column), group.lane, a.lanes, a.dim);
    }
    const float p = exp2_fast(kLog2E * a.scale * q.dot(k, a.lanes) - lse), dp = d_o.dot(v, a.lanes);
    if (has) dq.add(p * (dp - delta), k);
  }
  dq.put(rows + group.index * a.dim, group.lane, a.lanes, a.dim);
  sync_threads();
  leave_sum(rows, group.count, a.dim, nullptr, a.scale, a.out.data + t * a.out.stride + own);
}

// dk = scale sum of ds q, dv = sum of p do over the queries that see the key.  grid: tokens x key/value heads
template <class T, int N, int kVectors>
__global__ void __launch_bounds__(kRowThreads) plain_backward_keys_kernel(const PlainArgs<T> a) {
  const Group group(a.lanes);
  float* rows = reinterpret_cast<float*>(shared_memory());  // [groups, dim] twice
  const int kv_heads = a.heads / a.group, kv_head = static_cast<int>(block_index_x()) % kv_heads;
  const int64_t t = block_index_x() / static_cast<unsigned>(kv_heads), own = int64_t{kv_head} * a.dim;
  const Stand stand(a, t);
  const int64_t last = a.window > 0 ? min(stand.end, t + a.window) : stand.end;
  using Part = RowPart<N, kVectors>;
  Part k, v, dk, dv;
  k.load(a.k.data + t * a.k.stride + own, group.lane, a.lanes, a.dim);
  v.load(a.v.data + t * a.v.stride + own, group.lane, a.lanes, a.dim);
  dk.clear(), dv.clear();
  const int64_t pairs = (last - t) * a.group;
  for (int64_t first = 0; first < pairs; first += group.count) {
    const int64_t pair = first + group.index, query = t + pair / a.group;
    const int head = kv_head * a.group + static_cast<int>(pair % a.group);
    const bool has = pair < pairs;
    Part q, d_o;
    q.clear(), d_o.clear();
    float lse = 0, delta = 0;
    if (has) {
      q.load(a.q.data + query * a.q.stride + int64_t{head} * a.dim, group.lane, a.lanes, a.dim);
      d_o.load(a.d_o.data + query * a.d_o.stride + int64_t{head} * a.dim, group.lane, a.lanes, a.dim);
      lse = kLog2E * a.lse.data[query * a.lse.stride + head], delta = a.delta[query * a.heads + head];
    }
    const float p = exp2_fast(kLog2E * a.scale * q.dot(k, a.lanes) - lse), dp = d_o.dot(v, a.lanes);
    if (!has) continue;
    dv.add(p, d_o);
    dk.add(p * (dp - delta), q);
  }
  float* second = rows + group.count * a.dim;
  dk.put(rows + group.index * a.dim, group.lane, a.lanes, a.dim);
  dv.put(second + group.index * a.dim, group.lane, a.lanes, a.dim);
  sync_threads();
  leave_sum(rows, group.count, a.dim, nullptr, a.scale, a.dk.data + t * a.dk.stride + own);
  leave_sum(second, group.count, a.dim, nullptr, 1.0f, a.dv.data + t * a.dv.stride + own);
}

// ---- the kernels of attention.h ------------------------------------------------------------------------------------------------

// Between lse [T, H] of base e and [H, T] of base 2.
__global__ void __launch_bounds__(kRowThreads) lse_to_table_kernel(const float* from, Mat<float> to) {
  const int64_t i = int64_t{block_index_x()} * kRowThreads + thread_index(), t = i / to.cols, h = i % to.cols;
  if (t < to.rows) to.data[t * to.stride + h] = from[h * to.rows + t] / kLog2E;
}
__global__ void __launch_bounds__(kRowThreads) lse_of_table_kernel(Mat<const float> from, float* to) {
  const int64_t i = int64_t{block_index_x()} * kRowThreads + thread_index(), t = i / from.cols, h = i % from.cols;
  if (t < from.rows) to[h * from.rows + t] = from.data[t * from.stride + h] * kLog2E;
}

// Row r of all keys (or values): one of an earlier pass, or of this one. In packets of 16 bytes.  grid: rows
struct GatherArgs {
  Mat<const Bf16> now;
  Pages<Bf16> past;
  PassSequences sequences;
  const int32_t* offsets;  // [N + 1] of all keys
  Mat<Bf16> to;
};
__global__ void __launch_bounds__(kRowThreads) gather_keys_kernel(const GatherArgs keys, const GatherArgs values) {
  const GatherArgs& a = block_index_y() == 0 ? keys : values;
  const int64_t r = block_index_x();
  int64_t low = 0, high = a.sequences.count;  // offsets[low] <= r < offsets[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (a.offsets[middle] <= r ? low : high) = middle;
  }
  const int64_t begin = a.sequences.offsets[low], length = a.sequences.offsets[low + 1] - begin;
  const int64_t before = a.offsets[low + 1] - a.offsets[low] - length, i = r - a.offsets[low];
  const Bf16* from = i < before ? page_row(a.past, low, a.sequences.before(low) - before + i)
                                : a.now.data + (begin + i - before) * a.now.stride;
  for (int64_t c = int64_t{thread_index()} * 8; c < a.to.cols; c += kRowThreads * 8) {
    Packet<Bf16, 8> packet;
    packet.load(from + c);
    packet.store(a.to.data + r * a.to.stride + c);
  }
}

Dim3 each_lse(int64_t rows, int64_t heads) {
  return {static_cast<unsigned>((rows * heads + kRowThreads - 1) / kRowThreads)};
}

const AttentionTile* upload_tiles(const AttentionShape& shape, const PassLayout& layout, bool of_keys, bool with_past,
                                  Arena& arena, void* stream, int32_t& count) {
  std::vector<AttentionSequence> sequences;
  sequences.reserve(static_cast<size_t>(layout.host.count()));
  int64_t key = 0;
  for (int64_t n = 0; n < layout.host.count(); ++n) {
    const int64_t keys = layout.host.length(n) + (with_past ? KeysBefore::of(layout, shape.window, n) : 0);
    sequences.push_back({static_cast<int32_t>(layout.host.begin(n)), static_cast<int32_t>(layout.host.length(n)),
                         static_cast<int32_t>(key), static_cast<int32_t>(keys)});
    key += keys;
  }
  const std::vector<AttentionTile> tiles = attention_tiles(sequences, of_keys, shape.window);
  count = static_cast<int32_t>(tiles.size());
  static_assert(sizeof(AttentionTile) == kAttentionTileNumbers * sizeof(int32_t) &&
                kAttentionRows == kAttentionTileRows);
  int32_t* memory = attention_list(arena, count);
  upload(reinterpret_cast<const int32_t*>(tiles.data()), int64_t{count} * kAttentionTileNumbers, memory, stream);
  return reinterpret_cast<const AttentionTile*>(memory);
}

template <class T>
TokenArg token_arg(Mat<T> x, int64_t dim) {
  return {const_cast<std::remove_const_t<T>*>(x.data), 0, x.stride, dim, 1, 1};
}

// What both passes are given; the pass's own tensors are its to add.
template <class T>
PlainArgs<T> plain_args(Mat<const T> q, Mat<const T> k, Mat<const T> v, const AttentionShape& shape,
                        const PassLayout& layout, Pages<T> past_k, Pages<T> past_v) {
  PlainArgs<T> a{.q = q, .k = k, .v = v, .past_k = past_k, .past_v = past_v, .sequences = PassSequences(layout)};
  a.heads = static_cast<int>(shape.heads), a.group = static_cast<int>(shape.heads / shape.kv_heads),
  a.dim = static_cast<int>(shape.dim);
  a.window = shape.window;
  a.scale = static_cast<float>(shape.scale);
  return a;
}
template <class T>
AttentionArgs attention_args(Mat<const T> q, Mat<const T> k, Mat<const T> v, Mat<const T> o,
                             const AttentionShape& shape, Arena& arena) {
  const int64_t rows = q.rows;
  AttentionArgs args;
  args.q = token_arg(q, shape.dim), args.k = token_arg(k, shape.dim), args.v = token_arg(v, shape.dim),
  args.o = token_arg(o, shape.dim);
  args.lse = attention_rows(arena, shape, rows);
  args.heads = static_cast<int32_t>(shape.heads), args.kv_heads = static_cast<int32_t>(shape.kv_heads),
  args.dim = static_cast<int32_t>(shape.dim);
  args.window = static_cast<int32_t>(shape.window);
  args.sm_count = static_cast<int32_t>(persistent_ctas());
  args.query_rows = args.key_rows = rows;
  args.scale = static_cast<float>(shape.scale);
  return args;
}

// The keys and values that earlier passes left, and this pass's after them, one sequence after the other.
void forward_with_past(const Exec<Bf16>& exec, Mat<const Bf16> q, Mat<const Bf16> k, Mat<const Bf16> v,
                       const AttentionShape& shape, const PassLayout& layout, const KeysBefore& before,
                       Pages<Bf16> past_k, Pages<Bf16> past_v, Mat<Bf16> o, Mat<float> lse) {
  void* stream = exec.device.stream();
  const Arena::Mark mark = exec.arena.mark();
  std::vector<int32_t> offsets = {0};
  for (int64_t n = 0; n < before.sequences; ++n)
    offsets.push_back(offsets.back() +
                      static_cast<int32_t>(layout.host.length(n) + KeysBefore::of(layout, shape.window, n)));
  int32_t* device_offsets = key_offsets(exec.arena, before.sequences);
  upload(offsets.data(), before.sequences + 1, device_offsets, stream);
  const Mat<Bf16> keys = all_keys<Bf16>(exec.arena, shape, before.rows),
                  values = all_keys<Bf16>(exec.arena, shape, before.rows);
  const PassSequences sequences(layout);
  launch(gather_keys_kernel, Dim3{static_cast<unsigned>(before.rows), 2}, kRowThreads, 0, stream,
         GatherArgs{k, past_k, sequences, device_offsets, keys},
         GatherArgs{v, past_v, sequences, device_offsets, values});
  AttentionArgs args = attention_args<Bf16>(q, keys, values, o, shape, exec.arena);
  args.key_rows = before.rows;
  args.tiles = upload_tiles(shape, layout, false, true, exec.arena, stream, args.tile_count);
  cuda::attention_forward(args, stream);
  launch(lse_to_table_kernel, each_lse(lse.rows, lse.cols), kRowThreads, 0, stream, args.lse, lse);
  exec.arena.rewind(mark);
}

}  // namespace

namespace ops {

template <class T>
void attention_forward(const Exec<T>& exec, Mat<const T> q, Mat<const T> k, Mat<const T> v, const AttentionShape& shape,
                       const PassLayout& layout, Pages<T> past_k, Pages<T> past_v, Mat<T> o, Mat<Wide<T>> lse) {
  if (q.rows == 0) return;
  void* stream = exec.device.stream();
  const KeysBefore before(layout, shape.window);
  if (layout.host_positions != nullptr && !before.any) past_k = past_v = {};
  if constexpr (std::is_same_v<T, Bf16>) {
    if (past_k && layout.host_positions != nullptr && takes_attention_tiles<T>(shape, Pages<T>(), q, k, v, o) &&
        aligned(past_k) && aligned(past_v))
      return forward_with_past(exec, q, k, v, shape, layout, before, past_k, past_v, o, lse);
  }
  if (takes_attention_tiles<T>(shape, past_k, q, k, v, o)) {
    const Arena::Mark mark = exec.arena.mark();
    AttentionArgs args = attention_args<T>(q, k, v, o, shape, exec.arena);
    args.tiles = upload_tiles(shape, layout, false, false, exec.arena, stream, args.tile_count);
    cuda::attention_forward(args, stream);
    launch(lse_to_table_kernel, each_lse(lse.rows, lse.cols), kRowThreads, 0, stream, args.lse, lse);
    exec.arena.rewind(mark);
    return;
  }
  PlainArgs<T> a = plain_args(q, k, v, shape, layout, past_k, past_v);
  a.out = o, a.lse = lse;
  with_form(a, aligned(q) && aligned(k) && aligned(v) && aligned(past_k) && aligned(past_v),
            [&]<int N, int kVectors>() {
              const size_t groups = static_cast<size_t>(kRowThreads / a.lanes);
              launch(plain_forward_kernel<T, N, kVectors>, Dim3{static_cast<unsigned>(q.rows * shape.heads)},
                     kRowThreads, sizeof(float) * groups * static_cast<size_t>(shape.dim + 2), stream, a);
            });
}

template <class T>
void attention_backward(const Exec<T>& exec, Mat<const T> d_o, Mat<const T> q, Mat<const T> k, Mat<const T> v,
                        const AttentionShape& shape, const PassLayout& layout, Pages<T> past_k, Pages<T> past_v,
                        Mat<const T> o, Mat<const Wide<T>> lse, Mat<T> dq, Mat<T> dk, Mat<T> dv) {
  if (q.rows == 0) return;
  void* stream = exec.device.stream();
  const Arena::Mark mark = exec.arena.mark();
  float* delta = attention_rows(exec.arena, shape, q.rows);
  const bool tiles = takes_attention_tiles<T>(shape, past_k, d_o, q, k, v, o, dq, dk, dv),
             inside = tiles && rotates_whole_heads(shape);
  if (tiles) {
    AttentionArgs args = attention_args<T>(q, k, v, o, shape, exec.arena);
    args.d_o = token_arg(d_o, shape.dim), args.dq = token_arg(dq, shape.dim), args.dk = token_arg(dk, shape.dim),
    args.dv = token_arg(dv, shape.dim);
    args.delta = delta;
    if (inside) args.theta = shape.theta, args.positions = layout.positions;
    launch(lse_of_table_kernel, each_lse(lse.rows, lse.cols), kRowThreads, 0, stream, lse, args.lse);
    args.tiles = upload_tiles(shape, layout, false, false, exec.arena, stream, args.tile_count);
    attention_backward_queries(args, stream);
    args.tiles = upload_tiles(shape, layout, true, false, exec.arena, stream, args.tile_count);
    attention_backward_keys(args, stream);
  } else {
    PlainArgs<T> a = plain_args(q, k, v, shape, layout, past_k, past_v);
    a.o = o, a.d_o = d_o, a.out = dq, a.dk = dk, a.dv = dv, a.delta = delta;
    a.lse = Mat<float>(const_cast<float*>(lse.data), lse.rows, lse.cols, lse.stride);  // only read
    const bool packets =
        aligned(q) && aligned(k) && aligned(v) && aligned(o) && aligned(d_o) && aligned(past_k) && aligned(past_v);
    with_form(a, packets, [&]<int N, int kVectors>() {
      const size_t rows = sizeof(float) * static_cast<size_t>(kRowThreads / a.lanes * shape.dim);
      launch(plain_backward_queries_kernel<T, N, kVectors>, Dim3{static_cast<unsigned>(q.rows * shape.heads)},
             kRowThreads, rows, stream, a);
      launch(plain_backward_keys_kernel<T, N, kVectors>, Dim3{static_cast<unsigned>(k.rows * shape.kv_heads)},
             kRowThreads, 2 * rows, stream, a);
    });
  }
  if (shape.turns() && !inside) rotary_heads(exec, dq, dk, shape, layout, Rotation::kBackward);
  exec.arena.rewind(mark);
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void attention_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, const AttentionShape&, \
                                     const PassLayout&, Pages<T>, Pages<T>, Mat<T>, Mat<float>);                      \
  template void attention_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,         \
                                      const AttentionShape&, const PassLayout&, Pages<T>, Pages<T>, Mat<const T>,     \
                                      Mat<const float>, Mat<T>, Mat<T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
