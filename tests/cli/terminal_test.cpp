// What reaches a terminal: escape sequences where it knows them and nowhere else, and names as text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using Args = std::vector<std::string>;

constexpr const char* kErase = "\r\033[K";
const std::string kName = "a\033[31mb\x07";  // red, and a bell
const std::string kShown = "a\\x1b[31mb\\x07";

TEST(Terminal, TheBarMovesBetweenLogLines) {
  Folder folder;
  spill(folder / "text", small_text());
  const std::string out =
      run_on_terminal(tiny_train(folder / "text", folder / "run") + Args{"--log-every", "6"}, {"TERM=xterm"});
  EXPECT_THAT(out, HasSubstr(kErase));
  EXPECT_THAT(out, HasSubstr("step 1/6"));
}

TEST(Terminal, NoEscapesWhereTheyAreNotKnownOrNotWanted) {
  Folder folder;
  spill(folder / "text", small_text());
  int run_number = 0;
  for (const Args& variables : {Args{"TERM=dumb"}, Args{"TERM="}, Args{}, Args{"TERM=xterm", "NO_COLOR=1"}}) {
    const std::string run_folder = folder / ("run" + std::to_string(run_number++));
    const std::string out = run_on_terminal(tiny_train(folder / "text", run_folder), variables);
    EXPECT_THAT(out, Not(HasSubstr("\033"))) << run_number;
    EXPECT_THAT(out, HasSubstr("tok/s")) << "lines stand for the bar";
    EXPECT_THAT(out, HasSubstr("trained 6 steps"));
    EXPECT_THAT(run_on_terminal({"tokenize", folder / "text", "--out", folder / "t"}, variables),
                Not(HasSubstr("\033")));
    EXPECT_THAT(run_on_terminal({"bench", "--rule", "deltanet", "--tokens", "16", "--heads", "1", "--key-dim", "8",
                                 "--value-dim", "8", "--repeats", "1"},
                                variables),
                Not(HasSubstr("\033")));
  }
}

// Whatever the program says of a name, in an error or not, on standard output or beside it.
TEST(Names, ControlCharactersAreShownAndNotSent) {
  Folder folder;
  const std::string text = folder / kName, model = folder / (kName + "run"), token_file = folder / (kName + "tokens"),
                    state = folder / (kName + "state");
  spill(text, small_text());
  spill(folder / "nul.toml", "[data]\ntext = \"a\\u0000b\"\n");
  spill(folder / "escape.toml", "[train]\nsteps = \"\\u001b[31m\"\n");
  const std::vector<std::pair<int, Args>> calls = {
      {0, tiny_train(text, model)},
      {0, {"train", "--resume", "--out", model}},
      {0, {"tokenize", text, "--out", token_file}},
      {0, {"tokenize", text, "--out", token_file, "--separator", kName}},
      {0, {"tokenize", "--info", token_file}},
      {0, {"curves", model, "--out", folder / (kName + "curve")}},
      {2, {"tokenize", token_file, "--out", folder / "t"}},
      {2, {"eval", folder / (kName + "missing"), "--text", text}},
      {2, {"eval", model, "--text", folder / (kName + "missing")}},
      {2, {"generate", model, "--state-load", text}},
      {2, {"info", text}},
      {2, {"rules", kName}},
      {2, {kName}},
      {2, {"train", "--" + kName}},
      {2, {"train", "--text", text, "--rule", kName}},
      {2, {"train", folder / "escape.toml"}},
      {2, {"generate", model, kName}},
  };
  for (const auto& [code, args] : calls) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, code) << args[0] << ": " << outcome.out << outcome.err;
    EXPECT_THAT(outcome.out + outcome.err, Not(HasSubstr("\033"))) << args[0];
    EXPECT_THAT(outcome.out + outcome.err, Not(HasSubstr("\x07"))) << args[0];
    if (code != 0) {
      EXPECT_THAT(outcome.err, HasSubstr("\\x1b[31m")) << args[0];
    }
  }
  const Outcome nul = run({"train", folder / "nul.toml"});
  EXPECT_EQ(nul.code, 2);
  EXPECT_THAT(nul.err, HasSubstr("data.text: expected text without a NUL character"));
  // What is drawn of it is XML still.
  EXPECT_THAT(slurp(folder / (kName + "curve.svg")), Not(HasSubstr("\033")));
  EXPECT_THAT(slurp(folder / (kName + "curve.svg")), HasSubstr(kShown));
}

// A run file is TOML, which is UTF-8: another name is refused before there is anything to lose.
TEST(Names, WhatARunFileCannotHoldIsRefusedBeforeTheWork) {
  Folder folder;
  const std::string text = folder / "n\xff.txt";
  spill(text, small_text());
  spill(folder / "text", small_text());
  for (const Args& args : {tiny_train(text, folder / "run"), tiny_train(folder / "text", folder / "run\xff"),
                           tiny_train(folder / "text", folder / "run") + Args{"--valid", text}}) {
    const Outcome outcome = run(args);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr("expected UTF-8, which alone a run file can hold"));
    EXPECT_FALSE(std::filesystem::exists(folder / "run"));
    EXPECT_FALSE(std::filesystem::exists(folder / "run\xff"));
  }
  // Commands without a run file take any name; JSON shows it with a mark in its place.
  ASSERT_EQ(run(tiny_train(folder / "text", folder / "run")).code, 0);
  const Outcome outcome =
      run({"analyze", folder / "run", "--text", text, "--tokens", "64", "--out", folder / "a\xff", "--no-pictures"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(slurp(folder / "a\xff/analysis.json"), HasSubstr("n\xef\xbf\xbd.txt"));
  EXPECT_EQ(run({"eval", folder / "run", "--text", text, "--json"}).code, 0);
}

}  // namespace
}  // namespace fw::test
