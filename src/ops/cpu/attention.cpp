// Softmax attention in tiles: a task is a block of queries of one head (forward) or the keys of one key/value head or
// of a part of them (backward). Scores exist for kQueries x kKeys at a time. Forward keeps a running maximum and sum of
// every query and their logarithm for backward, which makes the scores again. The products go to the library; a few
// queries (decoding) to kernels of our own, which read keys and values once for all heads of a group.
//   forward    s = scale q k^T, p = exp(s - largest), o = p v / sum p
//   backward   p = exp(s - lse), dv = p^T do, ds = scale p (do v^T - rowsum(do o)), dq = ds k, dk = ds^T q
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/gemm.h"
#include "ops/cpu/attention_tile.h"
#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"
#include "ops/cpu/scratch.h"
#include "ops/rotary_heads.h"

namespace fw {
namespace {

constexpr int64_t kQueries = 128, kKeys = 256;  // a tile of scores and its gradient stay in the second cache
constexpr int64_t kFewQueries = 4;
// Backward cuts the keys of a head so that few heads and long sequences give as many tasks; every part has queries'
// gradients of its own, added up at the end.
constexpr int64_t kBackwardTasks = 16, kPartKeys = 1024;

// One sequence of a pass.
struct Sequence {
  int64_t index, begin, length, past;
  int64_t first_seen(int64_t position, int64_t window) const {
    return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
  }
  int64_t end() const { return past + length; }
};

template <class T>
Sequence sequence_of(const PassLayout& layout, const Pages<T>& past, int64_t n) {
  return {n, layout.host.begin(n), layout.host.length(n),
          past && layout.positions != nullptr ? layout.positions[n] : 0};
}

// Keys or values of one head: those of this pass and those before it.
template <class T>
struct Rows {
  Mat<const T> now;
  Pages<T> past;
  int64_t column, dim;

