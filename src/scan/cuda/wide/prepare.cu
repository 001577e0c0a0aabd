// prepare for keys of 129 to 256 channels (wide_rule(), call/select.h): the numbers of a chunk's rows, P and, with an erase, A = (I + T)^-1 (tiles.h). T and P
// are products of the raw rows, a half of the channels after the other, times the matrix exp(G_i - G_j) and factors of rows and columns, in float32. A block
// has one chunk of one value head.
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       a warp's 8 rows of q and k; their norms
//   0, 7      coefficients of rows (coefficient_row())
//   1         sums of the log-decay, factors of rows
//   0 to 3    K K^T, T, then A;   4 to 7   Q K^T, P (offline: all of them P)
#include "scan/cuda/call/launch.h"
#include "scan/cuda/prepare/kernels.h"
#include "scan/cuda/prepare/scalar_parts.cuh"

namespace fw::cuda {
namespace {

// Factors by row, as prepare/scalar.cu has them; squares: |q|^2 and |k|^2.
struct WideRows {
  float pair[kChunk], left[2][kChunk], right[kChunk], gamma[kChunk], keys[kChunk], squares[2][kChunk];
};

// Shared memory: halves of the raw rows, T, A and P.
struct WideLayout {
  static constexpr uint32_t kHalf = 2 * kChunk * kHalfKey, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kKeys = 0, kReads = 2 * kHalf, kT = 4 * kHalf, kA = kT + kTriangle, kP = kA + kPanelBytes, kRows = kP + kPanelBytes;
  static constexpr uint32_t kBytes = kRows + sizeof(WideRows);
  static_assert(2 * (kBytes + 1024) <= 228 * 1024);
};

// The half of a tensor of keys that begins at channel `first`.
FW_DEVICE TokenArg half_of(TokenArg tensor, int first) {
  tensor.data = static_cast<char*>(tensor.data) + first * (tensor.bf16 != 0 ? 2 : 4);
  return tensor;
}

// The warp's rows of a half with `channels` of its own, of any kind: asynchronously where they are whole pieces.
FW_DEVICE void bring_half(const TokenArg& tensor, const ChunkPlace& place, int channels, bool pieces, char* matrix) {
  constexpr int kN = kHalfKey / 32;
  if (pieces) return fetch_rows<kN>(tensor, place, channels, matrix);
  const Rows rows = chunk_rows(tensor, place);
  FW_NO_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const int row = static_cast<int>(warp_index()) * kWarpRows + r;
    float x[kN] = {};
    if (row < place.span.rows) load_channels(rows, row, kN * static_cast<int>(lane_index()), channels, x);
    store_packed(matrix + lane_offset<kN>(r), pack_channels(x));
  }
}

template <bool kOnline>
__global__ void __launch_bounds__(kPrepareThreads, 2) wide_prepare_kernel(const __grid_constant__ WidePrepareArgs args, int q_pieces, int k_pieces) {
  using Layout = WideLayout;
  constexpr int kN = kHalfKey / 32;
  const Problem& x = args.problem;
  char* const shared = shared_memory();
  const ChunkPlace place = chunk_place(x);
  if (place.span.rows < 0) return;
  ChunkNumbers& out = args.numbers[place.item];
  WideRows& rows = *reinterpret_cast<WideRows*>(shared + Layout::kRows);
  const int warp = uniform_warp(), row = coefficient_row(warp);
  const PairWork<kOnline> work(warp);

  uint2 steps = make_uint2(0, 0);
  if (warp == 1) steps = scalar_steps(x, place);
  FW_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int first = half * kHalfKey, channels = x.K - first;
    bring_half(half_of(x.in.k, first), place, channels, k_pieces != 0, shared + Layout::kKeys + half * Layout::kHalf);
    bring_half(half_of(x.in.q, first), place, channels, q_pieces != 0, shared + Layout::kReads + half * Layout::kHalf);
  }
  cp_async_commit();
  const PlainGates gates = plain_gates(x, place, row);
  clear_above(shared + Layout::kP);
  if (warp == 1) {
    float gamma_end;
    scalar_decays(x, place, steps, rows, gamma_end);
    if (lane_index() < 4) out.gamma[lane_index()] = gamma_end;
  }
  front_arrived();
  if (uses_norms(x.rule)) {
    float2 squares = make_float2(0, 0);
    FW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float2 own = fetched_squares<kN, true>({shared + Layout::kReads + half * Layout::kHalf, shared + Layout::kKeys + half * Layout::kHalf, nullptr});
      squares.x += own.x, squares.y += own.y;
    }
    const int lane = static_cast<int>(lane_index()), own = warp * kWarpRows + lane / 4;
    if (lane % 4 == 0) rows.squares[0][own] = squares.x, rows.squares[1][own] = squares.y;
  }
  sync_threads();
  if (row >= 0) {
    const bool norms = uses_norms(x.rule);
    const float q2 = norms ? rows.squares[0][row] : 0.0f, k2 = norms ? rows.squares[1][row] : 0.0f;
    FrontCoefs<float> c = plain_coefs(x, gates, q2, k2);
    if (row >= place.span.rows) c.r_q = c.e_k = c.w_k = c.z_v = 0;
    const float gamma = rows.gamma[row];
    rows.left[0][row] = c.r_q, rows.left[1][row] = c.e_k, rows.right[row] = c.w_k;
    out.e[row] = kOnline ? -gamma * c.e_k : 0.0f, out.q[row] = gamma * c.r_q, out.k[row] = rows.keys[row] * c.w_k, out.z_scale[row] = c.z_v;
    out.q2[row] = q2, out.k2[row] = k2;
  }

  float c[8][4];
  const uint32_t base = shared_address(shared), left = base + (work.strict ? Layout::kKeys : Layout::kReads), right = base + Layout::kKeys;
  pair_products<kHalfKey>(work, left, right, c);
  add_pair_products<kHalfKey>(work, left + Layout::kHalf, right + Layout::kHalf, c);
  sync_threads();  // the factors are there
  const float(&of_rows)[kChunk] = rows.left[work.strict];
  scale_pairs(work, rows, {of_rows[work.row()], of_rows[work.row() + 8]}, c);
  store_pairs<kOnline, false>(work, shared + Layout::kT, shared + Layout::kP, nullptr, c);
  if constexpr (kOnline) {
    if (warp < 4) {
      invert<false>(reinterpret_cast<float*>(shared + Layout::kT), shared + Layout::kA, {}, warp, [] {});
    } else {
      beside_invert();
    }
  }
  fence_async_shared();
  sync_threads();
  if (thread_index() == 0) {
    if constexpr (kOnline) bulk_store(args.pairs[place.item].a, shared + Layout::kA, kPanelBytes);
    bulk_store(args.pairs[place.item].p, shared + Layout::kP, kPanelBytes);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

}  // namespace

void wide_prepare(const WidePrepareArgs& args, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  if (x.K > kWideKey || x.K <= kHalfKey) fail_internal("wide_prepare: expected K from {} to {}, got {}", kHalfKey + 1, kWideKey, x.K);
  const auto pieces = [&](const TokenArg& a) { return whole_pieces(a, x.K) ? 1 : 0; };
  launch(x.rule.online() ? wide_prepare_kernel<true> : wide_prepare_kernel<false>, prepare_grid(x, chunks), kPrepareThreads, WideLayout::kBytes, stream, args,
         pieces(x.in.q), pieces(x.in.k));
}

}  // namespace fw::cuda
