// What step_bound promises of a rule, against the steps that the rule's own coefficients (front.h) make of sampled
// keys, gates and preconditioners. A value that is added to an axis is sampled by itself.
#include "rule/step_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"
#include "rule/front.h"
#include "rule/precond.h"
#include "rule/rule.h"
#include "support/left_out.h"

namespace fw {
namespace {

using Vector = std::array<double, 2>;

double dot(const Vector& a, const Vector& b) { return a[0] * b[0] + a[1] * b[1]; }

// The largest singular value of the matrix of rows (a, b) and (c, d).
double norm_of(double a, double b, double c, double d) {
  return (std::hypot(a + d, b - c) + std::hypot(a - d, b + c)) / 2;
}

struct Step {
  double low, high;  // the eigenvalues of the step that are not those of the decay, as far as step_bound speaks of them
  double norm;       // of the step
  double decay;      // its largest
};

// Draws the inputs of a token at the edges and inside of what a rule's gates allow.
class Sampler {
 public:
  explicit Sampler(uint64_t seed) : random_(seed) {}

  Step step(const Rule& rule) {
    const Vector q = vector(rule.feedback), k = vector(rule.feedback), p = vector(rule.feedback),
                 m = preconditioner(rule);
    FrontScalars<double> x;
    x.q2 = dot(q, q), x.k2 = dot(k, k), x.p2 = dot(p, p);
    x.kmk = k[0] * k[0] * m[0] + k[1] * k[1] * m[1];
    x.beta = edge(rule.gain_bound);
    if (!rule.uses_beta()) x.beta = 1;
    x.lambda = rule.feedback == Feedback::kNone ? 0 : rule.feedback == Feedback::kFixed ? rule.lambda : edge(1);
    const Vector gates{edge(rule.gain_bound), edge(rule.gain_bound)};
    x.erase = rule.erase == Gate::kAveraged ? (gates[0] + gates[1]) / 2 : rule.erase == Gate::kScalar ? gates[0] : 1;
    x.write = edge(1);
    x.alpha_p = std::pow(10, -12 * edge(1)), x.beta_p = std::max(edge(1), 1e-9);
    const FrontCoefs<double> c = front_coefs(rule, 1.0, x);
    const double f = erase_write_factor(rule, x);
    Vector e, w, decay;
    for (size_t i = 0; i < 2; ++i) {
      e[i] = c.e_k * k[i] + c.e_q * q[i] + c.e_p * p[i];
      if (rule.erase == Gate::kChannel) e[i] *= gates[i];
      w[i] = c.w_k * k[i] * (rule.preconditions_write() ? m[i] : 1);
      if (rule.uses_erase_write()) w[i] = f * (4 * edge(1) - 2);  // a vector of its own takes any value
      decay[i] = rule.decay == Decay::kNone ? 1 : edge(1);
    }
    if (rule.decay != Decay::kChannel) decay[1] = decay[0];
    const double most = std::max(decay[0], decay[1]), along = dot(e, w);
    if (rule.erases_before_decay()) {
      // Diag(decay) - w e^T: its eigenvalues, where they are real.
      const double a = decay[0] - w[0] * e[0], b = -w[0] * e[1], d = -w[1] * e[0], g = decay[1] - w[1] * e[1];
      const double middle = (a + g) / 2, root = std::sqrt(std::max(0.0, (a - g) * (a - g) / 4 + b * d));
      return {middle - root, middle + root, norm_of(a, b, d, g), most};
    }
    return {1 - along, 1 - along,
            norm_of((1 - w[0] * e[0]) * decay[0], -w[0] * e[1] * decay[1], -w[1] * e[0] * decay[0],
                    (1 - w[1] * e[1]) * decay[1]),
            most};
  }

 private:
  double uniform() { return static_cast<double>(random_.below(1 << 20)) / (1 << 20); }
  double edge(double top) {
    const uint64_t kind = random_.below(3);
    return kind == 0 ? 0 : kind == 1 ? top : top * uniform();
  }
  // Raw vectors of all lengths. With feedback: only those that norm_eps does not shorten, which the promise of such a
  // rule names.
  Vector vector(Feedback feedback) {
    const double low = feedback == Feedback::kNone ? -5 : -1.5, size = std::pow(10, low + (3 - low) * uniform()),
                 angle = 6.2831853071795865 * uniform();
    return {size * std::cos(angle), size * std::sin(angle)};
  }
  // Of gram numbers A from 0 to 10^8 and centers on both sides.
  Vector preconditioner(const Rule& rule) {
    Vector m{1, 1};
    if (!rule.uses_precond()) return m;
    const PrecondMap<double> map = precond_map<double>(rule, std::log(rule.precond_x), 10 * (2 * uniform() - 1));
    for (double& value : m)
      value =
          PrecondElements<PlainMath<double>>::value(map, random_.below(4) == 0 ? 0 : std::pow(10, 16 * uniform() - 8));
    return m;
  }

