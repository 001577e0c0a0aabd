#include "cli/model_option.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
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

// eos_token_id, which published models have in config.json: an id, or several.
std::vector<int32_t> end_tokens_of(const std::string& folder, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  if (tokenizer.end_of_text() >= 0) ids.push_back(tokenizer.end_of_text());
  constexpr size_t kLargest = size_t{1} << 20;
  const std::string path = folder + "/config.json";
  const nlohmann::json config = parse_json(read_file(path, kLargest), "'" + path + "'");
  const auto add = [&](const nlohmann::json& id) {
    if (!id.is_number_integer() || id < 0 || id >= tokenizer.vocab_size()) return;  // an id that no text has ends none
    const int32_t value = id.get<int32_t>();
    if (std::find(ids.begin(), ids.end(), value) == ids.end()) ids.push_back(value);
  };
  if (const auto found = config.find("eos_token_id"); found != config.end()) {
    if (!found->is_array()) add(*found);
    if (found->is_array()) std::for_each(found->begin(), found->end(), add);
  }
  return ids;
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
  OpenModel open{folder, load_model<float>(folder), nullptr, {}};
  open.tokenizer = tokenizer_of(folder, tokenizer, open.model.config().vocab_size);
  open.model.set_precision(precision == "bf16" ? Precision::kBf16 : Precision::kNative);
  if (open.tokenizer->vocab_size() > open.model.config().vocab_size) {
    fail_usage("'{}': the tokenizer has a vocabulary of {}, the model of {}: they do not belong together", folder, open.tokenizer->vocab_size(),
               open.model.config().vocab_size);
  }
  open.end_tokens = end_tokens_of(folder, *open.tokenizer);
  return open;
}

}  // namespace fw::cli
