// The runs of a decoded token's attention (decode_attention.cu) where heads are bf16 and have 64, 128 or 256 channels.
// A warp takes tiles of 16 rows, loads them into its own shared memory by cp.async, two ahead, and multiplies them as
// matrices. A row is then a few instructions. Numbers one by one were some hundred, which took longer than the memory.
// The query heads that share keys, up to eight, are the rows of the products' other side.
//   scores  [16 heads, 8 rows] = q k^T, twice   a: q, from registers   b: rows of k, ldmatrix
//   sums    [16 channels, 8 heads] += v^T p     a: rows of v, ldmatrix transposed   b: p, in bf16
// The rows of earlier tokens were there before the kernel in front began, so a block asks for them ahead of its wait,
// as a product does for its weight. What the token itself loads comes after the wait: its key and value are the last
// row of the last run, whose block also puts them where they belong. Its query and key are turned here where they are
// to be (rotary position embedding): the position, and so the query's sines, are known ahead of the wait.
//   decode_tiles_kernel   grid: sequences x heads / heads of a block, runs that go on at a time;  4 warps: tiles w, w + 4, ... of a run, two ahead over all
//   runs of the block; the warps' sums meet after each run
#include <algorithm>
#include <cmath>

#include "gpu/device.h"
#include "ops/cuda/decode_parts.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/rotary.cuh"

namespace fw::cuda {
namespace {

// Of an SM, by registers and shared memory.
constexpr int tiling_blocks(int dim) { return dim <= 128 ? 3 : 1; }
constexpr int kTilingWarps = kRowThreads / 32, kRowsOfTile = 16, kTilesAhead = 2, kHeadsOfTile = 8;

// A warp's tiles in shared memory: rows of kDim numbers whose packets are permuted within 8 rows, so that ldmatrix
// meets no bank twice.
template <int kDim>
struct DecodeTiles {
  static constexpr int kRowBytes = 2 * kDim, kBytes = kRowsOfTile * kRowBytes;  // of keys, or of values
  uint32_t base;                                                                // of the warp
  FW_DEVICE uint32_t at(int stage, int which, int row, int packet) const {
    return base + static_cast<uint32_t>((stage * 2 + which) * kBytes + row * kRowBytes + ((packet ^ (row & 7)) * 16));
  }
};

// Two channels of the first half of a head, and the two that turn with them. turns: cosine and sine of the first and of
// the second.
FW_DEVICE void rotate_packed(uint32_t& low, uint32_t& high, const float4& rotations) {
  float x[2] = {bf16_low(low), bf16_high(low)}, y[2] = {bf16_low(high), bf16_high(high)};
  rotate_pair(x[0], y[0], rotations.x, rotations.y);
  rotate_pair(x[1], y[1], rotations.z, rotations.w);
  low = pack_bf16(x[0], x[1]), high = pack_bf16(y[0], y[1]);
}

// Alongside a warp's tiles: what the token turns by, cosine and sine of each channel of the first half of a head, and
// its own key and value.
template <int kDim>
struct OwnRow {
  float2 rotations[kDim / 2];
  Bf16 rows[2][kDim];

  FW_DEVICE void make_turns(const RotaryShares& shares, int64_t position, int lane) {
    FW_UNROLL for (int c = lane; c < kDim / 2; c += 32) {
      const float angle = rotary_angle(shares.of[c], position);
      rotations[c] = make_float2(cos_fast(angle), sin_fast(angle));
    }
  }
  FW_DEVICE float4 turns_of(int c) const { return *reinterpret_cast<const float4*>(rotations + c); }

