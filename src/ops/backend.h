// Which operations a device has. A new device is a line here.
#pragma once

#include "base/device.h"
#include "ops/ops.h"

namespace fw {

// Throws Error(kUsage) where the device has none for activations of type T.
template <class T>
const Ops<T>& ops_of(const Device& device);

}  // namespace fw
