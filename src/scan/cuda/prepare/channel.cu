// prepare where every key channel has a decay of its own, with one bf16 term (prepare/channel_fine.cu: two): any rows. How T and P are made:
// prepare/channel_parts.cuh.
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       decays, streams and operands of a warp's 8 rows; a share of the blocks of T and P (channel_pairs)
//   0 to 3    A = (I + T)^-1;   4 to 7   meanwhile Z and what else leaves (finish.cuh)
#include <algorithm>
#include <type_traits>

#include "scan/cuda/call/launch.h"
#include "scan/cuda/prepare/channel_parts.cuh"
#include "scan/cuda/prepare/kernels.h"

namespace fw::cuda {
namespace {

// Shared memory. Online: keys (Khat; becomes x), then w / L and w up to a pair's or half's end, whose place T, A and P take, then e L and
// r L. Offline: the raw keys, w / L, w up to the ends, r L; P takes the place
// of w / L.
// Rows 0 to 31 of the matrix kEnds: tokens 0 to 31 up to the middle; rows 32 to 47 and 48 to 63: tokens 0 to 15 and 32 to 47 up to the end
// of their pair of blocks.
template <int kKey, bool kOnline>
struct ChannelLayout {
  static constexpr uint32_t kOperand = 2 * kChunk * kKey, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kWork = kOnline ? std::max(kTriangle + 2 * kPanelBytes, 2 * kOperand) : 2 * kOperand;
  static constexpr uint32_t kKeys = 0, kUp = kOperand, kEnds = kUp + kOperand;
  static constexpr uint32_t kT = kUp, kA = kT + kTriangle, kP = kOnline ? kA + kPanelBytes : kUp;
  static constexpr uint32_t kErase = kUp + kWork, kReads = kOnline ? kErase + kOperand : kErase;
  static constexpr uint32_t kCoefs = kReads + kOperand, kDecays = kCoefs + kChunk * sizeof(RowCoefs);
  static constexpr uint32_t kBytes = kDecays + sizeof(BlockDecays<kKey>);
};

template <int kKey, bool kOnline>
using ChannelImage = std::conditional_t<kOnline, StreamImage<kKey>, ForwardImage<kKey>>;
template <int kKey, bool kOnline>
using ChannelImages = ChunkImages<kKey, ChannelImage<kKey, kOnline>>;

// w up to the ends, from w D of a row of the warp.
template <int kKey, bool kOnline>
FW_DEVICE void store_ends(int r, int warp, const float (&down)[kKey / 32], const ChannelDecays<kKey / 32>& d, const BlockDecays<kKey>& decays, char* shared) {
  constexpr int kN = kKey / 32;
  char* const to = shared + ChannelLayout<kKey, kOnline>::kEnds + lane_offset<kN>(r);
  float x[kN];
  if (warp < 4) {
    FW_UNROLL
    for (int j = 0; j < kN; ++j) x[j] = d.far[j] * down[j];
    store_packed(to, pack_channels(x));
  }
  if ((warp & 2) == 0) {
    FW_UNROLL
    for (int j = 0; j < kN; ++j) x[j] = down[j];
    if ((warp & 1) == 0) {
      float near[kN];
      load_floats(decays.bounded[warp + 1] + static_cast<int>(lane_index()) * kN, near);
      FW_UNROLL
      for (int j = 0; j < kN; ++j) x[j] *= near[j];
    }
    store_packed(to + (warp < 4 ? 32 : 16) * 128, pack_channels(x));
  }
}

// exp(G_C - G) (.) w of a row.
template <int kKey, bool kOnline>
FW_DEVICE void store_key(int r, const float (&k)[kKey / 32], char* shared, const ChannelImages<kKey, kOnline>& out) {
  constexpr int kN = kKey / 32;
  const uint32_t at = lane_offset<kN>(r);
  const PackedChannels<kN> packed = pack_channels(k);
  if constexpr (kOnline) {
    store_packed(shared + ChannelLayout<kKey, kOnline>::kKeys + at, packed);
  } else {
    store_packed(reinterpret_cast<char*>(out.forward->x) + at, packed);
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, packed);
  }
}

// The streams of a row of the warp: the operands of T and P to shared memory, and with their decays to the images. kExact: as DecayedRow.
template <int kKey, bool kOnline, bool kExact>
FW_DEVICE void channel_row(int r, int warp, const KeyStreams<kKey / 32>& s, const float (&alpha)[kKey / 32], ChannelDecays<kKey / 32>& d,
                           const BlockDecays<kKey>& decays, char* shared, const ChannelImages<kKey, kOnline>& out) {
  using Layout = ChannelLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const uint32_t at = lane_offset<kN>(r);
  const DecayedRow<kN> row = decayed_row<kExact>(s, alpha, d);
  store_packed(shared + Layout::kReads + at, pack_channels(row.reads));
  store_packed(shared + Layout::kUp + at, pack_channels(row.up));
  store_ends<kKey, kOnline>(r, warp, row.down, d, decays, shared);
  const PackedChannels<kN> q_packed = pack_channels(row.q);
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
  if constexpr (kOnline) {
    store_packed(shared + Layout::kErase + at, pack_channels(row.erase));
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, pack_channels(row.e));
  } else {
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
  }
  if constexpr (kExact) store_key<kKey, kOnline>(r, row.k, shared, out);
  sync_warp();  // rows stay apart: with addresses of later ones made ahead there are too few registers
}

