// Sampling on the device: what ops/cpu/sampling.cpp does with a sorted row, without sorting. A block has a sequence.
// Top-k, top-p, min-p and the draw itself all keep a beginning of the order "likelier first, of equal ones the smaller
// id". So only two things have to be known: how much the kept ones weigh, and at which token a weight is reached. A
// search finds them, in which seven bounds at a time halve the range of logits three times. Weights are whole numbers,
// 2^44 for the likeliest token, so that their sums do not depend on an order; what weighs less than one is never drawn.
// exp() is a table of 64 powers of two and a polynomial, to 1e-14.
#include <bit>
#include <cmath>

#include "gpu/launch.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBounds = 7;        // of a turn of the search
constexpr int kMostAtOnce = 256;  // sequences of a launch, whose random numbers are arguments
constexpr int kWeightBits = 44;
constexpr double kLeast = -31;  // exp() of less weighs nothing

template <class T>
struct DrawArgs {
  Mat<const T> logits;
  int vocab = 0;
  Sampling sampling;
  double inverse_temperature = 0;
  DrawStreams streams;
  float* scores = nullptr;  // [N, vocab]: logits that are changed by a penalty; null: none is
  int64_t first = 0;        // sequence
  double uniform[kMostAtOnce];
};

struct Shared {
  double powers[64];
  uint64_t partial[kBounds][kThreads], sums[kBounds];
  double reals[kWarps];
  float tops[kWarps];
  int ids[kWarps];
  int counts[kWarps];
  int found;
};

FW_DEVICE uint64_t warp_sum_64(uint64_t x) {
  FW_UNROLL for (int mask = 16; mask > 0; mask /= 2) {
    const uint32_t low = shuffle_xor(static_cast<uint32_t>(x), mask),
                   high = shuffle_xor(static_cast<uint32_t>(x >> 32), mask);
    x += uint64_t{high} << 32 | low;
  }
  return x;
}

// Sums over the block, for every thread.
template <int M>
FW_DEVICE void block_sums(uint64_t (&x)[M], Shared& shared) {
  FW_UNROLL for (int m = 0; m < M; ++m) shared.partial[m][thread_index()] = x[m];
  sync_threads();
  const unsigned warp = warp_index();
  if (warp < M) {  // a sum each
    uint64_t sum = 0;
    for (unsigned i = lane_index(); i < kThreads; i += 32) sum += shared.partial[warp][i];
    sum = warp_sum_64(sum);
    if (lane_index() == 0) shared.sums[warp] = sum;
  }
  sync_threads();
  FW_UNROLL for (int m = 0; m < M; ++m) x[m] = shared.sums[m];
}

// Of larger logits larger; the same for both zeros.
FW_DEVICE uint32_t key_of(float x) {
  const uint32_t bits = x == 0 ? 0 : float_bits(x);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// exp(x) 2^bits for x <= 0, 0 below -700.
FW_DEVICE double scaled_exp(double x, int bits, const double* powers) {
  if (!(x > -700)) return 0;
  constexpr double kSteps = 92.332482616893656, kStep = 0.010830424696249145;  // 64 / ln 2 and its inverse
  const double rotations = rint(x * kSteps), r = fma(-rotations, kStep, x);
  const int k = static_cast<int>(rotations);
  const double series = 1 + r * (1 + r * (1.0 / 2 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120)))));
  return std::bit_cast<double>(static_cast<uint64_t>(1023 + bits + (k >> 6)) << 52) * (powers[k & 63] * series);
}

