// What step_bound says of a composition, against its step: of a bounded one no inputs that keep to it leave the range, of another some do.
#include "rule/step_bound.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "base/random.h"
#include "rule/rule.h"

namespace fw {
namespace {

using Vector = std::array<double, 2>;

double dot(const Vector& a, const Vector& b) { return a[0] * b[0] + a[1] * b[1]; }

// A step's inputs at the edges and inside of what a rule's gates allow, written from the formulas of docs/recurrence.md.
class Step {
 public:
  Step(const Rule& rule, Random& random) : rule_(rule), random_(random) {}

  // The eigenvalue of random inputs.
  double eigenvalue() { return (rule_.erases_before_decay() ? edge(1) : 1) - product(); }

 private:
  // e.w of random inputs.
  double product() {
    const Vector q = vector(rule_.q_norm), k = vector(rule_.k_norm), p = vector(rule_.k_norm);
    const Vector all = preconditioner(), m = rule_.preconditions_write() ? all : Vector{1, 1};
    const double k2 = dot(k, k), kmk = k[0] * k[0] * all[0] + k[1] * k[1] * all[1];
    const double n = normaliser(kmk);
    Vector w{k[0] * m[0] * n, k[1] * m[1] * n};
    const double lambda = rule_.feedback == Feedback::kNone ? 0 : rule_.feedback == Feedback::kFixed ? rule_.lambda : edge(1);
    const double s = gain(k2, kmk), b = edge(rule_.gain_bound), other = edge(rule_.gain_bound);
    const Vector& key = rule_.erase_key == EraseKey::kOwn ? p : k;
    double sum = 0;
    for (size_t i = 0; i < 2; ++i) {
      if (rule_.uses_erase_write()) w[i] = 4 * edge(1) - 2;  // f takes any value
      const double gate = rule_.erase == Gate::kTied ? s : rule_.erase == Gate::kChannel && i == 1 ? other : b;
      sum += gate * (key[i] + lambda * q[i]) * w[i];
    }
    return sum;
  }

  double uniform() { return static_cast<double>(random_.below(1 << 20)) / (1 << 20); }
  double edge(double top) {
    const uint64_t kind = random_.below(3);
    return kind == 0 ? 0 : kind == 1 ? top : top * uniform();
  }
  Vector vector(Norm norm) {
    // Keys that norm_eps does not shorten, where the bound of a feedback asks for it.
    const double low = rule_.feedback == Feedback::kNone ? -5 : -1.5, size = std::pow(10, low + (2 - low) * uniform()), angle = 6.2831853071795865 * uniform();
    Vector x{size * std::cos(angle), size * std::sin(angle)};
    if (norm == Norm::kRaw) return x;
    const double factor = 1 / std::sqrt(dot(x, x) + rule_.norm_eps);
    return {x[0] * factor, x[1] * factor};
  }
  Vector preconditioner() {
    Vector m{1, 1};
    if (!rule_.uses_precond()) return m;
    for (double& value : m) {
      const double s = 2 * edge(1) - 1, x = rule_.precond_x;  // in [-1, 1]
      switch (rule_.precond_form) {
        case PrecondForm::kSquash:
          value = std::pow(x, -s);
          break;
        case PrecondForm::kSquashLow:
          value = std::pow(x, -(1 + s) / 2);
          break;
        case PrecondForm::kSquashHigh:
          value = std::pow(x, (1 - s) / 2);
          break;
        case PrecondForm::kInverse:
        case PrecondForm::kInversePrevious:
          value = 1 / (std::pow(10, 8 * edge(1)) - 1 + rule_.precond_ridge);
      }
    }
    return m;
  }
  double normaliser(double kmk) {
    if (rule_.preconditions_read() || rule_.normaliser == Normaliser::kNone) return 1;
    if (rule_.normaliser == Normaliser::kKey) return 1 / kmk;
    if (rule_.normaliser == Normaliser::kOnePlus) return 1 / (1 + kmk);
    const double alpha = std::pow(10, -12 * edge(1)), beta = std::max(edge(1), 1e-9);
    return beta / (alpha + beta * kmk);
  }
  double gain(double k2, double kmk) {
    const double beta = edge(rule_.gain_bound);
    switch (rule_.gain) {
      case Gain::kOne:
        return 1;
      case Gain::kGate:
        return beta;
      case Gain::kKaczmarz:
        return beta / (k2 + rule_.gain_eps);
      case Gain::kNlms:
        return 1 / (k2 + rule_.gain_eps);
      case Gain::kLonghorn:
        return beta / (1 + beta * k2);
      case Gain::kPrecondLonghorn:
        return beta / (1 + beta * kmk);
      case Gain::kEfla:
        return -std::expm1(-beta * k2) / k2;
    }
    return 0;
  }

