// fastweight curves: several runs in one picture.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;

class CurvesCommand : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* run : {"a", "b"}) std::filesystem::create_directories(folder_ / run);
    spill(folder_ / "a/metrics.jsonl",
          "{\"step\":10,\"tokens\":100,\"loss\":3.0}\n{\"step\":20,\"tokens\":200,\"loss\":2.5,\"eval_loss\":2.6,"
          "\"eval_bits_per_byte\":3.7}\n");
    spill(folder_ / "b/metrics.jsonl",
          "{\"step\":10,\"tokens\":100,\"loss\":2.0,\"eval_loss\":2.1,\"eval_bits_per_byte\":3.1}\n{\"step\":20,"
          "\"tokens\":200,\"loss\":1.5,\"eval_loss\":2.2,"
          "\"eval_bits_per_byte\":3.2}\n{\"step\":30,\"lo");
  }
  Folder folder_;
};

TEST_F(CurvesCommand, DrawsAndTabulatesRuns) {
  const Outcome outcome = run({"curves", folder_ / "a", folder_ / "b/metrics.jsonl", "--out", folder_ / "both"});
  EXPECT_THAT(outcome.out, HasSubstr("a       20     200     2.5000              2.6000         3.7000       20"));
  EXPECT_THAT(outcome.out, HasSubstr("b       20     200     1.5000              2.1000         3.1000       10"));
  if (outcome.err.find("gnuplot is not installed") != std::string::npos) {
    EXPECT_EQ(outcome.code, 2);
    return;
  }
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string svg = slurp(folder_ / "both.svg");
  for (const char* text : {"<svg", "a, held out", "loss (nats per token)", "step"}) EXPECT_THAT(svg, HasSubstr(text));
  EXPECT_EQ(slurp(folder_ / "both.png").substr(1, 3), "PNG");
}

TEST_F(CurvesCommand, RefusesWhatItCannotDraw) {
  const auto refused = [&](const std::vector<std::string>& more, const std::string& words) {
    const Outcome outcome = run(std::vector<std::string>{"curves", folder_ / "a", "--out", folder_ / "c"} + more);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.err, HasSubstr(words));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "c.svg"));
  };
  refused({"--value", "held_out"}, "did you mean 'held-out'?");
  refused({"--value", "lr"}, "no run has logged 'lr'");
  refused({"--over", "time"}, "step, tokens, epoch");
  refused({"--label", "one", "--label", "two"}, "one for each of the 1 runs");
  EXPECT_THAT(run({"curves", folder_ / "nothing"}).err, HasSubstr("RUN: expected a run folder"));
}

}  // namespace
}  // namespace fw::test
