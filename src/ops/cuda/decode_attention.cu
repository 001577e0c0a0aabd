// Attention of a decoded token: one query a sequence and head over the rows of a ring or of pages. Few heads would be
// few blocks, so the rows that a token sees are cut into runs (scratch.h), a block each, which leaves its unnormalised
// sum, its largest score and its sum of exponentials. A second kernel joins the runs in their order. Where the runs lie
// depends on how many rows the token sees and on nothing else, so a sequence has the same bits alone and alongside
// others. All that changes from token to token is read from device memory, so one captured launch serves all tokens.
// Query heads that share keys are up to four in a block, so that a row is read once for them. The block of the last run
// also puts the token's own key and value where they belong: the row that they replace has left the window. bf16 heads
// of 64, 128 or 256 channels have a kernel of products for their runs (decode_tiles.cu).
//   decode_rows_kernel   grid: sequences x heads / kHeads, runs
//   decode_join_kernel   grid: sequences x heads
#include <cmath>

#include "ops/cuda/decode_parts.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"

namespace fw::cuda {
namespace {

template <class T, int N, int kVectors, int kHeads>
__global__ void __launch_bounds__(kRowThreads) decode_rows_kernel(const DecodeArgs<T> of) {
  const PlainArgs<T>& a = of.plain;
  constexpr int kAhead = kVectors > 1 ? 2 : kHeads > 1 ? 4 : 8;  // rows of a group on their way at once
  const Group group(a.lanes);
  float* rows = reinterpret_cast<float*>(shared_memory());  // [kHeads, groups, dim], then [kHeads, groups] tops, sums
  float *tops = rows + kHeads * group.count * a.dim, *sums = tops + kHeads * group.count;
  const int blocks = a.heads / kHeads, head = static_cast<int>(block_index_x()) % blocks * kHeads,
            column = head / a.group * a.dim;
  const int64_t n = block_index_x() / static_cast<unsigned>(blocks), run = block_index_y();
  grid_dependency_wait();
  grid_dependency_launch();
  const SeenRows seen(a, n);
  const int64_t begin = seen.first + run * seen.run, end = min(seen.last + 1, begin + seen.run);
  if (begin >= end) return;
  const RowsFrom<T> past_rows(a.past_k, a.past_v, n, begin);
  const T *own_k = a.k.data + n * a.k.stride + column, *own_v = a.v.data + n * a.v.stride + column;
  using Part = RowPart<N, kVectors>;
  Part q[kHeads], total[kHeads];
  float top[kHeads], sum[kHeads];
  FW_UNROLL for (int h = 0; h < kHeads; ++h) {
    q[h].load(a.q.data + n * a.q.stride + int64_t{head + h} * a.dim, group.lane, a.lanes, a.dim);
    total[h].clear();
    top[h] = -INFINITY, sum[h] = 0;
  }
  // Groups of a warp take part in each other's shuffles, so all of them take as many turns.
  const int64_t of_turn = int64_t{kAhead} * group.count;
  for (int64_t rotation = begin; rotation < end; rotation += of_turn) {
    const int64_t at = rotation + group.index;
    Packet<T, N> ks[kAhead][kVectors], vs[kAhead][kVectors];
    FW_UNROLL for (int r = 0; r < kAhead; ++r) {
      const int64_t position = at + int64_t{r} * group.count;
      if (position >= end) continue;
      T *past_k, *past_v;
      past_rows.find(position - begin, past_k, past_v);
      const T* k = position == seen.last ? own_k : past_k + column;
      const T* v = position == seen.last ? own_v : past_v + column;
      FW_UNROLL for (int i = 0; i < kVectors; ++i) {
        const int c = (group.lane + i * a.lanes) * N;
        if (c >= a.dim) continue;
        ks[r][i].load(k + c);
        vs[r][i].load(v + c);
      }
    }
    float score[kHeads][kAhead];
    FW_UNROLL for (int r = 0; r < kAhead; ++r) {
      Part k;
      FW_UNROLL for (int i = 0; i < kVectors; ++i) ks[r][i].get(k.of[i]);
      FW_UNROLL for (int h = 0; h < kHeads; ++h) score[h][r] = kLog2E * a.scale * q[h].dot(k, a.lanes);
    }
    FW_UNROLL for (int h = 0; h < kHeads; ++h) {
      float higher = top[h];
      FW_UNROLL for (int r = 0; r < kAhead; ++r) {
        if (at + int64_t{r} * group.count < end) higher = fmaxf(higher, score[h][r]);
      }
      const float factor = top[h] == -INFINITY ? 0.0f : exp2_fast(top[h] - higher);
      top[h] = higher;
      sum[h] *= factor;
      FW_UNROLL for (int i = 0; i < kVectors; ++i) {
        FW_UNROLL for (int j = 0; j < N; ++j) total[h].of[i][j] *= factor;
      }
    }
    FW_UNROLL for (int r = 0; r < kAhead; ++r) {
      if (at + int64_t{r} * group.count >= end) continue;
      Part v;
      FW_UNROLL for (int i = 0; i < kVectors; ++i) vs[r][i].get(v.of[i]);
      FW_UNROLL for (int h = 0; h < kHeads; ++h) {
        const float p = exp2_fast(score[h][r] - top[h]);
        sum[h] += p;
        total[h].add(p, v);
      }
    }
  }
  FW_UNROLL for (int h = 0; h < kHeads; ++h) {
    total[h].put(rows + (h * group.count + group.index) * a.dim, group.lane, a.lanes, a.dim);
    if (group.lane == 0) tops[h * group.count + group.index] = top[h], sums[h * group.count + group.index] = sum[h];
  }
  const int thread = static_cast<int>(thread_index());
  if (end == seen.last + 1 && head % a.group == 0) {
    T *to_k, *to_v;
    past_rows.find(seen.last - begin, to_k, to_v);
    for (int c = thread; c < a.dim; c += kRowThreads) to_k[column + c] = own_k[c], to_v[column + c] = own_v[c];
  }
  sync_threads();
  const int64_t stride = int64_t{of.runs} * (a.dim + 2);
  leave_part(
      kHeads, group.count, a.dim, [&](int h, int g) { return rows + (h * group.count + g) * a.dim; }, tops, sums,
      of.parts + (n * a.heads + head) * stride + run * (a.dim + 2), stride);
}

// All that it reads is asked for at once: after it comes a product that fills the memory's queues. How many runs there
// are is known ahead of the wait. A thread's first kColumns columns are in registers.
template <class T, int kColumns>
__global__ void __launch_bounds__(kRowThreads) decode_join_kernel(const DecodeArgs<T> of) {
  const PlainArgs<T>& a = of.plain;
  // runs of a thread's column in registers: a window of 2,048 rows
  constexpr int kHeld = 16;
  float* const tops = reinterpret_cast<float*>(shared_memory());  // [kDecodeRuns]
  float* const sums = tops + kDecodeRuns;                         // [kDecodeRuns]
  const int head = static_cast<int>(block_index_x()) % a.heads, thread = static_cast<int>(thread_index());
  const int64_t n = block_index_x() / static_cast<unsigned>(a.heads);
  const int runs = static_cast<int>(SeenRows(a, n).runs());
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t width = a.dim + 2;
  const float* parts = of.parts + (n * a.heads + head) * of.runs * width;
  float held[kColumns][kHeld] = {}, gates[kColumns] = {};
  const T* const gate = of.gate.data + n * of.gate.stride + int64_t{head} * a.dim;
  FW_UNROLL for (int i = 0; i < kColumns; ++i) {
    const int c = thread + i * kRowThreads;
    if (c >= a.dim) continue;
    FW_UNROLL for (int r = 0; r < kHeld; ++r) {
      if (r < runs) held[i][r] = parts[r * width + c];
    }
    if (of.gate.data != nullptr) gates[i] = number(gate[c]);
  }
  if (thread < runs) tops[thread] = parts[thread * width + a.dim], sums[thread] = parts[thread * width + a.dim + 1];
  sync_threads();
  float all = -INFINITY, weight = 0;
  for (int r = 0; r < runs; ++r) all = fmaxf(all, tops[r]);
  for (int r = 0; r < runs; ++r) weight += exp2_fast(tops[r] - all) * sums[r];
  T* to = a.out.data + n * a.out.stride + int64_t{head} * a.dim;
  // Rounded before and after the gate, and the gate too, as operations one by one round.
  const auto store = [&](int c, float sum, float x) {
    T value = stored<T>(sum);
    if (of.gate.data != nullptr) value = stored<T>(number(value) * number(stored<T>(sigmoid(x))));
    to[c] = value;
  };
  const auto part = [&](int r, float value) { return value * (exp2_fast(tops[r] - all) / weight); };
  FW_UNROLL for (int i = 0; i < kColumns; ++i) {
    const int c = thread + i * kRowThreads;
    if (c >= a.dim) continue;
    float sum = 0;
    FW_UNROLL for (int r = 0; r < kHeld; ++r) {
      if (r < runs) sum += part(r, held[i][r]);
    }
    for (int r = kHeld; r < runs; ++r) sum += part(r, parts[r * width + c]);
    store(c, sum, gates[i]);
  }
  for (int c = thread + kColumns * kRowThreads; c < a.dim; c += kRowThreads) {
    float sum = 0;
    for (int r = 0; r < runs; ++r) sum += part(r, parts[r * width + c]);
    store(c, sum, of.gate.data != nullptr ? number(gate[c]) : 0.0f);
  }
}

template <class T, int N, int kVectors, int kHeads>
void launch_rows(const DecodeArgs<T>& of, int64_t sequences, void* stream) {
  const PlainArgs<T>& a = of.plain;
  const size_t floats = static_cast<size_t>(kHeads * (kRowThreads / a.lanes) * (a.dim + 2));
  launch_overlapped(decode_rows_kernel<T, N, kVectors, kHeads>,
                    Dim3{static_cast<unsigned>(sequences * a.heads / kHeads), static_cast<unsigned>(of.runs)},
                    kRowThreads, sizeof(float) * floats, stream, of);
}

// gate: none where its data is null.
template <class T>
void step(const Exec<T>& exec, Mat<T> q, Mat<T> k, Mat<const T> v, Mat<const T> gate, const AttentionShape& shape,
          const PassLayout& layout, Pages<T> past_k, Pages<T> past_v, Mat<T> o) {
  if (q.rows == 0) return;
  if (!past_k || !past_v || layout.host.tokens() != layout.host.count())
    fail_internal("attention_step: expected pages and sequences of one token");
  void* stream = exec.device.stream();
  const Arena::Mark mark = exec.arena.mark();
  DecodeArgs<T> of{
      .plain = {.q = q, .k = k, .v = v, .past_k = past_k, .past_v = past_v, .sequences = PassSequences(layout)}};
  PlainArgs<T>& a = of.plain;
  a.heads = static_cast<int>(shape.heads), a.group = static_cast<int>(shape.heads / shape.kv_heads),
  a.dim = static_cast<int>(shape.dim);
  a.window = shape.window;
  a.scale = static_cast<float>(shape.scale);
  a.out = o;
  of.runs = static_cast<int>(decode_runs(shape, past_k));
  of.gate = gate;
  of.parts = decode_parts(exec.arena, shape, q.rows, of.runs);
  const bool in_sixteens = aligned(q) && aligned(k) && aligned(v) && aligned(past_k) && aligned(past_v);
  const bool tiles = std::is_same_v<T, Bf16> && in_sixteens && takes_decode_tiles(a.dim),
             inside = tiles && rotates_whole_heads(shape);
  if (inside) of.theta = shape.theta;
  if (shape.turns() && !inside) rotary_heads(exec, q, k, shape, layout, Rotation::kForward);
  if constexpr (std::is_same_v<T, Bf16>) {
    if (tiles) decode_tiles(of, q.rows, stream);
  }
  if (!tiles) {
    with_form(a, in_sixteens, [&]<int N, int kVectors>() {
      if constexpr (N * kVectors * 32 <= kNarrowDim) {  // registers
        if (a.group % 4 == 0) return launch_rows<T, N, kVectors, 4>(of, q.rows, stream);
      }
      if (a.group % 2 == 0) return launch_rows<T, N, kVectors, 2>(of, q.rows, stream);
      launch_rows<T, N, kVectors, 1>(of, q.rows, stream);
    });
  }
  launch_overlapped(a.dim <= kRowThreads ? decode_join_kernel<T, 1> : decode_join_kernel<T, 2>,
                    Dim3{static_cast<unsigned>(q.rows * shape.heads)}, kRowThreads,
                    2 * sizeof(float) * static_cast<size_t>(kDecodeRuns), stream, of);
  exec.arena.rewind(mark);
}

}  // namespace

namespace ops {

template <class T>
void attention_step(const Exec<T>& exec, Mat<T> q, Mat<T> k, Mat<const T> v, const AttentionShape& shape,
                    const PassLayout& layout, Pages<T> past_k, Pages<T> past_v, Mat<T> o) {
  step(exec, q, k, v, Mat<const T>(), shape, layout, past_k, past_v, o);
}

template <>
bool gated_attention_step(const Exec<Bf16>& exec, Mat<Bf16> q, Mat<Bf16> k, Mat<const Bf16> v, Mat<Bf16> gate,
                          const AttentionShape& shape, const PassLayout& layout, Pages<Bf16> past_k, Pages<Bf16> past_v,
                          Mat<Bf16> o) {
  step(exec, q, k, v, Mat<const Bf16>(gate), shape, layout, past_k, past_v, o);
  return true;
}

#define FW_INSTANTIATE(T)                                                                              \
  template void attention_step<T>(const Exec<T>&, Mat<T>, Mat<T>, Mat<const T>, const AttentionShape&, \
                                  const PassLayout&, Pages<T>, Pages<T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
