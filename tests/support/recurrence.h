// What tests of the recurrence share: random problems, the reference, runs through the C header, errors. They live in
// src/reference because selftest needs them too; this header gives them their name for tests, and googletest messages.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "reference/compare.h"
#include "reference/header_run.h"
#include "reference/problem.h"
#include "reference/reference.h"

namespace fw::testing {

using Problem = ReferenceProblem;
using fw::compare;
using fw::header_backward;
using fw::header_forward;
using fw::header_steps;
using fw::HeaderRun;
using fw::logits_of;
using fw::ProblemOptions;
using fw::random_problem;
using fw::relative_error;
using fw::slice_sequence;
using fw::slice_tokens;
using fw::worst;

// "rule; T=.. N=.. H=.. HV=.. K=.. V=..", for SCOPED_TRACE.
std::string describe(const Problem& problem);

// The initial states of every third sequence are 0.
Problem with_states_of_some(Problem problem);
// Rounded to bf16; of a problem its initial states (the preconditioner's are float32).
void round_values(std::vector<double>& values);
void round_states(Problem& problem);

// EXPECT_TRUE(close(got, expected, 1e-10)): each field's relative L2 error within the bound; the message names all that
// are not.
::testing::AssertionResult close(const ReferenceOutputs& got, const ReferenceOutputs& expected, double bound,
                                 double floor_share = 0);
::testing::AssertionResult close(const ReferenceInputs& got, const ReferenceInputs& expected, double bound,
                                 double floor_share = 0);

// Rules that no preset names, each a combination of axes that the presets need ("kaczmarz_channel", everything at once,
// ...).
std::vector<Rule> composed_rules();
inline constexpr GateActivation kDecayActivations[] = {GateActivation::kSoftplus, GateActivation::kLowerBound,
                                                       GateActivation::kLogSigmoid};
// The same of compare_parameters().
::testing::AssertionResult close_parameters(const ReferenceInputs& got, const ReferenceInputs& expected, double bound,
                                            double floor_share = 0);
// Those and every preset.
std::vector<Rule> all_rules();
// What a test over such a list seeds its random numbers with: the rule's text (FNV-1a) and `turn`, which tells apart
// tests and the problems of one. So a rule's problem is the same whichever rules stand before it. Every residue of a
// small number is about as likely.
uint64_t rule_seed(const Rule& rule, uint64_t turn);

}  // namespace fw::testing
