// What the two scans of keys of 129 to 256 channels share: a block's layout of shared memory, who loads what, the state
// as an operand. See sm90/scan/parts.cuh, whose fragments these are.
//
// A block of 384 threads owns up to two value blocks of one value head of one sequence, each of them a warpgroup's. So
// what a chunk loads is read from the L2 cache once for both. Most of that are the raw rows of q and k. The state [64
// values, 256] takes 128 registers of a thread, so its bf16 values have no registers alongside the products. They lie
// in shared memory, where the products read them and from where they leave for the gradients.
#pragma once

#include "gpu/device.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/sm90/scan/rows.cuh"

namespace fw::cuda {

inline constexpr unsigned kK256Threads = 384;
inline constexpr int kK256Groups = 2;
// Registers of a thread: of the four warps that load and store, and of the state's. All that the latter want the former
// must have given back of what the kernel begins with, or they wait for ever.
template <int kMovers, int kState>
struct K256Registers {
  static constexpr int kOfMovers = kMovers, kOfState = kState, kAtFirst = 65536 / kK256Threads / 8 * 8;
  static_assert(128 * kMovers + kK256Groups * 128 * kState <= static_cast<int>(kK256Threads) * kAtFirst);
};

// What stages load of a QETiles besides E and Q.
struct K256Decays {
  float gamma[kMaxTileK], z_scale[kChunk];
};
static_assert(offsetof(QETiles<kMaxTileK>, z_scale) - offsetof(QETiles<kMaxTileK>, gamma) ==
              offsetof(K256Decays, z_scale));

// Bytes of shared memory: k, numbers and tiles of v or d_o of two chunks, q, A and P of one; of each group the state's
// numbers and with kOut a buffer of O.
// kSums: with q come erase_q and read_k, for which there is no second buffer. kChunkTiles: E and Khat of a chunk in
// place of k of two, Q in that of q; numbers are gamma and z_scale.
struct K256Traits {
  K256Form form = K256Form::kRows;
  Direction direction = Direction::kForward;
  bool writes_o = false;
  bool saves = false;  // S^T and W (D^T, and V or dZ) of every chunk
};
template <K256Traits kTraits>
struct K256Shape {
  static constexpr K256Form kForm = kTraits.form;
  static constexpr bool kReverse = kTraits.direction == Direction::kReverse, kOut = kTraits.writes_o,
                        kSave = kTraits.saves;
  static constexpr bool kDelta = kForm != K256Form::kAdditive, kSums = kForm == K256Form::kSums,
                        kChunkTiles = kForm == K256Form::kKeys;
  // What chunks load besides k: q, with sums in reverse after A and P; A; P.
  static constexpr bool kLoadsQ = kReverse || kOut || kSums, kLoadsQLast = kReverse && kSums, kLoadsA = kDelta,
                        kLoadsP = kReverse ? kDelta : kOut;
  static constexpr int kMatrix = 64 * kMaxTileK * 2, kStages = 2;
  static constexpr int kK = 0, kQ = kStages * kMatrix, kState = kQ + kMatrix, kA = kState + kK256Groups * kMatrix,
                       kP = kA + kSw128Bytes;
  static constexpr int kE = 0, kKhat = kMatrix;
  static constexpr int kTile = kP + kSw128Bytes, kO = kTile + kStages * kK256Groups * kSw128Bytes,
                       kNumbers = kO + (kOut ? kK256Groups * kSw128Bytes : 0);
  static constexpr int kLoadedScales =
      kChunkTiles ? static_cast<int>(sizeof(K256Decays)) : static_cast<int>(kScanScaleBytes);
  static constexpr int kNumberBytes = (kLoadedScales + 127) / 128 * 128;
  static constexpr int kMixed = kNumbers + kStages * kNumberBytes,
                       kMixedBytes = kSums ? static_cast<int>(kSumScaleBytes) : 0;
  static constexpr int kBarriers = kMixed + kMixedBytes, kShared = kBarriers + kScanBarrierBytes;