  const Rule& rule_;
  Random& random_;
};

TEST(StepBound, HoldsForBoundedCompositionsAndOthersLeaveIt) {
  Random random(11);
  int bounded = 0, unbounded = 0;
  for (int round = 0; round < 2500; ++round) {
    Rule rule;
    for (const AxisInfo& axis : rule_axes()) axis.set(rule, static_cast<int>(random.below(axis.values.size())));
    rule.solve = Solve::kOnline;
    if (random.below(2) == 0) rule.erase_key = EraseKey::kTied;
    if (random.below(2) == 0) rule.feedback = Feedback::kNone;
    if (random.below(4) != 0) rule.erase_write = EraseWrite::kTied;  // none with another is bounded
    rule.gain_bound = random.below(2) == 0 ? 1 : 2;
    rule.precond_x = rule.gain_bound > 1 ? 1 : 1.5;
    if (random.below(4) == 0) rule.lambda = 1;
    try {
      validate(rule);
    } catch (const std::exception&) {
      continue;
    }
    const StepBound bound = step_bound(rule);
    Step step(rule, random);
    double least = 1, most = 1;
    for (int i = 0; i < 4000 && (bound.bounded || (least >= -1 - 1e-9 && most <= 1 + 1e-9)); ++i) {
      const double eigenvalue = step.eigenvalue();
      least = std::min(least, eigenvalue);
      most = std::max(most, eigenvalue);
    }
    if (bound.bounded) {
      ++bounded;
      const double slack = rule.feedback == Feedback::kNone ? 1e-9 : 2e-2;
      EXPECT_GE(least, bound.low - slack) << to_string(rule) << ": " << describe(bound);
      EXPECT_LE(most, bound.high + slack) << to_string(rule) << ": " << describe(bound);
      EXPECT_GE(bound.low, -1) << to_string(rule);
    } else {
      ++unbounded;
      // With the decay between erase and write the range is what can be shown, not what is reached.
      EXPECT_TRUE(rule.erases_before_decay() || least < -1 || most > 1) << to_string(rule) << ": " << describe(bound);
      EXPECT_FALSE(bound.reason.empty());
    }
  }
  EXPECT_GT(bounded, 300);
  EXPECT_GT(unbounded, 300);
}

TEST(StepBound, OfTheNamedRules) {
  for (const Preset& p : presets()) {
    const StepBound bound = step_bound(p.rule);
    EXPECT_EQ(bound.bounded, !p.rule.uses_erase_write()) << p.name << ": " << describe(bound);
  }
  EXPECT_EQ(step_bound(preset("deltanet").rule).low, 0);
  EXPECT_EQ(step_bound(preset("deltanet_neg").rule).low, -1);
  EXPECT_TRUE(step_bound(preset("deltanet").rule).symmetric);
  EXPECT_FALSE(step_bound(preset("gated_deltanet2").rule).symmetric);
  EXPECT_FALSE(step_bound(parse_rule("qdelta gain_bound=2")).bounded);
  EXPECT_FALSE(step_bound(parse_rule("precond=diagonal gain=gate")).bounded);
  EXPECT_FALSE(step_bound(parse_rule("deltanet erase_key=own")).bounded);
  EXPECT_EQ(step_bound(parse_rule("gated_deltanet erase_state=previous")).low, -1);
  EXPECT_FALSE(step_bound(parse_rule("gated_deltanet_neg erase_state=previous")).bounded);
  EXPECT_EQ(step_bound(parse_rule("deltanet erase_state=previous")).low, 0);  // no decay
}

}  // namespace
}  // namespace fw
