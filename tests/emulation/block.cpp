#include "emulation/block.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "emulation/gpu.h"
#include "emulation/memory.h"

namespace fw::cuda::emulation {

constinit thread_local Position position{};
namespace {

// FW_EMULATION_CAPABILITY=8.0: what it stands for at first.
Gpu gpu_of_environment() {
  Gpu gpu;
  const char* capability = std::getenv("FW_EMULATION_CAPABILITY");
  if (capability != nullptr && std::sscanf(capability, "%d.%d", &gpu.major, &gpu.minor) != 2) {
    std::fprintf(stderr, "FW_EMULATION_CAPABILITY: expected a compute capability such as 8.0, got %s\n", capability);
    std::abort();
  }
  return gpu;
}

}  // namespace

Gpu gpu = gpu_of_environment();

namespace {

// Of a block on Hopper, and on the smallest of older GPUs (sm_86, sm_89; sm_80 has 163 KB).
std::size_t shared_limit() { return std::size_t{gpu.major >= 9 ? 227U : 99U} * 1024; }
thread_local Block* current_block = nullptr;
std::atomic<int64_t> grids = 0;

std::string kernel_name(const void* kernel) {
  Dl_info info{};
  if (!dladdr(kernel, &info)) return "?";
  if (!info.dli_sname) {  // no symbol without -rdynamic: what addr2line wants
    char text[64];
    std::snprintf(
        text, sizeof text, "at 0x%zx",
        static_cast<std::size_t>(static_cast<const char*>(kernel) - static_cast<const char*>(info.dli_fbase)));
    return std::string(text) + " of " + info.dli_fname;
  }
  int status = 0;
  char* readable = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? readable : info.dli_sname;
  std::free(readable);
  return name;
}

}  // namespace

int64_t grids_run() { return grids; }

namespace {

bool starts_early() {
  const char* early = std::getenv("FW_EMULATION_EARLY");
  return !races::kFound && early != nullptr && *early != 0 && std::strcmp(early, "0") != 0;
}

// A grid, and those of its blocks (clusters) that have begun before the grid before it was run: the first and the last.
struct Grid {
  GridShape shape;
  std::function<void()> kernel;
  std::vector<std::unique_ptr<Cluster>> begun;

  int64_t clusters() const { return static_cast<int64_t>(shape.x) * shape.y * shape.z / shape.cluster; }
  void begin() {
    const Open device_memory;
    const Position outside = position;
    for (const int64_t i : {int64_t{0}, clusters() - 1}) {
      if (static_cast<size_t>(i) < begun.size()) continue;  // there is one
      begun.push_back(std::make_unique<Cluster>());
      begun.back()->run(shape, kernel, i, true);
    }
    position = outside;
  }
  void run() {
    const Open device_memory;
    const Position outside = position;
    const int64_t count = clusters(), first = begun.empty() ? 0 : 1, last = count - (begun.size() > 1 ? 1 : 0);
    for (const auto& cluster : begun) cluster->resume();
    Cluster* ends_with_last = nullptr;  // races are looked for on one thread of the system, where one Cluster runs all
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) if (last - first > 1)
#endif
    for (int64_t i = first; i < last; ++i) {
      thread_local Cluster cluster;
      if (races::kFound && i == count - 1) ends_with_last = &cluster;
      cluster.run(shape, kernel, i);
    }
    if (ends_with_last != nullptr) ends_with_last->end_grid();
    position = outside;
  }
};
std::unique_ptr<Grid> kept_back;
std::vector<const void*>* recorded = nullptr;

}  // namespace

void record_launches(std::vector<const void*>* kernels) { recorded = kernels; }

void finish() {
  if (const std::unique_ptr<Grid> grid = std::move(kept_back)) grid->run();
}

void run_grid(const GridShape& shape, std::function<void()> kernel) {
  ++grids;
  if (recorded != nullptr) recorded->push_back(shape.kernel);
  auto grid = std::make_unique<Grid>(Grid{shape, std::move(kernel), {}});
  if (!starts_early()) return grid->run();
  if (shape.overlapped && kept_back != nullptr) grid->begin();
  finish();
  kept_back = std::move(grid);
}

