// The scans of rules without an erase, from the raw tensors (sm90/additive/rows.cuh has the formulas). A block has 64
// value columns of one value head of one sequence or segment; its warps have parts:
//   warp       does                                            waits for                    says so to                shared memory
//   0 to 3     load q, k and v (d_o) of a chunk: thread 0     stages.empty                 stages.full               stages: kX, kQ, kY
//              asks TMA; what that cannot take, all
//   4, 5       factors of rows, of every second chunk each     factors.empty                factors.full              kFactor
//   6          takes O away                                    o.full                       o.empty                   kO
//   7          takes the states away                           states.full                  states.empty              kState
//   8 to 11,   P and O of every second chunk each, from the    stages, factors, states .full, o.empty                 read stages, kFactor, kState;
//   12 to 15   states in shared memory; what norms do to                                    the others' .empty,       write kO
//              the factors                                                                  normed, o.full
//   16 to 19   the transposed state [64 values, kTileK] in       stages, factors .full,       stages, factors .empty,   read stages, kFactor; write kState
//              registers                                       normed, states.empty         states.full
// Forward, O wanted or the state alone; and in reverse, where q and d_o are read in place of k and v: the state alone.
//
// What ptxas allows while products are in flight is said in scan/cuda/sm90/scan/forward.cu.
#include <algorithm>
#include <type_traits>

#include "gpu/launch.h"
#include "gpu/sm90/ptx.cuh"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/sm90/additive/rows.cuh"

namespace fw::cuda {

namespace {

constexpr unsigned kAdditiveThreads = 640;
constexpr int kOutGroups = 2;
constexpr int kProducerThreads = 128, kOutThread = 256, kOwnThread = 512, kGroup = 128;
constexpr int kFactorWarp = 4, kFactorWarps = 2, kTakeWarp = 6, kStatesWarp = 7;

struct AdditiveTraits {
  int k_tile = 128;  // 64 or 128
  bool writes_o = false;
};

// Shared memory: bytes. A stage is x (k; in reverse q), q if O is wanted, and the rows of values.
template <AdditiveTraits kTraits>
struct AdditiveShape {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kOut = kTraits.writes_o;
  static constexpr int kMatrix = 64 * kTileK * 2;
  static constexpr int kX = 0, kQ = kMatrix, kY = kOut ? 2 * kMatrix : kMatrix, kStage = kY + kSw128Bytes;
  static constexpr int kFactors = 8, kStateBuffers = 2, kOutBuffers = 2;
  static constexpr int kStages = kOut ? 4 : 6;
  static constexpr int kState = kStages * kStage, kO = kState + kStateBuffers * kMatrix;
  static constexpr int kFactor = kO + (kOut ? kOutBuffers * kSw128Bytes : 0),
                       kFactorBytes = (static_cast<int>(sizeof(FactorRows)) + 15) / 16 * 16;
  static constexpr int kBarriers = kFactor + kFactors * kFactorBytes;
  static constexpr int kShared = kBarriers + 384;

