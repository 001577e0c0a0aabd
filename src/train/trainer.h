// Trainer: the loop. AdamW (decoupled, parameters of ParamSpec::weight_decay only), a schedule of the learning rate,
// clipping by global norm, gradient accumulation, skipped steps, checkpoints, metrics. No printing here: `on_log` gets
// a record per interval and the program (src/cli) shows it.
//
// The run folder:
// - metrics.jsonl and metrics.csv (one line a record),
// - checkpoints/step-N/,
// - best/ (best_model.h) where held-out text is evaluated on the way,
// - at the end model/ (config.json, model.safetensors, tokenizer.json).
//
// What a run computes depends on its configuration and data only, not on the number of threads and not on how often it
// was interrupted.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/communicator.h"
#include "base/keys.h"
#include "model/language_model.h"
#include "tokenizer/tokenizer.h"
#include "train/best_model.h"
#include "train/evaluate.h"
#include "train/optimizer.h"
#include "train/token_file.h"

namespace fw {

struct TrainConfig {  // the keys are a list, config.def
#define FW_KEY FW_KEY_MEMBER
#include "train/config.def"
#undef FW_KEY
};
KeyTables key_tables(TrainConfig& config);
// Throws Error(kUsage) naming the key, what was expected and what came.
void validate(const TrainConfig& config);

// The adapters that a run with LoRA trains; `base`: the model folder of config.from, "" where only sizes matter.
AdapterConfig adapters_of(const TrainConfig& config, const std::string& base = "");

// Error(kUsage) for a token file that a model cannot be trained or evaluated on: it is of another tokenizer, its
// vocabulary is larger, or it has no token to predict.
void check_data_file(const TokenFile& file, const Tokenizer& tokenizer, const ModelConfig& model);

// One line of metrics. A number that is not finite (every step of the interval skipped) is null in metrics.jsonl and
// nan in metrics.csv.
struct LogRecord {
  int64_t step = 0;    // steps done
  int64_t tokens = 0;  // tokens seen
  // nats per token, mean over the interval's steps that were not skipped
  double loss = 0;
  double norm = 0, lr = 0;  // of the last step
  // mean over the interval, evaluation and checkpoints not counted; NaN: of a step before a resume
  double ms = 0, tokens_per_second = 0;
  double epoch = 0;     // passes over the data
  int64_t skipped = 0;  // steps skipped so far
  // Of a model with experts, over the interval, on this rank; < 0: no experts, or not known. The rows of the busiest
  // expert over the mean, in the worst layer, and the experts that had no row.
  double expert_peak = -1;
  int64_t experts_idle = 0;
  // < 0: not evaluated here; bits NaN: the bytes of the held-out text are not known
  double eval_bits_per_byte = -1, eval_loss = -1;
};

// What a progress bar shows between two records.
struct StepProgress {
  int64_t step = 0;  // steps done
  double loss = 0;   // mean since the last record; NaN: all its steps were skipped
  double ms = 0, tokens_per_second = 0;
};

class Trainer {
 public:
  // Initialises the model from config.seed. With LoRA it is the adapters of the model in the folder `base`;
  // start_from() gives the parameters of that, also before resume().
  //
  // valid may be null: then nothing is evaluated; otherwise it is evaluated in windows of config.length tokens.
  // tokenizer must be the one that made both files. Touches no file. Throws Error(kUsage).
  //
  // Of several ranks (data_parallel.h) all construct the same trainer and make the same calls, each on the device that
  // is its own. Rank 0 alone writes files, evaluates and calls on_log and on_step, and its errors are what ends a run:
  // those of the others say only that. They read checkpoints from the same folder.
  Trainer(const TrainConfig& config, const ModelConfig& model, std::shared_ptr<const Tokenizer> tokenizer,
          TokenMix train, std::shared_ptr<const TokenFile> valid, Communicator& ranks = one_rank(),
          const std::string& base = "");
  ~Trainer();

  // Begins with the parameters of a model of the same configuration, not with initial ones.
  void start_from(const LanguageModel<float>& model);

  // Newest good checkpoint under out/checkpoints; a damaged newest one is reported by `warn` and the one before it
  // used. Returns false if there is none at all. Moments keep the format that the checkpoint has them in; where the
  // configuration says another, or memory allows no other, they are converted and `warn` says so. Throws Error(kUsage)
  // when there are some and all are damaged, and when the checkpoint is of another model, seed, sequence length or
  // training file.
  bool resume(const std::function<void(const std::string&)>& warn);

  // Until config.steps, or config.patience evaluations in a row were not better, or *stop becomes true (then a
  // checkpoint is written). Returns true when all steps are done, and then out/model is written; it, like every
  // checkpoint, is written before the step's record and evaluation are made. An evaluation also ends when base/stop.h
  // says so: its record is then made by the run that is resumed. Throws Error(kNumeric) after 10 steps in a row whose
  // loss or norm is not finite, and when the model is not finite at the end (out/model is not written) or its held-out
  // loss. Error(kIo) when a file cannot be written, and Error(kUsage) when `out` holds checkpoints of an earlier run
  // and resume() was not called. What `on_log` throws comes out after a checkpoint. `on_step` gets every step before
  // its record is made; what it throws is not caught. All three arguments may be null.
  bool run(const std::function<void(const LogRecord&)>& on_log, const std::atomic<bool>* stop,
           const std::function<void(const StepProgress&)>& on_step = {});

  // out/checkpoints/step-N/: model folder, optimizer.safetensors, trainer.json. Written aside, synced, renamed; then
  // the oldest beyond config.keep go (a resumed run has them go as it begins, too). Throws Error(kIo); the checkpoints
  // that were there are then untouched.
  void checkpoint();

  LanguageModel<float>& model();  // of several ranks its parameters are whole after a checkpoint
  int64_t step() const;           // steps done, skipped ones included
  int64_t skipped() const;        // steps skipped because loss or norm was not finite
  MomentFormat moments() const;
  std::optional<RecomputeLayers> planned_recompute() const;  // of a run whose memory was planned (memory_plan.h)
  // of the held-out evaluations before the end; step -1: there were none
  BestRecord best() const;
  bool out_of_patience() const;
  // of tensors between the devices of several ranks (ops/device_ranks.h); "" where there is no need of one
  const std::string& transport() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fw
