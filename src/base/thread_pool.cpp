#include "base/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "base/signal_mask.h"

#if !defined(FW_STD_THREADS)
#include <omp.h>
#endif

namespace fw {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLooksBetweenTimes = 32;
constexpr auto kBusy = std::chrono::microseconds(10);  // looking only
// and then letting others run between looks, until so long after the beginning
constexpr auto kPolite = std::chrono::microseconds(200);

std::atomic<int> g_generation{0};
// One's own handler instead of a comparison of process numbers, which would be a system call a loop.
[[maybe_unused]] const int g_registered = ::pthread_atfork(nullptr, nullptr, [] { g_generation.fetch_add(1); });

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool passive() {
  static const bool value = [] {
    const char* policy = std::getenv("OMP_WAIT_POLICY");
    return policy != nullptr && (std::string_view(policy) == "passive" || std::string_view(policy) == "PASSIVE");
  }();
  return value;
}

// Until `value` is not `old`.
void await(const std::atomic<uint32_t>& value, uint32_t old, bool spin) {
  if (spin) {
    const auto begin = Clock::now();
    for (auto now = begin; now - begin < kPolite; now = Clock::now()) {
      if (now - begin < kBusy) {
        for (int i = 0; i < kLooksBetweenTimes; ++i) {
          if (value.load(std::memory_order_acquire) != old) return;
          relax();
        }
      } else {
        if (value.load(std::memory_order_acquire) != old) return;
        ::sched_yield();
      }
    }
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

int available_cores() {
  // Machines with more cores than a fixed set has places answer EINVAL.
  for (int cpus = 1024; cpus <= (1 << 20); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(cpus));
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(cpus));
    const bool known = ::sched_getaffinity(0, bytes, set) == 0;
    const int count = known ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (known) return count > 0 ? count : 1;
  }
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

ThreadPool& ThreadPool::of_this_thread() {
  thread_local ThreadPool pool;
  return pool;
}

ThreadPool::~ThreadPool() {
  abandon_after_fork();
  body_ = nullptr;
  for (const auto& worker : workers_) {
    worker->calls.fetch_add(1, std::memory_order_release);
    worker->calls.notify_one();
  }
  for (const auto& worker : workers_) worker->thread.join();
}

void ThreadPool::abandon_after_fork() {
  if (generation_ == g_generation.load(std::memory_order_relaxed)) return;
  generation_ = g_generation.load();
  for (auto& worker : workers_) static_cast<void>(worker.release());  // its thread is not here to be joined
  workers_.clear();
}

void ThreadPool::grow(int workers) {
  spin_.store(!passive() && workers + 1 <= available_cores(), std::memory_order_relaxed);
  const SignalsBlocked from_their_first_moment;
  while (static_cast<int>(workers_.size()) < workers) {
    auto worker = std::make_unique<Worker>();
    Worker& self = *worker;
    const int index = static_cast<int>(workers_.size()) + 1;
    workers_.push_back(std::move(worker));
    try {
      self.thread = std::thread([this, &self, index] { work(self, index); });
    } catch (const std::system_error& error) {
      workers_.pop_back();
      fail_io("cannot start thread {} of {}: {}; use fewer threads (--threads)", index + 1, workers + 1,
              error.code().message());
    }
  }
}

void ThreadPool::work(Worker& self, int index) {
  block_signals();
  const AlternateStack for_reports_of_faults;
#if !defined(FW_STD_THREADS)
  omp_set_num_threads(1);  // what oneDNN and OpenBLAS go by
#endif
  for (uint32_t seen = 0;;) {
    await(self.calls, seen, spin_.load(std::memory_order_relaxed));
    ++seen;
    if (body_ == nullptr) return;
    (*body_)(index);
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
  }
}

void ThreadPool::run(int threads, const std::function<void(int)>& body) {
  abandon_after_fork();
  const int workers = threads - 1;
  if (static_cast<int>(workers_.size()) < workers) grow(workers);
  body_ = &body;
  left_.store(static_cast<uint32_t>(workers), std::memory_order_relaxed);
  for (int i = 0; i < workers; ++i) {
    std::atomic<uint32_t>& calls = workers_[static_cast<size_t>(i)]->calls;
    calls.fetch_add(1, std::memory_order_release);
    calls.notify_one();
  }
  body(0);
  for (uint32_t left = left_.load(std::memory_order_acquire); left != 0; left = left_.load(std::memory_order_acquire))
    await(left_, left, spin_.load());
}

}  // namespace fw
