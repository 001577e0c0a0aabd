#include "ops/backend.h"

#include "base/error.h"

namespace fw {

template <class T>
const Ops<T>& ops_of(const Device& device) {
  if (device.kind() == FW_DEVICE_CPU) return host_ops<T>();
  fail_usage("device: expected the CPU: models of this type do not run on CUDA devices");
}

template const Ops<float>& ops_of<float>(const Device&);
template const Ops<double>& ops_of<double>(const Device&);

}  // namespace fw
