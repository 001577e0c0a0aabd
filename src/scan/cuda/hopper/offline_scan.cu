// The scans of rules without an erase, from the raw tensors (offline_rows.cuh has the formulas). A block has 64 value columns of one value
// head of one sequence or segment; its warps have parts:
//   0 to 3: bring the rows of q, k and v (d_o) of a chunk
//   4: makes the factors of rows, ahead of the others;   5: takes the states away;   6 and 7: take O away
//   8 to 11: make P, and what norms do to the factors
//   12 to 15: keep the transposed state [64 values, kKey] in registers and make O
// Forward, O wanted or the state alone; and in reverse, where q and d_o take the places of k and v: the state alone.
//
// What ptxas allows while products are in flight is said in scan_forward.cu.
#include <algorithm>

#include "scan/cuda/device/offline_rows.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/launch.h"

namespace fw::cuda {

namespace {

constexpr unsigned kOfflineThreads = 512;
constexpr int kBringThreads = 128, kPairThread = 256, kOwnThread = 384;
constexpr int kFactorWarp = 4, kStatesWarp = 5, kTakeWarp = 6;  // and 7

// Shared memory: bytes. A stage is x (k; in reverse q), q if O is wanted, and the rows of values.
template <int kKey, bool kOut>
struct OfflineShape {
  static constexpr int kMatrix = 64 * kKey * 2;
  static constexpr int kX = 0, kQ = kMatrix, kY = kOut ? 2 * kMatrix : kMatrix, kStage = kY + kPanelBytes;
  static constexpr int kPairs = 2, kFactors = 3, kStateBuffers = 2;
  static constexpr int kStages = kOut ? 4 : 6;
  static constexpr int kP = kStages * kStage, kState = kP + (kOut ? kPairs * kPanelBytes : 0), kO = kState + kStateBuffers * kMatrix;
  static constexpr int kFactor = kO + (kOut ? kPanelBytes : 0), kFactorBytes = (static_cast<int>(sizeof(FactorRows)) + 15) / 16 * 16;
  static constexpr int kBarriers = kFactor + kFactors * kFactorBytes;
  static constexpr int kShared = kBarriers + 256;

  struct Barriers {
    RingBarriers<kStages> stages;
    RingBarriers<kFactors> factors;
    RingBarriers<kPairs> pairs;
    RingBarriers<kStateBuffers> states;
    RingBarriers<1> o;
  };
  static_assert(kShared <= kScanSharedLimit && sizeof(Barriers) <= 256);
};

// A panel of 64 columns of a stage that a warp brings, chunk by chunk. Instructions count here: three warps bring 40 KB in about a microsecond.
struct BroughtPanel {
  int to = -1;                 // in the stage
  bool whole = false;          // all 64 columns are there, in pieces of 16 bytes
  const char* from = nullptr;  // this lane's piece of the chunk's row lane / 8 ...
  int64_t row = 0;             // ... and the distance of rows, in bytes

