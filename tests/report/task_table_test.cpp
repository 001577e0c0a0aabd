// The table of a task's cells: means, spreads, published numbers and ceilings, by hand.
#include "report/task_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace fw {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TaskResult result(const std::string& rule, uint64_t seed, double at256, double at2048) {
  TaskResult r;
  r.task = "mqar";
  r.rule = rule;
  complete(r.recipe, r.task);
  r.model = task_model(r.task);
  set_mixers(r.model, rule);
  r.lr = 1e-3;
  r.seed = seed;
  r.parameters = 4460000;
  r.curve = {{200, 5, 0.1}, {400, 4, at256}};
  r.scores = {{256, 0, {100, 0, at256, 0.5}, 0.985}, {2048, 0, {100, 0, at2048, 0.5}, 0.89}};
  return r;
}

TEST(TaskTable, MeansSpreadsAndWhatIsPublished) {
  const std::vector<TaskResult> results{result("kaczmarz", 1, 0.98, 0.7), result("kaczmarz", 2, 0.99, 0.8),
                                        result("kda", 1, 0.97, 0.6)};
  const std::string table = task_table(results).markdown();
  EXPECT_THAT(table,
              HasSubstr("| kaczmarz | 0.001 | 2 | 4.46M | **98.50 ± 0.71 (98.35\\*)** | **75.00 ± 7.07 (73.84)** |"));
  EXPECT_THAT(table, HasSubstr("| kda | 0.001 | 1 | 4.46M | 97.00 | 60.00 |"));
  EXPECT_THAT(table, HasSubstr("| last-write memory |  |  |  | 98.50 | 89.00 |"));
  const std::string report = task_report(results);
  EXPECT_THAT(report, HasSubstr("result files"));
  EXPECT_THAT(report, HasSubstr("\\* The paper's table"));
  EXPECT_THAT(task_report({result("kda", 1, 0.97, 0.6)}), Not(HasSubstr("In brackets")));
  EXPECT_THAT(task_report({}), HasSubstr("No cell is finished yet"));
}

TEST(TaskTable, TheCaptionSaysOnceWhereTheResultsComeFrom) {
  std::vector<TaskResult> results{result("kda", 1, 0.9, 0.5), result("kda", 2, 1.0, 0.7)};
  EXPECT_THAT(task_report(results), Not(HasSubstr("Provenance")));
  results[0].provenance = {"fastweight 1", "fastweight sweep mqar", "NVIDIA H200", "2026-12-01"};
  results[1].provenance = results[0].provenance;
  EXPECT_THAT(
      task_caption(results),
      HasSubstr(
          " Provenance: program fastweight 1, device NVIDIA H200, date 2026-12-01, command fastweight sweep mqar."));
  results[1].provenance.date = "2026-12-02";
  EXPECT_THAT(task_caption(results), HasSubstr("device NVIDIA H200, date several, command fastweight sweep mqar."));
  results[1].provenance = {};  // of an earlier version
  EXPECT_THAT(task_caption(results), HasSubstr("program several, device several, date several, command several."));
}

TEST(TaskTable, AccuracyOverTheLengthsIsAMeanWithABand) {
  const Plot plot =
      task_lengths({result("kda", 1, 0.9, 0.5), result("kda", 2, 1.0, 0.7), result("mamba2", 1, 0.8, 0.2)});
  ASSERT_EQ(plot.lines.size(), 2u);
  EXPECT_EQ(plot.lines[0].label, "kda");
  EXPECT_EQ(plot.lines[0].color, color_of("kda"));
  ASSERT_EQ(plot.lines[0].points.size(), 2u);
  const PlotPoint& last = plot.lines[0].points[1];
  EXPECT_EQ(last.x, 2048);
  EXPECT_NEAR(last.y, 60, 1e-9);
  EXPECT_NEAR(last.low, 60 - std::sqrt(200), 1e-9);
  EXPECT_NEAR(last.high, 60 + std::sqrt(200), 1e-9);
  EXPECT_EQ(plot.lines[0].points[0].high, 100);  // 95 ± 7.07
  EXPECT_EQ(plot.mark_x, 256);
}

// The paper's Mamba2 is Mamba-2's own layer, and has no MLP: neither the rule nor the layer before an MLP is that
// model.
TEST(TaskTable, TheNumbersOfMamba2AreThoseOfItsOwnLayer) {
  const auto row = [](const std::string& rule, const std::string& mlp) {
    TaskResult one = result(rule, 1, 0.97, 0.6);
    one.model.mlp = mlp;
    return task_table({one}).markdown();
  };
  EXPECT_THAT(row("ssd", "none"), HasSubstr("| ssd | 0.001 | 1 | 4.46M | 97.00 (99.08) | 60.00 (64.29) |"));
  EXPECT_THAT(row("ssd", "swiglu"), HasSubstr("| ssd | 0.001 | 1 | 4.46M | 97.00 | 60.00 |"));
  EXPECT_THAT(row("mamba2", "none"), HasSubstr("| mamba2 | 0.001 | 1 | 4.46M | 97.00 | 60.00 |"));
}