// The largest of numbers that of(i) gives for i < count, and its first index; an index of -1 where one is NaN. For
// every thread.
template <class Of>
FW_DEVICE void block_likeliest(int count, const Of& of, Shared& shared, float& top, int& at) {
  top = -INFINITY, at = INT32_MAX;
  int bad = 0;
  for (int i = static_cast<int>(thread_index()); i < count; i += kThreads) {
    const float x = of(i);
    if (x != x) bad = 1;
    if (x > top || at == INT32_MAX) top = x, at = i;
  }
  FW_UNROLL for (int mask = 16; mask > 0; mask /= 2) {
    const float x = shuffle_xor(top, mask);
    const int i = shuffle_xor(at, mask);
    bad |= shuffle_xor(bad, mask);
    if (x > top || (x == top && i < at)) top = x, at = i;
  }
  if (lane_index() == 0)
    shared.tops[warp_index()] = top, shared.ids[warp_index()] = at, shared.counts[warp_index()] = bad;
  sync_threads();
  top = shared.tops[0], at = shared.ids[0], bad = shared.counts[0];
  for (int w = 1; w < kWarps; ++w) {
    const float x = shared.tops[w];
    bad |= shared.counts[w];
    if (x > top || (x == top && shared.ids[w] < at)) top = x, at = shared.ids[w];
  }
  if (bad != 0) at = -1;
  sync_threads();
}

template <class T>
struct Row {
  const T* logits;
  const float* scores;
  int vocab;
  float top;
  double inverse_temperature;
  const double* powers;

  FW_DEVICE float score(int i) const { return scores != nullptr ? scores[i] : number(logits[i]); }
  // Of a logit, 2^44 for the largest.
  FW_DEVICE double weight(float x) const {
    const double down = x == top ? 0.0 : (static_cast<double>(x) - top) * inverse_temperature;
    return down < kLeast ? 0 : scaled_exp(down, kWeightBits, powers);
  }
  FW_DEVICE uint64_t whole_weight(float x) const { return static_cast<uint64_t>(weight(x)); }
};

// What lies above a key, and on it.
struct Border {
  uint32_t key;
  uint64_t above, one;  // the weight (or number) of all above; the weight of one on it
};

// The largest key from `low` on at which the weight (or, with counts, the number) of all tokens with this key or a
// larger one reaches target >= 1; there is one.
template <class T>
FW_DEVICE Border border_of(const Row<T>& row, bool counts, uint32_t low, uint64_t target, Shared& shared) {
  const int thread = static_cast<int>(thread_index());
  uint32_t high = key_of(row.top) + 1;
  uint64_t above = 0;
  while (high - low > 1) {
    const uint32_t step = (high - low + kBounds) / (kBounds + 1);
    uint64_t sums[kBounds] = {};
    for (int i = thread; i < row.vocab; i += kThreads) {
      const float x = row.score(i);
      const uint32_t key = key_of(x);
      if (key < low + step || key >= high) continue;
      const uint64_t value = counts ? 1 : row.whole_weight(x);
      FW_UNROLL for (int m = 0; m < kBounds; ++m) {
        if (key >= low + static_cast<uint32_t>(m + 1) * step) sums[m] += value;
      }
    }
    block_sums(sums, shared);
    const uint32_t base = low;
    const uint64_t base_above = above;
    FW_UNROLL for (int m = 0; m < kBounds; ++m) {  // from below: the last that reaches is the largest
      const uint32_t bound = base + static_cast<uint32_t>(m + 1) * step;
      if (bound >= high) continue;
      if (base_above + sums[m] >= target) {
        low = bound;
      } else {
        high = bound;
        above = base_above + sums[m];
      }
    }
  }
  uint64_t on[2] = {};  // weight, number
  for (int i = thread; i < row.vocab; i += kThreads) {
    const float x = row.score(i);
    if (key_of(x) == low) on[0] += row.whole_weight(x), on[1] += 1;
  }
  block_sums(on, shared);
  return {low, above, on[0] / on[1]};
}

// The weight of the tokens above a key.
template <class T>
FW_DEVICE uint64_t weight_above(const Row<T>& row, uint32_t key, Shared& shared) {
  uint64_t sum[1] = {};
  for (int i = static_cast<int>(thread_index()); i < row.vocab; i += kThreads) {
    const float x = row.score(i);
    if (key_of(x) > key) sum[0] += row.whole_weight(x);
  }
  block_sums(sum, shared);
  return sum[0];
}

