// A model folder with its tokenizer, as eval and generate open it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/options.h"
#include "model/language_model.h"
#include "tokenizer/tokenizer.h"

namespace fw::cli {

struct OpenModel {
  std::string folder;
  std::string adapter;  // folder of its adapters, or ""
  LanguageModel<float> model;
  std::unique_ptr<Tokenizer> tokenizer;
  // ids that end a text: the tokenizer's, and eos_token_id of config.json and generation_config.json
  std::vector<int32_t> end_tokens;
};

// `path`: a model folder (flash-linear-attention's too), or a run folder (its finished model, else its newest
// checkpoint). Of a folder with adapters it is the model that they name, with them. `adapter`: "", or a folder or run
// with adapters for the model.
// precision: f32 or bf16 (on the CPU). device: cpu, cuda or cuda:N. tokenizer: bytes, ids, the path of a SentencePiece
// model or of a Hugging Face tokenizer.json, or "" for the folder's own. Of a Hugging Face folder that is its
// tokenizer.json, else its tokenizer.model, or ids where it has neither. Error(kUsage) when there is no model, it is
// damaged, or its tokenizer is larger than its vocabulary or not the one that it was trained with. use: kTraining where
// its parameters are changed or taken.
OpenModel open_model(const std::string& path, const std::string& precision, const std::string& tokenizer = "",
                     const std::string& device = "cpu", const std::string& adapter = "",
                     LoadFor use = LoadFor::kForward);

void declare_adapter(Options& options, std::string& adapter);  // --adapter
// For the help of an option --device.
const char* device_help();
const char* decode_bits_help();
const char* decode_ring_help();
const char* drafts_help();
// For the help of an option --tokenizer.
const char* tokenizer_help();

}  // namespace fw::cli
