// What the emulation must find: kernels with one mistake each, and what the program says when it ends because of it.
// One line a test.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/device_buffer.h"
#include "gpu/ptx.cuh"

namespace fw::cuda::test {
namespace {

int failures = 0;

void result(const char* name, bool right, const std::string& seen) {
  std::printf("%s %s%s%s\n", right ? "ok    " : "WRONG ", name, right ? "" : ": ", right ? "" : seen.c_str());
  failures += !right;
}

using Kernel = void (*)(const float*, float*);

// Runs the kernel in a process of its own, which must abort with a message that contains this.
void dies(const char* name, Kernel kernel, const char* message, unsigned threads = 128, std::size_t shared_bytes = 4096,
          bool behind = false, unsigned cluster = 1) {
  std::fflush(stdout);
  int ends[2];
  if (pipe(ends)) std::abort();
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    alignas(256) static float from[1024], to[1024];
    if (cluster > 1) {
      launch_overlapped_clusters(kernel, {cluster, 1, 1}, cluster, threads, shared_bytes, nullptr, from, to);
    } else if (behind) {
      launch_overlapped(kernel, {1, 1, 1}, threads, shared_bytes, nullptr, from, to);
    } else {
      launch(kernel, {1, 1, 1}, threads, shared_bytes, nullptr, from, to);
    }
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char buffer[1024];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  result(name, WIFSIGNALED(status) && said.find(message) != std::string::npos,
         "\"" + said + "\", expected \"" + message + "\"");
}

// Whether it comes to its end, launched so that it may begin early.
bool overlapped(Kernel kernel) {
  DeviceBuffer<float> memory(std::size_t{1024});
  launch_overlapped(kernel, {1, 1, 1}, 128, 0, nullptr, memory.data(), memory.data());
  return true;
}

// Runs the kernel in the order and with or without delays; to[0] says what happened.
float runs(Kernel kernel, const char* order, const char* late) {
  setenv("FW_EMULATION_ORDER", order, 1);
  setenv("FW_EMULATION_LATE", late, 1);
  DeviceBuffer<float> from(std::vector<float>(1024, 1.0f)), to(std::size_t{1024});
  launch(kernel, {1, 1, 1}, 128, 32768, nullptr, from.data(), to.data());
  unsetenv("FW_EMULATION_ORDER");
  unsetenv("FW_EMULATION_LATE");
  return to.download()[0];
}

uint64_t* barrier() { return reinterpret_cast<uint64_t*>(shared_memory()); }

// ---- Kernels that end the program.
void half_at_barrier(const float*, float*) {
  if (thread_index() < 64)
    sync_threads();
  else
    named_barrier_sync(1, 128);
}
void part_of_warp(const float*, float*) {
  if (lane_index() < 31)
    shuffle_xor(1.0f, 1);
  else
    sync_warp();
}
void lane_has_left(const float*, float*) {
  if (thread_index() == 7) return;
  shuffle_xor(1.0f, 1);
}
void never_arrives(const float*, float*) {
  if (thread_index() == 0) mbarrier_init(barrier(), 2);
  sync_threads();
  if (thread_index() == 0) mbarrier_arrive(barrier());
  mbarrier_wait(barrier(), 0);
}
void bytes_missing(const float* from, float*) {
  if (thread_index() != 0) return;
  mbarrier_init(barrier(), 1);
  mbarrier_expect(barrier(), 64);
  bulk_load(shared_memory() + 16, from, 48, barrier());
  mbarrier_wait(barrier(), 0);
}
void not_initialized(const float*, float*) { mbarrier_arrive(barrier()); }
void overwritten(const float*, float*) {
  if (thread_index() == 0) mbarrier_init(barrier(), 128);
  sync_threads();
  if (thread_index() == 64) *reinterpret_cast<float*>(shared_memory()) = 1;
  sync_threads();
  mbarrier_arrive(barrier());
}
void too_many_arrivals(const float*, float*) {
  if (thread_index() != 0) return;
  mbarrier_init(barrier(), 1);
  mbarrier_expect(barrier(), 16);
  mbarrier_arrive(barrier());
}
void too_many_at_named(const float*, float*) {
  if (thread_index() < 96)
    named_barrier_arrive(1, 64);
  else
    named_barrier_arrive(1, 128);
}
void beyond_the_end(const float*, float*) {
  uint32_t r[4];
  ldmatrix_x4(r, shared_address(shared_memory() + 4096 - 32 * 16 + 16) + lane_index() * 16);
}
void not_aligned(const float*, float*) {
  uint32_t r[4];
  ldmatrix_x4(r, shared_address(shared_memory()) + lane_index() * 24);
}
void global_not_aligned(const float* from, float*) { cp_async_16(shared_address(shared_memory()), from + 1, true); }
void not_in_shared(const float* from, float*) { shared_address(from); }
void bulk_of_odd_size(const float* from, float*) {
  if (thread_index() != 0) return;
  mbarrier_init(barrier(), 1);
  bulk_load(shared_memory() + 16, from, 20, barrier());
}
void stores_itself(const float*, float* to) {
  if (thread_index() != 0) return;
  bulk_store(to, shared_memory(), 64);
  bulk_commit();
}
void descriptor_in_a_row(const float*, float*) {
  float d[32];
  const uint32_t a[4] = {};
  wgmma_rs<64, false>(d, a, wgmma_descriptor(shared_address(shared_memory()) + 128, 16, 1024), false);
}
void different_descriptors(const float*, float*) {
  float d[4];
  const uint32_t a[4] = {};
  wgmma_rs<8, false>(d, a, wgmma_descriptor(shared_address(shared_memory()) + thread_index() / 64 * 1024, 16, 1024),
                     false);
}
void part_of_warpgroup(const float*, float*) {
  float d[4];
  const uint32_t a[4] = {};
  if (warp_index() < 3) wgmma_rs<8, false>(d, a, wgmma_descriptor(shared_address(shared_memory()), 16, 1024), false);
}

// ---- Kernels that give a wrong number.
void no_cp_async_wait(const float* from, float* to) {
  cp_async_16(shared_address(shared_memory()) + thread_index() * 16, from + thread_index() * 4, true);
  cp_async_commit();
  sync_threads();
  if (thread_index() == 0) to[0] = *reinterpret_cast<float*>(shared_memory());
}
void no_mbarrier_wait(const float* from, float* to) {
  if (thread_index() == 0) {
    mbarrier_init(barrier(), 1);
    mbarrier_expect(barrier(), 64);
    bulk_load(shared_memory() + 16, from, 64, barrier());
  }
  sync_threads();
  if (thread_index() == 0) {
    to[0] = reinterpret_cast<float*>(shared_memory())[4];
    mbarrier_wait(barrier(), 0);
  }
}
void no_read_wait(const float*, float* to) {
  auto* memory = reinterpret_cast<float*>(shared_memory());
  if (thread_index() != 0) return;
  for (int i = 0; i < 4; ++i) memory[i] = 1;
  bulk_store(to, memory, 16);
  bulk_commit();
  memory[0] = 2;
  bulk_wait<0>();
}
void no_wgmma_wait(const float*, float* to) {
  for (unsigned i = thread_index(); i < 8192; i += 128) reinterpret_cast<uint32_t*>(shared_memory())[i] = 0x3f803f80u;
  sync_threads();
  float d[4];
  const uint32_t a[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  wgmma_rs<8, false>(d, a, wgmma_descriptor(shared_address(shared_memory()), 16, 1024), false);
  wgmma_commit();
  if (thread_index() == 0) to[0] = d[0] / 16;
  wgmma_wait<0>();
}
// Right when warps run in order: each adds to what the one before has left.
void no_barrier(const float*, float* to) {
  auto* memory = reinterpret_cast<float*>(shared_memory());
  if (thread_index() == 0) memory[0] = 1;
  if (thread_index() == 127) to[0] = memory[0];
}
void fresh_memory(const float*, float* to) {
  if (thread_index() == 0) to[0] = *reinterpret_cast<float*>(shared_memory());
}

// Warp 1 is past the second phase of a barrier when nothing says that warp 0 has seen the first.
void missed_phase(const float*, float* to) {
  constexpr int kRounds = 8;
  if (thread_index() == 0) {
    for (int i = 0; i < kRounds; ++i) mbarrier_init(barrier() + i, 32);
    mbarrier_init_fence();
  }
  sync_threads();
  for (int i = 0; i < kRounds; ++i) {
    if (warp_index() == 1) mbarrier_arrive(barrier() + i);
    if (warp_index() <= 1) mbarrier_wait(barrier() + i, 0);
    if (warp_index() == 1) mbarrier_arrive(barrier() + i);
  }
  if (thread_index() == 0) to[0] = 1;
}

// One kernel after the other: the first writes 1 (over the 3 of the inputs), the second doubles what it reads before or
// after it waits.
void writes_one(const float*, float* to) {
  if (thread_index() == 0) to[0] = 1;
}
template <bool kWaits>
void doubles(const float*, float* to) {
  if (kWaits) grid_dependency_wait();
  const float x = to[0];
  if (!kWaits) grid_dependency_wait();
  sync_threads();
  if (thread_index() == 0 && block_index_x() == 0) to[1] = 2 * x;
}
float after_one(Kernel second, const char* early) {
  setenv("FW_EMULATION_EARLY", early, 1);
  DeviceBuffer<float> from(std::vector<float>(1024, 3.0f)), to(std::vector<float>(1024, 3.0f));
  launch(writes_one, {1, 1, 1}, 128, 0, nullptr, from.data(), to.data());
  launch_overlapped(second, {3, 1, 1}, 128, 0, nullptr, from.data(), to.data());
  const float result = to.download()[1];
  unsetenv("FW_EMULATION_EARLY");
  return result;
}
void launches_before_waiting(const float*, float*) {
  grid_dependency_launch();
  grid_dependency_wait();
}
void launches_first(const float*, float*) {
  grid_dependency_launch_first();
  grid_dependency_wait();
}
void launches_after_waiting(const float*, float*) {
  if (warp_index() == 0) grid_dependency_wait();
  sync_threads();
  grid_dependency_launch();
}

// ---- Clusters. Each block leaves to[1] and its own number for the next one, which adds them up.
template <bool kLast>
void passes_on(const float*, float* to) {
  auto* memory = reinterpret_cast<float*>(shared_memory());
  const int rank = static_cast<int>(block_index_x()) % 2;
  grid_dependency_wait();
  if (thread_index() == 0) memory[0] = to[1] + static_cast<float>(block_index_x());
  cluster_sync();
  if (thread_index() < 2) to[2 + 2 * block_index_x() + thread_index()] = *cluster_memory(memory, rank ^ 1);
  if (kLast) cluster_sync();
}
void one_block_stays_away(const float*, float*) {
  if (block_index_x() == 1) named_barrier_sync(1, 256);
  cluster_sync();
}
void warps_that_have_left(const float*, float* to) {
  if (warp_index() >= 2 * block_index_x()) return;
  cluster_sync();
  if (thread_index() == 0) to[0] = 1;
}
void of_another_cluster(const float*, float*) {
  cluster_sync();
  cluster_memory(shared_memory(), 2);
}
void arrives_twice(const float*, float*) {
  cluster_arrive();
  cluster_arrive();
}
void waits_without_arriving(const float*, float*) { cluster_wait(); }
void leaves_between(const float*, float*) { cluster_arrive(); }
void sends_to_no_block(const float*, float*) {
  auto* const memory = reinterpret_cast<uint64_t*>(shared_memory());
  if (thread_index() == 0) mbarrier_init(memory, 1);
  cluster_sync();
  cluster_copy(memory + 2, 2, memory + 4, 16, memory);
}
// Each waits for bytes that the other does not send.
void waits_for_another(const float*, float*) {
  auto* const memory = reinterpret_cast<uint64_t*>(shared_memory());
  if (thread_index() == 0) {
    mbarrier_init(memory, 1);
    mbarrier_expect(memory, 16);
  }
  cluster_sync();
  mbarrier_wait(memory, 0);
}
// Arrivals at both blocks that nobody waits for.
void arrives_for_nobody(const float*, float*) {
  auto* const memory = reinterpret_cast<uint64_t*>(shared_memory());
  if (thread_index() == 0) mbarrier_init(memory, 2);
  cluster_sync();
  if (thread_index() < 2) mbarrier_arrive_at(memory, static_cast<int>(thread_index()));
  cluster_sync();
}
// What four blocks got, after a kernel in front that makes to[1] of it: 2.
bool pass_on(const char* early, const char* order) {
  setenv("FW_EMULATION_EARLY", early, 1);
  setenv("FW_EMULATION_ORDER", order, 1);
  DeviceBuffer<float> from(std::size_t{1024}), to(std::vector<float>(1024, 1.0f));
  launch(doubles<true>, {1, 1, 1}, 128, 0, nullptr, from.data(), to.data());
  launch_overlapped_clusters(passes_on<true>, {4, 1, 1}, 2, 128, 4096, nullptr, from.data(), to.data());
  const auto got = to.download();
  unsetenv("FW_EMULATION_EARLY");
  unsetenv("FW_EMULATION_ORDER");
  const float expected[] = {3, 3, 2, 2, 5, 5, 4, 4};
  return std::equal(expected, expected + 8, got.begin() + 2);
}
bool left() {
  DeviceBuffer<float> to(std::size_t{16});
  launch_overlapped_clusters(warps_that_have_left, {2, 1, 1}, 2, 128, 0, nullptr, to.data(), to.data());
  return to.download()[0] == 1;
}

int run_all() {
  dies("sync_threads that not all reach", half_at_barrier,
       "threads 0 to 63: sync_threads 0; 64 of 128 threads have come");
  dies("named barrier that not all reach", half_at_barrier,
       "threads 64 to 127: named barrier 1; 64 of 128 threads have come");
  dies("lanes at different instructions", part_of_warp,
       "is at sync_warp while others of its warp or warpgroup wait at shuffle");
  dies("shuffle without a lane", lane_has_left, "leaves the kernel while others of its warp wait at shuffle");
  dies("mbarrier with an arrival missing", never_arrives,
       "mbarrier_wait at offset 0 for parity 0; it is in phase 0, 1 of 2 arrivals missing");
  dies("mbarrier with bytes missing", bytes_missing, "16 bytes missing");
  dies("mbarrier without init", not_initialized, "no barrier at offset 0");
  dies("mbarrier overwritten", overwritten, "no barrier at offset 0");
  dies("mbarrier with an arrival too many", too_many_arrivals, "more arrivals than its count 1");
  dies("named barrier with a warp too many", too_many_at_named,
       "named barrier 1 for 128 threads; others wait at it for 64");
  dies("ldmatrix beyond the end", beyond_the_end, "ldmatrix: 16 bytes at offset 4096 of shared memory, which has 4096");
  dies("ldmatrix not aligned", not_aligned, "is not a multiple of 16");
  dies("cp_async_16 from an address not aligned", global_not_aligned, "cp_async_16: global address");
  dies("shared_address of something else", not_in_shared, "is not in shared memory");
  dies("bulk_load of an odd size", bulk_of_odd_size, "bulk_load of 20 bytes");
  dies("bulk_store not waited for", stores_itself, "without bulk_wait_read()");
  dies("wgmma in the middle of the swizzle", descriptor_in_a_row, "middle of the 8 rows");
  dies("wgmma with two descriptors", different_descriptors, "not the same product");
  dies("wgmma without a warp", part_of_warpgroup, "leaves the kernel while others of its warpgroup wait at wgmma");
  dies("threads not a multiple of 32", fresh_memory, "33 threads", 33);
  dies("too much shared memory", fresh_memory, "at most 232448", 32, 232449);

  auto shows = [](const char* name, Kernel kernel, const char* order) {
    const float early = runs(kernel, "", "0"), late = runs(kernel, order, "1");
    result(name, early == 1 && !(late == 1), std::to_string(early) + " and " + std::to_string(late));
  };
  shows("cp_async_wait missing", no_cp_async_wait, "");
  shows("mbarrier_wait missing", no_mbarrier_wait, "");
  shows("bulk_wait_read missing", no_read_wait, "");
  shows("wgmma_wait missing", no_wgmma_wait, "");
  shows("sync_threads missing", no_barrier, "reverse");
  const float seen = runs(missed_phase, "", "0");
  result("phase of an mbarrier that a warp may miss, in order", seen == 1, std::to_string(seen));
  setenv("FW_EMULATION_ORDER", "late", 1);
  dies("phase of an mbarrier that a warp may miss", missed_phase, "threads 0 to 31: mbarrier_wait at offset");
  unsetenv("FW_EMULATION_ORDER");
  for (const char* early : {"0", "1"}) {
    const float waits = after_one(doubles<true>, early), reads_ahead = after_one(doubles<false>, early);
    const bool begins_early = *early == '1';
    result(begins_early ? "reads before grid_dependency_wait, begun early" : "reads before grid_dependency_wait",
           reads_ahead == (begins_early ? 6 : 2), std::to_string(reads_ahead));
    result(begins_early ? "reads behind grid_dependency_wait, begun early" : "reads behind grid_dependency_wait",
           waits == 2, std::to_string(waits));
  }
  dies("grid_dependency_launch before the wait", launches_before_waiting,
       "grid_dependency_launch before grid_dependency_wait", 128, 0, true);
  result("grid_dependency_launch_first", overlapped(launches_first), "");
  result("grid_dependency_launch behind the wait of another warp", overlapped(launches_after_waiting), "");
  for (const char* early : {"0", "1"}) {
    for (const char* order : {"", "reverse", "3", "late"})
      result("cluster_sync and cluster_memory", pass_on(early, order), "another number");
  }
  result("cluster_sync of the threads that are left", left(), "another number");
  dies("a block that reads in one that is over", passes_on<false>,
       "cluster_memory of block 0, which is over or has not begun", 128, 4096, false, 2);
  dies("cluster_sync that not all blocks reach", one_block_stays_away, "block (1, 0, 0), thread", 128, 4096, false, 2);
  dies("cluster_memory of no block", of_another_cluster, "cluster_memory of block 2 of 2", 128, 4096, false, 2);
  dies("cluster_arrive twice", arrives_twice, "arrives at a barrier of the cluster again", 128, 4096, false, 2);
  dies("cluster_wait without cluster_arrive", waits_without_arriving, "has not arrived at it", 128, 4096, false, 2);
  dies("a thread that leaves between them", leaves_between, "leaves the kernel between cluster_arrive and cluster_wait",
       128, 4096, false, 2);
  dies("cluster_copy to no block", sends_to_no_block, "cluster_copy of block 2 of 2", 128, 4096, false, 2);
  dies("blocks that wait for what nobody sends", waits_for_another, "16 bytes missing", 128, 4096, false, 2);
  dies("arrivals from another block that nobody waits for", arrives_for_nobody,
       "nobody has waited for the last arrivals from other blocks", 128, 4096, false, 2);
  dies("a cluster too large", fresh_memory, "9 blocks in clusters of 9", 128, 4096, false, 9);
  result("shared memory is not zero", std::isnan(runs(fresh_memory, "", "0")), "a number");
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace fw::cuda::test

int main() { return fw::cuda::test::run_all(); }
