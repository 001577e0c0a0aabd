// Files that nest without end are refused before a parser that recurses meets them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

std::string repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

void expect_refused(const Args& args, const std::string& file) {
  const Outcome outcome = run(args);
  EXPECT_EQ(outcome.code, 2) << args[0] << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(file)) << args[0];
  EXPECT_THAT(outcome.err, HasSubstr("inside each other")) << args[0];
}

TEST(Nesting, ConfigJson) {
  const Folder folder;
  std::filesystem::create_directories(folder / "model");
  spill(folder / "model/config.json", "{\"model_type\": " + repeated("[", 50000) + repeated("]", 50000) + "}");
  spill(folder / "text", small_text());
  for (const Args& args :
       {Args{"generate", folder / "model"}, Args{"eval", folder / "model", "--text", folder / "text"},
        Args{"analyze", folder / "model", "--text", folder / "text"}, Args{"export", folder / "model", folder / "out"},
        Args{"import", folder / "model", folder / "out"}, Args{"verify", folder / "model"}}) {
    expect_refused(args, "config.json");
  }
}

TEST(Nesting, RunFiles) {
  const Folder folder;
  const std::string file = folder / "run.toml";
  for (const std::string& text :
       {repeated("a.", 60000) + "a = 1\n", "[" + repeated("a.", 60000) + "a]\n",
        "[[" + repeated("a . ", 60000) + "a]]\n", "a = " + repeated("[", 60000), "a = " + repeated("{a = ", 60000),
        "[a.a]\nb = {" + repeated("\"a\".", 60000) + "a = 1}\n"}) {
    spill(file, text);
    expect_refused({"train", file}, file + ":");
  }
}

// What a file may well have: brackets and dots in strings and comments, dots of numbers, tables side by side. Its
// unknown key is found, which comes after parsing.
TEST(Nesting, WhatOnlyLooksDeepIsRead) {
  const Folder folder;
  const std::string file = folder / "run.toml";
  const auto expect_read = [&](const std::string& text) {
    spill(file, text);
    const Outcome outcome = run({"train", file});
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.err, HasSubstr("unknown")) << text;
  };
  expect_read("a = \"" + repeated("[", 100) + "\\\" \"\n");
  expect_read("a = '" + repeated("{.", 100) + "'  # " + repeated("[", 100) + "\n");
  expect_read("a = \"\"\"\n" + repeated("[.", 100) + "\\\"\"\" \n\"\"\"\n");
  expect_read("a = [" + repeated("1.5, ", 100) + "2.5]\n");
  std::string tables;
  for (int i = 0; i < 100; ++i) tables += "[t" + std::to_string(i) + ".x]\ny.z = {w = [1.5]}\n";
  expect_read(tables);
  expect_read(repeated("a.", 31) + "a = 1\n");
  spill(file, repeated("a.", 33) + "a = 1\n");
  expect_refused({"train", file}, file + ":1");
}

}  // namespace
}  // namespace fw::test
