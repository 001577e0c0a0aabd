// What a command writes is never what it reads, and a run folder is only ever one that the program made or that was
// empty.
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
  expect_untouched({"tokenize", at("text"), "--train-sentencepiece", "--vocab", "290", "--out", at("text")}, at("text"),
                   "--out");
  ASSERT_EQ(run({"tokenize", at("text"), "--train-sentencepiece", "--vocab", "290", "--out", at("sp.model")}).code, 0);
  expect_untouched({"tokenize", at("text"), "--tokenizer", at("sp.model"), "--out", at("sp.model")}, at("sp.model"),
                   "--out");
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
  expect_untouched({"train", at("recipes/config.toml"), "--out", at("recipes")}, at("recipes/config.toml"),
                   "would replace");
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
  expect_untouched({"generate", at("run"), "--prompt-file", at("prompt"), "--state-save", at("prompt")}, at("prompt"),
                   "--state-save");
  fs::copy_file(at("run/metrics.jsonl"), at("m.svg"));
  expect_untouched({"curves", at("m.svg"), "--out", at("m")}, at("m.svg"), "--out");
  fs::create_directories(at("a"));
  spill(at("a/analysis.json"), small_text());
  expect_untouched({"analyze", at("run"), "--text", at("a/analysis.json"), "--out", at("a")}, at("a/analysis.json"),
                   "--out");
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
  for (const Args& args : {Args{"tokenize", at("text"), "--out", lost},
                           Args{"generate", at("run"), "--tokens", "100000000", "--state-save", lost},
                           Args{"curves", at("run"), "--out", lost}, Args{"bench", "--json", lost}}) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << args[0];
    EXPECT_THAT(outcome.err, HasSubstr("there is no folder")) << args[0];
    EXPECT_EQ(outcome.out, "") << args[0];
  }
  EXPECT_THAT(run({"generate", at("run"), "--tokens", "1", "--state-save", at("run")}).err, HasSubstr("is a folder"));
}

// What a command reads is known from its options alone: also of commands that take a model, a data set, or whole
// folders.
TEST_F(Output, WhateverAnOptionNames) {
  const std::string model = at("run/model/model.safetensors"), state = at("run/checkpoints/step-6/model.safetensors"),
                    text = at("a.txt");
  const Args niah{"requests", "niah_single_1", "--lengths", "128", "--examples", "1"};
  expect_untouched(niah + Args{"--model", at("run"), "--out", model}, model, "--out");
  expect_untouched({"generate", at("run"), "--tokens", "1", "--state-save", state}, state, "--state-save");
  spill(text, small_text());
  expect_untouched(tiny_train(text, at("p2")) + Args{"--profile", "--json", text}, text, "--json");
  expect_untouched(tiny_train(text + ":0.5", at("p2")) + Args{"--profile", "--json", text}, text, "--json");
  expect_untouched({"task", "niah_single_2", "--haystack", text, "--draw", "1", "--out", text}, text, "--out");
  const std::string pieces = at("pieces.model");
  ASSERT_EQ(run({"tokenize", at("text"), "--train-sentencepiece", "--vocab", "290", "--out", pieces}).code, 0);
  expect_untouched(niah + Args{"--tokenizer", pieces, "--out", pieces}, pieces, "--out");
  // What lies beside a token file while it is made.
  spill(at("b.tokenizing"), small_text());
  expect_untouched({"tokenize", at("b.tokenizing"), "--out", at("b")}, at("b.tokenizing"), "--out");
  expect_untouched({"tokenize", at("a.t*"), "--out", text}, text, "--out");
}

TEST_F(Output, LinksIntoFoldersThatAreRead) {
  fs::create_directories(at("sw"));
  for (const char* name : {"results.json", "table.md"}) spill(at("sw/" + std::string(name)), "[]");
  expect_untouched({"report", at("sw"), "--out", at("sw/table")}, at("sw/table.md"), "--out");
  fs::create_symlink(at("run/metrics.jsonl"), at("cu.svg"));
  expect_untouched({"curves", at("run"), "--out", at("cu")}, at("run/metrics.jsonl"), "--out");
  fs::create_symlink("sw/results.json", at("page.md"));
  expect_untouched({"report", at("sw"), "--out", at("page")}, at("sw/results.json"), "--out");
  // What was drawn into a folder that is read is drawn again, and a state may be gone on with in its file.
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(run({"curves", at("run"), "--out", at("run/again")}).err.find("is what this command reads"),
              std::string::npos);
    Args generate{"generate", at("run"), "--tokens", "2", "--state-save", at("run/state")};
    if (i > 0) generate.insert(generate.end(), {"--state-load", at("run/state")});
    const Outcome kept = run(generate);
    EXPECT_EQ(kept.code, 0) << kept.err;
  }
}

TEST_F(Output, ASweepLooksAtItsTableBeforeTheTraining) {
  fs::create_directories(at("late/results.json"));
  const Outcome outcome = run({"sweep", "stack", "--rule", "kda", "--out", at("late"), "--length", "30", "--lengths",
                               "30", "--steps", "2", "--hidden-size", "8", "--num-heads", "1", "--head-dim", "8"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("results.json' is a folder"));
  EXPECT_FALSE(fs::exists(at("late/cells")));
}

// A command that fails leaves no folders behind.
TEST_F(Output, FailedCommandsLeaveNothing) {
  spill(at("tiny"), "a\n");
  spill(at("bad.jsonl"), "{\"text\": \"a b c\"}\nnonsense\n");
  EXPECT_EQ(run(tiny_train(at("tiny"), at("left/run"))).code, 2);
  EXPECT_EQ(run(tiny_train(at("bad.jsonl"), at("left/run"))).code, 2);
  EXPECT_EQ(run({"analyze", at("run"), "--text", at("nothing"), "--out", at("left/d1")}).code, 2);
  EXPECT_EQ(run({"eval", at("run"), "--requests", at("nothing"), "--out", at("left/e")}).code, 2);
  EXPECT_EQ(run({"sweep", "stack", "--rule", "kda", "--out", at("left/s"), "--device", "cuda:77"}).code, 2);
  EXPECT_FALSE(fs::exists(at("left")));
}

}  // namespace
}  // namespace fw::test