// Offline, warps of the first half have own and near tiles, those of the second far ones.
template <int kKey, bool kOnline>
FW_DEVICE void pair_tiles(uint32_t left, uint32_t up, uint32_t ends, const BlockDecays<kKey>& decays, int block, int half, PairTiles& c) {
  const int lane = static_cast<int>(lane_index());
  const bool close = kOnline || half == 0, apart = kOnline || half == 1;
  clear_pair_tiles(c);
  const float* first = decays.bounded[2 * block] + 2 * (lane & 3);  // channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a step
  FW_NO_UNROLL
  for (int k = 0; k < kKey / 16; ++k) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, a_fragment(left, 16 * block, 2 * k));
    const uint32_t odd[2] = {a[1], a[3]};
    {
      const float2 low = *reinterpret_cast<const float2*>(first + 16 * k), high = *reinterpret_cast<const float2*>(first + 16 * k + 8);
      a[1] = pack_bf16(bf16_low(a[1]) * low.x, bf16_high(a[1]) * low.y);
      a[3] = pack_bf16(bf16_low(a[3]) * high.x, bf16_high(a[3]) * high.y);
    }
    if (close) {
      ldmatrix_x4(b, b_fragment(up, 16 * block, 2 * k));
      mma_bf16(c.own[0], a, b[0], b[1]);
      const uint32_t high[4] = {a[0], odd[0], a[2], odd[1]};
      mma_bf16(c.own[1], high, b[2], b[3]);
      if ((block & 1) != 0) {
        ldmatrix_x4(b, b_fragment(ends, 32 + 8 * (block - 1), 2 * k));
        mma_bf16(c.near[0], a, b[0], b[1]);
        mma_bf16(c.near[1], a, b[2], b[3]);
      }
    }
    if (apart && block >= 2) {
      if (block == 3) {
        const float* middle = decays.bounded[4] + 2 * (lane & 3) + 16 * k;
        const float2 w = *reinterpret_cast<const float2*>(middle), x = *reinterpret_cast<const float2*>(middle + 8);
        const float2 y = *reinterpret_cast<const float2*>(middle + kKey), z = *reinterpret_cast<const float2*>(middle + kKey + 8);
        const float f[4] = {w.x * y.x, w.y * y.y, x.x * z.x, x.y * z.y};
        FW_UNROLL
        for (int i = 0; i < 4; ++i) a[i] = pack_bf16(bf16_low(a[i]) * f[i / 2 * 2], bf16_high(a[i]) * f[i / 2 * 2 + 1]);
      }
      FW_UNROLL
      for (int n = 0; n < 4; n += 2) {
        ldmatrix_x4(b, b_fragment(ends, 8 * n, 2 * k));
        mma_bf16(c.far[n], a, b[0], b[1]);
        mma_bf16(c.far[n + 1], a, b[2], b[3]);
      }
    }
  }
}

