// Barriers of warps and blocks, and the exchange of values within a warp.
#include "emulation/block.h"
#include "emulation/emulation.h"

namespace fw::cuda {

namespace emulation {
namespace {

const Operation kSyncWarp{"sync_warp", 32, true, [](void* const*, unsigned) { return true; }};

struct BarrierCall {
  int id;
  unsigned threads;
  bool wait;
};
bool run_barrier(void* const* operands, unsigned first_thread) {
  const BarrierCall* common = nullptr;
  for (unsigned i = 0; i < 32; ++i) {
    const auto* call = static_cast<const BarrierCall*>(operands[i]);
    if (!call) continue;
    if (common && (common->id != call->id || common->threads != call->threads || common->wait != call->wait))
      Block::current().fail(first_thread + i, "threads of one warp call different barriers");
    common = call;
  }
  return Block::current().barrier_arrive(common->id, common->threads, common->wait, first_thread);
}
const Operation kSyncThreads{"sync_threads", 32, true, run_barrier};
const Operation kNamedBarrier{"named barrier", 32, false, run_barrier};

void named_barrier(int id, int threads, bool wait) {
  Block& block = Block::current();
  if (id < 1 || id > 15) block.fail(position.thread, "named barrier %d: must be 1 to 15", id);
  if (threads <= 0 || threads % 32 != 0)
    block.fail(position.thread, "named barrier %d for %d threads: must be a multiple of 32", id, threads);
  BarrierCall call{id, static_cast<unsigned>(threads), wait};
  void* const round = block.barrier_round(id);
  races::release(round);
  block.meet(kNamedBarrier, &call);
  if (wait) races::acquire(round);
}

struct ShuffleCall {
  uint32_t value;
  Shuffle kind;
  int parameter, width;
  uint32_t result;
};
bool run_shuffle(void* const* operands, unsigned first_thread) {
  for (int lane = 0; lane < 32; ++lane) {
    auto& call = *static_cast<ShuffleCall*>(operands[lane]);
    if (call.width < 1 || call.width > 32 || (call.width & (call.width - 1)) != 0)
      Block::current().fail(first_thread + static_cast<unsigned>(lane), "shuffle of width %d", call.width);
    const int first = lane & ~(call.width - 1), last = first + call.width - 1;
    int from = lane;
    switch (call.kind) {
      case Shuffle::kXor:
        from = lane ^ call.parameter;
        break;
      case Shuffle::kUp:
        from = lane - call.parameter < first ? lane : lane - call.parameter;
        break;
      case Shuffle::kDown:
        from = lane + call.parameter;
        break;
      case Shuffle::kIndex:
        from = first | (call.parameter & (call.width - 1));
        break;
    }
    if (from > last || from < 0) from = lane;  // beyond the segment: one's own value
    call.result = static_cast<const ShuffleCall*>(operands[from])->value;
  }
  return true;
}
const Operation kShuffle{"shuffle", 32, false, run_shuffle};

struct BallotCall {
  bool predicate;
  uint32_t result;
};
bool run_ballot(void* const* operands, unsigned) {
  uint32_t result = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    result |= static_cast<uint32_t>(static_cast<const BallotCall*>(operands[lane])->predicate) << lane;
  for (unsigned lane = 0; lane < 32; ++lane) static_cast<BallotCall*>(operands[lane])->result = result;
  return true;
}
const Operation kBallot{"warp_ballot", 32, false, run_ballot};

}  // namespace

uint32_t shuffle(uint32_t x, Shuffle kind, int parameter, int width) {
  ShuffleCall call{x, kind, parameter, width, 0};
  Block::current().meet(kShuffle, &call);
  return call.result;
}

}  // namespace emulation

using emulation::Block;

uint32_t shared_address(const void* pointer) {
  return Block::kSharedBase + Block::current().offset(pointer, "shared_address");
}
void sync_warp() {
  int nothing = 0;
  Block& block = Block::current();
  void* const end = block.warp_sync();
  emulation::races::release(end);
  block.meet(emulation::kSyncWarp, &nothing);
  emulation::races::acquire(end);
}
void sync_threads() {
  emulation::BarrierCall call{0, 0, true};
  Block& block = Block::current();
  void* const end = block.block_sync();
  emulation::races::release(end);
  block.meet(emulation::kSyncThreads, &call);
  emulation::races::acquire(end);
}
void named_barrier_sync(int id, int threads) { emulation::named_barrier(id, threads, true); }
void named_barrier_arrive(int id, int threads) { emulation::named_barrier(id, threads, false); }

void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
void cluster_arrive() { Block::current().cluster_arrive(); }
void cluster_wait() { Block::current().cluster_wait(); }
void* cluster_rank(const void* shared, int rank) { return Block::current().cluster_rank(shared, rank); }

uint32_t warp_ballot(bool predicate) {
  emulation::BallotCall call{predicate, 0};
  Block::current().meet(emulation::kBallot, &call);
  return call.result;
}

}  // namespace fw::cuda
