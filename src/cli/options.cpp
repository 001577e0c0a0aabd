#include "cli/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/nearest.h"
#include "report/progress.h"
#include "report/table.h"
#include "rule/rule.h"

namespace fw::cli {
namespace {

template <class T>
bool parse_number(const std::string& text, T& value) {
  const char* begin = text.data();
  const char* end = begin + text.size();
  if (begin != end && *begin == '+') ++begin;
  const auto [rest, error] = std::from_chars(begin, end, value);
  return error == std::errc() && rest == end && begin != end;
}

int64_t parse_int(const Option& option, const std::string& text) {
  int64_t value = 0;
  if (!parse_number(text, value)) fail_usage("{}: expected a whole number, got '{}'", option.flag, text);
  return value;
}

// Sets a target from values of the command line.
struct SetFromText {
  const Option& option;
  const std::vector<std::string>& values;

  void operator()(bool* target) const { *target = values.back() == "true"; }
  void operator()(int64_t* target) const { *target = parse_int(option, values.back()); }
  void operator()(uint64_t* target) const {
    const int64_t value = parse_int(option, values.back());
    if (value < 0) fail_usage("{}: expected a whole number >= 0, got {}", option.flag, value);
    *target = static_cast<uint64_t>(value);
  }
  void operator()(double* target) const {
    if (!parse_number(values.back(), *target))
      fail_usage("{}: expected a number, got '{}'", option.flag, values.back());
  }
  void operator()(std::string* target) const { *target = values.back(); }
  void operator()(StringList* target) const { *target = split(); }
  void operator()(IntList* target) const {
    target->clear();
    for (const std::string& item : split()) target->push_back(parse_int(option, item));
  }

