// man: the manual page, made of what --help says.
#include <fmt/format.h>

#include "cli/completion.h"
#include "cli/say.h"
#include "fastweight/fastweight.h"

namespace fw::cli {
namespace {

// Text of which roff takes nothing for a request or an escape. Minus signs are those that can be copied into a shell.
std::string roff(const std::string& text) {
  std::string out;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) out += "\\&";
    switch (c) {
      case '\\':
        out += "\\e";
        break;
      case '-':
        out += "\\-";
        break;
      case '\'':
        out += "\\(aq";
        break;
      case '`':
        out += "\\(ga";
        break;
      case '^':
        out += "\\(ha";
        break;
      case '~':
        out += "\\(ti";
        break;
      default:
        out += c;
    }
    line_begins = c == '\n';
  }
  return out;
}

// As an argument of a request.
std::string argument(const std::string& text) {
  std::string out = "\"";
  for (const char c : roff(text)) out += c == '"' ? "\\(dq" : std::string(1, c);
  return out + "\"";
}

// Paragraphs at empty lines; lines that begin with two spaces (examples) stay as they are.
std::string paragraphs(const std::string& text) {
  std::string out;
  bool fresh = true, example = false;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    const bool is_example = line.starts_with("  ");
    if (example && !is_example) out += ".fi\n.RE\n";
    if (!example && is_example) out += ".PP\n.RS\n.nf\n";
    if (example && !is_example) fresh = true;
    example = is_example;
    if (line.empty()) {
      fresh = true;
      continue;
    }
    if (fresh && !is_example) out += ".PP\n";
    fresh = false;
    out += roff(is_example ? line.substr(2) : line) + "\n";
  }
  return example ? out + ".fi\n.RE\n" : out;
}

std::string options_of(const Options& options) {
  std::string out, heading;
  const auto item = [&out](const std::string& left, const std::string& right) {
    out += ".TP\n.B " + left + "\n" + right + "\n";
  };
  for (const Option& option : options.entries()) {
    if (option.positional) {
      item(roff(option.flag), roff(option.help));
      continue;
    }
    if (option.heading != heading) {
      heading = option.heading;
      const std::string table = option.section.empty() ? "" : fmt::format(" ([{}] in a run file)", option.section);
      out += ".PP\n.I " + argument(heading + table) + "\n";
    }
    std::string left = roff(option.flag), right = roff(option.help);
    if (option.is_switch()) left += fmt::format(", {}", roff(option.negative()));
    if (!option.value_name.empty()) left += fmt::format(" {}", roff(option.value_name));
    if (!option.default_text.empty()) right += roff(fmt::format(" [{}]", option.default_text));
    item(left, right);
  }
  return out;
}

class Man : public Command {
 public:
  std::string name() const override { return "man"; }
  std::string summary() const override { return "print the manual page"; }
  std::string details() const override {
    return "'make install' puts it where man looks for it. Without it:\n  fastweight man > fastweight.1; man -l "
           "fastweight.1";
  }
  void declare(Options&) override {}
  int run(Options&) override {
    show_page(man_page(command_tables()));
    return kExitOk;
  }
};

}  // namespace

std::string man_page(const std::vector<CommandTable>& tables) {
  std::string out = fmt::format(
      ".\\\" Made by 'fastweight man' of the tables of options.\n"
      ".TH FASTWEIGHT 1 \"\" {} \"User Commands\"\n"
      ".SH NAME\nfastweight \\- delta\\-rule linear attention language models\n"
      ".SH SYNOPSIS\n.B fastweight\n.I COMMAND\n[arguments] [options]\n.br\n.B fastweight\n.I COMMAND\n.B "
      "\\-\\-help\n.br\n.B fastweight \\-\\-version\n"
      ".SH DESCRIPTION\nTrains, evaluates, analyses and runs language models of delta\\-rule linear attention on CPUs "
      "and NVIDIA GPUs, and checks and times "
      "the "
      "recurrence.\n"
      "Behind an option stands its default in brackets. A switch is on with its name and off with \\-\\-no\\- before "
      "it.\n"
      "Every option of a run file's table is a key there, with underscores for dashes.\n"
      ".SH COMMANDS\n",
      argument(fmt::format("fastweight {}", fw_version())));
  for (const CommandTable& table : tables) {
    out += ".SS " + argument(usage(table.options, table.command->name())) + "\n";
    std::string summary = table.command->summary();
    out += roff(summary) + ".\n";
    out += options_of(table.options);
    out += paragraphs(table.command->details());
  }
  out += ".SH EXIT STATUS\n";
  for (const ExitCode& code : exit_codes()) out += fmt::format(".TP\n.B {}\n{}\n", roff(code.code), roff(code.meaning));
  return out;
}

std::unique_ptr<Command> man_command() { return std::make_unique<Man>(); }

}  // namespace fw::cli
