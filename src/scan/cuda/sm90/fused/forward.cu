// The whole forward in one kernel, of rules with an erase and one decay a token, or none (recurrence.md 4, in the dual
// form of tiles.h). From q, k, v, decays and steps it makes o and the final state, and moves every byte once. K = V =
// 128, bf16. Per chunk of 64 tokens of a sequence and value head, with |k_i|^-1 = n_i, |q_i|^-1 = m_i and G as in
// shape.cuh:
//   T_ij = s_i n_i^2 2^(G_i - G_j) (k_i.k_j), j < i      A = (I + T)^-1 diag(s n)
//   P_ij = scale m_i 2^(G_i - G_j) (q_i.k_j), j <= i
//   R = v - diag(n 2^G) k S      U = A R      O = diag(scale m 2^G) q S + P U
//   S = 2^G_C S + k^T diag(2^(G_C - G)) U
// One CTA for each sequence and value head; shape.cuh has its warps' roles. It is for calls with as many of these as
// there are SMs, or more. The bits depend on the sequence and head alone.
#include "gpu/launch.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/sm90/fused/a_maker.cuh"
#include "scan/cuda/sm90/fused/p_maker.cuh"
#include "scan/cuda/sm90/fused/state.cuh"

namespace fw::cuda {
namespace {

template <FusedStep kStep>
__global__ void __launch_bounds__(kFusedThreads, 1)
    fused_forward_kernel(const __grid_constant__ FusedForwardArgs args, const __grid_constant__ FusedMaps maps) {
  using Shape = FusedShape;
  char* const shared = shared_memory();
  FusedBarriers& barriers = *reinterpret_cast<FusedBarriers*>(shared + Shape::kBarriers);
  const int group = shuffle(static_cast<int>(thread_index()) / kGroupThreads, 0);
  if (thread_index() == 0) {
    barriers.init();
    mbarrier_init_fence();
  }
  // A and P are 0 above the diagonal, and nobody writes there.
  for (int i = static_cast<int>(thread_index()); i < 2 * Shape::kPair / 16; i += kFusedThreads)
    reinterpret_cast<uint4*>(shared + Shape::kPairs)[i] = make_uint4(0, 0, 0, 0);
  fence_async_shared();
  grid_dependency_wait();
  grid_dependency_launch();
  const Problem& x = args.problem;
  const ScanCoord coord = scan_coord(x.sequences, x.HV, 1, 0);
  FusedRows& rows = *reinterpret_cast<FusedRows*>(shared + Shape::kRows);
  if (thread_index() == 0) find_fused_rows(args, coord.n, coord.hv, rows);
  sync_threads();
  const FusedBlock block{args,         maps,        barriers, rows, shared, shuffle(shared_address(shared), 0),
                         coord.length, coord.chunks};
  if (group == 0) {
    register_count_decrease<72>();
    make_p(block);
  } else if (group == 1) {
    register_count_decrease<88>();
    make_a<kStep>(block);
  } else {
    register_count_increase<176>();
    walk_state(block, group - 2);
  }
}

}  // namespace

void fused_forward(const FusedForwardArgs& args, void* stream) {
  const Problem& x = args.problem;
  if (x.K != kFusedK || x.V != kFusedK) fail_internal("fused_forward: expected K and V 128, got {} and {}", x.K, x.V);
  FusedForwardArgs own = args;
  own.norm_eps = static_cast<float>(x.rule.norm_eps), own.gain_eps = static_cast<float>(x.rule.gain_eps);
  FusedMaps maps;
  const bool mapped =
      map_tensor(x.in.q, args.shape, x.HV, x.K, maps.q) && map_tensor(x.in.k, args.shape, x.HV, x.K, maps.k) &&
      map_tensor(x.in.v, args.shape, x.HV, x.V, maps.v) && map_tensor(args.o, args.shape, x.HV, x.V, maps.o);
  if (!mapped && args.shape.T > 0) fail_internal("fused_forward: expected q, k, v and o that TMA takes");
  const bool gate = x.rule.gain == Gain::kOne || x.rule.gain == Gain::kGate;
  launch_overlapped(gate ? fused_forward_kernel<FusedStep::kOfGate> : fused_forward_kernel<FusedStep::kOfKey>,
                    scan_grid(x.sequences, x.HV, 1), kFusedThreads, FusedShape::kShared, stream, own, maps);
}

}  // namespace fw::cuda
