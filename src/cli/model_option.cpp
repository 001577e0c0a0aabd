#include "cli/model_option.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "cli/side_files.h"
#include "model/adapters.h"
#include "model/other_tensors.h"

namespace fw::cli {

namespace {

bool has_tokenizer_json(const std::string& folder) { return file_exists(folder + "/tokenizer.json"); }

// The folder's own, where it says which.
std::unique_ptr<Tokenizer> folder_tokenizer(const std::string& folder, int64_t vocab_size) {
  if (is_hf_folder(folder)) {
    if (is_exported_byte_tokenizer(folder + "/tokenizer.json")) return byte_tokenizer();
    for (const char* name : {"/tokenizer.json", "/tokenizer.model"}) {
      if (file_exists(folder + name)) return tokenizer_of_file(folder + name);
    }
    return id_tokenizer(static_cast<int32_t>(vocab_size));
  }
  std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(folder);
  if (!has_tokenizer_json(folder) && vocab_size != tokenizer->vocab_size()) {
    fail_usage(
        "'{}' has no tokenizer.json, and a model with a vocabulary of {} does not speak bytes: give the file back, or "
        "say with --tokenizer which it has",
        folder, vocab_size);
  }
  return tokenizer;
}

// Adapters that were trained here say which tokenizer they are of, and their folder has it.
std::unique_ptr<Tokenizer> own_tokenizer(OpenModel& open, int64_t vocab_size) {
  if (open.adapter.empty()) return folder_tokenizer(open.folder, vocab_size);
  const uint64_t trained_with = adapter_tokenizer(open.adapter);
  std::unique_ptr<Tokenizer> tokenizer = folder_tokenizer(open.folder, vocab_size);
  if (trained_with == 0 || trained_with == tokenizer->checksum()) return tokenizer;
  tokenizer = load_tokenizer(open.adapter);
  if (tokenizer->checksum() != trained_with)
    fail_usage("'{}': its tokenizer.json is not the one that the adapters were trained with (checksum {:016x})",
               open.adapter, trained_with);
  open.model.set_tokenizer(trained_with);
  return tokenizer;
}

// A model that says which tokenizer its ids are of (those written here do), or a folder that does, is not read with
// another. Ids as numbers are those of any tokenizer.
void check_tokenizer_of(const OpenModel& open, bool given) {
  if (open.tokenizer->type() == "ids") return;
  uint64_t expected = open.model.tokenizer();
  if (expected == 0 && given && !is_hf_folder(open.folder) && has_tokenizer_json(open.folder)) {
    const std::unique_ptr<Tokenizer> own = load_tokenizer(open.folder);
    if (own->type() != "ids") expected = own->checksum();
  }
  if (expected == 0 || expected == open.tokenizer->checksum()) return;
  fail_usage(
      "'{}': the model was trained with another tokenizer (checksum {:016x}) than {} (checksum {:016x}), {}: its ids "
      "mean other text",
      open.folder, expected, open.tokenizer->type(), open.tokenizer->checksum(),
      given ? "which --tokenizer asks for; leave the option out"
            : "which the folder's tokenizer.json says or leaves out; give back the file that it came with");
}

// eos_token_id, which published models have in config.json and generation_config.json, an id or several; of an imported
// one in the configuration it came with.
std::vector<int32_t> end_tokens_of(const std::string& folder, const ModelConfig& model, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  if (tokenizer.end_of_text() >= 0) ids.push_back(tokenizer.end_of_text());
  const auto add = [&](const nlohmann::json& id) {
    if (!id.is_number_integer() || id < 0 || id >= tokenizer.vocab_size()) return;  // an id that no text has ends none
    const int32_t value = id.get<int32_t>();
    if (std::find(ids.begin(), ids.end(), value) == ids.end()) ids.push_back(value);
  };
  const nlohmann::json hf =
      model.hf.empty() ? nlohmann::json::object() : parse_json(model.hf, "the configuration that the model came with");
  for (const char* key : {"/config/eos_token_id", "/config/text_config/eos_token_id", "/end_tokens"}) {
    const nlohmann::json::json_pointer pointer(key);
    const nlohmann::json end = hf.is_object() && hf.contains(pointer) ? hf.at(pointer) : nlohmann::json();
    if (!end.is_array()) add(end);
    if (end.is_array()) std::for_each(end.begin(), end.end(), add);
  }
  for (const int64_t id : generation_ends(folder)) add(id);
  return ids;
}

// What it would print and save are not numbers.
void check_finite(const LanguageModel<float>& model, const std::string& folder) {
  if (model.parameters_finite()) return;
  for (const ParamSpec& spec : model.params().specs()) {
    const HostView<float> values = model.params().host_values(spec);
    if (!std::all_of(values.span().begin(), values.span().end(), [](float x) { return std::isfinite(x); })) {
      fail_numeric("'{}': the parameter {} is not finite: the model is damaged, or it diverged in training", folder,
                   spec.name);
    }
  }
}

}  // namespace

const char* decode_bits_help() {
  return "compute every token with the bits of decoding it: log-probabilities of train, eval and generate with this "
         "option are equal; slower; on a GPU the recurrence alone";
}

const char* decode_ring_help() {
  return "tokens of a ring that decoding folds into the states of recurrences when it is full, 1 to 64, instead of "
         "writing them with every token; rounds otherwise, but with 1; 0, the default: none";
}

const char* drafts_help() {
  return "tokens drafted from where the text's last tokens came before, 0 to 16, which one pass of the model checks; "
         "the "
         "text stays, but for the rounding of larger products";
}

const char* device_help() { return "cpu, cuda, or cuda:N for one of several"; }

const char* tokenizer_help() {
  return "bytes, ids (numbers between spaces) or the path of a SentencePiece model or of a tokenizer.json of Hugging "
         "Face's; without: the folder's, which of a "
         "folder of flash-linear-attention is tokenizer.json, else tokenizer.model, else ids";
}

void declare_adapter(Options& options, std::string& adapter) {
  options.add("adapter", "ADAPTER", &adapter,
              "folder of LoRA adapters of MODEL in PEFT's format, or a run that trained some; a MODEL that is such a "
              "folder names "
              "its base model itself");
}

OpenModel open_model(const std::string& path, const std::string& precision, const std::string& tokenizer,
                     const std::string& device, const std::string& adapter, LoadFor use) {
  if (precision != "f32" && precision != "bf16") fail_usage("--precision: expected f32 or bf16, got '{}'", precision);
  std::string folder = find_model_folder(path), adapters = adapter.empty() ? "" : find_model_folder(adapter);
  if (!adapters.empty() && !is_adapter_folder(adapters))
    fail_usage("--adapter: expected a folder with adapter_config.json, got '{}', a model", adapter);
  if (is_adapter_folder(folder)) {
    if (!adapters.empty())
      fail_usage("--adapter: expected none with '{}', which holds adapters itself, got '{}'", folder, adapter);
    adapters = std::exchange(folder, base_of_adapters(folder));
    if (is_adapter_folder(folder)) fail_usage("'{}': its base model '{}' holds adapters itself", adapters, folder);
  }
  StringList warnings;
  read_model_config(folder, &warnings);
  for (const std::string& warning : warnings) say_aside("warning: {}\n", warning);
  if (const OtherTensors others(folder); !others.empty())
    say_aside("'{}': left aside, since they are no part of the text model: {}\n", folder, others.description());
  OpenModel open{folder, adapters, load_model<float>(folder, device_named(device), use), nullptr, {}};
  check_finite(open.model, folder);
  if (!adapters.empty()) load_adapters(adapters, open.model);
  const int64_t vocab_size = open.model.config().vocab_size;
  open.tokenizer = tokenizer == "ids"  ? id_tokenizer(static_cast<int32_t>(vocab_size))
                   : tokenizer.empty() ? own_tokenizer(open, vocab_size)
                                       : make_tokenizer(tokenizer);
  check_tokenizer_of(open, !tokenizer.empty());
  if (tokenizer.empty() && open.tokenizer->type() == "ids") {
    open.tokenizer = id_tokenizer(
        open.tokenizer->vocab_size(),
        fmt::format(": '{}' has no tokenizer; give --tokenizer bytes, or the path of its SentencePiece model or "
                    "tokenizer.json",
                    folder));
  }
  open.model.set_precision(precision == "bf16" ? Precision::kBf16 : Precision::kNative);
  if (open.tokenizer->vocab_size() > open.model.config().vocab_size) {
    fail_usage("'{}': the tokenizer has a vocabulary of {}, the model of {}: they do not belong together", folder,
               open.tokenizer->vocab_size(), open.model.config().vocab_size);
  }
  open.end_tokens = end_tokens_of(folder, open.model.config(), *open.tokenizer);
  return open;
}

}  // namespace fw::cli
