// Why there is no CUDA device, in words: the runtime speaks of driver versions where no GPU is.
#pragma once

#include <unistd.h>

#include <string>

namespace fw {

// runtime: what the CUDA runtime says.
inline std::string why_no_gpu(const std::string& runtime) {
  if (::access("/dev/nvidiactl", F_OK) != 0) return "device: expected an NVIDIA GPU, but no NVIDIA GPU was found";
  return "device: expected an NVIDIA GPU that the driver lets this process use, but the CUDA runtime says: " + runtime;
}

}  // namespace fw
