// prepare where every key channel has a decay of its own. T_ij = sum over channels of e_i w_j exp(G_i - G_j), so decays belong to
// the operands, in blocks of 8 rows (one a warp). With L the product of a block's decays up to and including a row's own, D that of
// the rows behind a row in its block, R_b that of all of block b:
//   within block b           (e_i L_i) (w_j / L_j)
//   between blocks b > n     (e_i L_i) (R_{b-1} .. R_{n+1}) (w_j D_j)
// Everything but 1 / L is at most 1; for 1 / L, decays of single tokens are bounded from below in T and P (kLowestDecay), and
// nowhere else. All of it are products, never differences of sums: g may be -inf. A row's T and P depend on no later decay.
#include "scan/cuda/device/prepare_finish.cuh"
#include "scan/cuda/launch.h"
#include "scan/cuda/prepare_kernels.h"

namespace fw::cuda {
namespace {

// exp(-10): 1 / L is at most exp(80), and R at least exp(-80).
inline constexpr float kLowestDecay = 4.539993e-5f;

// Products over each of the eight blocks, true and bounded.
template <int kKey>
struct BlockDecays {
  float total[8][kKey], bounded[8][kKey];
};

// Shared memory. Online: keys (Khat; becomes x), then w / L and w D, whose place T, A and P take, then e L and r L, whose place -E and
// Q take where the backward image is wanted. Offline: the raw keys, w / L, w D, r L; P takes the place of w / L.
template <int kKey, bool kOnline>
struct ChannelLayout {
  static constexpr uint32_t kOperand = 2 * kChunk * kKey;
  static constexpr uint32_t kWork = kOnline ? 4 * kPanelBytes : 2 * kOperand;
  static constexpr uint32_t kKeys = 0, kUp = kOperand, kDown = kUp + kOperand;
  static constexpr uint32_t kT = kUp, kA = kT + 2 * kPanelBytes, kP = kOnline ? kA + kPanelBytes : kUp;
  static constexpr uint32_t kErase = kUp + kWork, kReads = kOnline ? kErase + kOperand : kErase;
  static constexpr uint32_t kCoefs = kReads + kOperand, kDecays = kCoefs + kChunk * sizeof(RowCoefs);
  static constexpr uint32_t kBytes = kDecays + sizeof(BlockDecays<kKey>);
};

// exp(g) of this lane's channels of the warp's rows; 1 past the chunk's rows.
template <int kN>
FW_DEVICE void exponentials(float (&g)[kN]) {
  FW_UNROLL
  for (int j = 0; j < kN; ++j) g[j] = exp2_fast(g[j] * kLog2E);
}
template <int kN>
FW_DEVICE void decay_row(const Problem& x, const Rows& rows, const ChunkPlace& place, int r, float (&alpha)[kN]) {
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  FW_UNROLL
  for (int j = 0; j < kN; ++j) alpha[j] = 0;
  if (row < place.span.rows) load_channels(rows, row, static_cast<int>(lane_index()) * kN, x.K, alpha);
  exponentials(alpha);
}
template <int kN>
FW_DEVICE void decay_rows(const Rows& rows, const ChunkPlace& place, float (&alpha)[kWarpRows][kN]) {
  const int channel = static_cast<int>(lane_index()) * kN, first = static_cast<int>(warp_index()) * kWarpRows;
  const int width = rows.bf16 != 0 ? 2 : 4;
  const char* from = rows.data + (first * rows.stride + channel) * width;
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    FW_UNROLL
    for (int j = 0; j < kN; ++j) alpha[r][j] = 0;
  }
  if (rows.bf16 != 0) {
    PackedChannels<kN> packed[kWarpRows];
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) packed[r] = first + r < place.span.rows ? load_packed<kN>(from + r * rows.stride * 2) : PackedChannels<kN>{};
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      FW_UNROLL
      for (int j = 0; j < kN / 2; ++j) alpha[r][2 * j] = bf16_low(packed[r].words[j]), alpha[r][2 * j + 1] = bf16_high(packed[r].words[j]);
    }
  } else {
    FW_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      if (first + r < place.span.rows) load_floats(reinterpret_cast<const float*>(from + r * rows.stride * 4), alpha[r]);
    }
  }
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) exponentials(alpha[r]);
}

