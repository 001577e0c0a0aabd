// Backward of the embedding on the device: dweight[id] += the rows of dout whose token has this id, in the order of the tokens, without atomics.
// The tokens are sorted by id (stable, by 8 bits a turn; own kernels, so that the emulation runs the same), then a warp takes kRun neighbours of the
// sorted list and sums those of equal ids. The sum of an id that lies in one warp's part alone goes straight to dweight; what a part begins or ends
// with may go on beside it, so those sums are left for a second kernel, in which the part where an id begins adds up all of its sums, in order: an id
// that half of the tokens have is summed by many blocks as well.
#include <bit>

#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"
#include "scan/cuda/call/launch.h"

namespace fw::cuda {
namespace {

constexpr int kSortThreads = 256, kSortWarps = kSortThreads / 32;
constexpr int kTile = kSortTile;  // tokens of a block of the sort, a warp has kTile / kSortWarps neighbours
constexpr int kDigits = kSortDigits;
constexpr int kRun = kEmbeddingRun;

struct Token {
  int32_t id, index;
};

// Digits of the tokens of a block. order null: the tokens as they come.
FW_DEVICE Token token_at(const int32_t* ids, const int32_t* order, int64_t i) {
  const int32_t index = order == nullptr ? static_cast<int32_t>(i) : order[i];
  return {ids[index], index};
}

// counts [kSortWarps, kDigits] of the warp's tokens with each digit; place(digit, before) for each token: `before` tokens of its warp have the digit
// and come before it.
template <class Each>
FW_DEVICE void count_digits(const int32_t* ids, const int32_t* order, int64_t count, int shift, int* counts, const Each& each) {
  constexpr int kOfWarp = kTile / kSortWarps;
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  const int64_t begin = int64_t{block_index_x()} * kTile + warp * kOfWarp;
  int* own = counts + warp * kDigits;
  for (int step = 0; step < kOfWarp; step += 32) {
    const int64_t i = begin + step + lane;
    const bool has = i < count;
    const Token token = has ? token_at(ids, order, i) : Token{0, 0};
    const int digit = token.id >> shift & (kDigits - 1);
    uint32_t same = warp_ballot(has);
    FW_UNROLL for (int bit = 0; bit < 8; ++bit) {
      const uint32_t set = warp_ballot((digit >> bit & 1) != 0);
      same &= (digit >> bit & 1) != 0 ? set : ~set;
    }
    const int before = std::popcount(same & ((1u << lane) - 1));
    const int sum = own[digit];
    sync_warp();
    if (has) {
      each(token, digit, sum + before);
      if (before == 0) own[digit] = sum + std::popcount(same);
    }
    sync_warp();
  }
}

// histogram [tiles, kDigits]
__global__ void __launch_bounds__(kSortThreads) histogram_kernel(const int32_t* ids, const int32_t* order, int64_t count, int shift, int32_t* histogram) {
  int* counts = reinterpret_cast<int*>(shared_memory());
  const int thread = static_cast<int>(thread_index());
  for (int i = thread; i < kSortWarps * kDigits; i += kSortThreads) counts[i] = 0;
  sync_threads();
  count_digits(ids, order, count, shift, counts, [](Token, int, int) {});
  sync_threads();
  int sum = 0;
  FW_UNROLL for (int w = 0; w < kSortWarps; ++w) sum += counts[w * kDigits + thread];
  histogram[int64_t{block_index_x()} * kDigits + thread] = sum;
}

__global__ void __launch_bounds__(kSortThreads)
    scatter_kernel(const int32_t* ids, const int32_t* order, int64_t count, int shift, const int32_t* histogram, int tiles, int32_t* to) {
  int* counts = reinterpret_cast<int*>(shared_memory());  // [kSortWarps, kDigits], then [kDigits] of the digits before
  int* begins = counts + kSortWarps * kDigits;
  const int thread = static_cast<int>(thread_index());
  for (int i = thread; i < kSortWarps * kDigits; i += kSortThreads) counts[i] = 0;
  int before = 0, all = 0;  // tokens with the thread's digit in the tiles before, and in all
  for (int tile = 0; tile < tiles; ++tile) {
    const int of = histogram[int64_t{tile} * kDigits + thread];
    if (tile < static_cast<int>(block_index_x())) before += of;
    all += of;
  }
  begins[thread] = all;
  sync_threads();
  for (int step = 1; step < kDigits; step *= 2) {
    const int more = thread >= step ? begins[thread - step] : 0;
    sync_threads();
    begins[thread] += more;
    sync_threads();
  }
  before += begins[thread] - all;
  sync_threads();
  // What each warp counts first it counts again, from where its digits begin.
  count_digits(ids, order, count, shift, counts, [](Token, int, int) {});
  sync_threads();
  FW_UNROLL for (int w = 0; w < kSortWarps; ++w) {
    const int of = counts[w * kDigits + thread];
    counts[w * kDigits + thread] = before;
    before += of;
  }
  sync_threads();
  count_digits(ids, order, count, shift, counts, [&](Token token, int, int place) { to[place] = token.index; });
}

template <class T>
struct SumArgs {
  const int32_t *ids, *order;
  const T* dout;
  float *dweight, *partial;  // partial [parts, 2, cols]: of what a part begins with, and of what it ends with
  int64_t count, cols, dout_stride, dweight_stride;
};

// The part [begin, end) of the sorted list, whose first id may have begun before it and whose last may go on behind it.
struct Part {
  int64_t begin, end;
  bool continues, goes_on;
};
template <class T>
FW_DEVICE Part part_of(const SumArgs<T>& a, int64_t part) {
  const int64_t begin = part * kRun, end = min(a.count, begin + kRun);
  const auto id = [&](int64_t i) { return a.ids[a.order[i]]; };
  return {begin, end, begin > 0 && id(begin - 1) == id(begin), end < a.count && id(end - 1) == id(end)};
}

template <int N>
FW_DEVICE void add_floats(float* to, const float (&x)[N], bool overwrite) {
  float sum[N];
  load_floats(to, sum);
  FW_UNROLL for (int k = 0; k < N; ++k) sum[k] = overwrite ? x[k] : sum[k] + x[k];
  FW_UNROLL for (int k = 0; k < N; k += N < 4 ? 1 : 4) {
    if constexpr (N == 1) {
      to[0] = sum[0];
    } else {
      *reinterpret_cast<float4*>(to + k) = make_float4(sum[k], sum[k + 1], sum[k + 2], sum[k + 3]);
    }
  }
}

constexpr int kSumThreads = 256;

// A block has a part; its threads the columns.
template <class T, int N>
__global__ void __launch_bounds__(kSumThreads) sum_part_kernel(const SumArgs<T> a) {
  const int64_t part_index = block_index_x();
  const Part part = part_of(a, part_index);
  for (int64_t c = int64_t{thread_index()} * N; c < a.cols; c += int64_t{kSumThreads} * N) {
    constexpr int kAhead = 4;
    float sum[N] = {};
    bool first_id = true;
    for (int64_t first = part.begin; first < part.end; first += kAhead) {
      Packet<T, N> packets[kAhead];
      int32_t ids[kAhead + 1];
      FW_UNROLL for (int i = 0; i <= kAhead; ++i) {
        ids[i] = -1;
        if (first + i >= part.end) continue;
        const int32_t token = a.order[first + i];
        ids[i] = a.ids[token];
        if (i < kAhead) packets[i].load(a.dout + token * a.dout_stride + c);
      }
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        if (first + i >= part.end) continue;
        float x[N];
        packets[i].get(x);
        FW_UNROLL for (int k = 0; k < N; ++k) sum[k] += x[k];
        if (ids[i] == ids[i + 1]) continue;
        const bool last_id = first + i + 1 == part.end;
        if (first_id && part.continues) {
          add_floats(a.partial + 2 * part_index * a.cols + c, sum, true);
        } else if (last_id && part.goes_on) {
          add_floats(a.partial + (2 * part_index + 1) * a.cols + c, sum, true);
        } else {
          add_floats(a.dweight + ids[i] * a.dweight_stride + c, sum, false);
        }
        FW_UNROLL for (int k = 0; k < N; ++k) sum[k] = 0;
        first_id = false;
      }
    }
  }
}

// A block has the part in which an id begins that goes on behind it.
template <class T, int N>
__global__ void __launch_bounds__(kSumThreads) join_parts_kernel(const SumArgs<T> a, int64_t parts) {
  const int64_t index = block_index_x();
  const Part part = part_of(a, index);
  if (!part.goes_on) return;
  const int32_t id = a.ids[a.order[part.end - 1]];
  if (part.continues && a.ids[a.order[part.begin]] == id) return;  // it began before
  int64_t end = parts, last = index + 1;                           // the last part that begins with it: the list is sorted
  while (end - last > 1) {
    const int64_t middle = (last + end) / 2;
    (a.ids[a.order[middle * kRun]] == id ? last : end) = middle;
  }
  for (int64_t c = int64_t{thread_index()} * N; c < a.cols; c += int64_t{kSumThreads} * N) {
    float sum[N];
    load_floats(a.partial + (2 * index + 1) * a.cols + c, sum);
    constexpr int kAhead = 4;
    for (int64_t p = index + 1; p <= last; p += kAhead) {
      float x[kAhead][N];
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        if (p + i <= last) load_floats(a.partial + 2 * (p + i) * a.cols + c, x[i]);
      }
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        if (p + i > last) continue;
        FW_UNROLL for (int k = 0; k < N; ++k) sum[k] += x[i][k];
      }
    }
    add_floats(a.dweight + id * a.dweight_stride + c, sum, false);
  }
}

