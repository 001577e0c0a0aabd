#include "cli/program.h"

#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

extern char** environ;

namespace fw::test {
namespace {

std::string new_folder() {
  std::string path = (std::filesystem::temp_directory_path() / "fw-cli-test-XXXXXX").string();
  if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + path);
  return path;
}

}  // namespace

Program::Program(const std::vector<std::string>& args, const std::string& path_variable, const std::string& input,
                 const std::vector<std::string>& launcher, const std::string& program)
    : folder_(new_folder()) {
  std::vector<std::string> all = launcher;
  all.push_back(program.empty() ? std::string(FW_BINARY_DIR) + "/fastweight" : program);
  all.insert(all.end(), args.begin(), args.end());
  std::vector<char*> argv, environment;
  for (std::string& a : all) argv.push_back(a.data());
  argv.push_back(nullptr);
  std::string path = "PATH=" + path_variable;
  for (char** e = environ; *e != nullptr; ++e) {
    const bool is_path = std::string_view(*e).starts_with("PATH=");
    environment.push_back(is_path && !path_variable.empty() ? path.data() : *e);
  }
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, input.c_str(), O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, (folder_ + "/out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, (folder_ + "/err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  // As a shell starts a program: tests that run under nohup would hand its ignored SIGHUP on, and wait for ever for
  // what the signal does.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t all_signals, none;
  sigfillset(&all_signals);
  sigemptyset(&none);
  posix_spawnattr_setsigdefault(&attributes, &all_signals);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  const int error = ::posix_spawn(&pid_, argv[0], &actions, &attributes, argv.data(), environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + all[0]);
}

Program::~Program() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void Program::signal(int number) const { ::kill(pid_, number); }

std::string Program::out() const { return slurp(folder_ + "/out"); }

Outcome Program::wait() {
  int status = 0;
  rusage usage = {};
  ::wait4(pid_, &status, 0, &usage);
  pid_ = -1;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), slurp(folder_ + "/out"),
          slurp(folder_ + "/err"), usage.ru_maxrss};
}

Outcome run(const std::vector<std::string>& args) { return Program(args).wait(); }

Outcome run_with_input(const std::vector<std::string>& args, const std::string& input) {
  const Folder folder;
  spill(folder / "input", input);
  return Program(args, "", folder / "input").wait();
}

std::string run_on_terminal(const std::vector<std::string>& args, const std::vector<std::string>& variables) {
  std::vector<std::string> all{std::string(FW_BINARY_DIR) + "/fastweight"}, strings = variables;
  all.insert(all.end(), args.begin(), args.end());
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string_view entry = *e;
    if (!entry.starts_with("TERM=") && !entry.starts_with("NO_COLOR=")) strings.emplace_back(entry);
  }
  std::vector<char*> argv, environment;
  for (std::string& a : all) argv.push_back(a.data());
  for (std::string& s : strings) environment.push_back(s.data());
  argv.push_back(nullptr);
  environment.push_back(nullptr);
  int terminal = -1;
  winsize size = {24, 80, 0, 0};
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (child < 0) throw std::runtime_error("no terminal");
  if (child == 0) {
    ::execve(argv[0], argv.data(), environment.data());
    ::_exit(127);
  }
  std::string text;
  char piece[4096];
  // an error at the end
  for (ssize_t n = 0; (n = ::read(terminal, piece, sizeof piece)) > 0;) text.append(piece, static_cast<size_t>(n));
  ::close(terminal);
  ::waitpid(child, nullptr, 0);
  return text;
}

Folder::Folder() : path_(new_folder()) {}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void spill(const std::string& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary);
  out << content;
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

std::string case_path(const std::string& name) { return std::string(FW_SOURCE_DIR) + "/tests/cli/cases/" + name; }

void copy_case(const std::string& name, const std::string& to) {
  std::filesystem::copy(case_path(name), to);
  for (const auto& entry : std::filesystem::directory_iterator(to))
    std::filesystem::permissions(entry, std::filesystem::perms::owner_write, std::filesystem::perm_options::add);
}

std::string small_text() {
  const char* words[] = {"the",   "state", "decays", "and",     "a",      "key",
                         "reads", "what",  "was",    "written", "before", "it"};
  std::string text;
  unsigned x = 12345;
  for (int i = 0; i < 1500; ++i) {
    x = x * 1664525u + 1013904223u;
    text += words[(x >> 16) % 12];
    text += (x >> 24) % 9 == 0 ? '\n' : ' ';
  }
  return text + "\n";
}

std::vector<std::string> tiny_train(const std::string& text, const std::string& out) {
  return {"train", "--text",      text, "--out",         out,  "--steps",
          "6",     "--batch",     "2",  "--length",      "32", "--warmup",
          "2",     "--log-every", "2",  "--hidden-size", "16", "--num-hidden-layers",
          "1",     "--num-heads", "2",  "--head-dim",    "8",  "--threads",
          "1"};
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace fw::test
