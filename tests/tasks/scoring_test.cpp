// Scoring: against sums over the logits of whole sequences, one after the other; and against values worked out by hand
// under a model that gives every token the same probability.
#include "tasks/scoring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <numbers>

#include "base/error.h"
#include "base/stop.h"
#include "generate/sampling.h"
#include "support/error_of.h"
#include "tasks/likelihood.h"

namespace fw {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

ModelConfig small_config(const std::string& rule) {
  ModelConfig config;
  config.rule = rule;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.head_dim = 8;
  config.intermediate_size = 48;
  config.init = "normal";
  config.vocab_size = 256;
  return config;
}

LanguageModel<float> random_model(const std::string& rule = "kda") {
  LanguageModel<float> model(small_config(rule));
  Random random(5);
  model.init(random);
  for (float& value : model.params().values()) value *= 4;  // far from uniform
  return model;
}

// All logits are 0: every token has a probability of 1/256, and the likeliest is token 0.
LanguageModel<float> uniform_model() {
  LanguageModel<float> model(small_config("kda"));
  for (float& value : model.params().values()) value = 0;
  return model;
}

Request request(RequestKind kind) {
  Request r;
  r.task = "t";
  r.id = "1";
  r.where = "f:1";
  r.kind = kind;
  return r;
}

// Of scored after given, from the logits of all of it in one pass.
double plain_log_likelihood(LanguageModel<float>& model, const std::string& given, const std::string& scored) {
  const std::vector<int32_t> ids = byte_tokenizer()->encode(given + scored);
  const auto count = static_cast<int64_t>(ids.size());
  std::vector<float> logits(ids.size() * 256);
  model.forward_all(ids, SeqLayout({0, count}), nullptr, {logits.data(), count, 256});
  double sum = 0;
  for (size_t t = given.size(); t < ids.size(); ++t)
    sum += log_probability(std::span(logits).subspan((t - 1) * 256, 256), ids[t]);
  return sum;
}

std::vector<RequestScore> run(LanguageModel<float>& model, const std::vector<Request>& requests,
                              const ScoringOptions& options, std::vector<TaskScores>* scores = nullptr,
                              int64_t* contexts = nullptr) {
  const auto bytes = byte_tokenizer();
  Scoring scoring(model, *bytes, options, requests);
  std::vector<RequestScore> all;
  scoring.run([&](const Request&, const RequestScore& score) { all.push_back(score); });
  if (scores != nullptr) *scores = scoring.scores();
  if (contexts != nullptr) *contexts = scoring.contexts_read();
  return all;
}

TEST(Scoring, ChoicesAreThoseOfWholeSequencesAndTheirContextIsReadOnce) {
  for (const char* rule : {"kda", "gated_deltanet", "mamba2"}) {
    LanguageModel<float> model = random_model(rule);
    Request r = request(RequestKind::kChoices);
    r.contexts = {"Question: where does the state go?\nAnswer:"};
    r.choices = {"to the next token", "x", "nowhere at all, it is read and forgotten"};
    int64_t contexts = 0;
    const RequestScore score = run(model, {r}, {}, nullptr, &contexts).front();
    EXPECT_EQ(contexts, 1);
    ASSERT_EQ(score.log_likelihoods.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      const double plain = plain_log_likelihood(model, r.contexts.front(), " " + r.choices[i]);
      EXPECT_NEAR(score.log_likelihoods[i], plain, 1e-4 * std::abs(plain)) << rule;
    }
  }
}

TEST(Scoring, ContextsOfTheirOwn) {
  LanguageModel<float> model = random_model();
  Request r = request(RequestKind::kContexts);
  r.contexts = {"it was the cup", "it was the large box"};
  r.choices = {"that was small."};
  const RequestScore score = run(model, {r}, {}).front();
  for (size_t i = 0; i < 2; ++i) {
    const double plain = plain_log_likelihood(model, r.contexts[i], " that was small.");
    EXPECT_NEAR(score.log_likelihoods[i], plain, 1e-4 * std::abs(plain));
  }
  EXPECT_EQ(score.values.count("acc_norm"), 0u);
}

// By hand: with p = 1/256 a token has ln(1/256) = -5.545; " a" has 2 bytes, " na\u00efve" 7 of 5 characters and the
// space.
TEST(Scoring, AccuracyByLengthCountsCodePoints) {
  LanguageModel<float> model = uniform_model();
  const double token = -std::log(256.0);
  Request r = request(RequestKind::kChoices);
  r.contexts = {"c"};
  r.choices = {"a", "na\u00efve"};
  r.gold = 1;
  const RequestScore score = run(model, {r}, {}).front();
  EXPECT_NEAR(score.log_likelihoods[0], 2 * token, 1e-4);
  EXPECT_NEAR(score.log_likelihoods[1], 7 * token, 1e-4);
  EXPECT_EQ(score.chosen, 0);
  EXPECT_EQ(score.values.at("acc"), 0);
  EXPECT_EQ(score.values.at("acc_norm"), 1);  // 2 / 1 > 7 / 5; by bytes 7 / 6 would be right too, so:
  Request both = r;
  // 3 tokens for 2 characters, 7 for 3: by code points the first, by bytes (7 / 6) the second
  both.choices = {"ab", "\u00e9\u00e9\u00e9"};
  both.gold = 0;
  EXPECT_EQ(run(model, {both}, {}).front().values.at("acc_norm"), 1);
}

TEST(Scoring, TrailingSpaceBelongsToTheContinuation) {
  LanguageModel<float> model = random_model();
  Request r = request(RequestKind::kLikelihood);
  r.contexts = {"the last  \n"};
  r.choices = {"word"};
  const double plain = plain_log_likelihood(model, "the last", "  \nword");
  EXPECT_NEAR(run(model, {r}, {}).front().values.at("log_likelihood"), plain, 1e-4 * std::abs(plain));
  // Nothing but space, or nothing: the prefix token stands before it.
  r.contexts = {" "};
  const double with_prefix = plain_log_likelihood(model, "\n", " word");
  EXPECT_NEAR(run(model, {r}, {}).front().values.at("log_likelihood"), with_prefix, 1e-4 * std::abs(with_prefix));
  const double with_x = plain_log_likelihood(model, "x", " word");
  EXPECT_NEAR(run(model, {r}, {.prefix = 'x'}).front().values.at("log_likelihood"), with_x, 1e-4 * std::abs(with_x));
}

TEST(Scoring, LastWordsByHand) {
  LanguageModel<float> model = uniform_model();
  Request one = request(RequestKind::kLikelihood), two = one, three = one;
  one.contexts = two.contexts = three.contexts = {"a"};
  one.choices = {" b"};                    // 2 tokens
  two.choices = {" bcd"};                  // 4 tokens
  three.choices = {std::string(3, '\0')};  // 3 tokens, each the likeliest
  std::vector<TaskScores> scores;
  run(model, {one, two, three}, {}, &scores);
  ASSERT_EQ(scores.size(), 1u);
  EXPECT_EQ(scores[0].requests, 3);
  ASSERT_EQ(scores[0].metrics.size(), 2u);
  EXPECT_EQ(scores[0].metrics[0].name, "perplexity");
  // 256 to the mean of 2, 4 and 3
  EXPECT_NEAR(scores[0].metrics[0].value, std::pow(256.0, 3), 1e-4 * std::pow(256.0, 3));
  EXPECT_EQ(scores[0].metrics[1].name, "acc");
  EXPECT_NEAR(scores[0].metrics[1].value, 1.0 / 3, 1e-12);
  EXPECT_NEAR(scores[0].metrics[1].error, 1.0 / 3, 1e-12);  // variance of 0, 0, 1 with n - 1: 1/3; over n: 1/9
}

TEST(Scoring, TextsByWordsAndBytesByHand) {
  LanguageModel<float> model = uniform_model();
  Request one = request(RequestKind::kRolling), two = one;
  one.text = "12345678";  // 8 tokens, of a raw text of 3 words and 16 bytes
  one.words = 3, one.bytes = 16;
  two.text = "1234";
  two.words = 1, two.bytes = 8;
  std::vector<TaskScores> scores;
  run(model, {one, two}, {.max_length = 5}, &scores);
  ASSERT_EQ(scores[0].metrics.size(), 3u);
  EXPECT_NEAR(scores[0].metrics[0].value, std::pow(256.0, 12.0 / 4), 1);  // word_perplexity: 12 tokens, 4 words
  EXPECT_NEAR(scores[0].metrics[1].value, std::pow(256.0, 12.0 / 24), 1e-4);
  EXPECT_NEAR(scores[0].metrics[2].value, 8 * 12.0 / 24, 1e-5);  // bits_per_byte
}

// 11 tokens in windows of 4: prefix 1 2 3 | 4 5 6 7 | the last is filled up from its left.
TEST(Scoring, WindowsOfAText) {
  LanguageModel<float> model = random_model();
  LikelihoodScorer scorer(model, 4);
  const std::vector<int32_t> ids = byte_tokenizer()->encode("abcdefghijk");
  const double expected = plain_log_likelihood(model, "\n", "abcd") + plain_log_likelihood(model, "d", "efgh") +
                          plain_log_likelihood(model, "gh", "ijk");
  EXPECT_NEAR(scorer.rolling(ids, '\n'), expected, 1e-4 * std::abs(expected));
  LikelihoodScorer whole(model, 0);
  const double in_one = plain_log_likelihood(model, "\n", "abcdefghijk");
  EXPECT_NEAR(whole.rolling(ids, '\n'), in_one, 1e-4 * std::abs(in_one));
  EXPECT_EQ(whole.rolling({}, '\n'), 0);
}

TEST(Scoring, WhatIsTooLongLosesItsLeft) {
  LanguageModel<float> model = random_model();
  Request r = request(RequestKind::kLikelihood);
  r.contexts = {"0123456789"};
  r.choices = {"abc"};
  // 4 tokens are given: two and two of the continuation, whose last is only predicted.
  const double cut = plain_log_likelihood(model, "89", "abc");
  const auto bytes = byte_tokenizer();
  const std::vector<Request> requests{r};
  Scoring scoring(model, *bytes, {.max_length = 4}, requests);
  EXPECT_EQ(scoring.truncated(), 1);
  scoring.run([&](const Request&, const RequestScore& s) {
    EXPECT_NEAR(s.values.at("log_likelihood"), cut, 1e-4 * std::abs(cut));
  });
  EXPECT_THAT(error_of([&] { Scoring(model, *bytes, {.max_length = 2}, requests); }),
              HasSubstr("f:1 (task t, id 1): a continuation of 3 tokens"));
}

Request generation(const std::string& prompt, std::vector<std::string> answers) {
  Request r = request(RequestKind::kGenerate);
  r.contexts = {prompt};
  r.answers = std::move(answers);
  r.max_gen = 6;
  return r;
}

std::string greedy(LanguageModel<float>& model, std::string text, size_t count) {
  const size_t begin = text.size();
  for (size_t i = 0; i < count; ++i) {
    const std::vector<int32_t> ids = byte_tokenizer()->encode(text);
    std::vector<float> logits(ids.size() * 256);
    const auto n = static_cast<int64_t>(ids.size());
    model.forward_all(ids, SeqLayout({0, n}), nullptr, {logits.data(), n, 256});
    const auto last = std::span(logits).last(256);
    text += static_cast<char>(std::ranges::max_element(last) - last.begin());
  }
  return text.substr(begin);
}

TEST(Scoring, OutputIsGreedyAndEndsAtAStopText) {
  LanguageModel<float> model = random_model();
  const std::string output = greedy(model, "the needle is", 6);
  Request r = generation("the needle is", {output.substr(1, 2), "not in it"});
  EXPECT_EQ(run(model, {r}, {}).front().output, output);
  EXPECT_EQ(run(model, {r}, {}).front().values.at("contains"), 1);
  r.metric = AnswerMetric::kSubstrAll;
  EXPECT_EQ(run(model, {r}, {}).front().values.at("substr_all"), 0.5);
  r.until = {output.substr(3, 1), output.substr(2, 1)};
  EXPECT_EQ(run(model, {r}, {}).front().output,
            output.substr(0, std::min(output.find(r.until[0]), output.find(r.until[1]))));
  r.until.clear();
  EXPECT_EQ(run(model, {r}, {.end_tokens = {static_cast<unsigned char>(output[4])}}).front().output,
            output.substr(0, output.find(output[4])));
}

TEST(Scoring, DocumentsAreCutAndQuestionsAreNot) {
  LanguageModel<float> model = random_model();
  Request r = generation("0123456789ANSWER0123456789", {"ANSWER"});
  r.question = " Key:";
  r.max_length = 21;  // 6 of output, 5 of the question: 10 of the document
  const auto kept = [&](Truncation truncation) {
    r.truncation = truncation;
    const std::string output = run(model, {r}, {}).front().output;
    // Which prompt this is the output of.
    for (size_t begin = 0; begin + 10 <= r.contexts.front().size(); ++begin) {
      if (greedy(model, r.contexts.front().substr(begin, 10) + " Key:", 6) == output)
        return r.contexts.front().substr(begin, 10);
    }
    return std::string("none");
  };
  EXPECT_EQ(kept(Truncation::kLeft), "0123456789");
  EXPECT_EQ(kept(Truncation::kAnswerWindow), "56789ANSWE");  // half before the answer, the rest from it on
  r.contexts = {"ANSWER0123456789abcdefg"};
  EXPECT_EQ(kept(Truncation::kAnswerWindow), "ANSWER0123");
  r.contexts = {"0123456789abcdefgANSWER"};
  EXPECT_EQ(kept(Truncation::kAnswerWindow), "cdefgANSWE");
  r.answers = {"not there"};
  EXPECT_EQ(kept(Truncation::kAnswerWindow), "0123456789");  // from the beginning
}

TEST(Scoring, WhatCannotFitIsSaidBeforeAnyWork) {
  LanguageModel<float> model = uniform_model();
  const auto bytes = byte_tokenizer();
  const auto refused = [&](const Request& r) { return error_of([&] { Scoring(model, *bytes, {}, {r}); }); };
  Request r = generation("document", {"x"});
  r.question = " a long question:";
  r.truncation = Truncation::kLeft;
  r.max_length = 20;
  EXPECT_THAT(refused(r), HasSubstr("a question of 17 tokens and an output of 6 leave no room"));
  Request needle = generation("a prompt of 21 tokens", {"x"});
  needle.max_length = 26;
  EXPECT_THAT(refused(needle),
              HasSubstr("21 tokens with this tokenizer, and with 6 of the output it is longer than its length of 26"));
  needle.max_length = 27;
  EXPECT_EQ(refused(needle), "");
  const auto ids = id_tokenizer(256);
  EXPECT_THAT(error_of([&] { Scoring(model, *ids, {}, {needle}); }),
              HasSubstr("f:1 (task t, id 1): text of token ids: expected numbers"));
  EXPECT_THAT(error_of([&] { Scoring(model, *bytes, {.prefix = 256}, {needle}); }),
              HasSubstr("prefix token: expected 0 to 255, got 256"));
}

TEST(Scoring, TasksAndLengthsApart) {
  LanguageModel<float> model = uniform_model();
  Request a = generation("p", {"x"}), b = a, c = a;
  a.task = b.task = "niah_single_1";
  a.max_length = 512, b.max_length = 1024;
  std::vector<TaskScores> scores;
  run(model, {c, b, a, b}, {}, &scores);
  ASSERT_EQ(scores.size(), 3u);
  EXPECT_EQ(scores[0].task, "t");
  EXPECT_EQ(scores[1].length, 1024);
  EXPECT_EQ(scores[1].requests, 2);
  EXPECT_EQ(scores[2].length, 512);
}

// Bytes, but " b" after an "a" is one token with it.
class JoiningTokenizer final : public Tokenizer {
 public:
  int32_t vocab_size() const override { return 256; }
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < text.size(); ++i) {
      const bool joins = text.substr(i).starts_with("a b");
      ids.push_back(joins ? 0 : static_cast<unsigned char>(text[i]));
      if (joins) i += 2;
    }
    return ids;
  }
  std::string decode(const std::vector<int32_t>&) const override { return {}; }
  std::string piece(int32_t id) const override {
    if (on_piece) on_piece();
    return id == 0 ? "a b" : std::string(1, static_cast<char>(id));
  }
  std::string type() const override { return "joining"; }
  uint64_t checksum() const override { return 1; }
  void save(const std::string&) const override {}
  std::function<void()> on_piece;
};

