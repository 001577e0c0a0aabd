// Where a block of a gradient kernel stands. A block stays on its processor and takes every grid-th chunk; its "work
// tiles" count them. The tiles and rows of later work tiles are on the way while it computes.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "gpu/tensor_map.h"
#include "rule/tokens.h"
#include "scan/cuda/common/front/unscaled_keys.cuh"
#include "scan/cuda/common/precond_rows.cuh"
#include "scan/cuda/gradients/layout.cuh"

namespace fw::cuda {

// What a block knows of a work tile (WorkTile): value head, tokens, and where the first row lies of every tensor of a
// token, a lane each. The tensors are the inputs and, in the same order, the gradients. Those of the preconditioner's
// gates are not there: other kernels make them of kDAlpha and kDBeta. Then the others. Four work tiles.
inline constexpr int kCoordInputs = static_cast<int>(kTokenTensors), kCoordGradients = kCoordInputs - 2;
static_assert(static_cast<int>(TokenIndex::precond_g) == kCoordGradients &&
              static_cast<int>(TokenIndex::precond_beta) == kCoordGradients + 1);
inline constexpr int kCoordEntries = 32, kCoordScalars = 4, kCoordBytes = 4 * (8 * kCoordEntries + 4 * kCoordScalars);

// Whether the rules of a shape have gain_by_residual().
enum class Residuals { kNever, kOfRule, kAlways };

// Tensors whose rows of a chunk are bf16 in pieces of 16 bytes; plain_streams(), mixed_streams() and gain_by_residual()
// of the rule.
enum kVec16 : unsigned {
  kVec16V = 1,
  kVec16DOut = 2,
  kVec16DV = 4,
  kVec16DQ = 8,
  kVec16DK = 16,
  kPlainRule = 32,
  kMixedRule = 64,
  kGainByResidual = 128,
  kVec16Keys = 256
};

struct GradientKernelArgs {
  GradientArgs gradients;
  int64_t tiles = 0;  // of this launch: chunks times value heads; with TilesReady those from `last` downwards
  unsigned last = 0;
  // with TilesReady: the next kernel has the remaining tiles, and begins when there is room for it
  bool more = false;
  unsigned pieces = 0;  // bits of kVec16
  // value heads that a block takes one after the other, a power of 2: those of a key head where it adds them up, else
  // one
  int heads_log2 = 0;
  PrecondMap<float> precond{};  // without the center, where M is made
  TensorMap d_o{};              // rows of dO, if TMA loads them
  bool tma = false;             // whether it does
};

// The products of gradients/products.cuh take its GradientChunk part.
template <class Shape>
struct WorkTile : GradientChunk<Shape> {
  const GradientKernelArgs& all;
  int blocks;  // of values

  FW_DEVICE explicit WorkTile(const GradientKernelArgs& a) : GradientChunk<Shape>(a.gradients), all(a) {
    blocks = (a.gradients.problem.V + kValueBlock - 1) / kValueBlock;
  }

  // The work tile's tile, a chunk and value head: every grid-th, or of every grid-th run of 2^heads_log2 all. Alongside
  // a scan from the last on, as they come out of it, but heads of a run in their order.
  FW_DEVICE unsigned tile_index(int work_tile) const {
    const bool from_end = Shape::kFollows && this->args.ready.made != nullptr;
    if constexpr (Shape::kSumsHeads) {
      const unsigned run = block_index_x() + (static_cast<unsigned>(work_tile) >> all.heads_log2) * grid_size_x(),
                     most = (1u << all.heads_log2) - 1;
      const unsigned first = run << all.heads_log2;
      return (from_end ? all.last - most - first : first) + (static_cast<unsigned>(work_tile) & most);
    } else {
      const unsigned own = block_index_x() + static_cast<unsigned>(work_tile) * grid_size_x();
      return from_end ? all.last - own : own;
    }
  }
  FW_DEVICE int64_t tile(int work_tile) const { return tile_index(work_tile); }
  FW_DEVICE bool has(int work_tile) const {
    const unsigned shift = Shape::kSumsHeads ? static_cast<unsigned>(all.heads_log2) : 0;
    return block_index_x() + (static_cast<unsigned>(work_tile) >> shift) * grid_size_x() <
           static_cast<unsigned>(all.tiles) >> shift;
  }
  // Where the host knows only how many chunks there may be, tiles after the last one are computed as chunks without
  // rows: nothing of them is stored that anybody reads. (To ask in has() whether there is a chunk takes registers that
  // kernels do not have.)
  FW_DEVICE bool there(int chunk) const {
    const SequenceArg& s = this->args.problem.sequences;
    return s.bounded == 0 || chunk < s.chunk_base[s.N];
  }