  // left: of a stage's tile, which its reader overwrites with what leaves; state, o: of the groups. Their empty ones
  // are waited for by who fills again.
  struct Barriers {
    RingBarriers<kStages> stages, left[kK256Groups];
    RingBarriers<1> q, a, p, e, khat, state[kK256Groups], o[kK256Groups];
  };
  static_assert(kShared <= kMaxSharedBytes && sizeof(Barriers) <= kScanBarrierBytes &&
                sizeof(IntraChunk) == 2 * kSw128Bytes);

  // Of the scan's chunk number i: made of it where registers are scarce.
  static FW_DEVICE Ring<kStages> stage_of(int i) {
    static_assert(kStages == 2);
    return {i & 1, i >> 1 & 1};
  }
  static FW_DEVICE Ring<1> single_of(int i) { return {0, i & 1}; }

  static constexpr int tile(int slot, int group) { return kTile + (slot * kK256Groups + group) * kSw128Bytes; }
};

// Value blocks of a block: one each where that leaves none without an SM; two take nearly twice as long a chunk.
inline int k256_groups(const SequenceArg& sequences, int HV, int V) {
  return static_cast<int64_t>(sequences.N) * HV * value_block_count(V) <= sm_count() ? 1 : kK256Groups;
}

// Of a block: its sequence and head, and the value blocks of its groups.
struct K256Coord {
  ScanCoord scan;  // value_block: of the first group
  int value_blocks, groups;
  FW_DEVICE ScanCoord of_group(int group) const {
    ScanCoord own = scan;
    own.value_block += group;
    return own;
  }
  // Of what the scan leaves of a chunk.
  FW_DEVICE int64_t tile(int c, int group, int HV) const {
    return (scan.first_tile + static_cast<int64_t>(c) * HV) * value_blocks + scan.value_block + group;
  }
};
constexpr int k256_blocks(int V, int groups) { return (V + groups * kValueBlock - 1) / (groups * kValueBlock); }
FW_DEVICE K256Coord k256_coord(const SequenceArg& sequences, int HV, int V, int most) {
  K256Coord p{scan_coord(sequences, HV, k256_blocks(V, most), 0), value_block_count(V), 0};
  p.scan.value_block *= most;
  p.groups = p.value_blocks - p.scan.value_block < most ? p.value_blocks - p.scan.value_block : most;
  return p;
}

// Where a group is, looked up anew each time: what is not needed in between takes no registers there.
FW_DEVICE ScanCoord find_k256_group(const SequenceArg& sequences, int HV, int V, int most, int group) {
  return k256_coord(sequences, opaque(HV), V, most).of_group(group);
}

// By one thread, before a barrier of the block. Where something is saved, a stage is empty after what is copied away
// of its tile.
template <class Shape>
FW_DEVICE void init_k256_barriers(typename Shape::Barriers& b, int groups) {
  const int movers = 1 + static_cast<int>(kStoreThread), state = groups * kStateThreads;
  b.stages.init(movers, state + (Shape::kSave ? groups : 0));
  for (RingBarriers<1>* of : {&b.q, &b.a, &b.p, &b.e, &b.khat}) of->init(movers, state);
  for (int group = 0; group < kK256Groups; ++group) {
    b.left[group].init(kStateThreads, 1);
    b.state[group].init(kStateThreads, 1);
    b.o[group].init(kStateThreads, 64);
  }
  mbarrier_init_fence();
}

// ---- What a chunk loads: by the 64 threads of warps 0 and 1, of whom thread 0 asks TMA -----------------------------

// The tensors of a stage; tile: v or d_o.
struct K256StageArgs {
  const SequenceArg& sequences;
  const ScanRows& rows;
  const TokenArg& tile;
  const K256Tiles& chunk_tiles;
  const uint16_t* z;  // SW128 tiles in place of the tensor's, or null
  int HV, K, V;
};

inline StageMaps k256_maps(const ScanRows& rows, const TokenArg& tile, const TokenShape& shape, int HV, int K, int V) {
  StageMaps maps;
  maps.values = map_tensor(tile, shape, HV, V, maps.v) ? 1 : 0;
  maps.rows = map_rows(rows, shape, HV, K, maps) ? 1 : 0;
  return maps;
}

// Rows that TMA cannot take, or of a chunk that it cannot: 64 columns from t.column on, a piece at a time (few
// registers).
FW_DEVICE void fill_k256_sw128(const TileRows& t, int c, char* sw128) {
  FW_NO_UNROLL
  for (int i = static_cast<int>(thread_index()); i < 64 * 8; i += static_cast<int>(kStoreThread)) {
    const int row = i / 8, piece = i % 8;
    float x[8] = {};
    if (t.rows.data != nullptr && c * kChunk + row < t.length)
      load_channels(t.rows, c * kChunk + row, t.column + 8 * piece, t.V, x);
    *reinterpret_cast<uint4*>(sw128 + row * 128 + ((piece ^ (row & 7)) * 16)) =
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
}
FW_DEVICE void fill_k256_rows(const TokenArg& tensor, const K256StageArgs& a, const ScanCoord& coord, int c,
                              char* sw128_tiles) {
  TileRows rows = tile_rows(tensor, a.sequences, coord, a.K);
  FW_NO_UNROLL
  for (rows.column = 0; rows.column < kMaxTileK; rows.column += 64)
    fill_k256_sw128(rows, c, sw128_tiles + rows.column / 64 * kSw128Bytes);
}
FW_DEVICE void load_k256_rows(const TensorMap& map, const TokenArg& tensor, const TmaCoord& tma, const ScanCoord& coord,
                              int c, char* sw128_tiles, uint64_t* full) {
  FW_UNROLL
  for (int sw128 = 0; sw128 < kMaxTileK / 64; ++sw128)
    tma.bring(map, 64 * sw128, coord.hv / tensor.divisor, c, sw128_tiles + sw128 * kSw128Bytes, full);
}

// What is all of a buffer, once that is empty.
FW_DEVICE void load_k256_part(RingBarriers<1>& barriers, const Ring<1>& single, const void* from, char* to,
                              uint32_t bytes) {
  barriers.wait_empty(single);
  if (thread_index() == 0) {
    mbarrier_expect(barriers.full, bytes);
    bulk_load(to, from, bytes, barriers.full);
  }
  mbarrier_arrive(barriers.full);
}

// Chunk by chunk, c(i) of i = 0 ..: into what is empty, in the order in which it is waited for.
template <class Shape, class ChunkOf>
FW_DEVICE void load_k256_chunks(const K256StageArgs& a, const StageMaps& maps, const K256Coord& coord, char* shared,
                                typename Shape::Barriers& barriers, ChunkOf&& chunk_of) {
  const TmaCoord tma(a.sequences, coord.scan);
  const bool asks = thread_index() == 0;
  Ring<Shape::kStages> ring;
  Ring<1> single;
  FW_NO_UNROLL
  for (int i = 0; i < coord.scan.chunks; ++i, ring.next(), single.next()) {
    const int c = chunk_of(i);
    const int64_t item = coord.scan.first_tile + static_cast<int64_t>(c) * a.HV;
    const bool whole = tma.takes(c), loads_tile = whole && maps.values != 0, loads_rows = whole && maps.rows != 0;
    uint64_t* full = barriers.stages.full + ring.slot;
    char* const keys = shared + Shape::kK + ring.slot * Shape::kMatrix;
    barriers.stages.wait_empty(ring);
    if (asks) {
      mbarrier_expect(full, static_cast<uint32_t>(kScanScaleBytes) + (loads_rows ? Shape::kMatrix : 0) +
                                (loads_tile ? static_cast<uint32_t>(coord.groups) * kTensorBytes : 0));
      bulk_load(shared + Shape::kNumbers + ring.slot * Shape::kNumberBytes, a.chunk_tiles.numbers + item,
                kScanScaleBytes, full);
      if (loads_rows) load_k256_rows(maps.k, a.rows.k, tma, coord.scan, c, keys, full);
      for (int group = 0; loads_tile && group < coord.groups; ++group) {
        tma.bring(maps.v, (coord.scan.value_block + group) * kValueBlock, coord.scan.hv / a.tile.divisor, c,
                  shared + Shape::tile(ring.slot, group), full);
      }
    }
    if (!loads_rows) fill_k256_rows(a.rows.k, a, coord.scan, c, keys);
    for (int group = 0; !loads_tile && group < coord.groups; ++group) {
      fill_k256_sw128(tile_rows(a.tile, a.sequences, coord.of_group(group), a.V), c,
                      shared + Shape::tile(ring.slot, group));
    }
    if (!loads_rows || !loads_tile) fence_async_shared();  // for the products, and for TMA, which writes there next
    mbarrier_arrive(full);

    const auto issue_q = [&] {
      full = barriers.q.full;
      barriers.q.wait_empty(single);
      if (asks) {
        mbarrier_expect(full, (loads_rows ? Shape::kMatrix : 0) + Shape::kMixedBytes);
        if (loads_rows) load_k256_rows(maps.q, a.rows.q, tma, coord.scan, c, shared + Shape::kQ, full);
        if constexpr (Shape::kMixedBytes > 0)
          bulk_load(shared + Shape::kMixed, a.chunk_tiles.numbers[item].erase_q, Shape::kMixedBytes, full);
      }
      if (!loads_rows) {
        fill_k256_rows(a.rows.q, a, coord.scan, c, shared + Shape::kQ);
        fence_async_shared();
      }
      mbarrier_arrive(full);
    };
    if constexpr (Shape::kLoadsQ && !Shape::kLoadsQLast) issue_q();
    if constexpr (Shape::kLoadsA)
      load_k256_part(barriers.a, single, a.chunk_tiles.pairs[item].a, shared + Shape::kA, kSw128Bytes);
    if constexpr (Shape::kLoadsP)
      load_k256_part(barriers.p, single, a.chunk_tiles.pairs[item].p, shared + Shape::kP, kSw128Bytes);
    if constexpr (Shape::kLoadsQLast) issue_q();
  }
}

// The same of chunk tiles. In reverse Khat first and E last, else E first and Khat last.
template <class Shape, class ChunkOf>
FW_DEVICE void load_k256_tiles(const K256StageArgs& a, const StageMaps& maps, const K256Coord& coord, char* shared,
                               typename Shape::Barriers& barriers, ChunkOf&& chunk_of) {
  const TmaCoord tma(a.sequences, coord.scan);
  const bool asks = thread_index() == 0;
  Ring<Shape::kStages> ring;
  Ring<1> single;
  FW_NO_UNROLL
  for (int i = 0; i < coord.scan.chunks; ++i, ring.next(), single.next()) {
    const int c = chunk_of(i);
    const int64_t item = coord.scan.first_tile + static_cast<int64_t>(c) * a.HV;
    const QETiles<kMaxTileK>& chunk_tile = a.chunk_tiles.chunk_tiles[item];
    const bool loads_tile = a.z != nullptr || (tma.takes(c) && maps.values != 0);
    uint64_t* const full = barriers.stages.full + ring.slot;
    barriers.stages.wait_empty(ring);
    if (asks) {
      mbarrier_expect(full,
                      Shape::kLoadedScales + (loads_tile ? static_cast<uint32_t>(coord.groups) * kTensorBytes : 0));
      bulk_load(shared + Shape::kNumbers + ring.slot * Shape::kNumberBytes, chunk_tile.gamma, Shape::kLoadedScales,
                full);
    }
    for (int group = 0; group < coord.groups; ++group) {
      char* const to = shared + Shape::tile(ring.slot, group);
      if (!loads_tile) {
        fill_k256_sw128(tile_rows(a.tile, a.sequences, coord.of_group(group), a.V), c, to);
      } else if (asks && a.z != nullptr) {
        bulk_load(to, a.z + coord.tile(c, group, a.HV) * kSw128Elements, kSw128Bytes, full);
      } else if (asks) {
        tma.bring(maps.v, (coord.scan.value_block + group) * kValueBlock, coord.scan.hv / a.tile.divisor, c, to, full);
      }
    }
    if (!loads_tile) fence_async_shared();
    mbarrier_arrive(full);

    const auto issue_e = [&] { load_k256_part(barriers.e, single, chunk_tile.e, shared + Shape::kE, Shape::kMatrix); };
    const auto issue_khat = [&] {
      load_k256_part(barriers.khat, single, a.chunk_tiles.keys + item * (64 * kMaxTileK), shared + Shape::kKhat,
                     Shape::kMatrix);
    };
    const auto issue_a = [&] {
      load_k256_part(barriers.a, single, a.chunk_tiles.pairs[item].a, shared + Shape::kA, kSw128Bytes);
    };
    if constexpr (Shape::kReverse) {
      issue_khat();
    } else {
      issue_e();
      issue_a();
    }
    if constexpr (Shape::kLoadsQ) {
      load_k256_part(barriers.q, single, chunk_tile.q, shared + Shape::kQ, Shape::kMatrix);
      load_k256_part(barriers.p, single, a.chunk_tiles.pairs[item].p, shared + Shape::kP, kSw128Bytes);
    }
    if constexpr (Shape::kReverse) {
      issue_a();
      issue_e();
    } else {
      issue_khat();
    }
  }
}

// ---- The state -------------------------------------------------------------------------------------------------------------------

// d [64 values, 64 tokens] = the state's numbers times the transpose of the SW128 tiles of rows.
FW_DEVICE void multiply_state(float (&d)[32], uint32_t state, uint32_t rows) {
  const uint64_t a = wgmma_descriptor(state, 16, 1024), b = wgmma_descriptor(rows, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < kMaxTileK / 16; ++k) {
    const int at = k / 4 * kSw128Bytes + k % 4 * 32;
    wgmma_ss<64, false, false>(d, descriptor_after(a, at), descriptor_after(b, at), k > 0);
  }
}

// By a group's warps: the state's numbers to shared memory, where then they are there for products of all four; and the
// state decayed by gamma, unless its channels are each by their own, later.
template <class Shape>
FW_DEVICE void put_k256_state(float (&state)[kMaxTileK / 2], uint32_t to, const float* gamma, int group) {
  named_barrier_sync(1 + group, kStateThreads);  // no warp's products read the numbers of the chunk before any more
  FW_UNROLL
  for (int k = 0; k < kMaxTileK / 16; ++k) {
    uint32_t packed[4];
    FW_UNROLL
    for (int i = 0; i < 4; ++i) packed[i] = pack_bf16(state[8 * k + 2 * i], state[8 * k + 2 * i + 1]);
    store_state_fragment(to, k, packed);
  }
  if constexpr (!Shape::kChunkTiles) {
    const float of_all = gamma[0];
    FW_UNROLL
    for (float& x : state) x *= of_all;
  }
  fence_async_shared();
  named_barrier_sync(1 + group, kStateThreads);
}

// ---- Sums of q and k -------------------------------------------------------------------------------------------------------------

// Numbers by row, of k S (D) and of q S.
struct SumFactors {
  const float *of_k, *of_q;
};

// From k S and q S: in place of the tile's values W, rounded, and in that of q S what O has of both. W goes to
// shared memory because alongside k S and q S there are no registers for it.
FW_DEVICE void mix_products(const float (&k_s)[32], float (&q_s)[32], const SumFactors& erase, const SumFactors& read,
                            const float* z, uint32_t tile) {
  const int first = 2 * static_cast<int>(lane_index() % 4);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    uint32_t x[4];
    load_token_fragment(x, tile, k);
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto at = [&](const float* numbers) {
        return *reinterpret_cast<const float2*>(numbers + first + 16 * k + 8 * (i / 2));
      };
      const float2 e_k = at(erase.of_k), e_q = at(erase.of_q), r_k = at(read.of_k), r_q = at(read.of_q), of_v = at(z);
      const int low = 8 * k + 2 * i, high = low + 1;
      x[i] = pack_bf16(e_k.x * k_s[low] + e_q.x * q_s[low] + of_v.x * bf16_low(x[i]),
                       e_k.y * k_s[high] + e_q.y * q_s[high] + of_v.y * bf16_high(x[i]));
      q_s[low] = r_q.x * q_s[low] + r_k.x * k_s[low];
      q_s[high] = r_q.y * q_s[high] + r_k.y * k_s[high];
    }
    store_token_fragment(tile, k, x);
  }
}

