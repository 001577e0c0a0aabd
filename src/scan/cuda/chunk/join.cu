// From segment to segment of a split sequence (plan.h): S_{j+1} = M_j S_j + N_j, or in reverse D_j = M_j^T D_{j+1} +
// N_j, float32. A block has some value rows of one head of one sequence and walks along its segments; a thread owns one
// key.
//
// Roles, 128 threads: thread k has key channel k of 8 value rows, which it keeps in registers from segment to segment;
// the rows of all channels meet in shared memory between two sync_threads().
#include "gpu/launch.h"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/kernels.h"

namespace fw::cuda {
namespace {

constexpr int kKeys = 128, kRows = 8;  // threads, value rows of a block
constexpr int kPiece = 64;             // numbers of a map that a thread has at a time

FW_DEVICE float state_element(const StateArg& a, int n, int hv, int k, int v) {
  const int64_t at = n * a.stride_n + hv * a.stride_h + k * a.stride_k + v * a.stride_v;
  return a.bf16 != 0 ? bf16_value(static_cast<const uint16_t*>(a.data)[at]) : static_cast<const float*>(a.data)[at];
}

// From row `first` on of column k of the map, for M S; of row k for M^T D. 0 outside of it. Many loads are on their way
// at once: a step is a chain of memory latencies otherwise.
FW_DEVICE void load_map(const float* map, int K, int k, int first, bool transposed, float (&m)[kPiece]) {
  const int count = k < K ? K - first : 0;
  if (!transposed) {
    FW_UNROLL
    for (int i = 0; i < kPiece; ++i) m[i] = i < count ? map[(first + i) * K + k] : 0.0f;
  } else if (K % 4 == 0) {
    FW_UNROLL
    for (int i = 0; i < kPiece; i += 4) {
      const float4 x = i < count ? *reinterpret_cast<const float4*>(map + k * K + first + i) : make_float4(0, 0, 0, 0);
      m[i] = x.x, m[i + 1] = x.y, m[i + 2] = x.z, m[i + 3] = x.w;
    }
  } else {
    FW_UNROLL
    for (int i = 0; i < kPiece; ++i) m[i] = i < count ? map[k * K + first + i] : 0.0f;
  }
}

__global__ void __launch_bounds__(kKeys) join_kernel(const __grid_constant__ JoinArgs a) {
  float* const rows = reinterpret_cast<float*>(shared_memory());  // [kRows, kKeys]
  // Sequences in x, of which there may be more than 65,535.
  const unsigned tiles = static_cast<unsigned>((a.V + kRows - 1) / kRows);
  const int k = static_cast<int>(thread_index()), v0 = static_cast<int>(block_index_x() % tiles) * kRows,
            hv = static_cast<int>(block_index_y()), n = static_cast<int>(block_index_x() / tiles);
  // Without grid_dependency_launch(): a second pass whose blocks became resident while the first one ran took 3 to 6%
  // longer.
  grid_dependency_wait();
  const int first = a.first_segment[n], count = a.first_segment[n + 1] - first;
  const int slot = a.from.data != nullptr ? state_slot(a.from, n) : -1;
  float state[kRows];
  FW_UNROLL
  for (int r = 0; r < kRows; ++r)
    state[r] = slot >= 0 && k < a.K && v0 + r < a.V ? state_element(a.from, slot, hv, k, v0 + r) : 0.0f;
  FW_NO_UNROLL
  for (int j = 0; j < count; ++j) {
    const int64_t segment = first + (a.reverse ? count - 1 - j : j), head = segment * a.HV + hv;
    float* const mine = a.states + (head * a.V + v0) * a.K + k;
    // of the first segment there may be no map
    const bool last = j + 1 == count, zero = j == 0 && a.from.data == nullptr;
    const float* const map = a.maps + head * a.K * a.K;
    float next[kRows], m[kPiece];
    if (!last && !zero) load_map(map, a.K, k, 0, a.reverse, m);
    FW_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const bool here = k < a.K && v0 + r < a.V;
      // The last one leaves nothing to a segment after it, and the scans do not make what nobody needs.
      next[r] = here && !last ? mine[r * a.K] : 0.0f;
      if (here) mine[r * a.K] = state[r];
      rows[r * kKeys + k] = state[r];
    }
    if (last) break;
    sync_threads();
    if (!zero) {
      FW_NO_UNROLL
      for (int piece = 0; piece < a.K; piece += kPiece) {
        if (piece > 0) load_map(map, a.K, k, piece, a.reverse, m);
        FW_UNROLL
        for (int i = 0; i < kPiece; i += 4) {
          FW_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const float4 x = *reinterpret_cast<const float4*>(rows + r * kKeys + piece + i);
            next[r] = fmaf(m[i + 3], x.w, fmaf(m[i + 2], x.z, fmaf(m[i + 1], x.y, fmaf(m[i], x.x, next[r]))));
          }
        }
      }
    }
    sync_threads();
    FW_UNROLL
    for (int r = 0; r < kRows; ++r) state[r] = next[r];
  }
}

}  // namespace

void join_segments(const JoinArgs& args, void* stream) {
  if (args.K > kKeys) fail_internal("join_segments: expected K at most {}, got {}", kKeys, args.K);
  const Dim3 grid{static_cast<unsigned>((args.V + kRows - 1) / kRows) * static_cast<unsigned>(args.N),
                  static_cast<unsigned>(args.HV)};
  launch_overlapped(join_kernel, grid, kKeys, sizeof(float) * kRows * kKeys, stream, args);
}

}  // namespace fw::cuda
