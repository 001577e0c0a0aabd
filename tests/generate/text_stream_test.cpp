// A text on its way out: what ends it, and what is said of it afterwards.
#include "generate/text_stream.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fw {
namespace {

class TextStream : public ::testing::Test {
 protected:
  TextStream() : model_(config()) {
    Random random(5);
    model_.init(random);
    for (float& value : model_.params().values()) value *= 4;
    options_.tokens = 60;
  }
  static ModelConfig config() {
    ModelConfig c;
    c.hidden_size = 16;
    c.num_hidden_layers = 1;
    c.num_heads = 2;
    c.head_dim = 8;
    c.intermediate_size = 32;
    c.init = "normal";
    return c;
  }
  Session session() { return Session(model_, *tokenizer_, 3); }
  Generated run(Session& s, const std::function<void(const std::string&)>& put = nullptr,
                const std::atomic<bool>* interrupt = nullptr) {
    return generate(s, *tokenizer_, options_, put, interrupt);
  }

  LanguageModel<float> model_;
  std::unique_ptr<Tokenizer> tokenizer_ = byte_tokenizer();
  GenerateOptions options_;
};

TEST_F(TextStream, TextIsThePiecesOfTheIds) {
  Session s = session();
  std::string streamed;
  const Generated g = run(s, [&](const std::string& text) { streamed += text; });
  EXPECT_EQ(g.ids.size(), 60u);
  EXPECT_EQ(g.text, tokenizer_->decode(g.ids));
  EXPECT_EQ(streamed, g.text);
  EXPECT_EQ(g.stopped_by, StopReason::kTokens);
  EXPECT_TRUE(g.logprobs.empty());
}

TEST_F(TextStream, StopTextEndsItAndIsNotInTheText) {
  Session s = session();
  const Generated whole = run(s);
  options_.stop = whole.text.substr(30, 3);
  const size_t at = whole.text.find(options_.stop);
  Session again = session();
  std::string streamed;
  const Generated g = run(again, [&](const std::string& text) { streamed += text; });
  EXPECT_EQ(g.stopped_by, StopReason::kStopText);
  EXPECT_EQ(g.text, whole.text.substr(0, at));
  EXPECT_EQ(streamed, g.text);
  EXPECT_EQ(g.ids.size(), at + 3);
  // The beginning of a stop text that does not come is text.
  options_.stop = whole.text.substr(57, 3) + "never";
  Session third = session();
  EXPECT_EQ(run(third).text, whole.text);
}

TEST_F(TextStream, AnEndTokenHasNoText) {
  Session s = session();
  const Generated whole = run(s);
  options_.end_tokens = {whole.ids[20], 1000};
  const size_t at =
      static_cast<size_t>(std::find(whole.ids.begin(), whole.ids.end(), whole.ids[20]) - whole.ids.begin());
  Session again = session();
  const Generated g = run(again);
  EXPECT_EQ(g.stopped_by, StopReason::kEndToken);
  EXPECT_EQ(g.ids.size(), at + 1);
  EXPECT_EQ(g.text, whole.text.substr(0, at));
}

TEST_F(TextStream, AnInterruptKeepsWhatTheStateHasSeen) {
  Session s = session();
  const Generated whole = run(s);
  std::atomic<bool> interrupt = false;
  Session again = session();
  size_t put = 0;
  const Generated first = run(
      again, [&](const std::string& text) { interrupt = (put += text.size()) >= 25; }, &interrupt);
  EXPECT_EQ(first.stopped_by, StopReason::kInterrupted);
  EXPECT_EQ(first.text, whole.text.substr(0, 25));
  options_.tokens = 35;
  EXPECT_EQ(run(again).text, whole.text.substr(25));
}

// The log-probabilities add up to the loss that evaluation gives the same tokens.
TEST_F(TextStream, LogProbabilitiesAreThoseOfEvaluation) {
  options_.logprobs = true;
  options_.sampling = {0.7, 20, 0.9, 0.01, 1.2};
  Session s = session();
  const Generated g = run(s);
  ASSERT_EQ(g.logprobs.size(), g.ids.size());
  std::vector<int32_t> ids{'\n'};
  ids.insert(ids.end(), g.ids.begin(), g.ids.end() - 1);
  std::vector<float> nll(ids.size());
  model_.evaluate(ids, g.ids, SeqLayout({0, static_cast<int64_t>(ids.size())}), nullptr, nll.data());
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_NEAR(g.logprobs[i], -nll[i], 2e-4) << i;
}

}  // namespace
}  // namespace fw