// Another model, and a model of the paper that is trained otherwise, have no published number beside them.
TEST(TaskTable, PublishedNumbersAreOfTheSameModelAndTraining) {
  const auto beside = [](const auto& change) {
    TaskResult one = result("kaczmarz", 1, 0.97, 0.6);
    change(one);
    return task_report({one});
  };
  EXPECT_THAT(beside([](TaskResult&) {}), HasSubstr("97.00 (98.35\\*) | 60.00 (73.84)"));
  EXPECT_THAT(beside([](TaskResult& r) {
                r.model.init = "torch";
                r.recipe.eval_every = 500;
                r.recipe.lengths = {256, 2048};
              }),
              HasSubstr("97.00 (98.35\\*) | 60.00 (73.84)"));
  const auto none = [&](const auto& change) { EXPECT_THAT(beside(change), Not(HasSubstr("("))); };
  none([](TaskResult& r) { r.recipe.length = 128; });
  none([](TaskResult& r) { r.recipe.steps = 5000; });
  none([](TaskResult& r) { r.recipe.batch = 64; });
  none([](TaskResult& r) { r.recipe.pairs = 16; });
  none([](TaskResult& r) { r.lr = 5e-4; });
  none([](TaskResult& r) { r.model.expand_v = 3; });
  none([](TaskResult& r) { r.model.num_heads = 2; });
  none([](TaskResult& r) { r.model.num_hidden_layers = 4; });
  none([](TaskResult& r) { r.model.gain_source = "learned"; });
  none([](TaskResult& r) { r.model.mlp = "none"; });
  none([](TaskResult& r) {
    r.model.single_gate = true;
    r.model.expand_v = 128.0 / 48;
  });
}

TEST(TaskTable, PalindromeHasPublishedNumbersAtItsOwnTrainingLength) {
  const auto row = [](int64_t length) {
    TaskResult one = result("gated_deltanet", 1, 0.97, 0.6);
    one.task = "palindrome";
    one.recipe = {};
    one.recipe.length = length;
    complete(one.recipe, one.task);
    one.model = task_model(one.task);
    set_mixers(one.model, one.rule);
    return task_table({one}).markdown();
  };
  EXPECT_THAT(row(1024), HasSubstr("97.00 (99.94) | 60.00 (80.74)"));
  EXPECT_THAT(row(256), HasSubstr("97.00 | 60.00 |"));
}

TEST(TaskTable, TheAblationsHaveTheirOwnPublishedNumbers) {
  const auto row = [](const std::string& rule, const auto& change) {
    TaskResult one = result(rule, 1, 0.97, 0.6);
    change(one.model);
    return task_table({one}).markdown();
  };
  const auto wide = [](int width) { return [width](ModelConfig& m) { m.expand_v = width / 48.0; }; };
  const auto factor = [](const char* name) { return [name](ModelConfig& m) { m.gain_factor = name; }; };
  const auto nothing = [](ModelConfig&) {};
  EXPECT_THAT(row("kaczmarz", [](ModelConfig& m) { m.single_gate = true; }), HasSubstr("97.00 (0.01) | 60.00 (0.03)"));
  EXPECT_THAT(row("kaczmarz", wide(128)), HasSubstr("97.00 (98.09) | 60.00 (71.99)"));
  EXPECT_THAT(row("kaczmarz", wide(1024)), HasSubstr("97.00 (99.18) | 60.00 (92.63)"));
  EXPECT_THAT(row("kaczmarz", factor("1/t")), HasSubstr("97.00 (97.92) | 60.00 (20.5)"));
  EXPECT_THAT(row("kaczmarz", factor("1/sqrt(t)")), HasSubstr("97.00 (99.02) | 60.00 (50.2)"));
  EXPECT_THAT(row("kaczmarz_plain q_norm=raw", nothing), HasSubstr("97.00 (0.03) | 60.00 (0.01)"));
  EXPECT_THAT(row("kaczmarz_full q_norm=raw", nothing), HasSubstr("97.00 (97.81) | 60.00 (77.68)"));
  EXPECT_THAT(row("mamba2 q_norm=l2 k_norm=l2", nothing), HasSubstr("97.00 | 60.00"));
  EXPECT_THAT(row("mamba2 q_norm=l2 k_norm=l2",
                  [](ModelConfig& m) {
                    m.rope_theta = 10000;
                    m.conv_size = 0;
                    m.output_gate = "none";
                  }),
              HasSubstr("97.00 (0.03) | 60.00 (0.03)"));
}

TEST(TaskTable, ZoologyCountsByExample) {
  TaskResult one = result("kda", 1, 0.97, 0.6);
  one.task = "mqar_zoology";
  EXPECT_THAT(task_table({one}).markdown(), HasSubstr("| kda | 0.001 | 1 | 4.46M | 50.00 | 50.00 |"));
}

TEST(TaskTable, AMixturesTestsAreNamedByLengthAndPairs) {
  TaskResult one = result("kda", 1, 0.97, 0.6);
  one.task = "mqar_zoology";
  one.recipe.segments = {"64x4x100"};
  one.scores = {{64, 4, {100, 0, 0.9, 0.5}, -1}, {64, 16, {100, 0, 0.8, 0.25}, -1}};
  const std::string table = task_table({one}).markdown();
  EXPECT_THAT(table, HasSubstr("| 64, 4 pairs | 64, 16 pairs |"));
  EXPECT_THAT(table, HasSubstr("| 4.46M | 50.00 | 25.00 |"));
  EXPECT_THAT(task_report({one}), HasSubstr("Trained on a mixture (length x pairs x examples: 64x4x100)"));
}

}  // namespace
}  // namespace fw
