#include "base/threads.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/thread_pool.h"

namespace fw {
namespace {

class Threads : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_num_threads(GetParam()); }
  void TearDown() override { set_num_threads(0); }
};

TEST_P(Threads, EveryTaskRunsOnceOnAKnownThread) {
  EXPECT_EQ(num_threads(), GetParam());
  for (const int64_t count : {0, 1, 2, 5, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
    std::atomic<int> bad{0};
    parallel_for(count, [&](int64_t i) {
      ++runs[static_cast<size_t>(i)];
      if (!inside_task() || thread_index() < 0 || thread_index() >= num_threads()) ++bad;
    });
    for (const auto& n : runs) ASSERT_EQ(n, 1);
    EXPECT_EQ(bad, 0);
  }
  parallel_for(-3, [](int64_t) { FAIL(); });
  EXPECT_FALSE(inside_task());
}

TEST_P(Threads, ScratchPerThreadIsNotShared) {
  std::vector<int64_t> sums(static_cast<size_t>(num_threads()));
  parallel_for(10000, [&](int64_t i) { sums[static_cast<size_t>(thread_index())] += i; });
  int64_t total = 0;
  for (const int64_t s : sums) total += s;
  EXPECT_EQ(total, int64_t{10000} * 9999 / 2);
}

TEST_P(Threads, ALoopInsideATaskRunsInOrder) {
  std::atomic<int> wrong{0};
  parallel_for(8, [&](int64_t) {
    const int index = thread_index();
    std::vector<int64_t> order;
    parallel_for(20, [&](int64_t j) {
      order.push_back(j);
      if (thread_index() != index) ++wrong;
    });
    for (int64_t j = 0; j < 20; ++j) {
      if (static_cast<int64_t>(order.size()) != 20 || order[static_cast<size_t>(j)] != j) ++wrong;
    }
    if (!inside_task()) ++wrong;
  });
  EXPECT_EQ(wrong, 0);
}

TEST_P(Threads, AnExceptionArrivesAndTheNextLoopWorks) {
  try {
    parallel_for(100, [](int64_t i) {
      if (i == 7) throw std::runtime_error("task 7");
    });
    ADD_FAILURE() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(error.what(), std::string("task 7"));
  }
  EXPECT_FALSE(inside_task());
  std::atomic<int> runs{0};
  parallel_for(100, [&](int64_t) { ++runs; });
  EXPECT_EQ(runs, 100);
}

INSTANTIATE_TEST_SUITE_P(Counts, Threads, ::testing::Values(1, 2, 3, 8));

TEST(ThreadCount, ZeroRestoresTheDefault) {
  const int standard = num_threads();
  EXPECT_GE(standard, 1);
  set_num_threads(standard + 3);
  EXPECT_EQ(num_threads(), standard + 3);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), standard);
}

TEST(ThreadCount, TheDefaultIsWhatTheProcessMayUse) {
  cpu_set_t before, one;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(available_cores(), CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(available_cores(), 1);
  ASSERT_EQ(::sched_setaffinity(0, sizeof before, &before), 0);
}

TEST(ThreadPool, CallersOnSeveralThreadsDoNotWaitForEachOther) {
  set_num_threads(2);
  // Each loop ends only when all are running: one pool for all of them would never come to the second.
  std::atomic<int> running{0}, done{0};
  std::vector<std::thread> callers;
  callers.reserve(3);
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      parallel_for(4, [&](int64_t task) {
        if (task == 0) ++running;
        while (running < 3) std::this_thread::yield();
      });
      ++done;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(done, 3);
  set_num_threads(0);
}

TEST(ThreadPool, LoopsThatFollowEachOtherAtAnyDistanceLoseNothing) {
  set_num_threads(3);
  // Distances on both sides of the time for which a thread looks before it sleeps.
  for (const int microseconds : {0, 3, 50, 400}) {
    for (int i = 0; i < (microseconds == 0 ? 20000 : 200); ++i) {
      std::atomic<int> runs{0};
      parallel_for(3, [&](int64_t) { runs.fetch_add(1, std::memory_order_relaxed); });
      ASSERT_EQ(runs, 3);
      if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    }
  }
  set_num_threads(0);
}

#if !defined(__SANITIZE_THREAD__)  // which ends a process that makes threads after a fork
TEST(ThreadPool, AChildOfForkHasThreadsOfItsOwn) {
  set_num_threads(2);
  parallel_for(8, [](int64_t) {});
  const pid_t child = ::fork();
  if (child == 0) {
    std::atomic<int> runs{0};
    parallel_for(100, [&](int64_t) { ++runs; });
    ::_exit(runs == 100 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  set_num_threads(0);
}
#endif

}  // namespace
}  // namespace fw
