// Models that other programs computed with (shared/vectors/models, shared/vectors_more/models): logits, loss, gradient
// of every parameter, greedy continuation and ten training steps. Float64 shows that the mathematics is the same,
// float32 that training with it is.
#include "train/model_conformance.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/safetensors.h"
#include "base/temp_folder.h"
#include "model/interop/hf_config.h"
#include "model/language_model.h"
#include "rule/rule.h"
#include "support/shared.h"

namespace fw::testing {
namespace {

// Folders of models, by what they hold.
std::vector<std::string> models() {
  std::vector<std::string> folders;
  for (const char* name : {"vectors/models", "vectors_more/models"}) {
    const std::string folder = shared_path(name);
    if (folder.empty()) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) folders.push_back(entry.path().string());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}
std::string name_of(const std::string& folder) { return std::filesystem::path(folder).filename().string(); }

bool is_mesa(const std::string& folder) { return name_of(folder).rfind("mesa_net", 0) == 0; }
bool blows_up(const std::string& folder) { return is_mesa(folder) || name_of(folder) == "retnet"; }

class ModelConformance : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (shared_path("vectors/models").empty()) GTEST_SKIP() << kNoShared;
    if (name_of(folder_) == "comba") erase_after_the_decay();
  }
  std::vector<Comparison> check(ConformanceType type, fw_form form = FW_FORM_AUTO) const {
    return check_model(folder_, {type, form});
  }

 private:
  // The values of comba are those of FLA's plain recurrence, which erases after the decay. Its kernels, and so models
  // that are imported, erase before it.
  void erase_after_the_decay() {
    save_model(own_.path(), load_model<float>(folder_));
    std::filesystem::copy_file(folder_ + "/io.safetensors", own_.path("io.safetensors"));
    nlohmann::json config = nlohmann::json::parse(read_file(own_.path("config.json")));
    Rule rule = parse_rule(config.at("rule").get<std::string>());
    ASSERT_TRUE(rule.erases_before_decay());
    rule.erase_state = EraseState::kDecayed;
    config["rule"] = to_string(rule);
    write_file_atomic(own_.path("config.json"), config.dump());
    folder_ = own_.path();
  }

  std::string folder_ = GetParam();
  TempFolder own_;
};

void expect_all(const std::vector<Comparison>& found, const std::set<std::string>& compared) {
  std::set<std::string> names;
  for (const Comparison& c : found) {
    names.insert(c.what);
    EXPECT_TRUE(c.passes()) << c.subject << ", " << c.what << ": " << c.error << ", at most " << c.bound
                            << " expected; " << c.where;
  }
  EXPECT_EQ(names, compared);
}

const std::set<std::string> kEverything = {"logits",        "loss",           "gradients",
                                           "greedy tokens", "training, loss", "training, norm"};

TEST_P(ModelConformance, AgreeInDouble) {
  std::vector<Comparison> found = check(ConformanceType::kF64);
  // Logits and gradients are stored in float32, the rest in float64: far inside the bounds that verify has for all
  // types.
  for (Comparison& c : found) c.bound = c.what == "loss" ? 1e-12 : c.what == "greedy tokens" ? 0 : 1e-7;
  expect_all(found, kEverything);
}

TEST_P(ModelConformance, AgreeInFloat) {
  std::vector<Comparison> found = check(ConformanceType::kF32);
  for (Comparison& c : found) {
    // Output norms of heads blow up a first token whose q . k is near 0 (retnet, rwkv7), or whose x meets the keys
    // badly (mesa_net): float64 with weights moved by float32's last digit is as far off (docs/conformance.md).
    // verify's bound is theirs; rwkv7, by 3.7e-5 and at one step of ten, has a fifth of it.
    if (c.what == "training, norm" && !blows_up(GetParam())) c.bound = name_of(GetParam()) == "rwkv7" ? 2e-4 : 1e-5;
  }
  expect_all(found, kEverything);
}

TEST_P(ModelConformance, AgreeInBothForms) {
  for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
    for (const Comparison& c : check(ConformanceType::kF64, form)) EXPECT_LE(c.error, 1e-7) << c.what;
  }
}

TEST_P(ModelConformance, AgreeInBf16) {
  std::vector<Comparison> found = check(ConformanceType::kBf16);
  for (Comparison& c : found) {
    // The same: moved by 2^-9 of themselves, its weights change the gradients in float64 by up to 0.48, the logits by
    // 0.035.
    if (name_of(GetParam()) == "mesa_net_gate" && c.what != "loss") c.bound = c.what == "gradients" ? 0.7 : 0.07;
  }
  expect_all(found, {"logits", "loss", "gradients"});
}

