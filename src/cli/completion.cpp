// completion: scripts with which bash, zsh and fish complete the program's command line.
#include "cli/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "cli/say.h"

namespace fw::cli {
namespace {

// What may stand where an option's value or an argument is expected.
enum class Value { kNone, kWords, kFiles, kUnknown };

Value value_of(const Option& option) {
  if (option.is_switch()) return Value::kNone;
  if (!option.words.empty()) return Value::kWords;
  return option.path != PathUse::kNone ? Value::kFiles : Value::kUnknown;
}

// A word as a shell reads it outside quotes.
std::string bare(const std::string& word) {
  std::string out;
  for (const char c : word) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 &&
        std::string_view("_-+./:,=").find(c) == std::string_view::npos)
      out += '\\';
    out += c;
  }
  return out;
}

std::string bare(const StringList& words) {
  StringList shown;
  for (const std::string& word : words) shown.push_back(bare(word));
  return fmt::format("{}", fmt::join(shown, " "));
}

// In single quotes, where only they themselves must be written otherwise: '\'' in bash and zsh, \' in fish.
std::string quoted(const std::string& text, const char* quote = "'\\''") {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'') {
      out += quote;
    } else {
      out += c;
    }
  }
  return out + "'";
}

// The flags of a command, --no- forms and --help too.
StringList flags_of(const Options& options) {
  StringList flags{"--help"};
  for (const Option& option : options.entries()) {
    if (option.positional) continue;
    flags.push_back(option.flag);
    if (option.is_switch()) flags.push_back(option.negative());
  }
  return flags;
}

const Option* first_positional(const Options& options) {
  const auto found = std::find_if(options.entries().begin(), options.entries().end(),
                                  [](const Option& option) { return option.positional; });
  return found == options.entries().end() ? nullptr : &*found;
}

StringList names_of(const std::vector<CommandTable>& tables) {
  StringList names;
  for (const CommandTable& table : tables) names.push_back(table.command->name());
  return names;
}

// A description that zsh takes between brackets or colons.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (std::string_view("\\[]:").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

// ":MESSAGE:ACTION" of a value.
std::string zsh_value(const Option& option) {
  const std::string name = option.positional ? option.flag : option.value_name;
  switch (value_of(option)) {
    case Value::kNone:
      return "";
    case Value::kWords:
      if (option.separator != '\0')
        return fmt::format(":{}: _values -s {} {} {}", zsh_text(name), option.separator, option.key,
                           bare(option.words));
      return fmt::format(":{}:({})", zsh_text(name), bare(option.words));
    case Value::kFiles:
      return fmt::format(":{}:_files", zsh_text(name));
    case Value::kUnknown:
      return fmt::format(":{}: ", zsh_text(name));
  }
  fail_internal("completion: no such value");
}

}  // namespace

std::vector<CommandTable> command_tables() {
  std::vector<CommandTable> tables;
  for (std::unique_ptr<Command>& command : all_commands()) {
    CommandTable& table = tables.emplace_back();
    table.command = std::move(command);
    table.command->declare(table.options);
  }
  return tables;
}

