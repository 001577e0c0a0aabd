// Fibers: stacks on one thread of the system, of which one runs until it switches to another.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace fw::cuda::emulation {

class Fiber {
 public:
  static constexpr std::size_t kStackBytes = 512 * 1024;  // address space; pages come when touched

  Fiber() = default;  // stands for the stack of the thread itself, after stands_here()
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  void stands_here();
  // The next switch to it calls entry(), which must not return. Keeps the stack of the last time.
  void prepare(void (*entry)());
  // The caller goes on when somebody switches to it again.
  void switch_to(Fiber& other);

 private:
  static void start();

  void (*entry_)() = nullptr;
  char* stack_ = nullptr;
  std::size_t color_ = 0;  // bytes of it that are left alone, at its upper end
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_{};
#endif
  // For AddressSanitizer, which has to know the stack.
  void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  void* for_races_ = nullptr;  // what ThreadSanitizer calls it
};

}  // namespace fw::cuda::emulation
