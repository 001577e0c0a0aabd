// Every quantity of one token, computed by hand: K = V = 2, one head, raw keys unless a test says otherwise.
//     S before: [2 0; 0 4]   k = [2 0]   q = [1 1]   v = [0 3]   beta = 1/4   lambda = 1/2   exp(g) = 1/2
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "analyze/analyzer.h"

namespace fw::testing {
namespace {

class OneToken {
 public:
  explicit OneToken(const std::string& text) : rule_(parse_rule(text)), analyzer_({}, 1) {
    RecurrenceInputs<double> in;
    const auto row = [](std::vector<double>& x) { return Mat<double>(x.data(), 1, static_cast<int64_t>(x.size())); };
    in.q = row(q_);
    in.k = row(k_);
    in.v = row(v_);
    if (rule_.uses_g()) in.g = row(rule_.decay == Decay::kChannel ? g_channel_ : g_);
    if (rule_.uses_beta()) in.beta = row(beta_);
    if (rule_.uses_lambda()) in.lambda = row(lambda_);
    if (rule_.uses_erase_gate()) in.erase_gate = row(erase_);
    if (rule_.uses_write_gate()) in.write_gate = row(write_);
    if (rule_.uses_precond()) {
      in.precond_g = row(precond_g_);
      in.precond_beta = row(precond_beta_);
      in.precond_center = &center_;
      in.a = a_.data();
    }
    in.s = s_.data();
    analyzer_.begin_layer(0);
    analyzer_.recurrence({rule_, layout_, 1, 1, 2, 2, in, row(o_)});
  }
  const Distribution& operator[](Quantity q) const { return analyzer_.layers()[0].of(q)[0]; }
  bool has(Quantity q) const { return !analyzer_.layers()[0].of(q).empty(); }
  const HeadAnalysis& head() const { return analyzer_.layers()[0].value_heads[0]; }
  const KeyHeadAnalysis& key_head() const { return analyzer_.layers()[0].key_heads[0]; }

