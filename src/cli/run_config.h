// What a run file says besides model and training: the data; and the names of models on the command line.
#pragma once

#include <string>

#include "base/keys.h"
#include "model/config.h"
#include "train/trainer.h"

namespace fw::cli {

struct DataConfig {  // the keys are a list, data.def
#define FW_KEY FW_KEY_MEMBER
#include "cli/data.def"
#undef FW_KEY
};
KeyTables key_tables(DataConfig& data);
void validate(const DataConfig& config);
// The files that make a run are found again from any folder.
void make_paths_absolute(DataConfig& data, TrainConfig& train);

// "gated_deltanet2, 4 layers, width 192, 3 heads of 64"
std::string describe(const ModelConfig& model);

// The folder that holds config.json, or adapter_config.json (model/adapters.h). It is `path` itself, or of a run folder
// its finished model or newest checkpoint. Error(kUsage) when there is none.
std::string find_model_folder(const std::string& path);
// The model folder that the adapters in `folder` belong to. Error(kUsage) when it is not said, or not there.
std::string base_of_adapters(const std::string& folder);

}  // namespace fw::cli
