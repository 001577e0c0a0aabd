#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/stop.h"
#include "ops/device_ranks.h"
#include "train/best_model.h"
#include "train/checkpoint.h"
#include "train/data_parallel.h"
#include "train/memory_plan.h"
#include "train/metrics.h"
#include "train/optimizer.h"
#include "train/schedule.h"
#include "train/step.h"

namespace fw {
namespace {

// Steps in a row without a finite loss and norm after which a run is not going to recover.
constexpr int64_t kMaxSkippedInRow = 10;

// Without a sign: 0 / 0 has one, which would be written.
constexpr double kNotKnown = std::numeric_limits<double>::quiet_NaN();

// "key (checkpoint: a, run: b)" of every key that differs from the checkpoint's config.json.
std::string config_differences(const std::string& path, const ModelConfig& config) {
  const nlohmann::json theirs = parse_json(read_file(path), "'" + path + "'"), ours = config_to_json(config);
  std::string text;
  for (const auto& [key, value] : ours.items()) {
    const std::string other = theirs.is_object() && theirs.contains(key) ? theirs.at(key).dump() : "missing";
    if (other != value.dump())
      text += fmt::format("{}{} (checkpoint: {}, this run: {})", text.empty() ? "" : ", ", key, other, value.dump());
  }
  return text.empty() ? "its config.json was written by another version" : text;
}

// None if there is none at all. Each that is not usable is told to `warn`.
std::optional<TrainerState> newest_good_checkpoint(const std::string& folder,
                                                   const std::function<void(const std::string&)>& warn) {
  std::vector<int64_t> newest_first = list_checkpoints(folder);
  if (newest_first.empty()) return {};
  std::reverse(newest_first.begin(), newest_first.end());
  std::string damage;
  for (const int64_t step : newest_first) {
    const std::string path = checkpoint_path(folder, step);
    try {
      return verify_checkpoint(path);
    } catch (const Error& error) {
      if (damage.empty()) damage = error.what();
      if (warn) warn(fmt::format("checkpoint {} is not usable: {}", path, error.what()));
    }
  }
  fail_usage("'{}': none of the {} checkpoints is usable; the newest: {}", folder, newest_first.size(), damage);
}

KeyRange memory_size() {
  const auto holds = [](const KeyTarget& t) {
    const std::string& text = *std::get<std::string*>(t);
    return text.empty() || parse_bytes(text).has_value();
  };
  return {"a size such as 22G, 22GiB, 22GB or 500M", holds, {}};
}

// Of a run on a GPU, which takes its memory before the first step, and of one that may take so much and no more.
std::optional<MemoryPlan> plan_of(const ModelConfig& model, const TrainConfig& config, int ranks) {
  if (config.device != "cpu" || !config.memory.empty()) return plan_memory(model, config, ranks);
  return std::nullopt;
}

MomentFormat format_of(const TrainConfig& config, const std::optional<MemoryPlan>& plan) {
  if (plan) return plan->format;
  return config.moments == "bf16" ? MomentFormat::kBf16 : MomentFormat::kFloat32;
}

}  // namespace

void check_data_file(const TokenFile& file, const Tokenizer& tokenizer, const ModelConfig& model) {
  check_tokenizer(file, tokenizer);
  if (file.vocab_size() > model.vocab_size) {
    fail_usage("'{}' has a vocabulary of {}, the model (vocab_size) of {}: expected one at least as large", file.name(),
               file.vocab_size(), model.vocab_size);
  }
  if (file.tokens() <= file.documents()) {
    fail_usage("'{}': {} tokens in {} documents leave nothing to predict; give more text", file.name(), file.tokens(),
               file.documents());
  }
}

KeyTables key_tables(TrainConfig& c) {
#define FW_KEY FW_KEY_ENTRY
  return {{"train",
           "Training",
           {
#include "train/config.def"
           }}};
#undef FW_KEY
}

void validate(const TrainConfig& c) {
  TrainConfig copy = c;
  check_ranges(key_tables(copy));
  if (c.schedule != "constant" && c.min_lr > c.lr)
    fail_usage("min_lr: expected a number >= 0 and <= lr, got {}", c.min_lr);
  if (c.lora > 0 && c.from.empty())
    fail_usage("lora: expected 0 without from, the model that adapters belong to, got {}: give it with --from", c.lora);
  if (c.warmup_from > c.lr) fail_usage("warmup_from: expected a number >= 0 and <= lr, got {}", c.warmup_from);
  constexpr int64_t kMaxTokens = int64_t{1} << 31;
  if (c.patience > 0 && c.eval_every == 0)
    fail_usage("patience: expected 0 with eval_every = 0, where nothing is evaluated before the end, got {}",
               c.patience);
  if (c.valid_tokens == 1)
    fail_usage("valid_tokens: expected 0 (all) or at least 2, because the first token is not scored, got 1");
  if (c.length > kMaxTokens / c.batch)
    fail_usage("batch, length: expected at most {} tokens a micro-batch, got {} x {}", kMaxTokens, c.batch, c.length);
}

AdapterConfig adapters_of(const TrainConfig& config, const std::string& base) {
  return {{config.lora, config.lora_alpha, false, config.lora_modules}, base, !base.empty() && is_hf_folder(base)};
}

struct Trainer::Impl {
  Communicator& ranks;
  TrainConfig config;
  std::shared_ptr<const Tokenizer> tokenizer;
  TokenMix train;
  std::shared_ptr<const TokenFile> valid;
  std::optional<MemoryPlan> plan;
  LanguageModel<float> model;
  DeviceRanks transport;                             // between devices
  std::optional<AdamW> local_opt;                    // one rank whose gradients run on, or
  std::optional<DataParallel<float>> data_parallel;  // all else
  Schedule schedule;
  BatchSource source;
  Random random;
  TrainerState state;