  // Of four work tiles, so that one can be looked up while slower threads are still with an earlier one: value head,
  // tokens, and where the first row lies of every tensor of a token.
  FW_DEVICE int* coords(int work_tile) const {
    return reinterpret_cast<int*>(this->memory + Shape::kCoords) + kCoordScalars * (work_tile & 3);
  }
  FW_DEVICE int hv(int work_tile) const { return coords(work_tile)[0]; }
  FW_DEVICE int rows(int work_tile) const { return coords(work_tile)[1]; }
  // The first row in the tensors, for TMA.
  FW_DEVICE int token(int work_tile) const { return coords(work_tile)[2]; }
  FW_DEVICE int batch(int work_tile) const { return coords(work_tile)[3]; }
  static constexpr int first(int /*work tile*/) { return 0; }
  FW_DEVICE char** addresses(int work_tile) const {
    return reinterpret_cast<char**>(this->memory + Shape::kCoords + 16 * kCoordScalars) +
           kCoordEntries * (work_tile & 3);
  }
  static constexpr int kGradients = kCoordInputs, kOutputGradient = kGradients + kCoordGradients,
                       kM = kOutputGradient + 1, kDM = kM + 1, kDAlpha = kM + 2, kDBeta = kM + 3, kShare = kM + 4,
                       kBefore = kM + 5, kNoDecayState = kM + 6;  // NoDecayState
  static_assert(kNoDecayState < kCoordEntries);

  // By a warp: returns once the scan has left all of the work tile's tile.
  FW_DEVICE void wait_for_scan(unsigned tile) const {
    if (!Shape::kFollows || this->args.ready.made == nullptr) return;
    if (this->lane == 0) {
      wait_for_count(this->args.ready.made + tile, 2 * static_cast<unsigned>(blocks));
      fence_async_global();
    }
    sync_warp();
  }

  // By a warp.
  FW_DEVICE void find(int work_tile) const {
    static_assert(sizeof(TokenArgs) == kCoordInputs * sizeof(TokenArg));
    if (!has(work_tile)) return;
    const unsigned index = tile_index(work_tile);
    const GradientArgs& every = this->args;
    const Problem& x = every.problem;
    const SequenceArg& s = x.sequences;
    const unsigned heads = static_cast<unsigned>(x.HV);
    const int chunk = static_cast<int>(index / heads), head = static_cast<int>(index % heads), own = this->lane;
    const bool exists = there(chunk);
    const int n = exists ? sequence_of_chunk(s, chunk) : 0;
    const int from = exists ? (chunk - first_chunk(s, n)) * kChunk : 0,
              left = exists ? sequence_length(s, n) - from : 0;
    // Rows are clamped to the last one, which without rows is the one in front: of token 1 there is one.
    const int64_t token = exists ? first_token(s, n) + from : 1;
    const bool anchored = Shape::kNoDecayFix && x.rule.decay == Decay::kScalar && (left > kChunk || from > 0);
    wait_for_scan(index);
    if (anchored && left <= kChunk) wait_for_scan(index - heads);
    char* at = nullptr;
    if (own <= kOutputGradient) {
      const TokenArg& a = own < kGradients        ? (&x.in.q)[own]
                          : own < kOutputGradient ? (&every.grads.d.q)[own - kGradients]
                                                  : every.d_o;
      const int64_t b = s.offsets != nullptr ? 0 : n, t = s.offsets != nullptr ? token : from;
      const int64_t element = b * a.stride_b + t * a.stride_t + static_cast<int64_t>(head / a.divisor) * a.stride_h;
      if (a.data != nullptr) at = static_cast<char*>(a.data) + element * (a.bf16 != 0 ? 2 : 4);
    } else if (own <= kDBeta) {
      const float* data = own == kM        ? x.m
                          : own == kDM     ? every.grads.dm
                          : own == kDAlpha ? every.grads.dalpha_p
                                           : every.grads.dbeta_p;
      const int64_t row = own == kM ? token * x.H + head / x.group : token * x.HV + head;
      if (data != nullptr) at = reinterpret_cast<char*>(const_cast<float*>(data + (own <= kDM ? row * x.K : row)));
    } else if (own == kShare && every.precond.rows != nullptr) {
      at = reinterpret_cast<char*>(every.precond.rows + token * x.H + head);
    } else if (own == kNoDecayState && anchored) {
      const bool end = left > kChunk;
      const uint16_t* of_neighbour = end ? every.states + (index + int64_t{heads}) * blocks * (64 * Shape::kTileK)
                                         : every.d_states + (index - int64_t{heads}) * blocks * (64 * Shape::kTileK);
      at = reinterpret_cast<char*>(const_cast<uint16_t*>(of_neighbour)) + (end ? 0 : 1);
    }
    addresses(work_tile)[own] = at;
    if (own != 0) return;
    const bool packed = s.offsets != nullptr;
    coords(work_tile)[0] = head;
    coords(work_tile)[1] = left < kChunk ? left : kChunk;
    coords(work_tile)[2] = packed ? static_cast<int>(token) : from;
    coords(work_tile)[3] = packed ? 0 : n;
  }

