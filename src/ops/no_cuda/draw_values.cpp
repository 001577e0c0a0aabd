// A build without CUDA: no device asks.
#include "ops/draw_values.h"

#include "base/error.h"

namespace fw {

void draw_on_cuda(Device&, std::span<const uint64_t>, int64_t, std::span<const DrawnRange>, ParamValues<float>) {
  throw DeviceError("device: this build of fastweight has no device code (`make gpu` builds it)");
}

}  // namespace fw