  // The rows at positions [from, to), or as many of them as lie one after the other.
  Mat<const T> at(const Sequence& s, int64_t from, int64_t to) const {
    if (from >= s.past) return {now.row(s.begin + from - s.past) + column, to - from, dim, now.stride};
    const int64_t page_end = (from / past.rows + 1) * past.rows;
    return {past.row(s.index, from) + column, std::min({to, s.past, page_end}) - from, dim, past.width};
  }
};

template <class T>
void product(Trans ta, Trans tb, Mat<const T> a, Mat<const T> b, T alpha, T beta, Mat<T> c) {
  gemm(ta, tb, c.rows, c.cols, ta == Trans::kNo ? a.cols : a.rows, alpha, a.data, a.stride, b.data, b.stride, beta,
       c.data, c.stride);
}

struct ForwardTask {
  int64_t sequence, head, first;  // first query; few queries: head is the key/value head
};

// Queries of a task of few; 0: the sequence's tasks are blocks. For a decoded token's bits a window's queries come
// alone: its tiles of keys begin where the query's window does.
int64_t few_queries(const AttentionShape& shape, bool decode_bits, int64_t length) {
  if (decode_bits) return shape.window > 0 ? 1 : kFewQueries;
  return length <= kFewQueries ? kFewQueries : 0;
}

template <class T>
void finish(const T* largest, const T* sum, Mat<T> o, Mat<T> out, T* lse, int64_t lse_stride) {
  for (int64_t i = 0; i < o.rows; ++i) {
    const T inverse = T(1) / sum[i];
    for (int64_t c = 0; c < o.cols; ++c) out.row(i)[c] = o.row(i)[c] * inverse;
    lse[i * lse_stride] = largest[i] + std::log(sum[i]);
  }
}

template <class T>
void forward_block(Mat<const T> q, const Rows<T>& k, const Rows<T>& v, const AttentionShape& shape, const Sequence& s,
                   int64_t head, int64_t first, Mat<T> o, Mat<T> lse) {
  LocalScratch scratch;
  const int64_t rows = std::min(kQueries, s.length - first), D = shape.dim;
  T* largest = scratch.alloc<T>(rows);
  T* sum = scratch.alloc_zero<T>(rows);
  std::fill_n(largest, rows, -std::numeric_limits<T>::infinity());
  const Mat<T> total(scratch.alloc_zero<T>(rows * D), rows, D);
  T* scores = scratch.alloc<T>(rows * kKeys);
  const Mat<const T> queries = q.row_range(s.begin + first, rows).col_range(head * D, D);
  const int64_t query = s.past + first;
  for (int64_t key = s.first_seen(query, shape.window); key < query + rows;) {
    const int64_t to = std::min(key + kKeys, query + rows);
    const Mat<const T> keys = k.at(s, key, to), values = v.at(s, key, to);
    const ScoreTile<T> tile{Mat<T>(scores, rows, keys.rows), query, key, shape.window};
    product<T>(Trans::kNo, Trans::kYes, queries, keys, static_cast<T>(shape.scale), T(0), tile.scores);
    attention_softmax(tile, largest, sum, total);
    product<T>(Trans::kNo, Trans::kNo, tile.scores, values, T(1), T(1), total);
    key += keys.rows;
  }
  finish(largest, sum, total, o.row_range(s.begin + first, rows).col_range(head * D, D),
         lse.row(s.begin + first) + head, lse.stride);
}

// Queries first to first + length of the heads of one key/value head. Their bits depend neither on one another (without
// a window) nor on where the keys lie.
template <class T>
void forward_few(Mat<const T> q, const Rows<T>& k, const Rows<T>& v, const AttentionShape& shape, const Sequence& s,
                 int64_t kv_head, int64_t first, int64_t length, Mat<T> o, Mat<T> lse) {
  LocalScratch scratch;
  const int64_t group = shape.heads / shape.kv_heads, D = shape.dim, rows = group * length;
  const int64_t begin = s.begin + first, query = s.past + first, last = query + length;
  T* largest = scratch.alloc<T>(rows);
  T* sum = scratch.alloc_zero<T>(rows);
  std::fill_n(largest, rows, -std::numeric_limits<T>::infinity());
  const Mat<T> queries(scratch.alloc<T>(rows * D), rows, D), total(scratch.alloc_zero<T>(rows * D), rows, D);
  T* scores = scratch.alloc<T>(rows * kKeys);
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t i = 0; i < length; ++i) {
      const T* from = q.row(begin + i) + (kv_head * group + g) * D;
      std::transform(from, from + D, queries.row(g * length + i), [&](T x) { return x * static_cast<T>(shape.scale); });
    }
  }
  for (int64_t key = s.first_seen(query, shape.window); key < last; key += kKeys) {
    const int64_t to = std::min(key + kKeys, last);
    const Mat<T> all(scores, rows, to - key);
    // body(first column, rows) of the tile's parts that lie one after the other
    const auto for_parts = [&](const Rows<T>& of, const auto& body) {
      for (int64_t at = key; at < to;) {
        const Mat<const T> part = of.at(s, at, to);
        body(all.col_range(at - key, part.rows), part);
        at += part.rows;
      }
    };
    for_parts(k, [&](Mat<T> columns, Mat<const T> keys) { attention_few_scores<T>(queries, keys, columns); });
    for (int64_t g = 0; g < group; ++g) {
      const int64_t at = g * length;
      attention_softmax(ScoreTile<T>{all.row_range(at, length), query, key, shape.window}, largest + at, sum + at,
                        total.row_range(at, length));
    }
    for_parts(v, [&](Mat<T> columns, Mat<const T> values) { attention_few_values<T>(columns, values, total); });
  }
  for (int64_t g = 0; g < group; ++g) {
    const int64_t at = g * length, head = kv_head * group + g;
    finish(largest + at, sum + at, total.row_range(at, length), o.row_range(begin, length).col_range(head * D, D),
           lse.row(begin) + head, lse.stride);
  }
}

