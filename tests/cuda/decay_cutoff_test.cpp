// Cut sequences whose decays let nothing through: first passes that leave out what cannot be seen
// (scan/cuda/sm90/scan/decay_cutoff.cuh), at the bound and around it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cuda/device_runs.h"
#include "rule/rule.h"

namespace fw::testing {
namespace {

HeaderRun cut_run(int64_t segment) {
  HeaderRun run = device_run(FW_FORM_CHUNK);
  run.bf16 = HeaderRun::Bf16Tensors::kStreams;  // log-decays are float32
  run.segment = segment;
  return run;
}

// Every log-decay `g`, but those of the tokens from `from` to `to`, which are `inside`.
void set_decays(Problem& p, double g, size_t from, size_t to, double inside) {
  const size_t row = p.in.g.size() * 2 * 64 / p.in.k.size();  // token scalars
  for (size_t i = 0; i < p.in.g.size(); ++i) p.in.g[i] = i / row >= from && i / row < to ? inside : g;
}

Problem long_problem(const std::string& rule, uint64_t seed, int64_t tokens) {
  ProblemOptions options;
  options.sequences = SeqLayout::uniform(1, tokens);
  options.H = options.HV = 2;
  options.K = 64;
  options.V = 64;
  options.initial_state = true;
  options.seed = seed;
  return random_problem(parse_rule(rule), options);
}

// An initial state of 2^40 decays by exp(-27.6) or exp(-27.9) in the last chunk of the first segment: below 2^-40 what
// is left of it is not carried on, above it is. (beta of 0.01: it is not erased.)
TEST(Fades, AtTheBoundAStateIsCarriedOnOrNot) {
  for (const char* rule : {"gated_deltanet", "kda", "gla", "gated_deltanet_neg"}) {
    for (const double sum : {-27.6, -27.9}) {
      Problem problem = long_problem(rule, 71, 300);
      for (double& x : problem.in.beta) x = 0.01;
      set_decays(problem, 0, 64, 128, sum / 64);
      for (double& x : problem.in.initial_state) x *= 0x1p40;
      problem = of_bf16_numbers(problem);
      set_decays(problem, 0, 64, 128, sum / 64);
      const ReferenceOutputs expected = problem.forward();
      const ReferenceOutputs whole = header_forward(problem, cut_run(-1)), cut = header_forward(problem, cut_run(128));
      double largest = 0, dropped = 0;
      for (size_t i = 0; i < expected.final_state.size(); ++i) {
        largest = std::max(largest, std::abs(problem.in.initial_state[i]));
        dropped = std::max(dropped, std::abs(cut.final_state[i] - whole.final_state[i]));
      }
      EXPECT_TRUE(close(whole, expected, 6e-3, kChunkFloor)) << rule << " " << sum;
      if (sum > -27.72 || !on_hopper()) {  // kernels for other GPUs carry all on
        EXPECT_TRUE(close(cut, expected, 6e-3, kChunkFloor)) << rule << " " << sum;
      } else {
        EXPECT_GT(dropped, 0.1 * largest * 0x1p-40) << rule;
        EXPECT_LT(dropped, 64 * largest * 0x1p-40) << rule;  // the state is a matrix: 64 of its numbers may end in one
      }
    }
  }
}

// The same of logits, which the kernels make values of: exp(-20) of a state of 2^40 is carried on, exp(-30) is not.
TEST(Fades, LogitsTellAsTheirValuesDo) {
  for (const char* rule : {"gated_deltanet", "kda"}) {
    for (const double sum : {-20.0, -30.0}) {
      ProblemOptions options;
      options.sequences = SeqLayout::uniform(1, 300);
      options.H = options.HV = 2;
      options.K = options.V = 64;
      options.initial_state = true;
      options.seed = 72;
      options.gates = logits_of(parse_rule(rule), GateActivation::kSoftplus);
      Problem problem = random_problem(parse_rule(rule), options);
      for (double& x : problem.in.beta) x = -5;
      for (double& x : problem.in.initial_state) x *= 0x1p40;
      std::ranges::fill(problem.in.a_log, 0.0);
      std::ranges::fill(problem.in.dt_bias, 0.0);
      set_decays(problem, -20, 64, 128, std::log(std::expm1(-sum / 64)));
      problem = of_bf16_numbers(problem);
      HeaderRun run = cut_run(-1);
      run.bf16 = HeaderRun::Bf16Tensors::kAll;
      const ReferenceOutputs expected = problem.forward(), whole = header_forward(problem, run);
      run.segment = 128;
      const ReferenceOutputs cut = header_forward(problem, run);
      double carried = 0, dropped = 0;
      for (size_t i = 0; i < expected.final_state.size(); ++i) {
        carried = std::max(carried, std::abs(problem.in.initial_state[i]) * std::exp(sum));
        dropped = std::max(dropped, std::abs(cut.final_state[i] - whole.final_state[i]));
      }
      EXPECT_TRUE(close(whole, expected, 6e-3, kChunkFloor)) << rule << " " << sum;
      if (sum > -25 || !on_hopper()) {
        EXPECT_TRUE(close(cut, expected, 6e-3, kChunkFloor)) << rule;
      } else {
        EXPECT_GT(dropped, 0.1 * carried) << rule;
        EXPECT_LT(dropped, 64 * carried) << rule;
      }
    }
  }
}

// Decays of any strength, forward and backward, each chunk's sum the same: of the three chunks of a segment one, two or
// all are needed.
TEST(Fades, WhateverTheDecaysResultsAreTheReferences) {
  uint64_t seed = 80;
  for (const char* rule : {"gated_deltanet", "kda", "gla", "comba", "kaczmarz_channel", "kda_neg", "gated_deltanet2"}) {
    for (const double sum : {-0.01, -2.0, -9.0, -15.0, -60.0, -1e4}) {
      Problem problem = long_problem(rule, ++seed, 410);
      if (sum < -1e3) {
        // The channels decay by turns, each a token in two by nothing: what they let through is not what any of them
        // does.
        for (size_t i = 0; i < problem.in.g.size(); ++i) problem.in.g[i] = i % 2 == i / 128 % 2 ? 0 : -1;
      } else {
        for (double& x : problem.in.g) x = sum / 64;
      }
      problem = of_bf16_numbers(problem);
      HeaderRun run = cut_run(192);
      EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), 6e-3, kChunkFloor)) << rule << " " << sum;
      EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, sum < -5))
          << rule << " " << sum;
    }
  }
}

