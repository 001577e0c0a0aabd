// A model folder with its tokenizer, as eval and generate open it.
#pragma once

#include <memory>
#include <string>

#include "model/language_model.h"
#include "train/tokenizer.h"

namespace fw::cli {

struct OpenModel {
  std::string folder;
  LanguageModel<float> model;
  std::unique_ptr<Tokenizer> tokenizer;
};

// `path`: a model folder, or a run folder (its finished model, else its newest checkpoint). precision: f32 or bf16.
// Error(kUsage) when there is no model, it is damaged, or its tokenizer is larger than its vocabulary.
OpenModel open_model(const std::string& path, const std::string& precision);

}  // namespace fw::cli
