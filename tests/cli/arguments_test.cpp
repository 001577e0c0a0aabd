// Arguments that begin with a dash, standard input as a text, and options that are accepted and seldom meant.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using Args = std::vector<std::string>;

TEST(Arguments, TwoDashesEndTheOptions) {
  Folder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  spill(folder / "--text", small_text());
  spill(folder / "plain", small_text());
  std::filesystem::current_path(folder.path());
  EXPECT_EQ(run({"tokenize", "--out", "t", "--", "--text"}).code, 0);
  EXPECT_EQ(run({"tokenize", "plain", "--out", "both", "--", "--text"}).code, 0);
  EXPECT_THAT(run({"tokenize", "--info", "both"}).out, HasSubstr("2 documents"));
  EXPECT_EQ(run({"tokenize", "plain", "--out", "t", "--"}).code, 0);
  EXPECT_THAT(run({"tokenize", "--", "plain", "--out=t"}).err, HasSubstr("--out is missing"));
  EXPECT_THAT(run({"generate", "--", "run", "--tokens"}).err, HasSubstr("unexpected argument '--tokens'"));
  EXPECT_THAT(run({"generate", "--tokns", "--", "run"}).err, HasSubstr("unknown option '--tokns'"));
  std::filesystem::current_path(before);
}

TEST(Input, ADashIsStandardInput) {
  Folder folder;
  const std::string text = small_text();
  spill(folder / "text", text);
  ASSERT_EQ(run({"tokenize", folder / "text", "--out", folder / "file.tokens"}).code, 0);
  const Outcome piped = run_with_input({"tokenize", "-", "--out", folder / "piped.tokens"}, text);
  EXPECT_EQ(piped.code, 0) << piped.err;
  EXPECT_EQ(slurp(folder / "piped.tokens"), slurp(folder / "file.tokens"));

  ASSERT_EQ(run(tiny_train(folder / "text", folder / "run")).code, 0);
  const Args eval{"eval", folder / "run", "--context", "64", "--text"};
  const Outcome from_file = run(eval + Args{folder / "text"}), from_input = run_with_input(eval + Args{"-"}, text);
  EXPECT_EQ(from_input.code, 0) << from_input.err;
  EXPECT_EQ(from_input.out, from_file.out);
  const Outcome analysis = run_with_input(
      {"analyze", folder / "run", "--text", "-", "--tokens", "64", "--out", folder / "a", "--no-pictures"}, text);
  EXPECT_EQ(analysis.code, 0) << analysis.err;

  EXPECT_THAT(run_with_input({"tokenize", "-", "-", "--out", folder / "t"}, text).err,
              HasSubstr("expected standard input once"));
  EXPECT_THAT(run({"tokenize", "-", "--out", folder / "t"}).err, HasSubstr("there is no text"));  // /dev/null
  EXPECT_THAT(run_with_input({"tokenize", "-", "--train-sentencepiece", "--out", folder / "t"}, text).err,
              HasSubstr("reads more than once"));
  for (const char* key : {"--text", "--valid", "--test"}) {
    const Outcome train = run_with_input(tiny_train(folder / "text", folder / "other") + Args{key, "-"}, text);
    EXPECT_EQ(train.code, 2);
    EXPECT_THAT(train.err, HasSubstr("reads its texts more than once"));
    EXPECT_FALSE(std::filesystem::exists(folder / "other"));
  }
}

// What an interrupted call left of a file is not what standard input goes on from.
TEST(Input, LeavesNothingBehindAndTakesUpNothing) {
  Folder folder;
  spill(folder / "t.tokenizing", "an earlier call's");
  ASSERT_EQ(run_with_input({"tokenize", "-", "--out", folder / "t"}, small_text()).code, 0);
  EXPECT_FALSE(std::filesystem::exists(folder / "t.tokenizing"));
  EXPECT_FALSE(std::filesystem::exists(folder / "t.tokenizing.offsets"));
}

TEST(Warnings, AWarmUpThatIsTheWholeRun) {
  Folder folder;
  spill(folder / "text", small_text());
  const Args args = tiny_train(folder / "text", folder / "run");  // 6 steps, 2 of warm-up
  EXPECT_THAT(run(args + Args{"--dry-run", "--warmup", "5"}).err, Not(HasSubstr("warmup")));
  EXPECT_THAT(run(args + Args{"--dry-run", "--warmup", "6"}).err, HasSubstr("warning: warmup: 6 steps of the 6"));
  const Outcome outcome = run(args + Args{"--warmup", "100"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.err, HasSubstr("warning: warmup: 100 steps of the 6"));
}

TEST(Warnings, ASeparatorThatNeverOccurs) {
  Folder folder;
  spill(folder / "text", small_text());
  spill(folder / "parted", small_text() + "%\n" + small_text() + "%\n" + small_text());
  const Args cut{"--separator", "%", "--valid-fraction", "0"};
  const std::string words = "no line of the text is the separator '%'";
  EXPECT_THAT(run({"tokenize", folder / "text", "--out", folder / "t", "--separator", "%"}).out, HasSubstr(words));
  EXPECT_THAT(run({"tokenize", folder / "parted", "--out", folder / "t", "--separator", "%"}).out,
              Not(HasSubstr(words)));
  EXPECT_THAT(run(tiny_train(folder / "text", folder / "run") + cut).out, HasSubstr(words));
  EXPECT_THAT(run(tiny_train(folder / "parted", folder / "parted-run") + cut).out, Not(HasSubstr(words)));
  EXPECT_THAT(run({"eval", folder / "run", "--text", folder / "text", "--separator", "%"}).err, HasSubstr(words));
  EXPECT_THAT(run({"eval", folder / "run", "--text", folder / "parted", "--separator", "%"}).err,
              Not(HasSubstr(words)));
  EXPECT_THAT(run(tiny_train(folder / "text", folder / "held") + Args{"--separator", "%"}).err,
              HasSubstr("lines that are '%': are there any?"));
}

}  // namespace
}  // namespace fw::test
