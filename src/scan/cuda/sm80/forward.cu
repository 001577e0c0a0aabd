// The forward scan over chunks of 64 tokens by mma.sync, in 99 KB of shared memory. Tiles, forms and results are those
// of sm90/scan/forward.cu, with K above 128 of sm90/k256/forward.cu. Per chunk:
//   W = Z + E S      U = A W (kPairs, kSums)      O = Q S + M W (P U)      S = Diag(gamma) S + X^T W (k^T diag(k) U)
//
// Four barriers of the block a chunk (kHiLo: what bf16 leaves out of e, if anything, lies where that of x comes after
// it, which is a fifth):
//   1  q and, of tiles, e are there        products with S
//   2  everything is there                 W, U
//   3  q and e have been read              their loads for the next chunk; S leaves; products with W
//   4  everything has been read            the other loads for the next chunk; W and O leave
// With K above 128 two more follow the second: of the parts of the products with S (parts.cuh), in the memory of q, and
// of W. There is one tile of v and W, which is loaded late.
#include <type_traits>

#include "base/error.h"
#include "gpu/launch.h"
#include "scan/cuda/common/scan/outputs.cuh"
#include "scan/cuda/common/scan/traits.h"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm80/parts.cuh"

namespace fw::cuda {
namespace {

// Shared memory: bytes.
template <ForwardTraits kTraits>
struct WarpForwardShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr ForwardForm kForm = kTraits.form;
  static constexpr bool kOut = kTraits.writes_o, kSave = kTraits.saves;
  using Groups = ScanGroups<kTileK>;
  static constexpr bool kSplit = Groups::kSplit;
  static constexpr int kThreads = Groups::kThreads;
  static constexpr bool kSums = kForm == ForwardForm::kSums, kAdditiveRows = kForm == ForwardForm::kAdditiveRows,
                        kPairs = kForm == ForwardForm::kPairs || kSums || kAdditiveRows, kReads = kOut || kSums;
  static_assert(kSplit ? kPairs : !kAdditiveRows);
  static constexpr bool kRows = kForm == ForwardForm::kRows || kPairs,
                        kDelta = kForm != ForwardForm::kAdditive && !kAdditiveRows,
                        kSplitTiles = kForm == ForwardForm::kSplitTiles, kHiLo = kForm == ForwardForm::kHiLo;
  using ChunkTile = std::conditional_t<
      kSplitTiles, QETiles<kTileK>,
      std::conditional_t<kPairs, RowScales, std::conditional_t<kRows, RowTiles<kTileK>, FwdTiles<kTileK>>>>;
  static constexpr int kMatrix = 64 * kTileK * 2;
  // kPairs: A in place of x, P in that of m.
  static constexpr int kE = 0, kQ = kE + (kDelta || kPairs ? kMatrix : 0), kX = kQ + (kReads || kSplit ? kMatrix : 0),
                       kXBytes = kPairs ? kSw128Bytes : kMatrix, kM = kX + kXBytes;
  static constexpr int kParts = kQ;
  static_assert(!kSplit || (kParts % 16 == 0 && 2 * kPartBytes <= kMatrix));
  static constexpr int kLo = kM + (kOut ? kSw128Bytes : 0);
  // Of even and odd chunks: v or Z, then W; O; S, which leaves from registers if there is no room (kHiLo, kSplit).
  static constexpr int kTileCount = kSplit ? 1 : 2;
  static constexpr int kTile = kLo + (kHiLo ? kMatrix : 0), kO = kTile + kTileCount * kSw128Bytes,
                       kS = kO + (kOut ? kSw128Bytes : 0);
  static constexpr bool kStateTile = kSave && !kHiLo && !kSplit;
  // Chunk tiles: gamma, z_scale (kHiLo: scale); rows: e, q (kPairs: k), z_scale, gamma (kSums: erase_q, read_k).
  static constexpr int kNumbers = kS + (kStateTile ? kMatrix : 0), kKeyScale = kNumbers + 128 * 4,
                       kScale = kPairs ? kKeyScale + 64 * 4 : kNumbers + (kRows ? 128 : kTileK) * 4,
                       kGamma = kRows ? kScale + 64 * 4 : kNumbers;
  static constexpr int kEraseReads = kGamma + 16, kReadKeys = kEraseReads + 64 * 4;
  static constexpr int kNumbersEnd = kSums ? kReadKeys + 64 * 4 : kRows ? kGamma + 16 : kScale + 64 * 4;
  static constexpr int kEraseScale = kNumbersEnd, kShared = kNumbersEnd + (kHiLo ? 64 * 4 : 0);
  static_assert(kShared <= kSm80SharedBytes);
};

// What the loads of a chunk need.
template <class Shape>
struct ForwardLoads {
  const ScanForwardArgs& args;
  const ScanCoord& coord;
  char* shared;
  bool z_ready;
  TileRows v;

