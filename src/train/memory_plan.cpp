#include "train/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <optional>

#include "base/error.h"
#include "base/memory.h"
#include "base/plan_device.h"
#include "ops/backend.h"
#include "train/data_parallel.h"
#include "train/evaluate.h"
#include "train/step.h"

namespace fw {
namespace {

// Of a batch and what it predicts.
double ids_bytes(const TrainConfig& train) {
  return static_cast<double>(train.batch) * static_cast<double>(train.length) * 2 * sizeof(int32_t);
}

bool on_cpu(const TrainConfig& train) { return train.device == "cpu"; }

MemoryPlan plan_step(const ModelConfig& config, const TrainConfig& train, int ranks, const RecomputeLayers& recompute,
                     MomentFormat format) {
  MemoryPlan plan;
  plan.recompute = recompute;
  plan.format = format;
  PlanDevice device(on_cpu(train) ? FW_DEVICE_CPU : FW_DEVICE_CUDA);
  plan.libraries = library_bytes(device);
  if (!on_cpu(train)) plan.messages = nccl_room(ranks);
  LanguageModel<float> model(config, device,
                             train.lora > 0 && !on_cpu(train) ? MasterFormat::kBf16 : MasterFormat::kBf16PlusLow);
  if (train.lora > 0) {
    plan.base = device.bytes();
    model.add_adapters(adapters_of(train));
    plan.adapters = static_cast<size_t>(model.trained().size());
  }
  model.set_precision(train.precision == "bf16" ? Precision::kBf16 : Precision::kNative);
  model.set_decode_bits(train.decode_bits);
  model.set_recompute(recompute);
  plan.parameters = device.bytes();
  plan.specs = model.params().specs();
  const std::vector<ParamRange> parts = rank_ranges(model.trained(), ranks);
  const ParamRange part = *std::max_element(
      parts.begin(), parts.end(), [](const ParamRange& a, const ParamRange& b) { return a.size() < b.size(); });
  AdamW optimizer({.moments = format}, model.trained(), part);
  plan.moments = device.bytes() - plan.parameters;
  model.begin_step();
  // The sum of gradients that are made apart or by several ranks, and what is received for it (data_parallel.h).
  const Buffer<float> sum(device, train.sums == "apart" || ranks > 1 ? part.size() : 0),
      received(device, part.size() * (ranks - 1));
  plan.gradients = device.bytes() - plan.parameters - plan.moments;

  Batch batch;
  const int64_t tokens = train.batch * train.length;
  batch.ids.assign(static_cast<size_t>(tokens), 0);
  batch.targets.assign(static_cast<size_t>(tokens), 0);
  std::vector<int64_t> offsets;
  for (int64_t at = 0; at <= tokens; at += train.length) offsets.push_back(at);
  batch.layout = SeqLayout(std::move(offsets));
  train_step(model, optimizer, {&batch, 1}, 0.0, 0.0);
  plan.operands = device.bytes() - model.scratch_bytes() - plan.parameters - plan.moments - plan.gradients;
  if (on_cpu(train)) {
    plan.activations = device.peak_bytes() - plan.parameters - plan.moments - plan.gradients - plan.operands;
  } else {
    plan.scratch = model.planned_scratch();
    plan.activations = plan.scratch.total();
  }
  return plan;
}

// The first that fits, of those that compute more and more again; nothing where none does, and then *smallest is the
// smallest of them and what it was.
std::optional<MemoryPlan> fit_step(const ModelConfig& config, const TrainConfig& train, int ranks, MomentFormat format,
                                   uint64_t most, std::optional<MemoryPlan>* smallest) {
  const auto level_of = [&](int level, int64_t layers) {
    return plan_step(config, train, ranks, {static_cast<Recompute>(level), layers}, format);
  };
  const int first = static_cast<int>(parse_recompute(train.recompute)), last = static_cast<int>(Recompute::kAll);
  for (int level = first; level <= last; ++level) {
    MemoryPlan plan = level_of(level, config.num_hidden_layers);
    if (plan.total() > most) {
      if (!*smallest || plan.total() < (*smallest)->total()) *smallest = std::move(plan);
      continue;
    }
    if (level == first) return plan;
    // More layers take less, once there is one: it brings the memory where what is recomputed lies.
    int64_t low = 0, high = config.num_hidden_layers;  // low layers are too few, high will do
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      MemoryPlan other = level_of(level, middle);
      if (other.total() > most) {
        low = middle;
      } else {
        high = middle;
        plan = std::move(other);
      }
    }
    return plan;
  }
  return std::nullopt;
}

// What the same bits allow first, then other moments.
MemoryPlan fit_step(const ModelConfig& config, const TrainConfig& train, int ranks, uint64_t most) {
  std::optional<MemoryPlan> smallest;
  for (const MomentFormat format : {MomentFormat::kFloat32, MomentFormat::kBf16}) {
    if (train.moments != "auto" && train.moments != name_of(format)) continue;
    if (std::optional<MemoryPlan> plan = fit_step(config, train, ranks, format, most, &smallest))
      return std::move(*plan);
  }
  fail_usage(
      "memory: a step of {} x {} tokens takes {} bytes ({:.2f} GiB) at least, with recompute {} and moments {}; "
      "expected so much or more, got {}. A lower "
      "batch or "
      "length takes less (accumulate makes up for it), and so do smaller sizes of the model{}",
      train.batch, train.length, smallest->total(), static_cast<double>(smallest->total()) / 0x1p30,
      describe(smallest->recompute, config.num_hidden_layers), name_of(smallest->format), train.memory,
      smallest->format == MomentFormat::kFloat32 ? " and moments = bf16" : "");
}

}  // namespace

