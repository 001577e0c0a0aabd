// Texts as they come, from the file to the run: lines that are none, kinds of files, ends of documents, and what a run
// says of them and reads again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/program.h"

namespace fw::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;
using Args = std::vector<std::string>;
using Json = nlohmann::json;

class TextsOfRuns : public testing::Test {
 protected:
  std::string at(const std::string& name) const { return folder_ / name; }
  std::string put(const std::string& name, const std::string& content) const {
    spill(at(name), content);
    return at(name);
  }
  static Outcome good(const Args& args) {
    Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
    return outcome;
  }
  static void expect_refused(const Args& args, const std::string& words) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(words));
  }
  // A tokenizer of words with an end of text, token 14.
  std::string words() const {
    fs::create_directory(at("words"));
    Json vocab{{"?", 0}, {"\n", 1}};
    int id = 2;
    for (const char* word :
         {"the", "state", "decays", "and", "a", "key", "reads", "what", "was", "written", "before", "it"})
      vocab[word] = id++;
    const Json end{{"id", id},        {"content", "<|end|>"}, {"single_word", false}, {"lstrip", false},
                   {"rstrip", false}, {"normalized", false},  {"special", true}};
    const Json split{{"type", "Split"}, {"pattern", {{"Regex", " |\n"}}}, {"behavior", "Isolated"}, {"invert", false}};
    const Json json{{"version", "1.0"},
                    {"truncation", nullptr},
                    {"padding", nullptr},
                    {"added_tokens", Json::array({end})},
                    {"normalizer", nullptr},
                    {"pre_tokenizer", split},
                    {"decoder", nullptr},
                    {"post_processor", nullptr},
                    {"model", {{"type", "WordLevel"}, {"vocab", vocab}, {"unk_token", "?"}}}};
    spill(at("words/tokenizer_config.json"), R"({"eos_token": "<|end|>"})");
    return put("words/tokenizer.json", json.dump());
  }

  Folder folder_;
};

constexpr const char* kOdd =
    "{\"text\": \"one\"}\n{\"text\": null}\n{\"other\": \"x\"}\n{\"text\": \"half \\ud83d of a pair\"}\n{\"text\": "
    "\"two\", \"score\": NaN}\n";

TEST_F(TextsOfRuns, LinesWithoutATextAreLeftOut) {
  const std::string odd = put("odd.jsonl", kOdd);
  expect_refused({"tokenize", odd, "--out", at("t")},
                 "odd.jsonl:2: \"text\" is not a string; --field names the string that is the text; --skip-bad leaves "
                 "such lines out");
  const Outcome outcome = good({"tokenize", odd, "--skip-bad", "--out", at("t")});
  for (const char* line : {"odd.jsonl:2", "odd.jsonl:3", "odd.jsonl:4"}) EXPECT_THAT(outcome.err, HasSubstr(line));
  EXPECT_THAT(outcome.out, HasSubstr("6 tokens, 2 documents"));
  EXPECT_THAT(outcome.out, HasSubstr("read: 1 file of JSON lines; 3 lines left out"));
}

TEST_F(TextsOfRuns, TrainingLeavesThemOutToo) {
  std::string lines = kOdd;
  for (int i = 0; i < 40; ++i)
    lines += R"({"text": "the state decays and a key reads what was written"})"
             "\n";
  lines += "bad\n";
  const std::string text = put("text.jsonl", lines);
  expect_refused(tiny_train(text, at("run")), "--skip-bad leaves such lines out");
  const Outcome outcome = good(tiny_train(text, at("run2")) + Args{"--skip-bad"});
  EXPECT_THAT(outcome.out, HasSubstr("4 lines without a text were left out"));
  EXPECT_THAT(outcome.err, HasSubstr("text.jsonl:46"));
  EXPECT_THAT(outcome.out, HasSubstr("text      1 file of JSON lines"));
}

TEST_F(TextsOfRuns, KindsOfFilesAreSaid) {
  put("a.txt", "some text\n");
  put("b.txt", "more of it\n");
  put("c.jsonl", "{\"text\": \"a line\"}\n");
  ASSERT_EQ(std::system(("gzip -kf '" + at("a.txt") + "'").c_str()), 0);
  const Outcome outcome = good({"tokenize", at("a.txt"), at("b.txt"), at("a.txt.gz"), at("c.jsonl"), "--out", at("t")});
  EXPECT_THAT(outcome.out, HasSubstr("read: 2 files of plain text, 1 of plain text (gzip), 1 of JSON lines"));
}

// SentencePiece reads its file itself, as plain text.
TEST_F(TextsOfRuns, PiecesAreTrainedOnPlainText) {
  put("a.txt", small_text());
  ASSERT_EQ(std::system(("gzip -kf '" + at("a.txt") + "'").c_str()), 0);
  expect_refused({"tokenize", at("a.txt.gz"), "--train-sentencepiece", "--vocab", "290", "--out", at("m")},
                 "is packed");
  expect_refused({"tokenize", put("a.jsonl", kOdd), "--train-sentencepiece", "--vocab", "290", "--out", at("m")},
                 "is JSON lines");
}