// The tokens in the order of their ids, those of one id as they come.
const int32_t* sorted_tokens(const int32_t* ids, int64_t count, int64_t vocab, const EmbeddingScratch& scratch, void* stream) {
  const int64_t tiles = (count + kTile - 1) / kTile;
  int32_t *histogram = scratch.histogram, *const *lists = scratch.lists;
  const int32_t* order = nullptr;
  const Dim3 grid{static_cast<unsigned>(tiles)};
  constexpr size_t kCounts = sizeof(int) * kSortWarps * kDigits;
  for (int shift = 0, turn = 0; turn == 0 || (vocab - 1) >> shift > 0; shift += 8, ++turn) {
    launch(histogram_kernel, grid, kSortThreads, kCounts, stream, ids, order, count, shift, histogram);
    launch(scatter_kernel, grid, kSortThreads, kCounts + sizeof(int) * kDigits, stream, ids, order, count, shift, histogram, static_cast<int>(tiles),
           lists[turn % 2]);
    order = lists[turn % 2];
  }
  return order;
}

}  // namespace

namespace ops {

template <class T>
void embedding_backward(const Exec<T>& exec, const int32_t* ids, Mat<const T> dout, Mat<Wide<T>> dweight) {
  if (dout.rows == 0) return;
  const ArenaMark mark(exec.arena);
  void* stream = exec.device.stream();
  const EmbeddingScratch scratch(exec.arena, dout.rows, dout.cols);
  const int32_t* order = sorted_tokens(ids, dout.rows, dweight.rows, scratch, stream);
  const int64_t parts = parts_of(dout.rows, kRun);
  const SumArgs<T> a{ids, order, dout.data, dweight.data, scratch.partial, dout.rows, dout.cols, dout.stride, dweight.stride};
  const Dim3 grid{static_cast<unsigned>(parts)};
  const auto run = [&]<int N>() {
    launch(sum_part_kernel<T, N>, grid, kSumThreads, 0, stream, a);
    launch(join_parts_kernel<T, N>, grid, kSumThreads, 0, stream, a, parts);
  };
  if (dout.cols % kPacket<T> == 0 && in_packets<T>(dout.data, dout.stride) && in_packets<float>(dweight.data, dweight.stride)) {
    run.template operator()<kPacket<T>>();
  } else {
    run.template operator()<1>();
  }
}

template void embedding_backward<float>(const Exec<float>&, const int32_t*, Mat<const float>, Mat<float>);
template void embedding_backward<Bf16>(const Exec<Bf16>&, const int32_t*, Mat<const Bf16>, Mat<float>);

}  // namespace ops
}  // namespace fw::cuda
