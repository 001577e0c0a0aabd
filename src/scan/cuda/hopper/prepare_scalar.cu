// prepare where all channels of a token decay alike, or not at all: T and P are products of the undecayed streams times the matrix
// exp(G_i - G_j), in float32. A block has one chunk of one value head.
//
// Where the streams are multiples of the raw q and k (kPlain: most rules), those are the operands as they came from memory, and
// coefficients are factors of results: they are worked out while the products run. Other rules make their streams first.
#include <algorithm>

#include "scan/cuda/device/prepare_finish.cuh"
#include "scan/cuda/launch.h"
#include "scan/cuda/prepare_kernels.h"

namespace fw::cuda {
namespace {

// Factors by row. pair: G_i in log2 with the decay of a token bounded from below, so that differences of it keep their digits; what the
// bound cuts off is 1e-12 of a product. left: of the rows of P and of T, right: of the columns of both, besides the decays; gamma, keys:
// exp(G_i) and exp(G_C - G_i), in the end those of the operands in the images q and (with split_keys) Khat; split_erase: those in -E.
// left is also where |q|^2 and |k|^2 wait for the coefficients.
struct ScalarRows {
  float pair[kChunk], left[2][kChunk], right[kChunk], gamma[kChunk], keys[kChunk], erase[kChunk], z[kChunk];
  SplitFactors split_keys, split_erase;
};
inline constexpr float kLowestStep = -40.0f;

// By one warp, two tokens a lane: the log-decays as they lie in memory, so that nothing waits for them yet, ...
FW_DEVICE uint2 scalar_steps(const Problem& x, const ChunkPlace& place) {
  uint32_t bits[2] = {0, 0};
  if (x.rule.decay == Decay::kScalar) {
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * static_cast<int>(lane_index()) + i;
      const void* from = row_address(x.in.g, place, row);
      if (row >= place.span.rows) continue;
      if (x.in.g.bf16 != 0) {
        bits[i] = *static_cast<const uint16_t*>(from);
      } else {
        bits[i] = *static_cast<const uint32_t*>(from);
      }
    }
  }
  return make_uint2(bits[0], bits[1]);
}
// ... and what comes of them. Sums only, no differences: g may be -inf.
FW_DEVICE void scalar_decays(const Problem& x, const ChunkPlace& place, const uint2& steps, ScalarRows& d, float& gamma_end) {
  const int lane = static_cast<int>(lane_index());
  float g[2] = {0, 0};
  if (x.rule.decay == Decay::kScalar) {
    const int shift = x.in.g.bf16 != 0 ? 16 : 0;
    g[0] = bits_float(steps.x << shift) * kLog2E, g[1] = bits_float(steps.y << shift) * kLog2E;
  } else if (x.rule.decay == Decay::kConstant) {  // log(constant_decay(head)) of rule/decay.h
    const float decay = log1pf(-exp2f(-5.0f - static_cast<float>(place.hv))) * kLog2E;
    FW_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (2 * lane + i < place.span.rows) g[i] = decay;
    }
  }
  const float bounded[2] = {max(g[0], kLowestStep), max(g[1], kLowestStep)};
  float prefix = g[0] + g[1], suffix = g[0] + g[1], pair = bounded[0] + bounded[1];
  FW_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = shuffle_up(prefix, distance), after = shuffle_down(suffix, distance), pair_before = shuffle_up(pair, distance);
    if (lane >= distance) prefix += before, pair += pair_before;
    if (lane + distance < 32) suffix += after;
  }
  gamma_end = exp2_fast(shuffle(prefix, 31));
  float before = shuffle_up(prefix, 1), after = shuffle_down(suffix, 1), pair_before = shuffle_up(pair, 1);
  if (lane == 0) before = pair_before = 0;
  if (lane == 31) after = 0;
  *reinterpret_cast<float2*>(d.gamma + 2 * lane) = make_float2(exp2_fast(before + g[0]), exp2_fast(prefix));
  *reinterpret_cast<float2*>(d.keys + 2 * lane) = make_float2(exp2_fast(g[1] + after), exp2_fast(after));
  *reinterpret_cast<float2*>(d.pair + 2 * lane) = make_float2(pair_before + bounded[0], pair);
}

