// The reverse scan over chunks of 64 tokens by mma.sync, in 99 KB of shared memory. Tiles, forms and results are those
// of sm90/scan/reverse.cu, with K above 128 of sm90/k256/reverse.cu. Per chunk, from the last to the first:
//   kAdditive, kTiles    V = k D                                    D = Diag(gamma) D + q^T dO - y^T V
//   kHiLo                V = diag(scale) k D                        the same; D, V, k and y have two terms
//   kAdditiveRows        V = diag(k) k D                            D = gamma D + Q^T diag(q) dO
//   kKeys                dR = P^T dO + Khat D, dZ = A^T dR          D = Diag(gamma) D + Q^T dO + E^T dZ
//   others               dR = P^T dO + diag(k) K D, dZ = A^T dR     D = gamma D + Q^T (diag(q) dO + diag(erase_q) dZ)
//                                                                         + K^T (diag(read_k) dO + diag(e) dZ)
//
// Four barriers of the block a chunk, as sm80/forward.cu has them: dO and what the first products take is loaded early,
// what the last products take late. With K above 128 there are four more. Three are for the parts of K D (parts.cuh),
// which are where dO was, and for dR. The fourth is between the last two products, so that k comes during the second.
#include <type_traits>

#include "gpu/launch.h"
#include "scan/cuda/common/scan/traits.h"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/sm80/parts.cuh"

namespace fw::cuda {
namespace {

// Shared memory: bytes.
template <ReverseTraits kTraits>
struct WarpReverseShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr ReverseForm kForm = kTraits.form;
  using Groups = ScanGroups<kTileK>;
  static constexpr bool kSplit = Groups::kSplit;
  static constexpr int kThreads = Groups::kThreads;
  static constexpr bool kSave = kTraits.saves, kAdditiveRows = kForm == ReverseForm::kAdditiveRows,
                        kDelta = kForm != ReverseForm::kAdditive && !kAdditiveRows;
  static constexpr bool kHiLo = kForm == ReverseForm::kHiLo,
                        kTiles = kForm == ReverseForm::kTiles || kHiLo || kForm == ReverseForm::kAdditive,
                        kSums = kForm == ReverseForm::kSums, kKeys = kForm == ReverseForm::kKeys;
  static constexpr int kMatrix = 64 * kTileK * 2;
  // kTiles: y in place of E.
  static constexpr bool kHasE = (kTiles && kDelta) || kKeys;
  static constexpr int kK = 0, kQ = kK + kMatrix, kE = kQ + kMatrix, kA = kE + (kHasE ? kMatrix : 0),
                       kP = kA + (kTiles ? 0 : kSw128Bytes);
  static constexpr int kLo = kP + (kTiles ? 0 : kSw128Bytes), kKeysLo = kLo + (kHiLo ? kMatrix : 0);
  static_assert(kSplit ? !kTiles && !kKeys : !kAdditiveRows);
  static constexpr bool kReads = kDelta || kSave || !kSplit;  // D
  static constexpr bool kStateTile = kSave && !kHiLo && !kSplit;
  // Of even and odd chunks: dO, then V or dZ; kSplit: dO, then dR, and V or dZ. D, which leaves from registers if there
  // is no room (kHiLo, kSplit).
  static constexpr int kTile = kKeysLo + (kHiLo ? kMatrix : 0), kD = kTile + 2 * kSw128Bytes,
                       kNumbers = kD + (kStateTile ? kMatrix : 0);
  static constexpr int kParts = kTile;
  static_assert(kParts % 16 == 0 && kPartBytes == 2 * kSw128Bytes);
  using Numbers = std::conditional_t<kSplit, RowScales, RowScalesBwd>;
  // kTiles, kKeys: gamma.
  static constexpr int kNumberBytes = kTiles || kKeys ? kTileK * 4
                                      : kSplit        ? static_cast<int>(kScanScaleBytes + (kSums ? kSumScaleBytes : 0))
                                      : kSums         ? static_cast<int>(sizeof(RowScalesBwd))
                                                      : static_cast<int>(kPlainScaleBytes);
  static constexpr int kKeyScale = kNumbers + kNumberBytes, kShared = kKeyScale + (kHiLo ? 64 * 4 : 0);
  static_assert(kShared <= kSm80SharedBytes);
};

template <class Shape>
struct ReverseLoads {
  const ScanReverseArgs& args;
  const ScanCoord& coord;
  char* shared;
  TileRows d_o;

