// Copies and arrivals that reach several blocks of a cluster (launch_overlapped_clusters), from Hopper on.
#pragma once

#include "gpu/sm90/ptx.cuh"

#ifndef FW_CUDA_EMULATION
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
namespace fw::cuda {

// tensor_load() to the same offset of every block of the cluster whose bit of `blocks` (1 << rank) is set. The barrier
// at the offset of `barrier` in each of them expects the bytes. All of them have begun (cluster_sync) and none is over
// before its bytes have come.
FW_DEVICE void tensor_load_multicast(void* shared_to, const TensorMap& map, int column, int head, int token, int batch,
                                     uint64_t* barrier, uint32_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared_to)),
      "l"(&map), "r"(column), "r"(head), "r"(token), "r"(batch), "r"(shared_address(barrier)),
      "h"(static_cast<uint16_t>(blocks))
      : "memory");
}
// An arrival at the offset of `barrier` in the cluster's block number `rank`, which has begun and is not over. It shows
// nothing that the thread has written (that would be a fence of the device, half a microsecond): for buffers that were
// read.
FW_DEVICE void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

}  // namespace fw::cuda
#endif
#endif