size_t nccl_room(int ranks) {
  if (ranks <= 1) return 0;
  constexpr size_t kMiB = size_t{1} << 20, kOfMachine = 7;
  const size_t others = static_cast<size_t>(ranks) - 1, near = std::min(others, kOfMachine);
  return (256 + 64 * near + 8 * (others - near)) * kMiB;
}

MemoryPlan plan_memory(const ModelConfig& config, const TrainConfig& train, int ranks) {
  validate(train);
  // Their ids are the one thing that a plan takes itself.
  if (train.batch * train.length > kMostPlannedTokens) {
    fail_usage("batch, length: expected at most {} tokens to plan a step for, got {} x {}", kMostPlannedTokens,
               train.batch, train.length);
  }
  try {
    const MomentFormat format = train.moments == "bf16" ? MomentFormat::kBf16 : MomentFormat::kFloat32;
    if (train.memory.empty()) return plan_step(config, train, ranks, {parse_recompute(train.recompute)}, format);
    return fit_step(config, train, ranks, parse_bytes(train.memory).value_or(0));
  } catch (const std::bad_alloc&) {
    fail_usage(
        "a training step of {} x {} tokens takes more memory than this process has addresses for: lower batch or "
        "length",
        train.batch, train.length);
  }
}

std::string describe(const RecomputeLayers& what, int64_t layers) {
  const std::vector<std::string> names = recompute_names();
  const auto level = static_cast<size_t>(what.level);
  if (what.layers >= layers || level == 0) return names[level];
  return fmt::format("{} in {} of {} layers, {} in the others", names[level], what.layers, layers, names[level - 1]);
}

void require_memory_of_step(const ModelConfig& config, const TrainConfig& train, const std::string& lower,
                            double beside) {
  validate(train);
  const double tokens = static_cast<double>(train.batch) * static_cast<double>(train.length);
  // Parameters, gradients (twice where they are made apart), and two moments, in bf16 where they may be that.
  const bool narrow = train.moments == "bf16" || (train.moments == "auto" && !train.memory.empty());
  const int copies = train.lora > 0 ? 1 : (narrow ? 3 : 4) + (train.sums == "apart" ? 1 : 0);
  const double held = parameter_count(config) * sizeof(float) * copies;
  const std::string model = "the model in training (parameters, gradients and moments)";
  require_memory(held, model, "lower hidden_size or num_hidden_layers; --no-check-memory tries all the same");
  const std::string step = fmt::format("a training step of {} x {} tokens", train.batch, train.length);
  const std::string trains =
      fmt::format("batch or length (accumulate makes up for it) or the model's sizes{}",
                  train.recompute == "none" && train.memory.empty() ? ", or give --recompute all" : "");
  const std::string advice =
      fmt::format("lower {}; --no-check-memory tries all the same", lower.empty() ? trains : lower);
  // The ids of all batches, and one residual stream: most of what cannot be is refused without a plan.
  const double batches = ids_bytes(train) * static_cast<double>(train.accumulate);
  require_memory(held + batches + tokens * static_cast<double>(config.hidden_size) * sizeof(float), step, advice);
  if (!memory_is_checked() || train.batch * train.length > kMostPlannedTokens) return;
  require_memory(static_cast<double>(plan_memory(config, train).total()) + batches + beside, step, advice);
}

