// What `verify --device cuda` runs: other programs' values on the device. In the emulation some of the models, on a GPU
// all.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"
#include "base/safetensors.h"
#include "base/temp_folder.h"
#include "model/language_model.h"
#include "reference/ops_conformance.h"
#include "support/error_of.h"
#include "support/shared.h"
#include "train/model_conformance.h"
#include "train/scan_conformance.h"

namespace fw::testing {
namespace {

void expect_passes(const std::vector<Comparison>& found) {
  for (const Comparison& c : found)
    EXPECT_TRUE(c.passes()) << c.subject << ", " << c.what << ": " << c.error << ", at most " << c.bound << "; "
                            << c.where;
}

TEST(DeviceVectors, RecurrencesInBothForms) {
  const std::string vectors = shared_path("vectors/ops.safetensors");
  if (vectors.empty()) GTEST_SKIP() << kNoShared;
  OpsConformanceOptions options;
  options.device = FW_DEVICE_CUDA;
  options.type = ConformanceType::kF32;
  options.forms = {FW_FORM_TOKEN};
  const std::vector<Comparison> token = check_ops(vectors, options);
  expect_passes(token);
  options.type = ConformanceType::kBf16;
  options.forms = {FW_FORM_CHUNK};
  const std::vector<Comparison> chunk = check_ops(vectors, options);
  expect_passes(chunk);
  EXPECT_EQ(token.size(), chunk.size());
  // A bound that only bf16 products exceed shows that they were those.
  EXPECT_TRUE(std::ranges::any_of(chunk, [](const Comparison& c) { return c.error > 1e-3; }));
}

TEST(DeviceVectors, Scans) {
  const std::string vectors = shared_path("vectors_more/ops_more.safetensors");
  if (vectors.empty()) GTEST_SKIP() << kNoShared;
  const std::vector<Comparison> found =
      check_scans(vectors, ConformanceType::kF32, ops_bound(ConformanceType::kF32), cuda_device());
  EXPECT_EQ(found.size(), 4U);
  expect_passes(found);
  EXPECT_NE(error_of([&] { check_scans(vectors, ConformanceType::kF64, 1, cuda_device()); }).find("expected float32"),
            std::string::npos);
}

TEST(DeviceVectors, Models) {
  const std::string vectors = shared_path("vectors/models");
  if (vectors.empty()) GTEST_SKIP() << kNoShared;
  ModelConformanceOptions options;
  options.device = &cuda_device();
  for (const auto& entry : std::filesystem::directory_iterator(vectors)) {
    const std::string name = entry.path().filename().string();
    const std::set<std::string> few{"mamba2", "gdn2_hybrid"};
    if (device_info().emulated && few.count(name) == 0) continue;
    SCOPED_TRACE(name);
    const std::vector<Comparison> found = check_model(entry.path().string(), options);
    ASSERT_EQ(found.size(), 4U);
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_EQ(found[i].what, (std::array{"logits", "loss", "gradients", "training, loss"})[i]);
    expect_passes(found);
    EXPECT_GT(found[0].error, 1e-4);  // bf16 it was
    for (const Comparison& c : found) {
      const double own =
          c.what == "training, loss" ? device_model_bounds().trace_loss : device_model_bounds().gradients;
      EXPECT_EQ(c.widened, c.bound > own) << c.what;  // by what bf16 does on the CPU, which the table says
      EXPECT_EQ(c.widened, c.where.find("bf16 on the CPU") != std::string::npos) << c.where;
    }
  }
}

// Released hybrids, with and without experts.
TEST(DeviceVectors, Hybrids) {
  const std::string vectors = shared_path("vectors_hf/models");
  if (vectors.empty()) GTEST_SKIP() << kNoShared;
  ModelConformanceOptions options;
  options.device = &cuda_device();
  for (const auto& entry : std::filesystem::directory_iterator(vectors)) {
    const std::string name = entry.path().filename().string();
    if (device_info().emulated && name != "qwen3_next" && name != "kimi_linear") continue;
    SCOPED_TRACE(name);
    const std::vector<Comparison> found = check_model(entry.path().string(), options);
    ASSERT_EQ(found.size(), 3U);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i].what, (std::array{"logits", "loss", "gradients"})[i]);
    expect_passes(found);
    EXPECT_GT(found[0].error, 1e-4);  // bf16 it was
  }
}

// One that the device lacks is no failure to read.
TEST(DeviceVectors, AModelThatTheDeviceLacksIsUnknown) {
  ModelConfig config;
  config.rule = "dplr";  // with more value heads than key heads
  config.vocab_size = 11;
  config.hidden_size = 16;
  config.num_hidden_layers = 1;
  config.num_heads = 1;
  config.num_v_heads = 2;
  config.head_dim = 8;
  const TempFolder folder;
  LanguageModel<float> model(config);
  Random random(3);
  model.init(random);
  save_model(folder.path(), model);
  const std::vector<int32_t> ids(50, 3);
  SafetensorsWriter writer;
  writer.add<int32_t>("input_ids", {1, 50}, std::span<const int32_t>(ids));
  writer.write(folder.path("io.safetensors"));
  ModelConformanceOptions options;
  options.device = &cuda_device();
  const std::vector<Comparison> found = check_model(folder.path(), options);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_NE(found[0].unknown.find("as many key heads as value heads"), std::string::npos) << found[0].unknown;
}

}  // namespace
}  // namespace fw::testing
