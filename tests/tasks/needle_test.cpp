// Needle tasks: what a prompt says, where the needles stand, values, sizes by tokenizer, and that an example is of its
// seed and index alone.
#include "tasks/needle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <regex>
#include <set>

#include "base/error.h"
#include "support/error_of.h"
#include "tasks/key_words.h"
#include "tasks/needle_words.h"
#include "tasks/unicode.h"

namespace fw {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

// 40 sentences of three words: "Word 7 ends."
std::string essay_text() {
  std::string text;
  for (int i = 0; i < 40; ++i) text += fmt::format("Word{} really\n ends.  ", i);
  return text;
}

NeedleTask task_of(const std::string& name, int64_t length, const Tokenizer& tokenizer) {
  return {name, length, tokenizer, needs_essay(name) ? Essay(essay_text(), "essay") : Essay()};
}

TEST(Needle, ThePromptOfAnExampleInFull) {
  const auto bytes = byte_tokenizer();
  // 128 tokens of output, and room for exactly two lines of noise beside needle and question.
  const std::string noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
  for (uint64_t i = 0; i < 20; ++i) {
    const Request r = task_of("niah_single_1", 128 + 700, *bytes).example(7, i);
    const std::string prompt = r.contexts.front();
    const std::regex shape(
        "A special magic number is hidden within the following text\\. Make sure to memorize it\\. I will quiz you "
        "about the number afterwards\\.\n"
        "([^]*)\nWhat is the special magic number for ([a-z]+-[a-z]+) mentioned in the provided text\\? "
        "The special magic number for ([a-z]+-[a-z]+) mentioned in the provided text is");
    std::smatch found;
    ASSERT_TRUE(std::regex_match(prompt, found, shape)) << prompt;
    EXPECT_EQ(found[2], found[3]);
    const std::string needle =
        fmt::format("One of the special magic numbers for {} is: {}.", found[2].str(), r.answers.front());
    EXPECT_THAT(r.answers.front(), ::testing::MatchesRegex("[1-9][0-9][0-9][0-9][0-9][0-9][0-9]"));
    std::string context = found[1];
    const size_t at = context.find(needle);
    ASSERT_NE(at, std::string::npos);
    context.erase(at, needle.size() + 1);
    EXPECT_EQ(context.substr(0, noise.size()), noise);
    EXPECT_LE(static_cast<int64_t>(prompt.size()), 700);
    EXPECT_GT(static_cast<int64_t>(prompt.size() + noise.size() + 1), 700) << "one more line would have fit";
    EXPECT_EQ(r.max_gen, 128);
    EXPECT_EQ(r.metric, AnswerMetric::kSubstrAll);
  }
}

TEST(Needle, AnEssaysNeedleStandsAtItsDepth) {
  const auto bytes = byte_tokenizer();
  const NeedleTask task = task_of("niah_single_2", 128 + 1100, *bytes);
  const std::array<int64_t, 40> depths = [] {
    std::array<int64_t, 40> d{};
    for (size_t i = 0; i < 40; ++i) d[i] = std::lround(100.0 * static_cast<double>(i) / 39);
    return d;
  }();
  std::map<int64_t, int> seen;
  constexpr int kCount = 800;
  for (uint64_t i = 0; i < kCount; ++i) {
    const std::string prompt = task.example(3, i).contexts.front();
    const size_t begin = prompt.find('\n') + 1, end = prompt.rfind('\n');
    const std::string context = prompt.substr(begin, end - begin);
    std::smatch needle;
    ASSERT_TRUE(std::regex_search(context, needle,
                                  std::regex("One of the special magic numbers for [a-z]+-[a-z]+ is: [0-9]{7}\\. ?")))
        << prompt;
    const std::vector<std::string> before = sentences_of(needle.prefix().str()),
                                   after = sentences_of(needle.suffix().str());
    ++seen[static_cast<int64_t>(before.size())];
    std::vector<std::string> all = before;
    all.insert(all.end(), after.begin(), after.end());
    for (size_t k = 0; k + 1 < all.size(); ++k) EXPECT_EQ(all[k], fmt::format("Word{} really ends.", k % 40));
  }
  // The number of sentences is the same for all but a few examples (keys differ in length), and so are the places that
  // depths lead to.
  std::set<int64_t> reached;
  for (const int64_t depth : depths) {
    for (const int64_t count : {36, 37, 38, 39, 40, 41}) reached.insert(count * depth / 100);
  }
  for (const auto& [at, times] : seen) EXPECT_TRUE(reached.count(at) > 0) << at;
  EXPECT_GT(seen.size(), 28u);
  EXPECT_GT(seen.begin()->second, 5);  // depth 0: 20 expected
}

TEST(Needle, FourKeysOneOfWhichIsAskedFor) {
  const auto bytes = byte_tokenizer();
  const NeedleTask task = task_of("niah_multikey_1", 2000, *bytes);
  std::array<int, 4> asked{};
  const std::regex needle("One of the special magic numbers for ([a-z]+-[a-z]+) is: ([0-9]{7})\\.");
  for (uint64_t i = 0; i < 400; ++i) {
    const Request r = task.example(1, i);
    const std::string& prompt = r.contexts.front();
    std::vector<std::pair<std::string, std::string>> pairs;
    for (std::sregex_iterator at(prompt.begin(), prompt.end(), needle), end; at != end; ++at)
      pairs.emplace_back((*at)[1], (*at)[2]);
    ASSERT_EQ(pairs.size(), 4u);
    EXPECT_EQ((std::set<std::pair<std::string, std::string>>(pairs.begin(), pairs.end()).size()), 4u);
    for (size_t k = 0; k < 4; ++k) {
      if (prompt.ends_with(fmt::format("for {} mentioned in the provided text is", pairs[k].first))) {
        ++asked[k];
        EXPECT_EQ(r.answers, std::vector<std::string>{pairs[k].second});
      }
    }
  }
  for (const int count : asked) EXPECT_NEAR(count, 100, 35);  // four deviations of a quarter of 400
}

TEST(Needle, UuidsAreOfVersionFour) {
  const auto bytes = byte_tokenizer();
  const NeedleTask task = task_of("niah_single_3", 1500, *bytes);
  std::set<std::string> values;
  for (uint64_t i = 0; i < 50; ++i) {
    const Request r = task.example(1, i);
    EXPECT_TRUE(std::regex_match(r.answers.front(),
                                 std::regex("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")))
        << r.answers.front();
    EXPECT_THAT(r.contexts.front(), HasSubstr("One of the special magic uuids for"));
    EXPECT_TRUE(r.contexts.front().starts_with("A special magic uuid is hidden"));
    values.insert(r.answers.front());
  }
  EXPECT_EQ(values.size(), 50u);
}

TEST(Needle, SizedByItsTokenizerAndTheSameEveryTime) {
  const auto bytes = byte_tokenizer();
  for (const std::string& name : needle_tasks()) {
    for (const int64_t length : {900, 1024, 4096}) {
      const NeedleTask task = task_of(name, length, *bytes);
      const Request one = task.example(42, 3);
      EXPECT_EQ(one.contexts, task.example(42, 3).contexts);
      EXPECT_NE(one.contexts, task.example(42, 4).contexts);
      EXPECT_NE(one.contexts, task.example(43, 3).contexts);
      EXPECT_EQ(one.max_length, length);
      const auto tokens = static_cast<int64_t>(bytes->encode(one.contexts.front()).size()) + 128;
      EXPECT_LE(tokens, length) << name;
      EXPECT_GT(tokens, length - 95) << name;  // a line of noise has 94 bytes with its end, a word fewer
    }
  }
}

// The tasks of words are the prompt, piece by piece, and the answer but for its last digit; what they ask for is the
// answer.
TEST(NeedleWords, AreThePromptAndAskForTheAnswer) {
  const auto bytes = byte_tokenizer();
  EXPECT_EQ(needle_pieces("One, for ab-cd is: 90.\n"),
            (std::vector<std::string_view>{"One", ",", "for", "ab", "-", "cd", "is", ":", "9", "0", "."}));
  EXPECT_EQ(needle_pieces("is 0123abcd-89ab-4def-8123-456789abcdef.").size(), 1 + 36 + 1u);
  EXPECT_EQ(needle_pieces("is 0123abcd-89ab-4def-8123-456789abcde.").size(), 27u)
      << "a digit too few: words and digits";
  for (const std::string& name : needle_tasks()) {
    const NeedleTask prompts = task_of(name, 0, *bytes);
    const size_t answer = name == "niah_single_3" ? 36 : 7;
    std::set<std::string> values;
    for (const int64_t size : {1, 3, 40, 200}) {
      const NeedleWords task(name, size, needs_essay(name) ? Essay(essay_text(), "essay") : Essay());
      if (name == "niah_single_1") {
        EXPECT_EQ(task.length(), 82 + 24 * size);
      }
      for (uint64_t i = 0; i < 20; ++i) {
        const TaskExample one = task.example(5, i);
        Random random(example_seed(5, i));
        const auto [prompt, value] = prompts.text(random, size);
        values.insert(value);
        ASSERT_EQ(value.size(), answer);
        const std::vector<std::string_view> pieces = needle_pieces(prompt);
        ASSERT_EQ(one.tokens.size(), pieces.size() + answer - 1) << name;
        for (size_t t = 0; t < one.tokens.size(); ++t) {
          EXPECT_LT(one.tokens[t], task.vocab_size());
          const std::string expected = t < pieces.size() ? std::string(pieces[t]) : value.substr(t - pieces.size(), 1);
          ASSERT_EQ(task.piece(one.tokens[t]), expected) << name << " " << t;
          // The last piece of the prompt asks for the first digit; nothing asks for a hyphen.
          if (t + 1 < pieces.size() || value[t + 1 - pieces.size()] == '-') {
            EXPECT_EQ(one.labels[t], kNoLabel);
          } else {
            EXPECT_EQ(task.piece(one.labels[t]), value.substr(t + 1 - pieces.size(), 1));
          }
        }
      }
    }
    EXPECT_EQ(values.size(), 20u) << "a value is of its seed and index, whatever the text is long";
  }
}

TEST(NeedleWords, TheVocabularyIsTheWholeEssaysWhateverTheSize) {
  const Essay essay(essay_text(), "essay");
  const NeedleWords small("niah_single_2", 1, essay), large("niah_single_2", 100, essay);
  ASSERT_EQ(small.vocab_size(), large.vocab_size());
  for (int32_t token = 0; token < small.vocab_size(); ++token) EXPECT_EQ(small.piece(token), large.piece(token));
}

TEST(NeedleWords, RefusesWhatCannotBe) {
  EXPECT_THAT(error_of([] { make_task("niah_single_1", {.length = 1 << 17}); }), HasSubstr("lines of noise"));
  EXPECT_THAT(error_of([] { make_task("niah_single_1", {.haystack = "text"}); }),
              HasSubstr("hides its needle in noise"));
  EXPECT_THAT(error_of([] { make_task("niah_single_2", {}); }), HasSubstr("give one with --haystack"));
  EXPECT_THAT(error_of([] { make_task("niah_single_2", {.haystack = "/no/such/essay"}); }),
              HasSubstr("/no/such/essay"));
  EXPECT_THAT(error_of([] { NeedleWords("niah_multikey_1", 1 << 21, Essay("A word.", "essay")); }),
              HasSubstr("words of the essay"));
}

TEST(Needle, RefusesWhatCannotBe) {
  const auto bytes = byte_tokenizer();
  EXPECT_THAT(error_of([&] { task_of("niah_single_4", 1000, *bytes); }), HasSubstr("did you mean 'niah_single_1'?"));
  EXPECT_THAT(error_of([&] { NeedleTask("niah_single_2", 1000, *bytes, Essay()); }), HasSubstr("--haystack"));
  EXPECT_THAT(error_of([&] { Essay(" \n ", "empty.txt"); }), HasSubstr("'empty.txt': expected a text"));
  EXPECT_THAT(error_of([&] { task_of("niah_single_1", 300, *bytes).example(1, 0); }), HasSubstr("takes at least"));
}

TEST(Needle, KeysAreOfDistinctWords) {
  for (const auto words : {key_adjectives(), key_nouns()}) {
    EXPECT_EQ((std::set<std::string_view>(words.begin(), words.end()).size()), words.size());
    EXPECT_GT(words.size(), 200u);
  }
}

}  // namespace
}  // namespace fw
