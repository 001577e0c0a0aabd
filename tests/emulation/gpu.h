// What the library is told that it runs on, and how much it has run there. Apart from run.h, which every kernel
// includes.
#pragma once

#include <cstdint>

namespace fw::cuda::emulation {

// Tests change it.
struct Gpu {
  const char* name = "emulated device";
  int major = 9, minor = 0, sm_count = 132;
};
extern Gpu gpu;

// How many grids have been launched.
int64_t grids_run();
// Runs what FW_EMULATION_EARLY has kept back: before the host looks at device memory, or gives it away.
void finish();

}  // namespace fw::cuda::emulation
