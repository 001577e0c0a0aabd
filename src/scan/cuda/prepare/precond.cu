// prepare where all channels of a token decay alike, or not at all. w or r is k or q times M of the preconditioner
// (made here, from A before the chunk) times a scale per row. A block has one chunk of one value head. The raw rows of
// q and k are operands as they came from memory. What they are multiplied with is a factor of results, as for plain
// rules (prepare/scalar.cu). Of rules with an erase (delta) the forward scan takes the raw rows (RowTiles). K (.)
// M is then a tile of its own alongside k. Where there is no erase it overwrites k (q (.) M: of q).
//
// Roles, 256 threads; before A of the chunk is read: grid_dependency_wait():
//   warp      does
//   all       a warp's 8 rows of q and k, their norms, M of its tokens from what the warps before left (common/precond_rows.cuh)
//   1         sums of the log-decay, factors of rows
//   0 to 3    products of k, T, A = (I + T)^-1;   4 to 7   products of q, P, meanwhile chunk tiles and Z (finish.cuh; barrier: claimed)
#include <algorithm>
#include <type_traits>

#include "gpu/launch.h"
#include "scan/cuda/launchers.h"
#include "scan/cuda/prepare/scalar_parts.cuh"

namespace fw::cuda {
namespace {

// Factors by row: prepare/scalar_parts.cuh; left: of the rows of P and of T, and where |q|^2 and |k|^2 wait for
// the coefficients. Z: of the values; gamma, keys: in the end of the operands in the chunk tiles q and Khat, as
// split_keys; split_erase: of -E.
struct PrecondFactors {
  float pair[kChunk], left[2][kChunk], right[kChunk], gamma[kChunk], keys[kChunk], z[kChunk];
  SplitFactors split_keys, split_erase;
};

// Shared memory: the raw keys, the raw reads (become q of the backward chunk tile), delta k (.) M (becomes x), P, T.
// For the forward chunk tile alone A overwrites the raw reads, and M of the chunk tiles overwrites T; else y
// overwrites T. What runs of rows make of A is in T's memory before T (additive: last).
struct PreparePrecondTraits {
  int k_tile = 128;  // 64 or 128
  bool is_delta = true;
  bool saves = false;  // delta with backward chunk tiles; additive: if requested
};

template <PreparePrecondTraits kTraits>
struct PrecondLayout {
  static constexpr int kTileK = kTraits.k_tile;
  static constexpr bool kDelta = kTraits.is_delta, kTraining = kTraits.saves;
  static constexpr int kBlocks = !kDelta ? 4 : kTraining ? 2 : 3;
  static constexpr uint32_t kOperand = 2 * kChunk * kTileK, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024,
                            kRuns = sizeof(RunShared<kTileK / 32>);
  static constexpr uint32_t kKeys = 0, kReads = kOperand, kScaled = 2 * kOperand, kP = (kDelta ? 3 : 2) * kOperand;
  static constexpr uint32_t kA = kTraining ? kP + kSw128Bytes : kReads,
                            kT = kP + (kDelta && kTraining ? 3 : 1) * kSw128Bytes;
  static constexpr uint32_t kM = kTraining ? kP + 2 * kSw128Bytes : kT;
  static constexpr uint32_t kWork = !kDelta     ? (kRuns + 15) / 16 * 16
                                    : kTraining ? std::max(kTriangle, kOperand)
                                                : std::max<uint32_t>(kTriangleBytes, kSw128Bytes);
  static constexpr uint32_t kRows = kT + kWork;
  static constexpr uint32_t kBarrier = kRows + sizeof(PrecondFactors), kBytes = kBarrier + 8;
  using ChunkTile = std::conditional_t<kDelta, RowTiles<kTileK>, FwdTiles<kTileK>>;
  static_assert(kRuns <= kWork && kRows % 16 == 0 && kA % 1024 == 0 && kM % 1024 == 0 &&
                kBlocks * (kBytes + 1024) <= 228 * 1024);
};

// The factors of this lane's row, from the norms that wait in `rows`.
template <bool kDelta, class ChunkTile>
FW_DEVICE void put_factors(const Problem& x, const ChunkCoord& coord, int row, const PlainGates& gates,
                           PrecondFactors& rows, ChunkTile* chunk_tile, bool z_tile) {
  const bool valid = row < coord.span.rows;
  FrontCoefs<float> c;
  if (valid) c = plain_coefs(x, gates, rows.left[0][row], rows.left[1][row]);
  const float gamma = rows.gamma[row], suffix = rows.keys[row];
  rows.left[0][row] = c.r_q, rows.left[1][row] = c.e_k, rows.right[row] = c.w_k;
  rows.gamma[row] = gamma * c.r_q, rows.keys[row] = suffix * c.w_k, rows.z[row] = c.z_v;
  if constexpr (kDelta) {
    split_into(rows.split_keys, row, suffix * c.w_k);
    split_into(rows.split_erase, row, -gamma * c.e_k);
    chunk_tile->e[row] = -gamma * c.e_k, chunk_tile->q[row] = gamma * c.r_q;
  }
  chunk_tile->z_scale[row] = !z_tile ? c.z_v : valid ? 1.0f : 0.0f;
}

// The warp's rows of `raw` times M, into the same rows of `to`.
template <int kN>
FW_DEVICE void scale_by_m(const char* keys, const char* raw, char* to, const RunGates& gates,
                          PrecondRows<kN>& precond) {
  FW_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    float k[kN], y[kN], m[kN];
    fetched_row(keys, r, k);
    fetched_row(raw, r, y);
    precond.next(of_token(gates.alpha, r), of_token(gates.gain, r), k, m);
    FW_UNROLL
    for (int j = 0; j < kN; ++j) y[j] *= m[j];
    store_packed(to + lane_offset<kN>(r), pack_channels(y));
  }
}

template <class Layout>
__global__ void __launch_bounds__(kPrepareThreads, resident_blocks(Layout::kBlocks))
    prepare_precond_kernel(const __grid_constant__ PrepareArgs args, const __grid_constant__ PrecondMap<float> form) {
  constexpr int kTileK = Layout::kTileK, kN = kTileK / 32;
  constexpr bool kDelta = Layout::kDelta, kTraining = Layout::kTraining;
  const Problem& x = args.problem;
  char* shared = shared_memory();
  const ChunkCoord coord = chunk_coord(x);
  if (coord.span.rows < 0) return grid_dependency_wait();
  auto out = chunk_tiles_of<kTileK, typename Layout::ChunkTile>(args, coord.item);
  if constexpr (kDelta && !kTraining) out.backward = nullptr;
  PrecondFactors& rows = *reinterpret_cast<PrecondFactors*>(shared + Layout::kRows);
  const int warp = uniform_warp(), lane = static_cast<int>(lane_index());
  const PairWork<kDelta> work(warp);
  char *const keys = shared + Layout::kKeys, *const reads = shared + Layout::kReads, *const t = shared + Layout::kT;
  char *const target = kDelta                        ? shared + Layout::kScaled
                       : x.rule.preconditions_read() ? reads
                                                     : keys,
              *const writes = kDelta ? target : keys;

  ScalarSteps<false> steps;
  if (warp == 1) steps = scalar_steps<false>(x, coord);
  const RawMatrices raw{reads, keys, nullptr};
  fetch_front<kN>(x, coord, raw);
  grid_dependency_wait();  // for A before the chunk (precond_forward); inputs were there before that began
  PrecondRows<kN> precond;
  precond.load(x, coord, form, reinterpret_cast<RunShared<kN>*>(t));
  const int own = warp * kWarpRows + lane / 4;
  float g = 0, beta = 0;
  if (own < coord.span.rows)
    g = gate_of_row(x.in.precond_g, coord, own), beta = gate_of_row(x.in.precond_beta, coord, own);
  const int row = coefficient_row(warp);
  const PlainGates gates = plain_gates(x, coord, row);
  uint64_t* const claimed = start_half_barrier(shared + Layout::kBarrier);
  clear_above(shared + Layout::kP);
  if (warp == 1) put_decays<kTileK>(x, coord, steps, rows, out);
  front_arrived();
  float2 squares = make_float2(0, 0);
  if (uses_norms(x.rule)) squares = fetched_squares<kN, true>(raw);
  if (lane % 4 == 0) rows.left[0][own] = squares.x, rows.left[1][own] = squares.y;
  const RunGates run = run_gates(x.rule, g, beta, squares.y);
  put_run<kN>(run, warp, lane, *precond.shared, [&](int r, float(&k)[kN]) { fetched_row(keys, r, k); });
  sync_threads();
  if (row >= 0) put_factors<kDelta>(x, coord, row, gates, rows, out.forward, out.z != nullptr);
  precond.start();
  scale_by_m<kN>(keys, target == reads ? reads : keys, target, run, precond);
  sync_threads();

  float c[8][4];
  pair_products<kTileK, kDelta>(work, shared_address(work.strict ? keys : reads), shared_address(writes), c);
  const float(&left)[kChunk] = rows.left[work.strict];
  scale_pairs(work, rows, {left[work.row()], left[work.row() + 8]}, c);
  store_pairs<kDelta, false>(work, t, shared + Layout::kP, nullptr, c);

  const auto z_of = [&](int i) { return rows.z[i]; };
  if constexpr (kDelta) {
    FinishBuffers buffers{writes, t, shared + Layout::kA, shared + Layout::kP, shared + Layout::kM, keys,
                          reads,  t, &rows.split_keys,    &rows.split_erase,   rows.gamma};
    buffers.claimed = claimed;
    buffers.last_pair = rows.pair + kChunk - 1;
    finish_delta<kTileK, RowForm::kMultiples, kTraining, !kTraining, false>(
        buffers, warp, out, [](int) {},  // who says so has made its products of the reads, which a overwrites
        [&](int number) {
          const int first = number < 4 ? 2 * number : 4 * number - 8, count = number < 4 ? 2 : 4;
          if constexpr (kTraining)
            plain_tiles_of<kTileK>(writes, first, count, rows.keys, out.backward->k, nullptr, nullptr);
          if (out.z != nullptr) write_values(x, coord, z_of, out.z, number * 32 + lane, kMeanwhileWarps * 32);
        });
  } else {
    start_additive<kTileK>(shared + Layout::kP, out);
    plain_tiles_of<kTileK>(reads, 2 * warp, 2, rows.gamma, out.forward->q, rows.gamma,
                           out.backward != nullptr ? out.backward->q : nullptr);
    plain_tiles_of<kTileK>(keys, 2 * warp, 2, rows.keys, out.forward->x, rows.keys,
                           out.backward != nullptr ? out.backward->k : nullptr);
    if (out.z != nullptr) write_values(x, coord, z_of, out.z, static_cast<int>(thread_index()), kPrepareThreads);
    finish_additive();
  }
}

template <PreparePrecondTraits kTraits>
void launch_form(const PrepareArgs& args, int64_t chunks, void* stream) {
  using Layout = PrecondLayout<kTraits>;
  launch_overlapped(prepare_precond_kernel<Layout>, prepare_grid(args.problem, chunks), kPrepareThreads, Layout::kBytes,
                    stream, args, precond_map_of(args.problem.rule));
}
template <int kTileK>
void launch_key(const PrepareArgs& args, int64_t chunks, void* stream) {
  using Traits = PreparePrecondTraits;
  if (!args.problem.rule.is_delta()) {
    launch_form<Traits{.k_tile = kTileK, .is_delta = false}>(args, chunks, stream);
  } else if (args.backward != nullptr) {
    launch_form<Traits{.k_tile = kTileK, .saves = true}>(args, chunks, stream);
  } else {
    launch_form<Traits{.k_tile = kTileK}>(args, chunks, stream);
  }
}

}  // namespace

void prepare_precond(const PrepareArgs& args, const PrepareChoice&, int k_tile, int64_t chunks, void* stream) {
  k_tile == 128 ? launch_key<128>(args, chunks, stream) : launch_key<64>(args, chunks, stream);
}

}  // namespace fw::cuda