// What a lane carries from row to row of its warp: products of decays, true and bounded.
template <int kN>
struct ChannelDecays {
  float bounded_total[kN], before[kN], behind[kN];  // of the warp's rows; of all blocks before and behind
  float bounded[kN], prefix[kN];                    // of the warp's rows up to and including the present one
};

// Products over the blocks before (this lane's channels), those behind, and all.
template <int kKey>
FW_DEVICE void block_products(const BlockDecays<kKey>& decays, float (&before)[kKey / 32], float (&behind)[kKey / 32], float (&all)[kKey / 32]) {
  constexpr int kN = kKey / 32;
  const int channel = static_cast<int>(lane_index()) * kN, warp = static_cast<int>(warp_index());
  FW_UNROLL
  for (int j = 0; j < kN; ++j) before[j] = behind[j] = all[j] = 1;
  FW_UNROLL
  for (int block = 0; block < 8; ++block) {
    float x[kN];
    load_floats(decays.total[block] + channel, x);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      all[j] *= x[j];
      if (block < warp) before[j] *= x[j];
      if (block > warp) behind[j] *= x[j];
    }
  }
}

// exp(G_C - G) (.) w of a row.
template <int kKey, bool kOnline>
FW_DEVICE void store_key(int r, const float (&k)[kKey / 32], char* shared, const ChunkImages<kKey>& out) {
  constexpr int kN = kKey / 32;
  const uint32_t at = lane_offset<kN>(r);
  const PackedChannels<kN> packed = pack_channels(k);
  if constexpr (kOnline) {
    store_packed(shared + ChannelLayout<kKey, kOnline>::kKeys + at, packed);
  } else {
    store_packed(reinterpret_cast<char*>(out.forward->x) + at, packed);
  }
  if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, packed);
}

// The streams of a row of the warp: the operands of T and P to shared memory, and with their decays to the images. exact: no decay
// of the warp's rows was bounded, and so D times the product of the blocks behind is that of all rows behind.
template <int kKey, bool kOnline>
FW_DEVICE void channel_row(int r, const KeyStreams<kKey / 32>& s, const float (&alpha)[kKey / 32], bool exact, ChannelDecays<kKey / 32>& d, char* shared,
                           const ChunkImages<kKey>& out) {
  using Layout = ChannelLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const uint32_t at = lane_offset<kN>(r);
  float q[kN], e[kN], reads[kN], erase[kN], up[kN], down[kN], k[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) {
    d.bounded[j] *= max(alpha[j], kLowestDecay);
    d.prefix[j] *= alpha[j];
    const float gamma = d.before[j] * d.prefix[j], inverse = rcp_fast(d.bounded[j]);
    q[j] = gamma * s.r[j], reads[j] = d.bounded[j] * s.r[j];
    e[j] = -gamma * s.e[j], erase[j] = d.bounded[j] * s.e[j];
    up[j] = inverse * s.w[j], down[j] = d.bounded_total[j] * up[j];
    k[j] = d.behind[j] * down[j];
  }
  store_packed(shared + Layout::kReads + at, pack_channels(reads));
  store_packed(shared + Layout::kUp + at, pack_channels(up));
  store_packed(shared + Layout::kDown + at, pack_channels(down));
  const PackedChannels<kN> q_packed = pack_channels(q);
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
  if constexpr (kOnline) {
    store_packed(shared + Layout::kErase + at, pack_channels(erase));
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, pack_channels(e));
  } else {
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
  }
  if (exact) store_key<kKey, kOnline>(r, k, shared, out);
}

