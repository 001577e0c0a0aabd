// Points of the product of axes that nobody listed, drawn at random, in the chunk form: forward and backward against
// the reference.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/random.h"
#include "cuda/device_runs.h"
#include "cuda/random_rule.h"
#include "rule/rule.h"
#include "scan/cuda/pipeline.h"

namespace fw::testing {
namespace {

// Whether rounding errors of the inputs stay what they are: a state that has grown has grown them too.
bool stable(const ReferenceOutputs& out) {
  double largest = 0;
  for (const double x : out.final_state) largest = std::max(largest, std::fabs(x));
  return largest < 30;
}

// `wanted` of the rules that `takes`, with keys of so many channels as channels(seed) says.
template <class Takes, class Channels>
void expect_rules(Random& random, int wanted, const Takes& takes, const Channels& channels) {
  int compared = 0, unstable = 0;
  for (uint64_t seed = 1; compared < wanted; ++seed) {
    const Rule rule = random_rule(random);
    if (!is_valid(rule) || !takes(rule)) continue;
    ProblemOptions options;
    options.sequences = seed % 2 == 0 ? SeqLayout({0, 65, 65, 66, 196}) : SeqLayout::uniform(2, 100);
    options.H = 1 + static_cast<int64_t>(random.below(2));
    options.HV = options.H * (1 + static_cast<int64_t>(random.below(2)));
    options.K = channels(seed);
    options.V = 16 + static_cast<int64_t>(random.below(120));
    options.gates_per_value_head = random.below(2) == 0;
    options.initial_state = random.below(2) == 0;
    options.edge_decays = random.below(4) == 0;
    options.seed = seed;
    const Problem problem = of_bf16_numbers(random_problem(rule, options));
    const ReferenceOutputs expected = problem.forward();
    if (!stable(expected)) {
      ++unstable;
      continue;
    }
    ++compared;
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.bf16 = seed % 3 == 0 ? HeaderRun::Bf16Tensors::kNone : HeaderRun::Bf16Tensors::kAll;
    run.saved = random.below(4) != 0;
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(problem)));
    EXPECT_TRUE(close(header_forward(problem, run), expected, ChunkBounds{}.output, kChunkFloor));
    const ReferenceInputs gradients = problem.backward();
    EXPECT_TRUE(close(header_backward(problem, device_run(FW_FORM_TOKEN)), gradients, kTokenBound, kTokenFloor));
    EXPECT_TRUE(close_conditioned(problem, header_backward(problem, run), gradients, options.edge_decays));
  }
  EXPECT_LT(unstable, compared);
}

TEST(RandomRules, ChunkFormMatchesTheReference) {
  Random random(20261121);
  expect_rules(
      random, emulated() ? 16 : 150, [](const Rule&) { return true; },
      [&](uint64_t seed) {
        const auto K = 16 + static_cast<int64_t>(random.below(113));
        return seed % 4 == 1 ? int64_t{seed % 8 == 1 ? 64 : 128} : K;  // the sizes for which kernels take whole rows
      });
}

// Keys of more than 128 channels.
int64_t k256_key(Random& random, uint64_t seed) {
  const auto K = 129 + static_cast<int64_t>(random.below(128));
  return seed % 4 == 1 ? 256 : K;
}

// Sums of q and k: any gain, gates of one number or none.
TEST(RandomRules, WideSumsMatchTheReference) {
  Random random(20261128);
  expect_rules(
      random, emulated() ? 12 : 60, [](const Rule& rule) { return cuda::k256_rule(rule) && cuda::k256_sums(rule); },
      [&](uint64_t seed) { return k256_key(random, seed); });
}

// Decays of channels: the same, and gates of channels.
TEST(RandomRules, WideDecaysOfChannelsMatchTheReference) {
  Random random(20261129);
  expect_rules(
      random, emulated() ? 8 : 60, [](const Rule& rule) { return cuda::k256_channels(rule); },
      [&](uint64_t seed) { return k256_key(random, seed); });
}

}  // namespace
}  // namespace fw::testing
