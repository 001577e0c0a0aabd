#include "tokenizer/sentencepiece_folder.h"

#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "tokenizer/json_part.h"

namespace fw {
namespace {

constexpr size_t kMostBytes = size_t{64} << 20;
constexpr int64_t kMostIds = 1 << 24;

// A token is a text, or an object that has it.
std::string token_text(const JsonPart& part) {
  return part.value().is_object() ? part.at("content").text() : part.text();
}

AddedToken token_of(const JsonPart& part, const std::string& id) {
  AddedToken token;
  const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), token.id);
  if (error != std::errc() || end != id.data() + id.size() || token.id < 0 || token.id > kMostIds)
    part.fail("expected an id as the key");
  token.content = token_text(part);
  if (token.content.empty()) part.refuse("a token that is not empty");
  if (!part.value().is_object()) return token;
  token.lstrip = part.flag_or("lstrip", false);
  token.rstrip = part.flag_or("rstrip", false);
  token.single_word = part.flag_or("single_word", false);
  token.special = part.flag_or("special", false);
  return token;
}

}  // namespace

SentencePieceFolder read_sentencepiece_folder(const std::string& folder) {
  SentencePieceFolder result;
  if (folder.empty()) return result;
  const std::filesystem::path base(folder);
  // Null where the file is not there.
  const auto read = [&](const char* name, std::string& path) {
    path = (base / name).string();
    if (!file_exists(path)) return nlohmann::json();
    std::string text = read_file(path, kMostBytes);
    nlohmann::json json = parse_json(text, "'" + path + "'");
    JsonPart(json, path).expect_object();
    result.files.emplace_back(name, std::move(text));
    return json;
  };
  std::string added_path, config_path, map_path;
  const nlohmann::json added = read("added_tokens.json", added_path),
                       config = read("tokenizer_config.json", config_path),
                       map = read("special_tokens_map.json", map_path);
  bool decoder = false;
  if (!config.is_null()) {
    const JsonPart part(config, config_path);
    if (part.has("legacy") && !part.flag_or("legacy", true)) {
      part.at("legacy").refuse(
          "true or nothing: without it the text behind an added token is cut otherwise; use the tokenizer.json of this "
          "model");
    }
    decoder = part.has("added_tokens_decoder");
    if (decoder) {
      const JsonPart list = part.at("added_tokens_decoder");
      list.expect_object();
      for (const auto& [id, value] : list.value().items()) result.tokens.push_back(token_of(list.at(id.c_str()), id));
      result.source = config_path;
    }
    if (part.has("eos_token")) result.end = token_text(part.at("eos_token"));
    result.end_source = config_path;
  }
  if (!map.is_null() && result.end.empty()) {
    const JsonPart part(map, map_path);
    if (part.has("eos_token")) result.end = token_text(part.at("eos_token"));
    result.end_source = map_path;
  }
  if (!added.is_null()) {
    const JsonPart part(added, added_path);
    std::unordered_map<std::string, int32_t> ids;  // of the configuration, which counts where there are both
    for (const AddedToken& token : result.tokens) ids.emplace(token.content, token.id);
    for (const auto& [content, value] : added.items()) {
      if (content.empty()) part.fail("expected tokens that are not empty");
      AddedToken token;
      token.content = content;
      token.id = static_cast<int32_t>(part.at(content.c_str()).integer(0, kMostIds));
      const auto known = ids.find(content);
      if (known == ids.end()) {
        result.tokens.push_back(std::move(token));
      } else if (known->second != token.id) {
        part.at(content.c_str())
            .refuse(fmt::format("{}, the id of this token in tokenizer_config.json", known->second));
      }
    }
    if (!decoder) result.source = added_path;
  }
  return result;
}

}  // namespace fw
