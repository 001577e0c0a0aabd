// All instructions that the kernels use and C++ has no word for, one function each. Kernels contain no asm, no
// threadIdx and no intrinsic of CUDA. With FW_CUDA_EMULATION defined the same functions come from tests/emulation. A
// kernel's source then compiles as plain C++ and runs on the CPU, block by block.
//
// bf16 is stored as uint16_t, two of them in a uint32_t with the first in the low half. Shared memory is dynamic only,
// its base is shared_memory(); "address" is a 32-bit shared address, as shared_address() gives it. What needs Hopper is
// in sm90/ptx.cuh.
#pragma once

#ifdef FW_CUDA_EMULATION
#include "emulation/emulation.h"
#else

#include <cstddef>
#include <cstdint>

#define FW_DEVICE __device__ __forceinline__
#define FW_UNROLL _Pragma("unroll")
#define FW_NO_UNROLL _Pragma("unroll 1")
// Whether instructions of sm90/ptx.cuh are there, for code that has others for older GPUs.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FW_HOPPER 1
#else
#define FW_HOPPER 0
#endif

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
// Of the code that is compiled; the emulation asks the GPU that it stands for.
FW_DEVICE constexpr bool is_hopper() { return FW_HOPPER != 0; }

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
FW_DEVICE float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// ---- Pairs of bf16 values, a b + c and a b, rounded once -----------------------------------------------------------------
FW_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
FW_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#if FW_HOPPER
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return fma_bf16x2(a, b, 0x80008000u);  // -0 changes no product
#endif
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

// Its transpose of one such matrix, element for element as ldmatrix leaves them.
FW_DEVICE uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
FW_DEVICE void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
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

// ---- Barriers in shared memory -----------------------------------------------------------------------------------------
FW_DEVICE void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// After the inits of a thread and before the sync_threads() that publishes them.
FW_DEVICE void mbarrier_init_fence() {
#if FW_HOPPER
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
FW_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}" ::"r"(shared_address(barrier))
      : "memory");
}
// Returns once the phase of this parity is over: at once for parity 1 of a fresh barrier.
FW_DEVICE void mbarrier_wait(uint64_t* barrier, int parity) {
#if FW_HOPPER
#define FW_MBARRIER_ASK "mbarrier.try_wait.parity"
#else
#define FW_MBARRIER_ASK "mbarrier.test_wait.parity"
#endif
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n" FW_MBARRIER_ASK
      ".shared::cta.b64 over, [%0], %1;\n"
      "@over bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#undef FW_MBARRIER_ASK
}
// The thread arrives when all its cp_async_16 before this are complete; the arrival is one of those that the barrier
// counts.
FW_DEVICE void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
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

// ---- The kernel before in the stream, launched with launch_overlapped(); before Hopper: nothing to wait for
#if FW_HOPPER

FW_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
FW_DEVICE void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
FW_DEVICE void grid_dependency_launch_first() { grid_dependency_launch(); }  // before this kernel has waited

#else

FW_DEVICE void grid_dependency_wait() {}
FW_DEVICE void grid_dependency_launch() {}
FW_DEVICE void grid_dependency_launch_first() {}

#endif

}  // namespace fw::cuda

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
