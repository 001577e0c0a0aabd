// Backward of the embedding on the device: dweight[id] += the rows of dout whose token has this id, in the order of the
// tokens, without atomics. The tokens are sorted by id (stable, own kernels, so that the emulation runs the same). Then
// a block takes the ids that begin in its part of kRun neighbours of the sorted list and sums the rows of each. An id
// that goes on after the next part is left in sums, one of each part that it has tokens in. In a last kernel the part
// where it begins adds them up in order. So an id that half of the tokens have is summed by many blocks as well. The
// sort is a kernel alone where its blocks may well read all tokens each. A block has the ids of one value above the
// lowest 8 bits. It finds their tokens and how many tokens have lower ids, and sorts its own by the lowest bits. Of
// many tokens it is a turn for each 8 bits, from the lowest, two kernels each. They are short and wait for memory. So a
// thread has all of its tokens on their way at once, and each kernel is there before the one in front is over.
#include <bit>

#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr int kSortThreads = 256, kSortWarps = kSortThreads / 32;
// tokens of a block of the sort, and of a thread: a warp has kTile / kSortWarps neighbours
constexpr int kTile = kSortTile, kSteps = kTile / kSortThreads;
constexpr int kDigits = kSortDigits;
constexpr int kRun = kEmbeddingRun;
static_assert(kDigits == kSortThreads);  // a thread has a digit

// Tokens from a list, or from the ids as they come.
struct TokenSource {
  const int32_t* ids;
  const SortedToken* list;  // null: ids
  int64_t count;

  // Those of this lane, one of each 32 of its warp's.
  FW_DEVICE void load(SortedToken (&tokens)[kSteps], bool (&has)[kSteps]) const {
    const int64_t first = int64_t{block_index_x()} * kTile + warp_index() * (kTile / kSortWarps) + lane_index();
    FW_UNROLL for (int i = 0; i < kSteps; ++i) {
      const int64_t at = first + i * 32;
      has[i] = at < count;
      tokens[i] = {0, static_cast<int32_t>(at)};
      if (!has[i]) continue;
      if (list != nullptr) {
        tokens[i] = list[at];
      } else {
        tokens[i].id = ids[at];
      }
    }
  }
};

FW_DEVICE int digit_of(SortedToken token, int shift) { return token.id >> shift & (kDigits - 1); }

FW_DEVICE uint32_t lanes_before() { return (1u << lane_index()) - 1; }

// counts [kDigits] of the warp += its tokens with each digit, one a lane. Returns what there was of the digit before
// this lane's.
FW_DEVICE int count_digit(int digit, bool has, int* counts) {
  uint32_t same = warp_ballot(has);
  FW_UNROLL for (int bit = 0; bit < 8; ++bit) {
    const uint32_t set = warp_ballot((digit >> bit & 1) != 0);
    same &= (digit >> bit & 1) != 0 ? set : ~set;
  }
  const int before = std::popcount(same & lanes_before()), sum = counts[digit];
  sync_warp();
  if (has && before == 0) counts[digit] = sum + std::popcount(same);
  sync_warp();
  return sum + before;
}

// The same of several tokens a lane. ranks: of a token among those of its digit.
FW_DEVICE void count_digits(const SortedToken (&tokens)[kSteps], const bool (&has)[kSteps], int shift, int* counts,
                            int (&ranks)[kSteps]) {
  FW_UNROLL for (int i = 0; i < kSteps; ++i) ranks[i] = count_digit(digit_of(tokens[i], shift), has[i], counts);
}

// histogram [tiles, kDigits]
__global__ void __launch_bounds__(kSortThreads)
    histogram_kernel(const TokenSource from, int shift, int32_t* histogram) {
  follow();
  int* counts = reinterpret_cast<int*>(shared_memory());  // [kSortWarps, kDigits]
  const int thread = static_cast<int>(thread_index());
  SortedToken tokens[kSteps];
  bool has[kSteps];
  int ranks[kSteps];
  from.load(tokens, has);
  FW_UNROLL for (int w = 0; w < kSortWarps; ++w) counts[w * kDigits + thread] = 0;
  sync_threads();
  count_digits(tokens, has, shift, counts + warp_index() * kDigits, ranks);
  sync_threads();
  int sum = 0;
  FW_UNROLL for (int w = 0; w < kSortWarps; ++w) sum += counts[w * kDigits + thread];
  histogram[int64_t{block_index_x()} * kDigits + thread] = sum;
}

