#include "base/keys.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/device.h"
#include "base/error.h"
#include "base/nearest.h"

namespace fw {
namespace {

using Json = nlohmann::json;

template <class T>
const T& value_of(const KeyTarget& target) {
  return *std::get<T*>(target);
}

int64_t integer_of(const KeyTarget& target) { return value_of<int64_t>(target); }

// "silu, sigmoid or none"
std::string joined(const StringList& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  return text;
}

std::string dotted(const std::string& table, const std::string& key) { return table.empty() ? key : table + "." + key; }

// Reads a JSON value as the type of a target.
struct FromJson {
  const Json& json;
  const std::string& where;
  const std::string& name;

  [[noreturn]] void fail(const char* expected) const {
    fail_usage("{}: {}: expected {}, got {}", where, name, expected, shown(json));
  }
  static bool is_whole(const Json& value) {
    return value.is_number_integer() &&
           !(value.is_number_unsigned() &&
             value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  }

  void operator()(bool* target) const {
    if (!json.is_boolean()) fail("true or false");
    *target = json.get<bool>();
  }
  void operator()(int64_t* target) const {
    if (!is_whole(json)) fail("a whole number");
    *target = json.get<int64_t>();
  }
  void operator()(uint64_t* target) const {
    if (!is_whole(json) || (!json.is_number_unsigned() && json.get<int64_t>() < 0)) fail("a whole number >= 0");
    *target = json.get<uint64_t>();
  }
  void operator()(double* target) const {
    if (!json.is_number()) fail("a number");
    *target = json.get<double>();
  }
  void operator()(std::string* target) const {
    if (!json.is_string()) fail("a string");
    *target = json.get<std::string>();
  }
  void operator()(StringList* target) const {
    if (!json.is_array() || !std::all_of(json.begin(), json.end(), [](const Json& item) { return item.is_string(); }))
      fail("an array of strings");
    *target = json.get<StringList>();
  }
  void operator()(IntList* target) const {
    if (!json.is_array() || !std::all_of(json.begin(), json.end(), is_whole)) fail("an array of whole numbers");
    *target = json.get<IntList>();
  }
};

// The object `json` of the table called `path` ("" for the first one's).
void read_object(const KeyTables& tables, const std::string& path, const Json& json, const std::string& where,
                 const StringList& also) {
  StringList known = also;
  std::set<std::string> inner;  // names of the objects inside
  const std::vector<Key>* keys = nullptr;
  for (const KeyTable& table : tables) {
    const std::string name = &table == &tables.front() ? "" : table.name;
    if (name == path) {
      keys = &table.keys;
      for (const Key& key : table.keys) known.push_back(key.name);
    } else if (path.empty() || name.starts_with(path + ".")) {
      const size_t begin = path.empty() ? 0 : path.size() + 1;
      inner.insert(name.substr(begin, name.find('.', begin) - begin));
    }
  }
  known.insert(known.end(), inner.begin(), inner.end());
  for (const auto& [key, value] : json.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const std::string near = nearest(key, known);
    fail_usage("{}: unknown key {}{}{}", where, shown(key), path.empty() ? "" : " in " + path,
               near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  }
  if (keys != nullptr) {
    for (const Key& key : *keys) {
      if (const auto it = json.find(key.name); it != json.end())
        std::visit(FromJson{*it, where, dotted(path, key.name)}, key.target);
    }
  }
  for (const std::string& name : inner) {
    const auto it = json.find(name);
    if (it == json.end()) continue;
    const std::string full = dotted(path, name);
    if (!it->is_object()) fail_usage("{}: {}: expected an object, got {}", where, full, shown(*it));
    read_object(tables, full, *it, where, {});
  }
}

}  // namespace

Key::Key(std::string key_name, std::string key_value_name, const std::string& key_help, KeyTarget key_target,
         KeyRange key_range)
    : name(std::move(key_name)),
      value_name(std::move(key_value_name)),
      help(key_help),
      target(key_target),
      range(std::move(key_range)) {
  if (const size_t at = help.find("{}"); at != std::string::npos) help.replace(at, 2, joined(range.names));
}

KeyRange between(int64_t low, int64_t high) {
  return {fmt::format("{} to {}", low, high),
          [low, high](const KeyTarget& t) { return integer_of(t) >= low && integer_of(t) <= high; },
          {}};
}

KeyRange at_least(int64_t low) {
  return {fmt::format("a whole number >= {}", low), [low](const KeyTarget& t) { return integer_of(t) >= low; }, {}};
}

KeyRange number(const std::string& expected, bool (*holds)(double)) {
  return {expected,
          [holds](const KeyTarget& t) { return std::isfinite(value_of<double>(t)) && holds(value_of<double>(t)); },
          {}};
}

KeyRange one_of(const StringList& names) {
  return {joined(names),
          [names](const KeyTarget& t) {
            return std::find(names.begin(), names.end(), value_of<std::string>(t)) != names.end();
          },
          names};
}

KeyRange device_name() {
  return {"cpu, cuda or cuda:N", [](const KeyTarget& t) { return is_device_name(value_of<std::string>(t)); }, {}};
}

KeyRange not_empty(const std::string& expected) {
  return {expected, [](const KeyTarget& t) { return !value_of<std::string>(t).empty(); }, {}};
}

std::string flag_of(const KeyTable& table, const Key& key) {
  const size_t dot = table.name.rfind('.');
  std::string flag = fmt::format("--{}{}", dot == std::string::npos ? "" : table.name.substr(dot + 1) + "-", key.name);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

void check_ranges(const KeyTables& tables, bool as_in_run_file) {
  for (const KeyTable& table : tables) {
    for (const Key& key : table.keys) {
      if (!key.range.holds || key.range.holds(key.target)) continue;
      std::string name = &table == &tables.front() ? key.name : dotted(table.name, key.name);
      if (as_in_run_file) name = fmt::format("{} ({})", dotted(table.name, key.name), flag_of(table, key));
      std::string came = "nothing", near;
      if (const auto* text = std::get_if<std::string*>(&key.target); text != nullptr) {
        if (!(*text)->empty() || !key.range.names.empty()) came = fmt::format("'{}'", **text);
        near = nearest(**text, key.range.names);
      } else if (const auto* real = std::get_if<double*>(&key.target); real != nullptr) {
        came = fmt::format("{}", **real);
      } else {
        came = fmt::format("{}", integer_of(key.target));
      }
      fail_usage("{}: expected {}, got {}{}", name, key.range.expected, came,
                 near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
    }
  }
}

void keys_from_json(const KeyTables& tables, const nlohmann::json& json, const std::string& where,
                    const StringList& also) {
  read_object(tables, "", json, where, also);
}

void keys_to_json(const KeyTables& tables, nlohmann::json& json) {
  for (const KeyTable& table : tables) {
    Json* object = &json;
    for (size_t at = 0; &table != &tables.front() && at < table.name.size();) {
      const size_t end = std::min(table.name.find('.', at), table.name.size());
      object = &(*object)[table.name.substr(at, end - at)];
      at = end + 1;
    }
    if (object->is_null()) *object = Json::object();
    for (const Key& key : table.keys) std::visit([&](const auto* value) { (*object)[key.name] = *value; }, key.target);
  }
}

std::string shown(const nlohmann::json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>()))
    return std::isnan(value.get<double>()) ? "NaN" : value.get<double>() > 0 ? "Infinity" : "-Infinity";
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

}  // namespace fw
