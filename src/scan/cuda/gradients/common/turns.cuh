// Where a block of a gradient kernel stands. A block stays on its processor and takes every grid-th chunk; its "turns" count them. The tiles and rows of later
// turns are on the way while it computes.
#pragma once

#include "rule/tokens.h"
#include "scan/cuda/call/tensor_map.h"
#include "scan/cuda/front/bare_keys.cuh"
#include "scan/cuda/gradients/common/layout.cuh"
#include "scan/cuda/precond/rows.cuh"

namespace fw::cuda {

// What a block knows of a turn (TurnChunk): value head, tokens, and where the first row lies of every tensor of a token, a lane each: inputs and, in the same
// order, gradients, but for those of the preconditioner's gates, which other kernels make of kDAlpha and kDBeta; then the rest. Four turns.
inline constexpr int kPlaceInputs = static_cast<int>(kTokenTensors), kPlaceGradients = kPlaceInputs - 2;
static_assert(static_cast<int>(TokenIndex::precond_g) == kPlaceGradients && static_cast<int>(TokenIndex::precond_beta) == kPlaceGradients + 1);
inline constexpr int kPlaceEntries = 32, kPlaceNumbers = 4, kPlacesBytes = 4 * (8 * kPlaceEntries + 4 * kPlaceNumbers);

// Whether the rules of a shape have gain_by_residual().
enum class Residuals { kNever, kOfRule, kAlways };

// Tensors whose rows of a chunk are bf16 in pieces of 16 bytes; plain_streams(), mixed_streams() and gain_by_residual() of the rule.
enum kPieces : unsigned {
  kPiecesV = 1,
  kPiecesDOut = 2,
  kPiecesDV = 4,
  kPiecesDQ = 8,
  kPiecesDK = 16,
  kPlainRule = 32,
  kMixedRule = 64,
  kGainByResidual = 128,
  kPiecesKeys = 256
};

struct GradientKernelArgs {
  GradientArgs gradients;
  int64_t tiles = 0;  // of this launch: chunks times value heads; with TilesReady those from `last` downwards
  unsigned last = 0;
  bool more = false;            // with TilesReady: the next kernel has the rest of the tiles, and begins when there is room for it
  unsigned pieces = 0;          // bits of kPieces
  int heads_log2 = 0;           // value heads that a block takes one behind the other, a power of 2: those of a key head where it adds them up, else one
  PrecondMap<float> precond{};  // without the center, where M is made
  TensorMap d_o{};              // rows of dO, if the copy engine brings them
  bool engine = false;          // whether it does
};

// The products of gradients/common/products.cuh take its GradientChunk part.
template <class Shape>
struct TurnChunk : GradientChunk<Shape> {
  const GradientKernelArgs& all;
  int blocks;  // of values

  FW_DEVICE explicit TurnChunk(const GradientKernelArgs& a) : GradientChunk<Shape>(a.gradients), all(a) {
    blocks = (a.gradients.problem.V + kValueBlock - 1) / kValueBlock;
  }

  // The turn's tile, a chunk and value head: every grid-th, or of every grid-th run of 2^heads_log2 all. Beside a scan from the last on, as they come out of
  // it, but heads of a run in their order.
  FW_DEVICE unsigned tile_number(int turn) const {
    const bool from_end = Shape::kFollows && this->args.ready.made != nullptr;
    if constexpr (Shape::kSumsHeads) {
      const unsigned run = block_index_x() + (static_cast<unsigned>(turn) >> all.heads_log2) * grid_size_x(), most = (1u << all.heads_log2) - 1;
      const unsigned first = run << all.heads_log2;
      return (from_end ? all.last - most - first : first) + (static_cast<unsigned>(turn) & most);
    } else {
      const unsigned own = block_index_x() + static_cast<unsigned>(turn) * grid_size_x();
      return from_end ? all.last - own : own;
    }
  }
  FW_DEVICE int64_t tile(int turn) const { return tile_number(turn); }
  FW_DEVICE bool has(int turn) const {
    const unsigned shift = Shape::kSumsHeads ? static_cast<unsigned>(all.heads_log2) : 0;
    return block_index_x() + (static_cast<unsigned>(turn) >> shift) * grid_size_x() < static_cast<unsigned>(all.tiles) >> shift;
  }
  // Where the host knows only how many chunks there may be, tiles behind the last one are computed as chunks without rows: nothing of them is stored that
  // anybody reads. (To ask in has() whether there is a chunk takes registers that kernels do not have.)
  FW_DEVICE bool there(int chunk) const {
    const SequenceArg& s = this->args.problem.sequences;
    return s.bounded == 0 || chunk < s.chunk_base[s.N];
  }

