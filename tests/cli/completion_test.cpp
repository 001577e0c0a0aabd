// Completion scripts and the man page: they have every option of every command, as --help lists them; bash's is run by
// bash.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>

#include "cli/program.h"
#include "rule/rule.h"

namespace fw::test {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsSupersetOf;
using Args = std::vector<std::string>;

Args lines_of(const std::string& text) {
  Args lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

Args commands() {
  Args found;
  static const std::regex kCommand("^  ([a-z]+)  .*");
  const std::string overview = run({"--help"}).out;
  std::smatch match;
  for (const std::string& line : lines_of(overview.substr(0, overview.find("\nOptions:")))) {
    if (std::regex_match(line, match, kCommand)) found.push_back(match[1]);
  }
  EXPECT_GE(found.size(), 15u);
  return found;
}

// Every option of a command: what begins a line of its help, and the --no- of those without a value.
std::set<std::string> options_of(const std::string& command) {
  std::set<std::string> found;
  static const std::regex kOption("^  (--[a-z0-9-]+)(, --no-[a-z0-9-]+)?( [A-Z].*?)?( {2,}.*)?$");
  std::smatch match;
  for (const std::string& line : lines_of(run({command, "--help", "all"}).out)) {
    if (!std::regex_match(line, match, kOption)) continue;
    found.insert(match[1]);
    if (match[3].length() == 0) found.insert("--no-" + match[1].str().substr(2));
  }
  return found;
}

std::string script(const std::string& shell) {
  const Outcome outcome = run({"completion", shell});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return outcome.out;
}

// The part of a text from a line to another that begins so.
std::string part(const std::string& text, const std::string& begin, const std::string& end) {
  const size_t at = text.find(begin);
  EXPECT_NE(at, std::string::npos) << begin;
  if (at == std::string::npos) return "";
  return text.substr(at, text.find(end, at + begin.size()) - at);
}

TEST(Completion, EveryOptionOfEveryCommandIsThere) {
  const std::string bash = script("bash"), zsh = script("zsh"), fish = script("fish"), man = run({"man"}).out;
  for (const std::string& command : commands()) {
    std::string of_bash = part(bash, "\n    " + command + ")\n", ";;\n    "),
                of_zsh = part(zsh, "\n        (" + command + ")\n", "\n          ;;\n");
    const std::string of_man = part(man, ".SS \"fastweight " + command, "\n.SS ");
    for (const std::string& option : options_of(command)) {
      if (option == "--help" || option == "--no-help") continue;
      EXPECT_TRUE(std::regex_search(of_bash, std::regex("options='[^']* " + option + "[ ']")))
          << command << " " << option;
      EXPECT_TRUE(std::regex_search(of_zsh, std::regex("'\\*?" + option + "=?\\["))) << command << " " << option;
      EXPECT_THAT(fish, HasSubstr("-n '__fastweight_is " + command + "' -l " + option.substr(2) + " "));
      const std::string in_roff = std::regex_replace(option, std::regex("-"), "\\-");
      EXPECT_TRUE(of_man.find(in_roff + "\n") != std::string::npos || of_man.find(in_roff + " ") != std::string::npos ||
                  of_man.find(in_roff + ",") != std::string::npos)
          << command << " " << option;
    }
  }
  EXPECT_THAT(options_of("train"),
              IsSupersetOf({"--lr", "--tie-word-embeddings", "--no-tie-word-embeddings", "--text", "--threads"}));
  const Outcome other = run({"completion", "csh"});
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, HasSubstr("expected bash, zsh or fish, got 'csh'"));
}

class BashCompletion : public testing::Test {
 protected:
  void SetUp() override {
    spill(folder_ / "script", script("bash"));
    spill(folder_ / "a file", "");
    // What bash does when TAB is pressed: the words in COMP_WORDS, the last of them the one to complete.
    spill(folder_ / "driver",
          "cd \"$1\" && source ./script && complete -p fastweight > /dev/null || exit 1\n"
          "shift; COMP_WORDS=(fastweight \"$@\"); COMP_CWORD=$#\n"
          "_fastweight; printf '%s\\n' \"${COMPREPLY[@]}\"\n");
  }
  Args complete(const Args& words) {
    std::string command = "bash '" + (folder_ / "driver") + "' '" + folder_.path() + "'";
    for (const std::string& word : words) command += " '" + word + "'";
    EXPECT_EQ(std::system((command + " > '" + (folder_ / "out") + "' 2> '" + (folder_ / "err") + "'").c_str()), 0)
        << command;
    EXPECT_EQ(slurp(folder_ / "err"), "") << command;
    const Args found = lines_of(slurp(folder_ / "out"));
    return found == Args{""} ? Args{} : found;
  }
  Folder folder_;
};

TEST_F(BashCompletion, CommandsAndOptions) {
  EXPECT_THAT(complete({""}), IsSupersetOf(commands()));
  EXPECT_THAT(complete({"tr"}), ElementsAre("train"));
  for (const std::string& command : commands()) {
    const Args all = complete({command, "--"});
    std::set<std::string> expected = options_of(command), found(all.begin(), all.end());
    expected.insert("--help");
    expected.erase("--no-help");
    EXPECT_EQ(found, expected) << command;
  }
  EXPECT_THAT(complete({"train", "--sched"}), ElementsAre("--schedule"));
  EXPECT_THAT(complete({"nothing", "--"}), ElementsAre());
}

TEST_F(BashCompletion, ValuesOfOptions) {
  EXPECT_THAT(complete({"train", "--schedule", "c"}), ElementsAre("cosine", "constant"));
  EXPECT_THAT(complete({"train", "--schedule", "="}), Contains("wsd")) << "--schedule=";
  EXPECT_THAT(complete({"train", "--schedule", "=", "li"}), ElementsAre("linear"));
  EXPECT_THAT(complete({"train", "--rule", "gated_deltanet2"}), Contains("gated_deltanet2_neg"));
  EXPECT_THAT(complete({"train", "--gain-factor", "1/sq"}), ElementsAre("1/sqrt\\(t\\)"));
  EXPECT_THAT(complete({"selftest", "--rule", "kda,comb"}), ElementsAre("kda,comba"));
  EXPECT_THAT(complete({"train", "--text", ""}), IsSupersetOf({"a file", "script"}));
  EXPECT_THAT(complete({"generate", "a"}), ElementsAre("a file"));
  EXPECT_THAT(complete({"train", "--lr", ""}), ElementsAre()) << "a number is not known";
  EXPECT_THAT(complete({"completion", ""}), ElementsAre("bash", "zsh", "fish"));
  Args rules = complete({"rules", ""});
  for (const Preset& p : presets()) EXPECT_THAT(rules, Contains(std::string(p.name)));
  EXPECT_THAT(complete({"selftest", ""}), Contains("--json")) << "where no argument is known, options";
}

// The scripts of other shells and the page, by the programs that read them, where they are.
TEST(Completion, OtherProgramsReadThem) {
  const Folder folder;
  spill(folder / "zsh", script("zsh"));
  spill(folder / "fish", script("fish"));
  spill(folder / "page", run({"man"}).out);
  const auto check = [&](const std::string& program, const std::string& command) {
    if (std::system(("command -v " + program + " > /dev/null 2>&1").c_str()) != 0) return;
    EXPECT_EQ(std::system(("cd '" + folder.path() + "' && " + command + " > said 2>&1").c_str()), 0) << command;
    EXPECT_EQ(slurp(folder / "said"), "") << command;
  };
  check("zsh", "zsh -n zsh");
  check("fish", "fish --no-execute fish");
  check("groff", "groff -man -ww -z page");
  check("mandoc", "mandoc -T lint -W error page");
}

TEST(Completion, ManPageSaysWhatHelpSays) {
  const std::string page = run({"man"}).out;
  for (const char* section : {".SH NAME", ".SH SYNOPSIS", ".SH COMMANDS", ".SH EXIT STATUS"})
    EXPECT_THAT(page, HasSubstr(section));
  EXPECT_THAT(page, HasSubstr(".SS \"fastweight eval MODEL [options]\""));
  EXPECT_THAT(page, HasSubstr("learning rate at its peak [0.002]"));
  EXPECT_THAT(page, HasSubstr(".nf\nfastweight generate my\\-run \\-\\-prompt \"To be\""))
      << "examples keep their lines";
  // No line but a request begins with a dot or a quote.
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with(".")) {
      EXPECT_TRUE(std::regex_search(line, std::regex("^\\.(\\\\\"|TH|SH|SS|TP|PP|RS|RE|B|I|br|nf|fi)"))) << line;
    }
    EXPECT_FALSE(line.starts_with("'")) << line;
  }
}

}  // namespace
}  // namespace fw::test