  StringList split() const {
    if (option.separator == '\0') return values;
    StringList items;
    for (const std::string& value : values) {
      for (size_t at = 0; at <= value.size();) {
        const size_t end = std::min(value.find(option.separator, at), value.size());
        if (end == at)
          fail_usage("{}: expected values separated by '{}', got '{}'", option.flag, option.separator, value);
        items.push_back(value.substr(at, end - at));
        at = end + 1;
      }
    }
    return items;
  }
};

struct Describe {
  std::string operator()(const bool* v) const { return *v ? "on" : "off"; }
  std::string operator()(const int64_t* v) const { return fmt::format("{}", *v); }
  std::string operator()(const uint64_t* v) const { return fmt::format("{}", *v); }
  std::string operator()(const double* v) const { return fmt::format("{}", *v); }
  std::string operator()(const std::string* v) const { return *v; }
  std::string operator()(const StringList* v) const { return fmt::format("{}", fmt::join(*v, ",")); }
  std::string operator()(const IntList* v) const { return fmt::format("{}", fmt::join(*v, ",")); }
};

// By the name of the value, without what repeats it: "N,N,...". Names that several options share must mean one thing.
PathUse path_use(const Option& option) {
  const std::string& full = option.positional ? option.flag : option.value_name;
  const std::string name = full.substr(0, full.find(','));
  if (option.positional && name == "TEXT") return PathUse::kReads;
  for (const char* words : {"",       "AXES",  "AXIS",  "DEVICE", "FORM", "FORMAT",    "HOW",  "ID",    "KEY",  "KIND",
                            "LAYOUT", "LEN",   "LEVEL", "LINE",   "LxN",  "LxNxCOUNT", "N",    "NAME",  "RANK", "RULE",
                            "SCHEME", "SHAPE", "SHELL", "SIZE",   "TASK", "TEXT",      "TYPE", "VALUE", "X"}) {
    if (name == words) return PathUse::kNone;
  }
  // --out is written by every command that has it; other files are read unless they are declared to be written.
  if (option.key == "out" || name == "OUT" || name == "TARGET" || name == "FOLDER") return PathUse::kWrites;
  if (name == "FILE" || name == "SPEC" || name == "RECIPE" || name == "PATH") return PathUse::kReads;
  if (name == "MODEL" || name == "SOURCE" || name == "ADAPTER") return PathUse::kModel;
  if (name == "RUN" || name == "DIR") return PathUse::kResults;
  fail_internal("option '{}': say in options.cpp whether its value '{}' is a path", option.flag, name);
}

CLI::Option* register_option(CLI::App& app, const Option& option) {
  const auto keep = [](const CLI::results_t&) { return true; };  // values are read after parsing, under the run file's
  if (option.is_switch()) return app.add_flag(option.flag + ",!" + option.negative());
  CLI::Option* added = app.add_option(option.flag, CLI::callback_t(keep));
  added->type_name(option.value_name);
  if (option.is_list()) {
    added->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    if (option.positional) added->expected(1, CLI::detail::expected_max_vector_size)->allow_extra_args();
  } else if (!option.positional) {
    added->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  return added;
}

// A switch takes nothing, or true or false after '='; CLI11 would take any word for off.
void check_switch_value(const Options& options, const std::string& arg) {
  const size_t equals = arg.find('=');
  if (equals == std::string::npos) return;
  const std::string name = arg.substr(0, equals), value = arg.substr(equals + 1);
  for (const Option& option : options.entries()) {
    if (!option.is_switch()) continue;
    if (name == option.negative())
      fail_usage("{}: expected no value, got '{}'; {} or {} say it", name, value, option.flag, option.negative());
    if (name == option.flag && value != "true" && value != "false")
      fail_usage("{}: expected no value, true or false, got '{}'", name, value);
  }
}

bool is_help(const std::string& arg) { return arg == "--help" || arg == "-h"; }

// The topic of "mixer.mamba3" is mamba3.
std::string topic_of(const Option& option) {
  if (option.section.empty()) return {};
  return option.section.substr(option.section.rfind('.') + 1);
}

StringList topics(const Options& options) {
  StringList names;
  for (const Option& option : options.entries()) {
    const std::string topic = topic_of(option);
    if (!topic.empty() && (names.empty() || names.back() != topic)) names.push_back(topic);
  }
  return names;
}

[[noreturn]] void fail_option(const Options& options, const std::string& command, const std::string& given) {
  std::vector<std::string> known{"--help"};
  for (const Option& option : options.entries()) {
    if (option.positional) continue;
    known.push_back(option.flag);
    if (option.is_switch()) known.push_back(option.negative());
  }
  const std::string name = given.substr(0, given.find('='));
  const std::string near = nearest(name, known);
  fail_usage("unknown option '{}'{}; 'fastweight {} --help' lists all", name,
             near.empty() ? "" : fmt::format("; did you mean {}?", near), command);
}

}  // namespace

void Options::section(const std::string& section, const std::string& heading) {
  section_ = section;
  heading_ = heading;
}

Option& Options::add(const std::string& key, const std::string& value_name, KeyTarget target, const std::string& help,
                     char separator) {
  Option option;
  option.key = key;
  option.flag = "--" + key;
  std::replace(option.flag.begin(), option.flag.end(), '_', '-');
  option.value_name = value_name;
  option.help = help;
  option.target = target;
  option.separator = separator;
  return add(std::move(option));
}

void Options::add(const KeyTables& tables, bool in_run_file) {
  for (const KeyTable& table : tables) {
    section(in_run_file ? table.name : "", table.heading);
    for (const Key& key : table.keys) {
      Option option;
      option.key = key.name;
      option.table = table.name;
      option.flag = flag_of(table, key);
      option.value_name = key.value_name;
      option.help = key.help;
      option.target = key.target;
      option.separator = key.value_name.find(',') != std::string::npos ? ',' : '\0';
      option.words = key.value_name == "RULE" ? rule_names() : key.range.names;
      add(std::move(option));
    }
  }
}

Option& Options::add(Option option) {
  for (const Option& other : entries_) {
    if (other.flag == option.flag) fail_internal("option '{}' is declared twice", option.flag);
  }
  option.section = section_;
  if (option.table.empty()) option.table = section_;
  option.heading = heading_;
  option.default_text = to_text(option.target);
  option.path = path_use(option);
  entries_.push_back(std::move(option));
  return entries_.back();
}

Option& Options::positional(const std::string& name, KeyTarget target, const std::string& help, bool required) {
  Option option;
  option.key = name;
  option.flag = name;
  option.help = help;
  option.target = target;
  option.positional = true;
  option.required = required;
  option.path = path_use(option);
  entries_.push_back(std::move(option));
  return entries_.back();
}

bool Options::given(const std::string& key) const {
  for (const Option& option : entries_) {
    if (option.key == key) return option.is_given;
  }
  fail_internal("no option '{}' in the table", key);
}

const Option& Options::option(const std::string& flag) const {
  for (const Option& option : entries_) {
    if (option.flag == flag) return option;
  }
  fail_internal("no option '{}' in the table", flag);
}

void Options::expect_only(const std::vector<std::string>& flags, const std::string& where) const {
  for (const std::string& flag : flags) option(flag);  // a list with an option that is not declared is a mistake
  for (const Option& option : entries_) {
    if (!option.is_given || option.positional || std::find(flags.begin(), flags.end(), option.flag) != flags.end())
      continue;
    fail_usage("{}: expected no such option, which has no effect {}", option.flag, where);
  }
}

void Options::expect_without_effect(const std::vector<std::string>& flags, const std::string& where) const {
  for (const std::string& flag : flags) {
    if (option(flag).is_given) fail_usage("{}: expected no such option, which has no effect {}", flag, where);
  }
}

bool Options::said(const std::string& table, const std::string& key) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Option& option) {
    return option.table == table && option.key == key && (option.is_given || option.in_file);
  });
}