  // Of four turns, so that one can be looked up while slower threads are still with an earlier one: value head, tokens, and where the
  // first row lies of every tensor of a token.
  FW_DEVICE int* place(int turn) const { return reinterpret_cast<int*>(this->memory + Shape::kPlaces) + kPlaceNumbers * (turn & 3); }
  FW_DEVICE int hv(int turn) const { return place(turn)[0]; }
  FW_DEVICE int rows(int turn) const { return place(turn)[1]; }
  // The first row in the tensors, for the copy engine.
  FW_DEVICE int token(int turn) const { return place(turn)[2]; }
  FW_DEVICE int batch(int turn) const { return place(turn)[3]; }
  static constexpr int first(int /*turn*/) { return 0; }
  FW_DEVICE char** addresses(int turn) const {
    return reinterpret_cast<char**>(this->memory + Shape::kPlaces + 16 * kPlaceNumbers) + kPlaceEntries * (turn & 3);
  }
  static constexpr int kGradients = kPlaceInputs, kOutputGradient = kGradients + kPlaceGradients, kM = kOutputGradient + 1, kDM = kM + 1, kDAlpha = kM + 2,
                       kDBeta = kM + 3, kShare = kM + 4, kBefore = kM + 5, kStillState = kM + 6;  // StillState
  static_assert(kStillState < kPlaceEntries);

  // By a warp: returns once the scan has left all of the turn's tile.
  FW_DEVICE void wait_for_scan(unsigned tile) const {
    if (!Shape::kFollows || this->args.ready.made == nullptr) return;
    if (this->lane == 0) {
      wait_for_count(this->args.ready.made + tile, 2 * static_cast<unsigned>(blocks));
      fence_async_global();
    }
    sync_warp();
  }

  // By a warp.
  FW_DEVICE void find(int turn) const {
    static_assert(sizeof(TokenArgs) == kPlaceInputs * sizeof(TokenArg));
    if (!has(turn)) return;
    const unsigned index = tile_number(turn);
    const GradientArgs& every = this->args;
    const Problem& x = every.problem;
    const SequenceArg& s = x.sequences;
    const unsigned heads = static_cast<unsigned>(x.HV);
    const int chunk = static_cast<int>(index / heads), head = static_cast<int>(index % heads), own = this->lane;
    const bool exists = there(chunk);
    const int n = exists ? sequence_of_chunk(s, chunk) : 0;
    const int from = exists ? (chunk - first_chunk(s, n)) * kChunk : 0, left = exists ? sequence_length(s, n) - from : 0;
    // Rows are clamped to the last one, which without rows is the one in front: of token 1 there is one.
    const int64_t token = exists ? first_token(s, n) + from : 1;
    const bool anchored = Shape::kStills && x.rule.decay == Decay::kScalar && (left > kChunk || from > 0);
    wait_for_scan(index);
    if (anchored && left <= kChunk) wait_for_scan(index - heads);
    char* at = nullptr;
    if (own <= kOutputGradient) {
      const TokenArg& a = own < kGradients ? (&x.in.q)[own] : own < kOutputGradient ? (&every.grads.d.q)[own - kGradients] : every.d_o;
      const int64_t b = s.offsets != nullptr ? 0 : n, t = s.offsets != nullptr ? token : from;
      const int64_t element = b * a.stride_b + t * a.stride_t + static_cast<int64_t>(head / a.divisor) * a.stride_h;
      if (a.data != nullptr) at = static_cast<char*>(a.data) + element * (a.bf16 != 0 ? 2 : 4);
    } else if (own <= kDBeta) {
      const float* data = own == kM ? x.m : own == kDM ? every.grads.dm : own == kDAlpha ? every.grads.dalpha_p : every.grads.dbeta_p;
      const int64_t row = own == kM ? token * x.H + head / x.group : token * x.HV + head;
      if (data != nullptr) at = reinterpret_cast<char*>(const_cast<float*>(data + (own <= kDM ? row * x.K : row)));
    } else if (own == kShare && every.precond.rows != nullptr) {
      at = reinterpret_cast<char*>(every.precond.rows + token * x.H + head);
    } else if (own == kStillState && anchored) {
      const bool end = left > kChunk;
      const uint16_t* of_neighbour =
          end ? every.states + (index + int64_t{heads}) * blocks * (64 * Shape::kKey) : every.d_states + (index - int64_t{heads}) * blocks * (64 * Shape::kKey);
      at = reinterpret_cast<char*>(const_cast<uint16_t*>(of_neighbour)) + (end ? 0 : 1);
    }
    addresses(turn)[own] = at;
    if (own != 0) return;
    const bool packed = s.offsets != nullptr;
    place(turn)[0] = head;
    place(turn)[1] = left < kChunk ? left : kChunk;
    place(turn)[2] = packed ? static_cast<int>(token) : from;
    place(turn)[3] = packed ? 0 : n;
  }