// What backward works on, of one pass.
template <class T>
struct Backward {
  Mat<const T> d_o, q, k, v;
  const AttentionShape& shape;
  Pages<T> past_k, past_v;
  Mat<const T> lse;
  Mat<T> delta;  // [H, T]: rowsum(do o)
  Mat<T> dk, dv;

  // The gradients of keys [begin, end) of one head, and of the queries that see them what these keys contribute: into
  // dq [length, group D], which is overwritten.
  void keys(const Sequence& s, int64_t kv_head, int64_t begin, int64_t end, Mat<T> dq) const {
    const int64_t D = shape.dim, group = shape.heads / shape.kv_heads;
    const Rows<T> all_k{k, past_k, kv_head * D, D}, all_v{v, past_v, kv_head * D, D};
    for (int64_t i = 0; i < dq.rows; ++i) std::fill_n(dq.row(i), dq.cols, T(0));
    LocalScratch scratch;
    T* scores = scratch.alloc<T>(kQueries * kKeys);
    T* dscores = scratch.alloc<T>(kQueries * kKeys);
    for (int64_t key = begin; key < end;) {
      const Mat<const T> rows_k = all_k.at(s, key, std::min(key + kKeys, end)),
                         rows_v = all_v.at(s, key, std::min(key + kKeys, end));
      const int64_t count = rows_k.rows, stop = key + count;
      const bool own = key >= s.past;  // keys before the pass have no gradient
      const Mat<T> grad_k = own ? dk.row_range(s.begin + key - s.past, count).col_range(kv_head * D, D) : Mat<T>();
      const Mat<T> grad_v = own ? dv.row_range(s.begin + key - s.past, count).col_range(kv_head * D, D) : Mat<T>();
      for (int64_t i = 0; i < grad_k.rows; ++i) {
        std::fill_n(grad_k.row(i), D, T(0));
        std::fill_n(grad_v.row(i), D, T(0));
      }
      const int64_t last = shape.window > 0 ? std::min(s.end(), stop - 1 + shape.window) : s.end();
      for (int64_t query = std::max(key, s.past); query < last; query += kQueries) {
        const int64_t rows = std::min(kQueries, last - query), at = s.begin + query - s.past;
        // The part of the tile that these queries see at all.
        const int64_t from = std::max(key, s.first_seen(query, shape.window)) - key,
                      to = std::min(stop, query + rows) - key;
        const Mat<const T> part_k = rows_k.row_range(from, to - from), part_v = rows_v.row_range(from, to - from);
        for (int64_t g = 0; g < group; ++g) {
          const int64_t head = kv_head * group + g;
          const Mat<const T> queries = q.row_range(at, rows).col_range(head * D, D),
                             grads = d_o.row_range(at, rows).col_range(head * D, D);
          const ScoreTile<T> tile{Mat<T>(scores, rows, to - from), query, key + from, shape.window};
          const Mat<T> dtile(dscores, rows, to - from);
          product<T>(Trans::kNo, Trans::kYes, queries, part_k, static_cast<T>(shape.scale), T(0), tile.scores);
          product<T>(Trans::kNo, Trans::kYes, grads, part_v, T(1), T(0), dtile);
          attention_softmax_backward(tile, lse.row(at) + head, lse.stride, delta.row(head) + at,
                                     static_cast<T>(shape.scale), dtile);
          product<T>(Trans::kNo, Trans::kNo, dtile, part_k, T(1), T(1),
                     dq.row_range(query - s.past, rows).col_range(g * D, D));
          if (!own) continue;
          product<T>(Trans::kYes, Trans::kNo, tile.scores, grads, T(1), T(1), grad_v.row_range(from, to - from));
          product<T>(Trans::kYes, Trans::kNo, dtile, queries, T(1), T(1), grad_k.row_range(from, to - from));
        }
      }
      key = stop;
    }
  }
};

