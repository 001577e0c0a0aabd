// All instructions that the kernels use and C++ has no word for, one function each. Kernels contain no asm, no
// threadIdx and no intrinsic of CUDA. With FW_CUDA_EMULATION defined the same functions come from tests/emulation. A
// kernel's source then compiles as plain C++ and runs on the CPU, block by block.
//
// bf16 is stored as uint16_t, two of them in a uint32_t with the first in the low half. Shared memory is dynamic only,
// its base is shared_memory(); "address" is a 32-bit shared address, as shared_address() gives it. What needs Hopper is
// absent when the header is compiled for less, and so is what needs sm_90a (wgmma.cuh, register_count_*) when compiled
// for plain sm_90.
#pragma once

#ifdef FW_CUDA_EMULATION
#include "emulation/emulation.h"
#else

#include <cstddef>
#include <cstdint>

#include "scan/cuda/call/tensor_map.h"

#define FW_DEVICE __device__ __forceinline__
#define FW_UNROLL _Pragma("unroll")
#define FW_NO_UNROLL _Pragma("unroll 1")

namespace fw::cuda {

// ---- Who am I ----------------------------------------------------------------------------------------------------------
FW_DEVICE unsigned thread_index() { return threadIdx.x; }
FW_DEVICE unsigned block_size() { return blockDim.x; }
FW_DEVICE unsigned block_index_x() { return blockIdx.x; }
FW_DEVICE unsigned block_index_y() { return blockIdx.y; }
FW_DEVICE unsigned block_index_z() { return blockIdx.z; }
FW_DEVICE unsigned grid_size_x() { return gridDim.x; }
FW_DEVICE unsigned grid_size_y() { return gridDim.y; }
FW_DEVICE unsigned grid_size_z() { return gridDim.z; }
FW_DEVICE unsigned lane_index() { return threadIdx.x & 31; }
FW_DEVICE unsigned warp_index() { return threadIdx.x >> 5; }

// ---- Barriers of a block -----------------------------------------------------------------------------------------------
FW_DEVICE void sync_threads() { __syncthreads(); }
FW_DEVICE void sync_warp() { __syncwarp(); }
// Barriers 1 to 15 (0 is sync_threads); threads is a multiple of 32 and counts those that arrive and those that wait.
FW_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
FW_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

FW_DEVICE char* shared_memory() {
  extern __shared__ __align__(1024) char fw_shared_memory[];
  return fw_shared_memory;
}
FW_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Exchange within a warp (all 32 lanes take part; float, int32_t, uint32_t) --------------------------------------------
template <class T>
FW_DEVICE T shuffle_xor(T x, int mask, int width = 32) {
  return __shfl_xor_sync(0xffffffffu, x, mask, width);
}
template <class T>
FW_DEVICE T shuffle_down(T x, int delta, int width = 32) {
  return __shfl_down_sync(0xffffffffu, x, static_cast<unsigned>(delta), width);
}
template <class T>
FW_DEVICE T shuffle_up(T x, int delta, int width = 32) {
  return __shfl_up_sync(0xffffffffu, x, static_cast<unsigned>(delta), width);
}
template <class T>
FW_DEVICE T shuffle(T x, int lane, int width = 32) {
  return __shfl_sync(0xffffffffu, x, lane, width);
}
FW_DEVICE uint32_t warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

// ---- Numbers -----------------------------------------------------------------------------------------------------------
FW_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
FW_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }
FW_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
FW_DEVICE float bf16_low(uint32_t packed) { return bits_float(packed << 16); }
FW_DEVICE float bf16_high(uint32_t packed) { return bits_float(packed & 0xffff0000u); }
FW_DEVICE uint16_t bf16_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
FW_DEVICE float bf16_value(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }
// x, of which the compiler knows nothing: what follows from it is not made ahead of here.
FW_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// About two units in the last place; denormals count as zero.
FW_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FW_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FW_DEVICE float rcp_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of angles from -pi to pi, to 5e-7.
FW_DEVICE float sin_fast(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FW_DEVICE float cos_fast(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- 8x8 matrices of 16-bit numbers between shared memory and registers ----------------------------------------------------
// Lane 8 i + r gives the address of row r of matrix i; thread t holds elements (t / 4, 2 (t % 4)) and the next of each
// matrix, with _trans of its transpose.
FW_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
FW_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
FW_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

// ---- Matrix products of a warp: d += a b -----------------------------------------------------------------------------------
// Not volatile: volatile would pin each product after the loads before it.
FW_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// With 8 columns of a: rows lane / 4 and lane / 4 + 8.
FW_DEVICE void mma_bf16_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}
FW_DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Copies of 16 bytes that a thread starts and waits for -----------------------------------------------------------------
// Writes zeros and reads nothing when not valid.
FW_DEVICE void cp_async_16(uint32_t shared_to, const void* global_from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_to), "l"(global_from), "r"(valid ? 16 : 0)
               : "memory");
}
FW_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
FW_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- Global memory -----------------------------------------------------------------------------------------------------
// *counter += 1 once all that this thread has done and seen before is to be seen by whoever reads the sum with
// load_acquire().
FW_DEVICE void release_add_one(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
FW_DEVICE uint32_t load_acquire(const uint32_t* counter) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}
// Returns once the counter, to which a kernel adds that is running or over, is at least `least`.
FW_DEVICE void wait_for_count(const uint32_t* counter, uint32_t least) {
  while (load_acquire(counter) < least) __nanosleep(100);
}
// The same pointer, of which the compiler knows that it is of global memory (one that was read from memory could be of
// any, and each access asks).
template <class T>
FW_DEVICE T* global_memory(T* pointer) {
  std::size_t address;
  asm("cvta.to.global.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return static_cast<T*>(__cvta_global_to_generic(address));
}
// Starts loading the 128-byte line that has this byte into the L2 cache.
FW_DEVICE void prefetch_line(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Four numbers from the L2 cache, or wherever they are after it.
FW_DEVICE float4 load_past_l1(const float4* from) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// ---- Hopper: *to += x, there, without waiting. Of this thread's accesses of the same place in order, and of those
// alone.
FW_DEVICE void add_there(float4* to, const float4& x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

// ---- Hopper: pairs of bf16 values, a b and a b + c, rounded once -------------------------------------------------------------
FW_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
FW_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// ---- Hopper: registers to 8x8 matrices in shared memory, addresses and layout as in ldmatrix ---------------------------------
FW_DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
FW_DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- Hopper: barriers in shared memory -----------------------------------------------------------------------------------
FW_DEVICE void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// After the inits of a thread and before the sync_threads() that publishes them.
FW_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FW_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// One arrival that also makes the phase wait for this many bytes of bulk_load.
FW_DEVICE void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Returns once the phase of this parity is over: at once for parity 1 of a fresh barrier.
FW_DEVICE void mbarrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@over bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// The thread arrives when all its cp_async_16 before this are complete; the arrival is one of those that the barrier
// counts.
FW_DEVICE void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// ---- Hopper: copies of many bytes by one thread; addresses and sizes are multiples of 16 ---------------------------------------
FW_DEVICE void bulk_load(void* shared_to, const void* global_from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared_to)),
               "l"(global_from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// The map's rows (64 tokens, if it was not made for others) from `token` on and 64 channels from `column` on of a head.
// They become a SW128 tile of 128 bytes a row, with zeros outside of the tensor.
FW_DEVICE void tensor_load(void* shared_to, const TensorMap& map, int column, int head, int token, int batch,
                           uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(shared_to)),
      "l"(&map), "r"(column), "r"(head), "r"(token), "r"(batch), "r"(shared_address(barrier))
      : "memory");
}
FW_DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
FW_DEVICE void bulk_store(void* global_to, const void* shared_from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global_to),
               "r"(shared_address(shared_from)), "r"(bytes)
               : "memory");
}
FW_DEVICE void bulk_prefetch(const void* global_from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global_from), "r"(bytes) : "memory");
}
FW_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the last N groups of stores of this thread: have been read from shared memory / are complete.
template <int N>
FW_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
FW_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Between ordinary accesses of this thread to shared memory and bulk copies or wgmma that read or overwrite the same
// bytes.
FW_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Between bulk copies that are complete and an ordinary access of this thread that lets others, on other processors,
// copy the same bytes; and there between the access that saw it and those copies.
FW_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Hopper: blocks of a cluster (launch_overlapped_clusters) -------------------------------------------------------------------
// Returns when all threads of the cluster that have not left the kernel have called it, and shows to each what all have
// written before.
FW_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same in two halves and showing nothing: what cluster_copy() loads is seen by its barrier. A thread that arrives
// waits before it arrives again.
FW_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
FW_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
// Copies shared memory of this block to the place of `to` in the shared memory of the cluster's block number `rank`,
// whose barrier at the place of `barrier` expects the bytes. Both blocks must have begun and not be over until it has
// come: one cluster barrier in front, one after the wait for it. Of clusters of more than one block: in a kernel
// without clusters it is an illegal instruction.
FW_DEVICE void cluster_copy(void* to, int rank, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 place, there;\n"
      "mapa.shared::cluster.u32 place, %0, %4;\n"
      "mapa.shared::cluster.u32 there, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [place], [%1], %2, [there];\n"
      "}" ::"r"(shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
// The same place in the shared memory of the cluster's block number `rank`, which must have begun and not be over: a
// cluster_sync() is before the first access and one after the last.
template <class T>
FW_DEVICE T* cluster_memory(T* shared, int rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(address);
}

// ---- Hopper: the kernel before in the stream, launched with launch_overlapped() ------------------------------------------------
FW_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
FW_DEVICE void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
FW_DEVICE void grid_dependency_launch_first() { grid_dependency_launch(); }  // before this kernel has waited

#else

FW_DEVICE void grid_dependency_wait() {}
FW_DEVICE void grid_dependency_launch() {}
FW_DEVICE void grid_dependency_launch_first() {}

#endif

}  // namespace fw::cuda

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "scan/cuda/machine/wgmma.cuh"
#endif

#endif

namespace fw::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

FW_DEVICE float warp_sum(float x) {
  FW_UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}
FW_DEVICE float warp_max(float x) {
  FW_UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) {
    const float other = shuffle_xor(x, mask);
    x = other > x ? other : x;
  }
  return x;
}

// What rounding to bf16 leaves out of a pair of numbers, given what it made of them.
FW_DEVICE uint32_t pack_lo(uint32_t packed, float low, float high) {
  return pack_bf16(low - bf16_low(packed), high - bf16_high(packed));
}

}  // namespace fw::cuda
