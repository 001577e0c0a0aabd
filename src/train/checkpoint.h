// Checkpoints of a training run: checkpoints/step-N/ is a model folder (config.json, model.safetensors, tokenizer.json;
// of LoRA adapter_config.json and adapter_model.safetensors in place of model.safetensors) plus
//   optimizer.safetensors   moments m.<parameter> and v.<parameter>, float32 or bf16 as the optimiser has them
//   trainer.json            TrainerState and a checksum of every other file; its own checksum stands in it
// A folder is written aside (.tmp-...), synced and renamed, so that step-N is whole or not there; checksums find what
// changes later. Nothing but these functions writes into checkpoints/.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/language_model.h"
#include "tokenizer/tokenizer.h"
#include "train/optimizer.h"

namespace fw {

// Everything besides parameters and moments that the rest of a run depends on.
struct TrainerState {
  int64_t step = 0;      // steps done, skipped ones included
  int64_t updates = 0;   // of the optimiser
  std::string mix;       // TokenMix::description()
  int64_t position = 0;  // windows given out by the BatchSource
  int64_t tokens = 0;
  int64_t skipped = 0, skipped_in_row = 0;
  double interval_nll = 0;  // since the last record
  int64_t interval_count = 0;
  double norm = 0;     // of the last step's gradient; not finite when it was skipped
  std::string random;  // generator

  // Of the held-out evaluations: the lowest loss and its step (-1: none yet), how many have come since, and the step of
  // the last one that is counted here. A checkpoint is written before its step is evaluated, so the record of that step
  // may have one more.
  int64_t best_step = -1;
  double best_loss = 0;
  int64_t not_better = 0;
  int64_t judged_step = 0;

  // What the run is of; a checkpoint of another run cannot be continued.
  std::string config_hash;  // of config.json
  uint64_t seed = 0;
  int64_t length = 0;
  int64_t train_tokens = 0, train_documents = 0;
  std::string adapters, base;  // of LoRA: what is adapted, and LanguageModel::hash() of the frozen model
};

std::string config_hash(const ModelConfig& config);

std::string checkpoint_path(const std::string& folder, int64_t step);

// Steps of the checkpoints in `folder`, ascending; empty if there is no such folder.
std::vector<int64_t> list_checkpoints(const std::string& folder);

// Removes what killed processes left in `folder`.
void clean_checkpoints(const std::string& folder);

// Writes folder/step-N, of an optimiser of all parameters. One that is there already was found damaged and is removed
// first. Throws Error(kIo), and then nothing half-written is left and the checkpoints of other steps are as they were.
void write_checkpoint(const std::string& folder, const TrainerState& state, const LanguageModel<float>& model,
                      const AdamW& optimizer, const Tokenizer& tokenizer);

// Removes the oldest of the checkpoints up to step `newest` until `keep` are left. Throws Error(kIo).
void prune_checkpoints(const std::string& folder, int64_t newest, int64_t keep);

// Reads trainer.json at `path` and checks every checksum. Throws Error(kUsage) saying what is damaged.
TrainerState verify_checkpoint(const std::string& path);

// What the moments of a checkpoint are kept as. Throws Error(kUsage) when it cannot be read.
MomentFormat moments_of_checkpoint(const std::string& path);

// Parameters and moments (those of the optimiser's range) of a verified checkpoint of a model of the same
// configuration; takes no memory but for the largest of them. Moments become those of the optimiser's format: exact,
// but where float32 ones are rounded to the nearest bf16. Throws Error(kUsage), and then model and optimiser are as
// they were.
void load_checkpoint(const std::string& path, const TrainerState& state, LanguageModel<float>& model, AdamW& optimizer);

}  // namespace fw
