#include "scan/cuda/require_device.h"

#include "base/error.h"
#include "scan/cuda/pipeline.h"

namespace fw::cuda {

std::string unsupported(const std::string& name, const Capability& capability, bool chunk_form) {
  const Forms forms = forms_of(arch_of(capability));
  if (chunk_form ? forms.chunk : forms.token) return {};
  return fmt::format("device: {}, of compute capability {}.{}, is not supported: expected 8.0 or newer", name,
                     capability.major, capability.minor);
}

void require_device(bool chunk_form) {
  const Capability capability = current_capability();
  if (unsupported("", capability, chunk_form).empty()) return;
  throw DeviceError(unsupported(gpu_name(), capability, chunk_form));  // the name takes long: asked for here alone
}

}  // namespace fw::cuda
