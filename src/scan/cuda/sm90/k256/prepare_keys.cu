// prepare for keys of 129 to 256 channels that each have a decay of their own (k256_channels(), rule_traits.h): any
// rows, any streams without an erase key of their own. Leaves E and Q with their decays, Khat, A and P (tiles.h:
// QETiles), and |q|^2 and |k|^2 for the gradients. The channels come a quarter after the other, each as
// prepare/channel.cu has 64: T and P are sums over them, which stay in registers meanwhile. A block has one chunk
// of one value head.
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       norms and coefficients of a warp's 8 rows; of each quarter decays, streams and operands of these, and a share of the blocks of T and P
//   0         thread 0 takes a quarter of Khat away
//   0 to 3    A = (I + T)^-1;   4 to 7   meanwhile Z
#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/launchers.h"
#include "scan/cuda/pipeline.h"
#include "scan/cuda/prepare/channel_rows.cuh"

namespace fw::cuda {
namespace {

constexpr int kQuarter = 64, kQuarters = kMaxTileK / kQuarter, kLaneChannels = kQuarter / 32;
using QuarterLayout = ChannelLayout<PrepareChannelTraits{.k_tile = kQuarter}>;
static_assert(2 * (QuarterLayout::kBytes + 1024) <= 228 * 1024 && kSw128Elements == kChunk * kQuarter);

struct K256KeysArgs {
  Problem quarters[kQuarters];  // the call's, of whose keys each has 64 channels or what there is of them
  QETiles<kMaxTileK>* chunk_tiles = nullptr;
  IntraChunk* pairs = nullptr;
  RowNorms* norms = nullptr;
  uint16_t *keys = nullptr, *z = nullptr;
};

// What channel_row() and finish_block_decays() have of an chunk tile: a quarter of its columns, which is a SW128 tile.
struct QuarterTile {
  uint16_t *e, *q;
  float* gamma;
};

// |q|^2 and |k|^2 of row lane / 4 of the warp, by way of memory that operands take later.
FW_DEVICE FrontScalars<float> k256_norms(const K256KeysArgs& args, const ChunkCoord& coord, bool fetched,
                                         char* shared) {
  constexpr int kN = kLaneChannels;
  FrontScalars<float> s;
  if (!uses_norms(args.quarters[0].rule)) return s;
  const RawMatrices raw{shared + QuarterLayout::kUp, shared + QuarterLayout::kEnds, nullptr};
  FW_NO_UNROLL
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    const Problem& x = args.quarters[quarter];
    FrontScalars<float> own;
    if (fetched) {
      sync_warp();
      fetch_rows<kN>(x.in.k, coord, x.K, raw.k);
      fetch_rows<kN>(x.in.q, coord, x.K, raw.q);
      cp_async_commit();
      front_arrived();
      const float2 squares = fetched_squares<kN>(raw);
      own.q2 = squares.x, own.k2 = squares.y;
    } else {
      norms_from_memory<kN>(x, coord, false, own);
    }
    s.q2 += own.q2, s.k2 += own.k2;
  }
  return s;
}

__global__ void __launch_bounds__(kPrepareThreads, 2)
    k256_prepare_keys_kernel(const __grid_constant__ K256KeysArgs args, int fetched_flag) {
  using Layout = QuarterLayout;
  constexpr int kN = kLaneChannels;
  const Problem& x = args.quarters[0];
  const bool fetched = fetched_flag != 0;
  char* const shared = shared_memory();
  RowScaleCoefs* const coefs = reinterpret_cast<RowScaleCoefs*>(shared + Layout::kCoefs);
  auto& decays = *reinterpret_cast<BlockDecays<kQuarter>*>(shared + Layout::kDecays);
  const ChunkCoord coord = chunk_coord(x);
  if (coord.span.rows < 0) return;
  QETiles<kMaxTileK>& chunk_tile = args.chunk_tiles[coord.item];
  const int warp = uniform_warp(), lane = static_cast<int>(lane_index());

  {
    const int row = warp * kWarpRows + lane / 4;
    const bool valid = row < coord.span.rows;
    FrontScalars<float> s = k256_norms(args, coord, fetched, shared);
    if (valid) row_gates(x, coord, row, s);
    const FrontCoefs<float> c = front_coefs(x.rule, x.scale, s);
    if (lane % 4 == 0) {
      put_coefs(coefs[row], c, valid);
      chunk_tile.z_scale[row] = !valid ? 0.0f : args.z != nullptr ? 1.0f : c.z_v;
      if (args.norms != nullptr) args.norms[coord.item].q2[row] = s.q2, args.norms[coord.item].k2[row] = s.k2;
    }
    sync_warp();
  }

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, shared + Layout::kErase};
  PairTiles tiles;
  clear_pair_tiles(tiles);
  FW_NO_UNROLL
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    const Problem& own = args.quarters[quarter];
    QuarterTile columns{chunk_tile.e + quarter * kSw128Elements, chunk_tile.q + quarter * kSw128Elements,
                        chunk_tile.gamma + quarter * kQuarter};
    ChunkTiles<kQuarter, QuarterTile> out{};
    out.forward = &columns;
    const Rows decay_tensor = chunk_rows(own.in.g, coord);
    if (fetched) fetch_front<kN>(own, coord, raw);
    float alpha[kWarpRows][kN];
    ChannelDecays<kN> d;
    const bool exact = block_decays(own, decay_tensor, coord, fetched, warp, alpha, d, decays);
    if (fetched) front_arrived();
    sync_threads();
    finish_block_decays(decays, warp, d, out);
    if (fetched && exact) {
      for_each_fetched_row<kN, false>(own, coord, raw, coefs, [&](int r, const KeyStreams<kN>& s) {
        channel_row<Layout, RowDecays::kExact>(r, warp, s, alpha[r], d, decays, false, shared, out);
      });
    } else {
      for_each_row<kN>(own, coord, coefs, [&](int r, const KeyStreams<kN>& s) {
        float row[kN];
        decay_row(own, decay_tensor, coord, r, row);
        channel_row<Layout, RowDecays::kBounded>(r, warp, s, row, d, decays, false, shared, out);
      });
      bounded_keys<kN>(own, decay_tensor, coord, coefs, d.behind,
                       [&](int r, const float(&k)[kN]) { store_key<Layout>(r, k, false, shared, out); });
    }
    fence_async_shared();
    sync_threads();
    if (thread_index() == 0) {
      bulk_store(args.keys + coord.item * (kChunk * kMaxTileK) + quarter * kSw128Elements, shared + Layout::kKeys,
                 kSw128Bytes);
      bulk_commit();
    }
    add_channel_pairs<Layout>(shared, warp, decays, tiles);
    if (thread_index() == 0) bulk_wait_read<0>();
    sync_threads();  // the next quarter overwrites these, or T and P
  }

  store_channel_pairs<Layout>(shared, warp, tiles);
  finish_pairs(
      shared + Layout::kT, shared + Layout::kA, shared + Layout::kP, warp, args.pairs + coord.item, [](int) {},
      [&](int number) {
        if (args.z == nullptr) return;
        const int64_t value_blocks = (x.V + kValueBlock - 1) / kValueBlock;
        write_values(
            x, coord, [&](int row) { return coefs[row].lo.z; }, args.z + coord.item * value_blocks * kSw128Elements,
            number * 32 + lane, kMeanwhileWarps * 32);
      });
}

}  // namespace

void k256_prepare_keys(const K256PrepareArgs& args, int64_t chunks, void* stream) {
  K256KeysArgs all;
  all.chunk_tiles = args.chunk_tiles, all.pairs = args.pairs, all.norms = args.norms, all.keys = args.keys,
  all.z = args.z;
  bool fetched = true;
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    Problem& own = all.quarters[quarter] = args.problem;
    const int first = quarter * kQuarter, left = args.problem.K - first;
    own.K = left < 0 ? 0 : left < kQuarter ? left : kQuarter;
    if (own.K > 0) {
      for (TokenArg* a : {&own.in.q, &own.in.k, &own.in.g}) *a = from_channel(*a, first);
      if (channel_erase(own.rule)) own.in.erase_gate = from_channel(own.in.erase_gate, first);
    }
    fetched = fetched && copied(problem_traits(own, kQuarter, chunks, 0));
  }
  launch(k256_prepare_keys_kernel, prepare_grid(args.problem, chunks), kPrepareThreads, QuarterLayout::kBytes, stream,
         all, static_cast<int>(fetched));
}

}  // namespace fw::cuda