// What is in a head's own segment decides alone: each head's bits are those of a call where both heads have its decays.
TEST(Fades, HeadsThatFadeAndHeadsThatLast) {
  Problem problem = of_bf16_numbers(long_problem("gated_deltanet", 90, 400));
  for (size_t i = 0; i < problem.in.g.size(); ++i) problem.in.g[i] = i % 2 == 0 ? -0.75 : -0.001;
  const ReferenceOutputs both = header_forward(problem, cut_run(128));
  EXPECT_TRUE(close(both, problem.forward(), 6e-3, kChunkFloor));
  for (const size_t head : {0, 1}) {
    Problem alike = problem;
    for (double& x : alike.in.g) x = problem.in.g[head];
    const ReferenceOutputs of_head = header_forward(alike, cut_run(128));
    for (size_t i = 0; i < both.o.size(); ++i) {
      if (i / 64 % 2 == head) {
        ASSERT_EQ(both.o[i], of_head.o[i]) << i;
      }
    }
  }
}

// A log-decay that is no number is looked at: the segment is not left out, and the outputs after it are no numbers.
TEST(Fades, NoNumbersGoOn) {
  for (const char* rule : {"gated_deltanet", "kda"}) {
    Problem problem = of_bf16_numbers(long_problem(rule, 91, 300));
    for (double& x : problem.in.g) x = -1;
    problem.in.g[problem.in.g.size() * 100 / 300] = NAN;
    const ReferenceOutputs got = header_forward(problem, cut_run(128));
    EXPECT_TRUE(std::isnan(got.o[static_cast<size_t>(299 * 2 * 64)])) << rule;
  }
}

}  // namespace
}  // namespace fw::testing