// The keys of a sequence cut into parts, by its own shape only, so that its bits do not depend on its neighbours.
struct Parts {
  int64_t first, end, count;
  Parts(const Sequence& s, const AttentionShape& shape)
      : first(s.first_seen(s.past, shape.window)),
        end(s.end()),
        count(
            std::clamp<int64_t>(kBackwardTasks / shape.kv_heads, 1, std::max<int64_t>((end - first) / kPartKeys, 1))) {}
  int64_t begin(int64_t part) const {
    return part == count ? end : first + (end - first) * part / count / kKeys * kKeys;
  }
};

struct BackwardTask {
  int64_t sequence, kv_head, part, partial;  // partial: rows before this part's in the buffer; -1: straight into dq
};

// The tasks of a backward pass, and how many rows their partial gradients have.
template <class T>
int64_t backward_tasks(const AttentionShape& shape, const PassLayout& layout, const Pages<T>& past,
                       std::vector<BackwardTask>& tasks) {
  int64_t partial_rows = 0;
  for (int64_t n = 0; n < layout.host.count(); ++n) {
    const Sequence s = sequence_of(layout, past, n);
    if (s.length == 0) continue;
    const Parts parts(s, shape);
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      for (int64_t p = 0; p < parts.count; ++p) {
        tasks.push_back({n, h, p, parts.count == 1 ? -1 : partial_rows});
        if (parts.count > 1) partial_rows += s.length;
      }
    }
  }
  return partial_rows;
}

template <class T>
void rotary_heads(const Exec<T>& exec, Mat<T> q, Mat<T> k, const AttentionShape& shape, const PassLayout& layout,
                  Rotation turn) {
  fw::rotary_heads(q, k, [&](Mat<T> x) { cpu::rotary(exec, x, shape.dim, shape.rotated, shape.theta, layout, turn); });
}

}  // namespace

namespace cpu {

int64_t attention_partial_rows(const AttentionShape& shape, const PassLayout& layout) {
  std::vector<BackwardTask> tasks;
  return backward_tasks(shape, layout, Pages<float>(), tasks);
}

template <class T>
void attention_forward(const Exec<T>& exec, Mat<const T> q, Mat<const T> k, Mat<const T> v, const AttentionShape& shape,
                       const PassLayout& layout, Pages<T> past_k, Pages<T> past_v, Mat<T> o, Mat<T> lse) {
  std::vector<ForwardTask> tasks;
  for (int64_t n = 0; n < layout.host.count(); ++n) {
    const int64_t length = layout.host.length(n);
    const int64_t few = few_queries(shape, exec.decode_bits, length), step = few > 0 ? few : kQueries;
    for (int64_t h = 0; h < (few > 0 ? shape.kv_heads : shape.heads); ++h) {
      for (int64_t first = 0; first < length; first += step) tasks.push_back({n, h, first});
    }
  }
  const int64_t group = shape.heads / shape.kv_heads, D = shape.dim;
  parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const ForwardTask& task = tasks[static_cast<size_t>(i)];
    const Sequence s = sequence_of(layout, past_k, task.sequence);
    const int64_t few = few_queries(shape, exec.decode_bits, s.length);
    const int64_t column = (few > 0 ? task.head : task.head / group) * D;
    const Rows<T> keys{k, past_k, column, D}, values{v, past_v, column, D};
    if (few > 0) {
      forward_few(q, keys, values, shape, s, task.head, task.first, std::min(few, s.length - task.first), o, lse);
    } else {
      forward_block(q, keys, values, shape, s, task.head, task.first, o, lse);
    }
  });
}