Request continuation(const std::string& context, const std::string& rest) {
  Request r = request(RequestKind::kLikelihood);
  r.contexts = {context};
  r.choices = {rest};
  return r;
}

TEST(Scoring, ATokenAcrossTheJoinLeavesTheContinuationAlone) {
  LanguageModel<float> model = random_model();
  const JoiningTokenizer joining;
  const std::vector<Request> requests{continuation("hello", " you"), continuation("a", " b"),
                                      continuation("xa", " bc")};
  Scoring scoring(model, joining, {}, requests);
  EXPECT_EQ(scoring.apart(), 1);
  std::vector<double> scores;
  scoring.run([&](const Request&, const RequestScore& score) { scores.push_back(score.values.at("log_likelihood")); });
  ASSERT_EQ(scores.size(), 3u);
  EXPECT_NEAR(scores[0], plain_log_likelihood(model, "hello", " you"), 1e-4);
  EXPECT_NEAR(scores[1], plain_log_likelihood(model, "a", " b"), 1e-4);
  // As lm-evaluation-harness: the whole is "x", "a b", "c", of which the context's two tokens are cut off.
  EXPECT_NEAR(scores[2], plain_log_likelihood(model, "xa", "c"), 1e-4);
}

TEST(Scoring, AnEmptyContextIsThePrefixOnce) {
  LanguageModel<float> model = random_model();
  EXPECT_NEAR(run(model, {continuation("", "ab")}, {.prefix = 'x'}).front().values.at("log_likelihood"),
              plain_log_likelihood(model, "x", "ab"), 1e-4);
  EXPECT_NEAR(run(model, {continuation("", "xab")}, {.prefix = 'x'}).front().values.at("log_likelihood"),
              plain_log_likelihood(model, "x", "ab"), 1e-4);
}

