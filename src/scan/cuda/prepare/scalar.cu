// prepare where all channels of a token decay alike, or not at all: T and P are products of the undecayed streams times
// the matrix exp(G_i - G_j), in float32. A block has one chunk of one value head.
//
// Where the streams are multiples of the raw q and k (kPlain: most rules), those are the operands as they came from
// memory. Coefficients are factors of results, and are worked out while the products run. Of rules with an erase
// (delta) the forward scan takes those rows as well, and A and P (RowScales), but for gains above 1 (kHiLo). Other
// rules make their streams first. Older GPUs have less shared memory: there hi/lo tiles are made in turns (finish.cuh).
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       a warp's 8 rows of q and k; their norms; chunk tiles and Z at the end (kRows: Z alone)
//   0         coefficients of rows, with warps as coefficient_row() says
//   1         sums of the log-decay, factors of rows (put_decays)
//   0 to 3    K K^T, T, then A = (I + T)^-1;   4 to 7   Q K^T, P, meanwhile chunk tiles and Z (products.cuh, finish.cuh)
#include <algorithm>
#include <type_traits>

#include "gpu/device.h"
#include "scan/cuda/dispatch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/prepare/launch.h"
#include "scan/cuda/prepare/scalar_rows.cuh"

namespace fw::cuda {
namespace {

// Shared memory. Plain: the raw keys (become x), the raw reads (kHiLo: become q of the backward chunk tile), T. Else:
// w, r, e, and for the forward chunk tile alone T overwrites e. M overwrites T, or y does where
// there is one. Where the scans take rows, A and P (kRows) A overwrites the raw reads, and four blocks fit an
// SM.
struct PrepareScalarTraits {
  int k_tile = 128;  // 64 or 128
  bool is_delta = true;
  bool is_plain = false;  // raw rows of q and k are the operands, not streams
  bool saves = false;     // with backward chunk tiles; additive and hi/lo: if requested
  bool is_hi_lo = false;  // with what A, P and the keys lose in bf16
  bool in_turns = false;  // hi/lo: finish_in_turns(), in 99 KB
};

template <PrepareScalarTraits kTraits>
struct ScalarLayout {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kDelta = kTraits.is_delta, kPlain = kTraits.is_plain, kTraining = kTraits.saves,
                        kHiLo = kTraits.is_hi_lo;
  static constexpr bool kRows = kPlain && kDelta && !kHiLo;
  static_assert(!kRows || !kTraining);
  using ChunkTile = std::conditional_t<kRows, RowScales, FwdTiles<kTileK>>;
  static constexpr int kBlocks = kHiLo ? (kPlain ? 2 : 1) : kDelta && kTraining ? 2 : kPlain ? 4 : 3;
  static constexpr uint32_t kOperand = 2 * kChunk * kTileK, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kWork = !kDelta ? 0 : kRows ? kTriangle : std::max(kTriangle, kOperand);
  static constexpr uint32_t kKeys = 0, kReads = kOperand, kErase = 2 * kOperand, kA = kRows ? kReads : kErase + kWork;
  static constexpr uint32_t kP = kErase + kWork + (kDelta && !kRows ? kSw128Bytes : 0);
  static constexpr uint32_t kM = kP + kSw128Bytes, kT = kPlain || !kTraining ? kErase : kM + kSw128Bytes;
  static constexpr uint32_t kEnd = !kDelta || !kTraining ? kM : kPlain ? kM + kSw128Bytes : kT + kWork;
  static constexpr uint32_t kRowsBytes =
      sizeof(ScalarRows) + (kPlain ? 0 : kChunk * sizeof(RowScaleCoefs) + sizeof(RunShared<kTileK / 32>));
  // kHiLo: what A, P and y in bf16 leave out; rows that are not plain: what e and the keys do, e in place of y.
  static constexpr uint32_t kHiLoRows = kEnd + kRowsBytes, kHiLoEnd = kHiLoRows + (kPlain ? sizeof(HiLoRows) : 0);
  static constexpr uint32_t kALow = (kHiLoEnd + 1023) / 1024 * 1024, kPLow = kALow + kSw128Bytes;
  static constexpr uint32_t kYLo = kPLow + kSw128Bytes, kKeysLo = kYLo + kOperand,
                            kHiLoTotal = kKeysLo + (kPlain ? 0 : kOperand);
  static constexpr uint32_t kBytes = kHiLo ? kHiLoTotal : kEnd + kRowsBytes;
  static_assert(kA % 1024 == 0 && kP % 1024 == 0 && kOperand <= 2 * kSw128Bytes &&
                kBlocks * (kBytes + 1024) <= 228 * 1024);
};

// The same of kHiLo in turns. The keys, then the raw reads (plain), or what bf16 leaves out of the keys, e, what it
// leaves out of e, and r. A, P, what it leaves out of both, and T overwrite all but the keys and theirs. What it leaves
// out of x is in place of the raw reads or of the keys' own; M and Q as TurnBuffers says.
template <PrepareScalarTraits kTraits>
struct ScalarTurnsLayout {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kDelta = true, kPlain = kTraits.is_plain, kTraining = true, kHiLo = true, kRows = false;
  using ChunkTile = FwdTiles<kTileK>;
  static constexpr int kBlocks = 1;
  static constexpr uint32_t kOperand = 2 * kChunk * kTileK;
  static constexpr uint32_t kKeys = 0, kKeysLo = kOperand, kErase = 2 * kOperand, kYLo = 3 * kOperand,
                            kReads = kPlain ? kOperand : 4 * kOperand;
  static constexpr uint32_t kA = 2 * kOperand, kALow = kA + kSw128Bytes, kP = kALow + kSw128Bytes,
                            kPLow = kP + kSw128Bytes, kT = kPLow + kSw128Bytes, kM = kT;
  static constexpr uint32_t kEnd = std::max(kT + kTriangleBytes, kPlain ? 0 : kReads + kOperand);
  static constexpr uint32_t kHiLoRows =
      kEnd + sizeof(ScalarRows) + (kPlain ? 0 : kChunk * sizeof(RowScaleCoefs) + sizeof(RunShared<kTileK / 32>));
  static constexpr uint32_t kBytes = kHiLoRows + (kPlain ? sizeof(HiLoRows) : 0);
  static_assert(kA % 1024 == 0 && kEnd % 16 == 0 && kPLow + kOperand <= kT + kTriangleBytes &&
                kBytes <= kSm80SharedBytes);
};
template <class Layout>
inline constexpr bool kInTurns = false;
template <PrepareScalarTraits kTraits>
inline constexpr bool kInTurns<ScalarTurnsLayout<kTraits>> = true;

// The streams of a row of the warp: to shared memory for T and P, and with their decays to the chunk tiles. With kHiLo,
// e and w go there with their lo parts instead, if those are wanted.
template <class Layout, int kTileK = Layout::kTileK>
FW_DEVICE void scalar_row(int r, const KeyStreams<kTileK / 32>& s, char* shared, const ScalarRows& rows,
                          const ChunkTiles<kTileK>& out) {
  constexpr int kN = kTileK / 32;
  constexpr bool kDelta = Layout::kDelta, kHiLo = Layout::kHiLo;
  const int row = static_cast<int>(warp_index()) * kWarpRows + r;
  const uint32_t at = lane_offset<kN>(r);
  const float gamma = rows.gamma[row], suffix = rows.keys[row];
  float q[kN], e[kN], k[kN];
  FW_UNROLL
  for (int j = 0; j < kN; ++j) q[j] = gamma * s.r[j], e[j] = -gamma * s.e[j], k[j] = suffix * s.w[j];
  const PackedChannels<kN> q_packed = pack_channels(q), keys = pack_channels(s.w);

  store_packed(shared + Layout::kReads + at, pack_channels(s.r));
  store_packed(shared + Layout::kKeys + at, keys);
  store_packed(reinterpret_cast<char*>(out.forward->q) + at, q_packed);
  if constexpr (kHiLo) {
    const PackedChannels<kN> erase = pack_channels(s.e);
    store_packed(shared + Layout::kErase + at, erase);
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, erase);
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, keys);
    if (out.e_lo == nullptr) return;
    const PackedChannels<kN> of_erase = pack_lo_parts(s.e, erase), of_keys = pack_lo_parts(s.w, keys);
    store_packed(shared + Layout::kYLo + at, of_erase);
    store_packed(shared + Layout::kKeysLo + at, of_keys);
    store_packed(out.e_lo + at, of_erase);
    if (out.backward != nullptr) store_packed(out.k_lo + at, of_keys);
    return;
  }
  if constexpr (kDelta) {
    store_packed(shared + Layout::kErase + at, pack_channels(s.e));
    store_packed(reinterpret_cast<char*>(out.forward->e) + at, pack_channels(e));
  } else {
    store_packed(reinterpret_cast<char*>(out.forward->x) + at, pack_channels(k));
    if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->q) + at, q_packed);
  }
  if (out.backward != nullptr) store_packed(reinterpret_cast<char*>(out.backward->k) + at, pack_channels(k));
}