double memory_beside_steps(const ModelConfig& config, const TrainConfig& train, bool evaluates, bool tests) {
  if (!memory_is_checked() || train.batch * train.length > kMostPlannedTokens) return 0;
  constexpr double kProgram = double{32 << 20};  // what a process takes besides: stacks, libraries' buffers
  double bytes = kProgram;
  if (evaluates || tests) {
    const double pass = static_cast<double>(plan_pass(config, kEvaluationTokens)),
                 activations = static_cast<double>(plan_memory(config, train).activations);
    bytes += std::max(0.0, pass - activations);
  }
  if (tests && train.eval_every > 0) bytes += parameter_count(config) * sizeof(float);
  return bytes;
}

size_t plan_pass(const ModelConfig& config, int64_t tokens) {
  PlanDevice device;
  LanguageModel<float> model(config, device);
  const size_t parameters = device.bytes();
  const std::vector<int32_t> ids(static_cast<size_t>(tokens));
  ModelState<float> state(config, 1, device);
  model.evaluate(ids, ids, SeqLayout({0, tokens}), &state);
  return device.peak_bytes() - parameters;
}

size_t plan_decoding(const ModelConfig& config, int64_t sequences, const std::optional<int64_t>& ring, fw_device kind,
                     int64_t drafts) {
  PlanDevice device(kind);
  LanguageModel<float> model(config, device);
  model.set_decode_ring(ring);
  const size_t parameters = device.bytes();
  ModelState<float> states(config, sequences, device);
  if (drafts > 0) {
    const std::unique_ptr<DraftDecoder<float>> decoder = model.draft_decoder(states, drafts);
    const int64_t tokens = decoder->most_tokens();
    const std::vector<int32_t> ids(static_cast<size_t>(sequences * tokens));
    const std::vector<double> uniform(ids.size());
    decoder->read(1, {ids.data(), static_cast<size_t>(sequences)}, config.vocab_size, {}, uniform, false);
    decoder->read(tokens, ids, config.vocab_size, {}, uniform, false);
    return device.peak_bytes() - parameters;
  }
  const std::unique_ptr<Decoder<float>> decoder = model.decoder(states);
  decoder->step();
  return device.peak_bytes() - parameters;
}

namespace {

// What a process takes besides a pass: stacks, libraries' buffers and code, results.
constexpr double kBesidePass = double{16 << 20};

}  // namespace

void require_memory_of_pass(const LanguageModel<float>& model, int64_t tokens, const std::string& advice) {
  if (model.device().kind() != FW_DEVICE_CPU || !memory_is_checked()) return;
  require_memory(static_cast<double>(plan_pass(model.config(), tokens)) + kBesidePass,
                 fmt::format("a pass of the model over {} tokens", tokens), advice);
}

void require_memory_of_decoding(const LanguageModel<float>& model, int64_t sequences, const std::string& advice,
                                int64_t drafts) {
  if (model.device().kind() != FW_DEVICE_CPU || !memory_is_checked()) return;
  const double bytes =
      static_cast<double>(plan_decoding(model.config(), sequences, model.decode_ring(), FW_DEVICE_CPU, drafts)) +
      kBesidePass;
  require_memory(bytes, fmt::format("to write {} texts side by side", sequences), advice);
}

}  // namespace fw
