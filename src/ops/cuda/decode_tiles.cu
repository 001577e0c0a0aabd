// The runs of a decoded token's attention (decode_attention.cu) where heads are bf16 and have 64 or 128 channels. A warp takes tiles of 16 rows, which it
// brings into its own shared memory by cp.async, two ahead, and multiplies them as matrices: a row is then a few instructions where numbers one by one were
// some hundred, which took longer than the memory. The query heads that share keys, up to eight, are the rows of the products' other side.
//   scores  [16 heads, 8 rows] = q k^T, twice   a: q, from registers   b: rows of k, ldmatrix
//   sums    [16 heads, 8 channels] += p v       a: p, in bf16          b: rows of v, ldmatrix transposed
// The rows of earlier tokens were there before the kernel in front began, so a block asks for them ahead of its wait, as a product does for its weight. What
// the token itself brings comes behind the wait: its key and value are the last row of the last run, whose block also puts them where they belong. Its query
// and key are turned here where they are to be (rotary position embedding): the place, and so the query's sines, are known ahead of the wait.
//   decode_tiles_kernel   grid: sequences x heads / heads of a block, runs that go on at a time;  4 warps: tiles w, w + 4, ... of a run
#include <algorithm>
#include <cmath>

#include "ops/cuda/decode_parts.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/turns.cuh"
#include "scan/cuda/call/device.h"

namespace fw::cuda {
namespace {

constexpr int kTilingBlocks = 3;  // of a multiprocessor
constexpr int kTilingWarps = kRowThreads / 32, kRowsOfTile = 16, kTilesAhead = 2, kHeadsOfTile = 8;

// A warp's tiles in shared memory: rows of kDim numbers whose packets are permuted within 8 rows, so that ldmatrix meets no bank twice.
template <int kDim>
struct DecodeTiles {
  static constexpr int kRowBytes = 2 * kDim, kBytes = kRowsOfTile * kRowBytes;  // of keys, or of values
  uint32_t base;                                                                // of the warp
  FW_DEVICE uint32_t at(int stage, int which, int row, int packet) const {
    return base + static_cast<uint32_t>((stage * 2 + which) * kBytes + row * kRowBytes + ((packet ^ (row & 7)) * 16));
  }
};

// Two channels of the first half of a head, and the two that turn with them. turns: cosine and sine of the first and of the second.
FW_DEVICE void turn_packed(uint32_t& low, uint32_t& high, const float4& turns) {
  float x[2] = {bf16_low(low), bf16_high(low)}, y[2] = {bf16_low(high), bf16_high(high)};
  turn_pair(x[0], y[0], turns.x, turns.y);
  turn_pair(x[1], y[1], turns.z, turns.w);
  low = pack_bf16(x[0], x[1]), high = pack_bf16(y[0], y[1]);
}

// Beside a warp's tiles: what the token turns by, cosine and sine of each channel of the first half of a head, and its own key and value.
template <int kDim>
struct OwnRow {
  float2 turns[kDim / 2];
  Bf16 rows[2][kDim];

  FW_DEVICE void make_turns(const TurnShares& shares, int64_t place, int lane) {
    FW_UNROLL for (int c = lane; c < kDim / 2; c += 32) {
      const float angle = turn_angle(shares.of[c], place);
      turns[c] = make_float2(cos_fast(angle), sin_fast(angle));
    }
  }
  FW_DEVICE float4 turns_of(int c) const { return *reinterpret_cast<const float4*>(turns + c); }