  FW_DEVICE char* address(int turn, int entry) const {
    if constexpr (Shape::kChannel) return global_memory(addresses(turn)[entry]);
    return addresses(turn)[entry];
  }
  // Rows of the turn's chunk. tensor: one of args.
  FW_DEVICE Rows rows_at(const TokenArg& tensor, int turn) const {
    if (!Shape::kChannel && tensor.data == nullptr) return {};
    const int64_t in = &tensor - &this->args.problem.in.q, out = &tensor - &this->args.grads.d.q;
    const int entry = &tensor == &this->args.d_o ? kOutputGradient : in >= 0 && in < kGradients ? static_cast<int>(in) : kGradients + static_cast<int>(out);
    return {address(turn, entry), tensor.stride_t, tensor.bf16};
  }
  // float32 [tokens, stride]
  FW_DEVICE Rows workspace_rows(int entry, int stride, int turn) const { return {address(turn, entry), stride, 0}; }
  FW_DEVICE FrontRows front(int turn) const {
    const TokenArgs& in = this->args.problem.in;
    FrontRows f;
#define FW_TOKEN(name, heads, width, used) f.name = rows_at(in.name, turn);
#include "rule/tokens.def"
    f.m = reinterpret_cast<const float*>(addresses(turn)[kM]);
    f.m_stride = static_cast<int64_t>(this->args.problem.H) * this->args.problem.K;
    return f;
  }
  FW_DEVICE bool pieces(unsigned which) const { return Shape::kWhole || (all.pieces & which) != 0; }
  FW_DEVICE bool residual_gains() const {
    return Shape::kResiduals == Residuals::kAlways || (Shape::kResiduals == Residuals::kOfRule && (all.pieces & kGainByResidual) != 0);
  }
  // Whether v is wanted for more than rows without a gain: R makes the gain's gradient, or else v (.) dz does, and that makes the log-decay's of StillState.
  FW_DEVICE bool wants_values() const { return Shape::kStills || !residual_gains(); }
  FW_DEVICE float* turn_floats(int offset, int turn) const { return this->floats(offset) + 64 * (turn & 1); }

  // Barriers: of the stages, of A and P, of q and k of two turns.
  FW_DEVICE uint64_t* pairs_barrier() const { return this->barrier(Shape::kStages); }
  FW_DEVICE uint64_t* key_barrier(int turn) const { return this->barrier(Shape::kStages + 1 + (turn & 1)); }
  static FW_DEVICE int key_offset(int turn) { return Shape::kStreams && (turn & 1) != 0 ? Shape::kKeyBytes : 0; }
};

// Of shapes with half of wide keys (kernels.h: WideHalf), of a row: by how much dq and dk grow with q and k. Leaves what this half makes of it, and returns
// that with the first half's.
template <class Shape>
FW_DEVICE float2 join_half_slopes(const TurnChunk<Shape>& c, int turn, int row, bool stores, float2 own) {
  using Chunk = TurnChunk<Shape>;
  if (row >= c.rows(turn)) return own;
  const WideHalf& half = c.args.half;
  const int HV = c.args.problem.HV;
  float *const to_q = reinterpret_cast<float*>(c.address(turn, Chunk::kDAlpha)), *const to_k = reinterpret_cast<float*>(c.address(turn, Chunk::kDBeta));
  if (stores && to_q != nullptr) to_q[row * HV] = own.x, to_k[row * HV] = own.y;
  if (!half.second || half.q == nullptr) return own;
  const int64_t at = to_q - c.args.grads.dalpha_p + row * HV;
  return make_float2(own.x + half.q[at], own.y + half.k[at]);
}

// Value blocks in the order in which the stages take them.
struct ValueStep {
  int turn = 0, block = 0;
  FW_DEVICE void next(int blocks) {
    if (++block < blocks) return;
    block = 0;
    ++turn;
  }
};

// A kernel that begins beside the scan does so at its start, and this at its end: what comes after it on the stream comes after the scan, too. What it reads
// ahead was there before the scan, which waited before it launched this; and of the scan what the counters say. The next kernel is the same with other tiles.
template <class Shape>
FW_DEVICE void begin_turns(const TurnChunk<Shape>& c) {
  if (Shape::kFollows && c.all.more) grid_dependency_launch_first();
}
template <class Shape>
FW_DEVICE void end_turns(const TurnChunk<Shape>& c) {
  // One block is enough, and leaves the places of the others to that next kernel.
  if (Shape::kFollows && c.args.ready.made != nullptr && block_index_x() == 0) grid_dependency_wait();
}

}  // namespace fw::cuda
