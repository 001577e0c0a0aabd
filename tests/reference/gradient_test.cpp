// The reference's adjoint against central differences: every preset, and combinations of axes that have no name.
#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>

#include "reference/fields.h"
#include "support/finite_difference.h"
#include "support/recurrence.h"

namespace fw {
namespace {

using testing::close;
using testing::describe;

double loss(const ReferenceProblem& p) {
  const ReferenceOutputs out = p.forward();
  double sum = 0;
  for (const auto& field : reference_output_fields()) {
    for (size_t i = 0; i < (p.d.*field.values).size(); ++i) sum += (out.*field.values)[i] * (p.d.*field.values)[i];
  }
  return sum;
}

// Of all inputs, or of those that `wanted` says, by steps of one of the sizes.
template <class Wanted>
void expect_gradients(const ReferenceProblem& problem, std::initializer_list<double> steps, Wanted&& wanted) {
  ReferenceProblem p = problem;  // whose inputs are moved
  SCOPED_TRACE(describe(p));
  const ReferenceInputs gradients = p.backward();
  ::testing::AssertionResult result = ::testing::AssertionFailure();
  for (const double h : steps) {
    ReferenceInputs numeric;
    for (const auto& field : reference_input_fields()) {
      if (wanted(field.name))
        numeric.*field.values = testing::differences([&] { return loss(p); }, p.in.*field.values, h);
    }
    result = close(gradients, numeric, 1e-8);
    if (result) break;
  }
  EXPECT_TRUE(result);
}
void expect_gradients(const ReferenceProblem& p) {
  expect_gradients(p, {1e-4}, [](std::string_view) { return true; });
}

bool is_gate(std::string_view name) {
  for (const GateSpec& spec : gate_specs(Rule(), {})) {
    if (spec.name == name) return true;
  }
  return false;
}

ProblemOptions options(uint64_t seed) {
  ProblemOptions o;
  o.sequences = SeqLayout({0, 4, 4, 9});  // one of them empty
  o.H = 2;
  o.HV = 4;
  o.K = 5;
  o.V = 3;
  o.gates_per_value_head = seed % 2 == 0;
  o.seed = seed;
  return o;
}

TEST(ReferenceGradient, EveryPreset) {
  for (const Preset& named : presets()) {
    for (uint64_t seed : {1, 2}) expect_gradients(random_problem(named.rule, options(seed)));
  }
}

TEST(ReferenceGradient, ComposedRules) {
  for (const Rule& rule : testing::composed_rules()) {
    for (uint64_t seed : {3, 4}) expect_gradients(random_problem(rule, options(seed)));
  }
}

TEST(ReferenceGradient, GatesAsLogits) {
  for (const Rule& rule : testing::all_rules()) {
    for (const GateActivation decay : testing::kDecayActivations) {
      const uint64_t seed = testing::rule_seed(rule, 10 + static_cast<uint64_t>(decay));
      ProblemOptions o = options(seed);
      o.gates = testing::logits_of(rule, decay);
      o.rate_per_channel = seed % 3 == 0;
      const auto of_a_gate = [](std::string_view name) {
        return is_parameter(name) ? name != "precond_center" : is_gate(name);
      };
      // A value changes by less than its logit, and differences by steps of 1e-4 begin to be those of rounding errors,
      // which fall as 1 / h. Larger steps can cross the kink |y| of M, which smaller ones do not reach: a gradient has
      // to agree at one size.
      if (any_logits(o.gates)) expect_gradients(random_problem(rule, o), {1e-3, 2e-4}, of_a_gate);
    }
  }
}

// recurrence.md 2.1 for numbers that were worked out by hand: y = 0 has s = 1/2 and softplus = log 2.
TEST(ReferenceGates, AreWhatTheyAreDefinedToBe) {
  const Rule rule = preset("gated_deltanet").rule;
  ProblemOptions o;
  o.sequences = SeqLayout::uniform(1, 1);
  o.K = o.V = 2;
  ReferenceProblem values = random_problem(rule, o);
  const auto expect_same = [&](GateActivation decay, double a_log, double dt_bias, double g, double x) {
    ReferenceProblem logits = values;
    logits.shape.gates.g = decay;
    logits.shape.gates.beta = GateActivation::kSigmoid;
    logits.shape.gates.lower_bound = -3;
    logits.shape.gates.divisor = 4;
    logits.in.g = {x};
    logits.in.beta = {std::log(3.0)};
    if (has_rate(decay)) logits.in.a_log = {a_log};
    logits.in.dt_bias = {dt_bias};
    values.in.g = {g};
    values.in.beta = {0.75};
    EXPECT_TRUE(close(logits.forward(), values.forward(), 1e-14));
  };
  expect_same(GateActivation::kSoftplus, std::log(2.0), -1, -2 * std::log(2.0), 1);
  expect_same(GateActivation::kSoftplus, 0, 2, -std::log(5.0), std::log(4.0) - 2);
  expect_same(GateActivation::kLowerBound, std::log(2.0), 1, -3 * 0.8, std::log(4.0) / 2 - 1);
  expect_same(GateActivation::kLogSigmoid, 0, 1, -std::log(5.0) / 4, -std::log(4.0) - 1);
}

TEST(ReferenceGradient, WithoutInitialStateAndWithOwnScale) {
  ProblemOptions o = options(5);
  o.initial_state = false;
  o.scale = 0.7;
  for (const Preset& named : presets()) expect_gradients(random_problem(named.rule, o));
}

// Decay 0, -1e4 and -inf. Where exp(g) is 0 nothing of the past arrives: the gradient of g is 0 there, and replacing
// -inf by -1e4 changes nothing. The gradients of all other inputs are checked against differences as usual.
TEST(ReferenceGradient, EdgeDecays) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const char* text : {"gated_deltanet", "kda", "gated_deltanet2", "mamba2", "gla", "precond_gated_deltanet",
                           "decay=channel gain=gate precond=diagonal"}) {
    ProblemOptions o = options(6);
    o.edge_decays = true;
    ReferenceProblem p = random_problem(parse_rule(text), o);
    SCOPED_TRACE(describe(p));
    const ReferenceInputs gradients = p.backward();
    ReferenceInputs numeric = gradients;
    for (const auto& field : reference_input_fields()) {
      const std::vector<double>& got = gradients.*field.values;
      std::vector<double>& x = p.in.*field.values;
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_TRUE(std::isfinite(got[i])) << field.name << " " << i;
        if (x[i] == -infinity || x[i] == -1e4) {
          EXPECT_EQ(got[i], 0) << field.name << " " << i;
        } else {
          (numeric.*field.values)[i] = testing::difference([&] { return loss(p); }, x[i]);
        }
      }
    }
    EXPECT_TRUE(close(gradients, numeric, 1e-8));