template <class Layout>
__global__ void __launch_bounds__(kPrepareThreads, resident_blocks(Layout::kBlocks))
    prepare_scalar_kernel(const __grid_constant__ PrepareArgs args,
                          const __grid_constant__ PrecondMap<float> precond_form, int fetched) {
  constexpr int kTileK = Layout::kTileK, kN = kTileK / 32;
  constexpr bool kDelta = Layout::kDelta, kPlain = Layout::kPlain, kTraining = Layout::kTraining, kHiLo = Layout::kHiLo;
  const Problem& x = args.problem;
  char* shared = shared_memory();
  const ChunkCoord coord = chunk_coord(x);
  if (coord.span.rows < 0) return;
  auto out = chunk_tiles_of<kTileK, typename Layout::ChunkTile>(args, coord.item);
  if constexpr (kDelta && !kTraining) out.backward = nullptr;
  ScalarRows& rows = *reinterpret_cast<ScalarRows*>(shared + Layout::kEnd);
  HiLoRows& hi_lo = *reinterpret_cast<HiLoRows*>(shared + Layout::kHiLoRows);  // kHiLo, kPlain
  const int thread = static_cast<int>(thread_index()), warp = uniform_warp();
  const PairWork<kDelta> work(warp);

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, shared + Layout::kErase};
  if (kPlain || fetched != 0) fetch_front<kN>(x, coord, raw);
  grid_dependency_wait();  // for the gates (PrepareArgs::after_gate_kernel)
  ScalarSteps<kPlain> steps;
  if (warp == 1) steps = scalar_steps<kPlain>(x, coord);
  const int row = kPlain ? coefficient_row(warp) : -1;
  PlainGates gates = plain_gates(x, coord, row);
  if constexpr (!kInTurns<Layout>) clear_above(shared + Layout::kP);
  if (warp == 1) put_decays<kTileK>(x, coord, steps, rows, out);
  if constexpr (kPlain) form_gates(x, coord, row, true, gates);

  if constexpr (kPlain) {
    front_arrived();
    if (uses_norms(x.rule)) {
      const float2 squares = fetched_squares<kN, true>(raw);
      const int lane = static_cast<int>(lane_index()), own = warp * kWarpRows + lane / 4;
      if (lane % 4 == 0) rows.left[0][own] = squares.x, rows.left[1][own] = squares.y;
    }
    sync_threads();
    if (row >= 0) plain_factors<kDelta, kHiLo>(x, coord, row, gates, rows, &hi_lo, out);
  } else {
    RowScaleCoefs* coefs = reinterpret_cast<RowScaleCoefs*>(&rows + 1);
    PrecondRows<kN> precond;
    precond.load(x, coord, precond_form, reinterpret_cast<RunShared<kN>*>(coefs + kChunk));
    make_coefs<kN>(x, coord, fetched != 0, raw, precond, coefs, kHiLo && out.e_lo == nullptr);
    sync_threads();
    if constexpr (kHiLo) {
      if (thread < kChunk) {
        RowScaleCoefs& at = coefs[thread];
        FrontCoefs<float> c;
        c.e_k = at.read_erase.z, c.w_k = at.lo.y, c.z_v = at.lo.z;
        const UnscaledCoefs y = hi_lo_coefs(x.rule, c);
        at.read_erase.z = y.primed.e_k, at.lo.y = y.primed.w_k, at.lo.z = y.primed.z_v;
        rows.left[1][thread] = y.a, rows.right[thread] = y.b;
      }
      sync_threads();
    }
    const auto body = [&](int r, const KeyStreams<kN>& s) { scalar_row<Layout>(r, s, shared, rows, out); };
    if (fetched != 0) {
      for_each_fetched_row<kN, false>(x, coord, raw, precond, coefs, body);
    } else {
      for_each_row<kN>(x, coord, coefs, body);
    }
    if (thread < kChunk) {
      const float z = coefs[thread].lo.z;
      if constexpr (kHiLo) {
        rows.left[0][thread] = 1.0f;
      } else {
        rows.left[0][thread] = rows.left[1][thread] = rows.right[thread] = 1.0f;
      }
      rows.z[thread] = z;
      if constexpr (kDelta && !kHiLo) {
        const float gamma = rows.gamma[thread];
        const float4 c = coefs[thread].read_erase;
        put_row_scales<true>(out, thread, rows.keys[thread] * coefs[thread].lo.y,
                             make_float2(-gamma * c.z, -gamma * c.w), make_float2(gamma * c.y, gamma * c.x));
      }
      if constexpr (kHiLo) put_scales(out, thread, -rows.gamma[thread], rows.keys[thread]);
      split_into(rows.split_keys, thread, rows.keys[thread]);
      split_into(rows.split_erase, thread, -rows.gamma[thread]);
      out.forward->z_scale[thread] = out.z == nullptr ? z : thread < coord.span.rows ? 1.0f : 0.0f;
    }
    sync_threads();
  }
  float c[8][4];
  const uint32_t base = shared_address(shared);
  pair_products<kTileK, kDelta>(work,
                                base + (!work.strict ? Layout::kReads
                                        : kPlain     ? Layout::kKeys
                                                     : Layout::kErase),
                                base + Layout::kKeys, c);
  const bool lo_parts = kHiLo && !kPlain && out.e_lo != nullptr;
  if (lo_parts) {
    add_pair_products<kTileK, kDelta>(work, base + (work.strict ? Layout::kErase : Layout::kReads),
                                      base + Layout::kKeysLo, c);
    if (work.strict) add_pair_products<kTileK, kDelta>(work, base + Layout::kYLo, base + Layout::kKeys, c);
  }
  sync_threads();  // the factors are there, and T may overwrite e, A the raw reads
  const float(&left)[kChunk] = rows.left[work.strict];
  scale_pairs(work, rows, {left[work.row()], left[work.row() + 8]},
              !kHiLo || work.strict ? rows.right
              : kPlain              ? hi_lo.right_of_p
                                    : rows.left[0],
              c);
  char* const t = shared + Layout::kT;
  if constexpr (kInTurns<Layout>) clear_above(shared + Layout::kP);
  store_pairs<kDelta, kHiLo>(work, t, shared + Layout::kP, shared + Layout::kPLow, c);

  const auto z_of = [&](int i) { return rows.z[i]; };
  const auto put_z = [&](int thread, int threads) {
    if (out.z != nullptr) write_values(x, coord, z_of, out.z, thread, threads);
  };
  const char *const reads = shared + Layout::kReads, *const keys = shared + Layout::kKeys;
  if constexpr (Layout::kRows) {
    finish_pairs(
        t, shared + Layout::kA, shared + Layout::kP, warp, out.pairs, [](int) {},
        [&](int number) { put_z(number * 32 + static_cast<int>(lane_index()), kMeanwhileWarps * 32); });
  } else if constexpr (kDelta) {
    const auto put_reads = [&](int number) {
      if constexpr (kPlain && kHiLo)
        plain_tiles_of<kTileK>(reads, 4 * number, 4, rows.gamma, out.forward->q, nullptr, nullptr);
    };
    const auto put_keys_and_z = [&](int number) {
      const int first = number < 4 ? 2 * number : 4 * number - 8, count = number < 4 ? 2 : 4;
      if constexpr (kPlain && kHiLo) {
        plain_tiles_of<kTileK>(keys, first, count, nullptr, out.forward->e, nullptr,
                               out.backward != nullptr ? out.backward->k : nullptr);
      }
      put_z(number * 32 + static_cast<int>(lane_index()), kMeanwhileWarps * 32);
    };
    const HiLoInverse inverse{shared + Layout::kALow, kPlain ? hi_lo.b : rows.right, kPlain ? hi_lo.a : rows.left[1]};
    const bool exact_keys = kPlain && unscaled_keys(x.rule) && x.rule.decay == Decay::kNone;
    if constexpr (kInTurns<Layout>) {
      const TurnBuffers buffers{shared + Layout::kKeys,
                                shared + Layout::kKeysLo,
                                t,
                                shared + Layout::kA,
                                shared + Layout::kP,
                                shared + Layout::kPLow,
                                shared + Layout::kM,
                                shared + Layout::kPLow,
                                inverse,
                                &rows.split_keys,
                                &rows.split_erase,
                                rows.left[0],
                                exact_keys,
                                lo_parts};
      finish_in_turns<kTileK, RowForm::kMultiples>(buffers, warp, out, put_reads, put_keys_and_z);
    } else {
      FinishBuffers buffers{shared + Layout::kKeys,
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
                            inverse,
                            shared + Layout::kPLow,
                            exact_keys,
                            lo_parts ? shared + Layout::kKeysLo : nullptr,
                            lo_parts ? shared + Layout::kYLo : nullptr,
                            shared + Layout::kYLo};
      buffers.last_pair = rows.pair + kChunk - 1;
      finish_delta<kTileK, RowForm::kMultiples, kTraining, false, kHiLo>(buffers, warp, out, put_reads, put_keys_and_z);
    }
  } else {
    start_additive<kTileK>(shared + Layout::kP, out);
    if constexpr (kPlain) {
      plain_tiles_of<kTileK>(reads, 2 * warp, 2, rows.gamma, out.forward->q, rows.gamma,
                             out.backward != nullptr ? out.backward->q : nullptr);
      plain_tiles_of<kTileK>(keys, 2 * warp, 2, rows.keys, out.forward->x, rows.keys,
                             out.backward != nullptr ? out.backward->k : nullptr);
    }
    put_z(thread, kPrepareThreads);
    finish_additive();
  }
}