// Khat of the warp's rows by products from the last row on, where D will not do.
template <int kKey, bool kOnline>
FW_DEVICE void bounded_keys(const Problem& x, const Rows& decays, const ChunkPlace& place, const RowCoefs* coefs, const float (&behind)[kKey / 32],
                            char* shared, const ChunkImages<kKey>& out) {
  const FrontRows rows = front_rows(x, place.n, place.hv);
  constexpr int kN = kKey / 32;
  float suffix[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) suffix[j] = behind[j];
  FW_NO_UNROLL
  for (int r = kWarpRows - 1; r >= 0; --r) {
    const RawKeyRow<kN> row = row_from_memory<kN>(x, rows, place, r);
    float alpha[kN], k[kN];
    decay_row(x, decays, place, r, alpha);
    const float w_k = coefs[static_cast<int>(warp_index()) * kWarpRows + r].rest.y;
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      k[j] = suffix[j] * ((x.rule.preconditions_read() ? 1.0f : row.m[j]) * (w_k * row.k[j]));
      suffix[j] *= alpha[j];
    }
    store_key<kKey, kOnline>(r, k, shared, out);
  }
}

// Tiles of 8 columns of 16 rows (blocks of eight 2 b and 2 b + 1): own[0]: columns of block 2 b, valid for its rows; own[1]: the same
// columns for the rows of 2 b + 1; own[2]: columns of 2 b + 1; off[m - 1]: columns of 2 b - m. Of the tiles off, those with
// (m - 1) % kStep == first.
template <int kKey, int kStep>
FW_DEVICE void pair_tiles(uint32_t left, uint32_t up, uint32_t down, const BlockDecays<kKey>& decays, int block, int first, float (&own)[3][4],
                          float (&off)[6][4]) {
  const int lane = static_cast<int>(lane_index());
  FW_UNROLL
  for (int i = 0; i < 4; ++i) {
    FW_UNROLL
    for (int m = 0; m < 6; ++m) off[m][i] = 0;
    own[0][i] = own[1][i] = own[2][i] = 0;
  }
  FW_NO_UNROLL
  for (int k = 0; k < kKey / 16; ++k) {
    uint32_t a[4];
    ldmatrix_x4(a, a_fragment(left, 16 * block, 2 * k));
    if (kStep == 1 || first == 0) {
      uint32_t b[4], d[2];
      ldmatrix_x4(b, b_fragment(up, 16 * block, 2 * k));
      ldmatrix_x2(d, down + granule_offset(16 * block + (lane & 7), 2 * k + ((lane >> 3) & 1)));
      mma_bf16(own[0], a, b[0], b[1]);
      mma_bf16(own[1], a, d[0], d[1]);
      mma_bf16(own[2], a, b[2], b[3]);
    }
    if (block == 0) continue;
    // Rows of block 2 b: x[0] to x[3] for channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of this step; rows of 2 b + 1: x[4] to x[7].
    float x[8], ratio[4] = {1, 1, 1, 1};
    x[0] = bf16_low(a[0]), x[1] = bf16_high(a[0]), x[2] = bf16_low(a[2]), x[3] = bf16_high(a[2]);
    x[4] = bf16_low(a[1]), x[5] = bf16_high(a[1]), x[6] = bf16_low(a[3]), x[7] = bf16_high(a[3]);
    const int channel = 16 * k + 2 * (lane & 3);
    {
      const float2 low = *reinterpret_cast<const float2*>(&decays.bounded[2 * block][channel]);
      const float2 high = *reinterpret_cast<const float2*>(&decays.bounded[2 * block][channel + 8]);
      x[4] *= low.x, x[5] *= low.y, x[6] *= high.x, x[7] *= high.y;
    }
    uint32_t b[4] = {};
    FW_UNROLL
    for (int m = 1; m <= 6; ++m) {
      if (m > 2 * block) continue;
      const int n = 2 * block - m;
      if (m > 1) {
        const float2 low = *reinterpret_cast<const float2*>(&decays.bounded[n + 1][channel]);
        const float2 high = *reinterpret_cast<const float2*>(&decays.bounded[n + 1][channel + 8]);
        ratio[0] *= low.x, ratio[1] *= low.y, ratio[2] *= high.x, ratio[3] *= high.y;
      }
      if (m % 2 == 1) ldmatrix_x4(b, b_fragment(down, 8 * (n - 1), 2 * k));
      if (kStep == 1 || (m - 1) % kStep == first) {
        a[0] = pack_bf16(x[0] * ratio[0], x[1] * ratio[1]), a[2] = pack_bf16(x[2] * ratio[2], x[3] * ratio[3]);
        a[1] = pack_bf16(x[4] * ratio[0], x[5] * ratio[1]), a[3] = pack_bf16(x[6] * ratio[2], x[7] * ratio[3]);
        mma_bf16(off[m - 1], a, b[m % 2 * 2], b[m % 2 * 2 + 1]);
      }
    }
  }
}

