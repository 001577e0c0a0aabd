// What ThreadSanitizer must find in the emulation (emulation/races.h), and what it must not: small kernels with one
// mistake each, and the same without it. One line a test. Only in builds with -fsanitize=thread.
#include <cstdio>
#include <vector>

#include "gpu/launch.h"
#include "gpu/ptx.cuh"

namespace {
int reports = 0;
}
// Called by ThreadSanitizer for each race that it reports; not to be looked at itself.
extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) void __tsan_on_report(
    const void* /*report*/) {  // NOLINT(bugprone-reserved-identifier)
  ++reports;
}

namespace fw::cuda::test {
namespace {

int failures = 0;

using Kernel = void (*)(float*);
void finds(const char* name, bool race, Kernel kernel, unsigned blocks = 1, unsigned cluster = 1) {
  alignas(1024) static float memory[4096];
  reports = 0;
  launch_overlapped_clusters(kernel, {blocks, 1, 1}, cluster, 128, 32768, nullptr, static_cast<float*>(memory));
  const bool right = (reports > 0) == race;
  std::printf("%s %s: %d races reported, expected %s\n", right ? "ok    " : "WRONG ", name, reports,
              race ? "some" : "none");
  failures += !right;
}

float* tile() { return reinterpret_cast<float*>(shared_memory() + 1024); }
uint64_t* barrier(int i = 0) { return reinterpret_cast<uint64_t*>(shared_memory()) + i; }
int me() { return static_cast<int>(thread_index()); }

// Each thread writes its own number and reads another's.
template <int kHow>
void exchange(float* out) {
  if (me() == 0) mbarrier_init(barrier(), 128);
  sync_threads();
  tile()[me()] = static_cast<float>(me());
  if (kHow == 1) sync_threads();
  if (kHow == 2) named_barrier_sync(3, 128);
  if (kHow == 3) mbarrier_arrive(barrier()), mbarrier_wait(barrier(), 0);
  if (kHow == 4) sync_warp();
  if (kHow == 5) shuffle_xor(1.0f, 1);
  out[me()] = tile()[kHow == 4 || kHow == 5 ? me() ^ 1 : 127 - me()];
}
// Warps of a block where only some wait for a barrier.
template <bool kAllArrive>
void arrival(float* out) {
  if (me() < 32) {
    tile()[me()] = 1;
    if (kAllArrive) named_barrier_arrive(2, 128);
    if (!kAllArrive) named_barrier_arrive(1, 128);
    return;
  }
  if (me() < 64 && !kAllArrive) named_barrier_arrive(2, 128), named_barrier_sync(1, 128);
  if (me() >= 64 && !kAllArrive) {
    named_barrier_arrive(1, 128);
    out[me()] = tile()[me() & 31];  // before anything was waited for
    return;
  }
  if (kAllArrive) named_barrier_sync(2, 128);
  out[me()] = tile()[me() & 31];
}
// A tile loaded and read again and again, the loader waiting until it has been read, or only the one before.
template <bool kFree>
void ring(float* memory) {
  if (me() == 0)
    mbarrier_init(barrier(0), 1), mbarrier_init(barrier(1), 1), mbarrier_init(barrier(2), 96),
        mbarrier_init(barrier(3), 96);
  sync_threads();
  for (int work_tile = 0; work_tile < 4; ++work_tile) {
    if (me() == 0) {
      const int read = work_tile - (kFree ? 1 : 2);
      if (read >= 0) mbarrier_wait(barrier(2 + (read & 1)), read / 2 & 1);
      mbarrier_expect(barrier(work_tile & 1), 1024);
      bulk_load(tile(), memory + 1024, 1024, barrier(work_tile & 1));
    }
    if (me() >= 32) {
      mbarrier_wait(barrier(work_tile & 1), work_tile / 2 & 1);
      memory[me()] = tile()[me()];
      mbarrier_arrive(barrier(2 + (work_tile & 1)));
    }
  }
}
// A product's operands, overwritten before (or after) it was waited for.
template <bool kWaited>
void product(float* out) {
  for (int i = me(); i < 4096; i += 128) tile()[i] = 0;
  fence_async_shared();
  sync_threads();
  float d[4] = {};
  const uint32_t a = shared_address(tile());
  wgmma_fence();
  wgmma_ss<8, false, false>(d, wgmma_descriptor(a, 16, 1024), wgmma_descriptor(a + 8192, 16, 1024), false);
  wgmma_commit();
  if (kWaited) wgmma_wait<0>();
  sync_threads();
  tile()[16 * me() + 7] = 1;
  wgmma_wait<0>();
  out[me()] = d[0];
}
// A row of a matrix is read by the lane that loads its address.
template <bool kSynced>
void matrix(float* out) {
  tile()[me()] = 1;
  if (kSynced) sync_warp();
  uint32_t r[4];
  const unsigned warp = warp_index();
  ldmatrix_x4(r, shared_address(tile() + 32 * warp + 4 * ((lane_index() + 1) % 8)));
  out[me()] = static_cast<float>(r[0]);
}
// What leaves shared memory by a bulk store may be overwritten when that has been waited for.
template <bool kWaited>
void leaving(float* memory) {
  tile()[me()] = 2;
  fence_async_shared();
  sync_threads();
  if (me() == 0) {
    bulk_store(memory + 2048, tile(), 512);
    bulk_commit();
    if (kWaited) bulk_wait_read<0>();
  }
  sync_threads();
  tile()[me()] = 3;
  if (me() == 0) bulk_wait<0>();
}
// What threads have written and the asynchronous proxy then touches, with fences of nobody, of those who wrote, or of
// those who waited for them.
enum class Fence { kNone, kWriters, kWaiters };
template <Fence kFence>
void operands(float* out) {
  for (int i = me(); i < 4096; i += 128) tile()[i] = 0;
  if (kFence == Fence::kWriters) fence_async_shared();
  sync_threads();
  if (kFence == Fence::kWaiters) fence_async_shared();
  float d[4] = {};
  const uint32_t a = shared_address(tile());
  wgmma_fence();
  wgmma_ss<8, false, false>(d, wgmma_descriptor(a, 16, 1024), wgmma_descriptor(a + 8192, 16, 1024), false);
  wgmma_commit();
  wgmma_wait<0>();
  out[me()] = d[0];
}
template <Fence kFence>
void leaves(float* memory) {
  tile()[me()] = 2;
  if (kFence == Fence::kWriters) fence_async_shared();
  sync_threads();
  if (me() != 0) return;
  if (kFence == Fence::kWaiters) fence_async_shared();
  bulk_store(memory + 2048, tile(), 512);
  bulk_commit();
  bulk_wait<0>();
}
// A tile that threads fill at first, and TMA when it has been read (the reverse scan's, whose last chunk is short).
template <Fence kFence>
void refilled(float* memory) {
  if (me() == 0) mbarrier_init(barrier(0), 128), mbarrier_init(barrier(1), 128), mbarrier_init(barrier(2), 1);
  sync_threads();
  tile()[me()] = 1;
  mbarrier_arrive(barrier(0));
  mbarrier_wait(barrier(0), 0);
  memory[me()] = tile()[127 - me()];
  if (kFence == Fence::kWriters) fence_async_shared();
  mbarrier_arrive(barrier(1));
  if (me() == 0) {
    mbarrier_wait(barrier(1), 0);
    if (kFence == Fence::kWaiters) fence_async_shared();
    mbarrier_expect(barrier(2), 512);
    bulk_load(tile(), memory + 1024, 512, barrier(2));
  }
  mbarrier_wait(barrier(2), 0);
  memory[me()] = tile()[127 - me()];
}
// What TMA has loaded the product may take as it is.
void brought(float* memory) {
  if (me() == 0) {
    mbarrier_init(barrier(), 1);
    mbarrier_init_fence();
    mbarrier_expect(barrier(), 12288);
    bulk_load(tile(), memory, 12288, barrier());
  }
  sync_threads();
  mbarrier_wait(barrier(), 0);
  float d[4] = {};
  const uint32_t a = shared_address(tile());
  wgmma_fence();
  wgmma_ss<8, false, false>(d, wgmma_descriptor(a, 16, 1024), wgmma_descriptor(a + 8192, 16, 1024), false);
  wgmma_commit();
  wgmma_wait<0>();
  memory[3072 + me()] = d[0];
}
template <bool kOwn>
void blocks(float* out) {
  out[kOwn ? static_cast<int>(block_index_x()) * 128 + me() : (me() + static_cast<int>(block_index_x())) % 128] = 1;
}

// Blocks of a cluster: each reads what another has written, and writes again once that one has been read, or at once.
template <bool kMeet, bool kRead>
void cluster(float* out) {
  const int rank = static_cast<int>(block_index_x());
  cluster_sync();  // all have begun
  tile()[me()] = 1;
  if (kMeet) cluster_sync();
  out[rank * 128 + me()] = *cluster_memory(tile() + 127 - me(), rank ^ 1);
  if (kRead) cluster_sync();
  tile()[me()] = 2;
  cluster_sync();
}

int all() {
  finds("threads that nothing orders", true, exchange<0>);
  finds("sync_threads", false, exchange<1>);
  finds("named barrier", false, exchange<2>);
  finds("mbarrier", false, exchange<3>);
  finds("sync_warp", false, exchange<4>);
  finds("a shuffle orders nothing", true, exchange<5>);
  finds("a named barrier that nobody waits for", true, arrival<false>);
  finds("arrivals at a named barrier", false, arrival<true>);
  finds("a tile brought before it has been read", true, ring<false>);
  finds("a tile brought once it has been read", false, ring<true>);
  finds("operands overwritten under a product", true, product<false>);
  finds("operands overwritten after a product", false, product<true>);
  finds("rows of a matrix without sync_warp", true, matrix<false>);
  finds("rows of a matrix", false, matrix<true>);
  finds("a tile overwritten while it leaves", true, leaving<false>);
  finds("a tile overwritten after it has left", false, leaving<true>);
  finds("operands of a product without a fence", true, operands<Fence::kNone>);
  finds("operands of a product, fenced by who wrote", false, operands<Fence::kWriters>);
  finds("operands of a product, fenced by who waited", false, operands<Fence::kWaiters>);
  finds("a tile that leaves without a fence", true, leaves<Fence::kNone>);
  finds("a tile that leaves, fenced by who wrote", false, leaves<Fence::kWriters>);
  finds("a tile that leaves, fenced by who waited", false, leaves<Fence::kWaiters>);
  finds("a tile refilled by TMA without a fence", true, refilled<Fence::kNone>);
  finds("a tile refilled by TMA, fenced by who read", false, refilled<Fence::kWriters>);
  finds("a tile refilled by TMA, fenced by who brings", false, refilled<Fence::kWaiters>);
  finds("operands that TMA loaded", false, brought);
  finds("two blocks, one place", true, blocks<false>, 2);
  finds("two blocks, two places", false, blocks<true>, 2);
  finds("another block's memory", true, cluster<false, true>, 2, 2);
  finds("another block's memory, overwritten before it has been read", true, cluster<true, false>, 2, 2);
  finds("another block's memory, with barriers", false, cluster<true, true>, 2, 2);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fw::cuda::test

int main() { return fw::cuda::test::all(); }
