// The tools that other tests trust: error measures, differences, random problems, and the reference's own argument
// checks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "base/error.h"
#include "support/finite_difference.h"
#include "support/recurrence.h"

namespace fw {
namespace {

using testing::close;

TEST(RelativeError, MeasuresAndNeverForgives) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> x = {3, 4};
  EXPECT_EQ(relative_error(x, x), 0);
  EXPECT_DOUBLE_EQ(relative_error(std::vector<double>{3, 4.5}, x), 0.1);
  EXPECT_DOUBLE_EQ(relative_error(std::vector<double>{3, 4.5}, x, 50), 0.01);
  EXPECT_EQ(relative_error(std::vector<double>{3}, x), infinity);
  EXPECT_EQ(relative_error(std::vector<double>{3, nan}, x), infinity);
  EXPECT_EQ(relative_error(std::vector<double>{3, infinity}, std::vector<double>{3, infinity}), infinity);
  EXPECT_EQ(relative_error(std::vector<double>{1e-300}, std::vector<double>{0}), infinity);
  EXPECT_EQ(relative_error(std::vector<double>{}, std::vector<double>{}), 0);
}

TEST(Compare, NamesTheFieldThatDiffers) {
  const ReferenceProblem p = random_problem(preset("gated_deltanet").rule, {});
  ReferenceInputs d = p.backward();
  const ReferenceInputs expected = d;
  EXPECT_TRUE(close(d, expected, 0));
  d.beta[3] += 1e-3;
  EXPECT_EQ(worst(compare(d, expected)).name, "beta");
  EXPECT_FALSE(close(d, expected, 1e-6));
  EXPECT_TRUE(close(d, expected, 1));
  d.beta.clear();  // a result that is missing is not a result that agrees
  EXPECT_FALSE(close(d, expected, 1));
}

TEST(FiniteDifference, IsExactForPolynomialsOfFourthDegree) {
  std::vector<double> x = {0.5, -2};
  const auto f = [&] { return std::pow(x[0], 4) + x[0] * x[1] * x[1]; };
  const std::vector<double> d = testing::differences(f, x, 1e-2);
  EXPECT_NEAR(d[0], 4 * 0.125 + 4, 1e-11);
  EXPECT_NEAR(d[1], 2 * 0.5 * -2, 1e-11);
  EXPECT_EQ(x, (std::vector<double>{0.5, -2}));
  const std::vector<size_t> indices = testing::sample_indices(100, 10, 3);
  EXPECT_EQ(std::set<size_t>(indices.begin(), indices.end()).size(), 10u);
  EXPECT_EQ(testing::sample_indices(4, 10, 3).size(), 4u);
}

TEST(RandomProblem, HasWhatTheRuleNeedsAndFloatsOnly) {
  ProblemOptions o;
  o.H = 2;
  o.HV = 4;
  o.edge_decays = true;
  for (const Rule& rule : testing::all_rules()) {
    const ReferenceProblem p = random_problem(rule, o);
    for (const auto& field : reference_input_fields()) {
      const std::vector<double>& x = p.in.*field.values;
      EXPECT_EQ(static_cast<int64_t>(x.size()), field.count(rule, p.shape)) << field.name;
      for (double value : x) EXPECT_EQ(value, static_cast<double>(static_cast<float>(value))) << field.name;
    }
    for (double g : p.in.g) EXPECT_LE(g, 0);
    for (double beta : p.in.beta) EXPECT_TRUE(beta > 0 && beta < rule.gain_bound);
    for (double y : p.forward().o) EXPECT_LT(std::abs(y), 100) << testing::describe(p);  // stable
  }
  const ReferenceProblem p = random_problem(preset("kda").rule, o);
  EXPECT_EQ(p.in.g, random_problem(preset("kda").rule, o).in.g);
  EXPECT_GT(std::count(p.in.g.begin(), p.in.g.end(), -std::numeric_limits<double>::infinity()), 0);
  EXPECT_GT(std::count(p.in.g.begin(), p.in.g.end(), -1e4), 0);
  EXPECT_GT(std::count(p.in.g.begin(), p.in.g.end(), 0), 0);
  o.seed = 2;
  EXPECT_NE(p.in.q, random_problem(preset("kda").rule, o).in.q);
}

void expect_refused(const ReferenceProblem& p, const std::string& text) {
  for (const bool backward : {false, true}) {
    try {
      if (backward) {
        p.backward();
      } else {
        p.forward();
      }
      ADD_FAILURE() << "expected an error that says: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  }
}

TEST(Reference, RefusesWhatDoesNotFit) {
  const ReferenceProblem good = random_problem(preset("gated_deltanet").rule, {});
  ReferenceProblem p = good;
  p.in.beta.clear();
  expect_refused(p, "beta: expected 16");
  p = good;
  p.in.lambda = {0.5};
  expect_refused(p, "lambda: expected 0");
  p = good;
  p.in.initial_state.pop_back();
  expect_refused(p, "initial_state: expected 64");
  p = good;
  p.shape.HV = 3;
  p.shape.H = 2;
  expect_refused(p, "HV a multiple of H");
  p = good;
  p.shape.erase_heads = 7;
  expect_refused(p, "erase_heads");
  p = good;
  p.d.o.pop_back();
  EXPECT_THROW(p.backward(), Error);
}

TEST(Reference, NoTokensKeepTheState) {
  ProblemOptions o;
  o.sequences = SeqLayout::uniform(2, 0);
  for (const Preset& named : presets()) {
    const ReferenceProblem p = random_problem(named.rule, o);
    const ReferenceOutputs out = p.forward();
    EXPECT_TRUE(out.o.empty());
    EXPECT_EQ(out.final_state, p.in.initial_state);
    EXPECT_EQ(out.final_precond, p.in.initial_precond);
    EXPECT_EQ(p.backward().initial_state, p.d.final_state);
    EXPECT_EQ(p.backward().initial_precond, p.d.final_precond);
  }
}

// Zero keys and queries: no division by zero, nothing written.
TEST(Reference, ZeroVectorsAreFinite) {
  for (const char* text : {"gated_deltanet", "gated_deltanet norm_eps=0", "kaczmarz", "kaczmarz gain_eps=0 norm_eps=0",
                           "qdelta norm_eps=0"}) {
    ReferenceProblem p = random_problem(parse_rule(text), {});
    std::fill(p.in.q.begin(), p.in.q.end(), 0.0);
    std::fill(p.in.k.begin(), p.in.k.end(), 0.0);
    const ReferenceOutputs out = p.forward();
    EXPECT_EQ(out.o, std::vector<double>(out.o.size(), 0.0)) << text;
    const ReferenceInputs d = p.backward();
    for (const auto& field : reference_input_fields()) {
      for (double value : d.*field.values) ASSERT_TRUE(std::isfinite(value)) << text << " " << field.name;
    }
  }
}

}  // namespace
}  // namespace fw
