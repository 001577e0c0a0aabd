// The replay is the model's own recurrence, for every rule; results do not depend on pieces, packing or threads.
#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "analyze/analyzer.h"
#include "base/threads.h"
#include "model/small_model.h"

namespace fw::testing {
namespace {

std::vector<std::string> rules() {
  std::vector<std::string> list;
  for (const std::span<const Preset> named : {presets(), ablations()}) {
    for (const Preset& preset : named) list.emplace_back(preset.name);
  }
  list.emplace_back("decay=channel gain=kaczmarz feedback=learned write=channel precond=diagonal k_norm=l2");
  list.emplace_back("gated_deltanet2 gain=gate feedback=learned");
  list.emplace_back("gated_deltanet erase_key=own read=corrected write=scalar feedback=fixed lambda=0.3");
  list.emplace_back("precond_kda erase=averaged write=averaged normaliser=gated read=corrected");
  list.emplace_back("decay=constant gain=efla feedback=learned q_norm=l2");
  return list;
}

// Layers of a pass over these sequences of a model of the rule.
template <class T>
std::vector<LayerAnalysis> analyse(LanguageModel<T>& model, const SeqLayout& layout, int64_t every,
                                   std::vector<int64_t> layers = {}) {
  const std::vector<int32_t> ids = random_ids(layout.tokens(), model.config().vocab_size, 3);
  const std::vector<int32_t> targets(ids.size(), -1);
  Analyzer<T> analyzer(std::move(layers), every);
  model.observe(&analyzer);
  model.evaluate(ids, targets, layout);
  model.observe(nullptr);
  return analyzer.take();
}

template <class T>
ModelConfig grouped(const std::string& rule) {
  ModelConfig config = small_config(rule);
  config.num_v_heads = 4;
  config.expand_v = 0.5;  // V is not K
  return config;
}

// A layer whose recurrence has another scale, with a state that goes on from pass to pass.
TEST(Replay, SeesTheLayersOfRwkv7) {
  ModelConfig config = small_config("kda");
  config.layers = {"rwkv7", "recurrent"};
  config.rwkv7.head_dim = 4;
  LanguageModel<double> model = noisy_model<double>(config);
  ModelState<double> state(config, 1);
  Analyzer<double> analyzer({}, 16);
  model.observe(&analyzer);
  for (uint64_t pass = 0; pass < 2; ++pass) {
    const std::vector<int32_t> ids = random_ids(40, config.vocab_size, pass), targets(ids.size(), -1);
    model.evaluate(ids, targets, SeqLayout({0, 40}), &state);
  }
  model.observe(nullptr);
  const std::vector<LayerAnalysis> layers = analyzer.take();
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[0].rule, preset("dplr").rule);
  for (const LayerAnalysis& layer : layers) {
    EXPECT_LE(layer.replay_error(), 1e-11) << "layer " << layer.layer;
    EXPECT_GT(layer.value_heads[0].replay_reference, 0);
  }
  // f.p is |p|^2 times something between 0 and 1.
  for (const Distribution& d : layers[0].of(Quantity::kEigenvalue)) {
    EXPECT_GE(d.min(), 0);
    EXPECT_LE(d.max(), 1);
  }
}

class ReplayOf : public ::testing::TestWithParam<std::string> {};

TEST_P(ReplayOf, EqualsTheModelsOutput) {
  const SeqLayout layout({0, 70, 71, 71, 150});
  LanguageModel<double> exact = noisy_model<double>(grouped<double>(GetParam()));
  const std::vector<LayerAnalysis> layers = analyse(exact, layout, 16);
  ASSERT_EQ(layers.size(), 2u);
  for (const LayerAnalysis& layer : layers) {
    EXPECT_LE(layer.replay_error(), 1e-11) << "layer " << layer.layer;
    EXPECT_GT(layer.value_heads[0].replay_reference, 0);
  }
  LanguageModel<float> usual = noisy_model<float>(grouped<float>(GetParam()));
  for (const LayerAnalysis& layer : analyse(usual, layout, 16))
    EXPECT_LE(layer.replay_error(), 2e-5) << "layer " << layer.layer;
}

TEST_P(ReplayOf, CountsEveryTokenOfEveryHead) {
  const SeqLayout layout({0, 70, 71, 71, 150});
  LanguageModel<double> model = noisy_model<double>(grouped<double>(GetParam()));
  const int64_t tokens = layout.tokens(), samples = 70 / 16 + 79 / 16;
  for (const LayerAnalysis& layer : analyse(model, layout, 16)) {
    for (const QuantityInfo& q : quantities()) {
      const std::vector<Distribution>& heads = layer.of(q.id);
      const size_t expected = !q.applies(layer.rule) ? 0 : q.of_key_head(layer.rule) ? 2 : 4;
      ASSERT_EQ(heads.size(), expected) << q.name;
      int64_t values = tokens;
      if (q.id == Quantity::kDecay && layer.rule.decay == Decay::kChannel) values *= layer.key_dim;
      if (q.id == Quantity::kEraseGate && layer.rule.erase != Gate::kScalar) values *= layer.key_dim;
      if (q.id == Quantity::kPrecond || q.id == Quantity::kPrecondRaw || q.id == Quantity::kPrecondTanh)
        values *= layer.key_dim;
      if (q.id == Quantity::kWriteGate && layer.rule.write != Gate::kScalar) values *= layer.value_dim;
      if (q.id == Quantity::kStateNorm || q.id == Quantity::kEffectiveRank) values = samples;
      // Against the token before, which the first token of each of the three sequences does not have.
      if (q.id == Quantity::kTargetMove || q.id == Quantity::kPredictionMove || q.id == Quantity::kDiscrepancy)
        values -= 3;
      for (const Distribution& d : heads) {
        EXPECT_EQ(d.count() + d.skipped(), values) << q.name;
        EXPECT_GT(d.count(), 0) << q.name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, ReplayOf, ::testing::ValuesIn(rules()));

// Ranges that follow from the definitions.
TEST(Replay, ValuesAreWhereTheyCanBe) {
  LanguageModel<double> model =
      noisy_model<double>(grouped<double>("gated_deltanet2 gain=gate feedback=learned precond=diagonal"));
  for (const LayerAnalysis& layer : analyse(model, SeqLayout({0, 150}), 16)) {
    const auto within = [&](Quantity q, double low, double high) {
      for (const Distribution& d : layer.of(q)) {
        EXPECT_GE(d.min(), low) << info(q).name;
        EXPECT_LE(d.max(), high) << info(q).name;
      }
    };
    within(Quantity::kDecay, 0, 1);
    within(Quantity::kEraseGate, 0, 1);
    within(Quantity::kWriteGate, 0, 1);
    within(Quantity::kLambda, 0, 1);
    within(Quantity::kPrecond, 1 / 1.5, 1.5);
    within(Quantity::kKeyWrite, 0.999 / 1.5, 1.5);  // unit keys
    within(Quantity::kCosKeyRead, -1 - 1e-12, 1 + 1e-12);
    within(Quantity::kCosQueryRead, -1 - 1e-12, 1 + 1e-12);
    within(Quantity::kEffectiveRank, 1, 4 + 1e-9);
    within(Quantity::kFeedback, 0, 1e9);
  }
}

// A full projection step writes the value under the key, exactly: the key read is v, and the eigenvalue is 0.
TEST(Replay, AProjectionStepStoresTheValue) {
  LanguageModel<double> model = noisy_model<double>(grouped<double>("nlms gain_eps=0"));
  for (const LayerAnalysis& layer : analyse(model, SeqLayout({0, 60}), 16)) {
    for (const Distribution& d : layer.of(Quantity::kCosKeyRead)) EXPECT_NEAR(d.min(), 1, 1e-9);
    for (const Distribution& d : layer.of(Quantity::kEigenvalue))
      EXPECT_NEAR(std::max(std::abs(d.min()), std::abs(d.max())), 0, 1e-12);
  }
}

// Pieces with the state handed on are the whole, but for the rounding of the state.
TEST(Replay, PiecesEqualTheWhole) {
  LanguageModel<double> model = noisy_model<double>(grouped<double>("precond_kda"));
  const int64_t tokens = 130;
  const std::vector<int32_t> ids = random_ids(tokens, model.config().vocab_size, 3);
  const std::vector<int32_t> targets(ids.size(), -1);
  Analyzer<double> pieces({1}, 10);
  ModelState<double> state(model.config(), 1);
  model.observe(&pieces);
  const std::vector<int64_t> cuts = {0, 1, 66, 67, tokens};
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const size_t from = static_cast<size_t>(cuts[i]), count = static_cast<size_t>(cuts[i + 1] - cuts[i]);
    pieces.set_position(cuts[i]);
    model.evaluate(std::span(ids).subspan(from, count), std::span(targets).subspan(from, count),
                   SeqLayout({0, cuts[i + 1] - cuts[i]}), &state);
  }
  model.observe(nullptr);
  const std::vector<LayerAnalysis> whole = analyse(model, SeqLayout({0, tokens}), 10, {1});
  ASSERT_EQ(pieces.layers().size(), 1u);
  ASSERT_EQ(whole.size(), 1u);
  const LayerAnalysis &a = pieces.layers()[0], &b = whole[0];
  EXPECT_LE(a.replay_error(), 1e-11);
  for (size_t h = 0; h < 4; ++h) {
    const PositionSeries &x = a.value_heads[h].state_norm, &y = b.value_heads[h].state_norm;
    ASSERT_EQ(x.sum.size(), 13u);
    ASSERT_EQ(y.sum.size(), 13u);
    for (size_t i = 0; i < 13; ++i) EXPECT_NEAR(x.mean(i), y.mean(i), 1e-11 * y.mean(i));
    EXPECT_NEAR(a.of(Quantity::kCosQueryRead)[h].mean(), b.of(Quantity::kCosQueryRead)[h].mean(), 1e-11);
  }
}

TEST(Replay, ThreadsChangeNoBit) {
  LanguageModel<float> model = noisy_model<float>(grouped<float>("precond_gated_deltanet feedback=learned"));
  const auto statistics = [&](int threads) {
    set_num_threads(threads);
    std::vector<double> all;
    for (const LayerAnalysis& layer : analyse(model, SeqLayout({0, 70, 150}), 16)) {
      for (const std::vector<Distribution>& heads : layer.distributions) {
        for (const Distribution& d : heads)
          all.insert(all.end(), {d.mean(), d.deviation(), d.min(), d.max(), d.quantile(0.5)});
      }
      for (const HeadAnalysis& head : layer.value_heads)
        all.insert(all.end(), head.overlap.by_rank.begin(), head.overlap.by_rank.end());
    }
    set_num_threads(0);
    return all;
  };
  const std::vector<double> one = statistics(1);
  EXPECT_EQ(one, statistics(3));
  EXPECT_FALSE(one.empty());
}

}  // namespace
}  // namespace fw::testing