TEST_F(TextsOfRuns, DocumentsEndWithTheTokenizersEnd) {
  const std::string tokenizer = words(), text = put("text", small_text());
  const Outcome said = good({"tokenize", text, "--tokenizer", tokenizer, "--out", at("t")});
  EXPECT_THAT(said.out, HasSubstr("end of each document: token 14"));
  EXPECT_THAT(good({"tokenize", "--info", at("t")}).out, HasSubstr("end of each document: token 14"));
  const Outcome none = good({"tokenize", text, "--tokenizer", tokenizer, "--out", at("u"), "--no-document-end"});
  EXPECT_THAT(none.out, Not(HasSubstr("end of each document")));
  EXPECT_THAT(good({"tokenize", "--info", at("u")}).out, HasSubstr("end of each document: as in the text"));
  const Outcome trained = good(tiny_train(text, at("run")) + Args{"--tokenizer", tokenizer});
  EXPECT_THAT(trained.out, HasSubstr("1 documents that end with token 14"));
  EXPECT_THAT(slurp(at("run/config.toml")), HasSubstr("document_end = true"));
  // A text that is scored has no end of its own.
  const Json scored =
      Json::parse(good({"eval", at("run"), "--text", put("three", "the state the"), "--context", "0", "--json"}).out);
  EXPECT_EQ(scored["results"][0]["tokens"], 4);
  EXPECT_EQ(scored["results"][0]["bytes"], 10);
}

// A run of a program that did not end documents goes on with the data that it has.
TEST_F(TextsOfRuns, AnOlderRunKeepsItsData) {
  const std::string tokenizer = words(), text = put("text", small_text());
  const Args train =
      tiny_train(text, at("run")) + Args{"--tokenizer", tokenizer, "--no-document-end", "--checkpoint-every", "2"};
  good(train);
  const std::string tokens = slurp(at("run/data/train.tokens"));
  std::string config = slurp(at("run/config.toml"));
  for (const char* line : {"document_end = false\n", "skip_bad = false\n", "sample_every = 0\n"}) {
    const size_t pos = config.find(line);
    ASSERT_NE(pos, std::string::npos) << line;
    config.erase(pos, std::string(line).size());
  }
  spill(at("run/config.toml"), config);
  const Outcome more = good({"train", "--resume", "--out", at("run"), "--steps", "8"});
  EXPECT_THAT(more.out, HasSubstr("note: not as the run began: train.steps"));
  EXPECT_THAT(more.out, Not(HasSubstr("document_end")));
  EXPECT_TRUE(slurp(at("run/data/train.tokens")) == tokens);
  EXPECT_THAT(slurp(at("run/config.toml")), HasSubstr("document_end = false"));
  expect_refused({"train", "--resume", "--out", at("run"), "--document-end"},
                 "the text, its split or the tokenizer is not what the run");
}

TEST_F(TextsOfRuns, AnotherFieldOfTheTestIsAnotherTest) {
  const std::string text = put("text", small_text()),
                    test = put("test.jsonl", R"({"a": "the state decays", "b": "a key"})"
                                             "\n");
  const Args train = tiny_train(text, at("run")) + Args{"--test", test, "--checkpoint-every", "2"};
  good(train + Args{"--field", "a"});
  EXPECT_EQ(Json::parse(slurp(at("run/test.json"))).at("tokens"), 15);
  expect_refused({"train", "--resume", "--out", at("run"), "--field", "b"},
                 "the text, its split or the tokenizer is not what the run");
  fs::remove_all(at("run/checkpoints"));
  good(train + Args{"--field", "b"});
  EXPECT_EQ(Json::parse(slurp(at("run/test.json"))).at("tokens"), 4);
}

TEST_F(TextsOfRuns, ATestThatCannotBeScoredIsFoundFirst) {
  const std::string text = put("text", small_text());
  const auto refused = [&](const std::string& test, const std::string& words) {
    const Outcome outcome = run(tiny_train(text, at("run")) + Args{"--test", test});
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(words));
    EXPECT_THAT(outcome.out, Not(HasSubstr("trained")));
    EXPECT_FALSE(fs::exists(at("run/checkpoints")));
  };
  refused(put("short", "x"), "leave nothing to predict");
  good({"tokenize", text, "--tokenizer", words(), "--out", at("other.tokens")});
  refused(at("other.tokens"), "made with another tokenizer");
}