// d [64 values, 64 tokens] = the tile [64 tokens, 64 values] transposed times the transpose of the SW128 tile of rows.
FW_DEVICE void multiply_tile(float (&d)[32], uint32_t tile, uint32_t rows) {
  const uint64_t a = wgmma_descriptor(tile, kSw128Bytes, 1024), b = wgmma_descriptor(rows, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < 4; ++k)
    wgmma_ss<64, true, false>(d, descriptor_after(a, k * 2048), descriptor_after(b, k * 32), k > 0);
}

// What the outer products with rows of k and of q take of dZ (z) and of d_o, rounded. Both at once, for what they are
// made of is gone with it.
FW_DEVICE void mix_fragments(const float (&z)[32], const uint32_t (&d_o)[4][4], const SumFactors& erase,
                             const SumFactors& read, uint32_t (&of_k)[4][4], uint32_t (&of_q)[4][4]) {
  const int first = 2 * static_cast<int>(lane_index() % 4);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) {
    FW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto mixed = [&](const float* erases, const float* reads) {
        const int at = first + 16 * k + 8 * (i / 2);
        const float2 e = *reinterpret_cast<const float2*>(erases + at),
                     r = *reinterpret_cast<const float2*>(reads + at);
        return pack_bf16(e.x * z[8 * k + 2 * i] + r.x * bf16_low(d_o[k][i]),
                         e.y * z[8 * k + 2 * i + 1] + r.y * bf16_high(d_o[k][i]));
      };
      of_k[k][i] = mixed(erase.of_k, read.of_k), of_q[k][i] = mixed(erase.of_q, read.of_q);
    }
  }
}

// By thread 64 (states) and thread 96 (tiles) of warps 2 and 3, if something is saved: what a group leaves of a chunk
// goes to memory. After the tile's copy its stage may be filled anew.
template <class Shape>
FW_DEVICE void drain_k256(const K256Coord& coord, int group, int HV, int c, const Ring<Shape::kStages>& ring,
                          const Ring<1>& single, char* shared, typename Shape::Barriers& barriers, uint16_t* states,
                          uint16_t* tiles) {
  const int64_t tile = coord.tile(c, group, HV);
  if (thread_index() == kStoreThread) {
    barriers.state[group].wait_full(single);
    drain_bulk(states + tile * (64 * kMaxTileK), shared + Shape::kState + group * Shape::kMatrix, Shape::kMatrix,
               barriers.state[group].empty);
  } else if (thread_index() == kStoreThread + 32) {
    barriers.left[group].wait_full(ring);
    drain_bulk(tiles + tile * kSw128Elements, shared + Shape::tile(ring.slot, group), kSw128Bytes,
               barriers.stages.empty + ring.slot);
  }
}

}  // namespace fw::cuda