std::string bash_completion(const std::vector<CommandTable>& tables) {
  std::string out = fmt::format(
      "# Completion of fastweight's command line in bash; made by 'fastweight completion bash'.\n\n"
      "_fastweight() {{\n"
      "  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}}\n"
      "  local options='' files='' unknown='' lists='' words='' arguments='' first='' i\n"
      "  COMPREPLY=()\n"
      "  # Of --option=value bash makes three words.\n"
      "  if [[ $current == '=' ]]; then\n"
      "    current=''\n"
      "  elif [[ $before == '=' ]] && ((COMP_CWORD > 2)); then\n"
      "    before=${{COMP_WORDS[COMP_CWORD - 2]}}\n"
      "  fi\n"
      "  if ((COMP_CWORD < 2)); then\n"
      "    mapfile -t COMPREPLY < <(compgen -W '{} --help --version' -- \"$current\")\n"
      "    return\n"
      "  fi\n"
      "  case ${{COMP_WORDS[1]}} in\n",
      fmt::join(names_of(tables), " "));
  for (const CommandTable& table : tables) {
    StringList files, unknown, lists;
    std::string words;
    for (const Option& option : table.options.entries()) {
      if (option.positional) continue;
      const Value value = value_of(option);
      if (value == Value::kFiles) files.push_back(option.flag);
      if (value == Value::kUnknown) unknown.push_back(option.flag);
      if (value == Value::kWords)
        words += fmt::format("        {}) words={} ;;\n", option.flag, quoted(bare(option.words)));
      if (value == Value::kWords && option.separator != '\0') lists.push_back(option.flag);
    }
    out += fmt::format("    {})\n      options='{}'\n", table.command->name(), fmt::join(flags_of(table.options), " "));
    if (!files.empty()) out += fmt::format("      files=' {} '\n", fmt::join(files, " "));
    if (!unknown.empty()) out += fmt::format("      unknown=' {} '\n", fmt::join(unknown, " "));
    if (!lists.empty()) out += fmt::format("      lists=' {} '\n", fmt::join(lists, " "));
    if (const Option* argument = first_positional(table.options)) {
      if (value_of(*argument) == Value::kWords)
        out += fmt::format("      arguments={}\n", quoted(bare(argument->words)));
      if (value_of(*argument) == Value::kFiles) out += "      arguments=files\n";
    }
    if (!words.empty()) out += "      case $before in\n" + words + "      esac\n";
    out += "      ;;\n";
  }
  out +=
      "    *) return ;;\n"
      "  esac\n"
      "  if [[ -z $words && $files != *\" $before \"* && $unknown != *\" $before \"* && $current != -* ]]; then\n"
      "    if [[ $arguments == files ]]; then files=\" $before \"; else words=$arguments; fi\n"
      "  fi\n"
      "  if [[ -n $words ]]; then\n"
      "    # Of a list the part behind the last comma.\n"
      "    if [[ $lists == *\" $before \"* && $current == *,* ]]; then first=${current%,*},; fi\n"
      "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"${current:${#first}}\")\n"
      "    for i in \"${!COMPREPLY[@]}\"; do COMPREPLY[i]=$first$(printf '%q' \"${COMPREPLY[i]}\"); done\n"
      "  elif [[ $files == *\" $before \"* ]]; then\n"
      "    compopt -o filenames 2> /dev/null\n"
      "    mapfile -t COMPREPLY < <(compgen -f -- \"$current\")\n"
      "  elif [[ $unknown != *\" $before \"* ]]; then\n"
      "    mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$current\")\n"
      "  fi\n"
      "}\n"
      "complete -F _fastweight fastweight\n";
  return out;
}

std::string zsh_completion(const std::vector<CommandTable>& tables) {
  std::string out =
      "#compdef fastweight\n"
      "# Completion of fastweight's command line in zsh; made by 'fastweight completion zsh'.\n\n"
      "_fastweight() {\n"
      "  local context state state_descr line\n"
      "  local -A opt_args\n"
      "  local -a commands\n"
      "  commands=(\n";
  for (const CommandTable& table : tables)
    out += "    " + quoted(table.command->name() + ":" + zsh_text(table.command->summary())) + "\n";
  out +=
      "  )\n"
      "  _arguments -C '(- *)'{-h,--help}'[this page]' '(- *)--version[the version]' '1:command:->command' "
      "'*::argument:->argument' && return\n"
      "  case $state in\n"
      "    (command) _describe command commands ;;\n"
      "    (argument)\n"
      "      case $words[1] in\n";
  for (const CommandTable& table : tables) {
    out += fmt::format("        ({})\n          _arguments \\\n            '(- *)'{{-h,--help}}'[this page]'",
                       table.command->name());
    int position = 0;
    for (const Option& option : table.options.entries()) {
      const std::string value = zsh_value(option);
      StringList specs;
      if (option.positional) {
        specs.push_back(option.is_list() ? "*" + value : fmt::format("{}{}", ++position, value));
      } else if (option.is_switch()) {
        specs.push_back(fmt::format("{}[{}]", option.flag, zsh_text(option.help)));
        specs.push_back(fmt::format("{}[off\\: {}]", option.negative(), zsh_text(option.help)));
      } else {
        specs.push_back(fmt::format("{}{}=[{}]{}", option.is_list() && option.separator == '\0' ? "*" : "", option.flag,
                                    zsh_text(option.help), value));
      }
      for (const std::string& spec : specs) out += " \\\n            " + quoted(spec);
    }
    out += "\n          ;;\n";
  }
  out +=
      "      esac\n"
      "      ;;\n"
      "  esac\n"
      "}\n\n"
      "# From a folder of functions this file is the function; sourced, it says what it completes.\n"
      "if [[ $funcstack[1] == _fastweight ]]; then _fastweight \"$@\"; else compdef _fastweight fastweight; fi\n";
  return out;
}

std::string fish_completion(const std::vector<CommandTable>& tables) {
  const auto text = [](const std::string& s) {
    std::string slashes;
    for (const char c : s) slashes += c == '\\' ? "\\\\" : std::string(1, c);
    return quoted(slashes, "\\'");
  };
  std::string out =
      "# Completion of fastweight's command line in fish; made by 'fastweight completion fish'.\n\n"
      "function __fastweight_is\n"
      "    set -l words (commandline -opc)\n"
      "    test (count $words) -ge 2; and test $words[2] = $argv[1]\n"
      "end\n"
      "function __fastweight_begins\n"
      "    test (count (commandline -opc)) -eq 1\n"
      "end\n\n"
      "complete -c fastweight -f\n"
      "complete -c fastweight -n __fastweight_begins -l help -s h -d 'this page'\n"
      "complete -c fastweight -n __fastweight_begins -l version -d 'the version'\n";
  for (const CommandTable& table : tables) {
    out += fmt::format("complete -c fastweight -n __fastweight_begins -a {} -d {}\n", table.command->name(),
                       text(table.command->summary()));
  }
  for (const CommandTable& table : tables) {
    const std::string begin = fmt::format("complete -c fastweight -n '__fastweight_is {}'", table.command->name());
    out += fmt::format("\n{} -l help -s h -d 'this page'\n", begin);
    for (const Option& option : table.options.entries()) {
      std::string value;
      switch (value_of(option)) {
        case Value::kWords:
          value = fmt::format(" -{} {}", option.positional ? "a" : "xa", text(bare(option.words)));
          break;
        case Value::kFiles:
          value = option.positional ? " -F" : " -rF";
          break;
        case Value::kUnknown:
          value = option.positional ? "" : " -x";
          break;
        case Value::kNone:
          break;
      }
      if (option.positional) {
        out += value.empty() ? "" : begin + value + "\n";
        continue;
      }
      out += fmt::format("{} -l {}{} -d {}\n", begin, option.flag.substr(2), value, text(option.help));
      if (option.is_switch())
        out += fmt::format("{} -l {} -d {}\n", begin, option.negative().substr(2), text("off: " + option.help));
    }
  }
  return out;
}

namespace {

class Completion : public Command {
 public:
  std::string name() const override { return "completion"; }
  std::string summary() const override {
    return "print a script that completes this program's command line in a shell";
  }
  std::string details() const override {
    return "'make install' puts the scripts where the shells look for them. Without it:\n"
           "  bash: source <(fastweight completion bash)\n"
           "  zsh:  source <(fastweight completion zsh)\n"
           "  fish: fastweight completion fish | source";
  }
  void declare(Options& options) override {
    options.positional("SHELL", &shell_, "bash, zsh or fish", true).words = {"bash", "zsh", "fish"};
  }
  int run(Options&) override {
    std::string (*script)(const std::vector<CommandTable>&) = shell_ == "bash"   ? bash_completion
                                                              : shell_ == "zsh"  ? zsh_completion
                                                              : shell_ == "fish" ? fish_completion
                                                                                 : nullptr;
    if (script == nullptr) fail_usage("SHELL: expected bash, zsh or fish, got '{}'", shell_);
    show_page(script(command_tables()));
    return kExitOk;
  }

 private:
  std::string shell_;
};

}  // namespace

std::unique_ptr<Command> completion_command() { return std::make_unique<Completion>(); }

}  // namespace fw::cli
