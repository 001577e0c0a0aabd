#include "cli/recipe.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/nearest.h"
#include "cli/toml_text.h"

namespace fw::cli {
namespace {

std::string location(const std::string& path, const toml::node& node) {
  return fmt::format("{}:{}", path, node.source().begin.line);
}

std::string type_name(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "an array";
    case toml::node_type::string:
      return fmt::format("the string \"{}\"", *node.value<std::string>());
    case toml::node_type::integer:
      return fmt::format("the integer {}", *node.value<int64_t>());
    case toml::node_type::floating_point:
      return fmt::format("the number {}", *node.value<double>());
    case toml::node_type::boolean:
      return *node.value<bool>() ? "the boolean true" : "the boolean false";
    default:
      return "a date or time";
  }
}

// Reads a node as the type of a target; the target itself is set only when `assign` is true (the file is checked in
// full even where the command line wins).
struct SetFromNode {
  const toml::node& node;
  const std::string& path;
  const std::string& name;  // train.lr
  bool assign;

  [[noreturn]] void fail(const char* expected, const toml::node& found) const {
    fail_usage("{}: {}: expected {}, got {}", location(path, found), name, expected, type_name(found));
  }
  template <class T>
  void set(T* target, T value) const {
    if (assign) *target = std::move(value);
  }
  int64_t integer(const toml::node& n, const char* expected) const {
    if (!n.is_integer()) fail(expected, n);
    return *n.value<int64_t>();
  }
  std::string string(const toml::node& n, const char* expected) const {
    if (!n.is_string()) fail(expected, n);
    std::string text = *n.value<std::string>();
    if (text.find('\0') != std::string::npos)
      fail_usage("{}: {}: expected text without a NUL character", location(path, n), name);
    return text;
  }

