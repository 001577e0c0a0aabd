// Runs a text through a model with the analyzer watching.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "analyze/analyzer.h"
#include "model/language_model.h"
#include "train/token_file.h"

namespace fw {

struct AnalyzeOptions {
  std::vector<int64_t> layers;  // empty: all
  int64_t tokens = 16384;       // at most so many; 0: the whole file
  int64_t context = 1024;       // tokens of a window, which starts from nothing; 0: whole documents
  int64_t every = 64;           // tokens between two samples of the state
};

struct Analysis {
  std::string rule;  // as the model's configuration has it
  int64_t tokens = 0, windows = 0, context = 0, every = 0;
  double loss = 0;  // nats per scored token of what was analysed; NaN when none was
  std::vector<LayerAnalysis> layers;
};

// Error(kUsage) for layers that the model does not have or that have no recurrence, negative numbers, and a file of
// another vocabulary.
Analysis analyze_text(LanguageModel<float>& model, const TokenFile& file, const AnalyzeOptions& options);

}  // namespace fw
