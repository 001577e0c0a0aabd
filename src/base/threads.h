// Threads: one parallel loop. Work is cut into tasks by the caller, never by the number of threads, so that results
// do not depend on it. Inside a task everything (oneDNN and OpenBLAS too) runs on one thread.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>

namespace fw {

// Inside a ThreadsOfCall the number that it holds.
int num_threads();
// n >= 1; 0 restores the default (the cores of the process's affinity mask, or OMP_NUM_THREADS).
void set_num_threads(int n);

// While it lives, loops of the calling thread use the number of threads that there was when it was made, and at most
// `planned`. So what is sized by a number of threads stays right whatever other threads set meanwhile.
class ThreadsOfCall {
 public:
  explicit ThreadsOfCall(int planned);
  ~ThreadsOfCall();
  ThreadsOfCall(const ThreadsOfCall&) = delete;
  ThreadsOfCall& operator=(const ThreadsOfCall&) = delete;

 private:
  int before_;
};

// Calls body(i) once for every i in [0, count), in any order, on up to num_threads() threads. A call from inside a
// task runs in order on the calling thread. The first exception of a task is rethrown here after all have ended.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

// Index of the calling thread in the innermost parallel_for, 0 <= index < num_threads(); for per-thread scratch.
int thread_index();

// Whether the caller runs inside a parallel_for.
bool inside_task();

}  // namespace fw
