// best/ of a run folder: the model whose held-out loss was the lowest so far, a model folder (config.json,
// model.safetensors, tokenizer.json) with best.json that says of which step it is. It is written aside, synced and
// renamed into its place, so that it is the old one or the new one; the moment between two renames is mended by
// recover_best().
#pragma once

#include <cstdint>
#include <string>

#include "model/language_model.h"
#include "tokenizer/tokenizer.h"

namespace fw {

struct BestRecord {
  int64_t step = -1;  // -1: there is none
  double loss = 0;    // nats per held-out token
};

// run/best
std::string best_path(const std::string& run);

// Throws Error(kIo), and then the one that was there is untouched.
void write_best(const std::string& run, const BestRecord& record, const LanguageModel<float>& model,
                const Tokenizer& tokenizer);

// Of run/best; step -1 when there is none or its best.json cannot be read.
BestRecord read_best(const std::string& run);

// Removes what killed processes left, and puts back what one had just moved out of the way.
void recover_best(const std::string& run);

}  // namespace fw