  struct Barriers {
    RingBarriers<kStages> stages;
    RingBarriers<kFactors> factors;
    // Norms are in the factors of a slot. Nothing empties it but what empties the factors.
    uint64_t normed[kFactors];
    RingBarriers<kStateBuffers> states;
    RingBarriers<kOutBuffers> o;
    float log_decay;  // of the chunks of the second warp that makes factors
  };
  // Where chunks alternate between warps or groups, a buffer is always the same one's: who waits for a buffer waits for
  // what became of its own chunk in it, and cannot miss a phase.
  static_assert(kStages % 2 == 0 && kFactors % 2 == 0 && kStateBuffers % 2 == 0 && kOutBuffers % 2 == 0);
  static_assert(kY == (kOut ? 2 : 1) * kMatrix && kShared <= kMaxSharedBytes && sizeof(Barriers) <= 384);
};

// Accumulators O of a chunk straight to float32 rows.
FW_DEVICE void store_float_rows(const TileRows& t, int c, const float (&o)[32]) {
  const int token = c * kChunk + 16 * warp_in_group() + static_cast<int>(lane_index()) / 4,
            column = t.column + 2 * (static_cast<int>(lane_index()) % 4);
  float* to = reinterpret_cast<float*>(t.rows.data);
  FW_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int row = token + i % 4 / 2 * 8, v = column + i / 4 * 8 + i % 2;
    if (row < t.length && v < t.V) to[row * t.rows.stride + v] = o[i];
  }
}

// By one warp: rows `from` to from + 31 of a SW128 tile of bf16 to bf16 rows.
FW_DEVICE void store_sw128(const TileRows& t, int c, const char* sw128, int from) {
  const int lane = static_cast<int>(lane_index()), piece = lane % 8, first = from + lane / 8,
            column = t.column + piece * 8;
  const int left = t.length - c * kChunk;
  char* to = t.rows.data + 2 * (static_cast<int64_t>(c * kChunk + first) * t.rows.stride + column);
  const int64_t step = 8 * t.rows.stride;  // four rows
  sw128 += first * 128;
  const int even = (piece ^ (first & 7)) << 4, odd = even ^ 64;
  if (t.wide && t.column + 64 <= t.V && from + 32 <= left) {
    FW_UNROLL
    for (int j0 = 0; j0 < 8; j0 += 4) {
      uint4 x[4];
      FW_UNROLL
      for (int j = 0; j < 4; ++j)
        x[j] = *reinterpret_cast<const uint4*>(sw128 + 512 * (j0 + j) + (j % 2 == 0 ? even : odd));
      FW_UNROLL
      for (int j = 0; j < 4; ++j, to += step) *reinterpret_cast<uint4*>(to) = x[j];
    }
    return;
  }
  FW_NO_UNROLL
  for (int j = 0; j < 8; ++j, to += step) {
    if (first + 4 * j >= left) break;
    const uint4 x = *reinterpret_cast<const uint4*>(sw128 + 512 * j + (j % 2 == 0 ? even : odd));
    if (t.wide) {
      if (column < t.V) *reinterpret_cast<uint4*>(to) = x;
    } else {
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
      FW_UNROLL
      for (int e = 0; e < 8; ++e) {
        if (column + e < t.V) reinterpret_cast<uint16_t*>(to)[e] = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
      }
    }
  }
}

// States in float32 of which the block has all 64 value columns and K is kTileK; `body(element, i)` for accumulator i.
template <int kTileK>
FW_DEVICE bool whole_state(const StateArg& a, const ScanCoord& p, int K, int V) {
  return a.bf16 == 0 && K == kTileK && (p.value_block + 1) * kValueBlock <= V;
}
template <int kTileK, class Body>
FW_DEVICE void for_each_element(const StateArg& a, const ScanCoord& p, int n, int K, int V, Body&& body) {
  const StateOffset s = state_offset(a, p, n, K, V);
  float* at = reinterpret_cast<float*>(s.data) + s.k * s.stride_k + s.v * s.stride_v;
  const int64_t across = 8 * s.stride_v, back = 7 * s.stride_k;
  FW_UNROLL
  for (int j = 0; j < kTileK / 8; ++j, at += back) {
    body(at, 4 * j);
    body(at + across, 4 * j + 2);
    at += s.stride_k;
    body(at, 4 * j + 1);
    body(at + across, 4 * j + 3);
  }
}
// Few instructions where nothing is odd: code that runs once comes from memory.
template <int kTileK>
FW_DEVICE void load_own_state(const StateArg& a, const ScanCoord& p, int K, int V, float (&d)[kTileK / 2]) {
  const int n = a.data == nullptr ? -1 : state_slot(a, p.n);
  if (n < 0 || !whole_state<kTileK>(a, p, K, V)) {
    load_state(a, p, p.n, K, V, d);
  } else {
    for_each_element<kTileK>(a, p, n, K, V, [&](const float* at, int i) { d[i] = *at; });
  }
}
template <int kTileK>
FW_DEVICE void store_own_state(const StateArg& a, const ScanCoord& p, int n, int K, int V,
                               const float (&d)[kTileK / 2]) {
  if (a.data == nullptr || n < 0) return;
  if (!whole_state<kTileK>(a, p, K, V)) {
    store_state(a, p, n, K, V, d);
  } else if (n = state_slot(a, n); n >= 0) {
    for_each_element<kTileK>(a, p, n, K, V, [&](float* at, int i) { *at = d[i]; });
  }
}

// Log-decays and gates lie far apart, a few bytes a token, and come late: from the L2 cache they come soon enough.
constexpr int kPrefetchedScalars = 8;  // chunks, even
FW_DEVICE void prefetch_scalars(const Rows& rows, int first, int length) {
  if (rows.data == nullptr) return;
  const int64_t size = rows.bf16 != 0 ? 2 : 4;
  const int t = first + static_cast<int>(lane_index());
  if (t < length) prefetch_line(rows.data + t * rows.stride * size);
  if (t + 32 < length) prefetch_line(rows.data + (t + 32) * rows.stride * size);
}

// By a warp, two rows a lane: the factors of a chunk without norms. Returns the sum of its log-decays in log2.
FW_DEVICE float make_factors(const AdditiveScanArgs& args, const AdditiveScales& numbers, FactorRows& to) {
  Rule rule = args.problem.rule;
  rule.q_norm = rule.k_norm = Norm::kRaw;
  const DecayRows d = decay_rows(numbers.g);
  const FrontCoefs<float> f[2] = {additive_coefs(rule, args.problem.scale, numbers.beta.x, 0, 0),
                                  additive_coefs(rule, args.problem.scale, numbers.beta.y, 0, 0)};
  const float2 right = make_float2(f[0].w_k * f[0].z_v, f[1].w_k * f[1].z_v), left = make_float2(f[0].r_q, f[1].r_q);
  to.store_write(args.reverse ? left : right, args.reverse ? d.from_start : d.to_end, d.sum);
  if (args.o.data != nullptr) to.store_pairs(d, left, right);
  return d.sum;
}

// By a group of four warps, two lanes a row: the factors of a chunk whose front has norms. `keys` is x of a stage.
template <class Shape>
FW_DEVICE void scale_by_norms(const Rule& rule, bool reverse, const char* keys, const char* reads, FactorRows& rows) {
  constexpr int kTileK = Shape::kTileK;
  constexpr bool kOut = Shape::kOut;
  const int row = static_cast<int>(thread_index()) % kGroup / 2;
  const float of_x = row_square<kTileK>(keys, row), of_q = kOut ? row_square<kTileK>(reads, row) : of_x;
  const float q_n = q_factor(rule, of_q), k_n = k_factor(rule, of_x);
  if (lane_index() % 2 != 0) return;
  rows.write[row] *= reverse ? q_n : k_n;
  if constexpr (kOut) {
    rows.read[row] *= q_n, rows.left[row] *= q_n, rows.after[row] *= q_n, rows.right[row] *= k_n;
    FW_UNROLL
    for (auto& before : rows.before) before[row] *= k_n;
  }
}

// d [64, 64] = SW128 tiles a [64, kTileK] times the transpose of SW128 tiles b [64, kTileK].
template <int kTileK>
FW_DEVICE void multiply_tiles(float (&d)[32], uint32_t a, uint32_t b) {
  const uint64_t left = wgmma_descriptor(a, 16, 1024), right = wgmma_descriptor(b, 16, 1024);
  FW_UNROLL
  for (int k = 0; k < kTileK / 16; ++k) {
    const int at = k / 4 * kSw128Bytes + k % 4 * 32;
    wgmma_ss<64, false, false>(d, descriptor_after(left, at), descriptor_after(right, at), k > 0);
  }
}
// d [64, 64] += a [64, 64 tokens] times the SW128 tile b [64 tokens, 64].
FW_DEVICE void multiply_columns(float (&d)[32], const uint32_t (&a)[4][4], uint32_t b) {
  const uint64_t first = wgmma_descriptor(b, kSw128Bytes, 1024);
  FW_UNROLL
  for (int k = 0; k < 4; ++k) wgmma_rs<64, true>(d, a[k], descriptor_after(first, k * 2048), true);
}

// To P from Q K^T, by a group of four warps: each has code of its own.
FW_DEVICE void scale_all_pairs(float (&p)[32], const FactorRows& rows) {
  const int lane = static_cast<int>(lane_index());
  switch (warp_in_group()) {
    case 0:
      return scale_pairs(std::integral_constant<int, 0>{}, p, rows, 0, lane);
    case 1:
      return scale_pairs(std::integral_constant<int, 1>{}, p, rows, 0, lane);
    case 2:
      return scale_pairs(std::integral_constant<int, 2>{}, p, rows, 0, lane);
    default:
      return scale_pairs(std::integral_constant<int, 3>{}, p, rows, 0, lane);
  }
}

// What TMA can load: x, q and the rows of values of a stage, or nothing.
struct StageMaps {
  TensorMap x, q, y;
  int32_t used = 0;
};

template <class Shape>
__global__ void __launch_bounds__(kAdditiveThreads, 1)
    additive_scan_kernel(const __grid_constant__ AdditiveScanArgs args, const __grid_constant__ StageMaps maps) {
  constexpr int kTileK = Shape::kTileK;
  constexpr bool kOut = Shape::kOut;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  const bool normed = norms_matter(args.problem.rule), saves = args.states != nullptr;
  if (thread_index() == 0) {
    const int users = kOut || normed ? 2 * kGroup : kGroup;
    barriers.stages.init(kProducerThreads, users);
    barriers.factors.init(32, users);
    for (int i = 0; i < Shape::kFactors; ++i) mbarrier_init(barriers.normed + i, kGroup);
    barriers.states.init(kGroup, kOut ? kGroup + (saves ? 1 : 0) : 1);
    barriers.o.init(kGroup, 32);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();
  const Problem& x = args.problem;
  const int value_blocks = value_block_count(x.V);
  const ScanCoord coord = scan_coord(args.sequences, x.HV, value_blocks, 0);
  if (args.parts != nullptr && (args.parts[coord.n] & 1) == 0) return;
  const int column = coord.value_block * kValueBlock;
  // Chunk of work tile i.
  const int first = args.reverse ? coord.chunks - 1 : 0, step = args.reverse ? -1 : 1;

  const int warp = shuffle(static_cast<int>(warp_index()), 0);
  if (warp < kFactorWarp) {
    register_count_decrease<56>();
    constexpr int kSw128Tiles = kTileK / 64, kAll = (kOut ? 2 : 1) * kSw128Tiles + 1, kMost = (kAll + 3) / 4;
    const int lane = static_cast<int>(lane_index());
    const auto tile = [&](int sw128) {
      const bool y = sw128 == kAll - 1, q = args.reverse ? !y : sw128 >= kSw128Tiles && !y;
      const TokenArg& tensor = y ? (args.reverse ? args.d_o : x.in.v) : q ? x.in.q : x.in.k;
      return tile_of_rows(tensor, args.sequences, coord, y ? column : sw128 % kSw128Tiles * 64, y ? x.V : x.K);
    };
    const SequenceStart start = sequence_start(args.sequences, coord.n);
    const auto head_of = [&](const TokenArg& a) { return a.divisor == 1 ? coord.hv : coord.hv / a.divisor; };
    Ring<Shape::kStages> ring;
    FW_NO_UNROLL
    for (int i = 0; i < coord.chunks; ++i, ring.next()) {
      barriers.stages.wait_empty(ring);
      bool copied = true;
      const int c = first + step * i;
      if (maps.used != 0 && (c * kChunk + kChunk <= coord.length || args.sequences.offsets == nullptr)) {
        uint64_t* const full = barriers.stages.full + ring.slot;
        if (thread_index() == 0) {
          char* const stage = shared + ring.slot * Shape::kStage;
          const int t = static_cast<int>(start.t) + c * kChunk, b = static_cast<int>(start.b);
          mbarrier_expect(full, kAll * kTensorBytes);
          FW_UNROLL
          for (int sw128 = 0; sw128 < kSw128Tiles; ++sw128) {
            tensor_load(stage + Shape::kX + sw128 * kSw128Bytes, maps.x, 64 * sw128,
                        head_of(args.reverse ? x.in.q : x.in.k), t, b, full);
            if constexpr (kOut)
              tensor_load(stage + Shape::kQ + sw128 * kSw128Bytes, maps.q, 64 * sw128, head_of(x.in.q), t, b, full);
          }
          tensor_load(stage + Shape::kY, maps.y, column, head_of(args.reverse ? args.d_o : x.in.v), t, b, full);
        } else {
          mbarrier_arrive(full);
        }
        continue;
      }
      FW_NO_UNROLL
      for (int u = 0; u < kMost; ++u) {
        const int sw128 = warp + 4 * u;
        if (sw128 < kAll)
          copied = issue_rows<64, 32>(tile(sw128), c * kChunk, shared + ring.slot * Shape::kStage + sw128 * kSw128Bytes,
                                      lane) &&
                   copied;
      }
      if (copied) {
        cp_async_arrive(barriers.stages.full + ring.slot);
      } else {
        cp_async_commit();
        cp_async_wait<0>();
        mbarrier_arrive(barriers.stages.full + ring.slot);
      }
    }
  } else if (thread_index() < kOutThread) {
    register_count_decrease<72>();
    if (warp < kTakeWarp) {
      const int part = warp - kFactorWarp;
      const Rows g = rows_of(x.in.g, args.sequences, coord.n, coord.hv),
                 beta = rows_of(x.in.beta, args.sequences, coord.n, coord.hv);
      const auto numbers_of = [&](int i) {
        const int c = i < coord.chunks ? first + step * i : coord.chunks;  // past the end nothing is read
        return load_row_scales(x.rule, g, beta, coord.hv, c * kChunk, coord.length);
      };
      const auto prefetch = [&](int i) {
        if (i >= coord.chunks) return;
        prefetch_scalars(g, (first + step * i) * kChunk, coord.length);
        prefetch_scalars(beta, (first + step * i) * kChunk, coord.length);
      };
      AdditiveScales now = numbers_of(part);
      FW_NO_UNROLL
      for (int i = part + kFactorWarps; i < kPrefetchedScalars; i += kFactorWarps) prefetch(i);
      Ring<Shape::kFactors> ring;
      if (part == 1) ring.next();
      float log_decay = 0;
      FW_NO_UNROLL
      for (int i = part; i < coord.chunks; i += kFactorWarps) {
        const AdditiveScales next = numbers_of(i + kFactorWarps);
        prefetch(i + kPrefetchedScalars);
        barriers.factors.wait_empty(ring);
        log_decay += make_factors(
            args, now, *reinterpret_cast<FactorRows*>(shared + Shape::kFactor + ring.slot * Shape::kFactorBytes));
        barriers.factors.put_full(ring);
        ring.next(), ring.next();
        now = next;
      }
      if (args.decays != nullptr && coord.value_block == 0) {
        if (part == 1 && lane_index() == 0) barriers.log_decay = log_decay;
        named_barrier_sync(1 + kOutGroups, 32 * kFactorWarps);
        if (part == 0 && lane_index() == 0)
          args.decays[coord.n * x.HV + coord.hv] = exp2_fast(log_decay + barriers.log_decay);
      }
    } else if (warp == kTakeWarp && kOut) {
      const TileRows o = tile_of_rows(args.o, args.sequences, coord, column, x.V);
      if (o.rows.bf16 == 0) return;
      Ring<Shape::kOutBuffers> out;
      FW_NO_UNROLL
      for (int i = 0; i < coord.chunks; ++i, out.next()) {
        barriers.o.wait_full(out);
        FW_NO_UNROLL
        for (int half = 0; half < 2; ++half)
          store_sw128(o, first + step * i, shared + Shape::kO + out.slot * kSw128Bytes, 32 * half);
        barriers.o.put_empty(out);
      }
    } else if (warp == kStatesWarp && saves && lane_index() == 0) {
      Ring<Shape::kStateBuffers> ring;
      for (int i = 0; i < coord.chunks; ++i, ring.next()) {
        const int64_t tile =
            (coord.first_tile + static_cast<int64_t>(first + step * i) * x.HV) * value_blocks + coord.value_block;
        barriers.states.wait_full(ring);
        drain_bulk(args.states + tile * (64 * kTileK), shared + Shape::kState + ring.slot * Shape::kMatrix,
                   Shape::kMatrix, barriers.states.empty + ring.slot);
      }
      bulk_wait<0>();
    }
  } else if (thread_index() < kOwnThread) {
    if constexpr (kOut) register_count_increase<104>();
    if (!kOut && !normed) return;
    const uint32_t base = shuffle(shared_address(shared), 0);
    const TileRows out = tile_of_rows(args.o, args.sequences, coord, column, x.V);
    Ring<Shape::kStages> ring;
    Ring<Shape::kFactors> known;
    Ring<Shape::kStateBuffers> states;
    Ring<Shape::kOutBuffers> leaving;
    const auto step_rings = [&] { ring.next(), known.next(), states.next(), leaving.next(); };
    const int group = (warp - kOutThread / 32) / 4;
    if (group == 1) step_rings();
    FW_NO_UNROLL
    for (int i = group; i < coord.chunks; i += kOutGroups, step_rings(), step_rings()) {
      const int stage = ring.slot * Shape::kStage;
      float p[32], o[32];
      barriers.stages.wait_full(ring);
      fence_async_shared();
      if constexpr (kOut) {
        wgmma_fence();
        multiply_tiles<kTileK>(p, base + stage + Shape::kQ, base + stage + Shape::kX);
        wgmma_commit();
      }
      FactorRows& rows = *reinterpret_cast<FactorRows*>(shared + Shape::kFactor + known.slot * Shape::kFactorBytes);
      if (normed) {
        barriers.factors.wait_full(known);
        scale_by_norms<Shape>(x.rule, args.reverse, shared + stage, shared + stage + Shape::kQ, rows);
        named_barrier_sync(1 + group, kGroup);
        mbarrier_arrive(barriers.normed + known.slot);
      }
      if constexpr (kOut) {
        uint32_t packed[4][4];
        barriers.states.wait_full(states);
        wgmma_fence();
        multiply_tiles<kTileK>(o, base + stage + Shape::kQ, base + Shape::kState + states.slot * Shape::kMatrix);
        wgmma_commit();
        if (!normed) barriers.factors.wait_full(known);
        wgmma_wait<1>();
        keep(p);
        scale_all_pairs(p, rows);
        pack_fragments(p, packed);
        const float* const read = rows.read + 16 * warp_in_group() + lane_index() / 4;
        const float factors[2] = {read[0], read[8]};
        wgmma_wait<0>();
        keep(o);
        FW_UNROLL
        for (int j = 0; j < 32; ++j) o[j] *= factors[j / 2 % 2];
        wgmma_fence();
        multiply_columns(o, packed, base + stage + Shape::kY);
        wgmma_commit();
        barriers.factors.put_empty(known);
        barriers.states.put_empty(states);
        wgmma_wait<0>();
        keep(o);
        barriers.stages.put_empty(ring);
        if (out.rows.bf16 == 0) {
          store_float_rows(out, first + step * i, o);
        } else {
          pack_fragments(o, packed);
          barriers.o.wait_empty(leaving);
          FW_UNROLL
          for (int k = 0; k < 4; ++k) store_state_fragment(base + Shape::kO + leaving.slot * kSw128Bytes, k, packed[k]);
          barriers.o.put_full(leaving);
        }
      } else {
        barriers.factors.put_empty(known);
        barriers.stages.put_empty(ring);
      }
    }
  } else {
    register_count_increase<144>();
    float state[kTileK / 2];
    load_own_state<kTileK>(args.from, coord, x.K, x.V, state);
    // known to the compiler as a number only: else it reads it anew in every round
    const uint32_t base = shuffle(shared_address(shared), 0);
    Ring<Shape::kStages> ring, coming;
    Ring<Shape::kFactors> known;
    Ring<Shape::kStateBuffers> leaving;
    // Diag(write) V of the stage `coming`, transposed, and the decay of its chunk: while the product before it runs.
    const auto take_values = [&](uint32_t(&b)[4][4]) {
      barriers.factors.wait_full(known);
      const FactorRows& rows =
          *reinterpret_cast<const FactorRows*>(shared + Shape::kFactor + known.slot * Shape::kFactorBytes);
      if (normed) mbarrier_wait(barriers.normed + known.slot, known.parity);
      barriers.stages.wait_full(coming);
      fence_async_shared();
      const float gamma = rows.gamma;
      const float* const kept = rows.write + 2 * (lane_index() % 4);
      FW_UNROLL
      for (int k = 0; k < 4; ++k) {
        uint32_t v[4];
        load_token_fragment(v, base + coming.slot * Shape::kStage + Shape::kY, k);
        FW_UNROLL
        for (int g = 0; g < 2; ++g) {
          const float2 f = *reinterpret_cast<const float2*>(kept + 16 * k + 8 * g);
          FW_UNROLL
          for (int h = 0; h < 2; ++h)
            b[k][2 * g + h] = pack_bf16(bf16_low(v[2 * g + h]) * f.x, bf16_high(v[2 * g + h]) * f.y);
        }
      }
      barriers.factors.put_empty(known);
      known.next(), coming.next();
      return gamma;
    };
    CheckpointWalk checkpoints(args.checkpoints, args.sequences, coord);
    uint32_t b[4][4];
    float gamma = 1;
    if (coord.chunks > 0) gamma = take_values(b);
    FW_NO_UNROLL
    for (int i = 0; i < coord.chunks; ++i, ring.next()) {
      if (kOut || saves) {
        barriers.states.wait_empty(leaving);
        uint32_t a[kTileK / 16][4];
        pack_fragments(state, a);
        const uint32_t to = base + Shape::kState + leaving.slot * Shape::kMatrix;
        FW_UNROLL
        for (int k = 0; k < kTileK / 16; ++k) store_state_fragment(to, k, a[k]);
        fence_async_shared();
        barriers.states.put_full(leaving);
        leaving.next();
      }
      FW_UNROLL
      for (int j = 0; j < kTileK / 2; ++j) state[j] *= gamma;
      wgmma_fence();
      add_outer<kTileK>(state, b, base + ring.slot * Shape::kStage + Shape::kX);
      wgmma_commit();
      uint32_t next[4][4];
      if (i + 1 < coord.chunks) gamma = take_values(next);
      wgmma_wait<0>();
      keep(state);
      FW_UNROLL
      for (int k = 0; k < 4; ++k) take_over(b[k], next[k], x.V);
      barriers.stages.put_empty(ring);
      if (kOut && checkpoints.reached()) [[unlikely]]
        store_own_state<kTileK>(args.checkpoints.states, coord, checkpoints.next(args.checkpoints, coord, i), x.K, x.V,
                                state);
    }
    store_own_state<kTileK>(args.to, coord, args.final_index != nullptr ? args.final_index[coord.n] : coord.n, x.K, x.V,
                            state);
  }
}

template <class Shape>
void launch_scan(const AdditiveScanArgs& args, void* stream) {
  const Problem& x = args.problem;
  const SequenceArg& s = x.sequences;
  const bool packed = s.offsets != nullptr;
  const auto map = [&](const TokenArg& a, int dim, TensorMap& to) {
    return make_tensor_map(a, packed ? 1 : x.B, packed ? x.tokens : x.T, x.HV / a.divisor, dim, to);
  };
  StageMaps maps;
  maps.used = map(args.reverse ? x.in.q : x.in.k, x.K, maps.x) && (!Shape::kOut || map(x.in.q, x.K, maps.q)) &&
              map(args.reverse ? args.d_o : x.in.v, x.V, maps.y);
  launch_overlapped(additive_scan_kernel<Shape>, scan_grid(args.sequences, x.HV, value_block_count(x.V)),
                    kAdditiveThreads, Shape::kShared, stream, args, maps);
}

// ---- From segment to segment

constexpr int kJoinThreads = 256, kJoinAhead = 8;

__global__ void __launch_bounds__(kJoinThreads) additive_join_kernel(const __grid_constant__ AdditiveJoinArgs a) {
  const int size = a.K * a.V, pieces = (size + kJoinThreads - 1) / kJoinThreads,
            block = static_cast<int>(block_index_x());
  const int n = block / pieces, hv = static_cast<int>(block_index_y()),
            at = (block - n * pieces) * kJoinThreads + static_cast<int>(thread_index());
  grid_dependency_wait();
  grid_dependency_launch();
  if (at >= size) return;
  const int k = at % a.K, v = at / a.K, first = a.first_segment[n], count = a.first_segment[n + 1] - first;
  float state = 0;
  const int slot = a.from.data != nullptr ? state_slot(a.from, n) : -1;
  if (slot >= 0) {
    const int64_t from = slot * a.from.stride_n + hv * a.from.stride_h + k * a.from.stride_k + v * a.from.stride_v;
    state = a.from.bf16 != 0 ? bf16_value(static_cast<const uint16_t*>(a.from.data)[from])
                             : static_cast<const float*>(a.from.data)[from];
  }
  const auto head = [&](int j) { return static_cast<int64_t>(first + (a.reverse ? count - 1 - j : j)) * a.HV + hv; };
  FW_NO_UNROLL
  for (int j0 = 0; j0 < count; j0 += kJoinAhead) {
    float local[kJoinAhead], decay[kJoinAhead];
    FW_UNROLL
    for (int j = 0; j < kJoinAhead; ++j) {  // the last one leaves nothing to a segment after it
      const bool there = j0 + j + 1 < count;
      local[j] = there ? a.states[head(j0 + j) * size + at] : 0.0f;
      decay[j] = there ? a.decays[head(j0 + j)] : 0.0f;
    }
    FW_UNROLL
    for (int j = 0; j < kJoinAhead; ++j) {
      if (j0 + j >= count) break;
      a.states[head(j0 + j) * size + at] = state;
      state = decay[j] * state + local[j];
    }
  }
}

}  // namespace

void additive_scan(const AdditiveScanArgs& args, int k_tile, void* stream) {
  if (args.problem.K > k_tile || (k_tile != 64 && k_tile != 128))
    throw Error(ErrorKind::kInternal,
                fmt::format("additive_scan: expected a K tile of 64 or 128 and at least K, got {} and K {}", k_tile,
                            args.problem.K));
  const bool out = args.o.data != nullptr;
  if (out && args.reverse) throw Error(ErrorKind::kInternal, "additive_scan: there is no o in reverse");
  with_constants(
      [&](auto small, auto writes_o) {
        launch_scan<AdditiveShape<AdditiveTraits{.k_tile = small ? 64 : 128, .writes_o = writes_o}>>(args, stream);
      },
      k_tile == 64, out);
}

void additive_join(const AdditiveJoinArgs& args, void* stream) {
  const Dim3 grid{static_cast<unsigned>((args.K * args.V + kJoinThreads - 1) / kJoinThreads * args.N),
                  static_cast<unsigned>(args.HV), 1};
  launch_overlapped(additive_join_kernel, grid, kJoinThreads, 0, stream, args);
}

}  // namespace fw::cuda
