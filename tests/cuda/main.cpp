// The tests of device code, built twice:
// - with the kernels in CUDA (label gpu; without a GPU the program exits with 77, which ctest shows as not run),
// - with the same kernels compiled for the emulation (label cuda).
#include <gtest/gtest.h>

#include <cstdio>

#include "base/device.h"
#include "base/error.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  constexpr int kNotRun = 77;
  try {
    const fw::DeviceInfo info = fw::device_info();
    std::printf("device: %s, %d.%d\n", info.name.c_str(), info.major, info.minor);
  } catch (const fw::DeviceError& e) {
    std::printf("not run: %s\n", e.what());
    return kNotRun;
  }
  return RUN_ALL_TESTS();
}
