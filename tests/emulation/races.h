// What ThreadSanitizer has to know of a block (builds with -fsanitize=thread): each thread is one of its fibers, and only barriers order
// what two threads do. A kernel's own accesses are instrumented as any program's; the emulator is not, and says here what the operations
// that it stands for read and write, and what waits for what:
//   sync_warp, sync_threads, named barriers   what came before in each thread that arrives, before what follows in each that waits
//   mbarriers                                 the same for a phase: arrivals, and bulk loads whose bytes it expects
//   ldmatrix, stmatrix                        a row is touched by the lane that brings its address
//   wgmma                                     a part of the operands by each thread, when it is issued and again when it is waited for
//   bulk stores                               shared memory is read when issued and again when waited for
// Shuffles and products of a warp order nothing: on the device they promise nothing about memory. Blocks of a grid are not ordered either
// (but for atomics), kernels one after the other are. Elsewhere all of this is nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#if defined(FW_EMULATION_RACES)
// NOLINTBEGIN(bugprone-reserved-identifier): the names of ThreadSanitizer's interface
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
}
// NOLINTEND(bugprone-reserved-identifier)
#endif

namespace fw::cuda::emulation::races {

#if defined(FW_EMULATION_RACES)
inline constexpr bool kFound = true;
inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void* create_fiber() { return __tsan_create_fiber(0); }
inline void destroy_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: orders nothing
inline void acquire(void* event) { __tsan_acquire(event); }
inline void release(void* event) { __tsan_release(event); }
inline void read(const void* from, std::size_t bytes) { __tsan_read_range(const_cast<void*>(from), bytes); }
inline void write(void* to, std::size_t bytes) { __tsan_write_range(to, bytes); }
// Places of which only the addresses matter: one for each of the last 64 times that something happened. Memory of their own, since what
// ThreadSanitizer knows of a place goes when its memory does.
class Events {
 public:
  void* at(uint64_t number) { return &places_[number % kLast]; }
  void renew() { places_ = std::make_unique<char[]>(kLast); }

 private:
  static constexpr uint64_t kLast = 64;
  std::unique_ptr<char[]> places_ = std::make_unique<char[]>(kLast);
};
// While it lives, what its thread does is the emulator's business and no access of a kernel's.
class Quiet {
 public:
  Quiet() { __tsan_ignore_thread_begin(); }
  ~Quiet() { __tsan_ignore_thread_end(); }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};
#else
inline constexpr bool kFound = false;
inline void* this_fiber() { return nullptr; }
inline void* create_fiber() { return nullptr; }
inline void destroy_fiber(void* /*fiber*/) {}
inline void switch_to(void* /*fiber*/) {}
inline void acquire(void* /*event*/) {}
inline void release(void* /*event*/) {}
inline void read(const void* /*from*/, std::size_t /*bytes*/) {}
inline void write(void* /*to*/, std::size_t /*bytes*/) {}
struct Events {
  void* at(uint64_t /*number*/) { return nullptr; }
  void renew() {}
};
class [[maybe_unused]] Quiet {
 public:
  Quiet() = default;
  ~Quiet() = default;
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};
#endif

}  // namespace fw::cuda::emulation::races