TEST_F(TextsOfRuns, WhatARunHeldOutIsWhatIsEvaluated) {
  const std::string text = put("text", small_text());
  good(tiny_train(text, at("run")) + Args{"--checkpoint-every", "2", "--eval-every", "2"});
  const std::string expected = good({"eval", at("run"), "--text", at("run/data/valid.tokens"), "--context", "64"}).out;
  const Outcome outcome = good({"eval", at("run"), "--context", "64"});
  EXPECT_EQ(outcome.out, expected);
  EXPECT_THAT(outcome.err, HasSubstr("run/data/valid.tokens"));
  EXPECT_EQ(good({"eval", at("run/model"), "--context", "64"}).out, expected);
  EXPECT_EQ(good({"eval", at("run/checkpoints/step-6"), "--context", "64"}).out, expected);
  good({"analyze", at("run"), "--tokens", "64", "--out", at("analysis"), "--no-pictures"});
  EXPECT_THAT(slurp(at("analysis/analysis.json")), HasSubstr("run/data/valid.tokens"));
  good(tiny_train(text, at("none")) + Args{"--valid-fraction", "0"});
  expect_refused({"eval", at("none")}, "is no run with held-out data");
  expect_refused({"analyze", at("none"), "--out", at("analysis")}, "is no run with held-out data");
}

TEST_F(TextsOfRuns, SamplesOnTheWayChangeNothing) {
  const std::string text = put("text", small_text());
  const Outcome plain = good(tiny_train(text, at("plain"))),
                outcome = good(tiny_train(text, at("run")) + Args{"--sample-every", "3"});
  EXPECT_THAT(outcome.out, HasSubstr("sample at step 3:\n"));
  EXPECT_THAT(outcome.out, HasSubstr("sample at step 6:\n"));
  EXPECT_THAT(plain.out, Not(HasSubstr("sample at")));
  EXPECT_TRUE(slurp(at("run/model/model.safetensors")) == slurp(at("plain/model/model.safetensors")));
  EXPECT_THAT(outcome.out, HasSubstr("tok/s, "));
  EXPECT_THAT(outcome.out, HasSubstr("cost      384 tokens, "));
  EXPECT_THAT(outcome.out, HasSubstr("next:\n  fastweight generate " + at("run")));
  EXPECT_THAT(outcome.out, HasSubstr("  fastweight eval " + at("run")));
}

// The record of a step that an earlier process made has no time: it has no sign either.
TEST_F(TextsOfRuns, NumbersThatAreNotKnownHaveNoSign) {
  const std::string text = put("text", small_text());
  good(tiny_train(text, at("run")) + Args{"--checkpoint-every", "6"});
  std::string metrics = slurp(at("run/metrics.jsonl"));
  metrics.erase(metrics.rfind("{\"step\":6"));
  spill(at("run/metrics.jsonl"), metrics);
  const Outcome outcome = good({"train", "--resume", "--out", at("run")});
  EXPECT_THAT(outcome.out, Not(HasSubstr("nan")));
  const std::string csv = slurp(at("run/metrics.csv"));
  EXPECT_THAT(csv, HasSubstr("\n6,"));
  EXPECT_THAT(csv, HasSubstr("nan")) << "the time of step 6";
  EXPECT_THAT(csv, Not(HasSubstr("-nan")));
}

TEST_F(TextsOfRuns, AnInterruptedEvaluationKeepsWhatItScored) {
  good(tiny_train(put("text", small_text()), at("run")));
  const std::string requests = put(
      "requests.jsonl",
      R"({"task":"t","id":0,"type":"ll","ctx":"the","cont":" state"})"
      "\n"
      R"({"task":"t","id":1,"type":"gen","prompt":"a","answers":["x"],"max_gen":16777216,"until":["\u0000never"],"metric":"contains"})"
      "\n");
  for (int wait = 500; wait < 60000 && !fs::exists(at("out/samples.jsonl")); wait *= 2) {
    Program program(
        {"eval", at("run"), "--requests", requests, "--max-length", "0", "--out", at("out"), "--threads", "1"});
    std::this_thread::sleep_for(std::chrono::milliseconds(wait));
    program.signal(SIGINT);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.code, 130) << outcome.err;
  }
  const std::string samples = slurp(at("out/samples.jsonl"));
  EXPECT_EQ(std::count(samples.begin(), samples.end(), '\n'), 1);
  EXPECT_THAT(samples, HasSubstr("log_likelihood"));
  EXPECT_FALSE(fs::exists(at("out/eval.json")));
}

// Neither a prompt nor a model's text sends control characters to a terminal; a pipe gets the bytes.
TEST_F(TextsOfRuns, ATerminalGetsNoControlCharacters) {
  good(tiny_train(put("text", small_text()), at("run")));
  const std::string prompt = "a\x1b[31m\xc2\x9b\x7f\xe2\x80\xae\r!";
  const Args args{"generate", at("run"), "--prompt", prompt, "--tokens", "0"};
  EXPECT_EQ(run(args).out, prompt);
  const std::string shown = run_on_terminal(args, {"TERM=xterm"});
  EXPECT_THAT(shown, HasSubstr("a\\x1b[31m\\u009b\\x7f\\u202e\\x0d!"));
  const std::string json =
      run_on_terminal({"generate", at("run"), "--tokens", "60", "--temperature", "50", "--json"}, {"TERM=xterm"});
  for (const char c : json)
    EXPECT_TRUE((c >= ' ' && c <= '~') || c == '\n' || c == '\r' || c == '\x7f') << static_cast<int>(c);
}

}  // namespace
}  // namespace fw::test
