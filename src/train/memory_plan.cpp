#include "train/memory_plan.h"

#include "base/plan_device.h"
#include "train/step.h"

namespace fw {

MemoryPlan plan_memory(const ModelConfig& config, const TrainConfig& train) {
  validate(train);
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

}  // namespace fw
