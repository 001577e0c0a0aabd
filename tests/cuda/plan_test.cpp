// The device's plan is a plain function of the descriptor, and bad descriptors say what was expected. No device needed.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/device_runs.h"
#include "fastweight/fastweight.h"

namespace {

fw_desc descriptor(const char* rule) {
  fw_desc desc;
  fw_desc_init(&desc);
  EXPECT_EQ(fw_rule_preset(rule, &desc.rule), FW_OK);
  desc.device = FW_DEVICE_CUDA;
  desc.io_dtype = FW_BF16;
  desc.operands = FW_BF16;
  desc.B = 4;
  desc.T = 4096;
  desc.H = desc.HV = 16;
  desc.K = desc.V = 128;
  return desc;
}

std::string plan_text(const fw_desc& desc) {
  std::string text(fw_plan_text(&desc, nullptr, 0) + 1, '\0');
  text.resize(fw_plan_text(&desc, text.data(), text.size()));
  return text;
}

// What the issue allows forward and backward to use alongside inputs and outputs at 4x4096x16 heads of 128.
TEST(DevicePlan, ExtraMemoryIsBounded) {
  for (const auto& [rule, most] : {std::pair{"gated_deltanet", 0.56e9},
                                   {"deltanet", 0.56e9},
                                   {"kaczmarz", 0.56e9},
                                   {"qdelta", 0.56e9},
                                   {"mamba2", 0.9e9},
                                   {"precond_gated_deltanet", 0.9e9},
                                   {"deltanet_neg", 0.9e9},
                                   {"gated_deltanet_neg", 0.9e9},
                                   {"kda", 0.68e9},
                                   {"gated_deltanet2", 0.68e9},
                                   {"kda_neg", 1.1e9},
                                   {"gated_deltanet2_neg", 1.1e9}}) {
    const fw_desc desc = descriptor(rule);
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
    EXPECT_LE(static_cast<double>(sizes.saved + std::max(sizes.forward_saving, sizes.backward)), most) << rule;
    EXPECT_GT(sizes.saved, 0u);
    EXPECT_LE(sizes.forward_saving, sizes.forward) << rule;
    EXPECT_EQ(sizes.backward_alone, sizes.saved + std::max(sizes.forward_saving, sizes.backward));
  }
}

TEST(DevicePlan, SaysTheForm) {
  fw_desc desc = descriptor("gated_deltanet");
  EXPECT_NE(plan_text(desc).find("form: chunk, 256 chunks of 64 tokens"), std::string::npos) << plan_text(desc);
  desc.operands = 0;
  EXPECT_NE(plan_text(desc).find("form: token"), std::string::npos) << plan_text(desc);
  desc = descriptor("precond_kda");
  desc.K = 256;
  EXPECT_NE(plan_text(desc).find("form: token"), std::string::npos) << plan_text(desc);
  desc.device = FW_DEVICE_CPU;
  EXPECT_NE(plan_text(desc).find("threads: "), std::string::npos) << plan_text(desc);
}

// Few heads leave room alongside the reverse scan; 64 heads of 4 sequences leave none, and a single chunk is not worth
// it. The chunk form saves values of gates of one number for backward, and says so.
TEST(DevicePlan, SavesValuesOfNumbers) {
  fw_desc desc = descriptor("gated_deltanet");
  fw_sizes values, logits;
  fw_sizes_init(&values);
  fw_sizes_init(&logits);
  ASSERT_EQ(fw_workspace_query(&desc, &values), FW_OK) << fw_last_error();
  desc.gates.beta = FW_GIVEN_SIGMOID;
  ASSERT_EQ(fw_workspace_query(&desc, &logits), FW_OK) << fw_last_error();
  const size_t bytes = static_cast<size_t>(desc.B * desc.T * desc.HV) * sizeof(float);
  EXPECT_GE(logits.saved, values.saved + bytes);
  EXPECT_LT(logits.saved, values.saved + bytes + 2048);
  EXPECT_NE(plan_text(desc).find("saved: " + std::to_string(logits.saved) + " bytes"), std::string::npos)
      << plan_text(desc);
}

// A few tokens' values of gates are made with the token; those of many tokens, and of numbers that no law is for, by a
// kernel in front.
TEST(DevicePlan, SaysWhereLogitsBecomeValues) {
  fw_desc desc = descriptor("gated_deltanet2");
  desc.form = FW_FORM_TOKEN;
  desc.gates.g = FW_GIVEN_SOFTPLUS;
  desc.gates.erase_gate = desc.gates.write_gate = FW_GIVEN_SIGMOID;
  for (const int tokens : {1, 4, 5}) {
    desc.T = tokens;
    const std::string text = plan_text(desc);
    EXPECT_EQ(text.find("logits: values made with the token") != std::string::npos, tokens <= 4) << text;
    EXPECT_EQ(text.find("kernels forward: gates -> ") == std::string::npos, tokens <= 4) << text;
    EXPECT_NE(text.find("kernels backward: gates -> "), std::string::npos) << text;
  }
  desc.T = 1;
  desc.rule.feedback = FW_FEEDBACK_LEARNED;
  desc.gates.lambda = FW_GIVEN_SIGMOID;
  EXPECT_NE(plan_text(desc).find("kernels forward: gates -> "), std::string::npos) << plan_text(desc);
}

TEST(DevicePlan, GradientsBeginBesideALongScan) {
  if (!fw::testing::on_hopper()) GTEST_SKIP() << "Hopper alone has it";
  fw_desc desc = descriptor("kda");
  EXPECT_EQ(plan_text(desc).find("gradients: beside"), std::string::npos) << plan_text(desc);
  desc.B = 1;
  desc.T = 32768;
  EXPECT_NE(plan_text(desc).find("gradients: beside the reverse scan of 32 blocks"), std::string::npos)
      << plan_text(desc);
  desc.T = 64;
  EXPECT_EQ(plan_text(desc).find("gradients: beside"), std::string::npos) << plan_text(desc);
  // The shapes of the tests that mean to run so (Small.GradientsBesideTheScan, BitsBesideTheScan).
  desc.H = desc.HV = 2;
  desc.T = 260;
  for (const int64_t segment : {-1, 128}) {
    desc.segment = segment;
    EXPECT_NE(plan_text(desc).find("gradients: beside"), std::string::npos) << plan_text(desc);
  }
  desc.H = desc.HV = 1;
  desc.V = 64;
  desc.segment = -1;
  desc.T = 260;
  EXPECT_NE(plan_text(desc).find("gradients: beside"), std::string::npos) << plan_text(desc);
  std::vector<int64_t> offsets = {0, desc.T};
  for (int n = 0; n < 200; ++n) offsets.push_back(offsets.back() + 1);
  desc.T = offsets.back();
  desc.seqlens.cu_seqlens = offsets.data();
  desc.seqlens.num_sequences = 201;
  EXPECT_EQ(plan_text(desc).find("gradients: beside"), std::string::npos) << plan_text(desc);
}

// From the raw tensors: forward saves the states alone, 64 x 128 bf16 values a chunk, head and value block.
TEST(DevicePlan, RulesWithoutAnEraseNeedNoImages) {
  if (!fw::testing::on_hopper()) GTEST_SKIP() << "names Hopper's kernels";
  for (const char* rule : {"linear_attention", "retnet", "mamba2"}) {
    fw_desc desc = descriptor(rule);
    EXPECT_NE(plan_text(desc).find("scan: from the raw tensors"), std::string::npos) << plan_text(desc);
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
    EXPECT_EQ(sizes.saved, size_t{256} * 16 * 2 * 64 * 128 * 2) << rule;
    desc.B = 1;
    desc.T = 32768;
    EXPECT_NE(plan_text(desc).find("segments: 4 of 128 chunks\n"), std::string::npos) << plan_text(desc);
  }
  for (const char* rule : {"gla", "precond_mamba2", "gated_deltanet"}) {
    EXPECT_EQ(plan_text(descriptor(rule)).find("from the raw tensors"), std::string::npos) << rule;
  }
}

// Forward is one kernel where sequences and value heads fill the SMs, K and V are 128 and nothing asks for what it has
// not: an H200 has 132.
TEST(DevicePlan, ForwardIsOneKernelWhereHeadsFillTheDevice) {
  if (!fw::testing::on_hopper()) GTEST_SKIP() << "names Hopper's kernels";
  const auto is_fused = [](const fw_desc& desc) {
    return plan_text(desc).find("kernels forward: fused/forward\n") != std::string::npos;
  };
  struct Shape {
    int64_t B, T, H, HV;
    bool fused;
  };
  for (const Shape& s : {Shape{8, 8192, 16, 16, true}, Shape{4, 8192, 16, 64, true}, Shape{4, 4096, 16, 16, false},
                         Shape{1, 32768, 16, 16, false}, Shape{8, 64, 16, 16, false}}) {
    for (const char* rule : {"gated_deltanet", "deltanet", "kaczmarz"}) {
      fw_desc desc = descriptor(rule);
      desc.B = s.B, desc.T = s.T, desc.H = s.H, desc.HV = s.HV;
      EXPECT_EQ(is_fused(desc), s.fused) << plan_text(desc);
    }
  }
  fw_desc desc = descriptor("gated_deltanet");
  desc.B = 8, desc.T = 8192;
  EXPECT_NE(plan_text(desc).find("fused forward: grid 128, where nothing is saved; else prepare/scalar"),
            std::string::npos)
      << plan_text(desc);
  const auto without = [&](auto change) {
    fw_desc other = desc;
    change(other);
    return !is_fused(other);
  };
  EXPECT_TRUE(without([](fw_desc& d) { d.segment = -1; }));
  EXPECT_TRUE(without([](fw_desc& d) { d.checkpoints.interval = 64; }));
  EXPECT_TRUE(without([](fw_desc& d) { d.K = 64; }));
  EXPECT_TRUE(without([](fw_desc& d) { d.V = 256; }));
  EXPECT_TRUE(without([](fw_desc& d) { d.io_dtype = FW_F32; }));
  for (const char* rule : {"gated_deltanet_neg", "kda", "mamba2", "qdelta", "comba", "precond_gated_deltanet"}) {
    EXPECT_TRUE(without([&](fw_desc& d) { fw_rule_preset(rule, &d.rule); })) << rule;
  }
}

// Rows of vectors of 8 channels take the kernels of the tile's own K.
TEST(DevicePlan, KeysBetweenTheTilesAreCopied) {
  if (!fw::testing::on_hopper()) GTEST_SKIP() << "names Hopper's kernels";
  const auto kernels = [](const char* rule, int K) {
    fw_desc desc = descriptor(rule);
    desc.K = K;
    const std::string text = plan_text(desc);
    return text.substr(text.find("kernels forward"), text.find("workspace forward") - text.find("kernels forward"));
  };
  for (const char* rule : {"gated_deltanet", "kda", "gated_deltanet2", "qdelta", "gla", "kda_neg"}) {
    for (const int K : {48, 96}) EXPECT_EQ(kernels(rule, K), kernels(rule, 128)) << rule;
    EXPECT_NE(kernels(rule, 100), kernels(rule, 128)) << rule;
  }
}

// Keys above 128: one decay a token or none, rows or sums of them; a decay a channel.
TEST(DevicePlan, WideKeysHaveKernelsOfTheirOwn) {
  if (!fw::testing::on_hopper()) GTEST_SKIP() << "names Hopper's kernels";
  for (const auto& [rule, forward, backward] :
       {std::tuple{"gated_deltanet", "prepare/k256 -> k256/forward\n",
                   "k256/reverse -> k256/gradients (split K) -> k256/join\n"},
        {"mamba2", "prepare/k256 -> k256/forward\n", "k256/reverse -> k256/gradients (split K) -> k256/join\n"},
        {"comba", "erase_over_decay -> prepare/k256 (sums) -> k256/forward (sums)\n",
         "erase_over_decay -> k256/reverse (sums) -> k256/gradients_sums (split K) -> k256/join -> "
         "erase_over_decay\n"},
        {"qdelta", "prepare/k256 (sums) -> k256/forward (sums)\n",
         "k256/reverse (sums) -> k256/gradients_sums (split K) -> k256/join\n"},
        {"kaczmarz", "prepare/k256 -> k256/forward\n", "k256/reverse -> k256/gradients_gains (split K) -> k256/join\n"},
        {"kda", "k256/prepare_keys -> k256/forward (keys)\n",
         "k256/reverse (keys) -> k256/gradients_keys (split K) -> k256/join\n"}}) {
    for (const int K : {129, 256}) {
      fw_desc desc = descriptor(rule);
      desc.K = K;
      const std::string text = plan_text(desc);
      EXPECT_NE(text.find(std::string("kernels forward: ") + forward), std::string::npos) << text;
      EXPECT_NE(text.find(std::string("kernels backward: ") + backward), std::string::npos) << text;
    }
  }
}

// First passes over segments leave out what decays let nothing through of, where no step of the rule lets a state grow:
// e and w are parallel.
TEST(DevicePlan, SaysWhichRulesFade) {
  if (!fw::testing::on_hopper()) GTEST_SKIP() << "Hopper alone has it";
  for (const auto& [rule, uses_decay_cutoff] : {std::pair{"gated_deltanet", true},
                                                {"kda", true},
                                                {"gla", true},
                                                {"comba", false},
                                                {"deltanet", false},
                                                {"gated_deltanet2", false},
                                                {"qdelta", false},
                                                {"precond_kda", false},
                                                {"mamba2", false}}) {
    fw_desc desc = descriptor(rule);
    desc.B = 1;
    desc.T = 32768;
    EXPECT_NE(plan_text(desc).find("segments: "), std::string::npos) << plan_text(desc);
    EXPECT_EQ(plan_text(desc).find(", less where decays let nothing through\n") != std::string::npos, uses_decay_cutoff)
        << plan_text(desc);
  }
}

// A gain above 1: chunk tiles of three matrices and 128 decays a chunk and head where others have 352 numbers, 64 x 128
// bf16 values and 64 scales more, and as many numbers again where keys are float32.
TEST(DevicePlan, GainsAboveOneTakeTwoTerms) {
  const auto saved = [](const char* rule, fw_dtype io) {
    fw_desc desc = descriptor(rule);
    desc.io_dtype = io;
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
    return sizes.saved;
  };
  const size_t tiles = 256 * 16, matrix = 64 * 128 * 2;
  for (const char* rule : {"deltanet", "gated_deltanet"}) {
    const std::string neg = std::string(rule) + "_neg";
    EXPECT_EQ(saved(neg.c_str(), FW_BF16), saved(rule, FW_BF16) + tiles * (4 * matrix + (128 + 64 - 352) * 4)) << neg;
    EXPECT_EQ(saved(neg.c_str(), FW_F32), saved(neg.c_str(), FW_BF16) + tiles * matrix) << neg;
    EXPECT_NE(plan_text(descriptor(neg.c_str())).find("hi_lo"), std::string::npos)
        << plan_text(descriptor(neg.c_str()));
    EXPECT_EQ(plan_text(descriptor(rule)).find("hi_lo"), std::string::npos) << plan_text(descriptor(rule));
  }
  // With channel decay, whatever the tensors are: decays are in the keys. Scales of rows are there for those of values.
  for (const fw_dtype io : {FW_BF16, FW_F32}) EXPECT_EQ(saved("kda_neg", io), saved("kda", io) + tiles * 2 * matrix);
  EXPECT_NE(plan_text(descriptor("kda_neg")).find("keys too"), std::string::npos) << plan_text(descriptor("kda_neg"));
}

TEST(DevicePlan, SaysWhereValueHeadsShareKeys) {
  fw_desc desc = descriptor("gated_deltanet");
  EXPECT_EQ(plan_text(desc).find("prepare/grouped"), std::string::npos) << plan_text(desc);
  desc.H = 4;
  EXPECT_NE(plan_text(desc).find("prepare/grouped (4 value heads)"), std::string::npos) << plan_text(desc);
  desc.T = 128;
  EXPECT_EQ(plan_text(desc).find("prepare/grouped"), std::string::npos) << plan_text(desc);
}

// What prepare leaves for the forward scan: A and P where its rows do for the rest, and of sums of rows only where a
// sequence is not cut.
TEST(DevicePlan, SaysWhatTheForwardScanTakes) {
  if (!fw::testing::on_hopper()) GTEST_SKIP() << "names Hopper's kernels";
  const auto takes = [](const char* rule, int64_t segment, const char* name) {
    fw_desc desc = descriptor(rule);
    desc.segment = segment;
    const std::string text = plan_text(desc);
    EXPECT_NE(text.find(std::string("scan/forward (") + name + ")"), std::string::npos) << text;
  };
  for (const int64_t segment : {-1, 1024}) {
    for (const char* rule : {"deltanet", "gated_deltanet", "kaczmarz"}) takes(rule, segment, "raw rows, A and P");
    takes("precond_gated_deltanet", segment, "raw rows");
    takes("kda", segment, "split tiles");
  }
  for (const char* rule : {"qdelta", "comba"}) {
    takes(rule, -1, "sums of raw rows, A and P");
    takes(rule, 1024, "tiles");
  }
}

// One long sequence alongside many short ones is cut as it is alone: what the short ones take does not grow with its
// length.
TEST(DevicePlan, ALongSequenceAmongShortOnesIsCut) {
  if (!fw::testing::on_hopper()) GTEST_SKIP() << "names Hopper's kernels";
  constexpr int64_t kLong = 32768, kShort = 64, kCount = 64;
  std::vector<int64_t> offsets = {0};
  for (int64_t i = 0; i < kCount; ++i) offsets.push_back(offsets.back() + kShort);
  offsets.push_back(offsets.back() + kLong);
  fw_desc desc = descriptor("gated_deltanet");
  desc.B = 1;
  desc.T = offsets.back();
  desc.seqlens.cu_seqlens = offsets.data();
  desc.seqlens.num_sequences = kCount + 1;
  EXPECT_NE(plan_text(desc).find("segments: "), std::string::npos) << plan_text(desc);
  // With few it is the same cut, and the gradients begin alongside its reverse scan.
  fw_desc alone = desc, few = desc;
  alone.seqlens.cu_seqlens = few.seqlens.cu_seqlens = nullptr;
  alone.seqlens.num_sequences = 0;
  alone.T = kLong;
  const std::vector<int64_t> few_offsets = {0, kLong, kLong + 16, kLong + 32};
  few.seqlens.cu_seqlens = few_offsets.data();
  few.seqlens.num_sequences = 3;
  few.T = few_offsets.back();
  EXPECT_NE(plan_text(alone).find("segments: 3 of 171 chunks"), std::string::npos) << plan_text(alone);
  EXPECT_NE(plan_text(few).find("segments: 5 of 171 chunks"), std::string::npos) << plan_text(few);
  EXPECT_NE(plan_text(few).find("gradients: beside"), std::string::npos) << plan_text(few);
  // As many long ones fill the device.
  for (int64_t i = 0; i <= kCount + 1; ++i) offsets[static_cast<size_t>(i)] = i * kLong;
  desc.T = offsets.back();
  EXPECT_EQ(plan_text(desc).find("segments: "), std::string::npos) << plan_text(desc);
}

// A grid's second dimension ends at 65,535, its first at 2^31 - 1.
TEST(DevicePlan, RefusesWhatNoGridHolds) {
  fw_desc desc = descriptor("gated_deltanet");
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  desc.B = 1;
  desc.T = 64;
  desc.H = desc.HV = 65535;
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
  desc.H = desc.HV = 65536;
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_ERROR_ARGUMENT);
  EXPECT_NE(std::string(fw_last_error()).find("HV: expected 1 to 65535, got 65536"), std::string::npos)
      << fw_last_error();
  desc.device = FW_DEVICE_CPU;
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
  desc.device = FW_DEVICE_CUDA;
  desc.H = desc.HV = 4096;
  desc.B = 1 << 18;
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_ERROR_ARGUMENT);
  EXPECT_NE(
      std::string(fw_last_error()).find("sequences: expected so many that a CUDA grid has at most 2147483647 blocks"),
      std::string::npos)
      << fw_last_error();
}

TEST(DevicePlan, RefusesWhatTheDeviceHasNot) {
  const auto message = [](const fw_desc& desc) {
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_ERROR_ARGUMENT);
    return std::string(fw_last_error());
  };
  fw_desc desc = descriptor("gated_deltanet");
  desc.form = FW_FORM_CHUNK;
  desc.operands = 0;
  EXPECT_NE(message(desc).find("form: expected FW_FORM_AUTO or FW_FORM_TOKEN"), std::string::npos);
  desc = descriptor("gated_deltanet");
  desc.K = 257;
  EXPECT_NE(message(desc).find("K: expected 1 to 256"), std::string::npos);
  desc = descriptor("gated_deltanet");
  desc.io_dtype = desc.operands = 0;
  desc.dtype = FW_F64;
  EXPECT_NE(message(desc).find("dtype: expected FW_F32 on CUDA"), std::string::npos);
  desc = descriptor("gated_deltanet");
  desc.chunk = 32;
  EXPECT_NE(message(desc).find("chunk: expected 0 or 64 on CUDA"), std::string::npos);
  desc = descriptor("gated_deltanet");
  desc.device = 2;
  EXPECT_NE(message(desc).find("device: expected"), std::string::npos);
}

}  // namespace
