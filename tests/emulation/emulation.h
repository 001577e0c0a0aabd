// The functions of gpu/ptx.cuh on the CPU, and the words of CUDA that kernels use. So a kernel's source
// compiles as plain C++20: g++ -std=c++20 -DFW_CUDA_EMULATION -Wno-unknown-pragmas -x c++ kernel.cu, with
// emulation/*.cpp.
//
// Each thread of a block is a fiber (fiber.h) that runs until it has to wait; blocks run side by side with OpenMP
// (compile emulation/*.cpp with it). What a warp or warpgroup does together happens when the last of its threads
// arrives. The dynamic shared memory is filled with NaN before each block. What the emulator itself can see going wrong
// ends the program with a message:
// - a shared address outside of the block's memory or not aligned,
// - threads of one warp at different instructions,
// - barriers used in ways that the hardware forbids,
// - threads that all wait.
//
// -fsanitize=address sees the ordinary accesses of a kernel as well.
//
//   FW_EMULATION_ORDER=reverse | <seed>   the order in which threads run: what depends on it without a barrier shows itself
//   FW_EMULATION_ORDER=late               warps go on from an mbarrier as late as any (at random): who could miss one of its phases does
//   FW_EMULATION_LATE=1                   asynchronous copies happen as late as they may, results of wgmma are NaN until waited for
//   FW_EMULATION_EARLY=1                  a kernel launched with launch_overlapped() begins, two of its blocks, before the one before it: what they read
//                                         before grid_dependency_wait() is what that one has not written yet
//
// Built with ThreadSanitizer, accesses that no barrier orders are reported with both places, and so is shared memory
// that the asynchronous proxy touches after a thread has written it without fence_async_shared() (races.h).
//
// Not seen: a missing wgmma_fence or mbarrier_init_fence, or fence_async_global, and blocks that wait for each other do
// not work but in a cluster.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "gpu/tensor_map.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define FW_DEVICE inline
#define FW_UNROLL
#define FW_NO_UNROLL
#define FW_HOPPER 1  // is_hopper() says whether

// clang-format off
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
// clang-format on

#include "emulation/gpu.h"
#include "emulation/run.h"

namespace fw::cuda {

using std::max;
using std::min;

inline unsigned thread_index() { return emulation::position.thread; }
inline unsigned block_size() { return emulation::position.threads; }
inline unsigned block_index_x() { return emulation::position.block[0]; }
inline unsigned block_index_y() { return emulation::position.block[1]; }
inline unsigned block_index_z() { return emulation::position.block[2]; }
inline unsigned grid_size_x() { return emulation::position.grid[0]; }
inline unsigned grid_size_y() { return emulation::position.grid[1]; }
inline unsigned grid_size_z() { return emulation::position.grid[2]; }
inline unsigned lane_index() { return thread_index() & 31; }
inline unsigned warp_index() { return thread_index() >> 5; }
inline bool is_hopper() { return emulation::gpu.major >= 9; }
inline char* shared_memory() { return emulation::position.shared; }
uint32_t shared_address(const void* pointer);

void sync_threads();
void sync_warp();
void named_barrier_sync(int id, int threads);
void named_barrier_arrive(int id, int threads);

// ---- Exchange within a warp
template <class T>
T shuffle_bits(T x, emulation::Shuffle kind, int parameter, int width) {
  static_assert(sizeof(T) == 4);
  return std::bit_cast<T>(emulation::shuffle(std::bit_cast<uint32_t>(x), kind, parameter, width));
}
template <class T>
T shuffle_xor(T x, int mask, int width = 32) {
  return shuffle_bits(x, emulation::Shuffle::kXor, mask, width);
}
template <class T>
T shuffle_down(T x, int delta, int width = 32) {
  return shuffle_bits(x, emulation::Shuffle::kDown, delta, width);
}
template <class T>
T shuffle_up(T x, int delta, int width = 32) {
  return shuffle_bits(x, emulation::Shuffle::kUp, delta, width);
}
template <class T>
T shuffle(T x, int lane, int width = 32) {
  return shuffle_bits(x, emulation::Shuffle::kIndex, lane, width);
}
uint32_t warp_ballot(bool predicate);

// ---- Numbers
inline uint32_t float_bits(float x) { return std::bit_cast<uint32_t>(x); }
inline float bits_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint16_t bf16_bits(float x) {
  if (x != x) return 0x7fff;
  const uint32_t bits = float_bits(x);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float bf16_value(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }
inline uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(bf16_bits(low)) | static_cast<uint32_t>(bf16_bits(high)) << 16;
}
inline float bf16_low(uint32_t packed) { return bits_float(packed << 16); }
inline float bf16_high(uint32_t packed) { return bits_float(packed & 0xffff0000u); }
// Through float32: what lies exactly between two bf16 values only after that rounding may go the other way.
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return pack_bf16(std::fma(bf16_low(a), bf16_low(b), bf16_low(c)), std::fma(bf16_high(a), bf16_high(b), bf16_high(c)));
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b));
}
namespace emulation {
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
}  // namespace emulation
inline int opaque(int x) { return x; }
inline float exp2_fast(float x) { return emulation::flushed(std::exp2(emulation::flushed(x))); }
inline float log2_fast(float x) { return std::log2(emulation::flushed(x)); }
inline float sin_fast(float x) { return std::sin(emulation::flushed(x)); }
inline float cos_fast(float x) { return std::cos(emulation::flushed(x)); }
inline float rcp_fast(float x) { return emulation::flushed(1.0f / emulation::flushed(x)); }
inline float rsqrt_fast(float x) { return emulation::flushed(1.0f / std::sqrt(emulation::flushed(x))); }

