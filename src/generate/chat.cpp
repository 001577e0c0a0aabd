#include "generate/chat.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "generate/jinja.h"
#include "tokenizer/utf8.h"

namespace fw {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostFile = size_t{16} << 20, kMostTemplate = size_t{1} << 20;

// The key of a file; of several templates that it lists by name the one called default. "" where it has none.
std::string template_of(const std::string& path) {
  if (!file_exists(path)) return "";
  const Json json = parse_json(read_file(path, kMostFile), "'" + path + "'");
  const auto found = json.is_object() ? json.find("chat_template") : json.end();
  if (!json.is_object() || found == json.end() || found->is_null()) return "";
  if (found->is_string()) return found->get<std::string>();
  for (const Json& one : *found) {
    if (one.is_object() && one.value("name", Json()) == "default" && one.value("template", Json()).is_string())
      return one.at("template").get<std::string>();
  }
  fail_usage("'{}': chat_template: expected a text, or a list with the template 'default', got neither", path);
}

struct FoundTemplate {
  std::string path, text;
};

FoundTemplate find_template(const std::string& folder) {
  const std::string jinja = folder + "/chat_template.jinja";
  if (file_exists(jinja)) return {jinja, read_file(jinja, kMostTemplate)};
  for (const char* name : {"/chat_template.json", "/tokenizer_config.json"}) {
    std::string text = template_of(folder + name);
    if (text.size() > kMostTemplate)
      fail_usage("'{}': chat_template: expected at most {} bytes, got {}", folder + name, kMostTemplate, text.size());
    if (!text.empty()) return {folder + name, std::move(text)};
  }
  fail_usage(
      "--chat: '{}' has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): say with "
      "--before and --after what stands around a message",
      folder);
}

// bos_token, eos_token and others, by which templates write them.
nlohmann::ordered_json special_tokens(const std::string& folder) {
  nlohmann::ordered_json all = nlohmann::ordered_json::object();
  for (const char* name : {"/special_tokens_map.json", "/tokenizer_config.json"}) {
    const std::string path = folder + name;
    if (!file_exists(path)) continue;
    const Json json = parse_json(read_file(path, kMostFile), "'" + path + "'");
    for (const char* key : {"bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"}) {
      const auto found = json.is_object() ? json.find(key) : json.end();
      if (!json.is_object() || found == json.end()) continue;
      const Json content = found->is_object() ? found->value("content", Json()) : *found;
      if (content.is_string()) all[key] = content.get<std::string>();
    }
  }
  return all;
}

struct Message {
  const char* role;
  std::string content;
};

// Renders conversations and finds in them what stands before, between and after the messages.
class TemplateProbe {
 public:
  TemplateProbe(const FoundTemplate& found, nlohmann::ordered_json variables)
      : where_("'" + found.path + "'"), template_(found.text, where_), variables_(std::move(variables)) {
    variables_["add_generation_prompt"] = true;
    variables_["tools"] = variables_["documents"] = nullptr;
    for (const char* kind : {"first", "reply", "second", "answer", "third"}) {
      std::string text = fmt::format("[{} message]", kind);
      while (found.text.find(text) != std::string::npos) text.insert(1, "the ");
      texts_.push_back(std::move(text));
    }
  }

  // The user and the model by turns, the user last, with the known texts; `around` stands on both sides of each.
  // parts[i]: before message i of these, and last what comes after all.
  std::vector<std::string> parts(const std::optional<std::string>& system, size_t messages,
                                 const std::string& around = "") const {
    std::vector<Message> all;
    if (system) all.push_back({"system", *system});
    for (size_t i = 0; i < messages; ++i)
      all.push_back({i % 2 == 0 ? "user" : "assistant", fmt::format("{0}{1}{0}", around, texts_[i])});
    nlohmann::ordered_json variables = variables_;
    variables["messages"] = nlohmann::ordered_json::array();
    for (const Message& one : all) variables["messages"].push_back({{"role", one.role}, {"content", one.content}});
    const std::string text = template_.render(variables);
    std::vector<std::string> found;
    size_t begin = 0;
    for (size_t i = 0; i < messages; ++i) {
      const size_t at = text.find(texts_[i], begin);
      if (at == std::string::npos || text.find(texts_[i], at + 1) != std::string::npos)
        fail("expected each message to be written once and in its place");
      found.push_back(text.substr(begin, at - begin));
      begin = at + texts_[i].size();
    }
    found.push_back(text.substr(begin));
    return found;
  }

  [[noreturn]] void fail(std::string_view what) const {
    fail_usage("{}: {}: say with --before and --after what stands around a message", where_, what);
  }

 private:
  std::string where_;
  JinjaTemplate template_;
  nlohmann::ordered_json variables_;
  std::vector<std::string> texts_;
};

}  // namespace

ChatFormat chat_format(const std::string& folder, const Tokenizer& tokenizer,
                       const std::optional<std::string>& system) {
  const TemplateProbe probe(find_template(folder), special_tokens(folder));
  const std::vector<std::string> one = probe.parts(system, 1), two = probe.parts(system, 3),
                                 three = probe.parts(system, 5), spaced = probe.parts(system, 1, " ");
  const bool same = two[0] == one[0] && two[3] == one[1] && three[0] == one[0] && three[1] == two[1] &&
                    three[2] == two[2] && three[3] == two[1] && three[4] == two[2] && three[5] == one[1];
  if (!same) probe.fail("the chat template writes a turn differently depending on other turns");
  ChatFormat format;
  format.first = one[0];
  format.after_user = one[1];
  format.trims_messages = spaced[0] == one[0] && spaced[1] == one[1];
  if (!format.trims_messages && (spaced[0] != one[0] + " " || spaced[1] != " " + one[1]))
    probe.fail("the chat template changes the spaces around messages");
  const std::vector<int32_t> after = tokenizer.encode(two[2]);
  if (!after.empty()) format.end = tokenizer.first_piece(after[0]);
  const bool bracketed = (format.end.starts_with('<') && format.end.ends_with('>')) ||
                         (format.end.starts_with('[') && format.end.ends_with(']'));
  const bool special = bracketed || (!after.empty() && after[0] == tokenizer.end_of_text());
  if (!special || !two[2].starts_with(format.end) || tokenizer.encode(format.end) != std::vector<int32_t>{after[0]}) {
    probe.fail(
        fmt::format("expected a special token of the tokenizer at the end of an answer, where the template writes '{}'",
                    utf8_start(two[2], 100)));
  }
  format.end_token = after[0];
  format.between = two[2].substr(format.end.size());
  return format;
}

}  // namespace fw
