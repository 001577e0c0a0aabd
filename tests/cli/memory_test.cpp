// What takes more memory than there is, is refused before the work, with what to lower.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

void expect_refusal(const Args& args, const std::string& advice) {
  const Outcome outcome = run(args);
  EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(" of memory, "));
  EXPECT_THAT(outcome.err, HasSubstr(advice));
  EXPECT_LT(outcome.peak_kib, 600 << 10) << "taken before it was refused";
}

TEST(Memory, ATrainingStepThatDoesNotFit) {
  Folder folder;
  spill(folder / "text", small_text());
  const Args train = tiny_train(folder / "text", folder / "run");
  expect_refusal(train + Args{"--batch", "2000000", "--length", "1000", "--hidden-size", "4096"},
                 "lower batch or length");
  expect_refusal(train + Args{"--batch", "30000000", "--accumulate", "65536"}, "lower batch or length");
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  EXPECT_THAT(run(train + Args{"--dry-run", "--batch", "1000000", "--length", "2000"}).err,
              HasSubstr("tokens to plan a step for"));
  expect_refusal({"bench", "--train", "--batch", "8000000", "--hidden-size", "4096"}, "lower batch or length");
}

TEST(Memory, ABenchmarkThatDoesNotFit) {
  const Args bench{"bench", "--rule", "deltanet,kda"};
  expect_refusal(bench + Args{"--key-dim", "4096", "--tokens", "2000000000"}, "--key-dim");
  EXPECT_THAT(run(bench + Args{"--key-dim", "100000"}).err, HasSubstr("K: expected 1 to 4096, got 100000"));
  expect_refusal(bench + Args{"--tokens", "2000000000"}, "lower --tokens");
  expect_refusal(bench + Args{"--heads", "65536", "--tokens", "100000"}, "--heads");
  expect_refusal(bench + Args{"--tokens", "2000000000", "--dtype", "f64"}, "lower --tokens");
  EXPECT_THAT(run(bench + Args{"--heads", "9000000000000000000"}).err, HasSubstr("H: expected 1 to 65536"));
}

// Beyond all address space, so that going on ends at once too, but in another way.
TEST(Memory, TheCheckCanBeSwitchedOff) {
  const Outcome outcome = run({"bench", "--rule", "deltanet", "--tokens", "10000000", "--heads", "4096", "--key-dim",
                               "4096", "--no-check-memory"});
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("out of memory"));
}

}  // namespace
}  // namespace fw::test