  void operator()(bool* target) const {
    if (!node.is_boolean()) fail("true or false", node);
    set(target, *node.value<bool>());
  }
  void operator()(int64_t* target) const { set(target, integer(node, "an integer")); }
  void operator()(uint64_t* target) const {
    const int64_t value = integer(node, "an integer >= 0");
    if (value < 0) fail("an integer >= 0", node);
    set(target, static_cast<uint64_t>(value));
  }
  void operator()(double* target) const {
    if (!node.is_number()) fail("a number", node);
    // toml++ gives no double for an integer that is not exactly one
    set(target, node.is_integer() ? static_cast<double>(integer(node, "a number")) : *node.value<double>());
  }
  void operator()(std::string* target) const { set(target, string(node, "a string")); }
  void operator()(StringList* target) const {
    StringList values;
    if (const toml::array* array = node.as_array()) {
      for (const toml::node& item : *array) values.push_back(string(item, "strings only"));
    } else {
      values.push_back(string(node, "a string or an array of strings"));
    }
    set(target, std::move(values));
  }
  void operator()(IntList* target) const {
    IntList values;
    if (const toml::array* array = node.as_array()) {
      for (const toml::node& item : *array) values.push_back(integer(item, "integers only"));
    } else {
      values.push_back(integer(node, "an integer or an array of integers"));
    }
    set(target, std::move(values));
  }
};

bool is_utf8(const std::string& text) {
  try {
    nlohmann::json(text).dump();  // refuses what is not
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

std::string toml_string(const std::string& text) {
  if (!is_utf8(text))
    fail_usage("'{}': expected UTF-8, which alone a run file can hold: give the file or folder another name", text);
  std::ostringstream out;
  out << toml::value<std::string>(text);
  return out.str();
}

struct ToToml {
  std::string operator()(const bool* v) const { return *v ? "true" : "false"; }
  std::string operator()(const int64_t* v) const { return fmt::format("{}", *v); }
  std::string operator()(const uint64_t* v) const { return fmt::format("{}", *v); }
  // The shortest text that reads back as the same double; TOML wants a sign that it is no integer.
  std::string operator()(const double* v) const {
    const std::string text = fmt::format("{}", *v);
    return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
  }
  std::string operator()(const std::string* v) const { return toml_string(*v); }
  std::string operator()(const StringList* v) const {
    std::string text = "[";
    for (const std::string& item : *v) text += (text.size() > 1 ? ", " : "") + toml_string(item);
    return text + "]";
  }
  std::string operator()(const IntList* v) const { return fmt::format("[{}]", fmt::join(*v, ", ")); }
};

toml::table parse(const std::string& path) {
  constexpr size_t kLargest = 1 << 20;
  return parse_toml(read_file(path, kLargest), path);
}

template <class Table>  // Options or const Options
auto find(Table& options, const std::string& section, const std::string& key) -> decltype(options.entries().data()) {
  for (auto& option : options.entries()) {
    if (!option.section.empty() && option.section == section && option.key == key) return &option;
  }
  return nullptr;
}

// `name` is a table of the file, or one that has tables inside.
bool is_section(const Options& options, const std::string& name) {
  return std::any_of(options.entries().begin(), options.entries().end(), [&](const Option& option) {
    return !option.section.empty() && (option.section == name || option.section.starts_with(name + "."));
  });
}

[[noreturn]] void fail_unknown_section(const std::string& path, const std::string& name, const toml::node& node,
                                       const Options& options) {
  std::vector<std::string> sections;
  for (const Option& option : options.entries()) {
    if (option.section.empty()) continue;
    if (!node.is_table() && option.key == name)
      fail_usage("{}: key '{}' belongs into the table [{}]", location(path, node), name, option.section);
    if (sections.empty() || sections.back() != option.section) sections.push_back(option.section);
  }
  const std::string near = nearest(name, sections);
  fail_usage("{}: unknown {} '{}'{}; known tables: [{}]", location(path, node), node.is_table() ? "table" : "key", name,
             near.empty() ? "" : fmt::format("; did you mean [{}]?", near), fmt::join(sections, "], ["));
}

[[noreturn]] void fail_unknown_key(const std::string& path, const std::string& section, const std::string& key,
                                   const toml::node& node, const Options& options) {
  std::vector<std::string> known, everywhere;
  for (const Option& option : options.entries()) {
    if (option.section.empty()) continue;
    if (option.key == key)
      fail_usage("{}: unknown key '{}' in [{}]; it belongs into [{}]", location(path, node), key, section,
                 option.section);
    everywhere.push_back(option.key);
    if (option.section == section) known.push_back(option.key);
  }
  std::string near = nearest(key, known);
  if (near.empty()) near = nearest(key, everywhere);
  fail_usage("{}: unknown key '{}' in [{}]{}; 'fastweight train --help' lists all", location(path, node), key, section,
             near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

// `name`: of the table, "" for the file itself.
void load_table(const std::string& path, const std::string& name, const toml::table& table, Options& options) {
  const bool has_keys = std::any_of(options.entries().begin(), options.entries().end(),
                                    [&](const Option& o) { return !name.empty() && o.section == name; });
  for (const auto& [key_node, node] : table) {
    const std::string key(key_node.str());
    const std::string full = name.empty() ? key : fmt::format("{}.{}", name, key);
    if (Option* option = find(options, name, key); option != nullptr) {
      std::visit(SetFromNode{node, path, full, !option->is_given}, option->target);
      option->in_file = true;
    } else if (is_section(options, full)) {
      if (!node.is_table()) fail_usage("{}: {}: expected a table, got {}", location(path, node), full, type_name(node));
      load_table(path, full, *node.as_table(), options);
    } else if (has_keys) {
      fail_unknown_key(path, name, key, node, options);
    } else {
      fail_unknown_section(path, full, node, options);
    }
  }
}

}  // namespace

void load_recipe(const std::string& path, Options& options) { load_table(path, "", parse(path), options); }

std::string to_toml(const Options& options, const std::string& comment, const std::vector<std::string>& unused) {
  std::string text = "# " + comment + "\n";
  const std::vector<Option>& entries = options.entries();
  for (size_t i = 0; i < entries.size();) {
    const std::string& section = entries[i].section;
    std::string changed, standard;
    for (; i < entries.size() && entries[i].section == section; ++i) {
      const Option& option = entries[i];
      (to_text(option.target) == option.default_text ? standard : changed) +=
          option.key + " = " + std::visit(ToToml{}, option.target) + "\n";
    }
    if (section.empty() || (changed.empty() && std::find(unused.begin(), unused.end(), section) != unused.end()))
      continue;
    text += "\n[";
    text += section;
    text += "]\n";
    text += changed;
    if (!standard.empty()) text += (changed.empty() ? "# as by default\n" : "# the rest is as by default\n") + standard;
  }
  return text;
}

std::vector<std::string> differences(const Options& before, const Options& now) {
  std::vector<std::string> changed;
  for (const Option& option : now.entries()) {
    if (option.section.empty()) continue;
    const Option* old = find(before, option.section, option.key);
    const std::string was = old == nullptr ? "nothing" : std::visit(ToToml{}, old->target);
    const std::string is = std::visit(ToToml{}, option.target);
    if (was != is) changed.push_back(fmt::format("{}.{}: {} -> {}", option.section, option.key, was, is));
  }
  return changed;
}

}  // namespace fw::cli
