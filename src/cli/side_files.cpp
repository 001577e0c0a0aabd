#include "cli/side_files.h"

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/error.h"
#include "base/file.h"
#include "tokenizer/byte_level.h"

namespace fw::cli {
namespace {

constexpr const char* kTokenizerJson = "/tokenizer.json";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr const char* kGenerationConfig = "generation_config.json";
constexpr std::array<const char*, 8> kOfTokenizer = {
    kTokenizerConfig, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt",      "chat_template.jinja",     "chat_template.json"};
constexpr size_t kMostBytes = size_t{256} << 20;

void carry_file(const std::string& from, const std::string& to, const std::string& name) {
  const std::string source = from + "/" + name, target = to + "/" + name;
  if (!file_exists(source) || same_file(source, target)) return;
  if (file_exists(target) && name != kTokenizerConfig) return;
  write_file_atomic(target, read_file(source, kMostBytes));
}

// Each byte is a token, and its id is its value.
std::string byte_definition() {
  nlohmann::json vocabulary;
  for (int byte = 0; byte < 256; ++byte) vocabulary[to_byte_level(std::string(1, static_cast<char>(byte)))] = byte;
  const nlohmann::json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const nlohmann::json model = {{"type", "BPE"},
                                {"dropout", nullptr},
                                {"unk_token", nullptr},
                                {"continuing_subword_prefix", nullptr},
                                {"end_of_word_suffix", nullptr},
                                {"fuse_unk", false},
                                {"byte_fallback", false},
                                {"ignore_merges", false},
                                {"vocab", vocabulary},
                                {"merges", nlohmann::json::array()}};
  const nlohmann::json definition = {{"version", "1.0"},
                                     {"truncation", nullptr},
                                     {"padding", nullptr},
                                     {"added_tokens", nlohmann::json::array()},
                                     {"normalizer", nullptr},
                                     {"pre_tokenizer", byte_level},
                                     {"post_processor", nullptr},
                                     {"decoder", byte_level},
                                     {"model", model}};
  return definition.dump() + "\n";
}

}  // namespace

void copy_side_files(const std::string& from, const std::string& to, bool of_tokenizer) {
  carry_file(from, to, kGenerationConfig);
  if (!of_tokenizer) return;
  for (const char* name : kOfTokenizer) carry_file(from, to, name);
}

void save_tokenizer_for_others(const std::string& folder, const Tokenizer& tokenizer) {
  const std::string type = tokenizer.type();
  if (type == "ids") return;
  if (type == "bytes") {
    write_file_atomic(folder + kTokenizerJson, byte_definition());
    write_file_atomic(folder + "/" + kTokenizerConfig,
                      "{\"tokenizer_class\": \"PreTrainedTokenizerFast\", \"clean_up_tokenization_spaces\": false}\n");
    return;
  }
  tokenizer.save(folder);
  if (type != "sentencepiece") return;
  std::error_code error;
  // names tokenizer.model for this program, and is no tokenizer.json of the others
  std::filesystem::remove(folder + kTokenizerJson, error);
  if (error) fail_io("cannot remove '{}': {}", folder + kTokenizerJson, error.message());
}

bool is_exported_byte_tokenizer(const std::string& path) {
  const std::string definition = byte_definition();
  return file_start(path, definition.size() + 1) == definition;
}

}  // namespace fw::cli
