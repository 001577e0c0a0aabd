#include "report/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <initializer_list>

#include "base/error.h"

extern char** environ;

namespace fw {
namespace {

struct Pipe {
  int read_end = -1, write_end = -1;
  Pipe() {
    std::array<int, 2> fds{};
    if (::pipe2(fds.data(), O_CLOEXEC) != 0) fail_io("cannot make a pipe: {}", std::strerror(errno));
    read_end = fds[0];
    write_end = fds[1];
  }
  ~Pipe() {
    close_read();
    close_write();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_read() {
    if (read_end >= 0) ::close(read_end);
    read_end = -1;
  }
  void close_write() {
    if (write_end >= 0) ::close(write_end);
    write_end = -1;
  }
};

// Writing to a program that has ended raises SIGPIPE; it is blocked in this thread, and taken away if it came.
class BlockSigpipe {
 public:
  BlockSigpipe() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &set_, &before_);
  }
  ~BlockSigpipe() {
    if (sigismember(&before_, SIGPIPE) == 0) {
      const timespec none{0, 0};
      while (::sigtimedwait(&set_, nullptr, &none) > 0) {
      }
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockSigpipe(const BlockSigpipe&) = delete;
  BlockSigpipe& operator=(const BlockSigpipe&) = delete;

 private:
  sigset_t set_{}, before_{};
};

// What can be read of it now, up to `most` bytes in all; the end closes it.
void take(Pipe& from, std::string& text, size_t most) {
  std::array<char, 65536> buffer{};
  const ssize_t n = ::read(from.read_end, buffer.data(), buffer.size());
  if (n < 0 && errno == EINTR) return;
  if (n <= 0) return from.close_read();
  if (text.size() < most) text.append(buffer.data(), std::min(static_cast<size_t>(n), most - text.size()));
}

void exchange(Pipe& to_child, Pipe& output, Pipe& errors, std::string_view input, ProcessResult& result) {
  constexpr size_t kOutput = size_t{256} << 20, kErrors = size_t{64} << 10;
  if (input.empty()) to_child.close_write();
  // Non-blocking, so that a program that talks before it has read everything cannot block us.
  if (to_child.write_end >= 0) ::fcntl(to_child.write_end, F_SETFL, O_NONBLOCK);
  while (output.read_end >= 0 || errors.read_end >= 0) {
    // poll() passes over descriptors that are negative.
    std::array<pollfd, 3> fds{pollfd{output.read_end, POLLIN, 0}, pollfd{errors.read_end, POLLIN, 0},
                              pollfd{to_child.write_end, POLLOUT, 0}};
    if (::poll(fds.data(), fds.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return;
    }
    if (fds[2].revents != 0) {
      const ssize_t n = ::write(to_child.write_end, input.data(), input.size());
      if (n > 0) input.remove_prefix(static_cast<size_t>(n));
      if (input.empty() || (n < 0 && errno != EAGAIN && errno != EINTR)) to_child.close_write();
    }
    if (fds[0].revents != 0) take(output, result.output, kOutput);
    if (fds[1].revents != 0) take(errors, result.errors, kErrors);
  }
}

}  // namespace

ProcessResult run_process(const std::vector<std::string>& argv, std::string_view input) {
  ProcessResult result;
  std::vector<char*> args;
  args.reserve(argv.size() + 1);
  for (const std::string& a : argv) args.push_back(const_cast<char*>(a.c_str()));
  args.push_back(nullptr);

  Pipe to_child, output, errors;
  const BlockSigpipe sigpipe;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to_child.read_end, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output.write_end, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors.write_end, STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // The other program knows nothing of the signals that this thread blocks and this program ignores.
  sigset_t none, usual;
  sigemptyset(&none);
  sigemptyset(&usual);
  for (const int number : {SIGPIPE, SIGXFSZ}) sigaddset(&usual, number);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &usual);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, args[0], &actions, &attributes, args.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    result.errors = std::strerror(error);
    return result;
  }
  result.started = true;
  to_child.close_read();
  output.close_write();
  errors.close_write();
  exchange(to_child, output, errors, input, result);
  to_child.close_write();
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace fw
