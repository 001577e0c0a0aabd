// prepare where value heads share keys, of the rules whose rows are left to the scans (scalar.cu: kRows). A block has
// one chunk of one key head. Of its value heads it has up to kMostGroupedHeads, one after the other. The raw rows,
// their norms and the products K K^T and Q K^T are made once; what a value head adds to them is factors of rows and
// columns. A, P and the numbers are those of scalar.cu to the bit.
//
// Roles, 256 threads; between the parts sync_threads():
//   warp      does
//   all       a warp's 8 rows of q and k; their norms
//   0 to 3    K K^T, a value head's T, then A = (I + T)^-1;   4 to 7   Q K^T, a value head's P; meanwhile
//   5         the next value head's decays and coefficients, two rows a lane
#include "scan/cuda/launchers.h"
#include "scan/cuda/prepare/launch.h"
#include "scan/cuda/prepare/scalar_rows.cuh"

namespace fw::cuda {
namespace {

constexpr int kFactorWarp = 5;

// Shared memory: the raw keys and reads, then their products; T; A; P; factors of rows of this value head and of the
// next.
template <int kTileK>
struct GroupedLayout {
  static constexpr uint32_t kOperand = 2 * kChunk * kTileK, kTriangle = (kTriangleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kProducts = 8 * kPrepareThreads * 4 * sizeof(float);  // of a thread
  static constexpr uint32_t kKeys = 0, kReads = kOperand, kT = std::max(2 * kOperand, kProducts), kA = kT + kTriangle,
                            kP = kA + kSw128Bytes;
  static constexpr uint32_t kRows = kP + kSw128Bytes;
  static constexpr uint32_t kSquares = kRows + 2 * sizeof(ScalarRows), kBytes = kSquares + 2 * kChunk * sizeof(float);
  static_assert(kA % 1024 == 0 && kGroupedBlocks * (kBytes + 1024) <= 228 * 1024);
};

template <int kTileK>
__global__ void __launch_bounds__(kPrepareThreads, resident_blocks(kGroupedBlocks))
    prepare_grouped_kernel(const __grid_constant__ PrepareArgs args, int heads) {
  using Layout = GroupedLayout<kTileK>;
  constexpr int kN = kTileK / 32;
  const Problem& x = args.problem;
  char* shared = shared_memory();
  const int splits = (x.group + heads - 1) / heads, block = static_cast<int>(block_index_x()), split = block % splits;
  const ChunkCoord coord = chunk_coord(x, block / splits * x.group + split * heads);
  if (coord.span.rows < 0) return;
  ScalarRows* const rows_of = reinterpret_cast<ScalarRows*>(shared + Layout::kRows);
  float* const squares_of = reinterpret_cast<float*>(shared + Layout::kSquares);  // [2][kChunk]: |q|^2, |k|^2
  const int warp = uniform_warp(), lane = static_cast<int>(lane_index());

  const RawMatrices raw{shared + Layout::kReads, shared + Layout::kKeys, nullptr};
  fetch_front<kN>(x, coord, raw);
  grid_dependency_wait();  // for the gates (PrepareArgs::after_gate_kernel)
  clear_above(shared + Layout::kP);

  // The factors of value head `head` of the block, by kFactorWarp: what it loads, and what comes of it.
  ScalarSteps<false> steps;
  PlainGates gates[2];
  const auto coord_of = [&](int head) {
    ChunkCoord p = coord;
    p.hv += head, p.item += head;
    return p;
  };
  const auto load_factors = [&](int head) {
    const ChunkCoord p = coord_of(head);
    steps = scalar_steps<false>(x, p);
    FW_UNROLL for (int i = 0; i < 2; ++i) gates[i] = plain_gates(x, p, lane + 32 * i);
  };
  const auto put_factors = [&](int head) {
    const ChunkCoord p = coord_of(head);
    ScalarRows& rows = rows_of[head % 2];
    auto out = chunk_tiles_of<kTileK, RowScales>(args, p.item);
    out.backward = nullptr;
    put_decays<kTileK>(x, p, steps, rows, out);
    sync_warp();
    FW_UNROLL for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i;
      rows.left[0][row] = squares_of[row], rows.left[1][row] = squares_of[kChunk + row];
      plain_factors<true, false>(x, p, row, gates[i], rows, nullptr, out);
    }
  };
  if (warp == kFactorWarp) load_factors(0);
  front_arrived();
  if (uses_norms(x.rule)) {
    const float2 squares = fetched_squares<kN, true>(raw);
    const int own = warp * kWarpRows + lane / 4;
    if (lane % 4 == 0) squares_of[own] = squares.x, squares_of[kChunk + own] = squares.y;
  }
  sync_threads();
  if (warp == kFactorWarp) put_factors(0);
  const PairWork<true> of_warp(warp);
  // of this thread, tile by tile; not in registers: there are too few
  float4* const products = reinterpret_cast<float4*>(shared) + thread_index();
  {
    float c[8][4];
    const uint32_t base = shared_address(shared);
    pair_products<kTileK, true>(of_warp, base + (of_warp.strict ? Layout::kKeys : Layout::kReads), base + Layout::kKeys,
                                c);
    sync_threads();  // nobody reads the rows any more
    FW_UNROLL for (int n = 0; n < 8; ++n) {
      if (of_warp.has(n / 2)) products[n * kPrepareThreads] = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
    }
  }

  const int count = min(heads, x.group - split * heads);
  FW_NO_UNROLL
  for (int head = 0; head < count; ++head) {
    sync_threads();  // the factors are there; and what the value head before has left has been taken away
    const PairWork<true>& work = of_warp;
    ScalarRows& rows = rows_of[head % 2];
    const float(&left)[kChunk] = rows.left[work.strict];
    char* const t = shared + Layout::kT;
    const PairScales<true, ScalarRows> scales(work, rows, {left[work.row()], left[work.row() + 8]}, rows.right);
    const TriangleRows triangle = triangle_rows(t, work.block);
    const uint32_t sw128 = sw128_rows(work.block);
    FW_UNROLL for (int n = 0; n < 8; ++n) {
      if (!work.has(n / 2)) continue;
      const float4 raw_product = products[n * kPrepareThreads];
      float c[4] = {raw_product.x, raw_product.y, raw_product.z, raw_product.w};
      scales.scale(n, c);
      if (work.strict) {
        store_tile(triangle, n, c);
      } else {
        store_tile(shared + Layout::kP, sw128, n, c);
      }
    }

    finish_pairs(
        t, shared + Layout::kA, shared + Layout::kP, warp, args.pairs + coord.item + head,
        [&](int number) {
          if (number != kFactorWarp - 4 || head + 1 == count) return;
          load_factors(head + 1);
          put_factors(head + 1);
        },
        [](int) {});
  }
}

template <int kTileK>
void launch_grouped(const PrepareArgs& args, int heads, int64_t chunks, void* stream) {
  const Problem& x = args.problem;
  Dim3 grid = prepare_grid(x, chunks);
  grid.x = static_cast<unsigned>(x.HV / x.group * ((x.group + heads - 1) / heads));
  launch_prepare(prepare_grouped_kernel<kTileK>, grid, GroupedLayout<kTileK>::kBytes, stream, args, heads);
}

}  // namespace

void prepare_grouped(const PrepareArgs& args, const PrepareChoice& choice, int k_tile, int64_t chunks, void* stream) {
  const int heads = choice.heads;
  k_tile == 128 ? launch_grouped<128>(args, heads, chunks, stream) : launch_grouped<64>(args, heads, chunks, stream);
}

}  // namespace fw::cuda