// The sum of x over the threads before this one. sums [kWarps] in shared memory.
template <int kWarps>
FW_DEVICE int sum_before(int x, int* sums) {
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  int sum = x;
  FW_UNROLL for (int step = 1; step < 32; step *= 2) {
    const int more = shuffle_up(sum, step);
    if (lane >= step) sum += more;
  }
  if (lane == 31) sums[warp] = sum;
  sync_threads();
  FW_UNROLL for (int w = 0; w < kWarps; ++w) {
    if (w < warp) sum += sums[w];
  }
  return sum - x;
}

__global__ void __launch_bounds__(kSortThreads)
    scatter_kernel(const TokenSource from, int shift, const int32_t* histogram, int tiles, SortedToken* to) {
  follow();
  int* counts = reinterpret_cast<int*>(shared_memory());  // [kSortWarps, kDigits], then [kSortWarps]
  const int thread = static_cast<int>(thread_index());
  SortedToken tokens[kSteps];
  bool has[kSteps];
  int ranks[kSteps];
  from.load(tokens, has);
  int before = 0, all = 0;  // tokens with the thread's digit in the tiles before, and in all
  constexpr int kAhead = 8;
  for (int first = 0; first < tiles; first += kAhead) {
    int of[kAhead];
    FW_UNROLL for (int i = 0; i < kAhead; ++i) of[i] =
        first + i < tiles ? histogram[int64_t{first + i} * kDigits + thread] : 0;
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (first + i < static_cast<int>(block_index_x())) before += of[i];
      all += of[i];
    }
  }
  FW_UNROLL for (int w = 0; w < kSortWarps; ++w) counts[w * kDigits + thread] = 0;
  // its barrier is the one between the zeros and what is counted
  before += sum_before<kSortWarps>(all, counts + kSortWarps * kDigits);
  count_digits(tokens, has, shift, counts + warp_index() * kDigits, ranks);
  sync_threads();
  // What each warp has counted becomes where its digits begin.
  FW_UNROLL for (int w = 0; w < kSortWarps; ++w) {
    const int of = counts[w * kDigits + thread];
    counts[w * kDigits + thread] = before;
    before += of;
  }
  sync_threads();
  FW_UNROLL for (int i = 0; i < kSteps; ++i) {
    if (has[i]) to[counts[warp_index() * kDigits + digit_of(tokens[i], shift)] + ranks[i]] = tokens[i];
  }
}

constexpr int kRangeThreads = 1024, kRangeWarps = kRangeThreads / 32;
constexpr int64_t kMostRead = int64_t{1} << 23;  // ids, by all blocks together
constexpr size_t kRangeShared = sizeof(int) * (kRangeWarps * kDigits + 2 * kRangeWarps);

// each(of, index, has) for the elements [0, count) of a list, cut into neighbours of one warp each, in their order. A
// lane has one of each 32, and several are on their way at a time. Lanes of a warp meet in each.
template <int kAhead, class Of, class Each>
FW_DEVICE void for_warps_share(const Of* list, int count, const Each& each) {
  const int share = (count + kRangeThreads - 1) / kRangeThreads * 32, begin = static_cast<int>(warp_index()) * share,
            end = min(count, begin + share);
  for (int first = begin; first < end; first += 32 * kAhead) {
    Of of[kAhead];
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      const int at = first + i * 32 + static_cast<int>(lane_index());
      of[i] = at < end ? list[at] : Of{};
    }
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      const int at = first + i * 32 + static_cast<int>(lane_index());
      if (first + i * 32 < end) each(of[i], at, at < end);
    }
  }
}

