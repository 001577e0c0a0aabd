// fastweight: trains, evaluates and runs delta-rule language models. Finds the command, runs it, turns errors into exit
// codes.
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/agreement.h"
#include "base/error.h"
#include "base/nearest.h"
#include "base/printable.h"
#include "base/stop.h"
#include "base/thread_pool.h"
#include "base/threads.h"
#include "cli/command.h"
#include "cli/ranks.h"
#include "cli/say.h"
#include "cli/signals.h"
#include "cli/sweep_lm.h"
#include "fastweight/fastweight.h"
#include "report/table.h"

namespace fw::cli {

void declare_threads(Options& options, int64_t& threads) {
  options.add(
      "threads", "N", &threads,
      "threads to compute on; 0: the cores that the process may use, or OMP_NUM_THREADS. Results do not depend on it");
}

void declare_memory_check(Options& options, bool& check) {
  options.add("check_memory", "", &check, "refuse before the work what takes more memory than is available");
}

void apply_threads(int64_t threads) {
  constexpr int64_t kMost = 4096;
  if (threads < 0 || threads > kMost) fail_usage("--threads: expected 0 to {}, got {}", kMost, threads);
  set_num_threads(static_cast<int>(threads));
  if (num_threads() > available_cores()) {
    say_aside("note: {} threads on {} cores that this process may use will be slower than {}{}\n", num_threads(),
              available_cores(), available_cores(), threads > 0 ? "" : " (OMP_NUM_THREADS)");
  }
}

std::vector<std::unique_ptr<Command>> all_commands() {
  std::vector<std::unique_ptr<Command>> commands;
  commands.push_back(train_command());
  commands.push_back(curves_command());
  commands.push_back(report_command());
  commands.push_back(task_command());
  commands.push_back(sweep_command());
  commands.push_back(requests_command());
  commands.push_back(eval_command());
  commands.push_back(analyze_command());
  commands.push_back(generate_command());
  commands.push_back(tokenize_command());
  commands.push_back(rules_command());
  commands.push_back(bench_command());
  commands.push_back(selftest_command());
  commands.push_back(verify_command());
  commands.push_back(import_command());
  commands.push_back(export_command());
  commands.push_back(info_command());
  commands.push_back(completion_command());
  commands.push_back(man_command());
  return commands;
}

std::span<const ExitCode> exit_codes() {
  static constexpr ExitCode kCodes[] = {
      {"0", "success"},
      {"1", "a check failed, a run diverged, a model is not finite, or memory ran out"},
      {"2", "bad option or input, or something that the system refused"},
      {"3", "a defect of this program"},
      {"4", "ended at once by a second signal: nothing was saved since the last checkpoint"},
      {"129, 130, 143", "stopped by SIGHUP, SIGINT (Ctrl-C), SIGTERM, after saving what there was"}};
  return kCodes;
}

namespace {

std::string overview(const std::vector<std::unique_ptr<Command>>& commands) {
  std::string page =
      "fastweight: delta-rule linear attention language models on CPUs and NVIDIA GPUs\n\nUsage: fastweight COMMAND "
      "[arguments] [options]\n\nCommands:\n";
  for (const auto& command : commands)
    page += fmt::format("  {:10}  {}\n", command->name(), wrap(command->summary(), 96, 14));
  page +=
      "\nOptions:\n  --help, -h  this page; 'fastweight COMMAND --help' for one command\n  --version   the version\n"
      "\nTo begin:\n  fastweight train --text my.txt --out my-run\n  fastweight generate my-run --prompt \"Once\"\n"
      "\nExit codes:\n";
  for (const ExitCode& code : exit_codes()) page += fmt::format("  {:<13}  {}\n", code.code, code.meaning);
  return page;
}

// words: of the command line, how many name the command.
int run_command(Command& command, const std::vector<std::string>& args, size_t words, std::string& command_name) {
  command_name = command.name();
  Options options;
  command.declare(options);
  if (!parse_command_line(options, command_name, {args.begin() + static_cast<std::ptrdiff_t>(words), args.end()})) {
    show_page(help_page(options, command_name, command.summary(), command.details(), help_topic(args)));
    return kExitOk;
  }
  if (const Launch launch = launched(); launch.size > 1 && !command.on_ranks()) {
    fail_usage(
        "expected one process, started as rank {} of {}: of all commands only train, and bench --train --device "
        "cuda, run on several ranks",
        launch.rank, launch.size);
  }
  const int code = command.run(options);
  close_ranks();
  return code;
}

int run(const std::vector<std::string>& args, std::string& command_name) {
  const auto commands = all_commands();
  if (args.empty()) {
    say_aside("{}", overview(commands));
    return kExitUsage;
  }
  if (args[0] == "--help" || args[0] == "-h") {
    show_page(overview(commands));
    return kExitOk;
  }
  if (args[0] == "--version") {
    show_page(fmt::format("fastweight {}\n", fw_version()));
    return kExitOk;
  }
  if (args[0] == "sweep" && args.size() > 1 && args[1] == kLanguageModels)
    return run_command(*sweep_lm_command(), args, 2, command_name);
  std::vector<std::string> known;
  for (const auto& command : commands) {
    known.push_back(command->name());
    if (command->name() == args[0]) return run_command(*command, args, 1, command_name);
  }
  const std::string near = nearest(args[0], known);
  fail_usage("unknown command '{}'{}; 'fastweight --help' lists all", args[0],
             near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

int exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
    case ErrorKind::kIo:
      return kExitUsage;
    case ErrorKind::kNumeric:
      return kExitFailed;
    case ErrorKind::kInternal:
      break;
    case ErrorKind::kStopped:
      return stopped_exit_code();
  }
  return kExitInternal;
}

}  // namespace
}  // namespace fw::cli