  Random random_;
};

// Every value of the axes that a step depends on, the others as they are by default.
std::vector<Rule> compositions() {
  std::vector<Rule> rules{Rule{}};
  for (const AxisInfo& axis : rule_axes()) {
    if (axis.name == "write" || axis.name == "read" || axis.name == "key_source" || axis.name == "update") continue;
    std::vector<Rule> wider;
    for (const Rule& rule : rules) {
      for (size_t value = 0; value < axis.values.size(); ++value) {
        Rule next = rule;
        axis.set(next, static_cast<int>(value));
        // Nothing depends on the form without a preconditioner, and erase vectors of their own are promised nothing
        // whatever else there is.
        if (next.precond == Precond::kNone && next.precond_form != PrecondForm::kSquash) continue;
        if (next.erase_write == EraseWrite::kOwn && next.precond != Precond::kNone) continue;
        wider.push_back(next);
      }
    }
    rules = std::move(wider);
  }
  return rules;
}

// Compositions of all axes, for gates up to 1 and up to 2: no step leaves the range that is promised, and where none is
// promised some step leaves [-1, 1].
TEST(StepBound, HoldsForEveryCompositionAndOthersLeaveIt) {
  int64_t bounded = 0, unbounded = 0, shrinking = 0, steps = 0, turn = 0;
  for (const Rule& composition : compositions()) {
    if (testing::left_out(++turn, 11)) continue;
    Sampler sampler(11);
    for (const double most : {1.0, 2.0}) {
      Rule rule = composition;
      rule.gain_bound = most;
      if (most > 1) rule.precond_x = 1;
      try {
        validate(rule);
      } catch (const std::exception&) {
        continue;
      }
      const StepBound bound = step_bound(rule);
      double least = std::numeric_limits<double>::infinity(), top = -least, excess = -least;
      // Enough to leave [-1, 1], where that can be: most samples do it at once.
      const int samples = bound.bounded || rule.erases_before_decay() ? 100 : 30000;
      for (int i = 0; i < samples && (bound.bounded || (least >= -1 - 1e-9 && top <= 1 + 1e-9)); ++i) {
        const Step step = sampler.step(rule);
        least = std::min(least, step.low), top = std::max(top, step.high);
        excess = std::max(excess, step.norm - step.decay);
        ++steps;
      }
      if (bound.bounded) {
        ++bounded;
        // feedback: for keys much longer than norm_eps's root
        const double slack = rule.feedback == Feedback::kNone ? 1e-9 : 2e-2;
        EXPECT_GE(least, bound.low - slack) << to_string(rule) << ": " << describe(bound);
        EXPECT_LE(top, bound.high + slack) << to_string(rule) << ": " << describe(bound);
        EXPECT_GE(bound.low, -1) << to_string(rule);
        if (bound.shrinks_by_decay) {
          ++shrinking;
          EXPECT_LE(excess, 1e-9) << to_string(rule) << ": a step is larger than its largest decay";
        }
      } else {
        ++unbounded;
        EXPECT_FALSE(bound.shrinks_by_decay) << to_string(rule);
        // An erase before the decay has eigenvalues that are shown, not reached.
        EXPECT_TRUE(rule.erases_before_decay() || least < -1 || top > 1) << to_string(rule) << ": " << describe(bound);
        EXPECT_FALSE(bound.reason.empty());
      }
    }
  }
  RecordProperty("bounded", std::to_string(bounded));
  RecordProperty("unbounded", std::to_string(unbounded));
  std::printf("%lld rules promise a bound (%lld of them to shrink by the decay), %lld do not; %lld steps\n",
              static_cast<long long>(bounded), static_cast<long long>(shrinking), static_cast<long long>(unbounded),
              static_cast<long long>(steps));
  EXPECT_GT(bounded, 1000);
  EXPECT_GT(shrinking, 100);
  EXPECT_GT(unbounded, 1000);
}

// A value outside the enums, as a new one is for code that was forgotten, is promised nothing.
TEST(StepBound, UnknownValuesArePromisedNothing) {
  const auto of = [](auto set) {
    Rule rule = preset("gated_deltanet").rule;
    set(rule);
    return step_bound(rule);
  };
  EXPECT_FALSE(of([](Rule& r) { r.gain = static_cast<Gain>(99); }).bounded);
  EXPECT_FALSE(of([](Rule& r) { r.gain = static_cast<Gain>(99), r.k_norm = Norm::kRaw; }).bounded);
  EXPECT_FALSE(of([](Rule& r) { r.erase_key = static_cast<EraseKey>(99); }).bounded);
  EXPECT_FALSE(of([](Rule& r) { r.erase_write = static_cast<EraseWrite>(99); }).bounded);
  EXPECT_FALSE(of([](Rule& r) { r.feedback = static_cast<Feedback>(99); }).bounded);
  EXPECT_FALSE(of([](Rule& r) { r.precond = static_cast<Precond>(99); }).bounded);
  EXPECT_FALSE(
      of([](Rule& r) { r.precond = Precond::kDiagonal, r.precond_form = static_cast<PrecondForm>(99); }).bounded);
  EXPECT_FALSE(of([](Rule& r) { r.normaliser = static_cast<Normaliser>(99); }).bounded);
  EXPECT_FALSE(of([](Rule& r) { r.decay = static_cast<Decay>(99); }).bounded);
  EXPECT_FALSE(of([](Rule& r) { r.erase = static_cast<Gate>(99); }).shrinks_by_decay);
  EXPECT_FALSE(of([](Rule& r) { r.erase_state = static_cast<EraseState>(99); }).shrinks_by_decay);
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
  EXPECT_FALSE(step_bound(parse_rule("gated_deltanet erase_state=previous")).shrinks_by_decay);
  EXPECT_FALSE(step_bound(parse_rule("gated_deltanet_neg erase_state=previous")).bounded);
  EXPECT_EQ(step_bound(parse_rule("deltanet erase_state=previous")).low, 0);  // no decay
  EXPECT_TRUE(step_bound(preset("kda_neg").rule).shrinks_by_decay);
  EXPECT_TRUE(step_bound(preset("gla").rule).shrinks_by_decay);
}

}  // namespace
}  // namespace fw