  // A packet of the key and of the value; the key's with the one half a head away, if it turns.
  FW_DEVICE void bring(const Bf16* key, const Bf16* value, int packet, bool turned) {
    constexpr int kHalf = kDim / 16;  // packets
    const int at = packet % kHalf;
    Packet<Bf16, 8> x, y, own;
    own.load(value + packet * 8), x.load(key + (turned ? at : packet) * 8);
    own.store(rows[1] + packet * 8);
    if (turned) {
      y.load(key + (at + kHalf) * 8);
      FW_UNROLL for (int i = 0; i < 4; ++i) {
        turn_packed(x.words[i], y.words[i], turns_of(at * 8 + 2 * i));
        x.words[i] = packet < kHalf ? x.words[i] : y.words[i];
      }
    }
    x.store(rows[0] + packet * 8);
  }
  FW_DEVICE void copy(int which, int packet, Bf16* to) const {
    Packet<Bf16, 8> own;
    own.load(rows[which] + packet * 8);
    own.store(to);
  }
};

template <int kDim>
__global__ void __launch_bounds__(kRowThreads, kTilingBlocks)
    decode_tiles_kernel(const DecodeArgs<Bf16> of, int of_block, const __grid_constant__ TurnShares turns) {
  constexpr int kPackets = kDim / 8, kSteps = kDim / 16, kRowsAtOnce = 32 / kPackets;
  const PlainArgs<Bf16>& a = of.plain;
  const int warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index()), group = lane / 4, pair = lane % 4 * 2;
  const int blocks = a.heads / of_block, head = static_cast<int>(block_index_x()) % blocks * of_block, column = head / a.group * kDim;
  const int64_t n = block_index_x() / static_cast<unsigned>(blocks), stride = int64_t{of.runs} * (kDim + 2);
  const SeenRows seen(a, n);
  constexpr int kWarpBytes = kTilesAhead * 2 * DecodeTiles<kDim>::kBytes;
  char* const own_tiles = shared_memory() + warp * kWarpBytes;
  const DecodeTiles<kDim> tiles{shared_address(own_tiles)};
  float* const tops = reinterpret_cast<float*>(shared_memory() + kTilingWarps * kWarpBytes);  // [heads, warps]
  float* const sums = tops + kHeadsOfTile * kTilingWarps;                                     // [heads, warps]; behind them the warps' OwnRows
  const Bf16 *own_k = a.k.data + n * a.k.stride + column, *own_v = a.v.data + n * a.v.stride + column;
  const int packet = lane % kPackets;
  constexpr int kStep = kTilingWarps * kRowsOfTile;
  const float scale = kLog2E * a.scale;
  uint32_t q[kSteps][2];
  OwnRow<kDim>& own_row = reinterpret_cast<OwnRow<kDim>*>(sums + kHeadsOfTile * kTilingWarps)[warp];
  const auto put_own = [&](int stage, int row) {
    FW_UNROLL for (int which = 0; which < 2; ++which) {
      if (lane < kPackets) own_row.copy(which, packet, reinterpret_cast<Bf16*>(own_tiles + (tiles.at(stage, which, row, packet) - tiles.base)));
    }
  };
  bool waited = false;
  // A block that has no run is over at once: the others want the room.
  FW_NO_UNROLL
  for (int64_t run = block_index_y(); seen.first + run * seen.run <= seen.place; run += grid_size_y()) {
    const int64_t begin = seen.first + run * seen.run;
    // From here on rows are counted from the run's first. own: the token's own, if it is in this run.
    const int rows = static_cast<int>(min(seen.place + 1 - begin, seen.run)), mine_from = warp * kRowsOfTile;
    const int own = seen.place - begin < rows ? rows - 1 : -1;
    const RowsFrom<Bf16> places(a.past_k, a.past_v, n, begin);
    // Asks for the tile from `first` on, for the token's own row only if it is there by now. Rows beyond the end are zeros: nothing times them must be a
    // number.
    const auto ask = [&](int stage, int first, bool with_own) {
      FW_UNROLL for (int i = 0; i < kRowsOfTile / kRowsAtOnce; ++i) {
        const int row = lane / kPackets + i * kRowsAtOnce;
        const bool there = first + row < rows;
        if (first + row == own) continue;
        Bf16 *k, *v;
        places.find(there ? first + row : 0, k, v);
        cp_async_16(tiles.at(stage, 0, row, packet), k + column + packet * 8, there);
        cp_async_16(tiles.at(stage, 1, row, packet), v + column + packet * 8, there);
      }
      if (with_own && own >= first && own < first + kRowsOfTile) put_own(stage, own - first);
    };
    FW_NO_UNROLL for (int stage = 0; stage < kTilesAhead; ++stage) {  // registers
      if (mine_from + stage * kStep < rows) ask(stage, mine_from + stage * kStep, waited);
      cp_async_commit();  // of nothing too: groups of copies are counted
    }
    if (!waited) {
      const bool turned = of.theta != 0;
      if (turned) {
        own_row.make_turns(turns, seen.place, lane);
        sync_warp();
      }
      grid_dependency_wait();
      grid_dependency_launch();
      waited = true;
      if (lane < kPackets && (own >= 0 || seen.first + (run + grid_size_y()) * seen.run <= seen.place)) own_row.bring(own_k, own_v, packet, turned);
      // Of the tile that was asked for without it.
      const int own_tile = own < mine_from ? kTilesAhead : (own - mine_from) / kStep, row = own - mine_from - own_tile * kStep;
      if (own_tile < kTilesAhead && row < kRowsOfTile) put_own(own_tile, row);
      FW_UNROLL for (int s = 0; s < kSteps; ++s) {
        q[s][0] = q[s][1] = 0;
        if (group >= of_block) continue;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(a.q.data + n * a.q.stride + int64_t{head + group} * kDim);
        q[s][0] = words[(s * 16 + pair) / 2], q[s][1] = words[(s * 16 + pair + 8) / 2];
      }
      FW_UNROLL for (int s = 0; s < kSteps / 2; ++s) {
        if (!turned) continue;
        FW_UNROLL for (int j = 0; j < 2; ++j) turn_packed(q[s][j], q[s + kSteps / 2][j], own_row.turns_of(s * 16 + j * 8 + pair));
      }
    }
    float total[kPackets][4];
    FW_UNROLL for (int d = 0; d < kPackets; ++d) { FW_UNROLL for (int i = 0; i < 4; ++i) total[d][i] = 0; }
    float top = -INFINITY, sum = 0;  // of head `group`; sum: of the lane's rows
    int stage = 0;
    FW_NO_UNROLL
    for (int first = mine_from; first < rows; first += kStep, stage ^= 1) {
      cp_async_wait<1>();  // the copies of the tile behind this one are on their way
      sync_warp();
      float score[2][4] = {};  // heads group and group + 8 (none) by rows pair, pair + 1 of each half of the tile
      FW_UNROLL for (int s = 0; s < kSteps; ++s) {
        uint32_t k[4];  // rows 0 to 7 by channels 0 to 7 and 8 to 15 of the step, then rows 8 to 15
        ldmatrix_x4(k, tiles.at(stage, 0, lane % 8 + lane / 16 * 8, 2 * s + lane / 8 % 2));
        mma_bf16(score[0], {q[s][0], 0, q[s][1], 0}, k[0], k[1]);
        mma_bf16(score[1], {q[s][0], 0, q[s][1], 0}, k[2], k[3]);
      }
      float p[2][2], higher = top;
      FW_UNROLL for (int half = 0; half < 2; ++half) {
        FW_UNROLL for (int i = 0; i < 2; ++i) {
          p[half][i] = first + half * 8 + pair + i < rows ? score[half][i] * scale : -INFINITY;
          higher = fmaxf(higher, p[half][i]);
        }
      }
      higher = fmaxf(higher, shuffle_xor(higher, 1));
      higher = fmaxf(higher, shuffle_xor(higher, 2));  // a tile has a row at least, so it is a number
      const float factor = exp2_fast(top - higher);
      top = higher;
      sum *= factor;
      FW_UNROLL for (int d = 0; d < kPackets; ++d) total[d][0] *= factor, total[d][1] *= factor;
      uint32_t weights[2];
      FW_UNROLL for (int half = 0; half < 2; ++half) {
        weights[half] = pack_bf16(exp2_fast(p[half][0] - higher), exp2_fast(p[half][1] - higher));
        sum += bf16_low(weights[half]) + bf16_high(weights[half]);
      }
      FW_UNROLL for (int d = 0; d < kPackets; d += 2) {
        uint32_t v[4];  // rows 0 to 7 and 8 to 15 of 8 channels, then of the next 8
        ldmatrix_x4_trans(v, tiles.at(stage, 1, lane % 16, d + lane / 16));
        mma_bf16(total[d], {weights[0], 0, weights[1], 0}, v[0], v[1]);
        mma_bf16(total[d + 1], {weights[0], 0, weights[1], 0}, v[2], v[3]);
      }
      sync_warp();  // all lanes have read the tile
      if (first + kTilesAhead * kStep < rows) ask(stage, first + kTilesAhead * kStep, true);
      cp_async_commit();
    }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    // Where the row stood that has left the window.
    if (own >= 0 && head % a.group == 0 && warp == 0 && lane < kPackets) {
      Bf16 *k, *v;
      places.find(own, k, v);
      own_row.copy(0, packet, k + column + packet * 8), own_row.copy(1, packet, v + column + packet * 8);
    }
    // The warps' sums meet where their tiles were.
    cp_async_wait<0>();
    sync_warp();
    const auto sum_of = [&](int h, int g) { return reinterpret_cast<float*>(shared_memory() + g * kWarpBytes) + h * kDim; };
    if (group < of_block) {
      FW_UNROLL for (int d = 0; d < kPackets; ++d) {
        float* to = sum_of(group, warp) + d * 8 + pair;
        to[0] = total[d][0], to[1] = total[d][1];
      }
      if (lane % 4 == 0) tops[group * kTilingWarps + warp] = top, sums[group * kTilingWarps + warp] = sum;
    }
    sync_threads();
    leave_part(of_block, kTilingWarps, kDim, sum_of, tops, sums, of.parts + (n * a.heads + head) * stride + run * (kDim + 2), stride);
    sync_threads();  // before the next run's tiles come
  }
}

}  // namespace

void decode_tiles(const DecodeArgs<Bf16>& of, int64_t sequences, void* stream) {
  const PlainArgs<Bf16>& a = of.plain;
  int of_block = a.group;
  while (of_block > kHeadsOfTile) of_block = of_block % 2 == 0 ? of_block / 2 : 1;
  // As many blocks as the machine has room for, several times over, or a block a run: those of runs that a token does not see yet cost their start.
  const int64_t across = sequences * a.heads / of_block, room = 16 * kTilingBlocks * turning_processors();
  const Dim3 grid{static_cast<unsigned>(across), static_cast<unsigned>(std::clamp<int64_t>(room / across, 1, of.runs))};
  const auto launch_for = [&]<int kDim>() {
    const size_t shared = kTilingWarps * (kTilesAhead * 2 * DecodeTiles<kDim>::kBytes + sizeof(OwnRow<kDim>) + sizeof(float) * 2 * kHeadsOfTile);
    launch_overlapped(decode_tiles_kernel<kDim>, grid, kRowThreads, shared, stream, of, of_block, TurnShares(of.theta, a.dim));
  };
  a.dim == 64 ? launch_for.template operator()<64>() : launch_for.template operator()<128>();
}

}  // namespace fw::cuda