  // dO; what is left in its place, or (kSplit) apart from it.
  FW_DEVICE char* tile(int c) const { return shared + Shape::kTile + (Shape::kSplit ? 0 : c % 2 * kSw128Bytes); }
  FW_DEVICE char* left(int c) const { return Shape::kSplit ? shared + Shape::kTile + kSw128Bytes : tile(c); }
  FW_DEVICE int64_t chunk_tile(int c) const { return coord.first_tile + static_cast<int64_t>(c) * args.HV; }
  FW_DEVICE void early(int c) const {
    if (c >= 0) {
      if constexpr (Shape::kTiles) {
        load_bytes<Shape::kMatrix>(shared + Shape::kK, bwd_tiles(c).k);
        load_bytes<Shape::kMatrix>(shared + Shape::kQ, bwd_tiles(c).q);
        if constexpr (Shape::kHiLo) {
          if (has_keys_lo())
            load_bytes<Shape::kMatrix>(shared + Shape::kKeysLo,
                                       args.hi_lo.lo_parts + chunk_tile(c) * (64 * Shape::kTileK));
        }
      } else if constexpr (Shape::kDelta) {
        load_bytes<kSw128Bytes, Shape::kThreads>(shared + Shape::kA, args.pairs[chunk_tile(c)].a);
        load_bytes<kSw128Bytes, Shape::kThreads>(shared + Shape::kP, args.pairs[chunk_tile(c)].p);
        if constexpr (Shape::kKeys) {
          load_bytes<Shape::kMatrix>(shared + Shape::kK, args.keys + chunk_tile(c) * (64 * Shape::kTileK));
          load_bytes<Shape::kMatrix>(shared + Shape::kQ, qe_tiles(c).q);
        }
      }
      fill_tile<Shape::kThreads>(d_o, c, tile(c));
    }
    cp_async_commit();
  }
  // kSplit, between them.
  FW_DEVICE void keys(int c) const {
    if (c >= 0) {
      if constexpr (Shape::kReads) key_rows(args.rows.k, c, Shape::kK);
      load_bytes<Shape::kNumberBytes, Shape::kThreads>(
          shared + Shape::kNumbers, static_cast<const typename Shape::Numbers*>(args.chunk_tiles) + chunk_tile(c));
    }
    cp_async_commit();
  }
  FW_DEVICE void late(int c) const {
    if (c >= 0) {
      if constexpr (Shape::kTiles) {
        if constexpr (Shape::kHasE) load_bytes<Shape::kMatrix>(shared + Shape::kE, bwd_tiles(c).y);
        load_bytes<Shape::kNumberBytes>(shared + Shape::kNumbers, bwd_tiles(c).gamma);
        if constexpr (Shape::kHiLo) {
          const auto& lo = static_cast<const LoTiles<Shape::kTileK>*>(args.hi_lo.chunk_tiles)[chunk_tile(c)];
          load_bytes<Shape::kMatrix>(shared + Shape::kLo, lo.lo);
          load_bytes<64 * 4>(shared + Shape::kKeyScale, lo.scale);
        }
      } else if constexpr (Shape::kKeys) {
        load_bytes<Shape::kMatrix>(shared + Shape::kE, qe_tiles(c).e);
        load_bytes<Shape::kNumberBytes>(shared + Shape::kNumbers, qe_tiles(c).gamma);
      } else if constexpr (Shape::kSplit) {
        key_rows(args.rows.q, c, Shape::kQ);
      } else {
        key_rows(args.rows.k, c, Shape::kK);
        key_rows(args.rows.q, c, Shape::kQ);
        load_bytes<Shape::kNumberBytes>(shared + Shape::kNumbers, args.numbers + chunk_tile(c));
      }
    }
    cp_async_commit();
  }
  // kHiLo: whether bf16 leaves anything out of k.
  FW_DEVICE bool has_keys_lo() const { return args.hi_lo.lo_parts != nullptr; }