void Block::end_grid() {
  races::acquire(ends_.at(0));
  shared_of_grid_.clear();
}

Block& Block::current() {
  if (!current_block) {
    std::fprintf(stderr, "emulation: a function of ptx.cuh was called outside of a kernel\n");
    std::abort();
  }
  return *current_block;
}

void Block::run(const GridShape& shape, const std::function<void()>& kernel, int64_t index, bool early,
                Cluster& cluster) {
  position.block[0] = static_cast<unsigned>(index % shape.x);
  position.block[1] = static_cast<unsigned>(index / shape.x % shape.y);
  position.block[2] = static_cast<unsigned>(index / shape.x / shape.y);
  early_ = early;
  waited_ = false;
  cluster_ = &cluster;
  shape_ = shape;
  kernel_ = &kernel;
  current_block = this;
  position.threads = shape.threads;
  position.grid[0] = shape.x, position.grid[1] = shape.y, position.grid[2] = shape.z;
  if (shape.threads == 0 || shape.threads > 1024 || shape.threads % 32 != 0)
    fail(0, "%u threads: must be a multiple of 32, at most 1024", shape.threads);
  if (shape.shared_bytes > shared_limit())
    fail(0, "%zu bytes of shared memory: at most %zu", shape.shared_bytes, shared_limit());
  if (shape.cluster < 1 || shape.cluster > 8 || shape.x % shape.cluster != 0)
    fail(0, "%u blocks in clusters of %u", shape.x, shape.cluster);
  if (shape.y > 65535 || shape.z > 65535 || shape.x > 0x7fffffffu)
    fail(0, "grid of %u x %u x %u", shape.x, shape.y, shape.z);

  // Its own memory each time and no larger than asked for, so that AddressSanitizer sees its ends.
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, shape.shared_bytes ? shape.shared_bytes : 1)) fail(0, "no memory");
  shared_.reset(static_cast<char*>(memory));
  std::memset(memory, 0xff, shape.shared_bytes);
  home_.stands_here();
  starts_.renew();
  races::release(starts_.at(0));
  position.shared = shared_.get();
  position.shared_bytes = shape.shared_bytes;

  const char* late = std::getenv("FW_EMULATION_LATE");
  late_ = late && std::strcmp(late, "0") != 0 && *late;
  const char* order = std::getenv("FW_EMULATION_ORDER");
  reverse_ = order && std::strcmp(order, "reverse") == 0;
  lingers_ = order && std::strcmp(order, "late") == 0;
  shuffled_ = order && !reverse_ && !lingers_ && *order;
  if (shuffled_ || lingers_)
    random_.seed(static_cast<unsigned>(std::strtoul(order, nullptr, 10)) * 7919 + position.block[0] * 31 +
                 position.block[1] * 17 + position.block[2] + 1);

  warps_ = {};
  warpgroups_ = {};
  for (NamedBarrier& barrier : barriers_)
    barrier.arrived = 0, barrier.needed = 0, barrier.waiting.clear(), barrier.rounds = 0, barrier.ends.renew();
  for (races::Events& ends : warp_ends_) ends.renew();
  block_ends_.renew();
  shared_barriers_.clear();
  deferred_.clear();
  lingering_.clear();
  live_ = shape.threads;
  while (threads_.size() < shape.threads) threads_.push_back(std::make_unique<Thread>());
  for (unsigned i = 0; i < shape.threads; ++i) {
    Thread& thread = *threads_[i];
    thread.fiber.prepare(&Block::thread_entry);
    thread.state = Thread::State::kWaiting;
    thread.parity = -1;
    thread.copies.clear();
    thread.stores.clear();
    thread.products.clear();
    thread.operands.clear();
    thread.product_group = 0;
    thread.warp_syncs = thread.block_syncs = thread.cluster_barriers = 0;
    thread.at_cluster = false;
  }
  for (unsigned i = 0; i < shape.threads; ++i) wake(reverse_ ? shape.threads - 1 - i : i);

  own_position_ = position;
  go();
}

