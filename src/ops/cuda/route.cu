// Tokens to experts on the device: scores, the choice of the best k, rows sorted by expert, and the router's gradient.
// A warp has a token. Scores become whole numbers of the same order, so that the largest is found without regard to
// NaN: the smaller expert of equal ones, and what is no number last. The sort is a counting sort in the order of the
// choices: a thread has an expert and goes through the choices of a tile. So the same choices have the same rows in
// every run, without atomic operations. Few tokens are one block's; of more, the tiles' counts become first rows
// between two kernels.
#include <algorithm>

#include "gpu/launch.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr float kLeastSum = 1e-20f;  // added to the sum of chosen sigmoids, as published
constexpr int kSortThreads = 512;

template <class T>
struct RouteArgs {
  const T* logits;
  T *scores, *weights;
  int64_t logits_stride, scores_stride, weights_stride;
  const float* bias;  // [E] or null
  int64_t tokens;
  int experts, chosen, groups, best_groups;
  bool is_sigmoid, is_normalised;
  float scale;
  ExpertRows rows;
  int64_t* load;
  RouteScratch scratch;

  RouteArgs(const RouterShape& shape, Mat<const T> x, Mat<T> s, Mat<T> w)
      : logits(x.data),
        scores(s.data),
        weights(w.data),
        logits_stride(x.stride),
        scores_stride(s.stride),
        weights_stride(w.stride),
        bias(nullptr),
        tokens(x.rows),
        experts(static_cast<int>(shape.experts)),
        chosen(static_cast<int>(shape.chosen)),
        groups(static_cast<int>(shape.groups)),
        best_groups(static_cast<int>(shape.best_groups)),
        is_sigmoid(shape.score == RouterScore::kSigmoid),
        is_normalised(shape.normalised),
        scale(static_cast<float>(shape.scale)),
        load(nullptr) {}
};