namespace {

// Never throws, as standard error can be gone too.
int complain(const std::string& command, const std::string& message, int code) {
  std::fflush(stdout);
  const fw::cli::Launch launch = fw::cli::launched();
  const std::string who = launch.size > 1 ? fmt::format(" (rank {} of {})", launch.rank, launch.size) : "";
  const std::string line = fmt::format("fastweight{}{}{}: {}\n", command.empty() ? "" : " ", command, who, message);
  const std::string shown = fw::printable_lines(line);
  std::fwrite(shown.data(), 1, shown.size(), stderr);
  return code;
}

int run_and_report(const std::vector<std::string>& args) {
  using namespace fw::cli;
  std::string command;
  try {
    const int code = run(args, command);
    // Buffered output that could not be written (a full disk after a redirection) must not look like success.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return complain(command,
                      fmt::format("cannot write to standard output: {}", std::generic_category().message(errno)),
                      kExitUsage);
    }
    return code;
  } catch (const fw::Error& error) {
    // What ends all ranks at the same place is said by the first.
    const bool together = error.kind() == fw::ErrorKind::kStopped || error.kind() == fw::ErrorKind::kNumeric;
    const int code =
        together && launched().rank > 0 ? kExitOk : complain(command, error.what(), exit_code(error.kind()));
    // Ranks that disagree end together as well, and each says why: they may speak on different machines.
    if (together || dynamic_cast<const fw::RanksDisagree*>(&error) != nullptr) close_ranks();
    return code;
  } catch (const std::bad_alloc&) {
    return complain(command, "out of memory: give smaller sizes (of a training step batch, length or model)",
                    kExitFailed);
  } catch (const std::length_error&) {
    return complain(command, "a size that follows from the options is more than memory can hold: give smaller numbers",
                    kExitUsage);
    // of files (paths that cannot be, a folder that is gone) and of standard output
  } catch (const std::system_error& error) {
    return complain(command, fmt::format("the system refused: {}", error.what()), kExitUsage);
  } catch (const std::exception& error) {
    return complain(command, std::string("unexpected error: ") + error.what(), kExitInternal);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  return fw::cli::run_apart_from_signals([&] {
    const int code = run_and_report(args);
    // what ends one of several ranks ends those that would wait for it for ever
    if (code != 0) fw::cli::end_all_ranks(code);
    return code;
  });
}
