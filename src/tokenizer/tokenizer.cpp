#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/nearest.h"

namespace fw {
namespace {

constexpr const char* kJsonName = "tokenizer.json";
constexpr const char* kModelName = "tokenizer.model";
constexpr size_t kMostJson = size_t{256} << 20;  // published ones have up to 40 MB

void check_id(int32_t id, int32_t vocab_size) {
  if (id < 0 || id >= vocab_size) fail_usage("token id {} is outside the tokenizer's vocabulary of {}", id, vocab_size);
}

std::string checksum_text(std::string_view content) {
  Checksum sum;
  sum.add(content);
  return fmt::format("{:016x}", sum.value());
}

class ByteTokenizer final : public Tokenizer {
 public:
  int32_t vocab_size() const override { return 256; }
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids(text.size());
    std::transform(text.begin(), text.end(), ids.begin(),
                   [](char c) { return static_cast<int32_t>(static_cast<unsigned char>(c)); });
    return ids;
  }
  size_t whole_prefix(std::string_view text) const override { return text.size(); }
  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) text += piece(id);
    return text;
  }
  std::string piece(int32_t id) const override {
    check_id(id, 256);
    return std::string(1, static_cast<char>(id));
  }
  std::string type() const override { return "bytes"; }
  uint64_t checksum() const override { return tokenizer_checksum(type(), ""); }
  void save(const std::string& folder) const override {
    write_file_atomic(folder + "/" + kJsonName, "{\"type\": \"bytes\"}\n");
  }
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

namespace {

// What Hugging Face writes has a model, ours a type.
bool is_huggingface(const nlohmann::json& json) {
  return json.is_object() && json.contains("model") && json["model"].is_object();
}

// eos_token of the tokenizer_config.json beside a tokenizer.json; "" where neither says one.
std::string end_token_beside(const std::string& json_path) {
  const std::string path = (std::filesystem::path(json_path).parent_path() / "tokenizer_config.json").string();
  if (!file_exists(path)) return "";
  const nlohmann::json json = parse_json(read_file(path, kMostJson), "'" + path + "'");
  const nlohmann::json none, &end = json.is_object() && json.contains("eos_token") ? json["eos_token"] : none;
  if (end.is_string()) return end;
  return end.is_object() && end.contains("content") && end["content"].is_string() ? end["content"].get<std::string>()
                                                                                  : "";
}

std::unique_ptr<Tokenizer> huggingface_of(std::string text, const nlohmann::json& json, const std::string& path) {
  return huggingface_tokenizer(std::move(text), json, path, end_token_beside(path));
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder) {
  if (!std::filesystem::is_directory(folder))
    fail_usage("cannot load a tokenizer from '{}': expected a model folder", folder);
  const std::string path = folder + "/" + kJsonName;
  if (!file_exists(path)) {
    if (file_exists(folder + "/" + kModelName)) {
      fail_usage("'{}' is missing, and '{}' beside it says that the model's tokenizer is not bytes: give {} back", path,
                 kModelName, kJsonName);
    }
    return byte_tokenizer();
  }
  const auto unknown = [&path](const std::string& found) {
    fail_usage(
        "'{}': expected {{\"type\": \"bytes\"}}, {{\"type\": \"sentencepiece\", \"model\": \"{}\"}} or a file of "
        "Hugging Face's tokenizers, got {}",
        path, kModelName, found);
  };
  nlohmann::json json;
  std::string text;
  try {
    text = read_file(path, kMostJson);
    json = parse_json(text, "'" + path + "'");
  } catch (const Error& error) {
    unknown(std::string("something else: ") + error.what());
  }
  if (is_huggingface(json)) return huggingface_of(std::move(text), json, path);
  if (!json.is_object() || !json.contains("type") || !json["type"].is_string()) unknown("something else");
  const std::string type = json["type"];
  if (type == "bytes") return byte_tokenizer();
  if (type == "ids") {
    const int64_t vocab =
        json.contains("vocab_size") && json["vocab_size"].is_number_integer() ? json["vocab_size"].get<int64_t>() : 0;
    if (vocab < 1 || vocab > std::numeric_limits<int32_t>::max())
      fail_usage("'{}': expected the key \"vocab_size\" with a number of ids", path);
    return id_tokenizer(static_cast<int32_t>(vocab));
  }
  if (type != "sentencepiece") {
    const std::array<std::string, 3> known = {"bytes", "ids", "sentencepiece"};
    const std::string near = nearest(type, known);
    fail_usage("'{}': unknown tokenizer type '{}'{}", path, type,
               near.empty() ? "; expected bytes, ids or sentencepiece" : fmt::format("; did you mean {}?", near));
  }
  if (!json.contains("model") || !json["model"].is_string())
    fail_usage("'{}': expected the key \"model\" with the name of the SentencePiece file", path);
  const std::string name = json["model"];
  if (name.empty() || name.find('/') != std::string::npos)
    fail_usage("'{}': \"model\": expected the name of a file in the same folder, got '{}'", path, name);
  const std::string model_path = folder + "/" + name;
  std::string model = read_file(model_path, size_t{1} << 30);
  if (json.contains("checksum") && json["checksum"] != checksum_text(model)) {
    fail_usage("'{}': its checksum is {}, {} expects {}: the file is damaged or was exchanged", model_path,
               checksum_text(model), kJsonName, json["checksum"].dump());
  }
  return sentencepiece_tokenizer(std::move(model), model_path, folder);
}

std::unique_ptr<Tokenizer> tokenizer_of_file(const std::string& path) {
  const std::string start = file_start(path, 64);
  const size_t solid = start.find_first_not_of(" \t\r\n");
  if (solid == std::string::npos || start[solid] != '{') return sentencepiece_tokenizer(path);
  std::string text = read_file(path, kMostJson);
  const nlohmann::json json = parse_json(text, "'" + path + "'");
  if (!is_huggingface(json))
    fail_usage("tokenizer '{}': expected a tokenizer.json of Hugging Face's tokenizers, with an object \"model\"",
               path);
  return huggingface_of(std::move(text), json, path);
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec) {
  if (spec == "bytes") return byte_tokenizer();
  if (!file_exists(spec))
    fail_usage(
        "tokenizer '{}': expected bytes or the path of a SentencePiece model or a tokenizer.json, there is no such "
        "file",
        spec);
  return tokenizer_of_file(spec);
}

}  // namespace fw
