// train --dry-run: what a run would be, and nothing is written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;

int64_t files_in(const Folder& folder) {
  const std::filesystem::recursive_directory_iterator all(folder.path());
  return std::distance(begin(all), end(all));
}

TEST(DryRun, SaysWhatTheRunWouldBeAndWritesNothing) {
  Folder folder;
  spill(folder / "text", small_text());
  const Args args = tiny_train(folder / "text", folder / "run") + Args{"--num-hidden-layers", "3", "--rule", "kda"};
  const Outcome plan = run(args + Args{"--dry-run"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_EQ(files_in(folder), 1);
  EXPECT_THAT(plan.out, HasSubstr("model.layers.0 to 2"));
  EXPECT_THAT(plan.out, HasSubstr("model.embeddings"));
  EXPECT_THAT(plan.out, HasSubstr("memory "));
  EXPECT_THAT(plan.out, HasSubstr("an estimate from short steps, 1 threads"));
  // What it prints first is the run file of that run, to the letter; the answer comes last.
  const size_t at = plan.out.find("# The resolved run"), end = plan.out.find("\n\nmodel     ");
  ASSERT_NE(at, std::string::npos);
  ASSERT_NE(end, std::string::npos);
  spill(folder / "plan.toml", plan.out.substr(at, end + 1 - at));
  EXPECT_EQ(plan.out.substr(0, end).find("[mixer."), std::string::npos) << "a table of layers that the model has not";
  EXPECT_THAT(plan.out.substr(plan.out.rfind('\n', plan.out.size() - 2)), HasSubstr("time      about"));
  ASSERT_EQ(run(args).code, 0);
  const std::string written = slurp(folder / "run/config.toml"), planned = slurp(folder / "plan.toml");
  EXPECT_EQ(planned.substr(planned.find("\n[")), written.substr(written.find("\n[")));
  ASSERT_EQ(run({"train", folder / "plan.toml", "--out", folder / "again", "--threads", "1"}).code, 0);
  EXPECT_EQ(slurp(folder / "again/model/model.safetensors"), slurp(folder / "run/model/model.safetensors"));
}

TEST(DryRun, NeedsNoTextAndTakesEveryWayToSayAModel) {
  Folder folder;
  const Args small{"--hidden-size", "16", "--num-hidden-layers", "1", "--num-heads", "2",
                   "--head-dim",    "8",  "--intermediate-size", "32"};
  const Outcome sized =
      run(Args{"train", "--dry-run", "--size", "1.3b", "--rule", "kda", "--out", folder / "run"} + small);
  ASSERT_EQ(sized.code, 0) << sized.err;
  EXPECT_THAT(sized.out, HasSubstr("output_gate_rank = 128\n"));
  const Outcome fla = run(Args{"train", "--dry-run", "--layout", "fla", "--out", folder / "run"} + small);
  ASSERT_EQ(fla.code, 0) << fla.err;
  EXPECT_THAT(fla.out, HasSubstr("layout    fla, gdn2"));
  EXPECT_EQ(files_in(folder), 0);
}

// Without a GPU too: its memory is planned, and why no step is timed is said. --memory chooses what is recomputed,
// or says what would do.
TEST(DryRun, PlansAGpusMemoryWithoutOne) {
  Folder folder;
  const Args small{
      "train",      "--dry-run", "--hidden-size", "64",          "--num-hidden-layers", "4", "--num-heads", "2",
      "--head-dim", "32",        "--out",         folder / "run"};
  const Outcome host = run(small);
  EXPECT_THAT(host.out, HasSubstr("recompute none\n"));
  EXPECT_EQ(host.out.find("cuBLASLt"), std::string::npos);
  const Outcome plan = run(small + Args{"--device", "cuda"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_THAT(plan.out, HasSubstr("parameters, float32 as bf16 for products and the rest"));
  EXPECT_THAT(plan.out, HasSubstr("moments, float32"));
  EXPECT_EQ(plan.out.find("rounded stochastically"), std::string::npos);
  const Outcome narrow = run(small + Args{"--device", "cuda", "--moments", "bf16"});
  EXPECT_THAT(narrow.out, HasSubstr("moments, bf16"));
  EXPECT_THAT(narrow.out, HasSubstr("moments   bf16, rounded stochastically\n"));
  EXPECT_THAT(plan.out, HasSubstr("workspace of cuBLASLt"));
  const Outcome less = run(small + Args{"--device", "cuda", "--memory", "130M", "--batch", "16", "--length", "256"});
  ASSERT_EQ(less.code, 0) << less.err;
  EXPECT_THAT(less.out, HasSubstr("the least that fits --memory 130M"));
  EXPECT_THAT(less.out, HasSubstr("memory = '130M'"));
  const Outcome none = run(small + Args{"--memory", "1M"});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, HasSubstr("at least, with recompute"));
  EXPECT_THAT(run(small + Args{"--memory", "much"}).err, HasSubstr("expected a size such as 22G"));
}

TEST(DryRun, ARateBelowTheDefaultEndGoesDownToATenth) {
  EXPECT_THAT(run({"train", "--dry-run", "--lr", "1e-4"}).out, HasSubstr("min_lr = 1e-05"));
  EXPECT_THAT(run({"train", "--dry-run", "--lr", "1e-3"}).out, HasSubstr("min_lr = 0.0002"));
  const Outcome both = run({"train", "--dry-run", "--lr", "1e-4", "--min-lr", "2e-4"});
  EXPECT_EQ(both.code, 2);
  EXPECT_THAT(both.err, HasSubstr("min_lr: expected a number >= 0 and <= lr"));
}

TEST(DryRun, WhatTheRunWouldRefuseItRefuses) {
  Folder folder;
  spill(folder / "text", small_text());
  const Args args = tiny_train(folder / "text", folder / "run") + Args{"--dry-run"};
  EXPECT_EQ(run(args + Args{"--lr", "0"}).code, 2);
  EXPECT_EQ(run(args + Args{"--rule", "kda", "--decay-rank", "-1"}).code, 2);
  EXPECT_THAT(run({"train", "--resume", "--dry-run", "--out", folder / "run"}).err,
              HasSubstr("--resume: expected no --dry-run"));
}

}  // namespace
}  // namespace fw::test
