// Calls for a CUDA device where there is none, or no CUDA in the build: an error that says so, nothing else. Where
// there is one, these tests have nothing to show (tests/cuda has).
#include <gtest/gtest.h>

#include <cstring>

#include "fastweight/fastweight.h"

namespace {

TEST(Device, TheCpuIsAlwaysThere) {
  EXPECT_EQ(fw_device_check(FW_DEVICE_CPU), FW_OK);
  EXPECT_EQ(fw_device_check(7), FW_ERROR_ARGUMENT);
  EXPECT_NE(std::strstr(fw_last_error(), "FW_DEVICE_CUDA, got 7"), nullptr) << fw_last_error();
}

TEST(Device, ACallWithoutOneSaysWhatIsMissing) {
  const fw_status status = fw_device_check(FW_DEVICE_CUDA);
  if (status == FW_OK) GTEST_SKIP() << "this machine has a GPU";
  ASSERT_EQ(status, FW_ERROR_DEVICE);
  EXPECT_EQ(std::strncmp(fw_last_error(), "device: ", 8), 0) << fw_last_error();

  fw_desc desc;
  fw_inputs in;
  fw_outputs out;
  fw_desc_init(&desc);
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  desc.device = FW_DEVICE_CUDA;
  desc.B = desc.T = desc.H = desc.HV = 1;
  desc.K = desc.V = 2;
  float memory[8] = {};
  const int64_t shape[4] = {1, 1, 1, 2};
  in.q = in.k = in.v = fw_tensor_of(memory, FW_F32, 4, shape);
  out.o = fw_tensor_of(memory + 2, FW_F32, 4, shape);
  EXPECT_EQ(fw_forward(&desc, &in, &out, nullptr, 0, nullptr, 0), FW_ERROR_DEVICE);
  EXPECT_EQ(std::strncmp(fw_last_error(), "device: ", 8), 0) << fw_last_error();
  for (const float x : memory) EXPECT_EQ(x, 0.0f);
}

}  // namespace
