// From segment to segment of a split sequence (plan.h): S_{j+1} = M_j S_j + N_j, or in reverse D_j = M_j^T D_{j+1} + N_j, float32.
// A block has some value rows of one head of one sequence and walks along its segments; a thread owns one key.
#include "scan/cuda/device/tokens.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {
namespace {

constexpr int kKeys = 128, kRows = 8;  // threads, value rows of a block
constexpr int kPiece = 32;             // columns of a map that lie transposed in shared memory at a time

FW_DEVICE float state_element(const StateArg& a, int n, int hv, int k, int v) {
  if (a.data == nullptr) return 0.0f;
  const int64_t at = n * a.stride_n + hv * a.stride_h + k * a.stride_k + v * a.stride_v;
  return a.bf16 != 0 ? bf16_value(static_cast<const uint16_t*>(a.data)[at]) : static_cast<const float*>(a.data)[at];
}

__global__ void __launch_bounds__(kKeys) join_kernel(const __grid_constant__ JoinArgs a) {
  float* const rows = reinterpret_cast<float*>(shared_memory());  // [kRows, kKeys]
  float* const piece = rows + kRows * kKeys;                      // [kKeys, kPiece + 1], of a map
  const int k = static_cast<int>(thread_index()), v0 = static_cast<int>(block_index_x()) * kRows, hv = static_cast<int>(block_index_y()),
            n = static_cast<int>(block_index_z());
  const int first = a.first_segment[n], count = a.first_segment[n + 1] - first;
  float state[kRows];
  FW_UNROLL
  for (int r = 0; r < kRows; ++r) state[r] = k < a.K && v0 + r < a.V ? state_element(a.from, n, hv, k, v0 + r) : 0.0f;
  FW_NO_UNROLL
  for (int j = 0; j < count; ++j) {
    const int64_t segment = first + (a.reverse ? count - 1 - j : j), head = segment * a.HV + hv;
    float* const mine = a.states + (head * a.V + v0) * a.K + k;
    const float* const map = a.maps + head * a.K * a.K;
    float next[kRows];
    FW_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const bool here = k < a.K && v0 + r < a.V;
      // The last one leaves nothing to a segment after it, and the scans do not make what nobody needs.
      next[r] = here && j + 1 < count ? mine[r * a.K] : 0.0f;
      if (here) mine[r * a.K] = state[r];
      rows[r * kKeys + k] = state[r];
    }
    if (j + 1 == count) break;
    sync_threads();
    bool zero = j == 0 && a.from.data == nullptr;  // of the first segment there may be no map
    if (!zero && !a.reverse) {
      // Many loads are on their way at once: a step is a chain of memory latencies otherwise.
      FW_NO_UNROLL
      for (int i0 = 0; i0 < a.K; i0 += kPiece) {
        float m[kPiece];
        FW_UNROLL
        for (int i = 0; i < kPiece; ++i) m[i] = k < a.K && i0 + i < a.K ? map[(i0 + i) * a.K + k] : 0.0f;
        FW_UNROLL
        for (int i = 0; i < kPiece; ++i) {
          FW_UNROLL
          for (int r = 0; r < kRows; ++r) next[r] += m[i] * (i0 + i < a.K ? rows[r * kKeys + i0 + i] : 0.0f);
        }
      }
    } else if (!zero) {
      FW_NO_UNROLL
      for (int i0 = 0; i0 < a.K; i0 += kPiece) {
        FW_UNROLL
        for (int turn = 0; turn < kPiece; ++turn) {
          const int row = (turn * kKeys + k) / kPiece, i = k % kPiece;
          piece[row * (kPiece + 1) + i] = row < a.K && i0 + i < a.K ? map[row * a.K + i0 + i] : 0.0f;
        }
        sync_threads();
        FW_UNROLL
        for (int i = 0; i < kPiece; ++i) {
          const float m = piece[k * (kPiece + 1) + i];
          FW_UNROLL
          for (int r = 0; r < kRows; ++r) next[r] += m * (i0 + i < a.K ? rows[r * kKeys + i0 + i] : 0.0f);
        }
        sync_threads();
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
  const Dim3 grid{static_cast<unsigned>((args.V + kRows - 1) / kRows), static_cast<unsigned>(args.HV), static_cast<unsigned>(args.N)};
  launch(join_kernel, grid, kKeys, sizeof(float) * (kRows * kKeys + (args.reverse ? kKeys * (kPiece + 1) : 0)), stream, args);
}

}  // namespace fw::cuda
