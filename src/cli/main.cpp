// fastweight: trains, evaluates and runs delta-rule language models. Finds the command, runs it, turns errors into exit codes.
#include <fmt/format.h>

#include <cstdio>
#include <new>

#include "base/error.h"
#include "base/nearest.h"
#include "base/threads.h"
#include "cli/command.h"
#include "fastweight/fastweight.h"
#include "report/table.h"

namespace fw::cli {

void declare_threads(Options& options, int64_t& threads) {
  options.add("threads", "N", &threads, "threads to compute on; 0: all cores, or OMP_NUM_THREADS. Results do not depend on it");
}

void apply_threads(int64_t threads) {
  constexpr int64_t kMost = 4096;
  if (threads < 0 || threads > kMost) fail_usage("--threads: expected 0 to {}, got {}", kMost, threads);
  set_num_threads(static_cast<int>(threads));
}

std::vector<std::unique_ptr<Command>> all_commands() {
  std::vector<std::unique_ptr<Command>> commands;
  commands.push_back(train_command());
  commands.push_back(curves_command());
  commands.push_back(task_command());
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
  static constexpr ExitCode kCodes[] = {{"0", "success"},
                                        {"1", "a check failed or a run diverged"},
                                        {"2", "bad option or input, or a file that the system refused"},
                                        {"3", "a defect of this program"},
                                        {"130", "interrupted, after the checkpoint was written"}};
  return kCodes;
}

namespace {

std::string overview(const std::vector<std::unique_ptr<Command>>& commands) {
  std::string page = "fastweight: delta-rule linear attention language models on the CPU\n\nUsage: fastweight COMMAND [arguments] [options]\n\nCommands:\n";
  for (const auto& command : commands) page += fmt::format("  {:10}  {}\n", command->name(), wrap(command->summary(), 96, 14));
  page +=
      "\nOptions:\n  --help, -h  this page; 'fastweight COMMAND --help' for one command\n  --version   the version\n"
      "\nTo begin:\n  fastweight train --text my.txt --out my-run\n  fastweight generate my-run --prompt \"Once\"\n"
      "\nExit codes:\n";
  for (const ExitCode& code : exit_codes()) page += fmt::format("  {:<10}  {}\n", code.code, code.meaning);
  return page;
}

int run(const std::vector<std::string>& args, std::string& command_name) {
  const auto commands = all_commands();
  if (args.empty()) {
    fmt::print(stderr, "{}", overview(commands));
    return kExitUsage;
  }
  if (args[0] == "--help" || args[0] == "-h") {
    fmt::print("{}", overview(commands));
    return kExitOk;
  }
  if (args[0] == "--version") {
    fmt::print("fastweight {}\n", fw_version());
    return kExitOk;
  }
  std::vector<std::string> known;
  for (const auto& command : commands) {
    known.push_back(command->name());
    if (command->name() != args[0]) continue;
    command_name = command->name();
    Options options;
    command->declare(options);
    if (!parse_command_line(options, command->name(), {args.begin() + 1, args.end()})) {
      fmt::print("{}", help_page(options, command->name(), command->summary(), command->details()));
      return kExitOk;
    }
    return command->run(options);
  }
  const std::string near = nearest(args[0], known);
  fail_usage("unknown command '{}'{}; 'fastweight --help' lists all", args[0], near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
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
  }
  return kExitInternal;
}

}  // namespace
}  // namespace fw::cli

int main(int argc, char** argv) {
  using namespace fw::cli;
  std::string command;
  const auto complain = [&](const std::string& message, int code) {
    std::fflush(stdout);
    fmt::print(stderr, "fastweight{}{}: {}\n", command.empty() ? "" : " ", command, message);
    return code;
  };
  try {
    const int code = run({argv + 1, argv + argc}, command);
    // Buffered output that could not be written (a full disk behind a redirection) must not look like success.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return complain("cannot write to standard output", kExitUsage);
    return code;
  } catch (const fw::Error& error) {
    return complain(error.what(), exit_code(error.kind()));
  } catch (const std::bad_alloc&) {
    return complain("out of memory: try a smaller batch, length or model", kExitFailed);
  } catch (const std::exception& error) {
    return complain(std::string("unexpected error: ") + error.what(), kExitInternal);
  }
}