// T and P, of the warps as in prepare_scalar.cu.
template <int kKey, bool kOnline>
FW_DEVICE void channel_pairs(char* shared, const BlockDecays<kKey>& decays) {
  using Layout = ChannelLayout<kKey, kOnline>;
  const int warp = static_cast<int>(warp_index()), half = warp >> 2;
  const int block = half == 0 ? warp : 7 - warp;
  const bool strict = kOnline && half == 0;
  const uint32_t base = shared_address(shared), left = base + (strict ? Layout::kErase : Layout::kReads);
  float own[3][4], off[6][4];
  pair_tiles<kKey, kOnline ? 1 : 2>(left, base + Layout::kUp, base + Layout::kDown, decays, block, half, own, off);
  own[0][2] = own[1][2], own[0][3] = own[1][3];
  sync_threads();  // T and P take the place of operands
  if (strict) {
    store_pairs<true>(shared + Layout::kT, block, 2 * block, own[0]);
    store_pairs<true>(shared + Layout::kT, block, 2 * block + 1, own[2]);
  } else if (kOnline || half == 0) {
    store_pairs<false>(shared + Layout::kP, block, 2 * block, own[0]);
    store_pairs<false>(shared + Layout::kP, block, 2 * block + 1, own[2]);
    constexpr float kZero[4] = {0, 0, 0, 0};
    for (int n = 2 * block + 2; n < 8; ++n) store_pairs<false>(shared + Layout::kP, block, n, kZero);
  }
  FW_UNROLL
  for (int m = 1; m <= 6; ++m) {
    if (m > 2 * block || (!kOnline && (m - 1) % 2 != half)) continue;
    if (strict) {
      store_pairs<true>(shared + Layout::kT, block, 2 * block - m, off[m - 1]);
    } else {
      store_pairs<false>(shared + Layout::kP, block, 2 * block - m, off[m - 1]);
    }
  }
}

