#include "cli/dry_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "base/threads.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "report/progress.h"
#include "report/table.h"
#include "train/memory_plan.h"
#include "train/step.h"

namespace fw::cli {
namespace {

std::string bytes_text(size_t bytes) { return format_bytes(static_cast<double>(bytes)); }

std::string time_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.0f} ms", 1e3 * seconds) : fmt::format("{:.1f} s", seconds);
}

// Parameters of the parts of a layer and of what is outside them.
struct Part {
  std::string name;
  int64_t mixer = 0, mlp = 0, norms = 0, other = 0;
  int64_t total() const { return mixer + mlp + norms + other; }
  bool same_sizes(const Part& b) const {
    return mixer == b.mixer && mlp == b.mlp && norms == b.norms && other == b.other;
  }
};

std::vector<Part> parts_of(const std::vector<ParamSpec>& specs) {
  constexpr std::string_view kLayers = "model.layers.";
  std::vector<Part> parts;
  for (const ParamSpec& spec : specs) {
    const bool in_layer = spec.name.starts_with(kLayers);
    const size_t dot = in_layer ? spec.name.find('.', kLayers.size()) : spec.name.rfind('.');
    const std::string name = spec.name.substr(0, dot), rest = spec.name.substr(dot + 1);
    if (parts.empty() || parts.back().name != name) parts.push_back({name});
    Part& part = parts.back();
    (!in_layer                   ? part.other
     : rest.starts_with("attn.") ? part.mixer
     : rest.starts_with("mlp.")  ? part.mlp
                                 : part.norms) += spec.size();
  }
  return parts;
}

// Neighbours with the same sizes are one row.
void print_parts(const std::vector<ParamSpec>& specs) {
  Table table;
  table.column("part", Table::Align::kLeft);
  for (const char* name : {"layers", "mixer", "MLP", "norms", "parameters"}) table.column(name);
  const std::vector<Part> parts = parts_of(specs);
  int64_t total = 0;
  const auto number = [](int64_t n) { return n > 0 ? fmt::format("{}", n) : std::string(); };
  for (size_t i = 0, next; i < parts.size(); i = next) {
    for (next = i + 1; next < parts.size() && parts[i].other == 0 && parts[i].same_sizes(parts[next]);) ++next;
    const auto count = static_cast<int64_t>(next - i);
    const std::string last = parts[next - 1].name.substr(parts[next - 1].name.rfind('.') + 1);
    const std::string name = count > 1 ? fmt::format("{} to {}", parts[i].name, last) : parts[i].name;
    table.row({name, parts[i].other > 0 ? "" : fmt::format("{}", count), number(parts[i].mixer), number(parts[i].mlp),
               number(parts[i].norms), number(count * parts[i].total())});
    total += count * parts[i].total();
  }
  table.row({"all", "", "", "", "", number(total)});
  say("\n{}\n", table.text());
}

// Seconds of an optimiser step on `sequences` sequences of `length` random tokens.
double seconds_of_step(LanguageModel<float>& model, AdamW& optimizer, int64_t sequences, int64_t length,
                       Random& random) {
  Batch batch;
  std::vector<int64_t> offsets = {0};
  for (int64_t s = 1; s <= sequences; ++s) offsets.push_back(s * length);
  for (int64_t t = 0; t < sequences * length; ++t)
    batch.ids.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(model.config().vocab_size))));
  batch.targets = batch.ids;
  batch.layout = SeqLayout(std::move(offsets));
  const auto begin = std::chrono::steady_clock::now();
  train_step(model, optimizer, {&batch, 1}, 1e-5, 1.0);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A step is so much for its tokens and so much for the update; both from two short steps.
double estimated_step(const ModelConfig& config, const TrainConfig& train, const MemoryPlan& plan) {
  constexpr int64_t kTokens = 256;
  const int64_t length = std::min(train.length, kTokens), few = std::max<int64_t>(1, kTokens / length), many = 2 * few;
  LanguageModel<float> model(
      config, device_named(train.device),
      train.lora > 0 && train.device != "cpu" ? MasterFormat::kBf16 : MasterFormat::kBf16PlusLow);
  Random random(1);
  model.init(random);
  if (train.lora > 0) {
    model.add_adapters(adapters_of(train));
    model.trained().init(random);
  }
  model.set_precision(train.precision == "bf16" ? Precision::kBf16 : Precision::kNative);
  model.set_decode_bits(train.decode_bits);
  model.set_recompute(plan.recompute);
  AdamW optimizer({.moments = plan.format}, model.trained());
  seconds_of_step(model, optimizer, many, length, random);  // memory is taken, libraries make ready
  const double a = seconds_of_step(model, optimizer, few, length, random),
               b = seconds_of_step(model, optimizer, many, length, random);
  const double per_token = std::max(b - a, 0.1 * b) / static_cast<double>(few * length);
  const double update = std::max(a - per_token * static_cast<double>(few * length), 0.0);
  return update + per_token * static_cast<double>(train.batch * train.length * train.accumulate);
}

