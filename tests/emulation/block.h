// One block of a grid: its threads as fibers, the order they run in, and the barriers where they meet. And a cluster of
// blocks, which run in turn, each until its threads wait for a common barrier or for another block.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulation/fiber.h"
#include "emulation/races.h"
#include "emulation/run.h"

namespace fw::cuda::emulation {

// Something that all threads of a warp (32) or of a warpgroup (128) do together. run() is called by the last to arrive
// with what each loaded, in order; threads then go on if it returns true, and otherwise when somebody calls wake().
struct Operation {
  const char* name;
  unsigned threads;
  bool without_exited;  // threads that have left the kernel are not waited for; what they loaded is null
  bool (*run)(void* const* operands, unsigned first_thread);
};

struct SharedBarrier {
  uint32_t offset;  // in shared memory
  int phase, count, pending;
  int64_t bytes;    // expected and not yet come
  uint64_t phases;  // that are over
  races::Events ends;
  uint64_t waited = 0;   // phases that were over when somebody's wait was
  bool reached = false;  // by arrivals from other blocks
};

struct Copy {  // cp.async
  uint32_t to;
  const void* from;  // null: zeros
  bool done;
};
struct Store {  // bulk_store
  void* to;
  const char* from;
  uint32_t bytes;
  bool read, written;
  std::vector<char> data;
};
struct Operand {  // of a wgmma that has not been waited for: what this thread reads of it
  const char* from;
  std::size_t bytes;
  unsigned group;
};
struct LateProduct {  // wgmma whose result has not been waited for
  float* d;
  unsigned group;
  std::vector<float> values;
};
template <class T>
struct Groups {  // of cp.async, bulk stores: the last is still open
  std::deque<std::vector<T>> groups{1};
  void clear() { groups.assign(1, {}); }
};

struct Thread {
  enum class State { kReady, kWaiting, kDone };
  Fiber fiber;
  State state;
  const char* waits_for;
  int barrier, parity;  // of waits_for, or -1
  Groups<std::shared_ptr<Copy>> copies;
  Groups<Store> stores;
  std::vector<LateProduct> products;
  std::vector<Operand> operands;
  unsigned product_group;
  uint64_t warp_syncs, block_syncs, cluster_barriers;  // how many it has come to; of the last, that are after it
  bool at_cluster;                                     // has arrived at one that it has not waited for
  races::Proxy proxy;
};

// What a thread's bulk stores have read and not yet written, at its end.
void finish_stores(Thread& thread);

struct FreeDeleter {
  void operator()(char* memory) const { std::free(memory); }
};

class Cluster;

class Block {
 public:
  static constexpr uint32_t kSharedBase = 1024;  // the shared address of shared_memory(), as on Hopper
  static Block& current();

  // Block number `index` of the grid, of this cluster. early: its threads do not go beyond what waits for the grid in
  // front, until resume(). They stop at a barrier of the cluster, until pass_cluster_barrier(); else they run to their
  // end.
  void run(const GridShape& shape, const std::function<void()>& kernel, int64_t index, bool early, Cluster& cluster);
  void resume();
  bool over() const { return live_ == 0; }
  bool waits_for_grid() const { return !grid_waiters_.empty(); }
  bool at_cluster_barrier() const { return cluster_arrived_ == live_; }
  void open_cluster_barrier();
  // Lets its threads go on as far as they can; whether one could.
  bool advance();
  [[noreturn]] void report_deadlock();
  // After the last block of a grid that this one stood for.
  void end_grid();

  void meet(const Operation& operation, void* operand);
  // The caller waits for somebody to wake it.
  void wait(const char* what, int barrier = -1, int parity = -1);
  // The caller goes on when the grid in front is over: at once, unless the block has begun early.
  void wait_for_grid(const char* what);
  void grid_wait();
  void grid_launch(bool first);
  void cluster_arrive();
  void cluster_wait();
  Block& cluster_block(int rank, const char* what);
  void* cluster_rank(const void* shared, int rank);
  void wake(unsigned thread);
  // Order `late`: the caller, at an mbarrier, goes on when others have gone as far as they can, or some time before.
  void linger(const char* what, int barrier, int parity);
  // A warp at a barrier (0: sync_threads). Whether it can go on.
  bool barrier_arrive(int id, unsigned needed, bool wait, unsigned first_thread);

