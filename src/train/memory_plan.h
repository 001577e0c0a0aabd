// The memory of a training step, known before any of it is taken: the step runs on a PlanDevice (base/plan_device.h) with batches
// of whole sequences. Where a batch has several documents in a sequence, the recurrence has a little more.
#pragma once

#include <cstdint>

#include "model/config.h"
#include "nn/params.h"
#include "train/trainer.h"

namespace fw {

struct MemoryPlan {
  size_t parameters = 0, gradients = 0, moments = 0;  // bytes
  size_t activations = 0;                             // and workspace: the arena of a pass
  size_t total() const { return parameters + gradients + moments + activations; }
  std::vector<ParamSpec> specs;  // of all parameters
};

// Throws Error(kUsage) for configurations that are not valid, and for steps that are beyond planning: of more tokens than kMostPlannedTokens, or that take
// more than this process has address space for.
inline constexpr int64_t kMostPlannedTokens = int64_t{1} << 28;
MemoryPlan plan_memory(const ModelConfig& model, const TrainConfig& train);

// Error(kUsage) that says what to lower, when a step takes more memory than is available (base/memory.h).
void require_memory_of_step(const ModelConfig& model, const TrainConfig& train);

}  // namespace fw
