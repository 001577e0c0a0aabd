// The model that a run of `train` trains: one of its own configuration, or with --from one that goes on from another
// model's parameters. There that model decides architecture and tokenizer, and what was said otherwise is refused. With
// --layout fla the configuration is one that 'fastweight export' can write.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cli/options.h"
#include "cli/run_config.h"
#include "model/language_model.h"
#include "tokenizer/tokenizer.h"
#include "train/trainer.h"

namespace fw::cli {

// The keys of a size by name (model/sizes.h) where neither the command line nor the run file said another.
void apply_size(const std::string& size, const Options& options, ModelConfig& config);
// The same with the keys of another model.
void apply_model(const ModelConfig& model, const Options& options, ModelConfig& config);

struct StartModel {
  std::shared_ptr<const Tokenizer> tokenizer;
  ModelConfig config;
  std::optional<LanguageModel<float>> model;  // the parameters to begin with; none: initial ones, or a checkpoint's
  std::string folder;                         // of that model, of --from
  // for the user: where it comes from, what the layout changed; lines, or ""
  std::string note;
};

// `options`: what was said of the keys of `wanted`, `train` and `data`. resume: the run in train.out goes on, so that
// with --from its checkpoints say what the model was, which need not be there any more. Throws Error(kUsage), for a
// contradiction with both values.
StartModel start_model(const ModelConfig& wanted, const TrainConfig& train, const DataConfig& data,
                       const Options& options, bool resume);

}  // namespace fw::cli
