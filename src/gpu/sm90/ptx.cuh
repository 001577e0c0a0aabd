// Instructions from Hopper on (sm_90), and with wgmma.cuh those of sm_90a alone. What a GPU has not is absent when the
// header is compiled for it.
#pragma once

#include "gpu/ptx.cuh"
#include "gpu/tensor_map.h"

#ifndef FW_CUDA_EMULATION  // there ptx.cuh has them

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
namespace fw::cuda {

// ---- *to += x, there, without waiting. Of this thread's accesses of the same address in order, and of those
// alone.
FW_DEVICE void add_there(float4* to, const float4& x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

// ---- registers to 8x8 matrices in shared memory, addresses and layout as in ldmatrix ---------------------------------
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

// ---- barriers in shared memory: one arrival that also makes the phase wait for this many bytes of bulk_load.
FW_DEVICE void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// ---- copies of many bytes by one thread; addresses and sizes are multiples of 16 ---------------------------------------
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
// The same rows and channels from a SW128 tile in shared memory to the tensor; what lies outside of it is not written.
// It belongs to a group of stores as bulk_store() does.
FW_DEVICE void tensor_store(const void* shared_from, const TensorMap& map, int column, int head, int token, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(
                   shared_address(shared_from)),
               "l"(&map), "r"(column), "r"(head), "r"(token), "r"(batch)
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

// ---- blocks of a cluster (launch_overlapped_clusters) -------------------------------------------------------------------
// Returns when all threads of the cluster that have not left the kernel have called it, and shows to each what all have
// written before.
FW_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same in two steps and showing nothing: what cluster_copy() loads is seen by its barrier. A thread that arrives
// waits before it arrives again.
FW_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
FW_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
// Copies shared memory of this block to the offset of `to` in the shared memory of the cluster's block number `rank`,
// whose barrier at the offset of `barrier` expects the bytes. Both blocks must have begun and not be over until it has
// come: one cluster barrier in front, one after the wait for it. Of clusters of more than one block: in a kernel
// without clusters it is an illegal instruction.
FW_DEVICE void cluster_copy(void* to, int rank, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 dst, bar;\n"
      "mapa.shared::cluster.u32 dst, %0, %4;\n"
      "mapa.shared::cluster.u32 bar, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [dst], [%1], %2, [bar];\n"
      "}" ::"r"(shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
// The same offset in the shared memory of the cluster's block number `rank`, which must have begun and not be over: a
// cluster_sync() is before the first access and one after the last.
template <class T>
FW_DEVICE T* cluster_memory(T* shared, int rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(address);
}

}  // namespace fw::cuda
#else
namespace fw::cuda {

// Of code that runs on older GPUs too: there nothing is asynchronous that these wait for.
FW_DEVICE void fence_async_shared() {}
FW_DEVICE void fence_async_global() {}
FW_DEVICE void wgmma_fence() {}
FW_DEVICE void wgmma_commit() {}
template <int N>
FW_DEVICE void wgmma_wait() {}
template <int N>
FW_DEVICE void keep(float (&)[N]) {}

}  // namespace fw::cuda
#endif

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "gpu/sm90/wgmma.cuh"
#endif

#endif
