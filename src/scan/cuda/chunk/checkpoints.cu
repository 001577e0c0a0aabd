// Checkpoints (args.h) at the boundaries of segments. The state that a segment starts from is the joined one,
// which a call that begins there starts from too. It is not what the segment before it ends with, which is rounded
// otherwise. All others are stored by the scans.
//
// Roles, 256 threads: a block has a segment and value head, a thread neighbouring numbers of its state.
#include "gpu/launch.h"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/kernels.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

struct SegmentStates {
  SequenceArg segments;
  const float* states;  // [segments, HV, V, K]
  int32_t HV, K, V;
};

__global__ void __launch_bounds__(kThreads)
    copy_checkpoints_kernel(const __grid_constant__ CheckpointArg a, const __grid_constant__ SegmentStates s) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int segment = static_cast<int>(block_index_x()), hv = static_cast<int>(block_index_y()),
            n = a.sequence_of[segment];
  const int done = first_chunk(s.segments, segment) - first_chunk(a.whole, n);  // chunks before it in its sequence
  if (done == 0 || done % a.chunks != 0) return;
  const int index = checkpoint_index(a, n, done / a.chunks - 1);
  if (index < 0) return;
  const StateArg& to = a.states;
  const float* const from = s.states + (static_cast<int64_t>(segment) * s.HV + hv) * s.V * s.K;
  const int64_t base = index * to.stride_n + hv * to.stride_h;
  FW_NO_UNROLL
  for (int i = static_cast<int>(thread_index()); i < s.V * s.K; i += kThreads) {
    const int64_t at = base + i % s.K * to.stride_k + i / s.K * to.stride_v;
    if (to.bf16 != 0) {
      static_cast<uint16_t*>(to.data)[at] = bf16_bits(from[i]);
    } else {
      static_cast<float*>(to.data)[at] = from[i];
    }
  }
}

}  // namespace

void copy_checkpoints(const CheckpointArg& args, const SequenceArg& segments, int32_t HV, int32_t K, int32_t V,
                      const float* states, void* stream) {
  if (args.states.data == nullptr) return;
  launch_overlapped(copy_checkpoints_kernel, Dim3{static_cast<unsigned>(segments.N), static_cast<unsigned>(HV)},
                    kThreads, 0, stream, args, SegmentStates{segments, states, HV, K, V});
}

}  // namespace fw::cuda