  std::string checkpoints;  // folder
  bool resumed = false, prepared = false;
  int64_t written = -1;               // step of the newest good checkpoint that this run wrote or resumed from
  int64_t recorded = -1;              // step of the newest record when this run began
  std::optional<MetricsLog> metrics;  // of rank 0
  double last_lr = 0;
  double interval_seconds = 0;  // of steps since the last record, in this process
  int64_t interval_steps = 0, interval_tokens = 0;

  Impl(const TrainConfig& c, const ModelConfig& m, std::shared_ptr<const Tokenizer> tok, TokenMix train_mix,
       std::shared_ptr<const TokenFile> valid_file, Communicator& communicator, const std::string& base)
      : ranks(communicator),
        config(c),
        tokenizer(std::move(tok)),
        train(std::move(train_mix)),
        valid(std::move(valid_file)),
        plan(plan_of(m, c, communicator.size())),
        model(m, device_named(c.device),
              c.lora > 0 && c.device != "cpu" ? MasterFormat::kBf16 : MasterFormat::kBf16PlusLow),
        transport(device_ranks(ranks, model.device())),
        schedule{c.lr, c.min_lr, c.warmup, c.steps, parse_schedule_shape(c.schedule), c.decay_share, c.warmup_from},
        source(train, c.batch, c.length, c.seed),
        random(c.seed),
        checkpoints(c.out + "/checkpoints") {
    if (c.lora > 0) model.add_adapters(adapters_of(c, base));
    const AdamWConfig adamw = {c.beta1, c.beta2, c.adam_eps, c.weight_decay, format_of(c, plan), c.seed};
    if (c.sums == "apart" || ranks.size() > 1) {
      data_parallel.emplace(ranks, transport.tensors ? *transport.tensors : ranks, adamw, model.trained(),
                            c.sums == "apart" ? GradientSums::kApart : GradientSums::kLocal);
    } else {
      local_opt.emplace(adamw, model.trained());
    }
    model.trained().init(random);
    model.set_tokenizer(tokenizer->checksum());
    model.set_precision(c.precision == "bf16" ? Precision::kBf16 : Precision::kNative);
    model.set_decode_bits(c.decode_bits);
    model.set_recompute(plan ? plan->recompute : RecomputeLayers{parse_recompute(c.recompute)});
    if (on_device()) model.reserve_scratch(plan->scratch);
    state.config_hash = config_hash(model.config());
    state.seed = c.seed;
    state.length = c.length;
    state.train_tokens = train.tokens();
    state.train_documents = train.documents();
    state.mix = train.description();
    if (c.lora > 0)
      state.adapters = fmt::format("rank {}, alpha {}, {}", c.lora, c.lora_alpha,
                                   c.lora_modules.empty() ? "all" : fmt::format("{}", fmt::join(c.lora_modules, " ")));
  }

  AdamW& optimizer() { return data_parallel ? data_parallel->optimizer() : *local_opt; }
  bool leads() const { return ranks.rank() == 0; }