StringList words_of(const KeyTarget& target) {
  StringList words;
  if (const auto* text = std::get_if<std::string*>(&target)) words.push_back(**text);
  if (const auto* list = std::get_if<StringList*>(&target)) words = **list;
  std::erase(words, "");
  return words;
}

std::string to_text(const KeyTarget& target) { return std::visit(Describe{}, target); }

bool parse_command_line(Options& options, const std::string& command, const std::vector<std::string>& args) {
  for (const std::string& arg : args) {
    if (arg == "--") break;
    if (is_help(arg)) return false;
  }
  CLI::App app;
  app.set_help_flag("--help,-h");
  app.allow_extras();
  std::vector<CLI::Option*> registered;
  for (const Option& option : options.entries()) registered.push_back(register_option(app, option));

  // CLI11 takes the next argument as the value of "--key=": an empty value is given to it as an argument of its own. It
  // reads from the back.
  std::vector<std::string> reversed;
  bool only_arguments = false;  // after "--"
  for (const std::string& arg : args) {
    only_arguments = only_arguments || arg == "--";
    if (only_arguments) {
      reversed.push_back(arg);
      continue;
    }
    check_switch_value(options, arg);
    if (arg.size() > 3 && arg.starts_with("--") && arg.find('=') == arg.size() - 1) {
      reversed.push_back(arg.substr(0, arg.size() - 1));
      reversed.emplace_back();
    } else {
      reversed.push_back(arg);
    }
  }
  std::reverse(reversed.begin(), reversed.end());
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    return false;
  } catch (const CLI::ParseError& error) {
    fail_usage("{}; 'fastweight {} --help' says what it takes", error.what(), command);
  }
  // CLI11 leaves the mark "--" behind too.
  const std::vector<std::string> extra = app.remaining();
  const auto mark = std::find(extra.begin(), extra.end(), "--");
  const auto option_like =
      std::find_if(extra.begin(), mark, [](const std::string& e) { return e.size() > 1 && e[0] == '-'; });
  if (option_like != mark) fail_option(options, command, *option_like);
  const auto argument = mark != extra.begin() ? extra.begin() : mark == extra.end() ? mark : std::next(mark);
  if (argument != extra.end())
    fail_usage("unexpected argument '{}'; 'fastweight {} --help' says what it takes", *argument, command);
  for (size_t i = 0; i < registered.size(); ++i) {
    Option& option = options.entries()[i];
    option.is_given = registered[i]->count() > 0;
    if (option.required && !option.is_given) {
      fail_usage("{} is missing: {}; 'fastweight {} --help' says more", option.flag, option.help, command);
    }
    if (!option.is_given) continue;
    option.given = registered[i]->results();
    std::visit(SetFromText{option, option.given}, option.target);
  }
  return true;
}