// What a step takes, in the order in which it is taken, and a row for what is chosen.
void print_memory(const MemoryPlan& plan, const ModelConfig& model, const TrainConfig& train) {
  const auto parameters = static_cast<double>(parameter_count(model));
  const bool on_cpu = train.device == "cpu";
  Table table;
  table.column("memory of a step", Table::Align::kLeft);
  for (const char* name : {"bytes", "GiB", "bytes/parameter"}) table.column(name);
  const auto row = [&](const std::string& what, size_t bytes, bool of_parameters) {
    if (bytes == 0) return;
    table.row({what, fmt::format("{}", bytes), fmt::format("{:.2f}", static_cast<double>(bytes) / 0x1p30),
               of_parameters ? fmt::format("{:.1f}", static_cast<double>(bytes) / parameters) : ""});
  };
  if (plan.adapters > 0) {
    row(on_cpu ? "frozen parameters, float32" : "frozen parameters, bf16", plan.base, true);
    row("adapters, float32", plan.parameters - plan.base, false);
  } else {
    row(on_cpu ? "parameters, float32" : "parameters, float32 as bf16 for products and the rest", plan.parameters,
        true);
  }
  row("copies for products, bf16", plan.operands, true);
  row("gradients, float32", plan.gradients, true);
  row(fmt::format("moments, {}", name_of(plan.format)), plan.moments, true);
  row(on_cpu ? "activations and workspace" : "activations kept, and workspace",
      on_cpu ? plan.activations : plan.scratch.kept, false);
  row("activations recomputed", plan.scratch.recomputed, false);
  row("workspace of cuBLASLt", plan.libraries, false);
  row("all", plan.total(), true);
  say("\n{}\nrecompute {}{}\n", table.text(), describe(plan.recompute, model.num_hidden_layers),
      train.memory.empty() ? "" : fmt::format(" (the least that fits --memory {})", train.memory));
  if (plan.format == MomentFormat::kBf16)
    say("moments   bf16, rounded stochastically{}\n",
        train.moments == "auto"
            ? fmt::format(
                  ": no step with float32 moments fits --memory {}; the numbers of the run are others than with those",
                  train.memory)
            : "");
  if (!on_cpu)
    say("{}",
        "          on the device, before the first step; not counted: the driver's own, and what documents packed in a "
        "sequence take besides\n");
}

// Why no step can be timed, or nothing.
std::string no_time(const MemoryPlan& plan, const TrainConfig& train) {
  if (train.device != "cpu") {
    try {
      device_named(train.device);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }
  const std::optional<uint64_t> available = available_memory();
  if (!available || plan.total() <= *available) return {};
  return fmt::format("{} are available; a lower batch or length takes less, --accumulate makes up for it",
                     bytes_text(*available));
}

}  // namespace

void print_plan(const ModelConfig& model, const TrainConfig& train) {
  const MemoryPlan plan = plan_memory(model, train);
  const double active = active_parameter_count(model);
  say("model     {} ({} parameters{})\n", describe(model), format_count(parameter_count(model)),
      active < parameter_count(model) ? fmt::format(", {} active in a token", format_count(active)) : "");
  print_parts(plan.specs);
  if (plan.adapters > 0)
    say("adapters  LoRA of rank {}, alpha {}: {} trained parameters\n", train.lora, train.lora_alpha,
        format_count(static_cast<double>(plan.adapters)));
  say("memory    {} a step (planned: {} bytes)\n", bytes_text(plan.total()), plan.total());
  print_memory(plan, model, train);
  if (const std::string why = no_time(plan, train); !why.empty()) {
    say("time      not measured: {}\n", why);
    return;
  }
  std::fflush(stdout);
  const double seconds = estimated_step(model, train, plan);
  say("time      about {} a step, {} for {} steps (an estimate from short steps, {} threads)\n", time_text(seconds),
      format_duration(seconds * static_cast<double>(train.steps)), train.steps, num_threads());
}

}  // namespace fw::cli