 private:
  Rule rule_;
  std::vector<double> q_{1, 1}, k_{2, 0}, v_{0, 3}, o_{0, 0}, s_{2, 0, 0, 4};
  std::vector<double> g_{std::log(0.5)}, g_channel_{std::log(0.5), std::log(0.25)}, beta_{0.25}, lambda_{0.5};
  std::vector<double> erase_{0.5, 0.25}, write_{0.125, 0.5}, precond_g_{std::log(0.5)}, precond_beta_{0.5}, a_{1, 3};
  double center_ = 0.1;
  SeqLayout layout_{{0, 1}};
  Analyzer<double> analyzer_;
};

void expect_value(const OneToken& token, Quantity q, double expected) {
  ASSERT_TRUE(token.has(q)) << info(q).name;
  EXPECT_EQ(token[q].count(), 1) << info(q).name;
  EXPECT_NEAR(token[q].mean(), expected, 1e-12) << info(q).name;
}

// Sbar = [1 0; 0 2]   e = [5/8 1/8]   f = [1/8 1/8]   z = [0 3/4]   u = [-5/8 1/2]   S = [-1/4 1; 0 2]
TEST(Quantities, OfQueryFeedback) {
  const OneToken token("decay=scalar gain=gate feedback=learned");
  expect_value(token, Quantity::kDecay, 0.5);
  expect_value(token, Quantity::kBeta, 0.25);
  expect_value(token, Quantity::kGain, 0.25);
  expect_value(token, Quantity::kLambda, 0.5);
  expect_value(token, Quantity::kEigenvalue, 1 - 2 * 5.0 / 8);
  expect_value(token, Quantity::kKeyWrite, 4);
  expect_value(token, Quantity::kCosKeyRead, 2 / std::sqrt(0.25 + 4));        // S^T k = [-1/2 2]
  expect_value(token, Quantity::kCosQueryRead, 3 / std::sqrt(1 / 16.0 + 9));  // S^T q = [-1/4 3]
  expect_value(token, Quantity::kEffectiveStep, 0.25 * (1 + 0.5 * 2 / 4));    // s (k.k + lambda q.k) / |k|^2
  const double feedback = std::sqrt(1 / 64.0 + 1 / 16.0);
  expect_value(token, Quantity::kFeedback, feedback);
  expect_value(token, Quantity::kFeedbackToKey, feedback / 0.5);
  expect_value(token, Quantity::kFeedbackToWrite, feedback / std::sqrt(25 / 64.0 + 0.25));
  expect_value(token, Quantity::kCosPriorReads, 2 / std::sqrt(4 + 16.0));  // S before: S^T q = [2 4], S^T k = [4 0]
  EXPECT_EQ(token[Quantity::kDiscrepancy].count(), 0) << "the first token has none before it";
  expect_value(token, Quantity::kStateNorm, std::sqrt(1 / 16.0 + 1 + 4));
  EXPECT_FALSE(token.has(Quantity::kEraseGate) || token.has(Quantity::kWriteGate) || token.has(Quantity::kPrecond));
  // Of S = [-1/4 1; 0 2]: sigma1 sigma2 = |det| = 1/2, sigma1^2 + sigma2^2 = |S|^2 = 81/16.
  const double sum = std::sqrt(81 / 16.0 + 1), difference = std::sqrt(81 / 16.0 - 1), p = (sum + difference) / 2 / sum;
  expect_value(token, Quantity::kEffectiveRank, std::exp(-p * std::log(p) - (1 - p) * std::log(1 - p)));
  EXPECT_EQ(token.head().state_norm.sum.size(), 1u);
}

TEST(Quantities, GainsAsTheyAreApplied) {
  const auto expect_gain = [](const std::string& rule, double s) {
    const OneToken token(rule);
    expect_value(token, Quantity::kGain, s);
    expect_value(token, Quantity::kKeyWrite, 4);  // whatever factor goes from one stream to another
    expect_value(token, Quantity::kEigenvalue, 1 - s * 4);
  };
  expect_gain("gain=kaczmarz gain_eps=0", 0.25 / 4);
  expect_gain("gain=kaczmarz gain_eps=0.5", 0.25 / 4.5);
  expect_gain("gain=nlms gain_eps=0", 1.0 / 4);
  expect_gain("gain=longhorn", 0.25 / (1 + 0.25 * 4));
  expect_gain("gain=efla", (1 - std::exp(-1.0)) / 4);
  EXPECT_FALSE(OneToken("gain=nlms").has(Quantity::kBeta));
}

TEST(Quantities, ChannelGates) {
  const OneToken token("decay=channel erase=channel write=channel");
  for (const auto& [q, low, high] : {std::tuple{Quantity::kDecay, 0.25, 0.5},
                                     {Quantity::kEraseGate, 0.25, 0.5},
                                     {Quantity::kWriteGate, 0.125, 0.5}}) {
    EXPECT_EQ(token[q].count(), 2);
    EXPECT_NEAR(token[q].min(), low, 1e-15);
    EXPECT_NEAR(token[q].max(), high, 1e-15);
  }
  expect_value(token, Quantity::kEigenvalue, 1 - 0.5 * 4);
  // z = [0 3/2], Sbar^T e = [1 0] with Sbar = [1 0; 0 1], e = [1 0]: S = [-1 3; 0 1], S^T k = [-2 6].
  expect_value(token, Quantity::kCosKeyRead, 6 / std::sqrt(40.0));
  EXPECT_FALSE(token.has(Quantity::kGain));
}

// A = [1/2 + 1/2 4, 3/2]
TEST(Quantities, Preconditioner) {
  const auto y = [](double a) { return std::log(a + 1e-6) - 0.1; };
  const auto m = [&](double a) { return std::pow(1.5, -y(a) / (1 + std::abs(y(a)))); };
  for (const std::string rule : {"gain=gate precond=diagonal", "update=additive gain=gate precond=read"}) {
    const OneToken token(rule);
    expect_value(token, Quantity::kPrecondDecay, 0.5);
    expect_value(token, Quantity::kPrecondGain, 0.5);
    EXPECT_NEAR(token[Quantity::kPrecondRaw].max(), y(2.5), 1e-12);
    EXPECT_NEAR(token[Quantity::kPrecondRaw].min(), y(1.5), 1e-12);
    EXPECT_NEAR(token[Quantity::kPrecond].min(), m(2.5), 1e-12);
    EXPECT_NEAR(token[Quantity::kPrecond].max(), m(1.5), 1e-12);
    EXPECT_NEAR(token[Quantity::kPrecondTanh].min(), std::pow(1.5, -std::tanh(y(2.5))), 1e-12);
    EXPECT_NEAR(token[Quantity::kPrecondTanh].max(), std::pow(1.5, -std::tanh(y(1.5))), 1e-12);
    ASSERT_EQ(token.key_head().saturation.sum.size(), 1u);
    const auto share = [&](double a) { return std::abs(y(a)) / (1 + std::abs(y(a))); };
    EXPECT_NEAR(token.key_head().saturation.mean(0), (share(2.5) + share(1.5)) / 2, 1e-12);
    EXPECT_EQ(token.key_head().center, 0.1);
    expect_value(token, Quantity::kKeyWrite, rule.starts_with("gain") ? 4 * m(2.5) : 4);
  }
  expect_value(OneToken("gain=gate precond=diagonal"), Quantity::kEigenvalue, 1 - 0.25 * 4 * m(2.5));
  EXPECT_FALSE(OneToken("update=additive gain=gate precond=read").has(Quantity::kEigenvalue));
}

// Unit keys: k and q are those after the normalisation.
TEST(Quantities, AfterNormalisation) {
  const OneToken token("gain=gate feedback=learned q_norm=l2 k_norm=l2 norm_eps=0");
  expect_value(token, Quantity::kKeyWrite, 1);
  expect_value(token, Quantity::kEigenvalue, 1 - 0.25 * (1 + 0.5 / std::sqrt(2.0)));
  expect_value(token, Quantity::kEffectiveStep, 0.25 * (1 + 0.5 / std::sqrt(2.0)));
}

// Two tokens of Q-Delta's Theorem 3.2, K = 2, V = 1, no decay, s = beta, x = k + lambda q. The second token against the
// first:
//     S before: [1; 0]   k = [1 0]   q = [0 1]   v = 2, 5   beta = 1/2, 1/4   lambda = 1, 1/2
//     x_1 = [1 1]: p_1 = 1, S_1 = [3/2; 0], S_1^T x_1 = 3/2        x_2 = [1 1/2]: p_2 = 3/2, dp = 0, dv = 3
TEST(Quantities, MovementOfTargetAndPrediction) {
  const Rule rule = parse_rule("gain=gate feedback=learned");
  std::vector<double> q{0, 1, 0, 1}, k{1, 0, 1, 0}, v{2, 5}, beta{0.5, 0.25}, lambda{1, 0.5}, s{1, 0}, o{0, 0};
  const auto measure = [&] {
    const auto rows = [](std::vector<double>& x) {
      return Mat<double>(x.data(), 2, static_cast<int64_t>(x.size()) / 2);
    };
    RecurrenceInputs<double> in;
    in.q = rows(q);
    in.k = rows(k);
    in.v = rows(v);
    in.beta = rows(beta);
    in.lambda = rows(lambda);
    in.s = s.data();
    Analyzer<double> analyzer({}, 1);
    const SeqLayout layout{{0, 2}};
    analyzer.begin_layer(0);
    analyzer.recurrence({rule, layout, 1, 1, 2, 1, in, rows(o)});
    return analyzer.take();
  };
  const auto expect = [](const std::vector<LayerAnalysis>& layers, Quantity quantity, double value) {
    EXPECT_EQ(layers[0].of(quantity)[0].count(), 1);
    EXPECT_NEAR(layers[0].of(quantity)[0].mean(), value, 1e-12) << info(quantity).name;
  };
  const std::vector<LayerAnalysis> still = measure();
  expect(still, Quantity::kTargetMove, 3);
  expect(still, Quantity::kPredictionMove, 0);
  expect(still, Quantity::kDiscrepancy, 3);
  // Key and query exchanged at the second token.
  k[2] = 0, k[3] = 1, q[2] = 1, q[3] = 0;
  const std::vector<LayerAnalysis> moved = measure();  // x_2 = [1/2 1]: p_2 = 3/4, dp = -3/4
  expect(moved, Quantity::kPredictionMove, 0.75);
  expect(moved, Quantity::kDiscrepancy, 3.75);
}

}  // namespace
}  // namespace fw::testing