// Whole numbers in the order of floats, at least 1; 1: no number. 0 is for what may not be chosen.
FW_DEVICE uint32_t order_key(float x) {
  if (!(x == x)) return 1;
  const uint32_t bits = float_bits(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
FW_DEVICE float key_value(uint32_t key) { return bits_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key); }

// best, at: a key and its index in each lane. Every lane gets the index of the largest key, the first of equal ones.
FW_DEVICE int index_of_largest(uint32_t best, int at) {
  for (int mask = 16; mask > 0; mask >>= 1) {
    const uint32_t other = shuffle_xor(best, mask);
    const int other_at = shuffle_xor(at, mask);
    if (other > best || (other == best && other_at < at)) best = other, at = other_at;
  }
  return at;
}

// The index of the largest of n keys, the first of equal ones, in every lane; its key becomes 0.
FW_DEVICE int take_largest(uint32_t* keys, int n, int lane) {
  uint32_t best = 0;
  int at = n;
  for (int i = lane; i < n; i += 32) {
    if (keys[i] > best) best = keys[i], at = i;
  }
  at = index_of_largest(best, at);
  sync_warp();
  if (lane == 0 && at < n) keys[at] = 0;
  sync_warp();
  return at < n ? at : 0;
}

// Keys of experts outside of the best groups become 0.
template <class T>
FW_DEVICE void close_groups(const RouteArgs<T>& a, uint32_t* keys, uint32_t* group_keys, int lane) {
  const int size = a.experts / a.groups;
  for (int g = lane; g < a.groups; g += 32) {
    uint32_t first = 0, second = 0;
    for (int i = g * size; i < (g + 1) * size; ++i) {
      const uint32_t key = keys[i];
      if (key > first) {
        second = first, first = key;
      } else if (key > second) {
        second = key;
      }
    }
    group_keys[g] = order_key(size > 1 ? key_value(first) + key_value(second) : key_value(first));
  }
  sync_warp();
  // The taken ones are marked by the largest number of all, which is no float's.
  for (int i = 0; i < a.best_groups; ++i) {
    uint32_t best = 0;
    int at = a.groups;
    for (int g = lane; g < a.groups; g += 32) {
      if (group_keys[g] != ~0u && group_keys[g] > best) best = group_keys[g], at = g;
    }
    at = index_of_largest(best, at);
    sync_warp();
    if (lane == 0 && at < a.groups) group_keys[at] = ~0u;
    sync_warp();
  }
  for (int e = lane; e < a.experts; e += 32) {
    if (group_keys[e / size] != ~0u) keys[e] = 0;
  }
  sync_warp();
}

// Of token t: its scores, the experts chosen [k] and their weights [k]. scratch: 3 E words of the warp's.
template <class T>
FW_DEVICE void choose(const RouteArgs<T>& a, int64_t t, uint32_t* scratch, int32_t* choices, float* weights) {
  const int lane = static_cast<int>(lane_index()), experts = a.experts;
  float* const s = reinterpret_cast<float*>(scratch);
  uint32_t *const keys = scratch + experts, *const group_keys = keys + experts;
  const T* const logits = a.logits + t * a.logits_stride;
  float most = -bits_float(0x7f800000u);
  for (int e = lane; e < experts; e += 32) {
    s[e] = number(logits[e]);
    most = s[e] > most ? s[e] : most;
  }
  if (a.is_sigmoid) {
    for (int e = lane; e < experts; e += 32) s[e] = sigmoid(s[e]);
  } else {
    most = warp_max(most);
    float sum = 0;
    for (int e = lane; e < experts; e += 32) sum += s[e] = exp_fast(s[e] - most);
    sum = warp_sum(sum);
    for (int e = lane; e < experts; e += 32) s[e] = s[e] / sum;
  }
  T* const scores = a.scores + t * a.scores_stride;
  for (int e = lane; e < experts; e += 32) {
    scores[e] = stored<T>(s[e]);
    keys[e] = order_key(a.bias != nullptr ? s[e] + a.bias[e] : s[e]);
  }
  sync_warp();
  if (a.groups != a.best_groups) close_groups(a, keys, group_keys, lane);
  float sum = a.is_sigmoid ? kLeastSum : 0.0f;
  for (int j = 0; j < a.chosen; ++j) {
    const int e = take_largest(keys, experts, lane);
    if (lane == 0) choices[j] = e;
    sum += s[e];
  }
  sync_warp();
  const float factor = a.is_normalised ? a.scale / sum : a.scale;
  for (int j = lane; j < a.chosen; j += 32) weights[j] = factor * s[choices[j]];
  sync_warp();  // the warp's next token takes this memory
}

// An inclusive sum over the warp's lanes.
FW_DEVICE int32_t sum_up_to_lane(int32_t x, int lane) {
  for (int delta = 1; delta < 32; delta *= 2) {
    const int32_t below = shuffle_up(x, delta);
    if (lane >= delta) x += below;
  }
  return x;
}

// first[e] = the sum of the counts before e, by one warp; counts may lie where first does. Returns the sum of all.
template <class Counts>
FW_DEVICE int32_t sum_before(const Counts& count, int experts, int32_t* first, int lane) {
  int32_t before = 0;
  for (int e = 0; e < experts; e += 32) {
    const int32_t own = e + lane < experts ? count(e + lane) : 0, up_to = sum_up_to_lane(own, lane);
    if (e + lane < experts) first[e + lane] = before + up_to - own;
    before += shuffle(up_to, 31);
  }
  return before;
}

// The row of choice i, whose expert is e.
template <class T>
FW_DEVICE void store_choice(const RouteArgs<T>& a, int64_t i, int e, int32_t row, float weight) {
  a.rows.row_of[i] = row;
  a.rows.source[row] = static_cast<int32_t>(i);
  a.rows.expert[row] = e;
  a.weights[row * a.weights_stride] = stored<T>(weight);
}

// All of it by one block, for few tokens.
template <class T>
__global__ void __launch_bounds__(kSortThreads) route_few_kernel(const RouteArgs<T> a) {
  const int choices = static_cast<int>(a.tokens) * a.chosen, thread = static_cast<int>(thread_index()),
            lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index()), warps = a.scratch.warps;
  int32_t* const chosen = reinterpret_cast<int32_t*>(shared_memory());
  float* const weights = reinterpret_cast<float*>(chosen + choices);
  int32_t* const first = reinterpret_cast<int32_t*>(weights + choices);  // [E + 1]
  uint32_t* const scratch = reinterpret_cast<uint32_t*>(first + a.experts + 1);
  follow();
  if (warp < warps) {
    for (int t = warp; t < a.tokens; t += warps)
      choose(a, t, scratch + warp * 3 * a.experts, chosen + t * a.chosen, weights + t * a.chosen);
  }
  sync_threads();
  for (int e = thread; e < a.experts; e += kSortThreads) {
    int32_t count = 0;
    for (int i = 0; i < choices; ++i) count += chosen[i] == e ? 1 : 0;
    first[e] = count;
    if (a.load != nullptr) a.load[e] += count;
  }
  sync_threads();
  if (warp == 0) sum_before([&](int e) { return first[e]; }, a.experts, first, lane);
  sync_threads();
  if (thread == 0) a.rows.offsets[a.experts] = choices;
  for (int e = thread; e < a.experts; e += kSortThreads) {
    int32_t row = first[e];
    a.rows.offsets[e] = row;
    for (int i = 0; i < choices; ++i) {
      if (chosen[i] == e) store_choice(a, i, e, row++, weights[i]);
    }
  }
}

