// Tensors that files of other programs have beside the parameters and that follow from the configuration.
#pragma once

#include <string>

#include "model/config.h"
#include "model/model_files.h"

namespace fw {

// Whether the tensor is a table of the rotary embedding (inv_freq, cos_cached, sin_cached) of layers that have one.
// Throws Error(kUsage) when its values are not those of the configuration: the model would not be computed as its file
// says.
bool is_rotary_table(const ModelFiles& files, const std::string& name, const ModelConfig& config);

}  // namespace fw
