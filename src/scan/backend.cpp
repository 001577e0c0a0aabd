#include "scan/backend.h"

namespace fw {

const Backend* backend_of(int32_t device) {
  switch (device) {
    case FW_DEVICE_CPU:
      return &cpu_backend();
    case FW_DEVICE_CUDA:
      return &cuda_backend();
    default:
      return nullptr;
  }
}

}  // namespace fw