template <PrepareScalarTraits kTraits>
void launch_scalar(const PrepareArgs& args, int64_t chunks, bool fetched, void* stream) {
  using Layout = std::conditional_t<kTraits.in_turns, ScalarTurnsLayout<kTraits>, ScalarLayout<kTraits>>;
  PrecondMap<float> form;
  if (args.problem.boundaries != nullptr) form = precond_map_of(args.problem.rule);
  launch_prepare(prepare_scalar_kernel<Layout>, prepare_grid(args.problem, chunks), Layout::kBytes, stream, args, form,
                 static_cast<int>(fetched));
}

template <int kTileK, bool kDelta>
void launch_key(const PrepareArgs& args, PrepareKernel kernel, int64_t chunks, void* stream) {
  using Traits = PrepareScalarTraits;
  const bool fetched = kernel != PrepareKernel::kScalarRead && kernel != PrepareKernel::kSm80HiLoRead,
             plain = kernel == PrepareKernel::kScalarRows || kernel == PrepareKernel::kSm80HiLoRows,
             in_turns = kernel == PrepareKernel::kSm80HiLoRows || kernel == PrepareKernel::kSm80HiLoStreams ||
                        kernel == PrepareKernel::kSm80HiLoRead;
  if constexpr (kDelta) {
    if (wants_hi_lo(args.problem.rule)) {
      with_constants(
          [&](auto is_plain, auto turns) {
            launch_scalar<Traits{
                .k_tile = kTileK, .is_plain = is_plain, .saves = true, .is_hi_lo = true, .in_turns = turns}>(
                args, chunks, fetched, stream);
          },
          plain, in_turns);
      return;
    }
    // of raw rows there are numbers instead
    if (args.backward != nullptr)
      return launch_scalar<Traits{.k_tile = kTileK, .saves = true}>(args, chunks, fetched, stream);
  }
  plain ? launch_scalar<Traits{.k_tile = kTileK, .is_delta = kDelta, .is_plain = true}>(args, chunks, fetched, stream)
        : launch_scalar<Traits{.k_tile = kTileK, .is_delta = kDelta}>(args, chunks, fetched, stream);
}

}  // namespace

void prepare_scalar(const PrepareArgs& args, const PrepareChoice& choice, int k_tile, int64_t chunks, void* stream) {
  with_constants(
      [&](auto small, auto is_delta) { launch_key<small ? 64 : 128, is_delta>(args, choice.kernel, chunks, stream); },
      k_tile == 64, args.problem.rule.is_delta());
}

}  // namespace fw::cuda
