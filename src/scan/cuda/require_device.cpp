#include "scan/cuda/require_device.h"

#include "base/error.h"
#include "scan/cuda/pipeline.h"

namespace fw::cuda {

std::string unsupported(const std::string& name, const Capability& capability, bool chunk_form) {
  const Forms forms = forms_of(arch_of(capability));
  if (chunk_form ? forms.chunk : forms.token) return {};
  const std::string what =
      fmt::format("device: {}, of compute capability {}.{},", name, capability.major, capability.minor);
  if (forms.token)
    return fmt::format(
        "{} has no chunk form: expected 9.0 (H100, H200, GH200), or form FW_FORM_TOKEN, which runs on 8.0 to 8.9 too",
        what);
  return fmt::format("{} is not supported: expected 9.0 (H100, H200, GH200), or 8.0 to 8.9 for the token form alone",
                     what);
}

void require_device(bool chunk_form) {
  const Capability capability = current_capability();
  if (unsupported("", capability, chunk_form).empty()) return;
  throw DeviceError(unsupported(gpu_name(), capability, chunk_form));  // the name takes long: asked for here alone
}

}  // namespace fw::cuda
