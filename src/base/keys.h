// Keys of a configuration. Each configuration (model, training, data) has ONE list of its keys, a file of lines
//   FW_KEY(type, name, default, VALUE, range, "help")
// (model/config.def, train/config.def, cli/data.def). From it follow the struct's members (FW_KEY_MEMBER), and the
// KeyTable from which JSON is read and written and ranges are checked (here), and run files, options and help pages are
// made (cli/options.h). A new key is its line there and its use. In the help, {} stands for the names of one_of.
//
// A table with a dot in its name is one inside: [mixer.window] in a run file, {"mixer": {"window": {...}}} in JSON,
// --window-KEY on the command line.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <variant>
#include <vector>

namespace fw {

using StringList = std::vector<std::string>;
using IntList = std::vector<int64_t>;
// uint64_t: 0 to 2^63 - 1, which is what TOML can hold.
using KeyTarget = std::variant<bool*, int64_t*, uint64_t*, double*, std::string*, StringList*, IntList*>;

// What values a key may have beyond those of its type.
struct KeyRange {
  std::string expected;                         // for the message: "1 to 4096"
  std::function<bool(const KeyTarget&)> holds;  // empty: every value
  StringList names;                             // of one_of
};
inline KeyRange any_value() { return {}; }  // or any that a check of several keys at once (validate) lets through
KeyRange between(int64_t low, int64_t high);
KeyRange at_least(int64_t low);
KeyRange number(const std::string& expected, bool (*holds)(double));  // finite, and holds
KeyRange one_of(const StringList& names);
KeyRange device_name();  // base/device.h
KeyRange not_empty(const std::string& expected);

struct Key {
  Key(std::string name, std::string value_name, const std::string& help, KeyTarget target, KeyRange range);
  std::string name;
  // what the help calls the value: N, FILE; "" for switches; with a comma (N,N,...) a list is split at commas
  std::string value_name;
  std::string help;
  KeyTarget target;
  KeyRange range;
};

struct KeyTable {
  std::string name;     // in a run file: "train", "mixer.window"
  std::string heading;  // of its options in the help
  std::vector<Key> keys;
};
using KeyTables = std::vector<KeyTable>;

// What FW_KEY is defined as: for the struct, and for the table of a struct `c` in this scope.
#define FW_KEY_MEMBER(type, name, standard, ...) type name = standard;
#define FW_KEY_ENTRY(type, name, standard, value_name, range, help) ::fw::Key(#name, value_name, help, &c.name, range),

// --min-lr; of a table inside another: --window-heads.
std::string flag_of(const KeyTable& table, const Key& key);

// Error(kUsage) for the first value that is not in its key's range: "num_heads: expected 1 to 65536, got 0". As a run
// file has them: "data.valid_fraction (--valid-fraction): ...".
void check_ranges(const KeyTables& tables, bool as_in_run_file = false);

// The keys of the first table stand in the object itself, those of another in the objects of its name. Reading sets the
// keys that are there. Error(kUsage) with `where` and the key for a wrong type and an unknown key (with the nearest
// known name; those of `also` are the caller's).
void keys_from_json(const KeyTables& tables, const nlohmann::json& json, const std::string& where,
                    const StringList& also);
void keys_to_json(const KeyTables& tables, nlohmann::json& json);

// A JSON value for a message: invalid UTF-8 replaced, not longer than a line bears.
std::string shown(const nlohmann::json& value);

}  // namespace fw