// All of the sort. lists: the block's tokens as they come, and sorted, where they belong among all.
__global__ void __launch_bounds__(kRangeThreads)
    sort_range_kernel(const int32_t* ids, int count, SortedToken* list, SortedToken* sorted) {
  follow();
  int* counts = reinterpret_cast<int*>(shared_memory());  // [kRangeWarps, kDigits]
  int *lower_of = counts + kRangeWarps * kDigits, *own_of = lower_of + kRangeWarps;
  const int range = static_cast<int>(block_index_x()), thread = static_cast<int>(thread_index());
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  FW_UNROLL for (int i = 0; i < kDigits / 32; ++i) counts[i * kRangeThreads + thread] = 0;
  const auto range_of = [](int32_t id) { return static_cast<int>(static_cast<uint32_t>(id) / kDigits); };
  int lower = 0, own = 0;  // tokens: of the lane, then of the warp, then of all warps and of those before this one
  for_warps_share<16>(ids, count, [&](int32_t id, int, bool has) {
    lower += has && range_of(id) < range;
    own += has && range_of(id) == range;
  });
  FW_UNROLL for (int mask = 16; mask > 0; mask /= 2) lower += shuffle_xor(lower, mask), own += shuffle_xor(own, mask);
  if (lane == 0) lower_of[warp] = lower, own_of[warp] = own;
  sync_threads();
  const int of_warp = own, of_lane = own_of[lane];
  lower = lower_of[lane], own = of_lane;
  int before = lane < warp ? of_lane : 0;
  FW_UNROLL for (int mask = 16; mask > 0; mask /= 2) {
    lower += shuffle_xor(lower, mask), own += shuffle_xor(own, mask), before += shuffle_xor(before, mask);
  }
  if (own == 0) return;
  list += lower, sorted += lower;
  if (of_warp > 0) {
    for_warps_share<8>(ids, count, [&](int32_t id, int at, bool has) {
      const bool mine = has && range_of(id) == range;
      const uint32_t all = warp_ballot(mine);
      if (mine) list[before + std::popcount(all & lanes_before())] = {id, at};
      before += std::popcount(all);
    });
  }
  sync_threads();
  int* of_digits = counts + warp * kDigits;
  for_warps_share<4>(list, own,
                     [&](SortedToken token, int, bool has) { count_digit(digit_of(token, 0), has, of_digits); });
  sync_threads();
  int all = 0;
  if (thread < kDigits) {
    FW_UNROLL for (int w = 0; w < kRangeWarps; ++w) all += counts[w * kDigits + thread];
  }
  int begin = sum_before<kRangeWarps>(all, lower_of);
  if (thread < kDigits) {
    FW_UNROLL for (int w = 0; w < kRangeWarps; ++w) {
      const int of = counts[w * kDigits + thread];
      counts[w * kDigits + thread] = begin;
      begin += of;
    }
  }
  sync_threads();
  for_warps_share<4>(list, own, [&](SortedToken token, int, bool has) {
    const int slot = count_digit(digit_of(token, 0), has, of_digits);
    if (has) sorted[slot] = token;
  });
}

template <class T>
struct SumArgs {
  const SortedToken* sorted;
  const T* dout;
  // partial [parts, 2, cols]: of the long id that a part begins with, and of the one that it ends with
  float *dweight, *partial;
  int64_t count, cols, dout_stride, dweight_stride;
  unsigned parts;
};

constexpr int kSumThreads = 256;

// What a block knows of the sorted list around its part:
// - the ids from the token before the part in front to the one after the part that follows, -1 where the list is over,
// - the indices of the tokens of its part and the one that follows.
struct PartList {
  static constexpr int kIds = 3 * kRun + 2;
  int ids[kIds];
  int32_t indices[2 * kRun];

  // Index 0: the part's first token.
  FW_DEVICE int id(int index) const { return ids[index + kRun + 1]; }
};

// Tokens [first, stop) of the part, which are those of the ids that begin in it, and what is in it of long ids: those
// that go on after the next part.
struct Part {
  int first = 0, stop = 0;
  bool begins_long = false, ends_long = false;