  // Done by rank 0 while the others wait. What it throws ends all. On rank 0 it comes out as it is. On the others it
  // comes out as an error of numbers if it is that, after which no checkpoint is written. Else it comes out as Stopped,
  // after which one is.
  template <class Work>
  void on_first_rank(const Work& work) {
    std::exception_ptr failure;
    if (leads()) {
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    enum class End : char { kNone, kNumeric, kOther };
    End end = End::kNone;
    if (failure) {
      end = End::kOther;
      try {
        std::rethrow_exception(failure);
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kNumeric) end = End::kNumeric;
      } catch (...) {
      }
    }
    broadcast_value(ranks, end);
    if (failure) std::rethrow_exception(failure);
    if (end == End::kNumeric) fail_numeric("rank 0 has ended the run");
    if (end == End::kOther) throw Stopped("rank 0 has ended the run");
  }

  bool on_device() const { return model.device().kind() != FW_DEVICE_CPU; }

  // Once, before the first file is written: an earlier run in the same folder is not mixed with this one.
  void prepare() {
    if (prepared) return;
    on_first_rank([&] {
      make_folders(config.out);
      clean_checkpoints(checkpoints);
      const std::vector<int64_t> steps = list_checkpoints(checkpoints);
      if (!resumed && !steps.empty()) {
        fail_usage(
            "'{}' holds {} of an earlier run: --resume goes on from there; to begin anew, choose another folder (out) "
            "or remove this one",
            config.out, checkpoint_path(checkpoints, steps.back()));
      }
      // Killed between its last checkpoint and the removal of an older one, a run that has no more steps would not come
      // to that again.
      if (resumed) prune_checkpoints(checkpoints, state.step, config.keep);
      recover_best(config.out);
      if (resumed && keeps_best()) take_up_best();
      // A checkpoint is written before its step is evaluated: what the record said of the best loss is then made again
      // with it.
      metrics.emplace(config.out, judgement_missing() ? state.step - 1 : state.step, config.tensorboard);
      recorded = metrics->last_step();
    });
    broadcast_value(ranks, state.best_step);
    broadcast_value(ranks, state.best_loss);
    broadcast_value(ranks, recorded);
    // A checkpoint is written before its step's record is made, so it has what the record needs; once that stands in
    // the file, the next interval has begun.
    if (recorded == state.step) begin_interval();
    prepared = true;
  }

  bool is_last() const { return state.step == config.steps; }
  bool every(int64_t n) const { return n > 0 && state.step % n == 0; }
  bool evaluation_due() const { return valid != nullptr && (is_last() || every(config.eval_every)); }
  bool record_due() const { return is_last() || evaluation_due() || every(config.log_every); }
  // Of a run that was stopped between its checkpoint and the record of that step.
  bool record_missing() const { return resumed && state.step > 0 && record_due() && recorded < state.step; }

  // Evaluations before the end choose the best model and end the run; one at the end alone has nothing to choose from.
  bool keeps_best() const { return valid != nullptr && config.eval_every > 0; }
  bool judgement_missing() const {
    return resumed && state.step > 0 && keeps_best() && evaluation_due() && state.judged_step < state.step;
  }
  bool out_of_patience() const { return config.patience > 0 && state.not_better >= config.patience; }

  // Counts the evaluation of this step, and keeps the model if it is the best so far. The checkpoint comes first:
  // whatever happens, a resumed run knows which step best/ has to be of.
  void judge(double loss) {
    if (!keeps_best() || state.judged_step == state.step) return;
    state.judged_step = state.step;
    if (!std::isfinite(loss) || (state.best_step >= 0 && !(loss < state.best_loss))) {
      ++state.not_better;
      return;
    }
    state.best_step = state.step;
    state.best_loss = loss;
    state.not_better = 0;
    checkpoint();
    if (written == state.step)
      on_first_rank([&] { write_best(config.out, {state.best_step, state.best_loss}, model, *tokenizer); });
  }

  // best/ beside the checkpoint that the run goes on from. It is older where the run was stopped just before it was
  // written, and newer where it was stopped between the evaluation and the next checkpoint. A model of steps that are
  // still to come stays until they have.
  void take_up_best() {
    const BestRecord found = read_best(config.out);
    if (state.best_step == state.step && found.step != state.step) {
      write_best(config.out, {state.best_step, state.best_loss}, model, *tokenizer);
    } else if (found.step > state.best_step && found.step <= state.step && !judgement_missing()) {
      state.best_step = found.step;
      state.best_loss = found.loss;
    }
  }

  void begin_interval() {
    state.interval_nll = 0;
    state.interval_count = 0;
    interval_seconds = 0;
    interval_steps = 0;
    interval_tokens = 0;
  }

