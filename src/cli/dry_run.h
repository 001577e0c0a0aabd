// train --dry-run: what a run would be, without writing a file or reading a text.
#pragma once

#include "model/config.h"
#include "train/trainer.h"

namespace fw::cli {

// Prints layers and parameters, the memory of a training step (planned to the byte, train/memory_plan.h), and an
// estimate of a step's time from a few short ones, where the memory is there.
void print_plan(const ModelConfig& model, const TrainConfig& train);

}  // namespace fw::cli
