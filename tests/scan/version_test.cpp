// What a mutant of one line could change without another test: the version, and the length up to which a sequence runs
// token by token.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "fastweight/fastweight.h"
#include "scan/plan.h"

namespace fw {
namespace {

TEST(Version, IsThatOfTheHeader) {
  EXPECT_EQ(fw_version(), fmt::format("{}.{}.{}", FW_VERSION_MAJOR, FW_VERSION_MINOR, FW_VERSION_PATCH));
}

TEST(Plan, RunsOneTokenByTokenAndTwoByChunks) {
  fw_desc desc;
  fw_desc_init(&desc);
  ASSERT_EQ(fw_rule_preset("gated_deltanet", &desc.rule), FW_OK);
  desc.B = 1, desc.H = desc.HV = 2, desc.K = desc.V = 16;
  desc.T = 1;
  EXPECT_TRUE(make_plan(desc).token_form(0));
  desc.T = 2;
  EXPECT_FALSE(make_plan(desc).token_form(0));
}

}  // namespace
}  // namespace fw