  FW_DEVICE char* address(int work_tile, int entry) const {
    if constexpr (Shape::kChannel) return global_memory(addresses(work_tile)[entry]);
    return addresses(work_tile)[entry];
  }
  // Rows of the work tile's chunk. tensor: one of args.
  FW_DEVICE Rows rows_at(const TokenArg& tensor, int work_tile) const {
    if (!Shape::kChannel && tensor.data == nullptr) return {};
    const int64_t in = &tensor - &this->args.problem.in.q, out = &tensor - &this->args.grads.d.q;
    const int entry = &tensor == &this->args.d_o   ? kOutputGradient
                      : in >= 0 && in < kGradients ? static_cast<int>(in)
                                                   : kGradients + static_cast<int>(out);
    return {address(work_tile, entry), tensor.stride_t, tensor.bf16};
  }
  // float32 [tokens, stride]
  FW_DEVICE Rows workspace_rows(int entry, int stride, int work_tile) const {
    return {address(work_tile, entry), stride, 0};
  }
  FW_DEVICE FrontRows front(int work_tile) const {
    const TokenArgs& in = this->args.problem.in;
    FrontRows f;
#define FW_TOKEN(name, heads, width, used) f.name = rows_at(in.name, work_tile);
#include "rule/tokens.def"
    f.m = reinterpret_cast<const float*>(addresses(work_tile)[kM]);
    f.m_stride = static_cast<int64_t>(this->args.problem.H) * this->args.problem.K;
    return f;
  }
  FW_DEVICE bool pieces(unsigned which) const { return Shape::kWhole || (all.pieces & which) != 0; }
  FW_DEVICE bool residual_gains() const {
    return Shape::kResiduals == Residuals::kAlways ||
           (Shape::kResiduals == Residuals::kOfRule && (all.pieces & kGainByResidual) != 0);
  }
  // Whether v is wanted for more than rows without a gain: R makes the gain's gradient, or else v (.) dz does, and that
  // makes the log-decay's of NoDecayState.
  FW_DEVICE bool wants_values() const { return Shape::kNoDecayFix || !residual_gains(); }
  FW_DEVICE float* work_tile_floats(int offset, int work_tile) const {
    return this->floats(offset) + 64 * (work_tile & 1);
  }

  // Barriers: of the stages, of A and P, of q and k of two work tiles.
  FW_DEVICE uint64_t* pairs_barrier() const { return this->barrier(Shape::kStages); }
  FW_DEVICE uint64_t* key_barrier(int work_tile) const { return this->barrier(Shape::kStages + 1 + (work_tile & 1)); }
  static FW_DEVICE int key_offset(int work_tile) {
    return Shape::kStreams && (work_tile & 1) != 0 ? Shape::kKeyBytes : 0;
  }
};

// Of shapes with half of K above 128 (kernels.h: K256Half), of a row: |q|^2 and |k|^2 of all channels.
template <class Shape>
FW_DEVICE float2 squares_of_row(const WorkTile<Shape>& c, int work_tile, int row) {
  const K256Half& half = c.args.half;
  const int64_t tile = c.tile(work_tile);
  return half.norms != nullptr ? make_float2(half.norms[tile].q2[row], half.norms[tile].k2[row])
                               : make_float2(half.numbers[tile].q2[row], half.numbers[tile].k2[row]);
}
// By how much its dq and dk grow with q and k. Leaves what this half makes of it, and returns that with the first
// half's.
template <class Shape>
FW_DEVICE float2 join_half_slopes(const WorkTile<Shape>& c, int work_tile, int row, bool stores, float2 own) {
  using Chunk = WorkTile<Shape>;
  if (row >= c.rows(work_tile)) return own;
  const K256Half& half = c.args.half;
  const int HV = c.args.problem.HV;
  float *const to_q = reinterpret_cast<float*>(c.address(work_tile, Chunk::kDAlpha)), *const to_k =
                                                                                          reinterpret_cast<float*>(
                                                                                              c.address(work_tile,
                                                                                                        Chunk::kDBeta));
  if (stores && to_q != nullptr) to_q[row * HV] = own.x, to_k[row * HV] = own.y;
  if (!half.second || half.q == nullptr) return own;
  const int64_t at = to_q - c.args.grads.dalpha_p + row * HV;
  return make_float2(own.x + half.q[at], own.y + half.k[at]);
}

// Value blocks in the order in which the stages take them.
struct ValueStep {
  int work_tile = 0, block = 0;
  FW_DEVICE void next(int blocks) {
    if (++block < blocks) return;
    block = 0;
    ++work_tile;
  }
};

// A kernel that begins alongside the scan does so at its start, and this at its end: what comes after it on the stream
// comes after the scan, too. What it reads ahead was there before the scan, which waited before it launched this; and
// of the scan what the counters say. The next kernel is the same with other tiles.
template <class Shape>
FW_DEVICE void begin_work_tiles(const WorkTile<Shape>& c) {
  if (Shape::kFollows && c.all.more) grid_dependency_launch_first();
}
template <class Shape>
FW_DEVICE void end_work_tiles(const WorkTile<Shape>& c) {
  // One block is enough, and leaves the SMs of the others to that next kernel.
  if (Shape::kFollows && c.args.ready.made != nullptr && block_index_x() == 0) grid_dependency_wait();
}

}  // namespace fw::cuda