  FW_DEVICE char* tile(int c) const { return shared + Shape::kTile + c % Shape::kTileCount * kSw128Bytes; }
  FW_DEVICE int64_t chunk_tile(int c) const { return coord.first_tile + static_cast<int64_t>(c) * args.HV; }
  FW_DEVICE const typename Shape::ChunkTile& tiles(int c) const {
    return static_cast<const typename Shape::ChunkTile*>(args.chunk_tiles)[chunk_tile(c)];
  }
  // What the next chunk's first products need, but for keys that this one's last product reads; and v or Z.
  FW_DEVICE void early(int c) const {
    if (c < coord.chunks) {
      if constexpr (Shape::kReads) {
        if constexpr (Shape::kRows) {
          key_rows(args.rows.q, c, Shape::kQ);
        } else {
          load_bytes<Shape::kMatrix>(shared + Shape::kQ, tiles(c).q);
        }
      }
      if constexpr (Shape::kDelta && !Shape::kPairs) erase_rows(c);
      if constexpr (!Shape::kSplit) values(c);
    }
    cp_async_commit();
  }
  FW_DEVICE void late(int c) const {
    if (c < coord.chunks) {
      if constexpr (Shape::kPairs) {
        erase_rows(c);
        if constexpr (Shape::kSplit) values(c);
        const IntraChunk& pair = args.pairs[chunk_tile(c)];
        if constexpr (Shape::kDelta) load_bytes<kSw128Bytes, Shape::kThreads>(shared + Shape::kX, pair.a);
        if constexpr (Shape::kOut) load_bytes<kSw128Bytes, Shape::kThreads>(shared + Shape::kM, pair.p);
      } else if constexpr (Shape::kSplitTiles) {
        solved_tiles(static_cast<const XMTiles<Shape::kTileK>*>(args.solved)[chunk_tile(c)]);
      } else {
        solved_tiles(tiles(c));
      }
      if constexpr (Shape::kRows) {
        load_bytes<Shape::kNumbersEnd - Shape::kNumbers, Shape::kThreads>(shared + Shape::kNumbers, tiles(c).e);
      } else {
        load_bytes<Shape::kNumbersEnd - Shape::kNumbers>(shared + Shape::kNumbers, tiles(c).gamma);
      }
      if constexpr (Shape::kHiLo) {
        load_bytes<64 * 4>(shared + Shape::kEraseScale, lo_tiles(c).scale);
        load_bytes<Shape::kMatrix>(shared + Shape::kLo, has_keys_lo()
                                                            ? args.hi_lo.lo_parts + chunk_tile(c) * (64 * Shape::kTileK)
                                                            : lo_tiles(c).lo);
      }
    }
    cp_async_commit();
  }
  // kHiLo: whether bf16 leaves anything out of e; then, in its place, what it leaves out of x.
  FW_DEVICE bool has_keys_lo() const { return args.hi_lo.lo_parts != nullptr; }
  FW_DEVICE void solved_lo(int c) const {
    load_bytes<Shape::kMatrix>(shared + Shape::kLo, lo_tiles(c).lo);
    cp_async_commit();
  }