// Shared memory. Plain: the raw keys (become x), the raw reads (become q of the backward image), T. Else: w, r, e, and for the forward
// image alone T takes the place of e. M takes the place of T, which y takes where there is one. A takes the place of the raw reads in
// the kernel that makes forward images only. Of that, four blocks fit an SM, and three of the other for plain rules.
template <int kKey, bool kOnline, bool kPlain, bool kTraining, bool kFine = false>
struct ScalarLayout {
  static constexpr bool kClaims = kPlain && kOnline && !kTraining;
  static constexpr int kBlocks = kFine ? 2 : !kOnline ? (kPlain ? 4 : 3) : (kPlain ? 4 : 3) - (kTraining ? 1 : 0);
  static constexpr uint32_t kOperand = 2 * kChunk * kKey, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kWork = !kOnline ? 0 : kClaims ? kTriangle : std::max(kTriangle, kOperand);
  static constexpr uint32_t kKeys = 0, kReads = kOperand, kErase = 2 * kOperand, kA = kClaims ? kReads : kErase + kWork;
  static constexpr uint32_t kP = kErase + kWork + (kOnline && !kClaims ? kPanelBytes : 0);
  static constexpr uint32_t kM = kP + kPanelBytes, kT = kPlain || !kTraining ? kErase : kM + kPanelBytes;
  static constexpr uint32_t kEnd = !kOnline || !kTraining ? kM : kPlain ? kM + kPanelBytes : kT + kWork;
  static constexpr uint32_t kRowsBytes = sizeof(ScalarRows) + (kPlain ? 0 : kChunk * sizeof(RowCoefs) + sizeof(RunShared<kKey / 32>));
  // kFine: what A and P in bf16 leave out.
  static constexpr uint32_t kALow = (kEnd + kRowsBytes + 1023) / 1024 * 1024, kPLow = kALow + kPanelBytes;
  static constexpr uint32_t kBytes = kFine ? kPLow + kPanelBytes : kEnd + kRowsBytes;
  static_assert(kA % 1024 == 0 && kP % 1024 == 0 && kBlocks * (kBytes + 1024) <= 228 * 1024);
};

// The streams of a row of the warp: to shared memory for T and P, and with their decays to the images.
template <int kKey, bool kOnline>
FW_DEVICE void scalar_row(int r, const KeyStreams<kKey / 32>& s, char* shared, const ScalarRows& rows, const ChunkImages<kKey>& out) {
  using Layout = ScalarLayout<kKey, kOnline, false, false>;
  constexpr int kN = kKey / 32;
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  const uint32_t at = lane_offset<kN>(r);
  const float gamma = rows.gamma[row], suffix = rows.keys[row];
  float q[kN], e[kN], k[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) q[j] = gamma * s.r[j], e[j] = -gamma * s.e[j], k[j] = suffix * s.w[j];
  const PackedChannels<kN> q_packed = pack_channels(q);

  store_packed(shared + Layout::kReads + at, pack_channels(s.r));
  store_packed(shared + Layout::kKeys + at, pack_channels(s.w));
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
  if constexpr (kOnline) {
    store_packed(shared + Layout::kErase + at, pack_channels(s.e));
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, pack_channels(e));
  } else {
    store_packed(reinterpret_cast<char*>(out.forward->x) + at, pack_channels(k));
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
  }
  if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, pack_channels(k));
}

// Images that are multiples of the raw rows `raw`, of `count` groups of four rows from group `first` on, by one warp: to `a` with factors a_rows,
// and to b, if not null, with b_rows.
template <int kKey>
FW_DEVICE void plain_images(const char* raw, int first, int count, const float* a_rows, void* a, const float* b_rows, void* b) {
  const int lane = static_cast<int>(lane_index());
  FW_NO_UNROLL
  for (int group = first; group < first + count; ++group) {
    const int row = 4 * group + (lane >> 3);
    const uint32_t at = static_cast<uint32_t>(row * 128 + (lane & 7) * 16);
    uint4 x[kKey / 64];
    FW_UNROLL
    for (uint32_t panel = 0; panel < kKey / 64; ++panel) x[panel] = *reinterpret_cast<const uint4*>(raw + at + panel * kPanelBytes);
    const SplitFactor f = split_factor(a_rows[row]);
    FW_UNROLL
    for (uint32_t panel = 0; panel < kKey / 64; ++panel) *reinterpret_cast<uint4*>(static_cast<char*>(a) + at + panel * kPanelBytes) = times(x[panel], f);
    if (b == nullptr) continue;
    const SplitFactor g = split_factor(b_rows[row]);
    FW_UNROLL
    for (uint32_t panel = 0; panel < kKey / 64; ++panel) *reinterpret_cast<uint4*>(static_cast<char*>(b) + at + panel * kPanelBytes) = times(x[panel], g);
  }
}

