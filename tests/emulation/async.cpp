// Barriers in shared memory and asynchronous copies. Copies happen at once, unless FW_EMULATION_LATE is set. Then a
// cp.async happens when its thread waits for it, and a bulk load when no thread can go on without. A bulk store reads
// and writes when its thread waits for that. The word of a barrier in shared memory holds a mark and a number; its
// state is in Block::barriers().
#include <cstring>

#include "emulation/block.h"
#include "emulation/emulation.h"

namespace fw::cuda {

namespace emulation {
namespace {

constexpr uint64_t kMark = 0x6d62617272696572u & ~uint64_t{0xffff};
constexpr int kMaxCount = (1 << 20) - 1;

// Of another block of the cluster: `word` is what lies at the offset of `barrier` there.
std::size_t barrier_index(Block& of, uint64_t word, const uint64_t* barrier, const char* what) {
  Block& block = Block::current();
  const unsigned me = position.thread;
  block.shared(Block::kSharedBase + block.offset(barrier, what), 8, 8, what, me);
  const std::size_t index = word & 0xffff;
  if ((word & ~uint64_t{0xffff}) != kMark || index >= of.barriers().size())
    block.fail(me, "%s: no barrier at offset %u of shared memory (not initialized, or overwritten)", what,
               block.offset(barrier, what));
  return index;
}
std::size_t barrier_index(const uint64_t* barrier, const char* what) {
  return barrier_index(Block::current(), *barrier, barrier, what);
}

// After a change: the phase is over when nothing is missing.
void check_phase(Block& block, std::size_t index) {
  SharedBarrier& barrier = block.barriers()[index];
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  ++barrier.phases;
  barrier.pending = barrier.count;
  for (unsigned i = 0; i < position.threads; ++i) {
    const Thread& thread = block.thread(i);
    if (thread.state == Thread::State::kWaiting && thread.barrier == static_cast<int>(index) && thread.parity >= 0 &&
        thread.parity != barrier.phase)
      block.wake(i);
  }
}

void arrive(Block& of, std::size_t index, int64_t bytes, unsigned thread) {
  SharedBarrier& barrier = of.barriers()[index];
  if (barrier.pending == 0)
    Block::current().fail(thread, "mbarrier at offset %u: more arrivals than its count %d", barrier.offset,
                          barrier.count);
  barrier.bytes += bytes;
  if (barrier.bytes > kMaxCount)
    Block::current().fail(thread, "mbarrier at offset %u: expects %lld bytes", barrier.offset,
                          static_cast<long long>(barrier.bytes));
  --barrier.pending;
  check_phase(of, index);
}
void arrive(std::size_t index, int64_t bytes, unsigned thread) { arrive(Block::current(), index, bytes, thread); }

// What the caller has done so far is seen by who waits for the end of this phase.
void seen_at_end(Block& of, std::size_t index) {
  SharedBarrier& barrier = of.barriers()[index];
  races::release(barrier.ends.at(barrier.phases));
}
void seen_at_end(std::size_t index) { seen_at_end(Block::current(), index); }

void seen_with_load(Block& of, std::size_t index) {
  SharedBarrier& barrier = of.barriers()[index];
  races::release_load(barrier.ends.at(barrier.phases));
}
void seen_with_load(std::size_t index) { seen_with_load(Block::current(), index); }

void come(Block& block, std::size_t index, uint32_t bytes) {
  block.barriers()[index].bytes -= bytes;
  check_phase(block, index);
}
void come(std::size_t index, uint32_t bytes) { come(Block::current(), index, bytes); }

void perform(Copy& copy) {
  if (copy.done) return;
  copy.done = true;
  char* to = position.shared + (copy.to - Block::kSharedBase);
  if (copy.from)
    std::memcpy(to, copy.from, 16);
  else
    std::memset(to, 0, 16);
}

void read(Store& store) {
  if (store.read) return;
  store.read = true;
  store.data.assign(store.from, store.from + store.bytes);
}
void write(Store& store) {
  if (store.written) return;
  store.written = true;
  std::memcpy(store.to, store.data.data(), store.bytes);
}

void check_bulk(const void* global, const void* shared, uint32_t bytes, const char* what) {
  Block::current().needs_hopper(what);
  Block& block = Block::current();
  const unsigned me = position.thread;
  if (bytes == 0 || bytes % 16 != 0) block.fail(me, "%s of %u bytes: must be a multiple of 16", what, bytes);
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0)
    block.fail(me, "%s: global address %p is not a multiple of 16", what, global);
  block.shared(Block::kSharedBase + block.offset(shared, what), bytes, 16, what, me);
}

// 16 bytes of a tensor; null: outside of it. Such pieces are inside or outside as a whole.
const char* piece_of(const TensorBox& box, int64_t channel, int64_t head, int64_t token, int64_t batch) {
  const int64_t at[4] = {channel, head, token, batch};
  const char* piece = box.data;
  for (int i = 0; i < 4; ++i) {
    if (at[i] < 0 || at[i] >= box.extent[i]) return nullptr;
    piece += at[i] * box.stride[i];
  }
  return piece;
}

// A box of a tensor on its way to a block of the cluster.
struct Tile {
  TensorBox box;
  int column, head, token, batch;
  char* to;
};
const char* piece_of(const Tile& tile, int row, int piece) {
  return piece_of(tile.box, tile.column + 8 * piece, tile.head, tile.token + row, tile.batch);
}
void copy(const Tile& tile) {
  for (int row = 0; row < tile.box.rows; ++row) {
    for (int piece = 0; piece < 8; ++piece) {
      char* const to = tile.to + row * 128 + ((piece ^ (row & 7)) << 4);
      if (const char* from = piece_of(tile, row, piece))
        std::memcpy(to, from, 16);
      else
        std::memset(to, 0, 16);
    }
  }
}

void store(void* to, const void* from, uint32_t bytes, const char* what) {
  check_bulk(to, from, bytes, what);
  races::touch(from, bytes);
  races::read(from, bytes);
  races::write(to, bytes);
  const races::Quiet quiet;
  Block& block = Block::current();
  Store entry{to, static_cast<const char*>(from), bytes, false, false, {}};
  if (!block.late()) {
    // What is read and written now still has to be waited for: the state says so, the data are through.
    read(entry);
    write(entry);
    entry.read = false;
  }
  block.thread().stores.groups.back().push_back(std::move(entry));
}

}  // namespace

void cp_async_wait(int groups) {
  const races::Quiet quiet;
  auto& open = Block::current().thread().copies.groups;
  while (open.size() > static_cast<std::size_t>(groups) + 1) {
    for (const auto& copy : open.front()) perform(*copy);
    open.pop_front();
  }
}

void bulk_wait(int groups, bool written) {
  auto& open = Block::current().thread().stores.groups;
  if (open.size() <= static_cast<std::size_t>(groups) + 1) return;
  for (std::size_t i = 0; i + 1 + static_cast<std::size_t>(groups) < open.size(); ++i) {
    for (const Store& entry : open[i]) {
      if (!entry.read) races::read(entry.from, entry.bytes);
    }
  }
  const races::Quiet quiet;
  for (std::size_t i = 0; i + 1 + static_cast<std::size_t>(groups) < open.size(); ++i) {
    for (Store& entry : open[i]) {
      if (entry.written)
        entry.read = true;
      else
        read(entry);
      if (written) write(entry);
    }
  }
  if (written) open.erase(open.begin(), open.end() - 1 - groups);
}

void finish_stores(Thread& thread) {
  for (auto& group : thread.stores.groups)
    for (Store& entry : group) write(entry);
}

}  // namespace emulation