  void check_same_run(const std::string& path, const TrainerState& found) const {
    if (found.config_hash != state.config_hash) {
      fail_usage(
          "'{}' is a checkpoint of another model: {}; resume with that configuration or choose another folder (out)",
          path, config_differences(path + "/config.json", model.config()));
    }
    const auto same = [&path](const char* what, auto theirs, auto ours) {
      if (theirs != ours) {
        fail_usage(
            "'{}' was made with {} {}, this run has {}: its place in the data would mean something else; use {} {} or "
            "choose another folder (out)",
            path, what, theirs, ours, what, theirs);
      }
    };
    same("seed", found.seed, state.seed);
    same("length", found.length, state.length);
    same("a training file of tokens", found.train_tokens, state.train_tokens);
    same("a training file of documents", found.train_documents, state.train_documents);
    same("LoRA of", found.adapters.empty() ? "no" : found.adapters, state.adapters.empty() ? "no" : state.adapters);
    same("a base model with the checksum", found.base, state.base);
    same("a mix of", found.mix.empty() ? "one file" : found.mix, state.mix.empty() ? "one file" : state.mix);
  }

  // Moments are of the checkpoint's format, unless this run wants another, or has not the memory for it.
  void take_moments(const std::string& path, const std::function<void(const std::string&)>& warn) {
    const MomentFormat theirs = moments_of_checkpoint(path), ours = optimizer().format();
    if (theirs == ours) return;
    const bool forced = config.moments == "auto" && ours == MomentFormat::kBf16;
    if (config.moments == "auto" && !forced) return optimizer().begin_anew(theirs);
    if (warn) {
      warn(fmt::format("the moments of {} are {}; those of this run ({}) are {}{}", path, name_of(theirs),
                       forced ? fmt::format("memory = {}", config.memory) : fmt::format("moments = {}", config.moments),
                       name_of(ours),
                       ours == MomentFormat::kBf16 ? ", to which they are rounded: it does not go on bit for bit"
                                                   : ": it does not go on bit for bit"));
    }
  }

  void load(const std::string& path, const TrainerState& found) {
    Random generator;
    generator.load(found.random);
    load_checkpoint(path, found, model, optimizer());
    random = generator;
    state = found;
    last_lr = learning_rate(schedule, std::max<int64_t>(0, state.step - 1));
    source.seek(found.position);
    written = found.step;
    resumed = true;
  }

  // One optimiser step; a step without finite loss and norm changes only counters and the position in the data.
  void do_step() {
    const auto start = std::chrono::steady_clock::now();
    std::vector<Batch> batches;
    int64_t tokens = 0;
    for (int64_t i = 0; i < config.accumulate; ++i)
      tokens += static_cast<int64_t>(batches.emplace_back(source.next()).ids.size());
    last_lr = learning_rate(schedule, state.step);
    const StepResult step = data_parallel ? data_parallel->step(model, batches, last_lr, config.clip)
                                          : train_step(model, *local_opt, batches, last_lr, config.clip);
    state.norm = step.norm;
    if (step.finite) {
      state.skipped_in_row = 0;
      state.interval_nll += step.nll;
      state.interval_count += step.count;
    } else {
      ++state.skipped;
      ++state.skipped_in_row;
    }
    ++state.step;
    state.tokens += tokens;
    ++interval_steps;
    interval_tokens += tokens;
    interval_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (state.skipped_in_row >= kMaxSkippedInRow) {
      fail_numeric(
          "steps {} to {}: loss or gradient norm not finite {} times in a row, training stopped. Try a lower lr (now "
          "{:g}), a longer warmup (now {} "
          "steps){}{}{}",
          state.step - kMaxSkippedInRow + 1, state.step, kMaxSkippedInRow, config.lr, config.warmup,
          config.clip > 0 ? "" : ", clip = 1", config.precision == "bf16" ? ", precision = f32" : "",
          written >= 0 ? fmt::format("; the last checkpoint is {}", checkpoint_path(checkpoints, written)) : "");
    }
  }

  double interval_loss() const {
    return state.interval_count > 0 ? state.interval_nll / static_cast<double>(state.interval_count) : kNotKnown;
  }

  StepProgress progress() const {
    return {state.step, interval_loss(), 1e3 * interval_seconds / static_cast<double>(interval_steps),
            static_cast<double>(interval_tokens) / interval_seconds};
  }

