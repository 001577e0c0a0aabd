#include "cli/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/stop.h"
#include "base/threads.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "model/cost.h"
#include "ops/profile.h"
#include "report/progress.h"
#include "report/table.h"
#include "train/memory_plan.h"
#include "train/step.h"

namespace fw::cli {
namespace {

constexpr int kSteps = 3;  // timed, after one that takes memory and lets libraries make ready

Batch random_batch(const ModelConfig& model, const TrainConfig& train) {
  Random random(7);
  Batch batch;
  batch.layout = SeqLayout::uniform(train.batch, train.length);
  batch.ids.resize(static_cast<size_t>(batch.layout.tokens()));
  for (int32_t& id : batch.ids) id = static_cast<int32_t>(random.below(static_cast<uint64_t>(model.vocab_size)));
  batch.targets = batch.ids;
  return batch;
}

// A model with its optimiser, ready for steps. Whether its operations are timed is decided when it is made.
struct Stepper {
  Stepper(const ModelConfig& config, const TrainConfig& train, Device& device)
      : plan(plan_memory(config, train)),
        model(config, device),
        optimizer({train.beta1, train.beta2, train.adam_eps, train.weight_decay, plan.format, train.seed},
                  model.params()),
        batch(random_batch(config, train)) {
    Random random(train.seed);
    model.init(random);
    model.set_precision(train.precision == "bf16" ? Precision::kBf16 : Precision::kNative);
    model.set_decode_bits(train.decode_bits);
    model.set_recompute(plan.recompute);
    if (device.kind() != FW_DEVICE_CPU) model.reserve_scratch(plan.scratch);
    step();
  }
  // Seconds.
  double step() {
    stop_point("profile", done++, 2 * (kSteps + 1), "steps");
    const auto begin = std::chrono::steady_clock::now();
    train_step(model, optimizer, {&batch, 1}, 1e-5, 1.0);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  MemoryPlan plan;
  LanguageModel<float> model;
  AdamW optimizer;
  Batch batch;
  int64_t done = 0;
};

// The larger of what the bytes and what the operations would take at the device's limits, of the time that they took.
double of_limit(const OperationTime& row, const DeviceLimits& limits) {
  return row.seconds > 0
             ? std::max(row.bytes / limits.bytes_per_second, row.flops / limits.flops_per_second) / row.seconds
             : 0;
}

}  // namespace

Json profile_step(const ModelConfig& config, const TrainConfig& train) {
  Device& device = device_named(train.device);
  const bool on_cpu = device.kind() == FW_DEVICE_CPU;
  say("profile   {}; {} x {} tokens, {}\n", describe(config), train.batch, train.length,
      on_cpu ? fmt::format("{}, {} threads", train.precision, num_threads())
             : fmt::format("{}, bf16 activations", device_info().name));
  std::fflush(stdout);
  // Alone: the time that shares of a step's products are of.
  std::vector<double> whole;
  {
    Stepper stepper(config, train, device);
    for (int i = 0; i < kSteps; ++i) whole.push_back(stepper.step());
  }
  std::sort(whole.begin(), whole.end());
  const double step = whole[whole.size() / 2];

  const DeviceLimits limits = measure_limits(device, on_cpu ? 2048 : 16384);
  std::vector<OperationTime> rows;
  {
    Profile profile;
    Stepper stepper(config, train, device);
    profile.clear();
    for (int i = 0; i < kSteps; ++i) stepper.step();
    rows = profile.by_time();
  }
  double timed = 0;
  std::map<std::string, double> of_kind = {{"products", 0}, {"recurrence", 0}, {"attention", 0}, {"rest", 0}};
  for (OperationTime& row : rows) {
    row.calls /= kSteps;
    for (double* x : {&row.seconds, &row.bytes, &row.flops}) *x /= kSteps;
    timed += row.seconds;
    of_kind[kind_of_operation(row.name)] += row.seconds;
  }
  const double tokens = static_cast<double>(train.batch * train.length),
               model_flops = 3 * cost_of(config, train.length).flops_token * tokens;
  const double utilisation = model_flops / step / limits.flops_per_second;

  Table table;
  table.column("operation", Table::Align::kLeft);
  for (const char* name : {"calls", "ms", "share", "MB", "GFLOP", "GB/s", "GFLOP/s", "of the limit"})
    table.column(name);
  Json list = Json::array();
  for (const OperationTime& row : rows) {
    const auto rate = [&](double amount) {
      return row.seconds > 0 && amount > 0 ? fmt::format("{:.1f}", amount / row.seconds / 1e9) : std::string();
    };
    table.row({row.name, fmt::format("{}", row.calls), fmt::format("{:.3f}", 1e3 * row.seconds),
               fmt::format("{:.1f}%", 100 * row.seconds / timed), fmt::format("{:.1f}", row.bytes / 1e6),
               row.flops > 0 ? fmt::format("{:.2f}", row.flops / 1e9) : "", rate(row.bytes), rate(row.flops),
               of_limit(row, limits) > 1 ? "above" : fmt::format("{:.0f}%", 100 * of_limit(row, limits))});
    list.push_back({{"operation", row.name},
                    {"kind", kind_of_operation(row.name)},
                    {"calls", row.calls},
                    {"ms", 1e3 * row.seconds},
                    {"bytes", row.bytes},
                    {"flops", row.flops},
                    {"of_limit", of_limit(row, limits)}});
  }
  say("{}", table.text());
  std::string shares;
  Json of_kinds = Json::object();
  for (const char* kind : {"products", "recurrence", "attention", "rest"}) {
    shares += fmt::format("{}{} {:.1f}%", shares.empty() ? "" : ", ", kind, 100 * of_kind[kind] / timed);
    of_kinds[kind] = of_kind[kind] / timed;
  }
  say("limits    {:.1f} GB/s (a long copy), {:.1f} GFLOP/s (a product of {} x 2048 x 2048), measured in this run\n",
      limits.bytes_per_second / 1e9, limits.flops_per_second / 1e9, on_cpu ? 2048 : 16384);
  if (std::any_of(rows.begin(), rows.end(), [&](const OperationTime& row) { return of_limit(row, limits) > 1; }))
    say("{}", "          above: faster than the long copy, since what it reads was in the caches\n");
  say("step      {:.1f} ms, {:.0f} tokens a second; its operations one at a time {:.1f} ms: {}\n", 1e3 * step,
      tokens / step, 1e3 * timed, shares);
  say("MFU       {:.1f}% of the product's rate: {:.1f} GFLOP a step by the model's size\n", 100 * utilisation,
      model_flops / 1e9);
  return {{"description", describe(config)},
          {"device", on_cpu ? "cpu" : device_info().name},
          {"threads", num_threads()},
          {"batch", train.batch},
          {"length", train.length},
          {"step_ms", 1e3 * step},
          {"tokens_per_second", tokens / step},
          {"operations_ms", 1e3 * timed},
          {"copy_bytes_per_second", limits.bytes_per_second},
          {"product_flops_per_second", limits.flops_per_second},
          {"model_flops", model_flops},
          {"mfu", utilisation},
          {"shares", of_kinds},
          {"operations", list}};
}

}  // namespace fw::cli
