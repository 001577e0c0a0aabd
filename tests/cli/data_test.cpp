// Data as it lies about: several files and patterns, packed files, JSON lines, weights, token files, interrupted
// tokenization; memory that does not grow with the text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "cli/program.h"

namespace fw::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using Args = std::vector<std::string>;

class Data : public testing::Test {
 protected:
  std::string at(const std::string& name) const { return folder_ / name; }
  std::string put(const std::string& name, const std::string& content) const {
    spill(at(name), content);
    return at(name);
  }
  std::string gzip(const std::string& name) const {
    EXPECT_EQ(std::system(("gzip -kf '" + at(name) + "'").c_str()), 0);
    return at(name + ".gz");
  }
  // The token file of these texts.
  std::string tokens(const Args& texts, const Args& more = {}) const {
    fs::remove(at("out.tokens"));
    const Outcome outcome = run(Args{"tokenize", "--out", at("out.tokens")} + texts + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return slurp(at("out.tokens"));
  }
  static void expect_refused(const Args& args, const std::string& words) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(words));
  }
  static std::string weights(const std::string& run) { return slurp(run + "/model/model.safetensors"); }

  Folder folder_;
};

TEST_F(Data, PackedFilesAndPatternsAreTheirText) {
  const std::string a = put("a.txt", small_text()), b = put("b.txt", "another text\n");
  const std::string expected = tokens({a, b});
  EXPECT_TRUE(tokens({at("*.txt")}) == expected);
  EXPECT_TRUE(tokens({gzip("a.txt"), gzip("b.txt")}) == expected);
  expect_refused({"tokenize", at("*.text"), "--out", at("o")}, "no file matches");
  // Trained on, they give the same model.
  ASSERT_EQ(run(tiny_train(a, at("plain"))).code, 0);
  const Outcome packed = run(tiny_train(at("a.txt.gz"), at("packed")));
  ASSERT_EQ(packed.code, 0) << packed.err;
  EXPECT_TRUE(weights(at("plain")) == weights(at("packed")));
  EXPECT_EQ(run({"eval", at("packed"), "--text", at("a.txt.gz"), "--context", "64"}).out,
            run({"eval", at("packed"), "--text", a, "--context", "64"}).out);
}

TEST_F(Data, JsonLinesAreAFieldOfEachLine) {
  const std::string lines =
      put("x.jsonl", "{\"text\": \"one\\n\", \"body\": \"1\"}\n{\"text\": \"two\", \"body\": \"2\"}\n");
  EXPECT_TRUE(tokens({lines}) == tokens({put("one", "one\n"), put("two", "two")}));
  EXPECT_TRUE(tokens({lines}, {"--field", "body"}) == tokens({put("one", "1"), put("two", "2")}));
  expect_refused({"tokenize", lines, "--field", "lost", "--out", at("o")}, "lost");
  put("bad.jsonl", "{\"text\": \"fine\"}\nnot JSON\n");
  expect_refused({"tokenize", at("bad.jsonl"), "--out", at("o")}, "bad.jsonl:2");
}

TEST_F(Data, WhatIsNotTextIsRefused) {
  const std::string text = put("text", small_text());
  expect_refused({"tokenize", put("x.parquet", "PAR1 and more"), "--out", at("o")}, "Parquet");
  expect_refused(tiny_train(at("x.parquet"), at("run")), "Parquet");
  ASSERT_EQ(run({"tokenize", text, "--out", at("t.tokens")}).code, 0);
  expect_refused({"tokenize", at("t.tokens"), "--out", at("o")}, "token file already");
  expect_refused({"tokenize", text, at("t.tokens"), "--out", at("o")}, "token file already");
  expect_refused({"tokenize", "/dev/zero", "--out", at("o")}, "device or a pipe");
  expect_refused(tiny_train("/dev/zero", at("run")), "device or a pipe");
}

// ---- weights

TEST_F(Data, WeightsAreSharesOfTheWindows) {
  const std::string a = put("a", small_text()), b = put("b", small_text() + small_text());
  const Args mixed = tiny_train(a + ":0.7", at("mixed")) + Args{"--text", b + ":0.3"};
  const Outcome outcome = run(mixed);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(fs::exists(at("mixed/data/train-0.tokens")) && fs::exists(at("mixed/data/train-1.tokens")));
  EXPECT_THAT(slurp(at("mixed/config.toml")), HasSubstr(a + ":0.7"));
  const Outcome again = run({"train", at("mixed/config.toml"), "--out", at("again"), "--threads", "2"});
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_TRUE(weights(at("again")) == weights(at("mixed")));
  // Other weights, other windows.
  ASSERT_EQ(run(tiny_train(a + ":0.3", at("other")) + Args{"--text", b + ":0.7"}).code, 0);
  EXPECT_FALSE(weights(at("other")) == weights(at("mixed")));

  // Stopped after step 4 and resumed: the same bits. With other weights it does not go on.
  const std::string half = at("half");
  ASSERT_EQ(run({"train", at("mixed/config.toml"), "--out", half, "--checkpoint-every", "2", "--keep", "5"}).code, 0);
  fs::remove_all(half + "/checkpoints/step-6");
  expect_refused({"train", "--resume", "--out", half, "--text", a + ":0.6", "--text", b + ":0.4"}, "--resume");
  const Outcome resumed = run({"train", "--resume", "--out", half});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
  EXPECT_TRUE(weights(half) == weights(at("mixed")));
}