 private:
  FW_DEVICE const LoTiles<Shape::kTileK>& lo_tiles(int c) const {
    return static_cast<const LoTiles<Shape::kTileK>*>(args.hi_lo.chunk_tiles)[chunk_tile(c)];
  }
  template <class Tiles>
  FW_DEVICE void solved_tiles(const Tiles& tiles) const {
    load_bytes<Shape::kMatrix>(shared + Shape::kX, tiles.x);
    if constexpr (Shape::kOut) load_bytes<kSw128Bytes>(shared + Shape::kM, tiles.m);
  }
  FW_DEVICE void values(int c) const {
    if (z_ready) {
      const int64_t blocks = value_block_count(args.V);
      load_bytes<kSw128Bytes, Shape::kThreads>(tile(c),
                                               args.z + (chunk_tile(c) * blocks + coord.value_block) * kSw128Elements);
    } else {
      fill_tile<Shape::kThreads>(v, c, tile(c));
    }
  }
  // kSplit: of any kind.
  FW_DEVICE void key_rows(const TokenArg& rows, int c, int to) const {
    if constexpr (Shape::kSplit) {
      TileRows part = tile_rows(rows, args.sequences, coord, args.K);
      FW_NO_UNROLL  // addresses of one tile at a time: registers
          for (part.column = 0; part.column < Shape::kTileK; part.column += 64) {
        fill_tile<Shape::kThreads>(part, c, shared + to + part.column / 64 * kSw128Bytes);
      }
    } else {
      copy_rows<Shape::kTileK, Shape::kThreads>(rows, args.sequences, coord, c, args.K, shared + to);
    }
  }
  FW_DEVICE void erase_rows(int c) const {
    if constexpr (Shape::kRows) {
      key_rows(args.rows.k, c, Shape::kE);
    } else {
      load_bytes<Shape::kMatrix>(shared + Shape::kE, tiles(c).e);
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kSplit ? 1 : 2)
    sm80_forward_kernel(const ScanForwardArgs args) {
  constexpr int kTileK = Shape::kTileK;
  constexpr bool kOut = Shape::kOut, kSave = Shape::kSave, kHiLo = Shape::kHiLo, kSplit = Shape::kSplit;
  using Groups = typename Shape::Groups;
  char* const shared = shared_memory();
  const int value_blocks = value_block_count(args.V),
            map_blocks = args.maps.data != nullptr ? value_block_count(args.K) : 0;
  const ScanCoord coord = scan_coord(args.sequences, args.HV, value_blocks, map_blocks);
  if (args.parts != nullptr && (args.parts[coord.n] >> (coord.map ? 1 : 0) & 1) == 0) return;
  // Blocks of a map have Z = 0.
  const ForwardLoads<Shape> loads{args, coord, shared, args.z != nullptr && !coord.map,
                                  tile_rows(coord.map ? TokenArg{} : args.v, args.sequences, coord, args.V)};
  const TileRows out = tile_rows(args.o, args.sequences, coord, args.V);
  loads.early(0);
  loads.late(0);
  const Groups own;
  const int K = args.K - own.first_channel();
  float state[Groups::kOwnK / 2];
  if (!kSplit && coord.map) {
    unit_state(coord, state);
  } else {
    load_state(from_channel(args.initial_state, own.first_channel()), coord, coord.n, K, args.V, state);
  }
  const uint32_t base = shared_address(shared);
  const auto floats = [&](int offset) { return reinterpret_cast<const float*>(shared + offset); };
  const auto own_numbers = [&](int offset) { return floats(offset) + own.first_token(); };
  uint32_t a[Groups::kOwnK / 16][4];
  [[maybe_unused]] uint32_t a_lo[Groups::kOwnK / 16][4];  // kHiLo
  CheckpointWalk checkpoints(args.checkpoints, args.sequences, coord);
  FW_NO_UNROLL
  for (int c = 0; c < coord.chunks; ++c) {
    const uint32_t tile = base + Shape::kTile + static_cast<uint32_t>(c % Shape::kTileCount * kSw128Bytes);
    const int64_t block_tile = loads.chunk_tile(c) * value_blocks + coord.value_block;
    uint32_t b[4][4];
    [[maybe_unused]] uint32_t scaled[4][4], b_lo[4][4];  // kPairs; kHiLo
    float w[32], o[32], z[32];
    auto &own_w = own_sums<Groups>(w), &own_o = own_sums<Groups>(o), &own_z = own_sums<Groups>(z);
    pack_fragments(state, a);
    if constexpr (kHiLo) pack_lo_parts(state, a, a_lo);
    cp_async_wait<1>();
    sync_threads();
    if constexpr (kSave && !Shape::kStateTile) {
      store_state_words(args.states + block_tile * (64 * kTileK) + own.first_channel() * 64, a);
    } else if constexpr (kSave) {
      FW_UNROLL
      for (int k = 0; k < kTileK / 16; ++k) store_state_fragment(base + Shape::kS, k, a[k]);
    }
    clear_sums(w);
    if constexpr (kHiLo) mma_hi_lo_rows(w, a, a_lo, base + Shape::kE);
    if constexpr (Shape::kReads) {
      clear_sums(o);
      mma_rows(o, a, base + Shape::kQ + own.key_bytes());
    }
    if constexpr (Shape::kDelta && !Shape::kPairs && !kHiLo) mma_rows(w, a, base + Shape::kE);
    cp_async_wait<0>();
    sync_threads();
    [[maybe_unused]] char* const parts = shared + Shape::kParts;
    if constexpr (kSplit && Shape::kReads) leave_part(parts, own.group, o);
    if constexpr (Shape::kPairs && Shape::kDelta) mma_rows(w, a, base + Shape::kE + own.key_bytes());
    if constexpr (kSplit) {
      if constexpr (Shape::kDelta) leave_part(parts + kPartBytes, own.group, w);
      sync_threads();
      if constexpr (Shape::kReads) add_part(parts, own.group, o);
      if constexpr (Shape::kDelta) add_part(parts + kPartBytes, own.group, w);
    }
    if constexpr (kHiLo) {
      if (loads.has_keys_lo()) mma_rows(w, a, base + Shape::kLo);
    }
    load_z(own_z, tile + own.token_bytes(), own_numbers(Shape::kScale));
    if constexpr (Shape::kSums) add_scaled(own_z, own_numbers(Shape::kEraseReads), own_o);
    if constexpr (Shape::kRows && Shape::kDelta) {
      add_scaled(own_z, own_numbers(Shape::kNumbers), own_w);
    } else if constexpr (kHiLo) {
      add_scaled(z, floats(Shape::kEraseScale), w);
    } else if constexpr (Shape::kDelta && !kSplit) {
      FW_UNROLL
      for (int i = 0; i < 32; ++i) z[i] += w[i];
    }
    if constexpr (kSplit) {
      uint32_t own_b[Groups::kOwnTokens / 16][4];
      pack_fragments(own_z, own_b);
      sync_warp();  // its lanes have read what lies there
      FW_UNROLL
      for (int k = 0; k < Groups::kOwnTokens / 16; ++k) store_token_fragment(tile + own.token_bytes(), k, own_b[k]);
      sync_threads();
      FW_UNROLL
      for (int k = 0; k < 4; ++k) load_token_fragment(b[k], tile, k);
    } else {
      pack_fragments(z, b);
    }
    if constexpr (kHiLo) pack_lo_parts(z, b, b_lo);
    if constexpr (Shape::kPairs) {
      if constexpr (Shape::kDelta) {
        clear_sums(z);
        mma_rows(z, b, base + Shape::kX);
        pack_fragments(z, b);
        scale_columns(z, floats(Shape::kKeyScale));
        pack_fragments(z, scaled);
      } else {
        scale_fragments(b, floats(Shape::kKeyScale), scaled);
      }
    }
    if constexpr (kSave && !kSplit) {
      sync_warp();  // its lanes have read what lies there
      FW_UNROLL
      for (int k = 0; k < 4; ++k) store_token_fragment(tile, k, b[k]);
    }
    sync_threads();
    if constexpr (kHiLo) {
      if (loads.has_keys_lo()) loads.solved_lo(c);
    }
    loads.early(c + 1);
    if constexpr (Shape::kStateTile)
      store_bytes<Shape::kMatrix>(args.states + block_tile * (64 * kTileK), shared + Shape::kS);
    if constexpr (Shape::kRows) {
      scale_all(state, *floats(Shape::kGamma));
    } else {
      scale_columns(state, floats(Shape::kGamma));
    }
    if constexpr (Shape::kPairs) {
      mma_outer(state, scaled, base + Shape::kE + own.key_bytes());
    } else if constexpr (kHiLo) {
      mma_hi_lo_outer(state, b, b_lo, base + Shape::kX);
    } else {
      mma_outer(state, b, base + Shape::kX);
    }
    if constexpr (kOut) {
      if constexpr (Shape::kRows) scale_columns(own_o, own_numbers(Shape::kNumbers) + 64);
      if constexpr (Shape::kSums) add_scaled(own_o, own_numbers(Shape::kReadKeys), own_w);
      mma_rows(own_o, b, base + Shape::kM + own.token_bytes());
      if (out.rows.bf16 != 0) {
        uint32_t packed[Groups::kOwnTokens / 16][4];
        pack_fragments(own_o, packed);
        FW_UNROLL
        for (int k = 0; k < Groups::kOwnTokens / 16; ++k)
          store_token_fragment(base + Shape::kO + own.token_bytes(), k, packed[k]);
      } else {
        store_float_rows(out, c, own_o, own.first_token());
      }
    }
    if constexpr (kHiLo) {
      if (loads.has_keys_lo()) {
        cp_async_wait<1>();
        sync_threads();
      }
      mma_outer(state, b, base + Shape::kLo);
    }
    sync_threads();
    if constexpr (!kSplit) loads.late(c + 1);
    if constexpr (kSave) store_bytes<kSw128Bytes, Shape::kThreads>(args.w + block_tile * kSw128Elements, loads.tile(c));
    if constexpr (kSplit) {
      if constexpr (kSave) sync_threads();  // v comes where W was
      loads.late(c + 1);
    }
    if (kOut && out.rows.bf16 != 0)
      store_bf16_rows<Shape::kThreads>(out, c, shared + Shape::kO, static_cast<int>(thread_index()));
    if (kOut && checkpoints.reached()) [[unlikely]]  // without o the call is not the caller's
      store_state(from_channel(args.checkpoints.states, own.first_channel()), coord,
                  checkpoints.next(args.checkpoints, coord, c), K, args.V, state);
  }
  cp_async_wait<0>();
  if (!kSplit && coord.map) {
    store_state(args.maps, coord, coord.n, args.K, args.K, state);
  } else {
    store_state(from_channel(args.final_state, own.first_channel()), coord,
                args.final_index != nullptr ? args.final_index[coord.n] : coord.n, K, args.V, state);
  }
}

template <ForwardForm kForm>
void launch_sm80_forward(const ScanForwardArgs& args, int k_tile, void* stream) {
  const int maps = args.maps.data != nullptr ? value_block_count(args.K) : 0;
  with_constants(
      [&](auto small, auto writes_o, auto saves) {
        using Shape = WarpForwardShape<ForwardTraits{
            .k_tile = small ? 64 : 128, .form = kForm, .writes_o = writes_o, .saves = saves}>;
        launch(sm80_forward_kernel<Shape>, scan_grid(args.sequences, args.HV, value_block_count(args.V) + maps),
               kWarpScanThreads, Shape::kShared, stream, args);
      },
      k_tile == 64, args.o.data != nullptr, args.states != nullptr);
}

template <ForwardForm kForm>
void launch_k256_forward(ScanForwardArgs args, const K256Tiles& chunk_tiles, void* stream) {
  args.chunk_tiles = chunk_tiles.numbers, args.pairs = chunk_tiles.pairs;
  with_constants(
      [&](auto writes_o, auto saves) {
        using Shape =
            WarpForwardShape<ForwardTraits{.k_tile = kMaxTileK, .form = kForm, .writes_o = writes_o, .saves = saves}>;
        launch(sm80_forward_kernel<Shape>, scan_grid(args.sequences, args.HV, value_block_count(args.V)),
               Shape::kThreads, Shape::kShared, stream, args);
      },
      args.o.data != nullptr, args.states != nullptr);
}

}  // namespace

void sm80_k256_forward_rows(const ScanForwardArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  args.is_delta ? launch_k256_forward<ForwardForm::kPairs>(args, chunk_tiles, stream)
                : launch_k256_forward<ForwardForm::kAdditiveRows>(args, chunk_tiles, stream);
}
void sm80_k256_forward_sums(const ScanForwardArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  launch_k256_forward<ForwardForm::kSums>(args, chunk_tiles, stream);
}

void sm80_scan_forward(const ScanForwardArgs& args, ForwardScan kernel, int k_tile, void* stream) {
  switch (kernel) {
    case ForwardScan::kSm80Additive:
      return launch_sm80_forward<ForwardForm::kAdditive>(args, k_tile, stream);
    case ForwardScan::kSm80Tiles:
      return launch_sm80_forward<ForwardForm::kTiles>(args, k_tile, stream);
    case ForwardScan::kSm80HiLo:
      return launch_sm80_forward<ForwardForm::kHiLo>(args, k_tile, stream);
    case ForwardScan::kSm80SplitTiles:
      return launch_sm80_forward<ForwardForm::kSplitTiles>(args, k_tile, stream);
    case ForwardScan::kSm80Rows:
      return launch_sm80_forward<ForwardForm::kRows>(args, k_tile, stream);
    case ForwardScan::kSm80Pairs:
      return launch_sm80_forward<ForwardForm::kPairs>(args, k_tile, stream);
    case ForwardScan::kSm80Sums:
      return launch_sm80_forward<ForwardForm::kSums>(args, k_tile, stream);
    default:
      fail_internal("sm80_scan_forward: expected a kernel of sm80/forward, got number {}", static_cast<int>(kernel));
  }
}

}  // namespace fw::cuda
