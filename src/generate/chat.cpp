#include "generate/chat.h"

#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace fw {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostTemplate = size_t{16} << 20;
constexpr std::string_view kStart = "<|im_start|>", kEnd = "<|im_end|>";

// The key of a file; of several templates that it lists by name the one called default. "" where it has none.
std::string template_of(const std::string& path) {
  if (!file_exists(path)) return "";
  const Json json = parse_json(read_file(path, kMostTemplate), "'" + path + "'");
  const auto found = json.is_object() ? json.find("chat_template") : json.end();
  if (!json.is_object() || found == json.end() || found->is_null()) return "";
  if (found->is_string()) return found->get<std::string>();
  for (const Json& one : *found) {
    if (one.is_object() && one.value("name", Json()) == "default" && one.value("template", Json()).is_string())
      return one.at("template").get<std::string>();
  }
  fail_usage("'{}': chat_template: expected a text, or a list with the template 'default', got neither", path);
}

std::string find_template(const std::string& folder) {
  const std::string jinja = folder + "/chat_template.jinja";
  if (file_exists(jinja)) return read_file(jinja, kMostTemplate);
  for (const char* name : {"/chat_template.json", "/tokenizer_config.json"}) {
    if (std::string text = template_of(folder + name); !text.empty()) return text;
  }
  fail_usage(
      "--chat: '{}' has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): say with "
      "--before and --after what stands around a message",
      folder);
}

int32_t token_of(const Tokenizer& tokenizer, std::string_view mark) {
  const std::vector<int32_t> ids = tokenizer.encode(mark);
  if (ids.size() != 1)
    fail_usage("--chat: expected a tokenizer with a token for {}, which the chat template writes, got {} tokens", mark,
               ids.size());
  return ids.front();
}

}  // namespace

ChatFormat chat_format(const std::string& folder, const Tokenizer& tokenizer) {
  const std::string text = find_template(folder);
  for (const std::string_view mark : {kStart, kEnd}) {
    if (text.find(mark) == std::string::npos) {
      fail_usage(
          "--chat: '{}': the chat template is not ChatML (it does not write {}), and no other is understood: say with "
          "--before and --after what stands around a message",
          folder, mark);
    }
    token_of(tokenizer, mark);
  }
  ChatFormat format;
  format.before_system = fmt::format("{}system\n", kStart);
  format.after_system = fmt::format("{}\n", kEnd);
  format.before_user = fmt::format("{}user\n", kStart);
  format.after_user = fmt::format("{}\n{}assistant\n", kEnd, kStart);
  format.end = kEnd;
  format.between = "\n";
  format.end_token = token_of(tokenizer, kEnd);
  return format;
}

}  // namespace fw