    ReferenceProblem finite = p;
    for (std::vector<double>* decays : {&finite.in.g, &finite.in.precond_g}) {
      for (double& g : *decays) g = std::max(g, -1e4);
    }
    EXPECT_TRUE(close(finite.forward(), p.forward(), 0));
    EXPECT_TRUE(close(finite.backward(), gradients, 0));
  }
}

// A cotangent that is absent is zero, and gradients add up over cotangents.
TEST(ReferenceGradient, LinearInTheCotangents) {
  const ReferenceProblem p = random_problem(preset("precond_gated_deltanet").rule, options(7));
  const ReferenceInputs whole = p.backward();
  ReferenceInputs sum;
  for (const auto& field : reference_input_fields()) (sum.*field.values).assign((whole.*field.values).size(), 0.0);
  for (const auto& kept : reference_output_fields()) {
    ReferenceProblem part = p;
    part.d = {};
    part.d.*kept.values = p.d.*kept.values;
    const ReferenceInputs gradients = part.backward();
    for (const auto& field : reference_input_fields()) {
      for (size_t i = 0; i < (sum.*field.values).size(); ++i) (sum.*field.values)[i] += (gradients.*field.values)[i];
    }
  }
  EXPECT_TRUE(close(sum, whole, 1e-13));
}

}  // namespace
}  // namespace fw
