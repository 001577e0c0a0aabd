#include "base/threads.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "base/signal_mask.h"
#include "base/thread_pool.h"

#if !defined(FW_STD_THREADS)
#include <omp.h>
#endif

namespace fw {
namespace {

thread_local int t_index = 0;
thread_local bool t_inside = false;
thread_local int t_of_call = 0;  // of a ThreadsOfCall; 0: none
std::atomic<int> g_threads{0};

int default_threads() {
#if defined(FW_STD_THREADS)
  static const int threads = available_cores();
#else
  // OMP_NUM_THREADS as libgomp read it, else the cores that the process may use.
  static const int threads = std::max(1, omp_get_max_threads());
#endif
  return threads;
}

// While it lives oneDNN and OpenBLAS open no threads of their own in calls from this thread; it may be a caller's,
// whose number is put back.
class OneLibraryThread {
 public:
#if defined(FW_STD_THREADS)
  // Nothing to say it with: the sanitizers' presets set OMP_NUM_THREADS. A defaulted one would leave a variable that
  // nothing used.
  OneLibraryThread() {}  // NOLINT(modernize-use-equals-default)
#else
  OneLibraryThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneLibraryThread() { omp_set_num_threads(before_); }
  OneLibraryThread(const OneLibraryThread&) = delete;
  OneLibraryThread& operator=(const OneLibraryThread&) = delete;

 private:
  int before_;
#endif
};

// Runs tasks until none is left; keeps the first exception. Every thread has a share of neighbouring tasks and helps
// the others when it is done with it. So a task that comes again (a head of the next token) finds its memory in the
// cache of the core that had it last.
class TaskQueue {
 public:
  TaskQueue(int64_t count, int threads, const std::function<void(int64_t)>& body)
      : body_(body), shares_(static_cast<size_t>(threads)) {
    for (int64_t i = 0; i < threads; ++i) {
      shares_[static_cast<size_t>(i)].next = count * i / threads;
      shares_[static_cast<size_t>(i)].end = count * (i + 1) / threads;
    }
  }

  void work(int index) {
    const bool was_inside = t_inside;
    const int old_index = t_index;
    t_inside = true;
    t_index = index;
    for (size_t i = 0; i < shares_.size(); ++i) {
      Share& share = shares_[(static_cast<size_t>(index) + i) % shares_.size()];
      for (int64_t task = share.next.fetch_add(1); task < share.end; task = share.next.fetch_add(1)) run(task);
    }
    t_inside = was_inside;
    t_index = old_index;
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct alignas(64) Share {  // a cache line each
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void run(int64_t task) {
    try {
      body_(task);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
      for (Share& share : shares_) share.next.store(share.end);
    }
  }

  const std::function<void(int64_t)>& body_;
  std::vector<Share> shares_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

int num_threads() {
  if (t_of_call > 0) return t_of_call;
  const int n = g_threads.load();
  return n > 0 ? n : default_threads();
}

void set_num_threads(int n) { g_threads.store(std::max(0, n)); }

ThreadsOfCall::ThreadsOfCall(int planned) : before_(t_of_call) {
  t_of_call = std::max(1, std::min(planned, num_threads()));
}
ThreadsOfCall::~ThreadsOfCall() { t_of_call = before_; }

int thread_index() { return t_index; }

bool inside_task() { return t_inside; }

void parallel_for(int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 0) return;
  if (t_inside) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  const int n = static_cast<int>(std::min<int64_t>(num_threads(), count));
  TaskQueue queue(count, n, body);
  const SignalsBlocked while_this_thread_computes;
  const OneLibraryThread libraries;
  ThreadPool::of_this_thread().run(n, [&queue](int index) { queue.work(index); });
  queue.rethrow();
}

}  // namespace fw
