// train with held-out text on the way: the best model, patience, and a test that is set apart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using Args = std::vector<std::string>;
using Json = nlohmann::json;

// A rate that is much too high after some steps: the held-out loss falls and rises again.
Args rising(const Folder& folder, const std::string& out) {
  spill(folder / "text", small_text());
  spill(folder / "test", "a key reads what was written before it\n" + small_text().substr(5000, 800));
  return tiny_train(folder / "text", folder / out) + Args{"--steps",      "14", "--lr",       "2",
                                                          "--warmup",     "8",  "--schedule", "constant",
                                                          "--eval-every", "2",  "--test",     folder / "test"};
}

TEST(Validation, TheTestIsReadOnceByTheBestModel) {
  Folder folder;
  const Outcome outcome = run(rising(folder, "run"));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json best = Json::parse(slurp(folder / "run/best/best.json")),
             test = Json::parse(slurp(folder / "run/test.json"));
  EXPECT_LT(best["step"].get<int>(), 14) << "the loss has to rise again for this test";
  EXPECT_EQ(test["model"], "best");
  EXPECT_EQ(test["step"], best["step"]);
  EXPECT_THAT(outcome.out, HasSubstr("best      step " + best["step"].dump()));
  // The same as eval of that folder says.
  const Outcome eval =
      run({"eval", folder / "run/best", "--text", folder / "test", "--context", "32", "--no-carry", "--json"});
  ASSERT_EQ(eval.code, 0) << eval.err;
  EXPECT_EQ(Json::parse(eval.out)["results"][0]["loss"], test["loss"]);
  EXPECT_EQ(Json::parse(eval.out)["results"][0]["tokens"], test["tokens"]);
  // A test is not held-out text: it changes nothing that is trained.
  Args without = rising(folder, "without");
  without.resize(without.size() - 2);
  ASSERT_EQ(run(without).code, 0);
  EXPECT_EQ(slurp(folder / "without/model/model.safetensors"), slurp(folder / "run/model/model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "without/test.json"));
}

TEST(Validation, WithoutEvaluationsOnTheWayTheLastModelIsTested) {
  Folder folder;
  ASSERT_EQ(run(rising(folder, "run") + Args{"--eval-every", "0"}).code, 0);
  EXPECT_EQ(Json::parse(slurp(folder / "run/test.json"))["model"], "model");
  EXPECT_EQ(Json::parse(slurp(folder / "run/test.json"))["step"], 14);
  EXPECT_FALSE(std::filesystem::exists(folder / "run/best"));
}

TEST(Validation, PatienceEndsTheRunAndSaysSo) {
  Folder folder;
  const Outcome outcome = run(rising(folder, "run") + Args{"--steps", "1000", "--patience", "2"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("ended early: 2 evaluations in a row were not better than that of step "));
  EXPECT_TRUE(std::filesystem::exists(folder / "run/model/model.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(folder / "run/test.json"));
  const Outcome none = run(rising(folder, "none") + Args{"--eval-every", "0", "--patience", "2"});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, HasSubstr("patience: expected 0 with eval_every = 0"));
}

TEST(Validation, ATestIsPartOfTheRun) {
  Folder folder;
  ASSERT_EQ(run(rising(folder, "run") + Args{"--steps", "2"}).code, 0);
  spill(folder / "test", "something else\n");
  const Outcome changed = run({"train", "--resume", "--out", folder / "run", "--steps", "4"});
  EXPECT_EQ(changed.code, 2);
  EXPECT_THAT(changed.err, HasSubstr("is not what the run"));
  const Outcome missing = run(rising(folder, "missing") + Args{"--test", folder / "nowhere"});
  EXPECT_EQ(missing.code, 2);
  EXPECT_THAT(missing.err, HasSubstr("nowhere"));
}

}  // namespace
}  // namespace fw::test