// The id of the n-th token with this key, n from 0: warps have runs of ids one after the other.
template <class T>
FW_DEVICE int id_of(const Row<T>& row, uint32_t key, int n, Shared& shared) {
  const int warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index());
  const int run = (row.vocab + 32 * kWarps - 1) / (32 * kWarps) * 32, begin = warp * run;
  const auto has = [&](int i) { return i < row.vocab && key_of(row.score(i)) == key; };
  int count = 0;
  for (int i = begin; i < begin + run; i += 32) count += std::popcount(warp_ballot(has(i + lane)));
  if (lane == 0) shared.counts[warp] = count;
  sync_threads();
  int before = 0;
  for (int w = 0; w < warp; ++w) before += shared.counts[w];
  if (n >= before && n < before + count) {
    for (int i = begin; i < begin + run; i += 32) {
      const bool mine = has(i + lane);
      const uint32_t all = warp_ballot(mine);
      const int rank = before + std::popcount(all & ((1u << lane) - 1));
      if (mine && rank == n) shared.found = i + lane;
      before += std::popcount(all);
    }
  }
  sync_threads();
  return shared.found;
}

template <class T>
FW_DEVICE int draw(const Row<T>& row, const Sampling& sampling, double uniform, Shared& shared) {
  const int thread = static_cast<int>(thread_index());
  const double least = static_cast<double>(row.top) + kLeast * sampling.temperature;
  const uint32_t low = key_of(least < -3.4e38 ? -INFINITY : static_cast<float>(least));
  const double enough_alone = sampling.min_p * static_cast<double>(uint64_t{1} << kWeightBits);
  uint64_t sums[3] = {};  // weight of all, of what min_p keeps, and how many there are to search
  for (int i = thread; i < row.vocab; i += kThreads) {
    const float x = row.score(i);
    if (key_of(x) < low) continue;
    const double weight = row.weight(x);
    sums[0] += static_cast<uint64_t>(weight);
    if (weight >= enough_alone) sums[1] += static_cast<uint64_t>(weight);
    sums[2] += 1;
  }
  block_sums(sums, shared);
  uint64_t total = sums[0];
  const uint64_t kept_by_min_p = sums[1], tokens = sums[2];
  if (sampling.top_k > 0 && static_cast<uint64_t>(sampling.top_k) < tokens) {
    const uint64_t k = static_cast<uint64_t>(sampling.top_k);
    const Border border = border_of(row, true, low, k, shared);
    total = weight_above(row, border.key, shared) + (k - border.above) * border.one;
  }
  if (sampling.top_p < 1) {
    const double share = ceil(sampling.top_p * static_cast<double>(total));
    const uint64_t enough = min(total, max(uint64_t{1}, static_cast<uint64_t>(share)));
    const Border border = border_of(row, false, low, enough, shared);
    total = border.above + (enough - border.above + border.one - 1) / border.one * border.one;
  }
  if (sampling.min_p > 0) total = min(total, kept_by_min_p);
  const uint64_t point = min(total - 1, static_cast<uint64_t>(uniform * static_cast<double>(total)));
  const Border border = border_of(row, false, low, point + 1, shared);
  return id_of(row, border.key, static_cast<int>((point - border.above) / border.one), shared);
}

FW_DEVICE double log_sum(int count, const auto& of, float top, Shared& shared) {
  double sum = 0;
  for (int i = static_cast<int>(thread_index()); i < count; i += kThreads)
    sum += scaled_exp(static_cast<double>(of(i)) - top, 0, shared.powers);
  FW_UNROLL for (int mask = 16; mask > 0; mask /= 2) {
    const uint64_t bits = std::bit_cast<uint64_t>(sum);
    const uint32_t low = shuffle_xor(static_cast<uint32_t>(bits), mask),
                   high = shuffle_xor(static_cast<uint32_t>(bits >> 32), mask);
    sum += std::bit_cast<double>(uint64_t{high} << 32 | low);
  }
  if (lane_index() == 0) shared.reals[warp_index()] = sum;
  sync_threads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared.reals[w];
  return log(sum);
}