  FW_DEVICE Part(const PartList& list, int tokens) : stop(tokens) {
    const int first_id = list.id(0);
    if (list.id(-1) == first_id) {
      begins_long = list.id(-kRun - 1) == first_id || list.id(kRun) == first_id;
      while (!begins_long && first < stop && list.id(first) == first_id) ++first;  // the part in front has it
    }
    const int last_id = list.id(tokens - 1);
    if (tokens < kRun || list.id(kRun) != last_id || (begins_long && last_id == first_id)) return;
    ends_long = list.id(2 * kRun) == last_id;
    while (!ends_long && list.id(stop) == last_id) ++stop;
  }
};

// A block has some of the columns of a part: N each thread, four where rows are in packets, so that a warp's numbers of
// dweight are neighbours. Rows of dout, and what dweight has of an id whose last token this is, are asked for ahead.
template <class T, int N>
__global__ void __launch_bounds__(kSumThreads, 4) sum_part_kernel(const SumArgs<T> a) {
  follow();
  constexpr int kAhead = 4;
  PartList& list = *reinterpret_cast<PartList*>(shared_memory());
  const unsigned across = grid_size_x() / a.parts;
  const int64_t part_index = block_index_x() / across, begin = part_index * kRun;
  const int thread = static_cast<int>(thread_index());
  if (thread < PartList::kIds) {
    const int64_t at = begin + thread - kRun - 1;
    const SortedToken token = at >= 0 && at < a.count ? a.sorted[at] : SortedToken{-1, 0};
    list.ids[thread] = token.id;
    if (at >= begin && at < begin + 2 * kRun) list.indices[at - begin] = token.index;
  }
  sync_threads();
  const Part part(list, static_cast<int>(min(int64_t{kRun}, a.count - begin)));
  struct Row {
    Packet<T, N> dout;
    float old[N];
  };
  const int64_t c = (int64_t{block_index_x() % across} * kSumThreads + thread) * N;
  if (c >= a.cols) return;
  const auto is_last = [&](int i) { return list.id(i) != list.id(i + 1) || i + 1 == part.stop; };
  const auto load = [&](int i, Row& row) {
    if (i >= part.stop) return;
    row.dout.load(a.dout + list.indices[i] * a.dout_stride + c);
    if (is_last(i)) load_floats(a.dweight + list.id(i) * a.dweight_stride + c, row.old);
  };
  Row rows[kAhead];
  FW_UNROLL for (int i = 0; i < kAhead; ++i) load(part.first + i, rows[i]);
  float sum[N] = {};
  bool first_id = true;
  for (int first = part.first; first < part.stop; first += kAhead) {
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      const int token = first + i;
      if (token >= part.stop) break;
      Row row = rows[i];
      load(token + kAhead, rows[i]);
      float x[N];
      row.dout.get(x);
      FW_UNROLL for (int k = 0; k < N; ++k) sum[k] += x[k];
      if (!is_last(token)) continue;
      if (first_id && part.begins_long) {
        store_floats_at_once(a.partial + 2 * part_index * a.cols + c, sum);
      } else if (token + 1 == part.stop && part.ends_long) {
        store_floats_at_once(a.partial + (2 * part_index + 1) * a.cols + c, sum);
      } else {
        FW_UNROLL for (int k = 0; k < N; ++k) row.old[k] += sum[k];
        store_floats_at_once(a.dweight + list.id(token) * a.dweight_stride + c, row.old);
      }
      FW_UNROLL for (int k = 0; k < N; ++k) sum[k] = 0;
      first_id = false;
    }
  }
}