template <class T>
__global__ void choose_kernel(const RouteArgs<T> a) {
  follow();
  const int64_t t = int64_t{block_index_x()} * a.scratch.warps + warp_index();
  if (t >= a.tokens) return;
  choose(a, t, reinterpret_cast<uint32_t*>(shared_memory()) + warp_index() * 3 * static_cast<unsigned>(a.experts),
         a.scratch.choices + t * a.chosen, a.scratch.weights + t * a.chosen);
}

// The choices of the block's tile, in shared memory; how many they are.
template <class T>
FW_DEVICE int load_choices(const RouteArgs<T>& a, int32_t* to) {
  const int64_t begin = int64_t{block_index_x()} * kRouteTile, all = a.tokens * a.chosen;
  const int count = static_cast<int>(min(int64_t{kRouteTile}, all - begin));
  for (int i = static_cast<int>(thread_index()); i < count; i += kSortThreads) to[i] = a.scratch.choices[begin + i];
  sync_threads();
  return count;
}

// counts [tiles, E]
template <class T>
__global__ void __launch_bounds__(kSortThreads) count_choices_kernel(const RouteArgs<T> a) {
  int32_t* const chosen = reinterpret_cast<int32_t*>(shared_memory());
  const int count = load_choices(a, chosen);
  for (int e = static_cast<int>(thread_index()); e < a.experts; e += kSortThreads) {
    int32_t own = 0;
    for (int i = 0; i < count; ++i) own += chosen[i] == e ? 1 : 0;
    a.scratch.counts[int64_t{block_index_x()} * a.experts + e] = own;
  }
}

// A tile's counts become how many rows its experts have in the tiles before.
template <class T>
__global__ void __launch_bounds__(kSortThreads) first_rows_kernel(const RouteArgs<T> a, int64_t tiles) {
  for (int e = static_cast<int>(thread_index()); e < a.experts; e += kSortThreads) {
    constexpr int kAhead = 16;
    int32_t before = 0;
    for (int64_t first = 0; first < tiles; first += kAhead) {
      int32_t own[kAhead] = {};
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        if (first + i < tiles) own[i] = a.scratch.counts[(first + i) * a.experts + e];
      }
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        if (first + i < tiles) a.scratch.counts[(first + i) * a.experts + e] = before;
        before += own[i];
      }
    }
    a.rows.offsets[e] = before;
    if (a.load != nullptr) a.load[e] += before;
  }
  sync_threads();
  if (warp_index() != 0) return;
  const int32_t all =
      sum_before([&](int e) { return a.rows.offsets[e]; }, a.experts, a.rows.offsets, static_cast<int>(lane_index()));
  if (lane_index() == 0) a.rows.offsets[a.experts] = all;
}

template <class T>
__global__ void __launch_bounds__(kSortThreads) sort_choices_kernel(const RouteArgs<T> a) {
  int32_t* const chosen = reinterpret_cast<int32_t*>(shared_memory());
  const int count = load_choices(a, chosen);
  const int64_t begin = int64_t{block_index_x()} * kRouteTile;
  for (int e = static_cast<int>(thread_index()); e < a.experts; e += kSortThreads) {
    int32_t row = a.rows.offsets[e] + a.scratch.counts[int64_t{block_index_x()} * a.experts + e];
    for (int i = 0; i < count; ++i) {
      if (chosen[i] == e) store_choice(a, begin + i, e, row++, a.scratch.weights[begin + i]);
    }
  }
}

template <class T>
struct RouteBackwardArgs {
  const T *dweights, *scores, *weights;
  T* dlogits;
  int64_t dweights_stride, scores_stride, weights_stride, dlogits_stride;
  int64_t tokens;
  int experts, chosen;
  bool is_sigmoid, is_normalised;
  float scale, balance;
  const int32_t *offsets, *row_of, *expert;
};

