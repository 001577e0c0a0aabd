// What ThreadSanitizer has to know of a block (builds with -fsanitize=thread): each thread is one of its fibers, and
// only barriers order what two threads do. A kernel's own accesses are instrumented as any program's; the emulator is
// not, and says here what the operations that it stands for read and write, and what waits for what:
//   sync_warp, sync_threads, named barriers   what came before in each thread that arrives, before what follows in each that waits
//   mbarriers                                 the same for a phase: arrivals, and bulk loads whose bytes it expects
//   ldmatrix, stmatrix                        a row is touched by the lane that loads its address
//   wgmma                                     a part of the operands by each thread, when it is issued and again when it is waited for
//   bulk stores                               shared memory is read when issued and again when waited for
// Bulk copies and wgmma touch shared memory through another proxy, which sees what threads have written only if these,
// or a thread that has waited for them, called fence_async_shared(). So a thread has a second clock, of what that proxy
// sees of it. It is a fiber of its own (Proxy), loaded up to the thread's by a fence and handed on by barriers
// alongside the thread's. What such an operation reads and overwrites is looked at from there too: a write of a thread
// that no fence has loaded there is reported. (Reads by threads need none: they are over when the barrier says so.)
// What the loading thread itself has written without a fence counts as fenced for those who wait for its loads.
// Shuffles and products of a warp order nothing: on the device they promise nothing about memory. Blocks of a grid are
// not ordered either (but for atomics), kernels one after the other are. Elsewhere all of this is nothing.
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
constexpr int kLastEvents = 64;
// What the other proxy sees of a thread.
class Proxy {
 public:
  Proxy() : fiber_(create_fiber()) {}
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;
  ~Proxy() { destroy_fiber(fiber_); }
  void fence() {
    __tsan_release(link_.get());
    as_proxy([&] { __tsan_acquire(link_.get()); });
  }
  template <class Body>
  void as_proxy(const Body& body) {
    void* const thread = this_fiber();
    switch_to(fiber_);
    body();
    switch_to(thread);
  }
  // What the thread does after this is after what the body has done.
  template <class Body>
  void touch(const Body& body) {
    as_proxy([&] {
      body();
      __tsan_release(link_.get());
    });
    __tsan_acquire(link_.get());
  }

 private:
  void* fiber_;
  std::unique_ptr<char> link_ = std::make_unique<char>();
};
// Of the thread that runs; null outside of blocks.
inline thread_local Proxy* proxy = nullptr;
// Events have two clocks, of threads and of their proxies.
inline void* of_proxies(void* event) { return static_cast<char*>(event) + kLastEvents; }
inline void acquire(void* event) {
  __tsan_acquire(event);
  if (proxy != nullptr) proxy->as_proxy([&] { __tsan_acquire(of_proxies(event)); });
}
inline void release(void* event) {
  __tsan_release(event);
  if (proxy != nullptr) proxy->as_proxy([&] { __tsan_release(of_proxies(event)); });
}
// Of a bulk load, whose bytes the other proxy has written itself.
inline void release_load(void* event) {
  release(event);
  __tsan_release(of_proxies(event));
}
inline void fence() { proxy->fence(); }
// Through the other proxy.
inline void touch(const void* from, std::size_t bytes) {
  proxy->touch([&] { __tsan_read_range(const_cast<void*>(from), bytes); });
}
inline void read(const void* from, std::size_t bytes) { __tsan_read_range(const_cast<void*>(from), bytes); }
inline void write(void* to, std::size_t bytes) { __tsan_write_range(to, bytes); }
// Slots of which only the addresses matter: one for each of the last 64 times that something happened. Memory of their
// own, since what ThreadSanitizer knows of a slot goes when its memory does.
class Events {
 public:
  void* at(uint64_t number) { return &slots_[number % kLastEvents]; }
  void renew() { slots_ = std::make_unique<char[]>(2 * kLastEvents); }

 private:
  std::unique_ptr<char[]> slots_ = std::make_unique<char[]>(2 * kLastEvents);
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
class Proxy {};
inline Proxy* proxy = nullptr;
inline void acquire(void* /*event*/) {}
inline void release(void* /*event*/) {}
inline void release_load(void* /*event*/) {}
inline void fence() {}
inline void touch(const void* /*from*/, std::size_t /*bytes*/) {}
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
