// The rows of a pass that are asked for: where few are, the head computes them alone. Losses and gradients are then
// what they are beside all others, and the likeliest token of a row is that of its logits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "model/small_model.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

// Of more than half of the rows all are computed: what the others of them leave is the difference of two such sums.
struct Parts {
  std::vector<int32_t> most, few, all;
};

Parts cut(const std::vector<int32_t>& targets, const std::vector<size_t>& few) {
  Parts parts{targets, std::vector<int32_t>(targets.size(), -1), targets};
  for (const size_t t : few) {
    parts.few[t] = targets[t];
    parts.most[t] = -1;
  }
  return parts;
}

std::vector<double> gradient(LanguageModel<double>& model, const std::vector<int32_t>& ids,
                             const std::vector<int32_t>& targets, const SeqLayout& layout, LossSum* sum) {
  model.params().zero_grads();
  *sum = model.forward_backward(ids, targets, layout, 0.37);
  return {model.params().grads().begin(), model.params().grads().end()};
}

class FewRows : public ::testing::TestWithParam<std::string> {};

TEST_P(FewRows, HaveTheLossesAndGradientsThatTheyHaveBesideOthers) {
  ModelConfig config = small_config("gated_deltanet");
  if (GetParam() == "untied") config.tie_word_embeddings = false;
  if (GetParam() == "rwkv7") config.layers = {"rwkv7", "rwkv7"}, config.head_dim = 4, config.num_heads = 3;
  if (GetParam() == "hybrid") config.layers = {"recurrent", "attention"};
  if (GetParam() == "layernorm") config.norm = "layer", config.embedding_norm = true;
  LanguageModel<double> model = noisy_model<double>(config);
  const SeqLayout layout({0, 9, 9, 10, 24});
  const std::vector<int32_t> ids = random_ids(24, config.vocab_size, 1);
  for (const std::vector<size_t>& few : {std::vector<size_t>{0, 9, 23}, {7}, {23}, {1, 2, 3, 8, 9, 10, 11}}) {
    const Parts parts = cut(random_ids(24, config.vocab_size, 2), few);
    LossSum of_all, of_most, of_few;
    const std::vector<double> all = gradient(model, ids, parts.all, layout, &of_all);
    const std::vector<double> most = gradient(model, ids, parts.most, layout, &of_most);
    const std::vector<double> rest = gradient(model, ids, parts.few, layout, &of_few);
    EXPECT_EQ(of_few.count, static_cast<int64_t>(few.size()));
    EXPECT_NEAR(of_few.nll, of_all.nll - of_most.nll, 1e-11 * of_all.nll);
    double largest = 0, difference = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      largest = std::max(largest, std::abs(rest[i]));
      difference = std::max(difference, std::abs(rest[i] - (all[i] - most[i])));
    }
    EXPECT_GT(largest, 1e-3);
    EXPECT_LE(difference, 1e-11 * std::max(largest, 1.0));

    // By position, zero where nothing is scored.
    std::vector<double> nll(24, 7), every(24);
    EXPECT_NEAR(model.evaluate(ids, parts.few, layout, nullptr, nll.data()).nll, of_few.nll, 1e-11 * of_all.nll);
    model.evaluate(ids, parts.all, layout, nullptr, every.data());
    for (size_t t = 0; t < nll.size(); ++t) EXPECT_NEAR(nll[t], parts.few[t] < 0 ? 0 : every[t], 1e-11) << t;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, FewRows, ::testing::Values("tied", "untied", "rwkv7", "hybrid", "layernorm"));

TEST(LikeliestTokens, AreThoseOfTheLogits) {
  const ModelConfig config = small_config("kda");
  LanguageModel<float> model = noisy_model<float>(config);
  const int64_t tokens = 5000;  // more rows than are in memory at once
  const SeqLayout layout({0, 1200, 1201, tokens});
  const std::vector<int32_t> ids = random_ids(tokens, config.vocab_size, 3);
  Logits<float> logits(tokens, config.vocab_size);
  model.forward_all(ids, layout, nullptr, logits.mat());
  for (const int64_t step : {1, 2, 7, 4999}) {
    std::vector<int64_t> rows;
    for (int64_t t = 0; t < tokens; t += step) rows.push_back(t);
    std::vector<int32_t> found(rows.size());
    model.likeliest(ids, rows, layout, nullptr, found);
    for (size_t i = 0; i < rows.size(); ++i) {
      const std::vector<float> row = logits.row(rows[i]);
      ASSERT_EQ(found[i], std::ranges::max_element(row) - row.begin()) << "row " << rows[i] << " of every " << step;
    }
  }
}

TEST(LikeliestTokens, GoOnFromAStateAndLeaveIt) {
  const ModelConfig config = small_config("gated_deltanet");
  LanguageModel<float> model = noisy_model<float>(config);
  const std::vector<int32_t> ids = random_ids(40, config.vocab_size, 4);
  std::vector<int64_t> rows(40);
  for (size_t t = 0; t < rows.size(); ++t) rows[t] = static_cast<int64_t>(t);
  std::vector<int32_t> whole(40), end(20);
  model.likeliest(ids, rows, SeqLayout({0, 40}), nullptr, whole);
  ModelState<float> state(config, 1);
  model.likeliest(std::span(ids).first(20), {}, SeqLayout({0, 20}), &state, {});  // none: the state alone
  model.likeliest(std::span(ids).last(20), std::span(rows).first(20), SeqLayout({0, 20}), &state, end);
  EXPECT_EQ(end, std::vector<int32_t>(whole.begin() + 20, whole.end()));
}

TEST(LikeliestTokens, OfEqualOnesTheSmallestAndOfNonsenseNone) {
  const ModelConfig config = small_config("gated_deltanet");
  LanguageModel<float> model(config);  // all parameters 0: all logits are
  for (float& x : model.params().values()) x = 0;
  const std::vector<int32_t> ids = random_ids(4, config.vocab_size, 4);
  const std::vector<int64_t> rows{1, 3};
  std::vector<int32_t> found(2, 9);
  model.likeliest(ids, rows, SeqLayout({0, 4}), nullptr, found);
  EXPECT_EQ(found, (std::vector<int32_t>{0, 0}));
  for (float& x : model.params().values()) x = std::nanf("");
  model.likeliest(ids, rows, SeqLayout({0, 4}), nullptr, found);
  EXPECT_EQ(found, (std::vector<int32_t>{-1, -1}));
}

TEST(LikeliestTokens, RefusesRowsThatAreNone) {
  const ModelConfig config = small_config("gated_deltanet");
  LanguageModel<float> model = noisy_model<float>(config);
  const std::vector<int32_t> ids = random_ids(4, config.vocab_size, 4);
  const auto asked = [&](std::vector<int64_t> rows, size_t answers) {
    return error_of([&] {
      std::vector<int32_t> found(answers);
      model.likeliest(ids, rows, SeqLayout({0, 4}), nullptr, found);
    });
  };
  EXPECT_THAT(asked({1, 1}, 2),
              HasSubstr("rows[1]: expected a position above 1 and below the layout's 4 tokens, got 1"));
  EXPECT_THAT(asked({4}, 1), HasSubstr("rows[0]"));
  EXPECT_THAT(asked({-1}, 1), HasSubstr("rows[0]"));
  EXPECT_THAT(asked({1}, 2), HasSubstr("expected 1 as there are rows, got 2"));
}

}  // namespace
}  // namespace fw::testing
