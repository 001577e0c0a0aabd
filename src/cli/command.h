// A command of the program: declares its options, then runs. One file per command (train.cpp, eval.cpp, ...).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cli/options.h"

namespace fw::cli {

// What the program returns to its caller.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;    // a check failed, a run diverged
inline constexpr int kExitUsage = 2;     // bad option, configuration or input; the system refused a file
inline constexpr int kExitInternal = 3;  // a defect of this program
inline constexpr int kExitAtOnce = 4;    // a second signal: nothing was saved since the last checkpoint
// 128 + signal: stopped after saving what there was (cli/signals.h)

class Command {
 public:
  virtual ~Command() = default;
  virtual std::string name() const = 0;
  virtual std::string summary() const = 0;            // one line, for the list of commands
  virtual std::string details() const { return {}; }  // below the options in its help
  virtual void declare(Options& options) = 0;
  // Whether it can be started as several ranks (cli/ranks.h).
  virtual bool on_ranks() const { return false; }
  // Returns the exit code; throws Error. `options` says what was given, and run files are loaded into it.
  virtual int run(Options& options) = 0;
};

std::unique_ptr<Command> train_command();
std::unique_ptr<Command> curves_command();
std::unique_ptr<Command> report_command();
std::unique_ptr<Command> task_command();
std::unique_ptr<Command> sweep_command();
std::unique_ptr<Command> eval_command();
std::unique_ptr<Command> requests_command();
std::unique_ptr<Command> analyze_command();
std::unique_ptr<Command> generate_command();
std::unique_ptr<Command> bench_command();
std::unique_ptr<Command> info_command();
std::unique_ptr<Command> rules_command();
std::unique_ptr<Command> selftest_command();
std::unique_ptr<Command> tokenize_command();
std::unique_ptr<Command> verify_command();
std::unique_ptr<Command> import_command();
std::unique_ptr<Command> export_command();
std::unique_ptr<Command> completion_command();
std::unique_ptr<Command> man_command();

// All of them, in the order of the overview.
std::vector<std::unique_ptr<Command>> all_commands();

// What the program's exit codes mean, for overview and man page.
struct ExitCode {
  const char *code, *meaning;
};
std::span<const ExitCode> exit_codes();

// --threads, shared by the commands that compute: declare it, then apply it.
void declare_threads(Options& options, int64_t& threads);
void apply_threads(int64_t threads);

// --check-memory, shared by the commands that may take much; base/memory.h has what it turns off.
void declare_memory_check(Options& options, bool& check);

}  // namespace fw::cli
