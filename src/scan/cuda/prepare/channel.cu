// prepare where every key channel has a decay of its own, with one bf16 term (channel_hi_lo.cu: two): any rows. How T
// and P are made: prepare/channel_parts.cuh.
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       decays, streams and operands of a warp's 8 rows; a share of the blocks of T and P (channel_pairs)
//   0 to 3    A = (I + T)^-1;   4 to 7   meanwhile Z and what else leaves (finish.cuh)
#include <type_traits>

#include "gpu/launch.h"
#include "gpu/sm80/stores.cuh"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/prepare/channel_rows.cuh"

namespace fw::cuda {
namespace {

template <class Layout>
using ChannelOperandTiles = std::conditional_t<Layout::kDelta, QETiles<Layout::kTileK>, FwdTiles<Layout::kTileK>>;

// T and P.
template <class Layout, int kTileK = Layout::kTileK>
FW_DEVICE void channel_pairs(char* shared, int warp, const BlockDecays<kTileK>& decays) {
  PairTiles c;
  clear_pair_tiles(c);
  add_channel_pairs<Layout>(shared, warp, decays, c);
  sync_threads();  // T and P overwrite operands
  store_channel_pairs<Layout>(shared, warp, c);
}

template <class Layout>
__global__ void __launch_bounds__(kPrepareThreads, resident_blocks(2))
    prepare_channel_kernel(const __grid_constant__ PrepareArgs args, int fetched_flag) {
  constexpr int kTileK = Layout::kTileK, kN = kTileK / 32;
  constexpr bool kDelta = Layout::kDelta, kPlain = Layout::kPlain;
  const Problem& x = args.problem;
  const bool fetched = kPlain || fetched_flag != 0;
  char* shared = shared_memory();
  RowScaleCoefs* coefs = reinterpret_cast<RowScaleCoefs*>(shared + Layout::kCoefs);
  BlockDecays<kTileK>& decays = *reinterpret_cast<BlockDecays<kTileK>*>(shared + Layout::kDecays);
  const ChunkCoord coord = chunk_coord(x);
  if (coord.span.rows < 0) return;
  const auto out = chunk_tiles_of<kTileK, ChannelOperandTiles<Layout>>(args, coord.item);
  const int thread = static_cast<int>(thread_index()), warp = uniform_warp(), lane = static_cast<int>(lane_index());

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, shared + Layout::kErase};
  const Rows decay_tensor = chunk_rows(x.in.g, coord);
  if (fetched) fetch_front<kN>(x, coord, raw);
  const int coefficients_of = kPlain ? coefficient_row(warp) : -1;
  const PlainGates gates = plain_gates(x, coord, coefficients_of);

