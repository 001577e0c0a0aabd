// What a run file says: model, training, data. The declarations here are the table that `train` and `bench` share.
#pragma once

#include "cli/options.h"
#include "model/config.h"
#include "train/trainer.h"

namespace fw::cli {

struct DataConfig {
  StringList text;    // text files, or one token file
  std::string valid;  // held-out text or token file; "": the last part of `text`
  double valid_fraction = 0.1;
  std::string separator;
  std::string tokenizer = "bytes";
};
void validate(const DataConfig& config);

void declare_model(Options& options, ModelConfig& model, bool in_run_file = true);
void declare_train(Options& options, TrainConfig& train);
void declare_data(Options& options, DataConfig& data);

// "gated_deltanet2, 4 layers, width 192, 3 heads of 64"
std::string describe(const ModelConfig& model);

// The folder that holds config.json: `path` itself, or, for a run folder, its finished model or newest checkpoint.
// Error(kUsage) when there is none.
std::string find_model_folder(const std::string& path);

}  // namespace fw::cli
