// train --from: a run that begins with another model; train --layout fla: one that can be exported.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

// A model with a SentencePiece tokenizer, made by a run whose text and tokenizer file are gone since.
class From : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    spill(*folder_ / "first", small_text());
    spill(*folder_ / "text", small_text().substr(3000) + "another text reads the state\n");
    const std::string pieces = *folder_ / "pieces.model";
    ready_ =
        fw::test::run({"tokenize", *folder_ / "first", "--train-sentencepiece", "--vocab", "290", "--out", pieces})
                .code == 0 &&
        fw::test::run(tiny_train(*folder_ / "first", base()) + Args{"--tokenizer", pieces, "--layout", "fla"}).code ==
            0;
    std::filesystem::remove(pieces);
    std::filesystem::remove(*folder_ / "first");
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override { ASSERT_TRUE(ready_); }

  static std::string base() { return *folder_ / "base"; }
  static std::string weights(const std::string& run) { return slurp(run + "/model/model.safetensors"); }
  static Args train(const std::string& from, const std::string& out) {
    return {"train",   "--from", from,       "--text", *folder_ / "text", "--out", out,         "--steps", "6",
            "--batch", "2",      "--length", "32",     "--log-every",     "2",     "--threads", "1"};
  }
  static void ok(const Args& args) {
    const Outcome outcome = fw::test::run(args);
    ASSERT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  }
  // What goes on after step 4, without the model that it began with, is what never stopped.
  static void expect_resume_to_the_bit(const std::string& from, const std::string& name) {
    const std::string whole = *folder_ / (name + "-whole"), parted = *folder_ / (name + "-parted"),
                      copy = *folder_ / (name + "-copy");
    std::filesystem::copy(from, copy, std::filesystem::copy_options::recursive);
    ok(train(copy, whole));
    ok(train(copy, parted) + Args{"--checkpoint-every", "2", "--keep", "9"});
    ASSERT_GT(std::filesystem::remove_all(parted + "/checkpoints/step-6"), 0u);
    std::filesystem::remove_all(parted + "/model");
    std::filesystem::remove_all(copy);
    const Outcome resumed = fw::test::run({"train", "--resume", "--out", parted});
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_THAT(resumed.out, HasSubstr("resumed at step 4"));
    EXPECT_EQ(weights(parted), weights(whole));
    EXPECT_EQ(slurp(parted + "/model/config.json"), slurp(whole + "/model/config.json"));
    EXPECT_EQ(slurp(parted + "/model/tokenizer.json"), slurp(whole + "/model/tokenizer.json"));
  }

  static std::unique_ptr<Folder> folder_;
  static bool ready_;
};
std::unique_ptr<Folder> From::folder_;
bool From::ready_ = false;

TEST_F(From, BeginsWithTheParametersArchitectureAndTokenizerOfTheModel) {
  const std::string still = *folder_ / "still", tuned = *folder_ / "tuned";
  ok(train(base(), still) + Args{"--steps", "0"});
  EXPECT_EQ(weights(still), weights(base()));
  ok(train(base(), tuned));
  EXPECT_NE(weights(tuned), weights(base()));
  EXPECT_EQ(slurp(tuned + "/model/config.json"), slurp(base() + "/model/config.json"));
  EXPECT_EQ(slurp(tuned + "/model/tokenizer.model"), slurp(base() + "/model/tokenizer.model"));
  EXPECT_THAT(fw::test::run({"tokenize", "--info", tuned + "/data/train.tokens"}).out, HasSubstr("vocabulary 290"));
  // The resolved run file is the run.
  ok({"train", tuned + "/config.toml", "--out", *folder_ / "again"});
  EXPECT_EQ(weights(*folder_ / "again"), weights(tuned));
}

TEST_F(From, ContradictionsAreRefusedWithBothValues) {
  const auto refused = [&](const Args& more) {
    const Outcome outcome = fw::test::run(train(base(), *folder_ / "refused") + more);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(base()));
    EXPECT_FALSE(std::filesystem::exists(*folder_ / "refused/config.toml"));
    return outcome.err;
  };
  EXPECT_THAT(refused({"--hidden-size", "32"}), HasSubstr("model.hidden_size: 32 was given (--hidden-size)"));
  EXPECT_THAT(refused({"--hidden-size", "32"}), HasSubstr("has 16"));
  EXPECT_THAT(refused({"--rule", "kda"}), HasSubstr("model.rule: kda was given"));
  EXPECT_THAT(refused({"--rule", "kda"}), HasSubstr("has gated_deltanet2"));
  const std::string tokenizer = refused({"--tokenizer", "bytes"});
  EXPECT_THAT(tokenizer, HasSubstr("'bytes' was given (bytes of 256 ids)"));
  EXPECT_THAT(tokenizer, HasSubstr("sentencepiece of 290 ids"));
  spill(*folder_ / "r.toml", "[model]\nnum_heads = 7\n");
  EXPECT_THAT(refused({*folder_ / "r.toml"}), HasSubstr("model.num_heads: 7 was given"));
}