// A block has the part in which a long id begins.
template <class T, int N>
__global__ void __launch_bounds__(kSumThreads) join_parts_kernel(const SumArgs<T> a, int64_t parts) {
  const int64_t index = block_index_x();
  const auto id_at = [&](int64_t i) { return i >= 0 && i < a.count ? a.sorted[i].id : -1; };
  const int32_t before = id_at(index * kRun - 1), id = id_at((index + 1) * kRun - 1),
                behind = id_at((index + 2) * kRun);
  follow();  // the list was there before the sums in front began
  if (id < 0 || id != behind || id == before) return;
  // The last part that begins with it: the list is sorted. Few have it, as a rule.
  int64_t last = index + 2, step = 1;
  const auto has = [&](int64_t part) { return part < parts && id_at(part * kRun) == id; };
  for (; has(last + step); step *= 2) last += step;
  for (; step > 0; step /= 2) {
    if (has(last + step)) last += step;
  }
  for (int64_t c = int64_t{thread_index()} * N; c < a.cols; c += int64_t{kSumThreads} * N) {
    float sum[N], old[N];
    load_floats(a.partial + (2 * index + 1) * a.cols + c, sum);
    load_floats(a.dweight + id * a.dweight_stride + c, old);
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
    FW_UNROLL for (int k = 0; k < N; ++k) old[k] += sum[k];
    store_floats_at_once(a.dweight + id * a.dweight_stride + c, old);
  }
}

// The tokens in the order of their ids, those of one id as they come.
const SortedToken* sorted_tokens(const int32_t* ids, int64_t count, int64_t vocab, const EmbeddingScratch& scratch,
                                 void* stream) {
  const int64_t tiles = parts_of(count, kTile), ranges = parts_of(vocab, kDigits);
  if (ranges > 1 && ranges * count <= kMostRead) {
    launch_overlapped(sort_range_kernel, Dim3{static_cast<unsigned>(ranges)}, kRangeThreads, kRangeShared, stream, ids,
                      static_cast<int>(count), scratch.lists[0], scratch.lists[1]);
    return scratch.lists[1];
  }
  TokenSource from{ids, nullptr, count};
  const Dim3 grid{static_cast<unsigned>(tiles)};
  constexpr size_t kCounts = sizeof(int) * kSortWarps * kDigits;
  for (int shift = 0, rotation = 0; rotation == 0 || (vocab - 1) >> shift > 0; shift += 8, ++rotation) {
    SortedToken* to = scratch.lists[rotation % 2];
    launch_overlapped(histogram_kernel, grid, kSortThreads, kCounts, stream, from, shift, scratch.histogram);
    launch_overlapped(scatter_kernel, grid, kSortThreads, kCounts + sizeof(int) * kSortWarps, stream, from, shift,
                      scratch.histogram, static_cast<int>(tiles), to);
    from.list = to;
  }
  return from.list;
}

}  // namespace

namespace ops {

template <class T>
void embedding_backward(const Exec<T>& exec, const int32_t* ids, Mat<const T> dout, Mat<Wide<T>> dweight) {
  if (dout.rows == 0) return;
  const ArenaMark mark(exec.arena);
  void* stream = exec.device.stream();
  const EmbeddingScratch scratch(exec.arena, dout.rows, dout.cols);
  const SortedToken* sorted = sorted_tokens(ids, dout.rows, dweight.rows, scratch, stream);
  const int64_t parts = parts_of(dout.rows, kRun);
  const SumArgs<T> a{sorted,          dout.data,      dweight.data,
                     scratch.partial, dout.rows,      dout.cols,
                     dout.stride,     dweight.stride, static_cast<unsigned>(parts)};
  const auto run = [&]<int N>() {
    const Dim3 grid{static_cast<unsigned>(parts * parts_of(a.cols, int64_t{kSumThreads} * N))};
    launch_overlapped(sum_part_kernel<T, N>, grid, kSumThreads, sizeof(PartList), stream, a);
    launch_overlapped(join_parts_kernel<T, N>, Dim3{static_cast<unsigned>(parts)}, kSumThreads, 0, stream, a, parts);
  };
  if (dout.cols % kPacket<T> == 0 && in_packets<T>(dout.data, dout.stride) &&
      in_packets<float>(dweight.data, dweight.stride)) {
    run.template operator()<kPacket<float>>();
  } else {
    run.template operator()<1>();
  }
}

template void embedding_backward<float>(const Exec<float>&, const int32_t*, Mat<const float>, Mat<float>);
template void embedding_backward<Bf16>(const Exec<Bf16>&, const int32_t*, Mat<const Bf16>, Mat<float>);

}  // namespace ops
}  // namespace fw::cuda
