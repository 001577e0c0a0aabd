// Conjugate gradients of a Mesa layer for all tokens of a chunk of 64 at once: (H_t + Diag(lambda)) x_t = rhs_t, with
//   H_t p = exp(G_t) H p + sum over s <= t of exp(G_t - G_s) beta_s k_s (k_s . p),   G_t: sum of the log decays
// and H of before the chunk (mesa_states.cu). The direction p is rounded to bf16, and the rounded one is p everywhere,
// so that the residual stays that of x. What it is multiplied by has two bf16 parts.
//   mesa_chunks_kernel   grid: slots x heads (mesa_chunks.cuh);  4 groups of 16 tokens x 4 warps of K / 4 channels
// A thread has tokens lane / 4 and lane / 4 + 8 of its group, and channels lane % 4 * 2 and the next of K / 32 tiles of
// 8. Groups meet at barriers of their own. A token is over at its tolerance, a group when its tokens are. Each step:
//   p to shared memory
//   ap = P H, S = P K^T of the warp's 16 keys; S times its weights to shared memory
//   ap = exp(G) ap + S K + Diag(lambda) p;  p . ap
//   x += alpha p, r -= alpha ap;  r . r
#include <cmath>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "gpu/sw128_atoms.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/mesa_chunks.cuh"
#include "ops/cuda/packets.cuh"

namespace fw::cuda {
namespace {

constexpr int kParts = 4, kGroupTokens = 16, kGroups = kMesaTokens / kGroupTokens, kGroupThreads = 32 * kParts,
              kChunkThreads = kGroups * kGroupThreads;
// Left operands of mma_bf16 in shared memory: 16 tokens by 16 columns are 32 lanes of 16 bytes.
constexpr int kPiece = 32;

// kSharedSteps: steps of 16 rows of H in shared memory. A block of an older GPU has no room for all of K = 128; it
// reads the others through the L1 cache.
template <int K, int kSharedSteps>
struct ChunkMemory {
  static constexpr int kSteps = K / 16, kStep = K / 8 * 32;  // kStep: uint4 of 16 rows of H
  static constexpr int kH = 2 * kMesaTokens * K, kP = kH + 16 * kSharedSteps * kStep, kS = kP + 2 * kMesaTokens * K;
  static constexpr int kSums = kS + 4 * kMesaTokens * kMesaTokens, kLambda = kSums + 2 * 4 * kMesaTokens * kParts;
  static constexpr int kScales = kLambda + 4 * K, kOutput = kScales + 4 * kMesaTokens;
  static constexpr size_t kBytes = kOutput + 16;