  FW_DEVICE BroughtPanel() {}
  FW_DEVICE BroughtPanel(const TileRows& tile, int offset, int first_chunk) : to(offset) {
    const int lane = static_cast<int>(lane_index());
    whole = tile.wide && tile.rows.bf16 != 0 && tile.column + 64 <= tile.V;
    row = 2 * tile.rows.stride;
    from = tile.rows.data + (static_cast<int64_t>(first_chunk) * kChunk + lane / 8) * row + 2 * (tile.column + lane % 8 * 8);
  }
  // `address`: this lane's place in a panel's rows lane / 8 and lane / 8 + 4.
  FW_DEVICE void bring_whole(uint32_t stage, const uint32_t (&address)[2]) const {
    const char* at = from;
    const uint32_t base = stage + static_cast<uint32_t>(to), place[2] = {base + address[0], base + address[1]};
    FW_UNROLL
    for (int j = 0; j < 16; ++j, at += 4 * row) cp_async_16(place[j % 2] + static_cast<uint32_t>(j / 2 * 1024), at, true);
  }
};

// Accumulators O^T of a chunk straight to float32 rows.
FW_DEVICE void store_float_rows(const TileRows& t, int c, const float (&o)[32]) {
  const int token = c * kChunk + 2 * (static_cast<int>(lane_index()) % 4), column = t.column + 16 * state_warp() + static_cast<int>(lane_index()) / 4;
  float* to = reinterpret_cast<float*>(t.rows.data);
  FW_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int row = token + i / 4 * 8 + i % 2, v = column + i % 4 / 2 * 8;
    if (row < t.length && v < t.V) to[row * t.rows.stride + v] = o[i];
  }
}

// By one warp: rows `from` to from + 31 of a panel of bf16 to bf16 rows.
FW_DEVICE void store_panel(const TileRows& t, int c, const char* panel, int from) {
  const int lane = static_cast<int>(lane_index()), piece = lane % 8, first = from + lane / 8, column = t.column + piece * 8;
  const int left = t.length - c * kChunk;
  char* to = t.rows.data + 2 * (static_cast<int64_t>(c * kChunk + first) * t.rows.stride + column);
  const int64_t step = 8 * t.rows.stride;  // four rows
  panel += first * 128;
  const int even = (piece ^ (first & 7)) << 4, odd = even ^ 64;
  if (t.wide && t.column + 64 <= t.V && from + 32 <= left) {
    FW_UNROLL
    for (int j0 = 0; j0 < 8; j0 += 4) {
      uint4 x[4];
      FW_UNROLL
      for (int j = 0; j < 4; ++j) x[j] = *reinterpret_cast<const uint4*>(panel + 512 * (j0 + j) + (j % 2 == 0 ? even : odd));
      FW_UNROLL
      for (int j = 0; j < 4; ++j, to += step) *reinterpret_cast<uint4*>(to) = x[j];
    }
    return;
  }
  FW_NO_UNROLL
  for (int j = 0; j < 8; ++j, to += step) {
    if (first + 4 * j >= left) break;
    const uint4 x = *reinterpret_cast<const uint4*>(panel + 512 * j + (j % 2 == 0 ? even : odd));
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

// States in float32 of which the block has all 64 value columns and K is kKey; `body(element, i)` for accumulator i.
template <int kKey>
FW_DEVICE bool whole_state(const StateArg& a, const ScanPlace& p, int K, int V) {
  return a.bf16 == 0 && K == kKey && (p.value_block + 1) * kValueBlock <= V;
}
template <int kKey, class Body>
FW_DEVICE void for_each_element(const StateArg& a, const ScanPlace& p, int n, int K, int V, Body&& body) {
  const StatePlace s = state_place(a, p, n, K, V);
  float* at = reinterpret_cast<float*>(s.data) + s.k * s.stride_k + s.v * s.stride_v;
  const int64_t across = 8 * s.stride_v, back = 7 * s.stride_k;
  FW_UNROLL
  for (int j = 0; j < kKey / 8; ++j, at += back) {
    body(at, 4 * j);
    body(at + across, 4 * j + 2);
    at += s.stride_k;
    body(at, 4 * j + 1);
    body(at + across, 4 * j + 3);
  }
}
// Few instructions where nothing is odd: code that runs once comes from memory.
template <int kKey>
FW_DEVICE void load_own_state(const StateArg& a, const ScanPlace& p, int K, int V, float (&d)[kKey / 2]) {
  if (a.data == nullptr || !whole_state<kKey>(a, p, K, V)) {
    load_state(a, p, p.n, K, V, d);
  } else {
    for_each_element<kKey>(a, p, p.n, K, V, [&](const float* at, int i) { d[i] = *at; });
  }
}
template <int kKey>
FW_DEVICE void store_own_state(const StateArg& a, const ScanPlace& p, int n, int K, int V, const float (&d)[kKey / 2]) {
  if (a.data == nullptr || n < 0) return;
  if (!whole_state<kKey>(a, p, K, V)) {
    store_state(a, p, n, K, V, d);
  } else {
    for_each_element<kKey>(a, p, n, K, V, [&](float* at, int i) { *at = d[i]; });
  }
}

// Log-decays and gates lie far apart, a few bytes a token, and come late: from the L2 cache they come soon enough.
constexpr int kNumbersAhead = 8;  // chunks, even
FW_DEVICE void prefetch_numbers(const Rows& rows, int first, int length) {
  if (rows.data == nullptr) return;
  const int64_t size = rows.bf16 != 0 ? 2 : 4;
  const int t = first + static_cast<int>(lane_index());
  if (t < length) prefetch_line(rows.data + t * rows.stride * size);
  if (t + 32 < length) prefetch_line(rows.data + (t + 32) * rows.stride * size);
}

// By a warp, two rows a lane: the factors of a chunk without norms. Returns the sum of its log-decays in log2.
FW_DEVICE float make_factors(const OfflineScanArgs& args, const RowNumbers& numbers, FactorRows& to) {
  Rule rule = args.problem.rule;
  rule.q_norm = rule.k_norm = Norm::kRaw;
  const DecayRows d = decay_rows(numbers.g);
  const FrontCoefs<float> f[2] = {offline_coefs(rule, args.problem.scale, numbers.beta.x, 0, 0), offline_coefs(rule, args.problem.scale, numbers.beta.y, 0, 0)};
  const float2 right = make_float2(f[0].w_k * f[0].z_v, f[1].w_k * f[1].z_v), left = make_float2(f[0].r_q, f[1].r_q);
  to.store_kept(args.reverse ? left : right, args.reverse ? d.from_start : d.to_end, d.sum);
  if (args.o.data != nullptr) to.store_pairs(d, left, right);
  return d.sum;
}

template <int kKey, bool kOut>
__global__ void __launch_bounds__(kOfflineThreads, 1) offline_scan_kernel(const __grid_constant__ OfflineScanArgs args) {
  using Shape = OfflineShape<kKey, kOut>;
  char* const shared = shared_memory();
  auto& barriers = *reinterpret_cast<typename Shape::Barriers*>(shared + Shape::kBarriers);
  const bool normed = norms_matter(args.problem.rule), makes_pairs = kOut || normed;
  if (thread_index() == 0) {
    barriers.stages.init(kBringThreads, makes_pairs ? 8 : 4);
    barriers.factors.init(1, makes_pairs ? 8 : 4);
    barriers.pairs.init(4, 4);
    barriers.states.init(4, 1);
    barriers.o.init(4, 2);
    mbarrier_init_fence();
  }
  sync_threads();
  grid_dependency_wait();
  grid_dependency_launch();
  const Problem& x = args.problem;
  const int value_blocks = (x.V + kValueBlock - 1) / kValueBlock;
  const ScanPlace place = scan_place(args.sequences, x.HV, value_blocks, 0);
  if (args.parts != nullptr && (args.parts[place.n] & 1) == 0) return;
  const int column = place.value_block * kValueBlock;
  // Chunk of turn i.
  const int first = args.reverse ? place.chunks - 1 : 0, step = args.reverse ? -1 : 1;

  const int warp = shuffle(static_cast<int>(warp_index()), 0);
  if (warp < kFactorWarp) {
    register_count_decrease<80>();
    constexpr int kPanels = kKey / 64, kAll = (kOut ? 2 : 1) * kPanels + 1, kMost = (kAll + 3) / 4;
    const int lane = static_cast<int>(lane_index());
    const auto tile = [&](int panel) {
      const bool y = panel == kAll - 1, q = args.reverse ? !y : panel >= kPanels && !y;
      const TokenArg& tensor = y ? (args.reverse ? args.d_o : x.in.v) : q ? x.in.q : x.in.k;
      return tile_of_rows(tensor, args.sequences, place, y ? column : panel % kPanels * 64, y ? x.V : x.K);
    };
    BroughtPanel panels[kMost];
    FW_UNROLL
    for (int u = 0; u < kMost; ++u) {
      const int panel = warp + 4 * u;
      if (panel < kAll) panels[u] = {tile(panel), panel == kAll - 1 ? Shape::kY : panel * kPanelBytes, first};
    }
    const uint32_t address[2] = {static_cast<uint32_t>(lane / 8 * 128 + ((lane % 8 ^ lane / 8) << 4)),
                                 static_cast<uint32_t>((lane / 8 + 4) * 128 + ((lane % 8 ^ (lane / 8 + 4)) << 4))};
    Ring<Shape::kStages> ring;
    FW_NO_UNROLL
    for (int i = 0; i < place.chunks; ++i, ring.next()) {
      barriers.stages.wait_empty(ring);
      bool copied = true;
      const int c = first + step * i;
      FW_UNROLL
      for (int u = 0; u < kMost; ++u) {
        if (panels[u].to < 0) continue;
        if (panels[u].whole && c * kChunk + kChunk <= place.length) {
          panels[u].bring_whole(shared_address(shared) + static_cast<uint32_t>(ring.slot * Shape::kStage), address);
        } else {
          copied = bring_rows<64, 32>(tile(warp + 4 * u), c * kChunk, shared + ring.slot * Shape::kStage + panels[u].to, lane) && copied;
        }
        panels[u].from += step * kChunk * panels[u].row;
      }
      if (copied) {
        cp_async_arrive(barriers.stages.full + ring.slot);
      } else {
        cp_async_commit();
        cp_async_wait<0>();
        mbarrier_arrive(barriers.stages.full + ring.slot);
      }
    }
  } else if (thread_index() < kPairThread) {
    register_count_decrease<72>();
    if (warp == kFactorWarp) {
      const Rows g = rows_of(x.in.g, args.sequences, place.n, place.hv), beta = rows_of(x.in.beta, args.sequences, place.n, place.hv);
      // Two chunks' numbers at a time, so that the next two have time to come.
      const auto numbers_of = [&](int i) {
        const int c = i < place.chunks ? first + step * i : place.chunks;  // past the end nothing is read
        return load_row_numbers(x.rule, g, beta, place.hv, c * kChunk, place.length);
      };
      RowNumbers one = numbers_of(0), two = numbers_of(1);
      const auto prefetch = [&](int i) {
        if (i >= place.chunks) return;
        prefetch_numbers(g, (first + step * i) * kChunk, place.length);
        prefetch_numbers(beta, (first + step * i) * kChunk, place.length);
      };
      FW_NO_UNROLL
      for (int i = 2; i < kNumbersAhead; ++i) prefetch(i);
      Ring<Shape::kFactors> ring;
      float log_decay = 0;
      FW_NO_UNROLL
      for (int i0 = 0; i0 < place.chunks; i0 += 2) {
        const RowNumbers next_one = numbers_of(i0 + 2), next_two = numbers_of(i0 + 3);
        FW_NO_UNROLL
        for (int i = i0 + kNumbersAhead; i < i0 + kNumbersAhead + 2; ++i) prefetch(i);
        FW_NO_UNROLL
        for (int i = i0; i < i0 + 2 && i < place.chunks; ++i, ring.next()) {
          const bool even = i == i0;
          const RowNumbers now{make_float2(even ? one.g.x : two.g.x, even ? one.g.y : two.g.y),
                               make_float2(even ? one.beta.x : two.beta.x, even ? one.beta.y : two.beta.y)};
          barriers.factors.wait_empty(ring);
          log_decay += make_factors(args, now, *reinterpret_cast<FactorRows*>(shared + Shape::kFactor + ring.slot * Shape::kFactorBytes));
          barriers.factors.warp_full(ring);
        }
        one = next_one, two = next_two;
      }
      if (args.decays != nullptr && place.value_block == 0 && lane_index() == 0) args.decays[place.n * x.HV + place.hv] = exp2_fast(log_decay);
    } else if (warp >= kTakeWarp && kOut) {
      const TileRows o = tile_of_rows(args.o, args.sequences, place, column, x.V);
      if (o.rows.bf16 == 0) return;
      Ring<1> out;
      FW_NO_UNROLL
      for (int i = 0; i < place.chunks; ++i, out.next()) {
        barriers.o.wait_full(out);
        store_panel(o, first + step * i, shared + Shape::kO, 32 * (warp - kTakeWarp));
        barriers.o.warp_empty(out);
      }
    } else if (warp == kStatesWarp && args.states != nullptr && lane_index() == 0) {
      Ring<Shape::kStateBuffers> ring;
      for (int i = 0; i < place.chunks; ++i, ring.next()) {
        const int64_t tile = (place.first_tile + static_cast<int64_t>(first + step * i) * x.HV) * value_blocks + place.value_block;
        barriers.states.wait_full(ring);
        drain_bulk(args.states + tile * (64 * kKey), shared + Shape::kState + ring.slot * Shape::kMatrix, Shape::kMatrix, barriers.states.empty + ring.slot);
      }
      bulk_wait<0>();
    }
  } else if (thread_index() < kOwnThread) {
    if constexpr (kOut) register_count_increase<136>();
    if (!makes_pairs) return;
    const int lane = static_cast<int>(lane_index()), thread = static_cast<int>(thread_index()) - kPairThread;
    const uint32_t base = shuffle(shared_address(shared), 0);
    Ring<Shape::kStages> ring;
    Ring<Shape::kFactors> known;
    Ring<Shape::kPairs> made;
    FW_NO_UNROLL
    for (int i = 0; i < place.chunks; ++i, ring.next(), known.next(), made.next()) {
      const int stage = ring.slot * Shape::kStage;
      barriers.stages.wait_full(ring);
      fence_async_shared();
      float p[32];
      if constexpr (kOut) {
        const uint64_t q = wgmma_descriptor(base + stage + Shape::kQ, 16, 1024), k = wgmma_descriptor(base + stage + Shape::kX, 16, 1024);
        wgmma_fence();
        FW_UNROLL
        for (int s = 0; s < kKey / 16; ++s) {
          const int at = s / 4 * kPanelBytes + s % 4 * 32;
          wgmma_ss<64, false, false>(p, descriptor_after(q, at), descriptor_after(k, at), s > 0);
        }
        wgmma_commit();
      }
      barriers.factors.wait_full(known);
      FactorRows& rows = *reinterpret_cast<FactorRows*>(shared + Shape::kFactor + known.slot * Shape::kFactorBytes);
      if (normed) {
        const int row = thread / 2;
        const float of_x = row_square<kKey>(shared + stage + Shape::kX, row), of_q = kOut ? row_square<kKey>(shared + stage + Shape::kQ, row) : of_x;
        const float q_n = q_factor(x.rule, of_q), k_n = k_factor(x.rule, of_x);
        if (lane % 2 == 0) {
          rows.keep[row] *= args.reverse ? q_n : k_n;
          if constexpr (kOut) {
            rows.read[row] *= q_n, rows.left[row] *= q_n, rows.after[row] *= q_n, rows.right[row] *= k_n;
            FW_UNROLL
            for (int b = 0; b < 3; ++b) rows.before[b][row] *= k_n;
          }
        }
        named_barrier_sync(1, 128);
      }
      barriers.pairs.wait_empty(made);
      if constexpr (kOut) {
        wgmma_wait<0>();
        keep(p);
        scale_pairs(p, rows, 0, thread);
        uint32_t packed[4][4];
        pack_fragments(p, packed);
        FW_UNROLL
        for (int k = 0; k < 4; ++k) store_state_fragment(base + Shape::kP + made.slot * kPanelBytes, k, packed[k]);
        fence_async_shared();
      }
      barriers.pairs.warp_full(made);
      barriers.factors.warp_empty(known);
      barriers.stages.warp_empty(ring);
    }
  } else {
    register_count_increase<224>();
    const TileRows out = tile_of_rows(args.o, args.sequences, place, column, x.V);
    const bool saves = args.states != nullptr;
    float state[kKey / 2];
    load_own_state<kKey>(args.from, place, x.K, x.V, state);
    const uint32_t base = shuffle(shared_address(shared), 0);  // known to the compiler as a number only: else it reads it anew in every round
    Ring<1> leaving_out;
    const auto store_out = [&](const uint32_t(&packed)[4][4]) {
      barriers.o.wait_empty(leaving_out);
      FW_UNROLL
      for (int k = 0; k < 4; ++k) store_token_fragment(base + Shape::kO, k, packed[k]);
      barriers.o.warp_full(leaving_out);
      leaving_out.next();
    };
    Ring<Shape::kStages> ring;
    Ring<Shape::kFactors> known;
    Ring<Shape::kPairs> made;
    Ring<Shape::kStateBuffers> leaving;
    uint32_t a[kKey / 16][4], packed_out[4][4];
    pack_fragments(state, a);
    FW_NO_UNROLL
    for (int i = 0; i < place.chunks; ++i, ring.next(), known.next(), made.next()) {
      barriers.stages.wait_full(ring);
      fence_async_shared();
      const uint32_t stage = base + ring.slot * Shape::kStage;
      barriers.factors.wait_full(known);
      const FactorRows& rows = *reinterpret_cast<const FactorRows*>(shared + Shape::kFactor + known.slot * Shape::kFactorBytes);
      const float gamma = rows.gamma;
      FW_UNROLL
      for (int j = 0; j < kKey / 2; ++j) state[j] *= gamma;
      float o[32];
      wgmma_fence();
      if constexpr (kOut) {
        multiply_rows(o, a, stage + Shape::kQ, false);
        wgmma_commit();
        if (i > 0 && out.rows.bf16 != 0) store_out(packed_out);
      }
      if (saves) {
        barriers.states.wait_empty(leaving);
        const uint32_t to = base + Shape::kState + leaving.slot * Shape::kMatrix;
        FW_UNROLL
        for (int k = 0; k < kKey / 16; ++k) store_state_fragment(to, k, a[k]);
        fence_async_shared();
        barriers.states.warp_full(leaving);
        leaving.next();
      }
      uint32_t v[4][4], b[4][4];
      if (normed) barriers.pairs.wait_full(made);  // which changed the factors
      const float* const kept = rows.keep + 2 * (lane_index() % 4);
      FW_UNROLL
      for (int k = 0; k < 4; ++k) {
        load_token_fragment(v[k], stage + Shape::kY, k);
        FW_UNROLL
        for (int g = 0; g < 2; ++g) {
          const float2 f = *reinterpret_cast<const float2*>(kept + 16 * k + 8 * g);
          FW_UNROLL
          for (int h = 0; h < 2; ++h) b[k][2 * g + h] = pack_bf16(bf16_low(v[k][2 * g + h]) * f.x, bf16_high(v[k][2 * g + h]) * f.y);
        }
      }
      wgmma_fence();
      add_outer<kKey>(state, b, stage + Shape::kX);
      wgmma_commit();
      if constexpr (kOut) {
        wgmma_wait<1>();
        keep(o);
        scale_columns(o, rows.read);
        keep(o);
        if (!normed) barriers.pairs.wait_full(made);
        wgmma_fence();
        multiply_rows(o, v, base + Shape::kP + made.slot * kPanelBytes, true);
        wgmma_commit();
      }
      wgmma_wait<kOut ? 1 : 0>();
      keep(state);
      pack_fragments(state, a);
      wgmma_wait<0>();
      barriers.stages.warp_empty(ring);
      barriers.factors.warp_empty(known);
      if (makes_pairs) barriers.pairs.warp_empty(made);
      if constexpr (kOut) {
        keep(o);
        pack_fragments(o, packed_out);
        if (out.rows.bf16 == 0) store_float_rows(out, first + step * i, o);
      }
    }
    if (kOut && place.chunks > 0 && out.rows.bf16 != 0) store_out(packed_out);
    store_own_state<kKey>(args.to, place, args.final_index != nullptr ? args.final_index[place.n] : place.n, x.K, x.V, state);
  }
}

template <int kKey, bool kOut>
void launch_scan(const OfflineScanArgs& args, void* stream) {
  const unsigned blocks = static_cast<unsigned>((args.problem.V + kValueBlock - 1) / kValueBlock);
  const Dim3 grid{static_cast<unsigned>(args.sequences.N) * static_cast<unsigned>(args.problem.HV) * blocks, 1, 1};
  launch_overlapped(offline_scan_kernel<kKey, kOut>, grid, kOfflineThreads, OfflineShape<kKey, kOut>::kShared, stream, args);
}

// ---- From segment to segment

constexpr int kJoinThreads = 256, kJoinAhead = 8;

__global__ void __launch_bounds__(kJoinThreads) offline_join_kernel(const __grid_constant__ OfflineJoinArgs a) {
  const int size = a.K * a.V, pieces = (size + kJoinThreads - 1) / kJoinThreads, block = static_cast<int>(block_index_x());
  const int n = block / pieces, hv = static_cast<int>(block_index_y()), at = (block - n * pieces) * kJoinThreads + static_cast<int>(thread_index());
  grid_dependency_wait();
  grid_dependency_launch();
  if (at >= size) return;
  const int k = at % a.K, v = at / a.K, first = a.first_segment[n], count = a.first_segment[n + 1] - first;
  float state = 0;
  if (a.from.data != nullptr) {
    const int64_t from = n * a.from.stride_n + hv * a.from.stride_h + k * a.from.stride_k + v * a.from.stride_v;
    state = a.from.bf16 != 0 ? bf16_value(static_cast<const uint16_t*>(a.from.data)[from]) : static_cast<const float*>(a.from.data)[from];
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

void offline_scan(const OfflineScanArgs& args, int key, void* stream) {
  if (args.problem.K > key || (key != 64 && key != 128)) throw Error(ErrorKind::kInternal, "offline_scan: key must be 64 or 128 and at least K");
  const bool out = args.o.data != nullptr;
  if (out && args.reverse) throw Error(ErrorKind::kInternal, "offline_scan: there is no o in reverse");
  if (key == 64) {
    out ? launch_scan<64, true>(args, stream) : launch_scan<64, false>(args, stream);
  } else {
    out ? launch_scan<128, true>(args, stream) : launch_scan<128, false>(args, stream);
  }
}

void offline_join(const OfflineJoinArgs& args, void* stream) {
  const Dim3 grid{static_cast<unsigned>((args.K * args.V + kJoinThreads - 1) / kJoinThreads * args.N), static_cast<unsigned>(args.HV), 1};
  launch_overlapped(offline_join_kernel, grid, kJoinThreads, 0, stream, args);
}

}  // namespace fw::cuda
