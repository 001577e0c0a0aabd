// The recurrence through the C header, in both forms, double, float and bf16 inputs, and the reference itself against
// values that other people's code computed (shared/vectors/ops.safetensors). And what is said of files that are not of
// that form.
#include "reference/ops_conformance.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "base/safetensors.h"
#include "base/temp_folder.h"
#include "support/shared.h"

namespace fw::testing {
namespace {

// Against conjugate gradients of another program.
bool is_approximate(const Comparison& c) { return c.what.find("30 steps") != std::string::npos; }

class OpsConformance : public ::testing::TestWithParam<ConformanceType> {};

TEST_P(OpsConformance, EveryRuleInBothForms) {
  const std::string path = shared_path("vectors/ops.safetensors");
  if (path.empty()) GTEST_SKIP() << kNoShared;
  std::set<std::string> unknown, compared;
  for (const Comparison& c : check_ops(path, {GetParam(), {FW_FORM_CHUNK, FW_FORM_TOKEN}})) {
    if (!c.unknown.empty()) {
      unknown.insert(c.subject);
      continue;
    }
    compared.insert(c.subject);
    EXPECT_TRUE(c.passes()) << c.subject << ", " << c.what << ": " << c.error << ", at most " << c.bound
                            << " expected; " << c.where;
    if (GetParam() == ConformanceType::kF64 && !is_approximate(c)) {
      EXPECT_LE(c.error, 1e-13) << c.subject << ", " << c.what << "; " << c.where;
    }
  }
  EXPECT_EQ(unknown, std::set<std::string>{});
  EXPECT_EQ(compared, (std::set<std::string>{"linear_attn", "mamba2", "gla", "gdn", "gdn_raw_keys", "kda", "gdn2",
                                             "gdn2_neg", "pgdn", "pkda", "comba", "qdelta", "mesa", "dplr"}));
}

// Further systems (shared/vectors_more).
TEST_P(OpsConformance, FurtherRulesInBothForms) {
  const std::string path = shared_path("vectors_more/ops_more.safetensors");
  if (path.empty()) GTEST_SKIP() << kNoShared;
  std::set<std::string> compared;
  for (const Comparison& c : check_ops(path, {GetParam(), {FW_FORM_CHUNK, FW_FORM_TOKEN}})) {
    if (!c.unknown.empty()) continue;
    compared.insert(c.subject);
    EXPECT_TRUE(c.passes()) << c.subject << ", " << c.what << ": " << c.error << ", at most " << c.bound
                            << " expected; " << c.where;
    if (GetParam() == ConformanceType::kF64 && !is_approximate(c)) {
      EXPECT_LE(c.error, 1e-13) << c.subject << ", " << c.what << "; " << c.where;
    }
  }
  EXPECT_EQ(compared, (std::set<std::string>{"hgrn2", "mesa_state", "dplr_hard", "rwkv7"}));
}

// What the reference says is what all other tests compare with.
TEST(OpsConformanceReference, EveryRule) {
  const std::string path = shared_path("vectors/ops.safetensors");
  if (path.empty() || shared_path("vectors_more/ops_more.safetensors").empty()) GTEST_SKIP() << kNoShared;
  OpsConformanceOptions options;
  options.reference = true;
  std::set<std::string> compared;
  for (const Comparison& c : check_ops(path, options)) {
    if (!c.unknown.empty()) continue;
    compared.insert(c.subject);
    EXPECT_LE(c.error, is_approximate(c) ? 2e-3 : 1e-12) << c.subject << ", " << c.what << "; " << c.where;
  }
  EXPECT_EQ(compared.size(), 14u);
  for (const Comparison& c : check_ops(shared_path("vectors_more/ops_more.safetensors"), options)) {
    if (c.unknown.empty()) {
      EXPECT_LE(c.error, is_approximate(c) ? 2e-3 : 1e-12) << c.subject << ", " << c.what << "; " << c.where;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, OpsConformance,
                         ::testing::Values(ConformanceType::kF64, ConformanceType::kF32, ConformanceType::kBf16));

// One token of linear attention, by hand: S = k v^T, o = K^-1/2 (q . k) v.
class OpsFileTest : public ::testing::Test {
 protected:
  std::vector<Comparison> check() {
    SafetensorsWriter writer;
    writer.add<float>("linear_attn/one/q", {1, 1, 1, 4}, std::span<const float>(q_));
    writer.add<float>("linear_attn/one/k", {1, 1, 1, 4}, std::span<const float>(k_));
    if (!v_.empty()) writer.add<float>("linear_attn/one/v", {1, 1, 1, 1}, std::span<const float>(v_));
    writer.add<double>("linear_attn/one/o", {1, 1, 1, 1}, std::span<const double>(o_));
    writer.add<float>("linear_attn/one/do", {1, 1, 1, 1}, std::span<const float>(d_o_));
    writer.add<double>("linear_attn/one/d_v", {1, 1, 1, 1}, std::span<const double>(d_v_));
    if (!extra_.empty()) writer.add<double>(extra_, {1}, std::span<const double>(o_));
    writer.write(folder_.path("ops.safetensors"));
    return check_ops(folder_.path("ops.safetensors"), {});
  }
  std::string error() {
    try {
      check();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      return e.what();
    }
    return "";
  }

  TempFolder folder_;
  std::vector<float> q_ = {1, 2, 3, 4}, k_ = {1, 0, 1, 0}, v_ = {5}, d_o_ = {2};
  std::vector<double> o_ = {10}, d_v_ = {4};
  std::string extra_;
};

TEST_F(OpsFileTest, RightAndWrongValues) {
  for (const Comparison& c : check()) EXPECT_TRUE(c.passes()) << c.what << c.error;
  d_v_ = {4.1};
  const std::vector<Comparison> found = check();
  ASSERT_EQ(found.size(), 4u);
  EXPECT_TRUE(found[0].passes());
  EXPECT_FALSE(found[1].passes());
  EXPECT_NEAR(found[1].error, 0.1 / 4.1, 1e-12);
  EXPECT_EQ(found[1].where, "one/d_v[0, 0, 0, 0]");
}

TEST_F(OpsFileTest, WhatCannotBeRead) {
  extra_ = "no_rule";
  EXPECT_NE(error().find("<rule>/<case>/<tensor>"), std::string::npos);
  extra_ = "newest/one/o";
  EXPECT_EQ(check().back().unknown, "a rule of this name");
  extra_.clear();
  v_.clear();
  EXPECT_NE(error().find("linear_attn/one/v"), std::string::npos) << error();
}

}  // namespace
}  // namespace fw::testing