// With s the scores, a chosen one's weight is w = scale s / sum (or scale s), so ds = (scale dw - sum of dw w) / sum.
// A share of the balance's loss is s / (sum of all s).
template <class T>
__global__ void route_backward_kernel(const RouteBackwardArgs<T> a) {
  follow();
  const int64_t t = int64_t{block_index_x()} * (block_size() / 32) + warp_index();
  if (t >= a.tokens) return;
  const int lane = static_cast<int>(lane_index());
  float* const ds = reinterpret_cast<float*>(shared_memory()) + warp_index() * static_cast<unsigned>(a.experts);
  const T* const scores = a.scores + t * a.scores_stride;
  const int32_t* const own_rows = a.row_of + t * a.chosen;
  const auto score = [&](int e) { return number(scores[e]); };
  const auto weight = [&](int j) { return number(a.weights[own_rows[j] * a.weights_stride]); };
  const auto dweight = [&](int j) { return number(a.dweights[own_rows[j] * a.dweights_stride]); };
  if (a.balance != 0.0f) {
    const float of_row = a.balance * static_cast<float>(a.experts) / static_cast<float>(a.tokens);
    const auto pull = [&](int e) { return of_row * static_cast<float>(a.offsets[e + 1] - a.offsets[e]); };
    float all = 0, mean = 0;
    for (int e = lane; e < a.experts; e += 32) all += score(e);
    all = warp_sum(all);
    for (int e = lane; e < a.experts; e += 32) mean += pull(e) * score(e) / all;
    mean = warp_sum(mean);
    for (int e = lane; e < a.experts; e += 32) ds[e] = (pull(e) - mean) / all;
  } else {
    for (int e = lane; e < a.experts; e += 32) ds[e] = 0;
  }
  float sum = 1, common = 0;
  if (a.is_normalised) {
    sum = a.is_sigmoid ? kLeastSum : 0.0f;
    for (int j = 0; j < a.chosen; ++j) {
      sum += score(a.expert[own_rows[j]]);
      common += dweight(j) * weight(j);
    }
  }
  sync_warp();
  for (int j = lane; j < a.chosen; j += 32) ds[a.expert[own_rows[j]]] += (a.scale * dweight(j) - common) / sum;
  sync_warp();
  T* const dlogits = a.dlogits + t * a.dlogits_stride;
  if (a.is_sigmoid) {
    for (int e = lane; e < a.experts; e += 32) {
      const float s = score(e);
      dlogits[e] = stored<T>(ds[e] * s * (1.0f - s));
    }
    return;
  }
  float mean = 0;
  for (int e = lane; e < a.experts; e += 32) mean += score(e) * ds[e];
  mean = warp_sum(mean);
  for (int e = lane; e < a.experts; e += 32) dlogits[e] = stored<T>(score(e) * (ds[e] - mean));
}

}  // namespace

namespace ops {

template <class T>
void route_forward(const Exec<T>& exec, const RouterShape& shape, Mat<const T> logits, const Wide<T>* bias,
                   Mat<T> scores, const ExpertRows& rows, Mat<T> weights, int64_t* load) {
  void* const stream = exec.device.stream();
  const ArenaMark mark(exec.arena);
  RouteArgs<T> a(shape, logits, scores, weights);
  a.bias = bias, a.rows = rows, a.load = load;
  a.scratch = RouteScratch(exec.arena, logits.rows, shape);
  if (a.scratch.choices == nullptr) {
    launch_following(logits.rows, route_few_kernel<T>, Dim3{1}, kSortThreads, a.scratch.shared_bytes, stream, a);
    return;
  }
  const auto warps = static_cast<unsigned>(a.scratch.warps);
  const int64_t tiles = parts_of(logits.rows * shape.chosen, kRouteTile);
  launch_following(logits.rows, choose_kernel<T>, Dim3{static_cast<unsigned>(parts_of(logits.rows, a.scratch.warps))},
                   32 * warps, a.scratch.shared_bytes, stream, a);
  const size_t tile_bytes = kRouteTile * sizeof(int32_t);
  launch(count_choices_kernel<T>, Dim3{static_cast<unsigned>(tiles)}, kSortThreads, tile_bytes, stream, a);
  launch(first_rows_kernel<T>, Dim3{1}, kSortThreads, 0, stream, a, tiles);
  launch(sort_choices_kernel<T>, Dim3{static_cast<unsigned>(tiles)}, kSortThreads, tile_bytes, stream, a);
}

template <class T>
void route_backward(const Exec<T>& exec, const RouterShape& shape, Mat<const T> dweights, Mat<const T> scores,
                    const ExpertRows& rows, Mat<const T> weights, Wide<T> balance, Mat<T> dlogits) {
  const RouteBackwardArgs<T> a{dweights.data,
                               scores.data,
                               weights.data,
                               dlogits.data,
                               dweights.stride,
                               scores.stride,
                               weights.stride,
                               dlogits.stride,
                               scores.rows,
                               static_cast<int>(shape.experts),
                               static_cast<int>(shape.chosen),
                               shape.score == RouterScore::kSigmoid,
                               shape.normalised,
                               static_cast<float>(shape.scale),
                               balance,
                               rows.offsets,
                               rows.row_of,
                               rows.expert};
  const int warps = route_warps(shape.experts);
  launch_following(scores.rows, route_backward_kernel<T>, Dim3{static_cast<unsigned>(parts_of(scores.rows, warps))},
                   32 * static_cast<unsigned>(warps), sizeof(float) * static_cast<size_t>(warps * shape.experts),
                   exec.device.stream(), a);
}

#define FW_INSTANTIATE(T)                                                                                            \
  template void route_forward<T>(const Exec<T>&, const RouterShape&, Mat<const T>, const float*, Mat<T>,             \
                                 const ExpertRows&, Mat<T>, int64_t*);                                               \
  template void route_backward<T>(const Exec<T>&, const RouterShape&, Mat<const T>, Mat<const T>, const ExpertRows&, \
                                  Mat<const T>, float, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