  float alpha[kWarpRows][kN];
  ChannelDecays<kN> d;
  const bool exact = block_decays(x, decay_tensor, coord, fetched, warp, alpha, d, decays);
  if constexpr (kPlain) {
    front_arrived();
    if (uses_norms(x.rule)) {
      const float2 squares = fetched_squares<kN>(raw);
      if (lane % 4 == 0) coefs[warp * kWarpRows + lane / 4].read_erase = make_float4(squares.x, squares.y, 0, 0);
    }
  } else {
    make_coefs<kN>(x, coord, fetched, raw, coefs);
  }
  sync_threads();
  finish_block_decays(decays, warp, d, out);
  // On Hopper streams of 128 channels have no register for it.
  const bool has_register = kPlain || kTileK < 128 || !is_hopper(),
             lasting = kDelta && has_register && channels_last(decays);
  if constexpr (kPlain) {
    if (coefficients_of >= 0) {
      const float4 norms = coefs[coefficients_of].read_erase;
      const FrontCoefs<float> c = plain_coefs(x, gates, norms.x, norms.y);
      const bool valid = coefficients_of < coord.span.rows;
      coefs[coefficients_of].read_erase = valid ? make_float4(c.r_q, 0, c.e_k, 0) : make_float4(0, 0, 0, 0);
      coefs[coefficients_of].lo = valid ? make_float4(0, c.w_k, c.z_v, 0) : make_float4(0, 0, 0, 0);
    }
    sync_threads();
  }
  if (thread < kChunk)
    out.forward->z_scale[thread] = out.z == nullptr ? coefs[thread].lo.z : thread < coord.span.rows ? 1.0f : 0.0f;
  if (fetched && exact) {
    for_each_fetched_row<kN, kPlain>(x, coord, raw, coefs, [&](int r, const KeyStreams<kN>& s) {
      channel_row<Layout, RowDecays::kExact>(r, warp, s, alpha[r], d, decays, lasting, shared, out);
    });
  } else {
    for_each_row<kN>(x, coord, coefs, [&](int r, const KeyStreams<kN>& s) {
      float row[kN];
      decay_row(x, decay_tensor, coord, r, row);
      channel_row<Layout, RowDecays::kBounded>(r, warp, s, row, d, decays, lasting, shared, out);
    });
    bounded_keys<kN>(x, decay_tensor, coord, coefs, d.behind,
                     [&](int r, const float(&k)[kN]) { store_key<Layout>(r, k, lasting, shared, out); });
  }
  const bool keeps_keys = kDelta && args.keys != nullptr;
  if (keeps_keys) {  // before they become x
    begin_stores(
        [&](auto&& copy) { copy(args.keys + coord.item * (64 * kTileK), shared + Layout::kKeys, 2 * 64 * kTileK); });
  } else {
    sync_threads();
  }
  channel_pairs<Layout>(shared, warp, decays);
  // Found again, since registers are few before.
  const bool has_lo_parts = kDelta && has_register && channels_last(decays);
  if constexpr (kDelta) {
    if (has_lo_parts) fetch_lo_parts<Layout>(shared, out);
  }

  const auto z_of = [&](int row) { return coefs[row].lo.z; };
  if constexpr (kDelta) {
    FinishBuffers buffers{};
    buffers.keys = shared + Layout::kKeys, buffers.t = buffers.m = shared + Layout::kT, buffers.a = shared + Layout::kA,
    buffers.p = shared + Layout::kP, buffers.keys_lo = has_lo_parts ? shared + Layout::kReads : nullptr;
    // Made again, since registers are few before.
    const auto leaves = chunk_tiles_of<kTileK, QETiles<kTileK>>(
        args, static_cast<int64_t>(opaque(static_cast<int>(block_chunk()))) * x.HV + block_index_x());
    finish_delta<kTileK, RowForm::kStreams, false, false, false>(
        buffers, warp, leaves, [](int) {},
        [&](int number) {
          if (keeps_keys) end_stores();
          if (leaves.z != nullptr) write_values(x, coord, z_of, leaves.z, number * 32 + lane, kMeanwhileWarps * 32);
        });
  } else {
    start_additive<kTileK>(shared + Layout::kP, out);
    if (out.z != nullptr) write_values(x, coord, z_of, out.z, thread, kPrepareThreads);
    finish_additive();
  }
}

}  // namespace

void prepare_channel(const PrepareArgs& args, const PrepareChoice& choice, int k_tile, int64_t chunks, void* stream) {
  const PrepareKernel kernel = choice.kernel;
  with_constants(
      [&](auto small, auto is_delta, auto is_plain) {
        using Layout =
            ChannelLayout<PrepareChannelTraits{.k_tile = small ? 64 : 128, .is_delta = is_delta, .is_plain = is_plain}>;
        launch(prepare_channel_kernel<Layout>, prepare_grid(args.problem, chunks), kPrepareThreads, Layout::kBytes,
               stream, args, static_cast<int>(kernel != PrepareKernel::kChannelRead));
      },
      k_tile == 64, args.problem.rule.is_delta(), kernel == PrepareKernel::kChannelRows);
}

}  // namespace fw::cuda
