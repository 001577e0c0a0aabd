// rules: several names, and what it and train say of a step's bound.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using Args = std::vector<std::string>;

TEST(Rules, SayWhetherTheStepIsBounded) {
  EXPECT_THAT(
      run({"rules", "deltanet"}).out,
      HasSubstr("step: bounded: the eigenvalue 1 - e.w that a write moves stays in [0, 1], for beta in [0, 1]\n"));
  EXPECT_THAT(run({"rules", "gated_deltanet2"}).out, HasSubstr("the norm of a step can exceed 1"));
  EXPECT_THAT(run({"rules", "mamba2"}).out, HasSubstr("step: bounded: nothing is erased"));
  EXPECT_THAT(run({"rules", "--compose", "precond=diagonal gain=gate"}).out,
              HasSubstr("step: NOT bounded: keys are raw"));
  const auto json = nlohmann::json::parse(run({"rules", "deltanet_neg", "--json"}).out);
  EXPECT_EQ(json.at("rules").at(0).at("step").at("eigenvalue"), nlohmann::json::parse("[-1.0, 1.0]"));
}

TEST(Rules, SeveralNamesAreShownOneAfterTheOther) {
  const Outcome outcome = run({"rules", "kda", "gla"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, run({"rules", "kda"}).out + run({"rules", "gla"}).out);
  EXPECT_EQ(run({"rules", "kda", "unknown"}).out, "");
  EXPECT_EQ(run({"rules", "kda", "update=additive"}).code, 0);  // a name and what changes
}

TEST(Rules, TrainWarnsOfAStepThatIsNotBounded) {
  const Folder folder;
  spill(folder / "text", small_text());
  const Args train = tiny_train(folder / "text", folder / "run");
  const Outcome warned = run(train + Args{"--rule", "gain=gate"});
  EXPECT_EQ(warned.code, 0) << warned.err;
  EXPECT_THAT(warned.err, HasSubstr("warning: rule 'gain=gate': the step is NOT bounded: keys are raw"));
  const Outcome silent = run(tiny_train(folder / "text", folder / "other"));
  EXPECT_THAT(silent.err, Not(HasSubstr("bounded")));
}

}  // namespace
}  // namespace fw::test