// T and P. Online, warps 0 to 3 have the blocks of 16 rows of T and 4 to 7 those of P.
template <int kKey, bool kOnline>
FW_DEVICE void channel_pairs(char* shared, int warp, const BlockDecays<kKey>& decays) {
  using Layout = ChannelLayout<kKey, kOnline>;
  const int half = warp >> 2, block = half == 0 ? warp : 7 - warp;  // the two warps of one scheduler share its work evenly
  const bool strict = kOnline && half == 0;
  const uint32_t base = shared_address(shared), left = base + (strict ? Layout::kErase : Layout::kReads);
  PairTiles c;
  pair_tiles<kKey, kOnline>(left, base + Layout::kUp, base + Layout::kEnds, decays, block, half, c);
  sync_threads();  // T and P take the place of operands
  clear_above(shared + Layout::kP);
  const TriangleRows triangle = triangle_rows(shared + Layout::kT, block);
  const uint32_t panel = panel_rows(block);
  if (strict) {
    store_pair_tiles<true>(block, true, true, c, [&](int n, const float(&tile)[4]) { store_tile(triangle, n, tile); });
  } else {
    store_pair_tiles<false>(block, kOnline || half == 0, kOnline || half == 1, c,
                            [&](int n, const float(&tile)[4]) { store_tile(shared + Layout::kP, panel, n, tile); });
  }
}