using emulation::Block;
using emulation::position;

void cp_async_16(uint32_t shared_to, const void* global_from, bool valid) {
  Block& block = Block::current();
  block.shared(shared_to, 16, 16, "cp_async_16", position.thread);
  if (valid && reinterpret_cast<uintptr_t>(global_from) % 16 != 0)
    block.fail(position.thread, "cp_async_16: global address %p is not a multiple of 16", global_from);
  if (valid) emulation::races::read(global_from, 16);
  emulation::races::write(position.shared + (shared_to - Block::kSharedBase), 16);
  const emulation::races::Quiet quiet;
  emulation::Copy copy{shared_to, valid ? global_from : nullptr, false};
  if (block.late())
    block.thread().copies.groups.back().push_back(std::make_shared<emulation::Copy>(copy));
  else
    emulation::perform(copy);
}
void cp_async_commit() {
  const emulation::races::Quiet quiet;
  if (Block::current().late()) Block::current().thread().copies.groups.emplace_back();
}

void cp_async_arrive(uint64_t* barrier) {
  Block& block = Block::current();
  const std::size_t index = emulation::barrier_index(barrier, "cp_async_arrive");
  emulation::seen_at_end(index);
  const emulation::races::Quiet quiet;
  if (!block.late()) return emulation::arrive(index, 0, position.thread);
  std::vector<std::shared_ptr<emulation::Copy>> copies;
  for (const auto& group : block.thread().copies.groups) copies.insert(copies.end(), group.begin(), group.end());
  block.defer([copies = std::move(copies), index, thread = position.thread] {
    for (const auto& copy : copies) emulation::perform(*copy);
    emulation::arrive(index, 0, thread);
  });
}