 private:
  FW_DEVICE void key_rows(const TokenArg& rows, int c, int to) const {
    fill_rows<Shape::kTileK, Shape::kThreads>(rows, args.sequences, coord, c, args.K, shared + to);
  }
  FW_DEVICE const QETiles<Shape::kTileK>& qe_tiles(int c) const {
    return static_cast<const QETiles<Shape::kTileK>*>(args.chunk_tiles)[chunk_tile(c)];
  }
  FW_DEVICE const BwdTiles<Shape::kTileK>& bwd_tiles(int c) const {
    return static_cast<const BwdTiles<Shape::kTileK>*>(args.chunk_tiles)[chunk_tile(c)];
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kSplit ? 1 : 2)
    sm80_reverse_kernel(const ScanReverseArgs args) {
  constexpr int kTileK = Shape::kTileK;
  constexpr bool kSave = Shape::kSave, kHiLo = Shape::kHiLo, kSplit = Shape::kSplit;
  using Groups = typename Shape::Groups;
  char* const shared = shared_memory();
  const int value_blocks = value_block_count(args.V);
  const ScanCoord coord = scan_coord(args.sequences, args.HV, value_blocks, 0);
  if (args.parts != nullptr && (args.parts[coord.n] & 1) == 0) return;
  const ReverseLoads<Shape> loads{args, coord, shared, tile_rows(args.d_o, args.sequences, coord, args.V)};
  loads.early(coord.chunks - 1);
  if constexpr (kSplit) loads.keys(coord.chunks - 1);
  loads.late(coord.chunks - 1);
  const Groups own;
  const int K = args.K - own.first_channel();
  float state[Groups::kOwnK / 2];
  load_state(from_channel(args.d_final_state, own.first_channel()), coord, coord.n, K, args.V, state);
  const uint32_t base = shared_address(shared);
  const auto& numbers = *reinterpret_cast<const typename Shape::Numbers*>(shared + Shape::kNumbers);  // rows
  const float* const gamma = reinterpret_cast<const float*>(shared + Shape::kNumbers);                // others
  uint32_t a[Groups::kOwnK / 16][4];
  [[maybe_unused]] uint32_t a_lo[Groups::kOwnK / 16][4];  // kHiLo
  FW_NO_UNROLL
  for (int c = coord.chunks - 1; c >= 0; --c) {
    const uint32_t tile = base + static_cast<uint32_t>(loads.tile(c) - shared),
                   left = base + static_cast<uint32_t>(loads.left(c) - shared);
    const int64_t block_tile = loads.chunk_tile(c) * value_blocks + coord.value_block;
    uint32_t d_o[4][4], b[4][4];
    [[maybe_unused]] uint32_t scaled[4][4], b_lo[4][4];  // kRows, kSums; kHiLo
    float v[32];
    [[maybe_unused]] float z[32];  // not kTiles
    auto& own_v = own_sums<Groups>(v);
    pack_fragments(state, a);
    if constexpr (kHiLo) pack_lo_parts(state, a, a_lo);
    cp_async_wait<kSplit ? 2 : 1>();
    sync_threads();
    if constexpr (kSave && !Shape::kStateTile) {
      store_state_words(args.d_states + block_tile * (64 * kTileK) + own.first_channel() * 64, a);
    } else if constexpr (kSave) {
      FW_UNROLL
      for (int k = 0; k < kTileK / 16; ++k) store_state_fragment(base + Shape::kD, k, a[k]);
    }
    FW_UNROLL
    for (int k = 0; k < 4; ++k) load_token_fragment(d_o[k], tile, k);
    clear_sums(v);
    if constexpr (kHiLo) {
      mma_hi_lo_rows(v, a, a_lo, base + Shape::kK);
      if (loads.has_keys_lo()) mma_rows(v, a, base + Shape::kKeysLo);
    } else if constexpr (Shape::kTiles || Shape::kKeys) {
      mma_rows(v, a, base + Shape::kK);
    }
    if constexpr (Shape::kKeys) mma_outer(v, d_o, base + Shape::kP);
    cp_async_wait<kSplit ? 1 : 0>();
    sync_threads();
    if constexpr (Shape::kTiles || Shape::kKeys) {
      scale_columns(state, gamma);
      mma_outer(state, d_o, base + Shape::kQ);
      if constexpr (kHiLo) scale_columns(v, reinterpret_cast<const float*>(shared + Shape::kKeyScale));
    } else {
      if constexpr (Shape::kReads) mma_rows(v, a, base + Shape::kK + own.key_bytes());
      if constexpr (kSplit && Shape::kReads) {
        leave_part(shared + Shape::kParts, own.group, v);
        sync_threads();
        add_part(shared + Shape::kParts, own.group, v);
      }
      scale_columns(own_v, numbers.k + own.first_token());
      if constexpr (Shape::kDelta) mma_outer(own_v, d_o, base + Shape::kP, own.first_token());
      scale_all(state, numbers.gamma[0]);
    }
    if constexpr (kSplit && Shape::kReads) {
      uint32_t own_b[Groups::kOwnTokens / 16][4];
      pack_fragments(own_v, own_b);
      sync_threads();  // the parts have been read
      FW_UNROLL
      for (int k = 0; k < Groups::kOwnTokens / 16; ++k)
        store_token_fragment((Shape::kDelta ? tile : left) + own.token_bytes(), k, own_b[k]);
      if constexpr (Shape::kDelta) {
        sync_threads();
        FW_UNROLL
        for (int k = 0; k < 4; ++k) load_token_fragment(b[k], tile, k);
      }
    } else {
      pack_fragments(v, b);
    }
    if constexpr (kHiLo) pack_lo_parts(v, b, b_lo);
    if constexpr (!Shape::kTiles && Shape::kDelta) {
      clear_sums(z);
      mma_outer(z, b, base + Shape::kA);
      pack_fragments(z, b);
    }
    if (kSave && (!kSplit || (Shape::kDelta && own.group == 0))) {
      sync_warp();  // its lanes have read what lies there
      FW_UNROLL
      for (int k = 0; k < 4; ++k) store_token_fragment(left, k, b[k]);
    }
    if constexpr (kSplit) cp_async_wait<0>();
    sync_threads();
    loads.early(c - 1);
    if constexpr (Shape::kStateTile)
      store_bytes<Shape::kMatrix>(args.d_states + block_tile * (64 * kTileK), shared + Shape::kD);
    if constexpr (Shape::kTiles && Shape::kDelta) {
      constexpr uint32_t kSigns = 0x80008000u;
      FW_UNROLL
      for (int k = 0; k < 4; ++k) {
        FW_UNROLL
        for (uint32_t& x : b[k]) x ^= kSigns;
        if constexpr (kHiLo) {
          FW_UNROLL
          for (uint32_t& x : b_lo[k]) x ^= kSigns;
        }
      }
    }
    if constexpr (kHiLo) {
      mma_hi_lo_outer(state, b, b_lo, base + Shape::kE);
      mma_outer(state, b, base + Shape::kLo);
    } else if constexpr (Shape::kHasE) {
      mma_outer(state, b, base + Shape::kE);
    }
    if constexpr (Shape::kAdditiveRows) {
      scale_fragments(d_o, numbers.q, b);
      sync_threads();
      loads.keys(c - 1);
      mma_outer(state, b, base + Shape::kQ + own.key_bytes());
    } else if constexpr (!Shape::kTiles && !Shape::kKeys) {
      clear_sums(v);
      if constexpr (Shape::kSums) {
        FW_UNROLL
        for (int i = 0; i < 32; ++i) v[i] = z[i];
        scale_columns(v, numbers.erase_q);
      }
      add_fragments(v, d_o, numbers.q);
      pack_fragments(v, b);
      scale_columns(z, numbers.e);
      if constexpr (Shape::kSums) add_fragments(z, d_o, numbers.read_k);
      pack_fragments(z, scaled);
      if constexpr (!kSplit) mma_outer(state, b, base + Shape::kQ);
      mma_outer(state, scaled, base + Shape::kK + own.key_bytes());
      if constexpr (kSplit) {
        sync_threads();
        loads.keys(c - 1);
        mma_outer(state, b, base + Shape::kQ + own.key_bytes());
      }
    }
    sync_threads();
    loads.late(c - 1);
    if constexpr (kSave) store_bytes<kSw128Bytes, Shape::kThreads>(args.v + block_tile * kSw128Elements, loads.left(c));
  }
  cp_async_wait<0>();
  store_state(from_channel(args.d_initial_state, own.first_channel()), coord,
              args.final_index != nullptr ? args.final_index[coord.n] : coord.n, K, args.V, state);
}

template <ReverseForm kForm>
void launch_sm80_reverse(const ScanReverseArgs& args, int k_tile, void* stream) {
  with_constants(
      [&](auto small, auto saves) {
        using Shape = WarpReverseShape<ReverseTraits{.k_tile = small ? 64 : 128, .form = kForm, .saves = saves}>;
        launch(sm80_reverse_kernel<Shape>, scan_grid(args.sequences, args.HV, value_block_count(args.V)),
               kWarpScanThreads, Shape::kShared, stream, args);
      },
      k_tile == 64, args.d_states != nullptr);
}

template <ReverseForm kForm>
void launch_k256_reverse(ScanReverseArgs args, const K256Tiles& chunk_tiles, void* stream) {
  args.chunk_tiles = chunk_tiles.numbers, args.pairs = chunk_tiles.pairs;
  with_constants(
      [&](auto saves) {
        using Shape = WarpReverseShape<ReverseTraits{.k_tile = kMaxTileK, .form = kForm, .saves = saves}>;
        launch(sm80_reverse_kernel<Shape>, scan_grid(args.sequences, args.HV, value_block_count(args.V)),
               Shape::kThreads, Shape::kShared, stream, args);
      },
      args.d_states != nullptr);
}

}  // namespace

void sm80_k256_reverse_rows(const ScanReverseArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  args.is_delta ? launch_k256_reverse<ReverseForm::kRows>(args, chunk_tiles, stream)
                : launch_k256_reverse<ReverseForm::kAdditiveRows>(args, chunk_tiles, stream);
}
void sm80_k256_reverse_sums(const ScanReverseArgs& args, const K256Tiles& chunk_tiles, void* stream) {
  launch_k256_reverse<ReverseForm::kSums>(args, chunk_tiles, stream);
}

void sm80_scan_reverse(const ScanReverseArgs& args, ReverseScan kernel, int k_tile, void* stream) {
  if (kernel == ReverseScan::kSm80Keys) return launch_sm80_reverse<ReverseForm::kKeys>(args, k_tile, stream);
  if (kernel == ReverseScan::kSm80Rows) {
    return args.mixed ? launch_sm80_reverse<ReverseForm::kSums>(args, k_tile, stream)
                      : launch_sm80_reverse<ReverseForm::kRows>(args, k_tile, stream);
  }
  if (!args.is_delta) return launch_sm80_reverse<ReverseForm::kAdditive>(args, k_tile, stream);
  args.hi_lo.chunk_tiles != nullptr ? launch_sm80_reverse<ReverseForm::kHiLo>(args, k_tile, stream)
                                    : launch_sm80_reverse<ReverseForm::kTiles>(args, k_tile, stream);
}

}  // namespace fw::cuda
