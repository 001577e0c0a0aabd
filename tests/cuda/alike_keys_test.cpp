// Keys that hardly differ, at a gain just below 1 and no decay. The state along every direction but the common one is
// then a sum over all tokens, and so are the errors of keys that enter it: they grow with the root of their number.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "base/random.h"
#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

// A sigmoid of 8.
constexpr double kNearOne = 0.99967;

enum class AlikeKind { kEqual, kNearlyEqual, kTwoInTurn, kRuns };
// Bounds of outputs and of gradients after 1024 and 320 tokens, by rule. Keys that enter the state without what bf16
// takes from them would be at 6.9e-2 (kda, noise 1e-2) and grow with the tokens. A = (I + T)^-1 rounded at the end, not
// row by row (prepare/inverse.cuh), would be at 7.6e-2 and 2.0e-1 (two in turn). What is left of gated_deltanet is
// U = A W in bf16, whose sum over equal keys is what one token changes (docs/notes/2026-11-alike-keys.md).
struct AlikeBounds {
  double outputs, gradients;
};
struct AlikeCase {
  const char* name;
  AlikeKind keys;
  double noise;
  AlikeBounds kda, gated_deltanet;
};
constexpr AlikeCase kAlikeCases[] = {
    {"equal", AlikeKind::kEqual, 0, {6e-3, 2.3e-2}, {2.2e-2, 2.3e-2}},
    {"noise 1e-2", AlikeKind::kNearlyEqual, 1e-2, {2.2e-2, 4.9e-2}, {2.2e-2, 2.4e-2}},
    {"noise 1e-3", AlikeKind::kNearlyEqual, 1e-3, {1.7e-2, 3.2e-2}, {2.5e-2, 2.4e-2}},
    {"noise 1e-4", AlikeKind::kNearlyEqual, 1e-4, {1e-2, 2.3e-2}, {2.3e-2, 2.4e-2}},
    {"two in turn", AlikeKind::kTwoInTurn, 0, {8e-3, 4.1e-2}, {1.6e-2, 4.1e-2}},
    {"runs, as padding makes them", AlikeKind::kRuns, 0, {6.5e-3, 9e-3}, {6e-3, 7e-3}}};
AlikeBounds bounds_of(const std::string& rule, const AlikeCase& of) {
  return rule == "kda" ? of.kda : of.gated_deltanet;
}

Problem alike_problem(const char* rule, const AlikeCase& of, int64_t tokens, int64_t sequences = 1, int64_t dim = 64) {
  constexpr int64_t kRun = 100;  // not a multiple of a chunk
  ProblemOptions options;
  options.sequences = SeqLayout::uniform(sequences, tokens);
  options.K = options.V = dim;
  options.initial_state = false;
  options.seed = 900;
  Problem problem = random_problem(parse_rule(rule), options);
  std::ranges::fill(problem.in.g, 0.0);
  std::ranges::fill(problem.in.beta, kNearOne);
  Random random(7);
  std::vector<double> bases(static_cast<size_t>(2 * options.K));
  for (double& x : bases) x = random.normal();
  for (int64_t t = 0; t < sequences * tokens; ++t) {
    for (int64_t i = 0; i < options.K; ++i) {
      double& k = problem.in.k[static_cast<size_t>(t * options.K + i)];
      const int64_t run = t / kRun * kRun;
      if (of.keys == AlikeKind::kRuns) {
        if (run / kRun % 2 != 0) k = problem.in.k[static_cast<size_t>(run * options.K + i)];
      } else {
        k = bases[static_cast<size_t>((of.keys == AlikeKind::kTwoInTurn ? t % 2 : 0) * options.K + i)] +
            of.noise * random.normal();
      }
    }
  }
  return of_bf16_numbers(problem);
}

TEST(AlikeKeys, HaveTheirOutputsAndStates) {
  for (const char* rule : {"kda", "gated_deltanet"}) {
    for (const AlikeCase& of : kAlikeCases) {
      const Problem problem = alike_problem(rule, of, 1024);
      HeaderRun run = device_run(FW_FORM_CHUNK);
      run.bf16 = HeaderRun::Bf16Tensors::kAll;
      for (const FieldError& e : compare(header_forward(problem, run), problem.forward(), kChunkFloor))
        EXPECT_LE(e.error, bounds_of(rule, of).outputs) << rule << ", " << of.name << ", " << e.name;
    }
  }
}

// The forward of one kernel makes an A of its own (sm90/fused/a_maker.cuh).
TEST(AlikeKeys, HaveTheirOutputsInOneKernel) {
  if (!on_hopper()) GTEST_SKIP() << "Hopper alone has it";
  const EmulatedSms few(2);
  for (const AlikeCase& of : kAlikeCases) {
    const Problem problem = alike_problem("gated_deltanet", of, 1024, emulated() ? 2 : 132, 128);
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    std::string text;
    run.plan_text = &text;
    for (const FieldError& e : compare(header_forward(problem, run), problem.forward(), kChunkFloor))
      EXPECT_LE(e.error, of.gated_deltanet.outputs) << of.name << ", " << e.name;
    EXPECT_TRUE(is_fused(text)) << text;
  }
}

// With gain_bound=2 the call's plan has the hi/lo split, and nothing of this is left but the rounding of the outputs.
constexpr AlikeBounds kSplit{5e-3, 4.6e-2};
constexpr double kSplitState = 5e-4;

TEST(AlikeKeys, AreExactWithTheSplit) {
  for (const char* rule : {"kda gain_bound=2", "gated_deltanet gain_bound=2"}) {
    for (const AlikeCase& of : kAlikeCases) {
      HeaderRun run = device_run(FW_FORM_CHUNK);
      run.bf16 = HeaderRun::Bf16Tensors::kAll;
      const Problem problem = alike_problem(rule, of, 1024), shorter = alike_problem(rule, of, 320);
      for (const FieldError& e : compare(header_forward(problem, run), problem.forward(), kChunkFloor)) {
        EXPECT_LE(e.error, e.name == "final_state" ? kSplitState : kSplit.outputs)
            << rule << ", " << of.name << ", " << e.name;
      }
      for (const FieldError& e : compare(header_backward(shorter, run), shorter.backward(), kChunkFloor)) {
        if (e.name == "g") continue;  // as below
        EXPECT_LE(e.error, kSplit.gradients) << rule << ", " << of.name << ", " << e.name;
      }
    }
  }
}

TEST(AlikeKeys, HaveTheirGradients) {
  for (const char* rule : {"kda", "gated_deltanet"}) {
    for (const AlikeCase& of : kAlikeCases) {
      const Problem problem = alike_problem(rule, of, 320);
      HeaderRun run = device_run(FW_FORM_CHUNK);
      run.bf16 = HeaderRun::Bf16Tensors::kAll;
      for (const FieldError& e : compare(header_backward(problem, run), problem.backward(), kChunkFloor)) {
        if (e.name == "g") continue;  // of no decay: sums that cancel (docs/numerics.md)
        EXPECT_LE(e.error, bounds_of(rule, of).gradients) << rule << ", " << of.name << ", " << e.name;
      }
    }
  }
}

}  // namespace
}  // namespace fw::testing
