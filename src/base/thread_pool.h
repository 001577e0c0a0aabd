// Threads that wait for work. Each calling thread has a pool of its own, so that calls from several threads of a
// program do not wait for each other. Its threads are made when they are first needed and end with the calling thread.
//
// Waiting: a thread looks for a few microseconds, then lets others have its core between looks, and soon sleeps. Loops
// of a model follow each other so closely that sleeping at once would cost more than it saves. But a wait without bound
// (libgomp's is milliseconds) takes the core from whoever else computes on it. Two programs beside each other then
// hardly move. OMP_WAIT_POLICY=passive, or more threads than cores, means to sleep at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace fw {

// Cores that the calling process may use: those of its affinity mask.
int available_cores();

class ThreadPool {
 public:
  static ThreadPool& of_this_thread();

  ThreadPool() = default;
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // body(0) on the calling thread, body(1) to body(threads - 1) on others; returns when all have returned. body must
  // not throw. Signals are blocked in the pool's threads (base/signal_mask.h). Throws Error(kIo) when a thread cannot
  // be made.
  void run(int threads, const std::function<void(int)>& body);

 private:
  struct alignas(64) Worker {  // a cache line each
    std::atomic<uint32_t> calls{0};
    std::thread thread;
  };

  void grow(int workers);
  void work(Worker& self, int index);
  void abandon_after_fork();

  std::vector<std::unique_ptr<Worker>> workers_;
  const std::function<void(int)>* body_ = nullptr;  // null: the worker that is called ends
  std::atomic<bool> spin_{true};
  alignas(64) std::atomic<uint32_t> left_{0};  // workers that have not returned
  int generation_ = 0;                         // of the process: a child of fork has none of the threads
};

}  // namespace fw