void Block::go() {
  current_block = this;
  position = own_position_;
  position.thread = ready_.front();
  ready_.pop_front();
  races::proxy = races::kFound ? &thread().proxy : nullptr;
  home_.switch_to(thread().fiber);
  races::proxy = nullptr;
  current_block = nullptr;
  if (live_ > 0) return;  // they wait for the grid in front, or for other blocks
  if (!deferred_.empty())
    fail(0, "%zu asynchronous loads are still under way at the end of the block", deferred_.size());
  for (const SharedBarrier& barrier : shared_barriers_) {
    if (barrier.reached && (barrier.waited != barrier.phases || barrier.pending != barrier.count))
      fail(0,
           "mbarrier at offset %u: nobody has waited for the last arrivals from other blocks, which may come when this "
           "one is over",
           barrier.offset);
  }
  // Given back at the end of the grid, when its threads' accesses are over for the one that gives it back.
  if (races::kFound) shared_of_grid_.push_back(std::move(shared_));
  shared_.reset();
}

void Block::resume() {
  early_ = false;
  if (live_ == 0) return;
  home_.stands_here();
  for (const unsigned waiter : grid_waiters_) wake(waiter);
  grid_waiters_.clear();
  if (!ready_.empty()) go();
}

void Block::wait_for_grid(const char* what) {
  if (!early_) return;
  grid_waiters_.push_back(position.thread);
  wait(what);
}

void Block::grid_wait() {
  wait_for_grid("grid_dependency_wait");
  waited_ = true;
}

void Block::grid_launch(bool first) {
  if (!shape_.overlapped || first || waited_) return;
  fail(position.thread,
       "grid_dependency_launch before grid_dependency_wait: the next kernel could begin before what the one in front "
       "of this one writes is there "
       "(launch.h: grid_dependency_launch_first)");
}

// For ThreadSanitizer also a barrier that shows nothing orders: what was read before it is overwritten after it. That
// it does not show what was written is not seen here.
void Block::needs_hopper(const char* what) {
  if (gpu.major < 9) fail(position.thread, "%s on a GPU of compute capability %d.%d", what, gpu.major, gpu.minor);
}

void Block::cluster_arrive() {
  needs_hopper("cluster_arrive");
  Thread& me = thread();
  if (me.at_cluster)
    fail(position.thread, "arrives at a barrier of the cluster again and has not waited for the one before");
  races::release(cluster_->barrier(me.cluster_barriers));
  me.at_cluster = true;
  ++cluster_arrived_;
}

void Block::cluster_wait() {
  Thread& me = thread();
  if (!me.at_cluster) fail(position.thread, "waits for a barrier of the cluster and has not arrived at it");
  const uint64_t barrier = me.cluster_barriers++;
  {
    const races::Quiet quiet;
    if (cluster_->barriers_over() <= barrier) {
      cluster_waiters_.push_back(position.thread);
      wait("cluster_wait");
    }
    me.at_cluster = false;
  }
  races::acquire(cluster_->barrier(barrier));
}

void Block::open_cluster_barrier() {
  cluster_arrived_ = 0;
  if (reverse_) std::reverse(cluster_waiters_.begin(), cluster_waiters_.end());
  for (const unsigned waiter : cluster_waiters_) wake(waiter);
  cluster_waiters_.clear();
}

bool Block::advance() {
  if (ready_.empty() && lingering_.empty()) return false;
  if (ready_.empty()) let_one_go_on();
  home_.stands_here();
  go();
  return true;
}

Block& Block::cluster_block(int rank, const char* what) {
  if (rank < 0 || static_cast<unsigned>(rank) >= cluster_->size())
    fail(position.thread, "%s of block %d of %u", what, rank, cluster_->size());
  Block& other = cluster_->block(static_cast<unsigned>(rank));
  if (other.over()) fail(position.thread, "%s of block %d, which is over or has not begun", what, rank);
  return other;
}
void* Block::cluster_rank(const void* shared, int rank) {
  const uint32_t at = offset(shared, "cluster_memory");
  return cluster_block(rank, "cluster_memory").shared_.get() + at;
}

