#include "nn/init_random.h"

#include <algorithm>
#include <bit>

#include "base/random_jump.h"
#include "base/threads.h"
#include "nn/params.h"
#include "ops/draw_values.h"

namespace fw {
namespace {

constexpr int64_t kAtOnce = 4096;  // values that a thread has in double

// Values of one spec that one piece of the numbers makes.
struct Part {
  size_t spec;
  int64_t at, count;
  int64_t skip;   // numbers of the piece before the first
  size_t target;  // in the values of its wave
};

void discard(Random& random, int64_t count) {
  for (int64_t i = 0; i < count; ++i) random.bits();
}

template <class T>
void fill(const ParamSpec& spec, int64_t count, Random& random, T* to) {
  const int64_t at_once = counts_indices(spec.init) ? count : std::min(kAtOnce, count);
  std::vector<double> values(static_cast<size_t>(at_once));
  for (int64_t done = 0; done < count; done += at_once) {
    const std::span<double> some(values.data(), static_cast<size_t>(std::min(at_once, count - done)));
    std::fill(some.begin(), some.end(), 0.0);
    spec.init(some, random);
    std::transform(some.begin(), some.end(), to + done, [](double x) { return static_cast<T>(x); });
  }
}

}  // namespace

template <class T>
void init_random(const std::vector<ParamSpec>& specs, Random& random,
                 const std::function<void(const ParamSpec&, int64_t, std::span<const T>)>& write, int log_piece) {
  const int64_t piece = int64_t{1} << log_piece;
  int64_t numbers = 0;
  bool counted = true;
  for (const ParamSpec& spec : specs) {
    const int draws = draws_of(spec.init);
    counted = counted && draws >= 0;
    numbers += draws * spec.size();
  }
  std::vector<T> values;
  if (!counted || numbers <= 2 * piece) {
    for (const ParamSpec& spec : specs) {
      values.resize(static_cast<size_t>(spec.size()));
      // In one: where nothing is known of how it draws, it may look at all its values.
      std::vector<double> exact(values.size());
      spec.init(exact, random);
      std::transform(exact.begin(), exact.end(), values.begin(), [](double x) { return static_cast<T>(x); });
      write(spec, 0, values);
    }
    return;
  }

  // parts[i]: what piece i makes. A value whose numbers lie in two pieces is the first one's, whose generator simply
  // goes on.
  std::vector<std::vector<Part>> parts(static_cast<size_t>((numbers + piece - 1) / piece));
  int64_t first = 0;  // number of the spec
  for (size_t s = 0; s < specs.size(); ++s) {
    const int64_t size = specs[s].size(), each = draws_of(specs[s].init);
    if (each == 0) {
      parts[static_cast<size_t>(std::min(first, numbers - 1) / piece)].push_back({s, 0, size, -1, 0});
      continue;
    }
    for (int64_t at = 0; at < size;) {
      const int64_t begin = first + at * each, i = begin / piece, left = (i + 1) * piece - begin;
      const int64_t count = std::min(size - at, (left + each - 1) / each);
      parts[static_cast<size_t>(i)].push_back({s, at, count, begin - i * piece, 0});
      at += count;
    }
    first += size * each;
  }

  const RandomJump jump(log_piece);
  // pieces whose values are held at a time: no number depends on it
  const size_t wave = std::min<size_t>(2 * static_cast<size_t>(num_threads()), 64);
  Random next = random;
  std::vector<Random> generators;
  for (size_t begin = 0; begin < parts.size(); begin += wave) {
    const size_t end = std::min(parts.size(), begin + wave);
    generators.clear();
    size_t held = 0;
    for (size_t i = begin; i < end; ++i) {
      random = next;
      generators.push_back(next);
      jump.apply(next);
      for (Part& part : parts[i]) {
        part.target = held;
        held += static_cast<size_t>(part.count);
      }
    }
    values.resize(held);
    parallel_for(static_cast<int64_t>(end - begin), [&](int64_t i) {
      Random mine = generators[static_cast<size_t>(i)];
      int64_t drawn = 0;
      for (const Part& part : parts[begin + static_cast<size_t>(i)]) {
        const ParamSpec& spec = specs[part.spec];
        if (part.skip > drawn) {
          discard(mine, part.skip - drawn);
          drawn = part.skip;
        }
        fill(spec, part.count, mine, values.data() + part.target);
        drawn += part.count * draws_of(spec.init);
      }
    });
    for (size_t i = begin; i < end; ++i) {
      for (const Part& part : parts[i]) {
        write(specs[part.spec], part.at, {values.data() + part.target, static_cast<size_t>(part.count)});
      }
    }
  }
  discard(random, numbers - static_cast<int64_t>(parts.size() - 1) * piece);  // it was the last piece's
}

bool init_random_on_cuda(const std::vector<ParamSpec>& specs, Random& random, Device& device, ParamValues<float> to,
                         const std::function<int64_t(const ParamSpec&)>& numbers_of,
                         const std::function<void(const ParamSpec&, int64_t, std::span<const float>)>& write,
                         int64_t at_least) {
  std::vector<DrawnRange> ranges;
  struct OnHost {
    size_t spec;
    int64_t first;
    std::vector<float> values;
  };
  std::vector<OnHost> others;
  int64_t numbers = 0;
  for (size_t s = 0; s < specs.size(); ++s) {
    const ParamSpec& spec = specs[s];
    const int draws = draws_of(spec.init);
    if (draws < 0) return false;
    if (const std::optional<LinearDraw> linear = linear_draw_of(spec.init)) {
      if (spec.size() > 0)
        ranges.push_back(
            {numbers, spec.size(), spec.offset, numbers_of(spec), linear->scale, linear->low, linear->draws});
    } else {
      others.push_back({s, numbers, std::vector<float>(static_cast<size_t>(spec.size()))});
    }
    numbers += draws * spec.size();
  }
  if (numbers < at_least) return false;

  // Between 64 and 128 pieces, a block each: each jump costs the host a millisecond or two, and fewer blocks would
  // leave the device idle.
  constexpr int kLeastLog = 10, kLogPieces = 6;
  const int log_piece =
      std::max(kLeastLog, static_cast<int>(std::bit_width(static_cast<uint64_t>(numbers))) - 1 - kLogPieces);
  const int64_t piece = int64_t{1} << log_piece, pieces = (numbers + piece - 1) / piece;
  const RandomJump jump(log_piece);
  std::vector<Random> starts{random};
  while (static_cast<int64_t>(starts.size()) < pieces) {
    starts.push_back(starts.back());
    jump.apply(starts.back());
  }
  std::vector<uint64_t> words;
  for (const Random& start : starts) {
    const auto next = next_words(start);
    words.insert(words.end(), next.begin(), next.end());
  }
  draw_on_cuda(device, words, piece, ranges, to);

  parallel_for(static_cast<int64_t>(others.size()), [&](int64_t i) {
    OnHost& other = others[static_cast<size_t>(i)];
    Random mine = starts[static_cast<size_t>(std::min(other.first, numbers - 1) / piece)];
    if (draws_of(specs[other.spec].init) > 0) discard(mine, other.first % piece);
    fill(specs[other.spec], specs[other.spec].size(), mine, other.values.data());
  });
  for (const OnHost& other : others) write(specs[other.spec], 0, other.values);
  random = starts.back();
  discard(random, numbers - (pieces - 1) * piece);
  return true;
}

template void init_random<float>(const std::vector<ParamSpec>&, Random&,
                                 const std::function<void(const ParamSpec&, int64_t, std::span<const float>)>&, int);
template void init_random<double>(const std::vector<ParamSpec>&, Random&,
                                  const std::function<void(const ParamSpec&, int64_t, std::span<const double>)>&, int);

}  // namespace fw