// grid: sequences
template <class T>
__global__ void __launch_bounds__(kThreads) sample_tokens_kernel(const __grid_constant__ DrawArgs<T> a) {
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
  const int thread = static_cast<int>(thread_index());
  const int64_t n = a.first + block_index_x();
  grid_dependency_wait();
  grid_dependency_launch();
  if (thread < 64) shared.powers[thread] = exp2(thread / 64.0);
  sync_threads();
  int32_t* const ring = a.streams.recent + n * kMostRecent;
  const int64_t seen = a.streams.seen[n];
  const T* logits = a.logits.data + n * a.logits.stride;
  const auto logit = [&](int i) { return number(logits[i]); };
  float top, raw_top;
  int id;
  block_likeliest(a.vocab, logit, shared, raw_top, id);
  top = raw_top;
  const bool good = id >= 0 && top - top == 0;  // finite
  float* scores = a.scores == nullptr ? nullptr : a.scores + n * a.vocab;
  if (good && scores != nullptr) {
    for (int i = thread; i < a.vocab; i += kThreads) scores[i] = logit(i);
    sync_threads();
    const int window = static_cast<int>(min(seen, min(a.sampling.repetition_window, kMostRecent)));
    const auto recent = [&](int back) { return ring[(seen - 1 - back) % kMostRecent]; };
    for (int i = thread; i < window; i += kThreads) {
      const int32_t of = recent(i);
      bool again = of < 0 || of >= a.vocab;  // beyond the tokenizer's vocabulary
      for (int j = 0; j < i && !again; ++j) again = recent(j) == of;
      if (again) continue;
      const double x = scores[of], penalty = a.sampling.repetition_penalty;
      scores[of] = static_cast<float>(x > 0 ? x / penalty : x * penalty);
    }
    sync_threads();
    block_likeliest(
        a.vocab, [&](int i) { return scores[i]; }, shared, top, id);
  }
  const bool drawable = good && id >= 0 && top - top == 0;
  if (drawable && a.sampling.temperature != 0) {
    const Row<T> row{logits, scores, a.vocab, top, a.inverse_temperature, shared.powers};
    id = draw(row, a.sampling, a.uniform[block_index_x()], shared);
  }
  Drawn drawn;
  drawn.id = drawable ? id : -1;
  if (drawable && a.streams.logprobs) {  // over all logits
    const int all = static_cast<int>(a.logits.cols);
    float all_top = raw_top;
    int likeliest_of_all;
    if (all > a.vocab) block_likeliest(all, logit, shared, all_top, likeliest_of_all);
    drawn.logprob = static_cast<double>(logit(id)) - all_top - log_sum(all, logit, all_top, shared);
  }
  if (thread != 0) return;
  a.streams.drawn[n] = drawn;
  const int32_t next = drawable ? id : 0;
  a.streams.ids[n] = next;
  ring[seen % kMostRecent] = next;
  a.streams.seen[n] = seen + 1;
  a.streams.positions[n] += 1;
  int32_t* const in_ring = a.streams.ring_positions;
  if (in_ring != nullptr) in_ring[n] = in_ring[n] + 1 == a.streams.ring_tokens ? 0 : in_ring[n] + 1;
}

}  // namespace

namespace ops {

template <class T>
void sample_tokens(const Exec<T>& exec, Mat<const T> logits, int64_t vocab, const Sampling& sampling,
                   const DrawStreams& streams) {
  const ArenaMark mark(exec.arena);
  DrawArgs<T> a{logits,   static_cast<int>(vocab),
                sampling, sampling.temperature == 0 ? 0 : 1 / sampling.temperature,
                streams,  nullptr,
                0,        {}};
  if (sampling.repetition_penalty != 1) a.scores = penalised_logits(exec.arena, logits.rows, vocab);
  a.streams.uniform = nullptr;
  for (; a.first < logits.rows; a.first += kMostAtOnce) {
    const int64_t count = std::min<int64_t>(kMostAtOnce, logits.rows - a.first);
    std::copy_n(streams.uniform + a.first, count, a.uniform);
    launch_overlapped(sample_tokens_kernel<T>, Dim3{static_cast<unsigned>(count)}, kThreads, sizeof(Shared),
                      exec.device.stream(), a);
  }
}

template void sample_tokens<float>(const Exec<float>&, Mat<const float>, int64_t, const Sampling&, const DrawStreams&);
template void sample_tokens<Bf16>(const Exec<Bf16>&, Mat<const Bf16>, int64_t, const Sampling&, const DrawStreams&);

}  // namespace ops
}  // namespace fw::cuda
