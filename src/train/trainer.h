// Trainer: the loop. AdamW (decoupled, parameters of ParamSpec::weight_decay only), linear warm-up and cosine schedule,
// clipping by global norm, gradient accumulation, skipped steps, checkpoints, metrics. No printing here: `on_log` gets a
// record per interval and the program (src/cli) shows it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "model/language_model.h"
#include "train/token_file.h"

namespace fw {

struct TrainConfig {
  std::string out = "run";            // run folder: config.toml, metrics.jsonl, metrics.csv, checkpoints/, model/
  int64_t steps = 1000;
  int64_t batch = 16;                 // sequences a micro-batch
  int64_t length = 256;               // tokens a sequence
  int64_t accumulate = 1;             // micro-batches a step
  double lr = 2e-3, min_lr = 2e-4;
  int64_t warmup = 50;
  double beta1 = 0.9, beta2 = 0.95, adam_eps = 1e-8, weight_decay = 0.1;
  double clip = 1.0;                  // global norm; 0: no clipping
  uint64_t seed = 1;
  std::string precision = "f32";      // f32 | bf16 (operands of matrix products)
  int64_t log_every = 10;
  int64_t eval_every = 0;             // 0: only at the end
  int64_t checkpoint_every = 200;     // steps; 0: only at the end and on interruption
  int64_t keep = 2;                   // checkpoints kept
};
void validate(const TrainConfig& config);

struct LogRecord {
  int64_t step = 0;                   // steps done
  int64_t tokens = 0;                 // tokens seen
  double loss = 0;                    // nats per token, mean over the interval
  double norm = 0, lr = 0, ms = 0, tokens_per_second = 0, epoch = 0;
  int64_t skipped = 0;                // steps skipped so far
  double eval_bits_per_byte = -1, eval_loss = -1;  // < 0: not evaluated here
};

class Trainer {
 public:
  // valid may be null. valid_bytes: bytes of the text behind `valid`.
  Trainer(const TrainConfig& config, const ModelConfig& model, std::shared_ptr<const TokenFile> train, std::shared_ptr<const TokenFile> valid, int64_t valid_bytes);
  ~Trainer();
  // Newest good checkpoint under out/checkpoints; a damaged newest one is reported by `warn` and the one before it used.
  // Returns false if there is none.
  bool resume(const std::function<void(const std::string&)>& warn);
  // Until config.steps, or *stop becomes true (then a checkpoint is written). Throws Error(kNumeric) after 10 steps in a
  // row whose loss or norm is not finite. Returns true when all steps are done.
  bool run(const std::function<void(const LogRecord&)>& on_log, const std::atomic<bool>* stop);
  void checkpoint();                  // out/checkpoints/step-N/: model folder, optimizer.safetensors, trainer.json
  LanguageModel<float>& model();
  int64_t step() const;
  int64_t skipped() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct EvalResult {
  LossSum sum;
  double loss = 0, perplexity = 0, bits_per_byte = 0, bits_per_token = 0;
};
// The whole file in windows of `context` tokens (documents never share one; context 0: whole documents). carry: the state goes on from window to window
// inside a document, so every token but a document's first is scored; otherwise every window starts from nothing and its
// first token is not scored. `bytes` of text behind the file for bits per byte (only scored tokens' bytes count).
EvalResult evaluate_file(LanguageModel<float>& model, const TokenFile& file, const Tokenizer& tokenizer, int64_t context, bool carry);

}  // namespace fw