StringList rule_names() {
  StringList names;
  for (const Preset& p : presets()) names.emplace_back(p.name);
  for (const Preset& p : ablations()) names.emplace_back(p.name);
  return names;
}

std::string usage(const Options& options, const std::string& command) {
  std::string line = "fastweight " + command;
  for (const Option& option : options.entries()) {
    if (!option.positional) continue;
    const std::string name = option.flag + (option.is_list() ? "..." : "");
    line += option.required ? " " + name : " [" + name + "]";
  }
  return line + " [options]";
}

std::string help_topic(const std::vector<std::string>& args) {
  const auto help = std::find_if(args.begin(), args.end(), is_help);
  if (help == args.end() || std::next(help) == args.end() || std::next(help)->starts_with('-')) return {};
  return *std::next(help);
}

std::string help_page(const Options& options, const std::string& command, const std::string& summary,
                      const std::string& details, const std::string& topic) {
  const StringList known = topics(options);
  if (!topic.empty() && topic != "all" && std::find(known.begin(), known.end(), topic) == known.end()) {
    const std::string near = nearest(topic, known);
    fail_usage("--help: expected no topic{}, got '{}'{}",
               known.empty() ? " or all" : fmt::format(", all, or one of {}", fmt::join(known, ", ")), topic,
               near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  }
  const bool first_alone = topic.empty() && !options.first().empty();
  const auto shown = [&](const Option& option) {
    if (first_alone)
      return option.positional ||
             std::find(options.first().begin(), options.first().end(), option.flag) != options.first().end();
    return topic.empty() || topic == "all" || topic_of(option) == topic;
  };
  const size_t width = static_cast<size_t>(std::clamp(terminal_width(1), 60, 120));
  constexpr size_t kColumn = 32;
  std::string page = wrap(fmt::format("fastweight {}: {}", command, summary), width, 0) +
                     "\n\nUsage: " + usage(options, command) + "\n";
  const auto line = [&](const std::string& left, const std::string& right) {
    std::string head = "  " + left;
    if (head.size() + 2 > kColumn) {
      page += head + "\n" + std::string(kColumn, ' ');
    } else {
      page += head + std::string(kColumn - head.size(), ' ');
    }
    page += wrap(right, width - kColumn, kColumn) + "\n";
  };
  const bool colours = can_redraw(1);
  const auto title = [&](const std::string& text) { return colours ? "\x1b[1m" + text + "\x1b[0m" : text; };
  std::string heading;
  size_t hidden = 0;
  for (const Option& option : options.entries()) {
    if (!shown(option)) {
      ++hidden;
      continue;
    }
    if (option.positional) {
      if (heading.empty()) page += "\n" + title("Arguments:") + "\n";
      heading = "Arguments";
      line(option.flag, option.help);
      continue;
    }
    if (option.heading != heading) {
      heading = option.heading;
      page +=
          "\n" +
          title(heading + (option.section.empty() ? "" : fmt::format(" ([{}] in a run file)", option.section)) + ":") +
          "\n";
    }
    std::string left = option.flag;
    // A switch that is on by default is switched off by --no-; both are named, so that one sees it.
    if (option.is_switch() && (option.default_text == "on" || !option.section.empty()))
      left = fmt::format("{}, {}", option.flag, option.negative());
    if (!option.value_name.empty()) left += " " + option.value_name;
    std::string right = option.help;
    if (!option.default_text.empty() && !(option.is_switch() && option.default_text == "off"))
      right += fmt::format(" [{}]", option.default_text);
    line(left, right);
  }
  page += "\n" + title("Help:") + "\n";
  line("--help, -h", "this page");
  if (!options.first().empty())
    line("--help TOPIC",
         fmt::format("{}all: every option; or those of a topic: {}",
                     first_alone ? fmt::format("{} more options. ", hidden) : "", fmt::join(known, ", ")));
  line("--", "what follows is no option: an argument may begin with a dash");
  if (!details.empty()) page += "\n" + wrap(details, width, 0) + "\n";
  return page;
}

}  // namespace fw::cli
