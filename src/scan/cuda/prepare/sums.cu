// prepare where all channels of a token decay alike, or not at all, and r or e is a sum of the raw q and k times scales
// per row (query feedback, corrected read). A block has one chunk of one value head, its raw rows of q and k in shared
// memory; T and P: sum_parts.cuh. The scans take rows, A and P (RowScales); or, where kChunkTiles, what a first pass
// over segments has fewer products with: E, Q, X and M.
//
// Roles, 256 threads:
//   warp      does                                             waits for                    says so to
//   all       a warp's 8 rows of q and k; their norms          sync_threads
//   1         sums of the log-decay, factors of rows                                        sync_threads
//   0 to 3    K K^T, T, A = (I + T)^-1                         read_made (kChunkTiles: claimed)
//   4 to 7    Q K^T, P; meanwhile Z (kChunkTiles: chunk tiles)                                       read_made (kChunkTiles: claimed)
#include <type_traits>

#include "scan/cuda/launchers.h"
#include "scan/cuda/prepare/launch.h"
#include "scan/cuda/prepare/sum_parts.cuh"

namespace fw::cuda {
namespace {

// Factors by row: prepare/scalar_parts.cuh; those of the rows of q and k in E and Q, besides gamma; z: of the
// values. read_q and read_k are also where |q|^2 and |k|^2 wait for the coefficients. split_keys: kChunkTiles: of the
// operands in Khat, and in the end keys too.
struct SumRows {
  float gamma[kChunk], erase_q[kChunk], erase_k[kChunk], read_q[kChunk], read_k[kChunk];
  float pair[kChunk], right[kChunk], keys[kChunk], z[kChunk];
  SplitFactors split_keys;
};

// What two neighbouring numbers of the raw q and k make, as float32.
struct SumPair {
  float of_q, of_k;
  FW_DEVICE float2 operator()(uint32_t q, uint32_t k) const {
    return make_float2(of_q * bf16_low(q) + of_k * bf16_low(k), of_q * bf16_high(q) + of_k * bf16_high(k));
  }
};

// Shared memory: the raw keys (kChunkTiles: become x), the raw reads, T, P. A overwrites the first 64 channels
// of the raw reads, and M that of T. As many blocks fit an SM as of plain rules.
template <int kTileK>
struct SumLayout {
  static constexpr int kBlocks = 4;
  static constexpr uint32_t kOperand = 2 * kChunk * kTileK, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kKeys = 0, kReads = kOperand, kT = 2 * kOperand, kA = kReads, kP = kT + kTriangle, kM = kT,
                            kRows = kP + kSw128Bytes;
  static constexpr uint32_t kBarriers = kRows + sizeof(SumRows), kBytes = kBarriers + 2 * 8;
  static_assert(kA % 1024 == 0 && kP % 1024 == 0 && kBlocks * (kBytes + 1024) <= 228 * 1024);
};

// The factors of this lane's row, from the norms that wait in `rows`.
template <int kTileK, class ChunkTile>
FW_DEVICE void put_factors(const Problem& x, const ChunkCoord& coord, int row, const GateBits& gates, SumRows& rows,
                           const ChunkTiles<kTileK, ChunkTile>& out) {
  const bool valid = row < coord.span.rows;
  const FrontCoefs<float> c = sum_coefs(x, coord, row, gates, rows.read_q[row], rows.read_k[row]);
  const auto put = [&](float* to, float coefficient) { to[row] = valid ? coefficient : 0.0f; };
  put(rows.read_q, c.r_q), put(rows.read_k, c.r_k);
  put(rows.erase_q, c.e_q), put(rows.erase_k, c.e_k);
  put(rows.right, c.w_k), put(rows.z, c.z_v);
  const float key = valid ? rows.keys[row] * c.w_k : 0.0f, gamma = valid ? rows.gamma[row] : 0.0f;
  const float2 erase = make_float2(-gamma * c.e_k, -gamma * c.e_q), read = make_float2(gamma * c.r_k, gamma * c.r_q);
  if constexpr (std::is_same_v<ChunkTile, RowScales>) {
    RowScales& numbers = *out.forward;
    numbers.e[row] = erase.x, numbers.erase_q[row] = erase.y, numbers.q[row] = read.y, numbers.read_k[row] = read.x,
    numbers.k[row] = key;
  } else {
    rows.keys[row] = key;
    split_into(rows.split_keys, row, key);
  }
  out.forward->z_scale[row] = out.z != nullptr ? (valid ? 1.0f : 0.0f) : valid ? c.z_v : 0.0f;
  put_row_scales<true>(out, row, key, erase, read);
}

// Q and E of the forward chunk tile, 64 channels of `count` groups of four rows from group `first` on, by one warp.
template <int kTileK>
FW_DEVICE void sum_tiles_of(const char* reads, const char* keys, const SumRows& rows, int sw128, int first, int count,
                            const FwdTiles<kTileK>* chunk_tile) {
  const int lane = static_cast<int>(lane_index());
  const auto store = [](const void* matrix, uint32_t at, const SumPair& sum, const uint32_t(&q)[4],
                        const uint32_t(&k)[4]) {
    uint32_t words[4];
    FW_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float2 x = sum(q[j], k[j]);
      words[j] = pack_bf16(x.x, x.y);
    }
    *reinterpret_cast<uint4*>(const_cast<char*>(static_cast<const char*>(matrix)) + at) =
        make_uint4(words[0], words[1], words[2], words[3]);
  };
  FW_NO_UNROLL
  for (int group = first; group < first + count; ++group) {
    const int row = 4 * group + (lane >> 3);
    const uint32_t at = static_cast<uint32_t>(sw128) * kSw128Bytes + static_cast<uint32_t>(row * 128 + (lane & 7) * 16);
    const uint4 q = *reinterpret_cast<const uint4*>(reads + at), k = *reinterpret_cast<const uint4*>(keys + at);
    const uint32_t of_q[4] = {q.x, q.y, q.z, q.w}, of_k[4] = {k.x, k.y, k.z, k.w};
    const float gamma = rows.gamma[row];
    store(chunk_tile->q, at, SumPair{gamma * rows.read_q[row], gamma * rows.read_k[row]}, of_q, of_k);
    store(chunk_tile->e, at, SumPair{-gamma * rows.erase_q[row], -gamma * rows.erase_k[row]}, of_q, of_k);
  }
}

// What is left for the forward scan: E, Q, X and M, or numbers, A and P.
enum class SumsLeave { kChunkTiles, kNumbers };

template <int kTileK, SumsLeave kLeaves>
__global__ void __launch_bounds__(kPrepareThreads, resident_blocks(SumLayout<kTileK>::kBlocks))
    prepare_sums_kernel(const __grid_constant__ PrepareArgs args) {
  using Layout = SumLayout<kTileK>;
  constexpr int kN = kTileK / 32;
  const Problem& x = args.problem;
  char* shared = shared_memory();
  const ChunkCoord coord = chunk_coord(x);
  if (coord.span.rows < 0) return;
  auto out = chunk_tiles_of<kTileK, std::conditional_t<kLeaves == SumsLeave::kChunkTiles, FwdTiles<kTileK>, RowScales>>(
      args, coord.item);
  out.backward = nullptr;  // there are numbers instead
  SumRows& rows = *reinterpret_cast<SumRows*>(shared + Layout::kRows);
  const int warp = uniform_warp();
  const PairWork<true> work(warp);
  char *const keys = shared + Layout::kKeys, *const reads = shared + Layout::kReads, *const t = shared + Layout::kT;

  const RawMatrices raw{reads, keys, nullptr};
  fetch_front<kN>(x, coord, raw);
  grid_dependency_wait();  // for the gates (PrepareArgs::after_gate_kernel)
  ScalarSteps<true> steps;
  if (warp == 1) steps = scalar_steps<true>(x, coord);
  const int row = coefficient_row(warp);
  const GateBits gates = gate_bits(x, coord, row);
  uint64_t *const claimed = start_half_barrier(shared + Layout::kBarriers), *const read_made = start_half_barrier(
                                                                                shared + Layout::kBarriers + 8);
  clear_above(shared + Layout::kP);
  if (warp == 1) put_decays<kTileK>(x, coord, steps, rows, out);
  front_arrived();
  if (uses_norms(x.rule)) {
    const float2 squares = fetched_squares<kN, true>(raw);
    const int lane = static_cast<int>(lane_index()), own = warp * kWarpRows + lane / 4;
    if (lane % 4 == 0) rows.read_q[own] = squares.x, rows.read_k[own] = squares.y;
  }
  sync_threads();
  if (row >= 0) put_factors(x, coord, row, gates, rows, out);

  float c[8][4];
  pair_products<kTileK, true>(work, shared_address(work.strict ? keys : reads), shared_address(keys), c);
  const SumPairs sums(x.rule, work, t, read_made);
  sums.hand_over(c);
  sync_threads();  // the products and the factors are there
  sums.mix(rows, c);
  store_pairs<true, false>(work, t, shared + Layout::kP, nullptr, c);

  const auto put_z = [&](int number) {
    const auto z_of = [&](int i) { return rows.z[i]; };
    if (out.z != nullptr)
      write_values<2>(x, coord, z_of, out.z, number * 32 + static_cast<int>(lane_index()), kMeanwhileWarps * 32);
  };
  if constexpr (kLeaves == SumsLeave::kNumbers) {
    finish_pairs(
        t, shared + Layout::kA, shared + Layout::kP, warp, args.pairs + coord.item, [](int) {}, put_z);
  } else {
    FinishBuffers buffers{keys,
                          t,
                          shared + Layout::kA,
                          shared + Layout::kP,
                          shared + Layout::kM,
                          keys,
                          reads,
                          t,
                          &rows.split_keys,
                          nullptr,
                          nullptr};
    buffers.claimed = claimed;
    buffers.last_pair = rows.pair + kChunk - 1;
    finish_delta<kTileK, RowForm::kMultiples, false, true, false>(
        buffers, warp, out, [&](int number) { sum_tiles_of(reads, keys, rows, 0, 4 * number, 4, out.forward); },
        [&](int number) {
          const int first = number < 4 ? 2 * number : 4 * number - 8, count = number < 4 ? 2 : 4;
          if constexpr (kTileK > 64) sum_tiles_of(reads, keys, rows, 1, first, count, out.forward);
          put_z(number);
        });
  }
}

template <int kTileK, SumsLeave kLeaves>
void launch_sums(const PrepareArgs& args, int64_t chunks, void* stream) {
  launch_prepare(prepare_sums_kernel<kTileK, kLeaves>, prepare_grid(args.problem, chunks), SumLayout<kTileK>::kBytes,
                 stream, args);
}
template <int kTileK>
void launch_sums(const PrepareArgs& args, int64_t chunks, void* stream) {
  args.keeps_intra_chunk ? launch_sums<kTileK, SumsLeave::kNumbers>(args, chunks, stream)
                         : launch_sums<kTileK, SumsLeave::kChunkTiles>(args, chunks, stream);
}

}  // namespace

void prepare_sums(const PrepareArgs& args, const PrepareChoice&, int k_tile, int64_t chunks, void* stream) {
  k_tile == 128 ? launch_sums<128>(args, chunks, stream) : launch_sums<64>(args, chunks, stream);
}

}  // namespace fw::cuda