// Which products a warp has. Online, warps 0 to 3 have the blocks of 16 rows of T and 4 to 7 those of P; offline the halves have every
// second block of columns of P. The two warps of one scheduler share its work evenly.
template <bool kOnline>
struct PairWork {
  int block, half;
  bool strict;
  FW_DEVICE explicit PairWork(int warp) : block(warp < 4 ? warp : 7 - warp), half(warp >> 2), strict(kOnline && warp < 4) {}
  FW_DEVICE bool has(int column) const { return column <= block && (kOnline || (column & 1) == half); }  // block of 16 columns
};

template <int kKey, bool kOnline>
FW_DEVICE void pair_products(const PairWork<kOnline>& work, uint32_t left, uint32_t right, float (&c)[8][4]) {
  clear_tiles(c);
  FW_UNROLL
  for (int k = 0; k < kKey / 16; ++k) {
    uint32_t a[4];
    ldmatrix_x4(a, a_fragment(left, 16 * work.block, 2 * k));
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (!work.has(j)) continue;
      uint32_t b[4];
      ldmatrix_x4(b, b_fragment(right, 16 * j, 2 * k));
      mma_bf16(c[2 * j], a, b[0], b[1]);
      mma_bf16(c[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// The decays and factors, between blocks by way of the row before the later one.
template <bool kOnline>
FW_DEVICE void scale_pairs(const PairWork<kOnline>& work, const ScalarRows& rows, float (&c)[8][4]) {
  const int lane = static_cast<int>(lane_index()), i = 16 * work.block + (lane >> 2);
  const float row[2] = {rows.pair[i], rows.pair[i + 8]}, anchor = work.block > 0 ? rows.pair[16 * work.block - 1] : 0.0f;
  const float factor[2] = {rows.left[work.strict][i], rows.left[work.strict][i + 8]};
  const float after[2] = {factor[0] * exp2_fast(row[0] - anchor), factor[1] * exp2_fast(row[1] - anchor)};
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    if (!work.has(n / 2)) continue;
    const int j = 8 * n + 2 * (lane & 3);
    const float2 column = *reinterpret_cast<const float2*>(rows.pair + j), right = *reinterpret_cast<const float2*>(rows.right + j);
    if (n / 2 < work.block) {
      const float before[2] = {right.x * exp2_fast(anchor - column.x), right.y * exp2_fast(anchor - column.y)};
      FW_UNROLL
      for (int m = 0; m < 4; ++m) c[n][m] *= after[m / 2] * before[m % 2];
    } else {  // above the diagonal the difference is positive, and what comes of it is thrown away
      const float difference[4] = {row[0] - column.x, row[0] - column.y, row[1] - column.x, row[1] - column.y};
      FW_UNROLL
      for (int m = 0; m < 4; ++m) c[n][m] *= exp2_fast(min(difference[m], 0.0f)) * (factor[m / 2] * (m % 2 == 0 ? right.x : right.y));
      if (work.strict) {
        cut_tile<true>(n % 2, c[n]);
      } else {
        cut_tile<false>(n % 2, c[n]);
      }
    }
  }
}

template <bool kOnline, bool kFine>
FW_DEVICE void store_pairs(const PairWork<kOnline>& work, char* t, char* p, char* p_low, const float (&c)[8][4]) {
  const TriangleRows triangle = triangle_rows(t, work.block);
  const uint32_t panel = panel_rows(work.block);
  FW_UNROLL
  for (int n = 0; n < 8; ++n) {
    if (!work.has(n / 2)) continue;
    if (work.strict) {
      store_tile(triangle, n, c[n]);
    } else {
      store_tile(p, panel, n, c[n]);
      if constexpr (kFine) store_rest(p_low, panel, n, c[n]);
    }
  }
}

// Plain rules: the factors of this lane's row, from the norms that wait in `rows`.
template <bool kOnline>
FW_DEVICE void plain_factors(const Problem& x, const ChunkPlace& place, int row, const PlainGates& gates, ScalarRows& rows, float* z_scale, bool z_image) {
  const bool valid = row < place.span.rows;
  const FrontCoefs<float> c = plain_coefs(x, gates, rows.left[0][row], rows.left[1][row]);
  const float z = valid ? c.z_v : 0.0f, e = valid ? c.e_k : 0.0f, q = valid ? c.r_q : 0.0f, k = valid ? c.w_k : 0.0f;
  const float gamma = rows.gamma[row], suffix = rows.keys[row];
  rows.left[0][row] = q, rows.left[1][row] = e, rows.right[row] = k;
  rows.gamma[row] = gamma * q, rows.keys[row] = suffix * k, rows.z[row] = z;
  if constexpr (kOnline) {
    rows.erase[row] = -gamma * e;
    split_into(rows.split_keys, row, suffix * k);
    split_into(rows.split_erase, row, -gamma * e);
  }
  z_scale[row] = !z_image ? z : valid ? 1.0f : 0.0f;
}

// kTraining: with backward images; offline and kFine: if they are asked for. kFine: with what A, P and the keys lose in bf16.
template <int kKey, bool kOnline, bool kPlain, bool kTraining, bool kFine>
__global__ void __launch_bounds__(kPrepareThreads, ScalarLayout<kKey, kOnline, kPlain, kTraining, kFine>::kBlocks)
    prepare_scalar_kernel(const __grid_constant__ PrepareArgs args, const __grid_constant__ PrecondMap<float> precond_form, int fetched) {
  using Layout = ScalarLayout<kKey, kOnline, kPlain, kTraining, kFine>;
  constexpr int kN = kKey / 32;
  const Problem& x = args.problem;
  char* shared = shared_memory();
  const ChunkPlace place = chunk_place(x);
  if (place.span.rows < 0) return;
  ChunkImages<kKey> out = chunk_images<kKey>(args, place.item);
  if constexpr (kOnline && !kTraining) out.backward = nullptr;
  ScalarRows& rows = *reinterpret_cast<ScalarRows*>(shared + Layout::kEnd);
  const int thread = static_cast<int>(thread_index()), warp = uniform_warp();
  const PairWork<kOnline> work(warp);

  uint2 steps = make_uint2(0, 0);
  if (warp == 1) steps = scalar_steps(x, place);
  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, shared + Layout::kErase};
  if (kPlain || fetched != 0) fetch_front<kN>(x, place, raw);
  const int row = kPlain ? coefficient_row(warp) : -1;
  const PlainGates gates = plain_gates(x, place, row);
  clear_above(shared + Layout::kP);
  if (warp == 1) {
    float gamma_end;
    scalar_decays(x, place, steps, rows, gamma_end);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) {
      const int channel = static_cast<int>(lane_index()) + 32 * j;
      out.forward->gamma[channel] = gamma_end;
      if (out.backward != nullptr) out.backward->gamma[channel] = gamma_end;
    }
  }

  if constexpr (kPlain) {
    front_arrived();
    if (uses_norms(x.rule)) {
      const float2 squares = fetched_squares<kN, true>(raw);
      const int lane = static_cast<int>(lane_index()), own = warp * kWarpRows + lane / 4;
      if (lane % 4 == 0) rows.left[0][own] = squares.x, rows.left[1][own] = squares.y;
    }
    sync_threads();
    if (row >= 0) plain_factors<kOnline>(x, place, row, gates, rows, out.forward->z_scale, out.z != nullptr);
  } else {
    RowCoefs* coefs = reinterpret_cast<RowCoefs*>(&rows + 1);
    PrecondRows<kN> precond;
    precond.load(x, place, precond_form, reinterpret_cast<RunShared<kN>*>(coefs + kChunk));
    make_coefs<kN>(x, place, fetched != 0, raw, precond, coefs);
    sync_threads();
    const auto body = [&](int r, const KeyStreams<kN>& s) { scalar_row<kKey, kOnline>(r, s, shared, rows, out); };
    if (fetched != 0) {
      for_each_fetched_row<kN, false>(x, place, raw, precond, coefs, body);
    } else {
      for_each_row<kN>(x, place, coefs, body);
    }
    if (thread < kChunk) {
      const float z = coefs[thread].rest.z;
      rows.left[0][thread] = rows.left[1][thread] = rows.right[thread] = 1.0f;
      rows.z[thread] = z;
      split_into(rows.split_keys, thread, rows.keys[thread]);
      split_into(rows.split_erase, thread, -rows.gamma[thread]);
      out.forward->z_scale[thread] = out.z == nullptr ? z : thread < place.span.rows ? 1.0f : 0.0f;
    }
    sync_threads();
  }
  float c[8][4];
  const uint32_t base = shared_address(shared);
  pair_products<kKey, kOnline>(work, base + (!work.strict ? Layout::kReads : kPlain ? Layout::kKeys : Layout::kErase), base + Layout::kKeys, c);
  sync_threads();  // the factors are there, and T may take the place of e
  scale_pairs(work, rows, c);
  char* const t = shared + Layout::kT;
  store_pairs<kOnline, kFine>(work, t, shared + Layout::kP, shared + Layout::kPLow, c);

  const auto z_of = [&](int i) { return rows.z[i]; };
  const char *const reads = shared + Layout::kReads, *const keys = shared + Layout::kKeys;
  if constexpr (kOnline) {
    const FinishBuffers buffers{shared + Layout::kKeys,
                                t,
                                shared + Layout::kA,
                                shared + Layout::kP,
                                shared + (kTraining ? Layout::kM : Layout::kT),
                                shared + (kPlain ? Layout::kKeys : Layout::kErase),
                                shared + Layout::kReads,
                                t,
                                &rows.split_keys,
                                &rows.split_erase,
                                rows.gamma,
                                shared + Layout::kALow,
                                shared + Layout::kPLow};
    finish_online<kKey, true, kTraining, Layout::kClaims, kFine>(
        buffers, warp, out,
        [&](int number) {
          if constexpr (kPlain) plain_images<kKey>(reads, 4 * number, 4, rows.gamma, out.forward->q, nullptr, nullptr);
        },
        [&](int number) {
          if constexpr (kPlain) {
            plain_images<kKey>(keys, number < 4 ? 2 * number : 4 * number - 8, number < 4 ? 2 : 4, rows.erase, out.forward->e, rows.keys,
                               kTraining && (!kFine || out.backward != nullptr) ? out.backward->k : nullptr);
          }
          if (out.z != nullptr) write_values(x, place, z_of, out.z, number * 32 + static_cast<int>(lane_index()), kMeanwhileWarps * 32);
        });
  } else {
    start_offline<kKey>(shared + Layout::kP, out);
    if constexpr (kPlain) {
      plain_images<kKey>(reads, 2 * warp, 2, rows.gamma, out.forward->q, rows.gamma, out.backward != nullptr ? out.backward->q : nullptr);
      plain_images<kKey>(keys, 2 * warp, 2, rows.keys, out.forward->x, rows.keys, out.backward != nullptr ? out.backward->k : nullptr);
    }
    if (out.z != nullptr) write_values(x, place, z_of, out.z, thread, kPrepareThreads);
    finish_offline();
  }
}

template <int kKey, bool kOnline, bool kPlain, bool kTraining, bool kFine = false>
void launch_scalar(const PrepareArgs& args, int64_t chunks, bool fetched, void* stream) {
  using Layout = ScalarLayout<kKey, kOnline, kPlain, kTraining, kFine>;
  PrecondMap<float> form;
  if (args.problem.boundaries != nullptr) form = precond_map(args.problem.rule, 0.0f);
  launch(prepare_scalar_kernel<kKey, kOnline, kPlain, kTraining, kFine>, prepare_grid(args.problem, chunks), kPrepareThreads, Layout::kBytes, stream, args,
         form, static_cast<int>(fetched));
}

template <int kKey, bool kOnline>
void launch_key(const PrepareArgs& args, int64_t chunks, void* stream) {
  const bool fetched = can_fetch(args.problem, kKey), plain = fetched && plain_streams(args.problem) && !channel_erase(args.problem.rule);
  if (kOnline && wants_rests(args.problem.rule)) {
    plain ? launch_scalar<kKey, kOnline, true, kOnline, kOnline>(args, chunks, fetched, stream)
          : launch_scalar<kKey, kOnline, false, kOnline, kOnline>(args, chunks, fetched, stream);
  } else if (kOnline && args.backward != nullptr) {
    plain ? launch_scalar<kKey, kOnline, true, kOnline>(args, chunks, fetched, stream)
          : launch_scalar<kKey, kOnline, false, kOnline>(args, chunks, fetched, stream);
  } else {
    plain ? launch_scalar<kKey, kOnline, true, false>(args, chunks, fetched, stream)
          : launch_scalar<kKey, kOnline, false, false>(args, chunks, fetched, stream);
  }
}

}  // namespace

bool prepare_scalar_makes_m(const Problem& problem, int key) {
  const Rule& rule = problem.rule;
  return rule.uses_precond() && rule.precond_squashed() && rule.normaliser == Normaliser::kNone && can_fetch(problem, key);
}

void prepare_scalar(const PrepareArgs& args, int key, int64_t chunks, void* stream) {
  const bool online = args.problem.rule.online();
  if (key == 128) {
    online ? launch_key<128, true>(args, chunks, stream) : launch_key<128, false>(args, chunks, stream);
  } else {
    online ? launch_key<64, true>(args, chunks, stream) : launch_key<64, false>(args, chunks, stream);
  }
}

}  // namespace fw::cuda