  char* base;
  FW_DEVICE uint32_t keys() const { return shared_address(base); }  // tiles of 64 columns (sw128.h)
  FW_DEVICE uint4* h() const { return reinterpret_cast<uint4*>(base + kH); }
  FW_DEVICE uint4* p(int group) const { return reinterpret_cast<uint4*>(base + kP) + group * kSteps * kPiece; }
  // Pieces of 16 keys: high, then low.
  FW_DEVICE uint4* s(int group) const { return reinterpret_cast<uint4*>(base + kS) + group * kGroups * 2 * kPiece; }
  // Before the first step, where S will lie: sums of log decays, and beta.
  FW_DEVICE double* log_decays() const { return reinterpret_cast<double*>(base + kS); }
  FW_DEVICE float* betas() const { return reinterpret_cast<float*>(log_decays() + kMesaTokens); }
  FW_DEVICE float4* sums(int which) const { return reinterpret_cast<float4*>(base + kSums) + which * kMesaTokens; }
  FW_DEVICE float* lambda() const { return reinterpret_cast<float*>(base + kLambda); }
  // What the last lines need and registers have no room for: scales of x; the chunk's offset in x, and its tokens.
  FW_DEVICE float* scales() const { return reinterpret_cast<float*>(base + kScales); }
  FW_DEVICE int64_t* output() const { return reinterpret_cast<int64_t*>(base + kOutput); }
};

struct Add {
  FW_DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Largest {
  FW_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
// of[half]: of a thread's channels of its tokens. Then of all channels, in the same order for all warps of the group.
// What is at `sums` is read before the group's next barrier.
template <class Join>
FW_DEVICE void join_channels(float (&of)[2], float4* sums, int group, int part, int lane, const Join& join) {
  FW_UNROLL for (int half = 0; half < 2; ++half) {
    of[half] = join(of[half], shuffle_xor(of[half], 1));
    of[half] = join(of[half], shuffle_xor(of[half], 2));
  }
  float4* const mine = sums + group * kGroupTokens + lane / 4;
  if (lane % 4 == 0) {
    reinterpret_cast<float*>(mine)[part] = of[0];
    reinterpret_cast<float*>(mine + 8)[part] = of[1];
  }
  named_barrier_sync(1 + group, kGroupThreads);
  FW_UNROLL for (int half = 0; half < 2; ++half) {
    const float4 all = mine[8 * half];
    of[half] = join(join(all.x, all.y), join(all.z, all.w));
  }
}

FW_DEVICE void unpack(uint4 words, uint32_t (&to)[4]) {
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}

// A power of two that brings numbers up to `largest` near 1, and its inverse. Squares then neither overflow nor vanish.
FW_DEVICE void scale_to_one(float largest, float& scale, float& inverse) {
  const uint32_t exponent = min(max(float_bits(largest) >> 23, 1u), 253u);
  scale = bits_float((254 - exponent) << 23), inverse = bits_float(exponent << 23);
}

template <int K, int kSharedSteps>
__global__ void __launch_bounds__(kChunkThreads, 1) mesa_chunks_kernel(const MesaArgs<Bf16> a, const uint4* states) {
  using Memory = ChunkMemory<K, kSharedSteps>;
  constexpr int kSteps = Memory::kSteps, kTiles = K / 32, kAtoms = K / 8;
  const int thread = static_cast<int>(thread_index()), lane = static_cast<int>(lane_index()),
            warp = static_cast<int>(warp_index()), group = warp / kParts, part = warp % kParts;
  const int64_t slot = block_index_x() / static_cast<unsigned>(a.shape.heads), head = block_index_x() % a.shape.heads;
  const MesaChunk chunk(a.sequences, slot);
  if (chunk.rows == 0) return;
  const Memory m{shared_memory()};

  // ---- what the chunk is made of
  const uint4* const h_before = states + int64_t{block_index_x()} * (K * K / 4);
  const uint32_t shared_h = shared_address(m.h());
  for (int i = thread; i < kSharedSteps * Memory::kStep; i += kChunkThreads)
    cp_async_16(shared_h + static_cast<uint32_t>(16 * i), h_before + i, true);
  for (int i = thread; i < kMesaTokens * kAtoms; i += kChunkThreads) {
    const int row = i / kAtoms, atom = i % kAtoms;
    const bool there = row < chunk.rows;
    cp_async_16(m.keys() + atom_offset(row, atom),
                a.k.data + (chunk.first + (there ? row : 0)) * a.k.stride + head * K + atom * 8, there);
  }
  cp_async_commit();
  if (warp == 0) {
    double g[2];
    FW_UNROLL for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane + i;
      const int64_t t = chunk.first + (row < chunk.rows ? row : 0);
      g[i] = row < chunk.rows ? bounded_log_decay(a.g.data[t * a.g.stride + head]) : 0.0;
      m.betas()[row] = row < chunk.rows ? number(a.beta.data[t * a.beta.stride + head]) : 0.0f;
    }
    sum_log_decays(g, lane);
    FW_UNROLL for (int i = 0; i < 2; ++i) m.log_decays()[2 * lane + i] = g[i];
  }
  for (int c = thread; c < K; c += kChunkThreads)
    m.lambda()[c] = softplus(a.lambda[head * K + c]) + static_cast<float>(a.shape.least);

  if (thread == 0) m.output()[0] = chunk.first * a.x.stride + head * K, m.output()[1] = chunk.rows;

  // r, and x, p and ap: [tile][2 half + i]. p is packed: [tile][half].
  const int first_row = group * kGroupTokens + lane / 4, first_channel = part * (K / kParts) + lane % 4 * 2;
  float x[kTiles][4] = {}, r[kTiles][4] = {}, scale[2], square[2] = {}, enough[2];
  FW_UNROLL for (int half = 0; half < 2; ++half) {
    float largest = 0;
    if (first_row + 8 * half < chunk.rows) {
      const uint32_t* const words = reinterpret_cast<const uint32_t*>(
          a.rhs.data + (chunk.first + first_row + 8 * half) * a.rhs.stride + head * K + first_channel);
      FW_UNROLL for (int j = 0; j < kTiles; ++j) {
        r[j][2 * half] = bf16_low(words[4 * j]), r[j][2 * half + 1] = bf16_high(words[4 * j]);
        largest = fmaxf(largest, fmaxf(fabsf(r[j][2 * half]), fabsf(r[j][2 * half + 1])));
      }
    }
    scale[half] = largest;
  }
  join_channels(scale, m.sums(0), group, part, lane, Largest{});
  uint32_t p[kTiles][2];
  FW_UNROLL for (int half = 0; half < 2; ++half) {
    float inverse;
    scale_to_one(scale[half], scale[half], inverse);
    if (part == 0 && lane % 4 == 0) m.scales()[first_row + 8 * half] = inverse;
    FW_UNROLL for (int j = 0; j < kTiles; ++j) {
      FW_UNROLL for (int i = 2 * half; i < 2 * half + 2; ++i) r[j][i] *= scale[half], square[half] += r[j][i] * r[j][i];
      p[j][half] = pack_bf16(r[j][2 * half], r[j][2 * half + 1]);
    }
  }
  join_channels(square, m.sums(1), group, part, lane, Add{});
  // A residual below 1e-8 moves nothing that x in bf16 shows.
  const float tolerance = fmaxf(static_cast<float>(a.shape.cg_tolerance), 1e-8f);
  FW_UNROLL for (int half = 0; half < 2; ++half) enough[half] = tolerance * tolerance * square[half];

  cp_async_wait<0>();
  sync_threads();
  float weight[2][4], decay[2];  // of S: tile of 8 keys; of H
  FW_UNROLL for (int half = 0; half < 2; ++half) {
    const int t = first_row + 8 * half;
    decay[half] = exp_fast(static_cast<float>(m.log_decays()[t]));
    FW_UNROLL for (int j = 0; j < 2; ++j) {
      FW_UNROLL for (int i = 0; i < 2; ++i) {
        const int s = part * kGroupTokens + 8 * j + lane % 4 * 2 + i;
        weight[j][2 * half + i] =
            s > t ? 0 : m.betas()[s] * exp_fast(static_cast<float>(m.log_decays()[t] - m.log_decays()[s]));
      }
    }
  }
  sync_threads();  // S may be written

  // ---- the steps
  const uint4* const group_p = m.p(group) + lane;
  uint4* const own_p = m.p(group) + part * (kTiles / 2) * kPiece + lane;
  const uint4* const group_s = m.s(group) + lane;
  uint4* const own_s = m.s(group) + part * 2 * kPiece + lane;
  const uint4 *const own_h = m.h() + part * kTiles * 32 + lane, *const outside = h_before + part * kTiles * 32 + lane;
  const float2* const lambda = reinterpret_cast<const float2*>(m.lambda() + first_channel);
  const uint32_t keys = m.keys();
  const auto steps = static_cast<int>(a.shape.cg_steps);
  FW_NO_UNROLL for (int step = 0; step < steps; ++step) {
    if (warp_ballot(square[0] > enough[0] || square[1] > enough[1]) == 0) break;  // the same for the group's warps
    FW_UNROLL for (int j = 0; j < kTiles / 2; ++j) own_p[j * kPiece] =
        make_uint4(p[2 * j][0], p[2 * j][1], p[2 * j + 1][0], p[2 * j + 1][1]);
    named_barrier_sync(1 + group, kGroupThreads);

    float ap[kTiles][4] = {}, s[2][4] = {};
    FW_UNROLL for (int k = 0; k < kSteps; ++k) {
      uint32_t left[4], key[4];
      unpack(group_p[k * kPiece], left);
      ldmatrix_x4(key, b_fragment(keys, part * kGroupTokens, 2 * k));
      uint4 right[kTiles];
      FW_UNROLL for (int j = 0; j < kTiles; ++j) {
        const int at = k * Memory::kStep + j * 32;
        right[j] = k < kSharedSteps ? own_h[at] : outside[at];
      }
      mma_bf16(s[0], left, key[0], key[1]);
      mma_bf16(s[1], left, key[2], key[3]);
      FW_UNROLL for (int j = 0; j < kTiles; ++j) mma_bf16(ap[j], left, right[j].x, right[j].y);
      FW_UNROLL for (int j = 0; j < kTiles; ++j) mma_bf16(ap[j], left, right[j].z, right[j].w);
    }
    if (part <= group) {
      uint32_t high[4], low[4];
      FW_UNROLL for (int j = 0; j < 2; ++j) {
        FW_UNROLL for (int half = 0; half < 2; ++half) {
          const float y = s[j][2 * half] * weight[j][2 * half], z = s[j][2 * half + 1] * weight[j][2 * half + 1];
          high[2 * j + half] = pack_bf16(y, z), low[2 * j + half] = pack_lo(high[2 * j + half], y, z);
        }
      }
      own_s[0] = make_uint4(high[0], high[1], high[2], high[3]);
      own_s[kPiece] = make_uint4(low[0], low[1], low[2], low[3]);
    }
    named_barrier_sync(1 + group, kGroupThreads);

    FW_UNROLL for (int j = 0; j < kTiles; ++j) { FW_UNROLL for (int i = 0; i < 4; ++i) ap[j][i] *= decay[i / 2]; }
    FW_NO_UNROLL for (int k = 0; k <= group; ++k) {
      uint32_t high[4], low[4];
      unpack(group_s[2 * k * kPiece], high), unpack(group_s[(2 * k + 1) * kPiece], low);
      FW_UNROLL for (int j = 0; j < kTiles / 2; ++j) {
        uint32_t key[4];
        ldmatrix_x4_trans(key, b_fragment_trans(keys, kGroupTokens * k, part * kTiles + 2 * j));
        FW_UNROLL for (int i = 0; i < 2; ++i) {
          mma_bf16(ap[2 * j + i], high, key[2 * i], key[2 * i + 1]);
          mma_bf16(ap[2 * j + i], low, key[2 * i], key[2 * i + 1]);
        }
      }
    }
    float along[2] = {}, next[2] = {};
    FW_UNROLL for (int j = 0; j < kTiles; ++j) {
      const float2 of_tile = lambda[4 * j];
      FW_UNROLL for (int half = 0; half < 2; ++half) {
        const float y = bf16_low(p[j][half]), z = bf16_high(p[j][half]);
        ap[j][2 * half] += of_tile.x * y, ap[j][2 * half + 1] += of_tile.y * z;
        along[half] += ap[j][2 * half] * y + ap[j][2 * half + 1] * z;
      }
    }
    join_channels(along, m.sums(0), group, part, lane, Add{});
    FW_UNROLL for (int half = 0; half < 2; ++half) {
      const float alpha = square[half] > enough[half] ? square[half] * rcp_fast(along[half]) : 0.0f;
      FW_UNROLL for (int j = 0; j < kTiles; ++j) {
        x[j][2 * half] += alpha * bf16_low(p[j][half]), x[j][2 * half + 1] += alpha * bf16_high(p[j][half]);
        FW_UNROLL for (int i = 2 * half; i < 2 * half + 2; ++i) {
          r[j][i] -= alpha * ap[j][i];
          next[half] += r[j][i] * r[j][i];
        }
      }
    }
    join_channels(next, m.sums(1), group, part, lane, Add{});
    FW_UNROLL for (int half = 0; half < 2; ++half) {
      const float ratio = square[half] > enough[half] ? next[half] * rcp_fast(square[half]) : 0.0f;
      FW_UNROLL for (int j = 0; j < kTiles; ++j) p[j][half] =
          pack_bf16(r[j][2 * half] + ratio * bf16_low(p[j][half]), r[j][2 * half + 1] + ratio * bf16_high(p[j][half]));
      square[half] = next[half];
    }
  }

  FW_UNROLL for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    if (row >= m.output()[1]) continue;
    const float of_row = m.scales()[row];
    uint32_t* const words = reinterpret_cast<uint32_t*>(a.x.data + m.output()[0] + row * a.x.stride + first_channel);
    FW_UNROLL for (int j = 0; j < kTiles; ++j) words[4 * j] =
        pack_bf16(of_row * x[j][2 * half], of_row * x[j][2 * half + 1]);
  }
}

}  // namespace

void mesa_chunks(const MesaArgs<Bf16>& a, const Bf16* states, void* stream) {
  const auto launch_for = [&]<int K, int kSharedSteps>() {
    launch(mesa_chunks_kernel<K, kSharedSteps>,
           Dim3{static_cast<unsigned>(mesa_slots(a.x.rows, a.sequences.count) * a.shape.heads)}, kChunkThreads,
           ChunkMemory<K, kSharedSteps>::kBytes, stream, a, reinterpret_cast<const uint4*>(states));
  };
  // Of K = 128 as many steps as every GPU's block has room for, or all.
  constexpr int kFew = 6;
  static_assert(ChunkMemory<64, 4>::kBytes <= kSm80SharedBytes && ChunkMemory<128, kFew>::kBytes <= kSm80SharedBytes &&
                ChunkMemory<128, 8>::kBytes <= kSm90SharedBytes);
  if (a.shape.key_dim == 64) return launch_for.template operator()<64, 4>();
  current_arch() == Arch::kSm90 ? launch_for.template operator()<128, 8>()
                                : launch_for.template operator()<128, kFew>();
}

}  // namespace fw::cuda