  void note_expert_load(const std::vector<int64_t>& load, LogRecord& r) const {
    const auto experts = static_cast<size_t>(model.config().experts.num_experts);
    for (size_t first = 0; first < load.size(); first += experts) {
      const std::span<const int64_t> layer(load.data() + first, experts);
      const auto rows = static_cast<double>(std::accumulate(layer.begin(), layer.end(), int64_t{0}));
      if (rows > 0)
        r.expert_peak = std::max(
            r.expert_peak, static_cast<double>(*std::ranges::max_element(layer)) * static_cast<double>(experts) / rows);
      r.experts_idle += std::ranges::count(layer, 0);
    }
  }

  LogRecord record() {
    LogRecord r;
    r.step = state.step;
    r.tokens = state.tokens;
    r.loss = interval_loss();
    r.norm = std::isnan(state.norm) ? kNotKnown : state.norm;
    r.lr = last_lr;
    // The record of a step that an earlier process made has no time.
    r.ms = interval_steps > 0 ? 1e3 * interval_seconds / static_cast<double>(interval_steps) : kNotKnown;
    r.tokens_per_second = interval_steps > 0 ? static_cast<double>(interval_tokens) / interval_seconds : kNotKnown;
    r.epoch = source.epoch();
    r.skipped = state.skipped;
    if (interval_steps > 0) note_expert_load(model.take_expert_load(), r);
    if (evaluation_due()) {
      const EvalResult result =
          evaluate_file(model, *valid, *tokenizer, std::max<int64_t>(config.length, 2), false, config.valid_tokens);
      r.eval_loss = result.loss;
      r.eval_bits_per_byte = result.bits_per_byte.value_or(kNotKnown);
    }
    return r;
  }

  // Makes the record of this step and hands it on. False: a stop was asked for during the evaluation. What goes wrong
  // here (a full disk, standard output that is gone) ends the run, but first what it computed is saved.
  bool log(const std::function<void(const LogRecord&)>& on_log) {
    try {
      LogRecord r;
      on_first_rank([&] {
        r = record();
        metrics->append(r);
      });
      broadcast_value(ranks, r.eval_loss);
      begin_interval();
      if (evaluation_due()) judge(r.eval_loss);
      on_first_rank([&] {
        if (on_log) on_log(r);
      });
      if (is_last() && !(r.eval_loss < 0) && !std::isfinite(r.eval_loss)) {
        fail_numeric(
            "after the last step the held-out loss is not finite: the run diverged. Try a lower lr (now {:g}) or a "
            "longer warmup (now {} steps)",
            config.lr, config.warmup);
      }
    } catch (const Stopped&) {
      checkpoint();
      return false;
    } catch (const std::exception& error) {
      const auto* ours = dynamic_cast<const Error*>(&error);
      const ErrorKind kind = ours != nullptr ? ours->kind() : ErrorKind::kIo;
      if (kind == ErrorKind::kNumeric) throw;
      checkpoint();  // its own error would say the same and more
      throw Error(kind, fmt::format("{}; stopped at step {} of {}, the checkpoint is written, --resume goes on from it",
                                    error.what(), state.step, config.steps));
    }
    return true;
  }

  // One that is not finite is not written: the checkpoints before it are worth more, and the steps that follow end the
  // run.
  void checkpoint() {
    prepare();
    if (written == state.step || !model.parameters_finite()) return;
    state.updates = optimizer().updates();
    state.position = source.position();
    state.random = random.save();
    std::optional<AdamW> gathered;
    if (ranks.size() > 1) {
      data_parallel->complete(model.trained());
      gathered = data_parallel->whole(model.trained());
    }
    on_first_rank([&] { write_checkpoint(checkpoints, state, model, gathered ? *gathered : optimizer(), *tokenizer); });
    written = state.step;
    on_first_rank([&] { prune_checkpoints(checkpoints, state.step, config.keep); });
  }