  // A packet of the key and of the value; the key's with the one half a head away, if it turns.
  FW_DEVICE void bring(const Bf16* key, const Bf16* value, int packet, bool rotated) {
    constexpr int kHalf = kDim / 16;  // packets
    const int at = packet % kHalf;
    Packet<Bf16, 8> x, y, own;
    own.load(value + packet * 8), x.load(key + (rotated ? at : packet) * 8);
    own.store(rows[1] + packet * 8);
    if (rotated) {
      y.load(key + (at + kHalf) * 8);
      FW_UNROLL for (int i = 0; i < 4; ++i) {
        rotate_packed(x.words[i], y.words[i], turns_of(at * 8 + 2 * i));
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

// The sums of a run's warps, of one run and, alongside it, of the next.
template <int kDim>
struct RunSums {
  float *first, *tops, *sums;  // [2, heads of the block, warps, kDim]; [2, kHeadsOfTile, warps]
  int heads;
  static constexpr size_t bytes(int heads) {
    return sizeof(float) * 2 * kTilingWarps *
           (static_cast<size_t>(heads) * kDim + 2 * static_cast<size_t>(kHeadsOfTile));
  }
  FW_DEVICE RunSums(char* at, int of_block)
      : tops(reinterpret_cast<float*>(at)), sums(tops + 2 * kHeadsOfTile * kTilingWarps), heads(of_block) {
    first = sums + 2 * kHeadsOfTile * kTilingWarps;
  }
  FW_DEVICE float* of(int parity, int h, int g) const {
    return first + ((parity * heads + h) * kTilingWarps + g) * kDim;
  }
  FW_DEVICE float* tops_of(int parity) const { return tops + parity * kHeadsOfTile * kTilingWarps; }
  FW_DEVICE float* sums_of(int parity) const { return sums + parity * kHeadsOfTile * kTilingWarps; }
};

template <int kDim>
constexpr size_t tiling_bytes(int of_block) {
  return kTilingWarps * (kTilesAhead * 2 * DecodeTiles<kDim>::kBytes + sizeof(OwnRow<kDim>)) +
         RunSums<kDim>::bytes(of_block);
}

size_t room_of_block() { return current_arch() == Arch::kSm90 ? kSm90SharedBytes : kSm80SharedBytes; }

template <int kDim>
__global__ void __launch_bounds__(kRowThreads, tiling_blocks(kDim))
    decode_tiles_kernel(const DecodeArgs<Bf16> of, int of_block, const __grid_constant__ RotaryShares rotations) {
  constexpr int kPackets = kDim / 8, kSteps = kDim / 16, kRowsAtOnce = 32 / kPackets,
                kStep = kTilingWarps * kRowsOfTile;
  const PlainArgs<Bf16>& a = of.plain;
  const int warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index()), group = lane / 4,
            pair = lane % 4 * 2;
  const int blocks = a.heads / of_block, head = static_cast<int>(block_index_x()) % blocks * of_block,
            column = head / a.group * kDim;
  const int64_t n = block_index_x() / static_cast<unsigned>(blocks), stride = int64_t{of.runs} * (kDim + 2);
  const SeenRows seen(a, n);
  const int runs = static_cast<int>(seen.runs()), runs_at_once = static_cast<int>(grid_size_y()),
            first_run = static_cast<int>(block_index_y());
  if (first_run >= runs) return;  // the other blocks want the room
  const auto begin_of = [&](int run) { return seen.first + run * seen.run; };
  // From here on rows are counted from their run's first. The token's own is the last of the last run.
  const auto rows_of = [&](int run) { return static_cast<int>(min(seen.last + 1 - begin_of(run), seen.run)); };
  constexpr int kWarpBytes = kTilesAhead * 2 * DecodeTiles<kDim>::kBytes;
  char* const own_tiles = shared_memory() + warp * kWarpBytes;
  const DecodeTiles<kDim> tiles{shared_address(own_tiles)};
  OwnRow<kDim>* const own_rows = reinterpret_cast<OwnRow<kDim>*>(shared_memory() + kTilingWarps * kWarpBytes);
  OwnRow<kDim>& own_row = own_rows[warp];
  const RunSums<kDim> run_sums(reinterpret_cast<char*>(own_rows + kTilingWarps), of_block);
  const int packet = lane % kPackets, mine_from = warp * kRowsOfTile;
  const float scale = kLog2E * a.scale;

  // The next tile to be asked for, and the one that has the token's own row, once it has been.
  int asked_run = first_run, asked = mine_from, own_stage = -1, own_at = 0;
  bool waited = false;
  RowsFrom<Bf16> past_rows(a.past_k, a.past_v, n, begin_of(first_run));
  const auto put_own = [&] {
    FW_UNROLL for (int which = 0; which < 2; ++which) {
      if (lane < kPackets)
        own_row.copy(which, packet,
                     reinterpret_cast<Bf16*>(own_tiles + (tiles.at(own_stage, which, own_at, packet) - tiles.base)));
    }
  };
  // Rows beyond the end are zeros: nothing times them must be a number.
  const auto ask = [&](int stage) {
    if (asked_run < runs && asked >= rows_of(asked_run)) {  // the warp has no more of this run
      asked_run += runs_at_once, asked = mine_from;
      if (asked_run < runs) past_rows = RowsFrom<Bf16>(a.past_k, a.past_v, n, begin_of(asked_run));
    }
    if (asked_run < runs && asked < rows_of(asked_run)) {
      const int rows = rows_of(asked_run), own = asked_run + 1 == runs ? rows - 1 : rows;
      const int first = asked + lane / kPackets;
      Bf16 *k, *v;
      if (asked + kRowsOfTile <= own && past_rows.together(asked, kRowsOfTile)) {
        past_rows.find(first, k, v);
        const int64_t step = kRowsAtOnce * a.past_k.width;
        k += column + packet * 8, v += column + packet * 8;
        FW_UNROLL for (int i = 0; i < kRowsOfTile / kRowsAtOnce; ++i, k += step, v += step) {
          cp_async_16(tiles.at(stage, 0, lane / kPackets + i * kRowsAtOnce, packet), k, true);
          cp_async_16(tiles.at(stage, 1, lane / kPackets + i * kRowsAtOnce, packet), v, true);
        }
      } else {
        FW_NO_UNROLL for (int i = 0; i < kRowsOfTile; i += kRowsAtOnce) {
          const bool there = first + i < rows;
          if (first + i == own && there) continue;
          past_rows.find(there ? first + i : 0, k, v);
          cp_async_16(tiles.at(stage, 0, lane / kPackets + i, packet), k + column + packet * 8, there);
          cp_async_16(tiles.at(stage, 1, lane / kPackets + i, packet), v + column + packet * 8, there);
        }
      }
      if (own < rows && own >= asked && own < asked + kRowsOfTile) {
        own_stage = stage, own_at = own - asked;
        if (waited) put_own();
      }
      asked += kStep;
    }
    cp_async_commit();  // of nothing too: groups of copies are counted
  };
  FW_NO_UNROLL for (int stage = 0; stage < kTilesAhead; ++stage) ask(stage);  // registers

  const bool rotated = of.theta != 0;
  if (rotated) {
    own_row.make_turns(rotations, seen.last, lane);
    sync_warp();
  }
  grid_dependency_wait();
  grid_dependency_launch();
  waited = true;
  const bool has_last = (runs - 1 - first_run) % runs_at_once == 0;
  if (has_last && lane < kPackets) {
    own_row.bring(a.k.data + n * a.k.stride + column, a.v.data + n * a.v.stride + column, packet, rotated);
  }
  if (own_stage >= 0) put_own();
  uint32_t q[kSteps][2];
  FW_UNROLL for (int s = 0; s < kSteps; ++s) {
    q[s][0] = q[s][1] = 0;
    if (group >= of_block) continue;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(a.q.data + n * a.q.stride + int64_t{head + group} * kDim);
    q[s][0] = words[(s * 16 + pair) / 2], q[s][1] = words[(s * 16 + pair + 8) / 2];
  }
  FW_UNROLL for (int s = 0; s < kSteps / 2; ++s) {
    if (!rotated) continue;
    FW_UNROLL for (int j = 0; j < 2; ++j)
        rotate_packed(q[s][j], q[s + kSteps / 2][j], own_row.turns_of(s * 16 + j * 8 + pair));
  }

  int stage = 0, parity = 0;
  FW_NO_UNROLL
  for (int run = first_run; run < runs; run += runs_at_once, parity ^= 1) {
    const int rows = rows_of(run);
    float total[kSteps][4];  // channels group and group + 8 of the step, heads pair and pair + 1
    FW_UNROLL for (int s = 0; s < kSteps; ++s) { FW_UNROLL for (int i = 0; i < 4; ++i) total[s][i] = 0; }
    float top = -INFINITY, sum = 0;  // of head `group`; sum: of the lane's rows
    FW_NO_UNROLL
    for (int first = mine_from; first < rows; first += kStep, stage ^= 1) {
      cp_async_wait<1>();  // the copies of the tile after this one are on their way
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
      const float factors[2] = {shuffle(factor, 4 * pair), shuffle(factor, 4 * pair + 4)};
      FW_UNROLL for (int s = 0; s < kSteps; ++s) {
        FW_UNROLL for (int i = 0; i < 4; ++i) total[s][i] *= factors[i % 2];
      }
      uint32_t weights[2];
      FW_UNROLL for (int half = 0; half < 2; ++half) {
        weights[half] = pack_bf16(exp2_fast(p[half][0] - higher), exp2_fast(p[half][1] - higher));
        sum += bf16_low(weights[half]) + bf16_high(weights[half]);
      }
      FW_UNROLL for (int s = 0; s < kSteps; ++s) {
        uint32_t v[4];  // channels 0 to 7 and 8 to 15 of the step by rows 0 to 7, then by rows 8 to 15
        ldmatrix_x4_trans(v, tiles.at(stage, 1, lane % 8 + lane / 16 * 8, 2 * s + lane / 8 % 2));
        mma_bf16(total[s], v, weights[0], weights[1]);
      }
      sync_warp();  // all lanes have read the tile
      ask(stage);
    }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    FW_UNROLL for (int i = 0; i < 2; ++i) {
      if (pair + i >= of_block) continue;
      float* const to = run_sums.of(parity, pair + i, warp) + group;
      FW_UNROLL for (int s = 0; s < kSteps; ++s) to[16 * s] = total[s][i], to[16 * s + 8] = total[s][i + 2];
    }
    if (group < of_block && lane % 4 == 0) {
      run_sums.tops_of(parity)[group * kTilingWarps + warp] = top,
                                                      run_sums.sums_of(parity)[group * kTilingWarps + warp] = sum;
    }
    sync_threads();  // and all have read what the run before the last has left
    leave_part(
        of_block, kTilingWarps, kDim, [&](int h, int g) { return run_sums.of(parity, h, g); }, run_sums.tops_of(parity),
        run_sums.sums_of(parity), of.parts + (n * a.heads + head) * stride + run * (kDim + 2), stride);
  }
  // Where the row stood that has left the window.
  if (has_last && head % a.group == 0 && warp == 0 && lane < kPackets) {
    const RowsFrom<Bf16> of_last(a.past_k, a.past_v, n, begin_of(runs - 1));
    Bf16 *k, *v;
    of_last.find(rows_of(runs - 1) - 1, k, v);
    own_row.copy(0, packet, k + column + packet * 8), own_row.copy(1, packet, v + column + packet * 8);
  }
}

}  // namespace

bool takes_decode_tiles(int dim) {
  return dim == 64 || dim == 128 || (dim == 256 && tiling_bytes<256>(1) <= room_of_block());
}

void decode_tiles(const DecodeArgs<Bf16>& of, int64_t sequences, void* stream) {
  const auto launch_for = [&]<int kDim>() {
    const PlainArgs<Bf16>& a = of.plain;
    // Heads of a block: all that share keys, if there is room. No bits depend on it.
    int of_block = a.group;
    while (of_block > kHeadsOfTile || (of_block > 1 && tiling_bytes<kDim>(of_block) > room_of_block()))
      of_block = of_block % 2 == 0 ? of_block / 2 : 1;
    // Few sequences: a block a run. Many: as many blocks as the machine has room for twice over, which go from run to
    // run without asking for the token again.
    const int64_t across = sequences * a.heads / of_block, enough = 2 * tiling_blocks(kDim) * persistent_ctas();
    const Dim3 grid{static_cast<unsigned>(across),
                    static_cast<unsigned>(std::clamp<int64_t>((enough + across - 1) / across, 1, of.runs))};
    launch_overlapped(decode_tiles_kernel<kDim>, grid, kRowThreads, tiling_bytes<kDim>(of_block), stream, of, of_block,
                      RotaryShares(of.theta, a.dim));
  };
  if (of.plain.dim == 64) return launch_for.template operator()<64>();
  of.plain.dim == 128 ? launch_for.template operator()<128>() : launch_for.template operator()<256>();
}

}  // namespace fw::cuda