  char* shared(uint32_t address, std::size_t bytes, std::size_t alignment, const char* what, unsigned thread);
  uint32_t offset(const void* pointer, const char* what);
  // Ends the program where the GPU that the emulation stands for (gpu.h) has no such instruction.
  void needs_hopper(const char* what);
  [[noreturn]] void fail(unsigned thread, const char* format, ...) __attribute__((format(printf, 3, 4)));

  Thread& thread() { return *threads_[position.thread]; }
  Thread& thread(unsigned index) { return *threads_[index]; }
  std::vector<SharedBarrier>& barriers() { return shared_barriers_; }
  // The end of the thread's next sync_warp(), its next sync_threads(), of the present round of a named barrier.
  void* warp_sync() { return warp_ends_[position.thread / 32].at(thread().warp_syncs++); }
  void* block_sync() { return block_ends_.at(thread().block_syncs++); }
  void* barrier_round(int id) {
    NamedBarrier& barrier = barriers_[static_cast<std::size_t>(id)];
    return barrier.ends.at(barrier.rounds);
  }
  bool late() const { return late_; }
  bool lingers() const { return lingers_; }
  bool reverse() const { return reverse_; }
  // In late mode: done when no thread can go on, the oldest first.
  void defer(std::function<void()> action) { deferred_.push_back(std::move(action)); }

 private:
  struct Meeting {
    const Operation* operation;
    unsigned arrived, exited;
    std::array<void*, 128> operands;
  };
  struct NamedBarrier {
    unsigned arrived, needed;
    std::vector<unsigned> waiting;  // threads
    uint64_t rounds;                // that are over
    races::Events ends;
  };

  void go();  // from home, until all threads have left or wait for the grid in front
  static void thread_entry();
  void thread_exit();
  void leave();
  void finish(Meeting& meeting, unsigned first_thread, unsigned except);
  void barrier_complete(NamedBarrier& barrier);
  void park();
  void go_on();
  Fiber& next_fiber();
  void let_one_go_on();

  GridShape shape_{};
  const std::function<void()>* kernel_ = nullptr;
  Position own_position_{};  // of the block, without the thread
  std::unique_ptr<char, FreeDeleter> shared_;
  bool early_ = false, waited_ = false;  // waited_: some thread for the grid in front
  std::vector<unsigned> grid_waiters_, cluster_waiters_;
  unsigned cluster_arrived_ = 0;  // threads, at the barrier that is not over
  Cluster* cluster_ = nullptr;
  Fiber home_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::deque<unsigned> ready_;
  std::vector<unsigned> lingering_;  // could go on, from an mbarrier
  unsigned live_ = 0;
  std::array<Meeting, 32> warps_;
  std::array<Meeting, 8> warpgroups_;
  std::array<NamedBarrier, 16> barriers_;
  std::vector<SharedBarrier> shared_barriers_;
  std::deque<std::function<void()>> deferred_;
  std::array<races::Events, 32> warp_ends_;
  races::Events block_ends_;
  races::Events starts_, ends_;  // 0: of the block, of the grid
  std::vector<std::unique_ptr<char, FreeDeleter>> shared_of_grid_;
  bool late_ = false, reverse_ = false, shuffled_ = false, lingers_ = false;
  std::minstd_rand random_;
};

// Blocks of a grid that run side by side; most often one.
class Cluster {
 public:
  // Cluster number `index` of the grid; early and resume() as of its blocks.
  void run(const GridShape& shape, const std::function<void()>& kernel, int64_t index, bool early = false);
  void resume();
  void end_grid();  // as of its blocks

  unsigned size() const { return size_; }
  Block& block(unsigned rank) { return *blocks_[rank]; }
  void* barrier(uint64_t number) { return ends_.at(number); }
  uint64_t barriers_over() const { return over_; }

 private:
  void go_on(bool early);

  unsigned size_ = 0;
  uint64_t over_ = 0;                           // barriers
  std::vector<std::unique_ptr<Block>> blocks_;  // the first size_ of them
  races::Events ends_;                          // of its barriers
};

}  // namespace fw::cuda::emulation
