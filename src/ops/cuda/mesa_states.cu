// H of a Mesa layer before every chunk of 64 tokens, for mesa_chunks.cu:
//   H = exp(G_64) H + sum over t of beta_t exp(G_64 - G_t) k_t k_t^T,   G_t: sum of the log decays up to token t
// in float32. The products have one exact operand, k in bf16. The other, weight times k, is two bf16 parts.
//   mesa_states_kernel   grid: sequences x heads x slices of 32 rows of H;  4 warps, each of K / 4 columns
// A CTA goes from chunk to chunk of its sequence and loads the next chunk's keys ahead by cp.async.
#include <cmath>

#include "gpu/launch.h"
#include "gpu/sw128_atoms.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/mesa_chunks.cuh"
#include "ops/cuda/packets.cuh"

namespace fw::cuda {
namespace {

constexpr int kStateThreads = 128, kSliceRows = 32;

template <int K>
struct StatesMemory {
  static constexpr int kKeyBytes = 2 * kMesaTokens * K, kWeights = 2 * kKeyBytes, kWeightsOfChunk = kMesaTokens + 1;
  static constexpr size_t kBytes = kWeights + 2 * sizeof(float) * (kWeightsOfChunk + 3);
};

// A chunk's weights of its tokens, and behind them its decay.
FW_DEVICE void make_weights(double (&g)[2], const float (&beta)[2], int lane, float* weights) {
  sum_log_decays(g, lane);
  const double all = move_double(g[1], [](uint32_t word) { return shuffle(word, 31); });
  FW_UNROLL for (int i = 0; i < 2; ++i) weights[2 * lane + i] = beta[i] * exp_fast(static_cast<float>(all - g[i]));
  if (lane == 0) weights[kMesaTokens] = exp_fast(static_cast<float>(all));
}

template <int K>
__global__ void __launch_bounds__(kStateThreads) mesa_states_kernel(const MesaArgs<Bf16> a, uint4* states) {
  using Memory = StatesMemory<K>;
  constexpr int kSlices = K / kSliceRows, kPairs = K / 64, kAtoms = K / 8;  // kPairs: of 8 columns of a warp
  const int thread = static_cast<int>(thread_index()), lane = static_cast<int>(lane_index()),
            warp = static_cast<int>(warp_index()), slice = static_cast<int>(block_index_x()) % kSlices;
  const int64_t task = block_index_x() / kSlices, n = task / a.shape.heads, head = task % a.shape.heads,
                begin = a.sequences.offsets[n], tokens = a.sequences.offsets[n + 1] - begin;
  if (tokens == 0) return;
  const int chunks = static_cast<int>((tokens + kMesaTokens - 1) / kMesaTokens);
  char* const shared = shared_memory();
  const uint32_t keys = shared_address(shared);

  // Only whole chunks are added: no state follows the last one.
  double g[2] = {};
  float beta[2] = {};
  const auto load = [&](int c) {
    const int64_t first = begin + int64_t{c} * kMesaTokens;
    const Bf16* const from = a.k.data + first * a.k.stride + head * K;
    for (int i = thread; i < kMesaTokens * kAtoms; i += kStateThreads)
      cp_async_16(keys + static_cast<uint32_t>(c % 2 * Memory::kKeyBytes) + atom_offset(i / kAtoms, i % kAtoms),
                  from + i / kAtoms * a.k.stride + i % kAtoms * 8, true);
    cp_async_commit();
    if (warp != 0) return;
    FW_UNROLL for (int i = 0; i < 2; ++i) {
      const int64_t t = first + 2 * lane + i;
      g[i] = bounded_log_decay(a.g.data[t * a.g.stride + head]),
      beta[i] = number(a.beta.data[t * a.beta.stride + head]);
    }
  };
  if (chunks > 1) load(0);

  // h[m][j][2 half + i]: row 32 slice + 16 m + 8 half + lane / 4, column warp K / 4 + 8 j + lane % 4 * 2 + i
  float h[2][2 * kPairs][4];
  const int64_t width = a.shape.value_dim + K;
  FW_UNROLL for (int m = 0; m < 2; ++m) {
    FW_UNROLL for (int j = 0; j < 2 * kPairs; ++j) {
      FW_UNROLL for (int i = 0; i < 4; ++i) {
        const int row = slice * kSliceRows + 16 * m + i / 2 * 8 + lane / 4,
                  column = warp * (K / 4) + 8 * j + lane % 4 * 2 + i % 2;
        h[m][j][i] = a.state == nullptr ? 0 : a.state[(task * K + row) * width + a.shape.value_dim + column];
      }
    }
  }

  uint4* to = states + (first_mesa_slot(a.sequences, n) * a.shape.heads + head) * (K * K / 4) + lane;
  for (int c = 0; c < chunks; ++c, to += a.shape.heads * (K * K / 4)) {
    // As the right operand: H is symmetric, so its rows are the columns and 16 of its columns are a step of the sum.
    FW_UNROLL for (int m = 0; m < 2; ++m) {
      FW_UNROLL for (int half = 0; half < 2; ++half) {
        FW_UNROLL for (int j = 0; j < kPairs; ++j) {
          const float *left = h[m][2 * j] + 2 * half, *right = h[m][2 * j + 1] + 2 * half;
          const uint32_t high[2] = {pack_bf16(left[0], left[1]), pack_bf16(right[0], right[1])};
          to[((warp * kPairs + j) * kAtoms + slice * (kSliceRows / 8) + 2 * m + half) * 32] =
              make_uint4(high[0], high[1], pack_lo(high[0], left[0], left[1]), pack_lo(high[1], right[0], right[1]));
        }
      }
    }
    if (c + 1 == chunks) break;
    float* const weights = reinterpret_cast<float*>(shared + Memory::kWeights) + c % 2 * (Memory::kWeightsOfChunk + 3);
    if (warp == 0) make_weights(g, beta, lane, weights);
    cp_async_wait<0>();
    sync_threads();  // also: all have read the keys and weights of the chunk before
    if (c + 2 < chunks) load(c + 1);

    const uint32_t tile = keys + static_cast<uint32_t>(c % 2 * Memory::kKeyBytes);
    float sum[2][2 * kPairs][4] = {};
    FW_UNROLL for (int s = 0; s < kMesaTokens / 16; ++s) {
      uint32_t right[kPairs][4];
      FW_UNROLL for (int j = 0; j < kPairs; ++j)
          ldmatrix_x4_trans(right[j], b_fragment_trans(tile, 16 * s, warp * (K / 32) + 2 * j));
      const float2* const of_step = reinterpret_cast<const float2*>(weights + 16 * s) + lane % 4;
      const float2 weight[2] = {of_step[0], of_step[4]};
      FW_UNROLL for (int m = 0; m < 2; ++m) {
        uint32_t key[4], high[4], low[4];
        ldmatrix_x4_trans(key, a_fragment_trans(tile, 16 * s, slice * (kSliceRows / 8) + 2 * m));
        FW_UNROLL for (int i = 0; i < 4; ++i) {
          const float x = weight[i / 2].x * bf16_low(key[i]), y = weight[i / 2].y * bf16_high(key[i]);
          high[i] = pack_bf16(x, y), low[i] = pack_lo(high[i], x, y);
        }
        FW_UNROLL for (int j = 0; j < kPairs; ++j) {
          FW_UNROLL for (int i = 0; i < 2; ++i) {
            mma_bf16(sum[m][2 * j + i], high, right[j][2 * i], right[j][2 * i + 1]);
            mma_bf16(sum[m][2 * j + i], low, right[j][2 * i], right[j][2 * i + 1]);
          }
        }
      }
    }
    // Apart from the products' sums, which mma rounds towards zero.
    const float decay = weights[kMesaTokens];
    FW_UNROLL for (int m = 0; m < 2; ++m) {
      FW_UNROLL for (int j = 0; j < 2 * kPairs; ++j) {
        FW_UNROLL for (int i = 0; i < 4; ++i) h[m][j][i] = decay * h[m][j][i] + sum[m][j][i];
      }
    }
  }
}

}  // namespace

void mesa_states(const MesaArgs<Bf16>& a, Bf16* states, void* stream) {
  const auto launch_for = [&]<int K>() {
    launch(mesa_states_kernel<K>, Dim3{static_cast<unsigned>(a.sequences.count * a.shape.heads * (K / kSliceRows))},
           kStateThreads, StatesMemory<K>::kBytes, stream, a, reinterpret_cast<uint4*>(states));
  };
  a.shape.key_dim == 64 ? launch_for.template operator()<64>() : launch_for.template operator()<128>();
}

}  // namespace fw::cuda
