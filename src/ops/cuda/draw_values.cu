// First values of parameters. A block goes through one piece of the host's generator, mt19937_64: of 312 words the next
// 312 are made in two steps, each by 156 threads, since word i + 312 is of words i, i + 1 and i + 156. A thread then
// makes a value of one number or two that follow one another. A pass over 312 numbers waits for three barriers; with
// some hundred pieces the device draws a billion values in less than a tenth of a second.
#include "base/buffer.h"
#include "base/normal_transform.h"
#include "base/random_jump.h"
#include "gpu/launch.h"
#include "ops/cuda/packets.cuh"
#include "ops/draw_values.h"
#include "ops/split_value.h"

namespace fw {
namespace cuda {
namespace {

constexpr int kThreads = 160;
constexpr int kWords = kRandomWords, kHalf = kWords / 2;
static_assert(kHalf <= kThreads);

struct DrawArgs {
  const uint64_t* words;
  const DrawnRange* ranges;
  int64_t count, piece;
  ParamValues<float> to;
};

FW_DEVICE uint64_t next_word(uint64_t word, uint64_t after, uint64_t middle) {
  constexpr uint64_t kLower = (uint64_t{1} << 31) - 1;
  const uint64_t y = (word & ~kLower) | (after & kLower);
  return middle ^ (y >> 1) ^ ((y & 1) != 0 ? 0xB5026F5AA96619E9 : 0);
}

// The number that the generator gives for a word.
FW_DEVICE uint64_t tempered(uint64_t x) {
  x ^= (x >> 29) & 0x5555555555555555;
  x ^= (x << 17) & 0x71D67FFFEDA60000;
  x ^= (x << 37) & 0xFFF7EEE000000000;
  return x ^ (x >> 43);
}

FW_DEVICE void store(const DrawArgs& a, const DrawnRange& range, int64_t i, double value) {
  const auto x = static_cast<float>(value);
  if (a.to.values != nullptr) {
    a.to.values[range.at + i] = x;
    return;
  }
  const SplitValue split = split_value(float_bits(x));
  a.to.rounded[range.at + i] = {split.rounded};
  a.to.low[range.at + i] = split.low;
  if (range.numbers >= 0) a.to.numbers[range.numbers + i] = x;
}

__global__ void __launch_bounds__(kThreads) draw_kernel(DrawArgs a) {
  auto* const shared = reinterpret_cast<uint64_t*>(shared_memory());  // [2, kWords]
  const int thread = static_cast<int>(thread_index());
  const int64_t begin = int64_t{block_index_x()} * a.piece, end = begin + a.piece;
  for (int i = thread; i < kWords; i += kThreads) shared[i] = a.words[int64_t{block_index_x()} * kWords + i];
  sync_threads();
  int64_t next = 0;  // range that is not yet drawn to its end
  uint64_t *now = shared, *then = shared + kWords;
  for (int64_t base = begin; base < end && next < a.count; base += kWords) {
    if (thread < kHalf) then[thread] = next_word(now[thread], now[thread + 1], now[thread + kHalf]);
    sync_threads();
    if (thread < kHalf) {
      const int i = kHalf + thread;
      then[i] = next_word(now[i], i + 1 < kWords ? now[i + 1] : then[0], then[thread]);
    }
    const int64_t until = min(end, base + kWords);
    for (; next < a.count; ++next) {
      const DrawnRange range = a.ranges[next];
      const int64_t draws = range.draws, last = range.first + range.count * draws;
      if (range.first >= until) break;
      // Values whose first number lies in [base, until).
      const int64_t from = base <= range.first ? 0 : (base - range.first + draws - 1) / draws;
      const int64_t to = min(range.count, (until - range.first + draws - 1) / draws);
      for (int64_t i = from + thread; i < to; i += kThreads) {
        const auto at = static_cast<int>(range.first + i * draws - base);
        const uint64_t first = tempered(now[at]);
        if (draws == 1) {
          store(a, range, i, uniform_of(first, range.low, range.scale));
        } else {
          // The one number after these: then[0] was made before the barrier.
          store(a, range, i, range.scale * normal_of(first, tempered(at + 1 < kWords ? now[at + 1] : then[0])));
        }
      }
      if (last > until) break;
    }
    sync_threads();
    uint64_t* const old = now;
    now = then;
    then = old;
  }
}

}  // namespace
}  // namespace cuda

void draw_on_cuda(Device& device, std::span<const uint64_t> words, int64_t piece, std::span<const DrawnRange> ranges,
                  ParamValues<float> to) {
  using namespace cuda;
  const auto pieces = static_cast<int64_t>(words.size()) / kWords;
  Buffer<uint64_t> words_there(device, static_cast<int64_t>(words.size()));
  Buffer<DrawnRange> ranges_there(device, static_cast<int64_t>(ranges.size()));
  words_there.write(0, words);
  ranges_there.write(0, ranges);
  const DrawArgs args{words_there.data(), ranges_there.data(), ranges_there.size(), piece, to};
  launch(draw_kernel, {static_cast<unsigned>(pieces)}, kThreads, 2 * kWords * sizeof(uint64_t), device.stream(), args);
  device.synchronise();  // the buffers end here
}

}  // namespace fw
