#include "train/memory_plan.h"

#include <fmt/format.h>

#include <new>

#include "base/error.h"
#include "base/memory.h"
#include "base/plan_device.h"
#include "train/step.h"

namespace fw {
namespace {

// Of a batch and what it predicts.
double ids_bytes(const TrainConfig& train) { return static_cast<double>(train.batch) * static_cast<double>(train.length) * 2 * sizeof(int32_t); }

MemoryPlan plan_step(const ModelConfig& config, const TrainConfig& train) {
  MemoryPlan plan;
  PlanDevice device;
  LanguageModel<float> model(config, device);
  model.set_precision(train.precision == "bf16" ? Precision::kBf16 : Precision::kNative);
  model.set_recompute(parse_recompute(train.recompute));
  plan.parameters = device.bytes();
  plan.specs = model.params().specs();
  AdamW optimizer({}, model.params());
  plan.moments = device.bytes() - plan.parameters;
  model.begin_step();
  plan.gradients = device.bytes() - plan.parameters - plan.moments;

  Batch batch;
  const int64_t tokens = train.batch * train.length;
  batch.ids.assign(static_cast<size_t>(tokens), 0);
  batch.targets.assign(static_cast<size_t>(tokens), 0);
  std::vector<int64_t> offsets;
  for (int64_t at = 0; at <= tokens; at += train.length) offsets.push_back(at);
  batch.layout = SeqLayout(std::move(offsets));
  train_step(model, optimizer, {&batch, 1}, 0.0, 0.0);
  plan.activations = device.peak_bytes() - plan.parameters - plan.moments - plan.gradients;
  return plan;
}

}  // namespace

MemoryPlan plan_memory(const ModelConfig& config, const TrainConfig& train) {
  validate(train);
  // Their ids are the one thing that a plan takes itself.
  if (train.batch * train.length > kMostPlannedTokens) {
    fail_usage("batch, length: expected at most {} tokens to plan a step for, got {} x {}", kMostPlannedTokens, train.batch, train.length);
  }
  try {
    return plan_step(config, train);
  } catch (const std::bad_alloc&) {
    fail_usage("a training step of {} x {} tokens takes more memory than this process has addresses for: lower batch or length", train.batch, train.length);
  }
}

void require_memory_of_step(const ModelConfig& config, const TrainConfig& train) {
  validate(train);
  const double tokens = static_cast<double>(train.batch) * static_cast<double>(train.length);
  const double held = parameter_count(config) * sizeof(float) * 4;  // parameters, gradients, two moments
  const std::string model = "the model in training (parameters, gradients and moments)";
  require_memory(held, model, "lower hidden_size or num_hidden_layers; --no-check-memory tries all the same");
  const std::string step = fmt::format("a training step of {} x {} tokens", train.batch, train.length);
  const std::string advice = fmt::format("lower batch or length (accumulate makes up for it) or the model's sizes{}; --no-check-memory tries all the same",
                                         train.recompute == "none" ? ", or give --recompute all" : "");
  // The ids of all batches, and one residual stream: most of what cannot be is refused without a plan.
  const double batches = ids_bytes(train) * static_cast<double>(train.accumulate);
  require_memory(held + batches + tokens * static_cast<double>(config.hidden_size) * sizeof(float), step, advice);
  if (!memory_is_checked() || train.batch * train.length > kMostPlannedTokens) return;
  require_memory(static_cast<double>(plan_memory(config, train).total()) + batches, step, advice);
}

}  // namespace fw
