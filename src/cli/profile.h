// train --profile: where the time of a step goes.
#pragma once

#include "cli/json_output.h"
#include "model/config.h"
#include "train/trainer.h"

namespace fw::cli {

// Runs steps of the run's shape on random tokens, the model's first parameters and one batch, with every operation
// timed by itself (ops/profile.h) and without. Measures what the device can do; prints the table, and returns its
// figures (docs/json.md).
Json profile_step(const ModelConfig& model, const TrainConfig& train);

}  // namespace fw::cli
