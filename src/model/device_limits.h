// Which models a device runs.
#pragma once

#include "base/device.h"
#include "model/config.h"

namespace fw {

// Throws Error(kUsage) for layers whose operations the device lacks (T: the type of activations), for rules that its
// recurrence lacks, and for heads that its kernels cannot hold: before a model takes any memory.
template <class T>
void require_layers(const ModelConfig& config, const Device& device);

}  // namespace fw