// ---- Matrices of a warp
void ldmatrix_x4(uint32_t (&r)[4], uint32_t address);
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address);
void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address);
void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]);
void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]);
inline uint32_t transpose_matrix(uint32_t x) {
  const int lane = static_cast<int>(lane_index()), from = lane % 4 * 8 + lane / 8, shift = lane / 4 % 2 * 16;
  const uint32_t first = shuffle(x, from), second = shuffle(x, from + 4);
  return (first >> shift & 0xffffu) | (second >> shift & 0xffffu) << 16;
}
inline void store_shared(uint32_t address, uint32_t x) {
  *reinterpret_cast<uint32_t*>(shared_memory() + (address - shared_address(shared_memory()))) = x;
}
void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <class T>
T* global_memory(T* pointer) {
  return pointer;
}
inline void prefetch_line(const void*) {}
inline void mma_bf16_k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) { mma_bf16(d, {a0, a1, 0, 0}, b, 0); }
void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// ---- Asynchronous copies and barriers in shared memory
void cp_async_16(uint32_t shared_to, const void* global_from, bool valid);
void cp_async_commit();
void cp_async_arrive(uint64_t* barrier);
template <int N>
void cp_async_wait() {
  emulation::cp_async_wait(N);
}
void mbarrier_init(uint64_t* barrier, int count);
inline void mbarrier_init_fence() {}
void mbarrier_arrive(uint64_t* barrier);
void mbarrier_expect(uint64_t* barrier, uint32_t bytes);
void mbarrier_wait(uint64_t* barrier, int parity);
void bulk_load(void* shared_to, const void* global_from, uint32_t bytes, uint64_t* barrier);
void tensor_load(void* shared_to, const TensorMap& map, int column, int head, int token, int batch, uint64_t* barrier);
void bulk_store(void* global_to, const void* shared_from, uint32_t bytes);
void tensor_store(const void* shared_from, const TensorMap& map, int column, int head, int token, int batch);
inline void bulk_prefetch(const void* /*global_from*/, uint32_t /*bytes*/) {}
void bulk_commit();
template <int N>
void bulk_wait_read() {
  emulation::bulk_wait(N, false);
}
template <int N>
void bulk_wait() {
  emulation::bulk_wait(N, true);
}
void fence_async_shared();
inline void fence_async_global() {}
void cluster_sync();
void cluster_arrive();
void cluster_wait();
void cluster_copy(void* to, int rank, const void* from, uint32_t bytes, uint64_t* barrier);
void tensor_load_multicast(void* shared_to, const TensorMap& map, int column, int head, int token, int batch,
                           uint64_t* barrier, uint32_t blocks);
void mbarrier_arrive_at(uint64_t* barrier, int rank);
inline void prefetch_map(const TensorMap& /*map*/) {}
void* cluster_rank(const void* shared, int rank);
template <class T>
T* cluster_memory(T* shared, int rank) {
  return static_cast<T*>(cluster_rank(shared, rank));
}
inline void grid_dependency_wait() { emulation::grid_wait(); }
inline void grid_dependency_launch() { emulation::grid_launch(false); }
inline void grid_dependency_launch_first() { emulation::grid_launch(true); }

// ---- Global memory
inline void release_add_one(uint32_t* counter) {
  std::atomic_ref<uint32_t>(*counter).fetch_add(1, std::memory_order_release);
}
inline uint32_t load_acquire(const uint32_t* counter) {
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(counter)).load(std::memory_order_acquire);
}
inline float4 load_past_l1(const float4* from) { return *from; }
inline void add_there(float4* to, const float4& x) { to->x += x.x, to->y += x.y, to->z += x.z, to->w += x.w; }
// a kernel that adds is over here, or comes (FW_EMULATION_EARLY): else the program ends
void wait_for_count(const uint32_t* counter, uint32_t least);

// ---- Matrices of a warpgroup
inline uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_offset, uint32_t stride_offset) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(leading_offset >> 4) << 16 |
         static_cast<uint64_t>(stride_offset >> 4) << 32 | uint64_t{1} << 62;
}
inline void wgmma_fence() {}
void wgmma_commit();
template <int N>
void wgmma_wait() {
  emulation::wgmma_wait(N);
}
template <int N>
void keep(float (&)[N]) {}
inline void keep(uint32_t (&)[4]) {}
inline void take_over(uint32_t (&a)[4], const uint32_t (&next)[4], int32_t) { std::copy_n(next, 4, a); }
template <int N, bool kTransposeB>
void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256);
  emulation::wgmma({d, a, 0, b, N, false, kTransposeB, accumulate});
}
template <int N, bool kTransposeA, bool kTransposeB>
void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256);
  emulation::wgmma({d, nullptr, a, b, N, kTransposeA, kTransposeB, accumulate});
}
template <int N>
void register_count_decrease() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
}
template <int N>
void register_count_increase() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
}

}  // namespace fw::cuda