  // The finished model, if it is one: its parameters and the loss of the first window of the data are finite.
  void write_model() {
    if (data_parallel) data_parallel->complete(model.trained());
    on_first_rank([&] { write_model_on_first_rank(); });
  }
  void write_model_on_first_rank() {
    const Batch batch = BatchSource(train, 1, config.length, config.seed).next();
    if (!model.parameters_finite() ||
        !std::isfinite(model.evaluate(batch.ids, batch.targets, batch.layout, nullptr).nll)) {
      fail_numeric(
          "after step {} the model is not finite: the run diverged, and no model is written. Try a lower lr (now {:g}) "
          "or a longer warmup (now {} steps)",
          state.step, config.lr, config.warmup);
    }
    const std::string folder = config.out + "/model";
    make_folders(folder);
    save_trained(folder, model);
    tokenizer->save(folder);
  }
};

Trainer::Trainer(const TrainConfig& config, const ModelConfig& model, std::shared_ptr<const Tokenizer> tokenizer,
                 TokenMix train, std::shared_ptr<const TokenFile> valid, Communicator& ranks, const std::string& base) {
  validate(config);
  validate(model);
  if (ranks.size() > 1) {
    if (config.sums == "running") fail_usage("sums: expected apart or local on {} ranks, got running", ranks.size());
    if (config.accumulate < ranks.size()) {
      fail_usage("accumulate: expected at least {}, a batch of every step for each rank, got {}", ranks.size(),
                 config.accumulate);
    }
  }
  if (!tokenizer || train.parts.empty()) fail_internal("Trainer: expected a tokenizer and a training file, got null");
  for (const TokenMix::Part& part : train.parts) check_data_file(*part.file, *tokenizer, model);
  if (valid) check_data_file(*valid, *tokenizer, model);
  if (!valid && config.patience > 0)
    fail_usage("patience: expected 0 without held-out text, got {}; hold a part out or give a file", config.patience);
  impl_ = std::make_unique<Impl>(config, model, std::move(tokenizer), std::move(train), std::move(valid), ranks, base);
}

Trainer::~Trainer() = default;

void Trainer::start_from(const LanguageModel<float>& model) {
  LanguageModel<float>& ours = impl_->model;
  if (!(model.config() == ours.config()))
    fail_internal("start_from: the model has another configuration than the trainer's");
  for (const ParamSpec& spec : ours.params().specs())
    ours.params().write_values(spec, model.params().host_values(spec).span());
  if (ours.adapters() != nullptr) impl_->state.base = model.hash();
}

bool Trainer::resume(const std::function<void(const std::string&)>& warn) {
  Impl& t = *impl_;
  std::optional<TrainerState> found;
  t.on_first_rank([&] {
    clean_checkpoints(t.checkpoints);
    found = newest_good_checkpoint(t.checkpoints, warn);
  });
  int64_t newest = found ? found->step : -1;
  broadcast_value(t.ranks, newest);
  if (newest < 0) return false;
  const std::string path = checkpoint_path(t.checkpoints, newest);
  if (!found) found = verify_checkpoint(path);
  t.check_same_run(path, *found);
  t.take_moments(path, warn);
  t.load(path, *found);
  return true;
}

bool Trainer::run(const std::function<void(const LogRecord&)>& on_log, const std::atomic<bool>* stop,
                  const std::function<void(const StepProgress&)>& on_step) {
  Impl& t = *impl_;
  t.prepare();
  bool model_written = false;
  bool record_only = t.record_missing();
  while (record_only || (t.state.step < t.config.steps && !t.out_of_patience())) {
    if (any_rank(t.ranks, stop != nullptr && stop->load())) {
      t.checkpoint();
      if (t.written != t.state.step)
        fail_numeric("stopped at step {}; the model is not finite, so no checkpoint of it was written", t.state.step);
      return false;
    }
    if (!record_only) t.do_step();
    if (!record_only && on_step && t.leads()) on_step(t.progress());
    record_only = false;
    // First what must not be lost, then what takes long.
    if (t.is_last() || t.every(t.config.checkpoint_every)) t.checkpoint();
    if (t.is_last()) {
      t.write_model();
      model_written = true;
    }
    if (t.record_due() && !t.log(on_log)) return t.is_last();
  }
  if (t.out_of_patience()) t.checkpoint();
  if (!model_written) t.write_model();
  return true;
}

void Trainer::checkpoint() { impl_->checkpoint(); }

LanguageModel<float>& Trainer::model() { return impl_->model; }
int64_t Trainer::step() const { return impl_->state.step; }
int64_t Trainer::skipped() const { return impl_->state.skipped; }
MomentFormat Trainer::moments() const { return impl_->optimizer().format(); }
std::optional<RecomputeLayers> Trainer::planned_recompute() const {
  if (!impl_->plan) return std::nullopt;
  return impl_->plan->recompute;
}
BestRecord Trainer::best() const { return {impl_->state.best_step, impl_->state.best_loss}; }
const std::string& Trainer::transport() const { return impl_->transport.name; }
bool Trainer::out_of_patience() const { return impl_->out_of_patience(); }

}  // namespace fw