template <class T>
void attention_backward(const Exec<T>& exec, Mat<const T> d_o, Mat<const T> q, Mat<const T> k, Mat<const T> v,
                        const AttentionShape& shape, const PassLayout& layout, Pages<T> past_k, Pages<T> past_v,
                        Mat<const T> o, Mat<const T> lse, Mat<T> dq, Mat<T> dk, Mat<T> dv) {
  const int64_t group = shape.heads / shape.kv_heads, D = shape.dim, columns = group * D;
  std::vector<BackwardTask> tasks;
  const int64_t partial_rows = backward_tasks(shape, layout, past_k, tasks);
  const ArenaMark mark(exec.arena);
  const AttentionScratch<T> scratch(exec.arena, shape, q.rows, partial_rows);
  const Mat<T> delta = scratch.delta, partial = scratch.partial;
  for_row_blocks(RowBlocks::cut(q.rows, q.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        T sum = 0;
        for (int64_t c = h * D; c < (h + 1) * D; ++c) sum += d_o.row(t)[c] * o.row(t)[c];
        delta.row(h)[t] = sum;
      }
    }
  });
  const Backward<T> backward{d_o, q, k, v, shape, past_k, past_v, lse, delta, dk, dv};
  parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const BackwardTask& task = tasks[static_cast<size_t>(i)];
    const Sequence s = sequence_of(layout, past_k, task.sequence);
    const Parts parts(s, shape);
    const Mat<T> out = task.partial < 0 ? dq.row_range(s.begin, s.length).col_range(task.kv_head * columns, columns)
                                        : partial.row_range(task.partial, s.length);
    backward.keys(s, task.kv_head, parts.begin(task.part), parts.begin(task.part + 1), out);
  });
  parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const BackwardTask& task = tasks[static_cast<size_t>(i)];
    if (task.partial < 0 || task.part != 0) return;
    const Sequence s = sequence_of(layout, past_k, task.sequence);
    const Mat<T> out = dq.row_range(s.begin, s.length).col_range(task.kv_head * columns, columns);
    const int64_t count = Parts(s, shape).count;
    for (int64_t t = 0; t < s.length; ++t) {
      std::copy_n(partial.row(task.partial + t), columns, out.row(t));
      for (int64_t p = 1; p < count; ++p) {
        const T* from = partial.row(task.partial + p * s.length + t);
        for (int64_t c = 0; c < columns; ++c) out.row(t)[c] += from[c];
      }
    }
  });
  if (shape.turns()) rotary_heads(exec, dq, dk, shape, layout, Rotation::kBackward);
}

template <class T>
void store_rows(const Exec<T>&, Mat<const T> x, const PassLayout& layout, Pages<T> pages) {
  for (int64_t n = 0; n < layout.host.count(); ++n) {
    const int64_t before = layout.positions == nullptr ? 0 : layout.positions[n];
    const int64_t room = pages.per_sequence * pages.rows, length = layout.host.length(n);
    for (int64_t i = std::max<int64_t>(length - room, 0); i < length; ++i) {
      std::copy_n(x.row(layout.host.begin(n) + i), x.cols, pages.row(n, before + i));
    }
  }
}

template <class T>
void attention_step(const Exec<T>& exec, Mat<T> q, Mat<T> k, Mat<const T> v, const AttentionShape& shape,
                    const PassLayout& layout, Pages<T> past_k, Pages<T> past_v, Mat<T> o) {
  const ArenaMark mark(exec.arena);
  if (shape.turns()) rotary_heads(exec, q, k, shape, layout, Rotation::kForward);
  attention_forward<T>(exec, q, k, v, shape, layout, past_k, past_v, o,
                       Mat<T>(exec.arena.template alloc<T>(q.rows * shape.heads), q.rows, shape.heads));
  store_rows<T>(exec, k, layout, past_k);
  store_rows(exec, v, layout, past_v);
}

#define FW_INSTANTIATE(T)                                                                                              \
  template void attention_forward(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, const AttentionShape&,     \
                                  const PassLayout&, Pages<T>, Pages<T>, Mat<T>, Mat<T>);                              \
  template void attention_backward(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<const T>,             \
                                   const AttentionShape&, const PassLayout&, Pages<T>, Pages<T>, Mat<const T>,         \
                                   Mat<const T>, Mat<T>, Mat<T>, Mat<T>);                                              \
  template void store_rows(const Exec<T>&, Mat<const T>, const PassLayout&, Pages<T>);                                 \
  template void attention_step(const Exec<T>&, Mat<T>, Mat<T>, Mat<const T>, const AttentionShape&, const PassLayout&, \
                               Pages<T>, Pages<T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace cpu
}  // namespace fw