// Hybrids of transformers (shared/vectors_hf); those with layers that are not known here are left out.
std::vector<std::string> hybrids() {
  const std::string folder = shared_path("vectors_hf/models");
  std::vector<std::string> folders;
  if (folder.empty()) return folders;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const nlohmann::json config = nlohmann::json::parse(read_file(entry.path().string() + "/config.json"));
    if (unknown_hf_model(config).empty()) folders.push_back(entry.path().string());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

class HybridConformance : public ::testing::TestWithParam<std::string> {};

// Transformers computes a recurrence in float32 whatever the model's type (1e-6 of the logits).
TEST_P(HybridConformance, AgreesInDoubleAndInFloat) {
  for (const ConformanceType type : {ConformanceType::kF64, ConformanceType::kF32}) {
    std::vector<Comparison> found = check_model(GetParam(), {type});
    for (Comparison& c : found) {
      if (c.what == "logits" || c.what == "loss") c.bound = 2e-5;
    }
    expect_all(found, {"logits", "loss", "gradients", "greedy tokens"});
  }
}

INSTANTIATE_TEST_SUITE_P(Transformers, HybridConformance, ::testing::ValuesIn(hybrids()),
                         [](const auto& hf) { return name_of(hf.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(HybridConformance);

INSTANTIATE_TEST_SUITE_P(Hf, ModelConformance, ::testing::ValuesIn(models()),
                         [](const auto& hf) { return name_of(hf.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ModelConformance);

// A folder of our own with values that this program computed itself, then with one of them changed.
class OwnCases : public ::testing::Test {
 protected:
  OwnCases() : model_(config()) {
    Random random(3);
    model_.init(random);
    save_model(folder_.path(), model_);
    for (size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<int32_t>(i * 7 % 11);
    logits_.resize(ids_.size() * 11);
    model_.forward_all(ids_, SeqLayout({0, 50}), nullptr, {logits_.data(), 50, 11});
  }
  static ModelConfig config() {
    ModelConfig c;
    c.rule = "kda";
    c.vocab_size = 11;
    c.hidden_size = 8;
    c.num_hidden_layers = 1;
    c.num_heads = 1;
    c.head_dim = 8;
    return c;
  }
  void write() {
    SafetensorsWriter writer;
    writer.add<int32_t>("input_ids", {1, 50}, std::span<const int32_t>(ids_));
    writer.add<float>("logits", {1, 50, 11}, std::span<const float>(logits_));
    writer.write(folder_.path("io.safetensors"));
  }
  std::string error() const {
    try {
      check_model(folder_.path(), {});
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      return e.what();
    }
    return "";
  }

  TempFolder folder_;
  LanguageModel<float> model_;
  std::vector<int32_t> ids_ = std::vector<int32_t>(50);
  std::vector<float> logits_;
};

TEST_F(OwnCases, AWrongValueFailsAndIsNamed) {
  write();
  std::vector<Comparison> found = check_model(folder_.path(), {});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(found[0].passes()) << found[0].error;
  logits_[13 * 11 + 4] += 0.5F;
  write();
  found = check_model(folder_.path(), {});
  EXPECT_FALSE(found[0].passes());
  EXPECT_EQ(found[0].where, "logits[0, 13, 4]");
  logits_[13 * 11 + 4] = std::numeric_limits<float>::quiet_NaN();
  write();
  EXPECT_FALSE(check_model(folder_.path(), {})[0].passes());
}

TEST_F(OwnCases, WhatCannotBeRead) {
  EXPECT_NE(error().find("io.safetensors"), std::string::npos);
  ids_[7] = 11;
  write();
  EXPECT_NE(error().find("expected ids from 0 to 10, got 11"), std::string::npos) << error();
  ids_[7] = 0;
  logits_.resize(50);
  SafetensorsWriter writer;
  writer.add<int32_t>("input_ids", {1, 50}, std::span<const int32_t>(ids_));
  writer.add<float>("logits", {1, 50}, std::span<const float>(logits_));
  writer.write(folder_.path("io.safetensors"));
  EXPECT_NE(error().find("logits"), std::string::npos) << error();
  SafetensorsWriter nothing;
  nothing.add<int32_t>("input_ids", {1, 50}, std::span<const int32_t>(ids_));
  nothing.write(folder_.path("io.safetensors"));
  EXPECT_NE(error().find("got none of them"), std::string::npos) << error();
  write_file_atomic(folder_.path("config.json"), "{");
  EXPECT_NE(error().find("config.json"), std::string::npos) << error();
}

}  // namespace
}  // namespace fw::testing
