// What a call does before its kernels: which devices it takes, and the tables of packed sequences. The emulator says
// what the device is and counts grids.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/device.h"
#include "base/error.h"
#include "emulation/gpu.h"
#include "fastweight/fastweight.h"
#include "gpu/device.h"
#include "gpu/sequences.h"
#include "gpu/upload.h"
#include "scan/cuda/kernels.h"

namespace {

class OnGpu {
 public:
  OnGpu(const char* name, int major, int minor) : before_(fw::cuda::emulation::gpu) {
    fw::cuda::emulation::gpu.name = name, fw::cuda::emulation::gpu.major = major,
    fw::cuda::emulation::gpu.minor = minor;
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() { fw::cuda::emulation::gpu = before_; }

 private:
  fw::cuda::emulation::Gpu before_;
};

// A forward call of one head over 64 tokens: its status; the message is in fw_last_error().
fw_status forward(fw_form form) {
  constexpr int64_t kTokens = 64, kDim = 64;
  fw_desc desc;
  fw_desc_init(&desc);
  EXPECT_EQ(fw_rule_preset("linear_attention", &desc.rule), FW_OK);
  desc.device = FW_DEVICE_CUDA;
  desc.operands = FW_BF16;
  desc.form = form;
  desc.B = desc.H = desc.HV = 1;
  desc.T = kTokens;
  desc.K = desc.V = kDim;
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
  const fw::DeviceMemory rows(4 * kTokens * kDim * sizeof(float)), workspace(std::max<size_t>(sizes.forward, 64));
  rows.fill(0);
  const int64_t shape[4] = {1, kTokens, 1, kDim};
  const auto tensor = [&](int64_t i) {
    return fw_tensor_of(static_cast<float*>(rows.data()) + i * kTokens * kDim, FW_F32, 4, shape);
  };
  fw_inputs in;
  fw_inputs_init(&in);
  in.q = tensor(0), in.k = tensor(1), in.v = tensor(2);
  fw_outputs out;
  fw_outputs_init(&out);
  out.o = tensor(3);
  return fw_forward(&desc, &in, &out, nullptr, 0, workspace.data(), workspace.size());
}

// The library has code of 8.0, which newer GPUs run too, and of 9.0a: elsewhere the first launch would fail.
TEST(Devices, AnUnsupportedGpuIsRefusedBeforeAnythingIsLaunched) {
  struct Case {
    const char* name;
    int major, minor;
    bool chunk, token;
  };
  for (const Case& c : {Case{"NVIDIA H200", 9, 0, true, true}, Case{"NVIDIA A100-SXM4-80GB", 8, 0, true, true},
                        Case{"NVIDIA L40S", 8, 9, true, true}, Case{"NVIDIA B200", 10, 0, true, true},
                        Case{"NVIDIA GeForce RTX 5090", 12, 0, true, true}, Case{"Tesla V100", 7, 0, false, false}}) {
    const OnGpu on(c.name, c.major, c.minor);
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      const bool good = form == FW_FORM_CHUNK ? c.chunk : c.token;
      const int64_t before = fw::cuda::emulation::grids_run();
      EXPECT_EQ(forward(form), good ? FW_OK : FW_ERROR_DEVICE) << c.name << " form " << form << ": " << fw_last_error();
      if (good) continue;
      EXPECT_EQ(fw::cuda::emulation::grids_run(), before) << c.name;
      const std::string message = fw_last_error();
      EXPECT_NE(message.find(fmt::format("{}, of compute capability {}.{}", c.name, c.major, c.minor)),
                std::string::npos)
          << message;
      EXPECT_NE(message.find("expected 8.0 or newer"), std::string::npos) << message;
    }
    EXPECT_EQ(fw_device_check(FW_DEVICE_CUDA), c.chunk ? FW_OK : FW_ERROR_DEVICE) << c.name;
  }
}

TEST(Devices, AHopperGpuCanBeTakenForAnOlderOne) {
  const auto limited = [](int major, int minor, const char* wanted) {
    const fw::cuda::Capability is = fw::cuda::limited({major, minor}, wanted);
    return fmt::format("{}.{}", is.major, is.minor);
  };
  EXPECT_EQ(limited(9, 0, nullptr), "9.0");
  EXPECT_EQ(limited(9, 0, "sm_80"), "8.0");
  EXPECT_EQ(limited(7, 5, "sm_80"), "7.5");  // it runs neither
  for (const char* wrong : {"", "sm_90", "80", "sm_80 "}) EXPECT_THROW(limited(9, 0, wrong), fw::DeviceError) << wrong;
}

TEST(Devices, ThePlanIsForAsManyMultiprocessorsAsThereAre) {
  fw_desc desc;
  fw_desc_init(&desc);
  EXPECT_EQ(fw_rule_preset("gated_deltanet", &desc.rule), FW_OK);
  desc.device = FW_DEVICE_CUDA;
  desc.operands = FW_BF16;
  desc.B = 1;
  desc.T = 32768;
  desc.H = desc.HV = 20;
  desc.K = desc.V = 128;
  const auto text = [&] {
    std::string plan(fw_plan_text(&desc, nullptr, 0) + 1, '\0');
    plan.resize(fw_plan_text(&desc, plan.data(), plan.size()));
    return plan;
  };
  const OnGpu on("NVIDIA H200", 9, 0);
  fw::cuda::emulation::gpu.sm_count = 132;
  EXPECT_NE(text().find("segments: "), std::string::npos) << text();
  fw::cuda::emulation::gpu.sm_count = 40;  // 40 blocks fill them
  EXPECT_EQ(text().find("segments: "), std::string::npos) << text();
}

// 100,001 sequences of all lengths that a table can be wrong at, in seven launches (26 before), and with a long one in
// as many as their bytes want.
TEST(Uploads, TablesOfManySequencesTakeFewLaunches) {
  for (const int64_t longest : {int64_t{65535}, int64_t{65536}, int64_t{200000}}) {
    for (const int64_t count :
         {int64_t{1}, int64_t{499}, int64_t{1000}, int64_t{1001}, int64_t{16001}, int64_t{100001}}) {
      std::vector<int64_t> sequences = {0};
      for (int64_t i = 0; i < count; ++i)
        sequences.push_back(sequences.back() + (i == count / 2 ? longest : i * 7 % 130));
      std::vector<int32_t> offsets(static_cast<size_t>(count) + 1, -1), chunk_base = offsets;
      const int64_t before = fw::cuda::emulation::grids_run();
      fw::cuda::upload_sequences(sequences.data(), count, offsets.data(), chunk_base.data(), nullptr);
      EXPECT_LE(fw::cuda::emulation::grids_run() - before, 1 + count / (longest > 65535 ? 8000 : 16000)) << count;
      int64_t chunks = 0, wrong = 0;
      for (size_t i = 0; i <= static_cast<size_t>(count); ++i) {
        wrong += offsets[i] != sequences[i] || chunk_base[i] != chunks ? 1 : 0;
        if (i < static_cast<size_t>(count)) chunks += (sequences[i + 1] - sequences[i] + 63) / 64;
      }
      EXPECT_EQ(wrong, 0) << count << " sequences, " << longest;
    }
  }
}

// More sequences than a grid's second or third dimension holds: each of one segment, whose state at its start is the
// sequence's.
TEST(Grids, JoinTakesAsManySequencesAsThereAre) {
  constexpr int32_t kCount = 65537, kTileK = 4, kValue = 8;
  std::vector<int32_t> first(kCount + 1);
  for (int32_t i = 0; i <= kCount; ++i) first[static_cast<size_t>(i)] = i;
  std::vector<float> from(size_t{kCount} * kTileK * kValue), states(from.size());
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i);
  fw::cuda::StateArg state;
  state.data = from.data();
  state.stride_k = 1, state.stride_v = kTileK, state.stride_h = kTileK * kValue, state.stride_n = state.stride_h;
  fw::cuda::JoinArgs join;
  join.N = kCount, join.HV = 1, join.K = kTileK, join.V = kValue;
  join.first_segment = first.data(), join.states = states.data(), join.from = state;
  fw::cuda::join_segments(join, nullptr);
  EXPECT_EQ(states, from);
}

}  // namespace