void Cluster::run(const GridShape& shape, const std::function<void()>& kernel, int64_t index, bool early) {
  size_ = shape.cluster;
  over_ = 0;
  while (blocks_.size() < size_) blocks_.push_back(std::make_unique<Block>());
  ends_.renew();
  for (unsigned i = 0; i < size_; ++i) blocks_[i]->run(shape, kernel, index * size_ + i, early, *this);
  go_on(early);
}

void Cluster::resume() {
  for (unsigned i = 0; i < size_; ++i) blocks_[i]->resume();
  go_on(false);
}

// From barrier to barrier, until all blocks are over or one waits for the grid in front.
void Cluster::go_on(bool early) {
  for (;;) {
    bool over = true, arrived = true, early_waits = false;
    for (unsigned i = 0; i < size_; ++i) {
      const Block& block = *blocks_[i];
      over = over && block.over();
      arrived = arrived && block.at_cluster_barrier();
      early_waits = early_waits || (early && block.waits_for_grid());
    }
    if (over || (early_waits && !arrived)) return;
    if (arrived) {
      ++over_;
      for (unsigned i = 0; i < size_; ++i) blocks_[i]->open_cluster_barrier();
    }
    bool went = false;
    for (unsigned i = 0; i < size_; ++i) {
      Block& block = *blocks_[blocks_[0]->reverse() ? size_ - 1 - i : i];
      if (!block.over() && block.advance()) went = true;
    }
    if (went) continue;
    for (const bool stays_away : {true, false}) {  // rather one that the others wait for
      for (unsigned i = 0; i < size_; ++i) {
        if (!blocks_[i]->over() && blocks_[i]->at_cluster_barrier() != stays_away) blocks_[i]->report_deadlock();
      }
    }
  }
}

void Cluster::end_grid() {
  for (const auto& block : blocks_) block->end_grid();
}

void grid_wait() { Block::current().grid_wait(); }
void grid_launch(bool first) { Block::current().grid_launch(first); }

void Block::thread_entry() {
  Block& block = current();
  races::acquire(block.starts_.at(0));
  if (races::kFound) races::fence();
  (*block.kernel_)();
  races::release(block.ends_.at(0));
  block.thread_exit();
}

void Block::thread_exit() {
  leave();
  go_on();
}

void Block::leave() {
  const races::Quiet quiet;
  Thread& me = thread();
  const unsigned index = position.thread;
  for (auto& group : me.stores.groups) {
    for (Store& store : group) {
      if (!store.read)
        fail(index,
             "leaves the kernel without bulk_wait_read() for its bulk stores: shared memory is given away under them");
    }
  }
  finish_stores(me);
  if (me.at_cluster) fail(index, "leaves the kernel between cluster_arrive and cluster_wait");
  me.state = Thread::State::kDone;
  --live_;
  for (Meeting* meeting : {&warps_[index / 32], &warpgroups_[index / 128]}) {
    ++meeting->exited;
    if (meeting->arrived == 0) continue;
    const Operation& operation = *meeting->operation;
    if (!operation.without_exited)
      fail(index, "leaves the kernel while others of its %s wait at %s", operation.threads == 32 ? "warp" : "warpgroup",
           operation.name);
    meeting->operands[index % operation.threads] = nullptr;
    if (meeting->arrived + meeting->exited == operation.threads)
      finish(*meeting, index / operation.threads * operation.threads, index);
  }
  if (barriers_[0].arrived > 0 && barriers_[0].arrived == live_) barrier_complete(barriers_[0]);
}