void mbarrier_init(uint64_t* barrier, int count) {
  const emulation::races::Quiet quiet;
  Block& block = Block::current();
  const uint32_t offset = block.offset(barrier, "mbarrier_init");
  block.shared(Block::kSharedBase + offset, 8, 8, "mbarrier_init", position.thread);
  if (count < 1 || count > emulation::kMaxCount) block.fail(position.thread, "mbarrier_init with count %d", count);
  for (std::size_t i = 0; i < block.barriers().size(); ++i)
    if (block.barriers()[i].offset == offset && *barrier == (emulation::kMark | i))
      block.fail(position.thread, "mbarrier at offset %u: initialized twice", offset);
  *barrier = emulation::kMark | block.barriers().size();
  block.barriers().push_back({offset, 0, count, count, 0, 0, {}});
}
void mbarrier_arrive(uint64_t* barrier) {
  const std::size_t index = emulation::barrier_index(barrier, "mbarrier_arrive");
  emulation::seen_at_end(index);
  const emulation::races::Quiet quiet;
  emulation::arrive(index, 0, position.thread);
}
void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  Block::current().needs_hopper("mbarrier_expect");
  const std::size_t index = emulation::barrier_index(barrier, "mbarrier_expect");
  emulation::seen_at_end(index);
  const emulation::races::Quiet quiet;
  emulation::arrive(index, bytes, position.thread);
}
void mbarrier_wait(uint64_t* barrier, int parity) {
  const std::size_t index = emulation::barrier_index(barrier, "mbarrier_wait");
  if (parity != 0 && parity != 1) Block::current().fail(position.thread, "mbarrier_wait for parity %d", parity);
  {
    const emulation::races::Quiet quiet;
    if (Block::current().lingers()) Block::current().linger("mbarrier_wait", static_cast<int>(index), parity);
    while (Block::current().barriers()[index].phase == parity)
      Block::current().wait("mbarrier_wait", static_cast<int>(index), parity);
  }
  emulation::SharedBarrier& waited = Block::current().barriers()[index];
  waited.waited = waited.phases;
  if (waited.phases > 0) emulation::races::acquire(waited.ends.at(waited.phases - 1));
}

void bulk_load(void* shared_to, const void* global_from, uint32_t bytes, uint64_t* barrier) {
  emulation::check_bulk(global_from, shared_to, bytes, "bulk_load");
  const std::size_t index = emulation::barrier_index(barrier, "bulk_load");
  emulation::races::read(global_from, bytes);
  emulation::races::touch(shared_to, bytes);
  emulation::races::write(shared_to, bytes);
  emulation::seen_with_load(index);
  const emulation::races::Quiet quiet;
  auto load = [shared_to, global_from, bytes, index] {
    std::memcpy(shared_to, global_from, bytes);
    emulation::come(index, bytes);
  };
  if (Block::current().late())
    Block::current().defer(load);
  else
    load();
}
void cluster_copy(void* to, int rank, const void* from, uint32_t bytes, uint64_t* barrier) {
  Block& block = Block::current();
  emulation::check_bulk(from, to, bytes, "cluster_copy");
  block.shared(Block::kSharedBase + block.offset(from, "cluster_copy"), bytes, 16, "cluster_copy", position.thread);
  Block& other = block.cluster_block(rank, "cluster_copy");
  char* const there = static_cast<char*>(block.cluster_rank(to, rank));
  const uint64_t word = *static_cast<const uint64_t*>(block.cluster_rank(barrier, rank));
  const std::size_t index = emulation::barrier_index(other, word, barrier, "cluster_copy");
  emulation::races::touch(from, bytes);
  emulation::races::read(from, bytes);
  emulation::races::write(there, bytes);
  emulation::seen_with_load(other, index);
  const emulation::races::Quiet quiet;
  auto copy = [there, from, bytes, index, &other] {
    std::memcpy(there, from, bytes);
    emulation::come(other, index, bytes);
  };
  if (block.late())
    block.defer(copy);
  else
    copy();
}
namespace {

emulation::Tile checked_tile(void* shared_to, const TensorMap& map, int column, int head, int token, int batch) {
  emulation::Tile tile{{}, column, head, token, batch, static_cast<char*>(shared_to)};
  std::memcpy(&tile.box, &map, sizeof tile.box);
  emulation::check_bulk(tile.box.data, shared_to, static_cast<uint32_t>(tile.box.rows) * 128, "tensor_load");
  const uint32_t offset = Block::current().offset(shared_to, "tensor_load");
  if (offset % 1024 != 0)
    Block::current().fail(position.thread, "tensor_load to offset %u of shared memory: must be a multiple of 1024",
                          offset);
  for (int row = 0; row < tile.box.rows; ++row) {
    for (int piece = 0; piece < 8; ++piece) {
      if (const char* from = piece_of(tile, row, piece)) emulation::races::read(from, 16);
    }
  }
  emulation::races::touch(shared_to, static_cast<uint32_t>(tile.box.rows) * 128);
  return tile;
}

// The tile comes to a block, whose barrier number `index` counts its bytes.
void load_tile(const emulation::Tile& tile, Block& of, std::size_t index) {
  const uint32_t bytes = static_cast<uint32_t>(tile.box.rows) * 128;
  emulation::races::write(tile.to, bytes);
  emulation::seen_with_load(of, index);
  const emulation::races::Quiet quiet;
  auto load = [tile, bytes, index, &of] {
    emulation::copy(tile);
    emulation::come(of, index, bytes);
  };
  if (Block::current().late())
    Block::current().defer(load);
  else
    load();
}

}  // namespace

