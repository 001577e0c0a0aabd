// Rules that coincide on a part of their inputs (recurrence.md section 2): outputs and gradients agree there.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/recurrence.h"

namespace fw {
namespace {

using testing::close;
using testing::describe;

constexpr double kRounding = 1e-12;

ProblemOptions options(uint64_t seed) {
  ProblemOptions o;
  o.sequences = SeqLayout({0, 9, 9, 30});
  o.H = 2;
  o.HV = 4;
  o.K = 8;
  o.V = 6;
  o.gates_per_value_head = true;
  o.seed = seed;
  return o;
}

// Each value `count` times in a row: a scalar gate as a channel gate.
std::vector<double> repeated(const std::vector<double>& x, int64_t count) {
  std::vector<double> y;
  for (double value : x) y.insert(y.end(), static_cast<size_t>(count), value);
  return y;
}

// The adjoint of repeated.
std::vector<double> summed(const std::vector<double>& x, int64_t count) {
  std::vector<double> y(x.size() / static_cast<size_t>(count), 0.0);
  for (size_t i = 0; i < x.size(); ++i) y[i / static_cast<size_t>(count)] += x[i];
  return y;
}

// The problem's inputs under another rule: those that it does not use are dropped.
ReferenceProblem with_rule(ReferenceProblem p, const Rule& rule) {
  p.rule = rule;
  for (const auto& field : reference_input_fields()) {
    if (field.count(rule, p.shape) == 0) (p.in.*field.values).clear();
  }
  for (const auto& field : reference_output_fields()) {
    if (field.count(rule, p.shape) == 0) (p.d.*field.values).clear();
  }
  return p;
}

void expect_same(const ReferenceProblem& p, const ReferenceProblem& expected, const ReferenceInputs& gradients) {
  SCOPED_TRACE(describe(p) + " as " + describe(expected));
  EXPECT_TRUE(close(p.forward(), expected.forward(), kRounding));
  EXPECT_TRUE(close(gradients, expected.backward(), kRounding));
}

// Comba's erase before the decay is one after it whose gate is divided by the decay. With the gate alpha beta and
// nothing taken from the query that is gated_deltanet.
TEST(Reduction, CombaErasesAfterTheDecayWithItsGateOverIt) {
  const ReferenceProblem p = random_problem(parse_rule("comba"), options(48));
  ReferenceProblem after = p;
  after.rule = parse_rule("comba erase_state=decayed");
  for (size_t i = 0; i < p.in.g.size(); ++i) after.in.erase_gate[i] /= std::exp(p.in.g[i]);
  EXPECT_TRUE(close(p.forward(), after.forward(), kRounding));
  const ReferenceInputs found = p.backward();
  ReferenceInputs d = after.backward();
  for (size_t i = 0; i < p.in.g.size(); ++i) {
    d.g[i] -= d.erase_gate[i] * after.in.erase_gate[i];
    d.erase_gate[i] /= std::exp(p.in.g[i]);
  }
  EXPECT_TRUE(close(found, d, 1e-11));

  ReferenceProblem gated = p, plain = p;
  plain.in.read_correction.assign(plain.in.read_correction.size(), 0.0);
  for (size_t i = 0; i < p.in.g.size(); ++i) plain.in.erase_gate[i] = std::exp(p.in.g[i]) * p.in.beta[i];
  gated.rule = parse_rule("gated_deltanet");
  gated.in.erase_gate.clear(), gated.in.read_correction.clear();
  EXPECT_TRUE(close(plain.forward(), gated.forward(), kRounding));
}

// DPLR as two tokens of a rule that erases after its decay: the first decays and erases with p / exp(g) along f, the
// second writes.
TEST(Reduction, DplrIsTwoTokensOfARuleThatErasesAfterItsDecay) {
  ProblemOptions o = options(47);
  o.sequences = SeqLayout({0, 9, 9, 23});
  o.HV = o.H;
  o.gates_per_value_head = false;
  const ReferenceProblem p = random_problem(parse_rule("dplr"), o);
  ReferenceProblem two = p;
  two.rule = parse_rule("decay=channel erase_key=own");
  two.shape.sequences = SeqLayout({0, 18, 18, 46});
  const size_t row = static_cast<size_t>(o.H * o.K), value_row = static_cast<size_t>(o.HV * o.V);
  two.in.erase_write.clear();
  for (std::vector<double>* x : {&two.in.q, &two.in.k, &two.in.g, &two.in.erase_key}) x->assign(2 * p.in.q.size(), 0.0);
  two.in.v.assign(2 * p.in.v.size(), 0.0);
  two.d.o.assign(2 * p.d.o.size(), 0.0);
  const auto put = [](std::vector<double>& to, const std::vector<double>& from, size_t width, size_t offset) {
    for (size_t i = 0; i < from.size(); ++i) to[(2 * (i / width) + offset) * width + i % width] = from[i];
  };
  std::vector<double> key(p.in.g.size());
  for (size_t i = 0; i < key.size(); ++i) key[i] = p.in.erase_key[i] / std::exp(p.in.g[i]);
  put(two.in.k, p.in.erase_write, row, 0);
  put(two.in.erase_key, key, row, 0);
  put(two.in.g, p.in.g, row, 0);
  put(two.in.q, p.in.q, row, 1);
  put(two.in.k, p.in.k, row, 1);
  put(two.in.v, p.in.v, value_row, 1);
  put(two.d.o, p.d.o, value_row, 1);

  const ReferenceOutputs out = two.forward();
  ReferenceOutputs expected{{}, out.final_state, {}};
  ReferenceInputs gradients;
  const auto taken = [](const std::vector<double>& from, size_t width, size_t offset) {
    std::vector<double> to(from.size() / 2);
    for (size_t i = 0; i < to.size(); ++i) to[i] = from[(2 * (i / width) + offset) * width + i % width];
    return to;
  };
  expected.o = taken(out.o, value_row, 1);
  EXPECT_TRUE(close(p.forward(), expected, kRounding));
  const ReferenceInputs d = two.backward();
  gradients = p.backward();
  EXPECT_LE(relative_error(gradients.erase_write, taken(d.k, row, 0)), kRounding);
  EXPECT_LE(relative_error(gradients.k, taken(d.k, row, 1)), kRounding);
  EXPECT_LE(relative_error(gradients.q, taken(d.q, row, 1)), kRounding);
  EXPECT_LE(relative_error(gradients.v, taken(d.v, value_row, 1)), kRounding);
  EXPECT_LE(relative_error(gradients.initial_state, d.initial_state), kRounding);
  std::vector<double> dp = taken(d.erase_key, row, 0), dg = taken(d.g, row, 0);
  for (size_t i = 0; i < dp.size(); ++i) {
    dg[i] -= dp[i] * key[i];
    dp[i] /= std::exp(p.in.g[i]);
  }
  EXPECT_LE(relative_error(gradients.erase_key, dp), kRounding);
  EXPECT_LE(relative_error(gradients.g, dg), 10 * kRounding);
}

// k = 1 - exp(g) as a tensor, in a rule that only writes with it and in one that erases with it.
TEST(Reduction, AKeyOfTheDecayIsThatKeyGiven) {
  for (const char* text : {"hgrn2", "decay=channel gain=kaczmarz feedback=learned key_source=decay q_norm=l2"}) {
    ReferenceProblem given = random_problem(parse_rule(text), options(31));
    const ReferenceProblem p = given;
    given.rule.key_source = KeySource::kGiven;
    given.in.k.resize(p.in.g.size());
    for (size_t i = 0; i < p.in.g.size(); ++i) given.in.k[i] = -std::expm1(p.in.g[i]);
    SCOPED_TRACE(text);
    EXPECT_TRUE(close(p.forward(), given.forward(), kRounding));
    ReferenceInputs gradients = given.backward();
    for (size_t i = 0; i < p.in.g.size(); ++i) gradients.g[i] -= std::exp(p.in.g[i]) * gradients.k[i];
    gradients.k.clear();
    EXPECT_TRUE(close(p.backward(), gradients, kRounding));
  }
}

TEST(Reduction, ThePreconditionedImplicitStepWithoutMIsLonghorn) {
  const ReferenceProblem p = random_problem(parse_rule("precond_longhorn precond_x=1"), options(32));
  const ReferenceProblem longhorn = with_rule(p, preset("longhorn").rule);
  EXPECT_TRUE(
      close(with_rule(p, parse_rule("precond_longhorn precond=none")).forward(), longhorn.forward(), kRounding));
  EXPECT_LE(relative_error(p.forward().o, longhorn.forward().o), kRounding);
  EXPECT_TRUE(
      close(with_rule(p, parse_rule("precond_longhorn precond=none")).backward(), longhorn.backward(), kRounding));
}

TEST(Reduction, GatedDeltanet2WithEqualGatesIsKda) {
  const ReferenceProblem kda = random_problem(preset("kda").rule, options(1));
  ReferenceProblem p = with_rule(kda, preset("gated_deltanet2").rule);
  p.in.erase_gate = repeated(kda.in.beta, p.shape.K);
  p.in.write_gate = repeated(kda.in.beta, p.shape.V);
  ReferenceInputs gradients = p.backward();
  gradients.beta = summed(gradients.erase_gate, p.shape.K);
  const std::vector<double> write = summed(gradients.write_gate, p.shape.V);
  for (size_t i = 0; i < write.size(); ++i) gradients.beta[i] += write[i];
  expect_same(p, kda, gradients);
}

TEST(Reduction, GatedDeltanet2WithEqualGatesAndScalarDecayIsGatedDeltanet) {
  const ReferenceProblem gdn = random_problem(preset("gated_deltanet").rule, options(2));
  ReferenceProblem p = with_rule(gdn, preset("gated_deltanet2").rule);
  p.in.g = repeated(gdn.in.g, p.shape.K);
  p.in.erase_gate = repeated(gdn.in.beta, p.shape.K);
  p.in.write_gate = repeated(gdn.in.beta, p.shape.V);
  ReferenceInputs gradients = p.backward();
  gradients.g = summed(gradients.g, p.shape.K);
  gradients.beta = summed(gradients.erase_gate, p.shape.K);
  const std::vector<double> write = summed(gradients.write_gate, p.shape.V);
  for (size_t i = 0; i < write.size(); ++i) gradients.beta[i] += write[i];
  expect_same(p, gdn, gradients);
}

// A rule with channel decay whose channels are equal is the rule with scalar decay.
TEST(Reduction, EqualChannelsAreAScalarDecay) {
  const std::pair<const char*, const char*> pairs[] = {
      {"kda", "gated_deltanet"},
      {"gla", "mamba2"},
      {"precond_gated_deltanet decay=channel", "precond_gated_deltanet"},
      {"kaczmarz decay=channel", "kaczmarz"}};
  for (const auto& [channel, scalar] : pairs) {
    const ReferenceProblem expected = random_problem(parse_rule(scalar), options(3));
    ReferenceProblem p = with_rule(expected, parse_rule(channel));
    p.in.g = repeated(expected.in.g, p.shape.K);
    ReferenceInputs gradients = p.backward();
    gradients.g = summed(gradients.g, p.shape.K);
    expect_same(p, expected, gradients);
  }
}

TEST(Reduction, DecayOneIsNoDecay) {
  const std::pair<const char*, const char*> pairs[] = {
      {"gated_deltanet", "deltanet"}, {"kda", "deltanet"}, {"mamba2", "linear_attention"}, {"gla", "linear_attention"}};
  for (const auto& [decayed, plain] : pairs) {
    ReferenceProblem p = random_problem(preset(decayed).rule, options(4));
    for (double& g : p.in.g) g = 0;
    expect_same(p, with_rule(p, preset(plain).rule), p.backward());
  }
}

TEST(Reduction, RetnetIsMamba2WithItsConstantDecay) {
  const ReferenceProblem retnet = random_problem(preset("retnet").rule, options(5));
  ReferenceProblem p = with_rule(retnet, preset("mamba2").rule);
  for (int64_t t = 0; t < p.shape.sequences.tokens(); ++t) {
    for (int64_t h = 0; h < p.shape.HV; ++h)
      p.in.g.push_back(std::log1p(-std::pow(2.0, -5.0 - static_cast<double>(h))));
  }
  expect_same(p, retnet, p.backward());
}

TEST(Reduction, PreconditionerOfRangeOneIsNone) {
  const ReferenceProblem p = random_problem(parse_rule("precond_gated_deltanet precond_x=1"), options(6));
  const ReferenceProblem expected = with_rule(p, preset("gated_deltanet").rule);
  const ReferenceOutputs out = p.forward(), expected_out = expected.forward();
  EXPECT_LE(relative_error(out.o, expected_out.o), kRounding);
  EXPECT_LE(relative_error(out.final_state, expected_out.final_state), kRounding);
  ReferenceProblem no_precond_cotangent = p;  // A itself still depends on k
  no_precond_cotangent.d.final_precond.clear();
  EXPECT_TRUE(close(no_precond_cotangent.backward(), expected.backward(), kRounding));
}

TEST(Reduction, QueryFeedbackZeroIsGatedDeltanet) {
  ReferenceProblem p = random_problem(preset("qdelta").rule, options(7));
  for (double& lambda : p.in.lambda) lambda = 0;
  expect_same(p, with_rule(p, preset("gated_deltanet").rule), p.backward());
}

TEST(Reduction, GateOneIsGainOne) {
  ReferenceProblem p = random_problem(preset("gated_deltanet").rule, options(8));
  for (double& beta : p.in.beta) beta = 1;
  expect_same(p, with_rule(p, parse_rule("gated_deltanet gain=one")), p.backward());
}

// Unit keys and eps 0: eta / |k|^2 is eta.
TEST(Reduction, KaczmarzOnUnitKeysIsGatedDeltanet) {
  ReferenceProblem p = random_problem(parse_rule("kaczmarz gain_eps=0"), options(9));
  for (size_t row = 0; row < p.in.k.size(); row += static_cast<size_t>(p.shape.K)) {
    double square = 0;
    for (int64_t i = 0; i < p.shape.K; ++i) square += p.in.k[row + i] * p.in.k[row + i];
    for (int64_t i = 0; i < p.shape.K; ++i) p.in.k[row + i] /= std::sqrt(square);
  }
  const ReferenceProblem expected = with_rule(p, parse_rule("gated_deltanet k_norm=raw"));
  SCOPED_TRACE(describe(p));
  EXPECT_TRUE(close(p.forward(), expected.forward(), kRounding));
  // The gradient of k differs by the norm's own derivative, along k; all others are equal.
  ReferenceInputs gradients = p.backward(), expected_gradients = expected.backward();
  for (ReferenceInputs* d : {&gradients, &expected_gradients}) {
    for (size_t row = 0; row < p.in.k.size(); row += static_cast<size_t>(p.shape.K)) {
      double along = 0;
      for (int64_t i = 0; i < p.shape.K; ++i) along += p.in.k[row + i] * d->k[row + i];
      for (int64_t i = 0; i < p.shape.K; ++i) d->k[row + i] -= along * p.in.k[row + i];
    }
  }
  EXPECT_TRUE(close(gradients, expected_gradients, kRounding));
}

// khat = k / |k|, value v / |k|, gain eta |k|^2 / (|k|^2 + eps) give the state of the Kaczmarz step, however small |k|
// is.
TEST(Reduction, KaczmarzIdentity) {
  ReferenceProblem p = random_problem(preset("kaczmarz").rule, options(10));
  for (int64_t t = 0; t < p.shape.sequences.tokens(); ++t) {  // lengths from 1e-5 to 3
    const double factor = std::pow(10.0, -static_cast<double>(t % 5));
    for (int64_t i = 0; i < p.shape.H * p.shape.K; ++i)
      p.in.k[static_cast<size_t>(t * p.shape.H * p.shape.K + i)] *= factor;
  }
  ReferenceProblem unit = with_rule(p, parse_rule("gated_deltanet k_norm=raw"));
  const int64_t group = p.shape.HV / p.shape.H;
  for (int64_t t = 0; t < p.shape.sequences.tokens(); ++t) {
    for (int64_t h = 0; h < p.shape.H; ++h) {
      double* k = &unit.in.k[static_cast<size_t>((t * p.shape.H + h) * p.shape.K)];
      double square = 0;
      for (int64_t i = 0; i < p.shape.K; ++i) square += k[i] * k[i];
      for (int64_t i = 0; i < p.shape.K; ++i) k[i] /= std::sqrt(square);
      for (int64_t hv = h * group; hv < (h + 1) * group; ++hv) {
        const size_t at = static_cast<size_t>(t * p.shape.HV + hv);
        unit.in.beta[at] *= square / (square + p.rule.gain_eps);
        for (int64_t j = 0; j < p.shape.V; ++j)
          unit.in.v[at * static_cast<size_t>(p.shape.V) + static_cast<size_t>(j)] /= std::sqrt(square);
      }
    }
  }
  SCOPED_TRACE(describe(p));
  EXPECT_TRUE(close(unit.forward(), p.forward(), kRounding));
}

// Splitting a sequence anywhere and handing S and A on changes nothing.
TEST(Reduction, StateCarriesOver) {
  for (const Preset& named : presets()) {
    const ReferenceProblem p = random_problem(named.rule, options(11));
    SCOPED_TRACE(describe(p));
    const ReferenceOutputs whole = p.forward();
    const ReferenceProblem first = slice_tokens(p, 0, 5);
    ReferenceProblem second = slice_tokens(p, 5, 100);
    const ReferenceOutputs middle = first.forward();
    second.in.initial_state = middle.final_state;
    second.in.initial_precond = middle.final_precond;
    const ReferenceOutputs end = second.forward();
    EXPECT_EQ(end.final_state, whole.final_state);
    EXPECT_EQ(end.final_precond, whole.final_precond);
    const int64_t row = p.shape.HV * p.shape.V;
    for (int64_t n = 0; n < p.shape.sequences.count(); ++n) {
      std::vector<double> joined;
      const auto append = [&](const ReferenceProblem& part, const ReferenceOutputs& out) {
        const SeqLayout& layout = part.shape.sequences;
        joined.insert(joined.end(), out.o.begin() + layout.begin(n) * row, out.o.begin() + layout.end(n) * row);
      };
      append(first, middle);
      append(second, end);
      const auto begin = whole.o.begin() + p.shape.sequences.begin(n) * row;
      EXPECT_EQ(joined, std::vector<double>(begin, begin + p.shape.sequences.length(n) * row));
    }
  }
}

// A sequence alone gives what it gives in a packed batch.
TEST(Reduction, SequencesAreIndependent) {
  for (const Preset& named : presets()) {
    const ReferenceProblem p = random_problem(named.rule, options(12));
    SCOPED_TRACE(describe(p));
    const ReferenceOutputs whole = p.forward();
    const ReferenceInputs gradients = p.backward();
    for (int64_t n = 0; n < p.shape.sequences.count(); ++n) {
      ReferenceProblem of_whole = p;  // carries the batch's results through slice_sequence
      of_whole.in = gradients;
      of_whole.d = whole;
      const ReferenceProblem expected = slice_sequence(of_whole, n);
      const ReferenceProblem alone = slice_sequence(p, n);
      EXPECT_TRUE(close(alone.forward(), expected.d, 0));
      ReferenceInputs own = alone.backward(), of_batch = expected.in;
      own.precond_center.clear();  // one parameter for all sequences
      of_batch.precond_center.clear();
      EXPECT_TRUE(close(own, of_batch, 0));
    }
  }
}

// exp(g) = 0 forgets: what follows is as if the sequence began there with no state.
TEST(Reduction, InfiniteDecayIsANewSequence) {
  for (const char* name : {"mamba2", "gla", "gated_deltanet", "kda", "gated_deltanet2", "kaczmarz", "qdelta"}) {
    ProblemOptions o = options(13);
    o.sequences = SeqLayout::uniform(1, 20);
    ReferenceProblem p = random_problem(preset(name).rule, o);
    SCOPED_TRACE(describe(p));
    const int64_t reset = 8;
    const size_t row = p.in.g.size() / 20;
    std::fill_n(p.in.g.begin() + reset * static_cast<int64_t>(row), row, -std::numeric_limits<double>::infinity());
    ReferenceProblem tail = slice_tokens(p, reset, 20);
    tail.in.initial_state.clear();
    const ReferenceOutputs out = p.forward(), tail_out = tail.forward();
    EXPECT_EQ(std::vector<double>(out.o.begin() + reset * p.shape.HV * p.shape.V, out.o.end()), tail_out.o);
    EXPECT_EQ(out.final_state, tail_out.final_state);

    p.d.o.clear();  // the final state alone: nothing before the reset matters to it
    const ReferenceInputs gradients = p.backward();
    EXPECT_EQ(gradients.initial_state, std::vector<double>(gradients.initial_state.size(), 0.0));
    for (size_t i = 0; i < row * static_cast<size_t>(reset + 1); ++i) EXPECT_EQ(gradients.g[i], 0);
  }
}

}  // namespace
}  // namespace fw
