// Signals and threads that compute. While a kernel that oneDNN generated runs, the stack pointer can stand in memory
// that is not the thread's stack; the kernel of the operating system would write a handler's frame there, over the
// heap. So no signal is delivered to a thread that computes. The threads of parallel_for block all of them. The
// program's main thread computes nothing and takes them (src/cli/signals.h). A caller of the library has them held back
// while its thread works in parallel_for. Faults of the thread itself (SIGSEGV and the like) cannot be blocked with
// sense and are not; for handlers of others that report them (SA_ONSTACK) the threads that are ours have an alternate
// stack.
#pragma once

#include <signal.h>

#include <memory>

namespace fw {

// In the calling thread and those that it makes, for good.
void block_signals();

// While it lives; free of cost in a thread that has them blocked for good.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  bool restore_ = false;
  sigset_t before_{};
};

// The calling thread has an alternate stack for handlers while it lives; one that it had before (a sanitizer's) remains
// in use.
class AlternateStack {
 public:
  AlternateStack();
  ~AlternateStack();
  AlternateStack(const AlternateStack&) = delete;
  AlternateStack& operator=(const AlternateStack&) = delete;

 private:
  std::unique_ptr<char[]> memory_;  // null: not ours
};

}  // namespace fw