void tensor_load(void* shared_to, const TensorMap& map, int column, int head, int token, int batch, uint64_t* barrier) {
  const emulation::Tile tile = checked_tile(shared_to, map, column, head, token, batch);
  load_tile(tile, Block::current(), emulation::barrier_index(barrier, "tensor_load"));
}
void tensor_load_multicast(void* shared_to, const TensorMap& map, int column, int head, int token, int batch,
                           uint64_t* barrier, uint32_t blocks) {
  emulation::Tile tile = checked_tile(shared_to, map, column, head, token, batch);
  Block& block = Block::current();
  for (int rank = 0; blocks >> rank != 0; ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    Block& other = block.cluster_block(rank, "tensor_load_multicast");
    const uint64_t word = *static_cast<const uint64_t*>(block.cluster_rank(barrier, rank));
    tile.to = static_cast<char*>(block.cluster_rank(shared_to, rank));
    load_tile(tile, other, emulation::barrier_index(other, word, barrier, "tensor_load_multicast"));
  }
}
void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  Block& block = Block::current();
  block.needs_hopper("mbarrier_arrive_at");
  Block& other = block.cluster_block(rank, "mbarrier_arrive_at");
  const uint64_t word = *static_cast<const uint64_t*>(block.cluster_rank(barrier, rank));
  const std::size_t index = emulation::barrier_index(other, word, barrier, "mbarrier_arrive_at");
  emulation::seen_at_end(other, index);
  const emulation::races::Quiet quiet;
  other.barriers()[index].reached = true;
  emulation::arrive(other, index, 0, position.thread);
}
void bulk_store(void* global_to, const void* shared_from, uint32_t bytes) {
  emulation::store(global_to, shared_from, bytes, "bulk_store");
}
// As so many stores of 16 bytes, of those that are inside of the tensor.
void tensor_store(const void* shared_from, const TensorMap& map, int column, int head, int token, int batch) {
  emulation::TensorBox box;
  std::memcpy(&box, &map, sizeof box);
  const uint32_t offset = Block::current().offset(shared_from, "tensor_store");
  if (offset % 1024 != 0)
    Block::current().fail(position.thread, "tensor_store from offset %u of shared memory: must be a multiple of 1024",
                          offset);
  for (int row = 0; row < box.rows; ++row) {
    for (int piece = 0; piece < 8; ++piece) {
      if (const char* to = emulation::piece_of(box, column + 8 * piece, head, token + row, batch))
        emulation::store(const_cast<char*>(to),
                         static_cast<const char*>(shared_from) + row * 128 + ((piece ^ (row & 7)) << 4), 16,
                         "tensor_store");
    }
  }
}
void fence_async_shared() { emulation::races::fence(); }
void wait_for_count(const uint32_t* counter, uint32_t least) {
  if (load_acquire(counter) < least) Block::current().wait_for_grid("wait_for_count");
  const uint32_t count = load_acquire(counter);
  if (count < least)
    Block::current().fail(position.thread, "wait_for_count: %u of %u, and no kernel that could still add", count,
                          least);
}

void bulk_commit() {
  const emulation::races::Quiet quiet;
  Block::current().thread().stores.groups.emplace_back();
}

}  // namespace fw::cuda