void Block::meet(const Operation& operation, void* operand) {
  const races::Quiet quiet;
  const unsigned me = position.thread, first = me / operation.threads * operation.threads;
  if (first + operation.threads > shape_.threads) fail(me, "%s needs %u threads", operation.name, operation.threads);
  Meeting& meeting = operation.threads == 32 ? warps_[me / 32] : warpgroups_[me / 128];
  if (meeting.arrived == 0) meeting.operation = &operation;
  if (meeting.operation != &operation)
    fail(me, "is at %s while others of its warp or warpgroup wait at %s", operation.name, meeting.operation->name);
  if (meeting.exited && !operation.without_exited)
    fail(me, "is at %s, but threads of its warp or warpgroup have left the kernel", operation.name);
  meeting.operands[me - first] = operand;
  ++meeting.arrived;
  if (meeting.arrived + meeting.exited < operation.threads) return wait(operation.name);
  meeting.arrived = 0;
  if (!operation.run(meeting.operands.data(), first)) return park();
  for (unsigned i = 0; i < operation.threads; ++i) {
    const unsigned other = first + (reverse_ ? operation.threads - 1 - i : i);
    if (other != me && threads_[other]->state == Thread::State::kWaiting) wake(other);
  }
}

// The same for a meeting that is complete because the last one it waited for has left.
void Block::finish(Meeting& meeting, unsigned first_thread, unsigned except) {
  meeting.arrived = 0;
  if (!meeting.operation->run(meeting.operands.data(), first_thread)) return;
  for (unsigned i = 0; i < meeting.operation->threads; ++i)
    if (first_thread + i != except && threads_[first_thread + i]->state == Thread::State::kWaiting)
      wake(first_thread + i);
}

bool Block::barrier_arrive(int id, unsigned needed, bool wait, unsigned first_thread) {
  NamedBarrier& barrier = barriers_[static_cast<std::size_t>(id)];
  const unsigned threads = 32 - warps_[first_thread / 32].exited;
  if (id == 0) needed = live_;
  if (id != 0 && barrier.arrived > 0 && barrier.needed != needed)
    fail(first_thread, "named barrier %d for %u threads; others wait at it for %u", id, needed, barrier.needed);
  barrier.needed = needed;
  barrier.arrived += threads;
  if (barrier.arrived > needed)
    fail(first_thread, "named barrier %d: %u threads have come, %u are expected", id, barrier.arrived, needed);
  for (unsigned i = first_thread; wait && i < first_thread + 32; ++i) {
    barrier.waiting.push_back(i);
    threads_[i]->waits_for = id == 0 ? "sync_threads" : "named barrier";
    threads_[i]->barrier = id;
    threads_[i]->parity = -1;
  }
  if (barrier.arrived < needed) return !wait;
  barrier_complete(barrier);
  return true;
}

void Block::barrier_complete(NamedBarrier& barrier) {
  barrier.arrived = 0;
  ++barrier.rounds;
  if (reverse_) std::reverse(barrier.waiting.begin(), barrier.waiting.end());
  for (unsigned thread : barrier.waiting)
    if (threads_[thread]->state == Thread::State::kWaiting) wake(thread);
  barrier.waiting.clear();
}

void Block::wake(unsigned index) {
  Thread& thread = *threads_[index];
  thread.state = Thread::State::kReady;
  if (lingers_ && thread.parity >= 0) {
    lingering_.push_back(index);
  } else {
    ready_.push_back(index);
  }
}

void Block::linger(const char* what, int barrier, int parity) {
  Thread& me = thread();
  me.waits_for = what;
  me.barrier = barrier;
  me.parity = parity;
  wake(position.thread);
  go_on();
}

void Block::wait(const char* what, int barrier, int parity) {
  Thread& me = thread();
  me.waits_for = what;
  me.barrier = barrier;
  me.parity = parity;
  park();
}

void Block::park() {
  thread().state = Thread::State::kWaiting;
  go_on();
}

// No thread is ready: an asynchronous load comes, or a warp that lingers goes on.
void Block::let_one_go_on() {
  if (deferred_.empty() && lingering_.empty()) report_deadlock();
  if (!deferred_.empty() && (lingering_.empty() || random_() % 2 == 0)) {
    // The oldest, or in a drawn order any: nothing orders loads that wait for different barriers.
    const auto one = deferred_.begin() + static_cast<std::ptrdiff_t>(shuffled_ ? random_() % deferred_.size() : 0);
    const auto action = std::move(*one);
    deferred_.erase(one);
    return action();
  }
  const unsigned warp = lingering_[random_() % lingering_.size()] / 32;
  std::erase_if(lingering_, [&](unsigned i) {
    if (i / 32 == warp) ready_.push_back(i);
    return i / 32 == warp;
  });
}

