// The one table of a command's options. An entry is a TOML key, an option, a help line and the variable that it sets.
// The command line (options.cpp), run files (recipe.cpp) and help read the same table, so that they cannot disagree.
// Precedence: the variable's value when it is declared (the default) < run file < command line.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/keys.h"

namespace fw::cli {

// What the value of an option is, if it is a path. Options say it by the name of their value. One of a name that is not
// known is refused where it is declared, so that no option that is read is forgotten when an output is looked at
// (cli/outputs.h).
enum class PathUse {
  kNone,     // no path
  kReads,    // a file, or a pattern of several; a word such as bytes, where there is no such file
  kModel,    // the folder of a model or of a run
  kResults,  // the folder of a run, a sweep or an evaluation, or a file of one
  kWrites,
};

struct Option {
  std::string section;     // TOML table; "": on the command line only
  std::string table;       // of the key, also where no run file has it
  std::string heading;     // of its group in the help
  std::string key;         // in a run file: min_lr
  std::string flag;        // on the command line: --min-lr; a positional has its name here (MODEL)
  std::string value_name;  // what the help calls the value: N, FILE; "" for switches
  std::string help;
  StringList words;  // what completion offers as its value; none: it is no word of a few
  KeyTarget target;
  PathUse path = PathUse::kNone;
  bool positional = false;
  bool required = false;
  char separator = '\0';           // lists: ',' splits a value; '\0': one value each time the option is given
  std::string default_text;        // the default as the help shows it
  std::vector<std::string> given;  // values of the command line
  bool is_given = false;           // on the command line
  bool in_file = false;            // named by a run file that was loaded

  bool is_switch() const { return std::holds_alternative<bool*>(target); }
  Option& writes() {
    path = PathUse::kWrites;
    return *this;
  }
  bool is_list() const {
    return std::holds_alternative<StringList*>(target) || std::holds_alternative<IntList*>(target);
  }
  std::string negative() const { return "--no-" + flag.substr(2); }  // of a switch
};

class Options {
 public:
  // Options added after this belong to TOML table `section` ("": command line only) under `heading` in the help.
  void section(const std::string& section, const std::string& heading);
  // `key` is the TOML spelling; the option is --key with dashes. Lists are split at commas when `separator` is ','.
  Option& add(const std::string& key, const std::string& value_name, KeyTarget target, const std::string& help,
              char separator = '\0');
  // The keys of a configuration, under the headings of its tables. Not in a run file: they are options of the command
  // line only.
  void add(const KeyTables& tables, bool in_run_file = true);
  // An argument without an option, in order. Only the last may be a list or not required.
  Option& positional(const std::string& name, KeyTarget target, const std::string& help, bool required);

  // The options, as they are on the command line, that the help shows without a topic; without a call: all.
  void show_first(StringList flags) { first_ = std::move(flags); }
  const StringList& first() const { return first_; }

  const std::vector<Option>& entries() const { return entries_; }
  std::vector<Option>& entries() { return entries_; }
  bool given(const std::string& key) const;  // on the command line; Error(kInternal) for an unknown key
  // An option that the mode of a call does not read is an error. A command whose modes read different options says for
  // each what it reads: an option that is added later is then refused wherever no list has it. Error(kUsage) for the
  // first given option that is none of these; arguments are not looked at.
  void expect_only(const std::vector<std::string>& flags, const std::string& where) const;
  // Of options that depend on another: Error(kUsage) for the first given one of these.
  void expect_without_effect(const std::vector<std::string>& flags, const std::string& where) const;
  // Whether the user said it: on the command line or in a run file.
  bool said(const std::string& table, const std::string& key) const;

 private:
  Option& add(Option option);
  const Option& option(const std::string& flag) const;  // Error(kInternal) for an unknown one

  std::string section_, heading_ = "Options";
  StringList first_;
  std::vector<Option> entries_;
};

// Parses args (without program and command) and sets the targets. Error(kUsage) for unknown options (with the nearest
// known one), missing or superfluous values, and values of the wrong type. Returns false for --help (help_topic() says
// of what).
bool parse_command_line(Options& options, const std::string& command, const std::vector<std::string>& args);

// The texts of a target of words, "" left out; none of another target.
StringList words_of(const KeyTarget& target);
// The value of a target as text, "" for an empty string or list.
std::string to_text(const KeyTarget& target);

// All names of rules, for Option::words.
StringList rule_names();

// "fastweight train [RECIPE] [options]"
std::string usage(const Options& options, const std::string& command);
// What "--help TOPIC" asks for; "" without a topic.
std::string help_topic(const std::vector<std::string>& args);
// The help page of a command. topic: "" for the options that are shown first, "all", or the name of a table or layer
// ("mamba3"): its options alone. Error(kUsage) for another one, with those there are.
std::string help_page(const Options& options, const std::string& command, const std::string& summary,
                      const std::string& details, const std::string& topic = "all");

}  // namespace fw::cli
