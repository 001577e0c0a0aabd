// Signals and threads that compute: no handler may run while generated code has the stack pointer in the heap.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/gemm.h"
#include "base/signal_mask.h"
#include "base/threads.h"

namespace fw {
namespace {

bool blocked(int number) {
  sigset_t now;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &now);
  return sigismember(&now, number) == 1;
}

TEST(Signals, NoneReachesAThreadThatComputesAndTheCallersAreAsBefore) {
  set_num_threads(3);
  ASSERT_FALSE(blocked(SIGPROF));
  std::atomic<int> open{0}, faults{0};
  parallel_for(300, [&](int64_t) {
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPROF, SIGALRM, SIGUSR1, SIGCHLD}) open += !blocked(number);
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) faults += blocked(number);
  });
  EXPECT_EQ(open, 0);
  EXPECT_EQ(faults, 0);
  EXPECT_FALSE(blocked(SIGPROF));
  EXPECT_FALSE(blocked(SIGINT));
  set_num_threads(0);
}

TEST(Signals, AThreadThatBlocksThemForGoodKeepsThem) {
  std::thread([] {
    block_signals();
    { const SignalsBlocked nothing_to_do; }
    EXPECT_TRUE(blocked(SIGINT));
  }).join();
  EXPECT_FALSE(blocked(SIGINT));
}

std::atomic<int> g_ticks{0};
extern "C" void on_tick(int) { g_ticks.fetch_add(1); }

// A profiler's timer, with a handler on whatever stack the thread is on. Before signals were held back, the heap was
// overwritten within a few dozen of them, and the products were wrong or the process died.
TEST(Signals, AProfilersTimerDamagesNothing) {
  constexpr int64_t kSize = 384;
  constexpr int kTicks = 400;
  const std::vector<float> a(kSize * kSize, 1.0F), b(kSize * kSize, 2.0F);
  struct sigaction action {
  }, before{};
  action.sa_handler = on_tick;
  action.sa_flags = SA_RESTART;
  ASSERT_EQ(::sigaction(SIGALRM, &action, &before), 0);
  const itimerval every{{0, 150}, {0, 150}}, never{};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &every, nullptr), 0);
  set_num_threads(2);
  int wrong = 0;
  for (int i = 0; g_ticks < kTicks && i < 200000; ++i) {
    std::vector<float> c(kSize * kSize);  // new memory each time, so that a heap that is damaged is noticed
    gemm_parallel(Trans::kNo, Trans::kNo, kSize, kSize, kSize, 1.0F, a.data(), kSize, b.data(), kSize, 0.0F, c.data(),
                  kSize);
    for (const float x : c) wrong += x != 2.0F * kSize;
  }
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  set_num_threads(0);
  EXPECT_EQ(wrong, 0);
  EXPECT_GE(g_ticks, kTicks);
}

std::atomic<const char*> g_frame{nullptr};
extern "C" void on_fault(int) {
  // a local variable would be elsewhere with AddressSanitizer
  g_frame.store(static_cast<const char*>(__builtin_frame_address(0)));
}

// As a crash reporter's handler does.
TEST(Signals, AHandlerOfFaultsHasAStackOfItsOwnInThreadsOfThePool) {
  struct sigaction action {
  }, before{};
  action.sa_handler = on_fault;
  action.sa_flags = SA_ONSTACK;
  ASSERT_EQ(::sigaction(SIGTRAP, &action, &before), 0);
  set_num_threads(2);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> inside{0}, elsewhere{0};
  parallel_for(2, [&](int64_t) {
    // Both tasks wait for each other, so that one of them is in the pool's thread.
    ++inside;
    while (inside < 2) std::this_thread::yield();
    if (std::this_thread::get_id() == caller) return;
    stack_t stack{};
    ::sigaltstack(nullptr, &stack);
    ::raise(SIGTRAP);
    const char* const begin = static_cast<const char*>(stack.ss_sp);
    elsewhere += (stack.ss_flags & SS_DISABLE) == 0 && g_frame >= begin && g_frame < begin + stack.ss_size;
  });
  ::sigaction(SIGTRAP, &before, nullptr);
  set_num_threads(0);
  EXPECT_EQ(elsewhere, 1);
}

}  // namespace
}  // namespace fw