// To the next thread that can go on.
void Block::go_on() {
  Fiber& from = thread().fiber;
  Fiber& to = next_fiber();
  if (&to != &from) from.switch_to(to);
}

Fiber& Block::next_fiber() {
  const races::Quiet quiet;
  while (ready_.empty()) {
    if (live_ == 0) return home_;
    if ((!grid_waiters_.empty() || !cluster_waiters_.empty() || cluster_->size() > 1) && deferred_.empty() &&
        lingering_.empty())
      return home_;
    let_one_go_on();
  }
  if (shuffled_) std::swap(ready_.front(), ready_[random_() % ready_.size()]);
  position.thread = ready_.front();
  ready_.pop_front();
  if (races::kFound) races::proxy = &thread().proxy;
  return thread().fiber;
}

char* Block::shared(uint32_t address, std::size_t bytes, std::size_t alignment, const char* what, unsigned thread) {
  if (address % alignment != 0)
    fail(thread, "%s: shared address %u (offset %d) is not a multiple of %zu", what, address,
         static_cast<int>(address - kSharedBase), alignment);
  if (address < kSharedBase || address - kSharedBase + bytes > shape_.shared_bytes)
    fail(thread, "%s: %zu bytes at offset %d of shared memory, which has %zu", what, bytes,
         static_cast<int>(address - kSharedBase), shape_.shared_bytes);
  return position.shared + (address - kSharedBase);
}

uint32_t Block::offset(const void* pointer, const char* what) {
  const char* p = static_cast<const char*>(pointer);
  if (p < position.shared || p > position.shared + shape_.shared_bytes)
    fail(position.thread, "%s: %p is not in shared memory", what, pointer);
  return static_cast<uint32_t>(p - position.shared);
}

void Block::fail(unsigned thread, const char* format, ...) {
  static std::mutex one_at_a_time;
  one_at_a_time.lock();
  std::fprintf(stderr, "emulation: kernel %s, block (%u, %u, %u), thread %u: ", kernel_name(shape_.kernel).c_str(),
               position.block[0], position.block[1], position.block[2], thread);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

void Block::report_deadlock() {
  if (current_block != this) position = own_position_;  // found by its cluster
  std::fprintf(stderr, "emulation: no thread of the block can go on\n");
  for (unsigned i = 0, end; i < shape_.threads; i = end) {
    const Thread& first = *threads_[i];
    for (end = i + 1; end < shape_.threads; ++end) {
      const Thread& next = *threads_[end];
      if (next.state != first.state ||
          (next.state != Thread::State::kDone &&
           (next.waits_for != first.waits_for || next.barrier != first.barrier || next.parity != first.parity)))
        break;
    }
    std::fprintf(stderr, "  threads %u to %u: %s", i, end - 1,
                 first.state == Thread::State::kDone ? "have left the kernel" : first.waits_for);
    if (first.state != Thread::State::kDone && first.parity >= 0) {
      const SharedBarrier& barrier = shared_barriers_[static_cast<std::size_t>(first.barrier)];
      std::fprintf(stderr,
                   " at offset %u for parity %d; it is in phase %d, %d of %d arrivals missing, %lld bytes missing",
                   barrier.offset, first.parity, barrier.phase, barrier.pending, barrier.count,
                   static_cast<long long>(barrier.bytes));
    } else if (first.state != Thread::State::kDone && first.barrier >= 0) {
      const NamedBarrier& barrier = barriers_[static_cast<std::size_t>(first.barrier)];
      std::fprintf(stderr, " %d; %u of %u threads have come", first.barrier, barrier.arrived,
                   first.barrier == 0 ? live_ : barrier.needed);
    }
    std::fputc('\n', stderr);
  }
  fail(position.thread, "deadlock (the threads above)");
}

}  // namespace fw::cuda::emulation
