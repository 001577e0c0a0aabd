// What a command writes is never what it reads, and a run folder is only ever one that the program made or that was empty.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"

namespace fw::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using Args = std::vector<std::string>;

class Output : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    spill(at("text"), small_text());
    const Outcome trained = run(tiny_train(at("text"), at("run")));
    ASSERT_EQ(trained.code, 0) << trained.err;
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static std::string at(const std::string& name) { return *folder_ / name; }
  // Refused, and `file` is as it was.
  static void expect_untouched(const Args& args, const std::string& file, const std::string& words) {
    const std::string before = slurp(file);
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(words));
    EXPECT_TRUE(slurp(file) == before) << file << " was changed";
  }

  static std::unique_ptr<Folder> folder_;
};
std::unique_ptr<Folder> Output::folder_;

TEST_F(Output, TokenizeOntoItsText) {
  expect_untouched({"tokenize", at("text"), "--out", at("text")}, at("text"), "--out");
  fs::create_hard_link(at("text"), at("link"));
  expect_untouched({"tokenize", at("text"), "--out", at("link")}, at("text"), "--out");
  expect_untouched({"tokenize", at("text"), "--train-sentencepiece", "--vocab", "290", "--out", at("text")}, at("text"), "--out");
  ASSERT_EQ(run({"tokenize", at("text"), "--train-sentencepiece", "--vocab", "290", "--out", at("sp.model")}).code, 0);
  expect_untouched({"tokenize", at("text"), "--tokenizer", at("sp.model"), "--out", at("sp.model")}, at("sp.model"), "--out");
}

TEST_F(Output, TrainOntoItsTextOrRunFile) {
  const std::string p = at("p");
  fs::create_directories(p + "/data");
  spill(p + "/data/train.tokens", small_text());
  expect_untouched(tiny_train(p + "/data/train.tokens", p), p + "/data/train.tokens", "--out");
  const std::string own = at("run/data/valid.tokens");
  expect_untouched(tiny_train(at("text"), at("run")) + Args{"--valid", own}, own, "checkpoints");

  fs::create_directories(at("recipes"));
  spill(at("recipes/config.toml"), "[train]\nsteps = 1\n[data]\ntext = \"" + at("text") + "\"\n");
  expect_untouched({"train", at("recipes/config.toml"), "--out", at("recipes")}, at("recipes/config.toml"), "would replace");
  EXPECT_FALSE(fs::exists(at("recipes/data")));
}

TEST_F(Output, RunFoldersAreOurOwnOrEmpty) {
  fs::create_directories(at("mine/model"));
  spill(at("mine/notes"), "of mine");
  expect_untouched(tiny_train(at("text"), at("mine")), at("mine/notes"), "holds model, notes and no run");
  EXPECT_FALSE(fs::exists(at("mine/config.toml")));

  fs::create_directories(at("empty"));
  EXPECT_EQ(run(tiny_train(at("text"), at("empty"))).code, 0);
  // What a run left that ended before its first checkpoint is begun anew, whatever the user laid beside it.
  fs::remove_all(at("empty/checkpoints"));
  spill(at("empty/notes"), "of mine");
  const Outcome again = run(tiny_train(at("text"), at("empty")));
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(slurp(at("empty/notes")), "of mine");
}

TEST_F(Output, StatesPicturesAndAnalyses) {
  const std::string model = at("run/model/model.safetensors");
  expect_untouched({"generate", at("run"), "--tokens", "1", "--state-save", model}, model, "--state-save");
  spill(at("prompt"), "to be");
  expect_untouched({"generate", at("run"), "--prompt-file", at("prompt"), "--state-save", at("prompt")}, at("prompt"), "--state-save");
  fs::copy_file(at("run/metrics.jsonl"), at("m.svg"));
  expect_untouched({"curves", at("m.svg"), "--out", at("m")}, at("m.svg"), "--out");
  fs::create_directories(at("a"));
  spill(at("a/analysis.json"), small_text());
  expect_untouched({"analyze", at("run"), "--text", at("a/analysis.json"), "--out", at("a")}, at("a/analysis.json"), "--out");
  spill(at("a/gain.svg"), small_text());
  expect_untouched({"analyze", at("run"), "--text", at("a/gain.svg"), "--out", at("a")}, at("a/gain.svg"), "--out");
}

TEST_F(Output, ModelsGoIntoNewFolders) {
  const std::string config = at("run/model/config.json");
  expect_untouched({"export", at("run"), at("run/model")}, config, "has a model already");
  fs::create_directories(at("full"));
  spill(at("full/model.safetensors"), "of mine");
  expect_untouched({"export", at("run"), at("full")}, at("full/model.safetensors"), "TARGET");
  ASSERT_EQ(run(tiny_train(at("text"), at("kda")) + Args{"--layout", "fla", "--rule", "kda"}).code, 0);
  ASSERT_EQ(run({"export", at("kda"), at("new")}).code, 0);
  expect_untouched({"import", at("new"), at("full")}, at("full/model.safetensors"), "TARGET");
}

// What cannot be written is said before the work, not after it.
TEST_F(Output, WhatCannotBeWrittenIsSaidFirst) {
  const std::string lost = at("no-folder/x");
  for (const Args& args : {Args{"tokenize", at("text"), "--out", lost}, Args{"generate", at("run"), "--tokens", "100000000", "--state-save", lost},
                           Args{"curves", at("run"), "--out", lost}, Args{"bench", "--json", lost}}) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << args[0];
    EXPECT_THAT(outcome.err, HasSubstr("there is no folder")) << args[0];
    EXPECT_EQ(outcome.out, "") << args[0];
  }
  EXPECT_THAT(run({"generate", at("run"), "--tokens", "1", "--state-save", at("run")}).err, HasSubstr("is a folder"));
}

}  // namespace
}  // namespace fw::test