TEST_F(From, WhatAgreesWithTheModelMayBeSaid) {
  ok(train(base(), *folder_ / "agrees") + Args{"--steps", "0", "--hidden-size", "16", "--rule", "gated_deltanet2",
                                               "--vocab-size", "0", "--tokenizer", base() + "/model/tokenizer.model"});
  EXPECT_EQ(weights(*folder_ / "agrees"), weights(base()));
}

TEST_F(From, ARunThatBeganWithAModelResumesToTheBit) { expect_resume_to_the_bit(base(), "own"); }

TEST_F(From, SoDoesOneThatBeganWithAnImportedModel) {
  const std::string fla = *folder_ / "fla", imported = *folder_ / "imported";
  ok({"export", base(), fla});
  ok({"import", fla, imported, "--tokenizer", base() + "/model/tokenizer.model"});
  expect_resume_to_the_bit(imported, "imported");
  // Its configuration is the one that it came with, so what was trained is exported with it.
  ok({"export", *folder_ / "imported-whole", *folder_ / "back"});
  EXPECT_EQ(slurp(*folder_ / "back/config.json"), slurp(fla + "/config.json"));
}

TEST_F(From, AFolderOfTheOtherProgramIsReadAsItIs) {
  const std::string fla = *folder_ / "hf", out = *folder_ / "from-hf";
  ok({"export", base(), fla});
  ok(train(fla, out) + Args{"--steps", "0", "--tokenizer", base() + "/model/tokenizer.model"});
  EXPECT_EQ(weights(out), weights(base()));
  const std::string more = *folder_ / "from-hf-more";
  ok(train(fla, more) + Args{"--steps", "1", "--tokenizer", base() + "/model/tokenizer.model"});
  std::filesystem::remove_all(fla);
  ok({"train", "--resume", "--out", more, "--steps", "2"});
}

TEST_F(From, ARunThatGoesOnHasAModelAlready) {
  ok(train(base(), *folder_ / "goes-on") + Args{"--steps", "1"});
  const Outcome outcome = fw::test::run({"train", "--resume", "--out", *folder_ / "goes-on", "--from", base()});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--resume: expected no --from"));
}

// ---- --layout fla

TEST_F(From, LayoutIsDecidedAndSaidBeforeTraining) {
  spill(*folder_ / "t", small_text());
  const std::string out = *folder_ / "kda";
  const Outcome outcome = fw::test::run(tiny_train(*folder_ / "t", out) + Args{"--layout", "fla", "--rule", "kda"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("layout    fla, kda, for which the model has "));
  EXPECT_THAT(outcome.out, HasSubstr("decay_rank = 8 (else 0)"));
  EXPECT_THAT(slurp(out + "/config.toml"), HasSubstr("\ndecay_rank = 8\n"));
  ok({"export", out, *folder_ / "kda-fla"});
  ok({"import", *folder_ / "kda-fla", *folder_ / "kda-back", "--tokenizer", "bytes"});
  EXPECT_EQ(slurp(*folder_ / "kda-back/model.safetensors"), weights(out));
  // The resolved file says the keys that were chosen; nothing is left to change.
  const Outcome again = fw::test::run({"train", out + "/config.toml", "--out", *folder_ / "kda-again"});
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("layout    fla, kda\n"));
  EXPECT_EQ(weights(*folder_ / "kda-again"), weights(out));
}

TEST_F(From, WhatCannotBeExportedIsRefusedBeforeTraining) {
  spill(*folder_ / "t", small_text());
  const auto refused = [&](const Args& more) {
    const Outcome outcome =
        fw::test::run(tiny_train(*folder_ / "t", *folder_ / "none") + Args{"--layout", "fla"} + more);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_FALSE(std::filesystem::exists(*folder_ / "none/config.toml"));
    return outcome.err;
  };
  EXPECT_THAT(refused({"--rule", "kaczmarz"}), HasSubstr("no layer that computes the rule 'kaczmarz'"));
  EXPECT_THAT(refused({"--rule", "kda", "--decay-rank", "3"}), HasSubstr("wants decay_rank = 8, but 3 was given"));
  EXPECT_THAT(refused({"--layout", "flax"}), HasSubstr("fla"));
}

}  // namespace
}  // namespace fw::test
