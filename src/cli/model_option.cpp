#include "cli/model_option.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/file.h"
#include "cli/run_config.h"

namespace fw::cli {

namespace {

std::unique_ptr<Tokenizer> tokenizer_of(const std::string& folder, const std::string& spec, int64_t vocab_size) {
  const auto ids = [&] { return id_tokenizer(static_cast<int32_t>(vocab_size)); };
  if (spec == "ids") return ids();
  if (!spec.empty()) return make_tokenizer(spec);
  if (!is_peer_folder(folder)) return load_tokenizer(folder);
  const std::string model = folder + "/tokenizer.model";
  return file_exists(model) ? sentencepiece_tokenizer(model) : ids();
}

// What it would print and save are not numbers.
void check_finite(const LanguageModel<float>& model, const std::string& folder) {
  for (const ParamSpec& spec : model.params().specs()) {
    const auto values = model.params().values().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size()));
    if (!std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); })) {
      fail_numeric("'{}': the parameter {} is not finite: the model is damaged, or it diverged in training", folder, spec.name);
    }
  }
}

}  // namespace

const char* tokenizer_help() {
  return "bytes, ids (numbers between spaces) or the path of a SentencePiece model; without: the folder's, which of a folder of flash-linear-attention is "
         "tokenizer.model, else ids";
}

void refuse_model_folder(const std::string& folder) {
  if (file_exists(folder + "/config.json")) fail_usage("TARGET: '{}' has a model already: choose another folder or remove it", folder);
}

OpenModel open_model(const std::string& path, const std::string& precision, const std::string& tokenizer) {
  if (precision != "f32" && precision != "bf16") fail_usage("--precision: expected f32 or bf16, got '{}'", precision);
  const std::string folder = find_model_folder(path);
  OpenModel open{folder, load_model<float>(folder), nullptr};
  check_finite(open.model, folder);
  open.tokenizer = tokenizer_of(folder, tokenizer, open.model.config().vocab_size);
  open.model.set_precision(precision == "bf16" ? Precision::kBf16 : Precision::kNative);
  if (open.tokenizer->vocab_size() > open.model.config().vocab_size) {
    fail_usage("'{}': the tokenizer has a vocabulary of {}, the model of {}: they do not belong together", folder, open.tokenizer->vocab_size(),
               open.model.config().vocab_size);
  }
  return open;
}

}  // namespace fw::cli