template <int kKey, bool kOnline>
__global__ void __launch_bounds__(kPrepareThreads, 2) prepare_channel_kernel(const __grid_constant__ PrepareArgs args, int fetched) {
  using Layout = ChannelLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const Problem& x = args.problem;
  char* shared = shared_memory();
  RowCoefs* coefs = reinterpret_cast<RowCoefs*>(shared + Layout::kCoefs);
  BlockDecays<kKey>& decays = *reinterpret_cast<BlockDecays<kKey>*>(shared + Layout::kDecays);
  const ChunkPlace place = chunk_place(x);
  const ChunkImages<kKey> out = chunk_images<kKey>(args, place.item);
  const int thread = static_cast<int>(thread_index()), warp = static_cast<int>(warp_index()), channel = static_cast<int>(lane_index()) * kN;

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, shared + Layout::kErase};
  const Rows decay_tensor = chunk_rows(x.in.g, place);
  if (fetched != 0) fetch_front<kN>(x, place, raw);
  float alpha[kWarpRows][kN];
  ChannelDecays<kN> d;
  bool exact = true;
  {
    float total[kN];
    FW_UNROLL
    for (int j = 0; j < kN; ++j) d.bounded_total[j] = d.bounded[j] = d.prefix[j] = total[j] = 1;
    const auto multiply = [&](const float(&row)[kN]) {
      FW_UNROLL
      for (int j = 0; j < kN; ++j) {
        total[j] *= row[j], d.bounded_total[j] *= max(row[j], kLowestDecay);
        exact = exact && row[j] >= kLowestDecay;
      }
    };
    if (fetched != 0) {
      decay_rows(decay_tensor, place, alpha);
      FW_UNROLL
      for (int r = 0; r < kWarpRows; ++r) multiply(alpha[r]);
    } else {
      FW_NO_UNROLL
      for (int r = 0; r < kWarpRows; ++r) {
        decay_row(x, decay_tensor, place, r, alpha[0]);
        multiply(alpha[0]);
      }
    }
    exact = warp_ballot(!exact) == 0;
    store_floats(decays.total[warp] + channel, total);
    store_floats(decays.bounded[warp] + channel, d.bounded_total);
  }
  make_coefs<kN>(x, place, fetched != 0, raw, coefs);
  sync_threads();
  if (thread < kChunk) out.forward->z_scale[thread] = out.z == nullptr ? coefs[thread].rest.z : thread < place.span.rows ? 1.0f : 0.0f;
  {
    float all[kN];
    block_products(decays, d.before, d.behind, all);
    if (warp == 0) {
      store_floats(out.forward->gamma + channel, all);
      if (out.backward != nullptr) store_floats(out.backward->gamma + channel, all);
    }
  }
  for_each_row<kN>(x, place, fetched != 0, raw, coefs, [&](int r, const KeyStreams<kN>& s) {
    if (fetched != 0) {
      channel_row<kKey, kOnline>(r, s, alpha[r], exact, d, shared, out);
    } else {
      decay_row(x, decay_tensor, place, r, alpha[0]);
      channel_row<kKey, kOnline>(r, s, alpha[0], exact, d, shared, out);
    }
  });
  if (!exact) bounded_keys<kKey, kOnline>(x, decay_tensor, place, coefs, d.behind, shared, out);
  sync_threads();
  channel_pairs<kKey, kOnline>(shared, decays);

  if constexpr (kOnline) {
    sync_threads();
    const FinishBuffers buffers{shared + Layout::kKeys, shared + Layout::kT,     shared + Layout::kA,    nullptr,
                                shared + Layout::kP,    shared + Layout::kErase, shared + Layout::kReads};
    finish_online<kKey>(buffers, nullptr, out, [&](int other) {
      if (out.backward != nullptr) {  // -E and Q as this block wrote them
        for (uint32_t i = static_cast<uint32_t>(other) * 16; i < Layout::kOperand; i += (kPrepareThreads - 64) * 16) {
          cp_async_16(shared_address(shared + Layout::kErase + i), reinterpret_cast<const char*>(out.forward->e) + i, true);
          cp_async_16(shared_address(shared + Layout::kReads + i), reinterpret_cast<const char*>(out.forward->q) + i, true);
        }
        cp_async_commit();
      }
      if (out.z != nullptr) write_values(x, place, coefs, out.z, other, kPrepareThreads - 64);
      cp_async_wait<0>();
    });
  } else {
    if (out.z != nullptr) write_values(x, place, coefs, out.z, thread, kPrepareThreads);
    finish_offline<kKey>(shared + Layout::kP, out);
  }
}

template <int kKey, bool kOnline>
void launch_channel(const PrepareArgs& args, int64_t chunks, void* stream) {
  launch(prepare_channel_kernel<kKey, kOnline>, Dim3{static_cast<unsigned>(chunks * args.problem.HV)}, kPrepareThreads, ChannelLayout<kKey, kOnline>::kBytes,
         stream, args, static_cast<int>(can_fetch(args.problem, kKey)));
}

}  // namespace

void prepare_channel(const PrepareArgs& args, int key, int64_t chunks, void* stream) {
  const bool online = args.problem.rule.online();
  if (key == 128) {
    online ? launch_channel<128, true>(args, chunks, stream) : launch_channel<128, false>(args, chunks, stream);
  } else {
    online ? launch_channel<64, true>(args, chunks, stream) : launch_channel<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
