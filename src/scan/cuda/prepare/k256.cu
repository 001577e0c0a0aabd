// prepare for keys of 129 to 256 channels with one decay a token or none (k256_rule(), rule_traits.h): the numbers of a
// chunk's rows, P and, with an erase, A = (I + T)^-1 (tiles.h). T and P are products of the raw rows, a half of the
// channels after the other. They are multiplied by the matrix exp(G_i - G_j) and factors of rows and columns, in
// float32 (sums of q and k: prepare/sum_parts.cuh). A block has one chunk of one value head.
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       a warp's 8 rows of q and k; their norms
//   0, 7      coefficients of rows (coefficient_row())
//   1         sums of the log-decay, factors of rows
//   0 to 3    K K^T, T, then A;   4 to 7   Q K^T, P (additive: all of them P); of sums besides read_made, from 4 to 7 to 0 to 3
#include <type_traits>

#include "gpu/launch.h"
#include "gpu/sm80/stores.cuh"
#include "scan/cuda/launchers.h"
#include "scan/cuda/prepare/sum_parts.cuh"

namespace fw::cuda {
namespace {

// Factors by row, as prepare/scalar.cu (kSums: prepare/sums.cu) has them; squares: |q|^2 and |k|^2.
struct K256Rows {
  float pair[kChunk], left[2][kChunk], right[kChunk], gamma[kChunk], keys[kChunk], squares[2][kChunk];
};
struct K256SumRows {
  float pair[kChunk], erase_q[kChunk], erase_k[kChunk], read_q[kChunk], read_k[kChunk], right[kChunk], gamma[kChunk],
      keys[kChunk], squares[2][kChunk];
};

// Shared memory: 128 channels of the raw rows, T, A and P; kSums: a barrier.
template <K256Form kForm>
struct K256Layout {
  using Rows = std::conditional_t<kForm == K256Form::kSums, K256SumRows, K256Rows>;
  static constexpr uint32_t kHalf = 2 * kChunk * kHalfTileK, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kKeys = 0, kReads = 2 * kHalf, kT = 4 * kHalf, kA = kT + kTriangle, kP = kA + kSw128Bytes,
                            kRows = kP + kSw128Bytes;
  static constexpr uint32_t kBarrier = kRows + sizeof(Rows), kBytes = kBarrier + (kForm == K256Form::kSums ? 8 : 0);
  static_assert(kBytes <= kSm80SharedBytes);
};

// The warp's rows of a half with `channels` of its own, of any kind: asynchronously where they are vectors.
FW_DEVICE void issue_k_half(const TokenArg& tensor, const ChunkCoord& coord, int channels, bool pieces, char* matrix) {
  constexpr int kN = kHalfTileK / 32;
  if (pieces) return fetch_rows<kN>(tensor, coord, channels, matrix);
  const Rows rows = chunk_rows(tensor, coord);
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const int row = static_cast<int>(warp_index()) * kWarpRows + r;
    float x[kN] = {};
    if (row < coord.span.rows) load_channels(rows, row, kN * static_cast<int>(lane_index()), channels, x);
    store_packed(matrix + lane_offset<kN>(r), pack_channels(x));
  }
}

// By a lane: the factors of its row, and the numbers that are left of it.
template <bool kDelta>
FW_DEVICE void put_factors(const Problem& x, const ChunkCoord& coord, int row, const PlainGates& gates, K256Rows& rows,
                           RowScales& out) {
  const bool norms = uses_norms(x.rule);
  const float q2 = norms ? rows.squares[0][row] : 0.0f, k2 = norms ? rows.squares[1][row] : 0.0f;
  FrontCoefs<float> c = plain_coefs(x, gates, q2, k2);
  if (row >= coord.span.rows) c.r_q = c.e_k = c.w_k = c.z_v = 0;
  const float gamma = rows.gamma[row];
  rows.left[0][row] = c.r_q, rows.left[1][row] = c.e_k, rows.right[row] = c.w_k;
  out.e[row] = kDelta ? -gamma * c.e_k : 0.0f, out.q[row] = gamma * c.r_q, out.k[row] = rows.keys[row] * c.w_k,
  out.z_scale[row] = c.z_v;
  out.q2[row] = q2, out.k2[row] = k2;
}
FW_DEVICE void put_sum_factors(const Problem& x, const ChunkCoord& coord, int row, const GateBits& gates,
                               K256SumRows& rows, RowScales& out, RowNorms* norms) {
  const bool uses = uses_norms(x.rule);
  const float q2 = uses ? rows.squares[0][row] : 0.0f, k2 = uses ? rows.squares[1][row] : 0.0f;
  FrontCoefs<float> c = sum_coefs(x, coord, row, gates, q2, k2);
  if (row >= coord.span.rows) c = {};
  const float gamma = rows.gamma[row];
  rows.read_q[row] = c.r_q, rows.read_k[row] = c.r_k, rows.erase_q[row] = c.e_q, rows.erase_k[row] = c.e_k,
  rows.right[row] = c.w_k;
  out.e[row] = -gamma * c.e_k, out.q[row] = gamma * c.r_q, out.k[row] = rows.keys[row] * c.w_k,
  out.z_scale[row] = c.z_v;
  out.erase_q[row] = -gamma * c.e_q, out.read_k[row] = gamma * c.r_k;
  if (norms != nullptr) norms->q2[row] = q2, norms->k2[row] = k2;
}

template <K256Form kForm>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    prepare_k256_kernel(const __grid_constant__ K256PrepareArgs args, int q_pieces, int k_pieces) {
  using Layout = K256Layout<kForm>;
  constexpr bool kDelta = kForm != K256Form::kAdditive, kSums = kForm == K256Form::kSums;
  constexpr int kN = kHalfTileK / 32;
  const Problem& x = args.problem;
  char* const shared = shared_memory();
  const ChunkCoord coord = chunk_coord(x);
  if (coord.span.rows < 0) return;
  RowScales& out = args.numbers[coord.item];
  auto& rows = *reinterpret_cast<typename Layout::Rows*>(shared + Layout::kRows);
  const int warp = uniform_warp(), row = coefficient_row(warp);
  const PairWork<kDelta> work(warp);

  ScalarSteps<false> steps;
  if (warp == 1) steps = scalar_steps<false>(x, coord);
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int first = half * kHalfTileK, channels = x.K - first;
    issue_k_half(from_channel(x.in.k, first), coord, channels, k_pieces != 0,
                 shared + Layout::kKeys + half * Layout::kHalf);
    issue_k_half(from_channel(x.in.q, first), coord, channels, q_pieces != 0,
                 shared + Layout::kReads + half * Layout::kHalf);
  }
  cp_async_commit();
  const auto gates = [&] {
    if constexpr (kSums) {
      return gate_bits(x, coord, row);
    } else {
      return plain_gates(x, coord, row);
    }
  }();
  uint64_t* read_made = nullptr;
  if constexpr (kSums) read_made = start_half_barrier(shared + Layout::kBarrier);
  clear_above(shared + Layout::kP);
  if (warp == 1) {
    float gamma_end;
    scalar_decays(x, coord, steps, rows, gamma_end);
    if (lane_index() < 4) out.gamma[lane_index()] = gamma_end;
  }
  front_arrived();
  if (uses_norms(x.rule)) {
    float2 squares = make_float2(0, 0);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 own = fetched_squares<kN, true>(
          {shared + Layout::kReads + half * Layout::kHalf, shared + Layout::kKeys + half * Layout::kHalf, nullptr});
      squares.x += own.x, squares.y += own.y;
    }
    const int lane = static_cast<int>(lane_index()), own = warp * kWarpRows + lane / 4;
    if (lane % 4 == 0) rows.squares[0][own] = squares.x, rows.squares[1][own] = squares.y;
  }
  sync_threads();
  if (row >= 0) {
    if constexpr (kSums) {
      put_sum_factors(x, coord, row, gates, rows, out, args.norms != nullptr ? args.norms + coord.item : nullptr);
    } else {
      put_factors<kDelta>(x, coord, row, gates, rows, out);
    }
  }

  float c[8][4];
  const uint32_t base = shared_address(shared), left = base + (work.strict ? Layout::kKeys : Layout::kReads),
                 right = base + Layout::kKeys;
  pair_products<kHalfTileK>(work, left, right, c);
  add_pair_products<kHalfTileK>(work, left + Layout::kHalf, right + Layout::kHalf, c);
  if constexpr (kSums) {
    const SumPairs sums(x.rule, work, shared + Layout::kT, read_made);
    sums.hand_over(c);
    sync_threads();  // the products and the factors are there
    sums.mix(rows, c);
  } else {
    sync_threads();  // the factors are there
    const float(&of_rows)[kChunk] = rows.left[work.strict];
    scale_pairs(work, rows, {of_rows[work.row()], of_rows[work.row() + 8]}, c);
  }
  store_pairs<kDelta, false>(work, shared + Layout::kT, shared + Layout::kP, nullptr, c);
  if constexpr (kDelta) {
    if (warp < 4) {
      invert<false>(reinterpret_cast<float*>(shared + Layout::kT), shared + Layout::kA, {}, warp, [] {});
    } else {
      overlap_invert<false>();
    }
  }
  store_block([&](auto&& copy) {
    if constexpr (kDelta) copy(args.pairs[coord.item].a, shared + Layout::kA, kSw128Bytes);
    copy(args.pairs[coord.item].p, shared + Layout::kP, kSw128Bytes);
  });
}

template <K256Form kForm>
void launch_k256_prepare(const K256PrepareArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  const auto pieces = [&](const TokenArg& a) { return is_vec16(a, x.K) ? 1 : 0; };
  launch(prepare_k256_kernel<kForm>, prepare_grid(x, chunks), kPrepareThreads, K256Layout<kForm>::kBytes, stream, args,
         pieces(x.in.q), pieces(x.in.k));
}

}  // namespace

void k256_prepare_rows(const K256PrepareArgs& args, int64_t chunks, void* stream) {
  args.problem.rule.is_delta() ? launch_k256_prepare<K256Form::kRows>(args, chunks, stream)
                               : launch_k256_prepare<K256Form::kAdditive>(args, chunks, stream);
}
void k256_prepare_sums(const K256PrepareArgs& args, int64_t chunks, void* stream) {
  launch_k256_prepare<K256Form::kSums>(args, chunks, stream);
}

}  // namespace fw::cuda
