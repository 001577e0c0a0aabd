#include "emulation/fiber.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "emulation/races.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves what a call preserves on the stack of the caller, and goes on where the other one saved the same.
extern "C" void fw_emulation_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.hidden fw_emulation_switch
.globl fw_emulation_switch
.type fw_emulation_switch, @function
fw_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fw_emulation_switch, . - fw_emulation_switch
)");
#endif

namespace fw::cuda::emulation {

namespace {

thread_local Fiber* running = nullptr;
thread_local Fiber* left = nullptr;  // the one that switched to the running one

}  // namespace

Fiber::~Fiber() {
  if (!stack_) return;
  races::destroy_fiber(for_races_);
  munmap(stack_, kStackBytes);
}

void Fiber::stands_here() { for_races_ = races::this_fiber(); }

void Fiber::prepare(void (*entry)()) {
  entry_ = entry;
  if (!stack_) {
    void* memory =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("emulation: stack of a fiber");
      std::abort();
    }
    stack_ = static_cast<char*>(memory);
    constexpr std::size_t kGuard = 4096;
    mprotect(stack_, kGuard, PROT_NONE);  // too deep a stack ends the program instead of writing into the next
    bottom_ = stack_ + kGuard;
    bytes_ = kStackBytes - kGuard;
    // Stacks that all end at the same place of a page meet in the same few sets of the cache, as the threads of a block
    // do at every barrier.
    constexpr unsigned kLine = 64, kLines = 64;
    static std::atomic<unsigned> stacks = 0;
    color_ = kLine * (stacks++ % kLines);
    for_races_ = races::create_fiber();
  }
#if defined(__SANITIZE_ADDRESS__)
  // The functions that were under way at its end never returned, and their variables are still marked.
  __asan_unpoison_memory_region(bottom_, bytes_);
#endif
#if defined(__x86_64__)
  auto* top = reinterpret_cast<uint64_t*>(stack_ + kStackBytes - color_);
  *--top = 0;  // where start() would return to; it also aligns the stack as a call does
  *--top = reinterpret_cast<uint64_t>(&Fiber::start);
  for (int i = 0; i < 6; ++i) *--top = 0;
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes - color_;
  context_.uc_link = nullptr;
  makecontext(&context_, &Fiber::start, 0);
#endif
  fake_stack_ = nullptr;
}

void Fiber::start() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &left->bottom_, &left->bytes_);
#endif
  running->entry_();
  std::abort();
}

void Fiber::switch_to(Fiber& other) {
  left = this;
  running = &other;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_stack_, other.bottom_, other.bytes_);
#endif
  races::switch_to(other.for_races_);
#if defined(__x86_64__)
  fw_emulation_switch(&stack_pointer_, other.stack_pointer_);
#else
  swapcontext(&context_, &other.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &left->bottom_, &left->bytes_);
#endif
}

}  // namespace fw::cuda::emulation
