// The model of a run file or folder, and what it would cost, before anything of it is made.
#pragma once

#include <string>

#include "cli/json_output.h"
#include "model/config.h"
#include "train/trainer.h"

namespace fw::cli {

// Of a run file, or of the configuration in a model or run folder; Error(kUsage) when it is neither. `train` gets what
// a run file says of it.
ModelConfig model_of_recipe(const std::string& path, TrainConfig& train);
Json model_report(const std::string& path);
std::string model_text(const Json& report);

}  // namespace fw::cli