template <int kKey, bool kOnline, bool kPlain>
__global__ void __launch_bounds__(kPrepareThreads, 2) prepare_channel_kernel(const __grid_constant__ PrepareArgs args, int fetched_flag) {
  using Layout = ChannelLayout<kKey, kOnline>;
  constexpr int kN = kKey / 32;
  const Problem& x = args.problem;
  const bool fetched = kPlain || fetched_flag != 0;
  char* shared = shared_memory();
  RowCoefs* coefs = reinterpret_cast<RowCoefs*>(shared + Layout::kCoefs);
  BlockDecays<kKey>& decays = *reinterpret_cast<BlockDecays<kKey>*>(shared + Layout::kDecays);
  const ChunkPlace place = chunk_place(x);
  if (place.span.rows < 0) return;
  const auto out = chunk_images<kKey, ChannelImage<kKey, kOnline>>(args, place.item);
  const int thread = static_cast<int>(thread_index()), warp = uniform_warp(), lane = static_cast<int>(lane_index());

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, shared + Layout::kErase};
  const Rows decay_tensor = chunk_rows(x.in.g, place);
  if (fetched) fetch_front<kN>(x, place, raw);
  const int coefficients_of = kPlain ? coefficient_row(warp) : -1;
  const PlainGates gates = plain_gates(x, place, coefficients_of);

  float alpha[kWarpRows][kN];
  ChannelDecays<kN> d;
  const bool exact = block_decays(x, decay_tensor, place, fetched, warp, alpha, d, decays);
  if constexpr (kPlain) {
    front_arrived();
    if (uses_norms(x.rule)) {
      const float2 squares = fetched_squares<kN>(raw);
      if (lane % 4 == 0) coefs[warp * kWarpRows + lane / 4].read_erase = make_float4(squares.x, squares.y, 0, 0);
    }
  } else {
    make_coefs<kN>(x, place, fetched, raw, coefs);
  }
  sync_threads();
  finish_block_decays(decays, warp, d, out);
  if constexpr (kPlain) {
    if (coefficients_of >= 0) {
      const float4 norms = coefs[coefficients_of].read_erase;
      const FrontCoefs<float> c = plain_coefs(x, gates, norms.x, norms.y);
      const bool valid = coefficients_of < place.span.rows;
      coefs[coefficients_of].read_erase = valid ? make_float4(c.r_q, 0, c.e_k, 0) : make_float4(0, 0, 0, 0);
      coefs[coefficients_of].rest = valid ? make_float4(0, c.w_k, c.z_v, 0) : make_float4(0, 0, 0, 0);
    }
    sync_threads();
  }
  if (thread < kChunk) out.forward->z_scale[thread] = out.z == nullptr ? coefs[thread].rest.z : thread < place.span.rows ? 1.0f : 0.0f;
  if (fetched && exact) {
    for_each_fetched_row<kN, kPlain>(x, place, raw, coefs,
                                     [&](int r, const KeyStreams<kN>& s) { channel_row<kKey, kOnline, true>(r, warp, s, alpha[r], d, decays, shared, out); });
  } else {
    for_each_row<kN>(x, place, coefs, [&](int r, const KeyStreams<kN>& s) {
      float row[kN];
      decay_row(x, decay_tensor, place, r, row);
      channel_row<kKey, kOnline, false>(r, warp, s, row, d, decays, shared, out);
    });
    bounded_keys<kN>(x, decay_tensor, place, coefs, d.behind, [&](int r, const float(&k)[kN]) { store_key<kKey, kOnline>(r, k, shared, out); });
  }
  if constexpr (kOnline) fence_async_shared();  // the engine takes the keys away, before they become x
  sync_threads();
  const bool takes_keys = kOnline && thread == 0 && args.keys != nullptr;
  if (takes_keys) {
    bulk_store(args.keys + place.item * (64 * kKey), shared + Layout::kKeys, 2 * 64 * kKey);
    bulk_commit();
  }
  channel_pairs<kKey, kOnline>(shared, warp, decays);

  const auto z_of = [&](int row) { return coefs[row].rest.z; };
  if constexpr (kOnline) {
    FinishBuffers buffers{};
    buffers.keys = shared + Layout::kKeys, buffers.t = buffers.m = shared + Layout::kT, buffers.a = shared + Layout::kA, buffers.p = shared + Layout::kP;
    // Made again, since registers are few before.
    const auto leaves = chunk_images<kKey, StreamImage<kKey>>(args, static_cast<int64_t>(opaque(static_cast<int>(block_chunk()))) * x.HV + block_index_x());
    finish_online<kKey, RowForm::kStreams, false, false, false>(
        buffers, warp, leaves, [](int) {},
        [&](int number) {
          if (takes_keys) bulk_wait_read<0>();
          if (leaves.z != nullptr) write_values(x, place, z_of, leaves.z, number * 32 + lane, kMeanwhileWarps * 32);
        });
  } else {
    start_offline<kKey>(shared + Layout::kP, out);
    if (out.z != nullptr) write_values(x, place, z_of, out.z, thread, kPrepareThreads);
    finish_offline();
  }
}

template <int kKey, bool kOnline>
void launch_channel(const PrepareArgs& args, const PrepareChoice& choice, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  launch(choice.multiples ? prepare_channel_kernel<kKey, kOnline, true> : prepare_channel_kernel<kKey, kOnline, false>, prepare_grid(x, chunks),
         kPrepareThreads, ChannelLayout<kKey, kOnline>::kBytes, stream, args, static_cast<int>(choice.fetched));
}

}  // namespace

void prepare_channel(const PrepareArgs& args, const PrepareChoice& choice, int key, int64_t chunks, void* stream) {
  const bool online = args.problem.rule.online();
  if (key == 128) {
    online ? launch_channel<128, true>(args, choice, chunks, stream) : launch_channel<128, false>(args, choice, chunks, stream);
  } else {
    online ? launch_channel<64, true>(args, choice, chunks, stream) : launch_channel<64, false>(args, choice, chunks, stream);
  }
}

}  // namespace fw::cuda
