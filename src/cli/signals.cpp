#include "cli/signals.h"

#include <fmt/format.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <initializer_list>
#include <string_view>
#include <system_error>
#include <thread>

#include "base/signal_mask.h"
#include "base/stop.h"
#include "cli/command.h"

namespace fw::cli {
namespace {

std::atomic<int> g_signal{0};
std::atomic<int64_t> g_milliseconds{0};  // when it came
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "a signal handler may only touch lock-free atomics");

// A program such as timeout sends a signal to the process and again to its group: what follows so soon is the same
// wish.
constexpr int64_t kSameWish = 200;

int64_t milliseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1000000;
}

void say_now(std::string_view text) {
  // Nothing can be done here when it cannot be written.
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
}

extern "C" void on_signal(int signal_number) {
  int none = 0;
  if (g_signal.compare_exchange_strong(none, signal_number)) {
    g_milliseconds.store(milliseconds());
    request_stop();
    say_now("\nstopping as soon as what is begun is done (once more: at once)\n");
  } else if (milliseconds() - g_milliseconds.load() >= kSameWish) {
    ::_exit(kExitAtOnce);
  }
}

}  // namespace

int run_apart_from_signals(const std::function<int()>& work) {
  // Ignored, not handled: the write that meets them fails with a reason that is reported like any other.
  for (const int number : {SIGPIPE, SIGXFSZ}) ::signal(number, SIG_IGN);
  int code = kExitInternal;
  std::thread thread;
  try {
    const SignalsBlocked inherited;
    thread = std::thread([&] {
      block_signals();
      const AlternateStack for_reports_of_faults;
      code = work();
    });
  } catch (const std::system_error& error) {
    say_now(fmt::format(
        "fastweight: the system refused a thread: {}; a limit on processes (ulimit -u, pids.max) may be too low\n",
        error.code().message()));
    return kExitUsage;
  }
  thread.join();
  return code;
}

const std::atomic<bool>& stop_on_signal() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  constexpr std::array kWishes = {SIGINT, SIGTERM, SIGHUP};
  sigemptyset(&action.sa_mask);
  for (const int number : kWishes) sigaddset(&action.sa_mask, number);
  for (const int number : kWishes) {
    struct sigaction before {};
    ::sigaction(number, nullptr, &before);
    if (number == SIGHUP && before.sa_handler == SIG_IGN) continue;
    ::sigaction(number, &action, nullptr);
  }
  return stop_flag();
}

int stopped_exit_code() { return 128 + g_signal.load(); }
int stop_signal() { return g_signal.load(); }
void note_signal(int number) {
  int none = 0;
  g_signal.compare_exchange_strong(none, number);
}

}  // namespace fw::cli