TEST(Scoring, RequestsThatCannotBeScoredAreLeftOutWhereAsked) {
  LanguageModel<float> model = uniform_model();
  const auto bytes = byte_tokenizer();
  Request needle = generation("a prompt of 21 tokens", {"x"});
  needle.max_length = 26;
  const std::vector<Request> requests{needle, continuation("a", "b")};
  EXPECT_THAT(error_of([&] { Scoring(model, *bytes, {}, requests); }), HasSubstr("--skip-bad"));
  Scoring scoring(model, *bytes, {.skip_bad = true}, requests);
  ASSERT_EQ(scoring.skipped().size(), 1u);
  EXPECT_THAT(scoring.skipped().front(), HasSubstr("21 tokens"));
  int done = 0;
  scoring.run([&](const Request&, const RequestScore&) { ++done; });
  EXPECT_EQ(done, 1);
  ASSERT_EQ(scoring.scores().size(), 1u);
  EXPECT_EQ(scoring.scores().front().requests, 1);
  EXPECT_THAT(error_of([&] { Scoring(model, *bytes, {.skip_bad = true}, {needle}); }), HasSubstr("none of 1 requests"));
}

// What it says when it stops; "" where it does not.
std::string stop_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Stopped& stopped) {
    return stopped.what();
  }
  return "";
}