TEST_F(Data, WeightsOfTokenFilesResumeOnlyWithThem) {
  const std::string text = put("text", small_text());
  ASSERT_EQ(run({"tokenize", text, "--out", at("a.tokens")}).code, 0);
  ASSERT_EQ(run({"tokenize", text, "--out", at("b.tokens")}).code, 0);
  const Args train =
      tiny_train(at("a.tokens") + ":2", at("run")) + Args{"--text", at("b.tokens") + ":1", "--valid-fraction", "0"};
  ASSERT_EQ(run(train).code, 0);
  expect_refused({"train", "--resume", "--out", at("run"), "--steps", "8", "--text", at("a.tokens") + ":1", "--text",
                  at("b.tokens") + ":2"},
                 "a mix of");
}

TEST_F(Data, WeightsThatCannotBe) {
  const std::string a = put("a", small_text()), colon = put("name:1", small_text());
  expect_refused(tiny_train(a + ":0.5", at("run")) + Args{"--text", colon}, "has none");
  expect_refused(tiny_train(a + ":0", at("run")), "weight > 0");
  expect_refused(tiny_train(a + ":-1", at("run")), "weight > 0");
  expect_refused(tiny_train(a + ":half", at("run")), "a:half");
  EXPECT_EQ(run(tiny_train(colon, at("run"))).code, 0);  // a file that is called so
}

// ---- what is kept

TEST_F(Data, ARunGoesOnWithItsTokensWhenTheTextIsGone) {
  const std::string text = put("text", small_text());
  ASSERT_EQ(run(tiny_train(text, at("run"))).code, 0);
  fs::remove(text);
  const Outcome resumed = run({"train", "--resume", "--out", at("run"), "--steps", "8"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("text is no longer"));
  // asked for by name
  expect_refused({"train", "--resume", "--out", at("run"), "--steps", "9", "--text", text}, "text");
  expect_refused({"train", at("run/config.toml"), "--out", at("new")}, "text");
}

TEST_F(Data, AnInterruptedTokenizationGoesOn) {
  std::string text;
  while (text.size() < (size_t{6} << 20)) text += small_text() + "%\n";
  put("text", text);
  put("little", small_text());
  ASSERT_EQ(run({"tokenize", at("little"), "--train-sentencepiece", "--vocab", "290", "--out", at("sp.model")}).code,
            0);
  const Args tokenize{"tokenize", at("text"), "--separator", "%", "--tokenizer", at("sp.model"), "--out"};
  const std::string part = at("out.tokens.tokenizing");
  Program program(tokenize + Args{at("out.tokens")});
  for (int i = 0; i < 6000 && !(fs::exists(part) && fs::file_size(part) > 64); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  program.signal(SIGINT);
  const Outcome stopped = program.wait();
  ASSERT_EQ(stopped.code, 130) << stopped.out << stopped.err;
  EXPECT_THAT(stopped.out, HasSubstr("goes on from there"));
  EXPECT_FALSE(fs::exists(at("out.tokens")));
  const Outcome resumed = run(tokenize + Args{at("out.tokens")});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("went on behind the first"));
  ASSERT_EQ(run(tokenize + Args{at("whole.tokens")}).code, 0);
  EXPECT_TRUE(slurp(at("out.tokens")) == slurp(at("whole.tokens")));
  EXPECT_FALSE(fs::exists(part));
}

// The peak of the memory is that of 24 times less text.
TEST_F(Data, MemoryDoesNotGrowWithTheText) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep what was freed";
#endif
  std::string text;
  while (text.size() < (size_t{2} << 20)) text += small_text();
  put("small", text);
  for (int i = 0; i < 24; ++i) std::filesystem::copy_file(at("small"), at("big" + std::to_string(i)));
  const Outcome small = run({"tokenize", at("small"), "--out", at("s.tokens")});
  const Outcome big = run({"tokenize", at("big*"), "--out", at("b.tokens")});
  ASSERT_EQ(small.code, 0) << small.err;
  ASSERT_EQ(big.code, 0) << big.err;
  EXPECT_LT(big.peak_kib, small.peak_kib + 8 * 1024);
}

}  // namespace
}  // namespace fw::test