TEST(Scoring, AStopIsHeardInsideARequest) {
  LanguageModel<float> model = uniform_model();
  JoiningTokenizer tokenizer;
  Request long_one = generation("p", {"x"});
  long_one.max_gen = 1 << 20;
  const std::vector<Request> requests{long_one};
  Scoring scoring(model, tokenizer, {.max_length = 0}, requests);
  int pieces = 0;
  tokenizer.on_piece = [&pieces] {
    if (++pieces == 5) request_stop();
  };
  const std::string stopped = stop_of([&] { scoring.run(nullptr); });
  withdraw_stop();
  EXPECT_THAT(stopped, HasSubstr("output: stopped after"));
  EXPECT_LT(pieces, 20);
}

TEST(Likelihood, AStopIsHeardInsideAContextAndAWindow) {
  LanguageModel<float> model = uniform_model();
  LikelihoodScorer scorer(model, 0);
  const std::vector<int32_t> long_one(5000, 7);
  request_stop();
  EXPECT_THAT(stop_of([&] { scorer.continuation(long_one, std::vector<int32_t>{1}); }),
              HasSubstr("tokens of a context"));
  EXPECT_THAT(stop_of([&] { scorer.rolling(long_one, 1); }), HasSubstr("stopped after 0"));
  withdraw_stop();
}

}  // namespace
}  // namespace fw
