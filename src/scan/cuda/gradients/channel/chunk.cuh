// Channel decay: where a block of a gradient kernel stands (gradients/work_tiles.cuh), and what its tensors allow.
#pragma once

#include <bit>

#include "scan/cuda/gradients/work_tiles.cuh"

namespace fw::cuda {

// Besides kVec16: v, a channel write gate and their gradients, all of them; tensors of a value a channel in pairs of
// neighbouring channels.
enum kChannelPieces : unsigned {
  kVec16DThird = 1u << 16,
  kVec2G = 1u << 17,
  kVec2DG = 1u << 18,
  kVec16Values = 1u << 19
};

// third: the gradient of what a row of e is a multiple of, or of the gate on it.
inline unsigned channel_pieces_of(const GradientArgs& args, const TokenArg& third) {
  const Problem& x = args.problem;
  const TokenArgs& d = args.grads.d;
  const auto whole_or_absent = [](const TokenArg& tensor, int dim) {
    return tensor.data == nullptr || is_vec16(tensor, dim);
  };
  const bool gated = x.rule.write == Gate::kChannel;
  const bool values = is_vec16(x.in.v, x.V) && whole_or_absent(d.v, x.V) &&
                      (!gated || (is_vec16(x.in.write_gate, x.V) && whole_or_absent(d.write_gate, x.V)));
  return (is_vec16(third, x.K) ? kVec16DThird : 0u) | (is_vec2(x.in.g, x.K) ? kVec2G : 0u) |
         (is_vec2(d.g, x.K) ? kVec2DG : 0u) | (values ? kVec16Values : 0u);
}

// The last of `count` sequences that begins at or before a chunk (empty ones are passed over), by a warp: each round
// narrows it down to a 32nd.
FW_DEVICE int last_sequence_from(const int32_t* chunk_base, int count, int chunk, int lane) {
  int first = 0;
  while (count > 1) {
    const int step = (count + 31) / 32, i = lane * step;
    const uint32_t before = warp_ballot(i < count && chunk_base[first + i] <= chunk);  // of lanes from 0 on
    const int skipped = (std::popcount(before) - 1) * step;
    first += skipped;
    count = count - skipped < step ? count - skipped : step;
  }
  return first;
}

template <class Shape>
struct ChannelChunk : WorkTile<Shape> {
  FW_DEVICE explicit ChannelChunk(const GradientKernelArgs& a) : WorkTile<Shape>(a) {}

  // Where registers are few (kTileK 64): the work tile and the number of value blocks, which all phases ask for, in
  // memory. A warp has its own.
  FW_DEVICE volatile int* notes() const {
    return reinterpret_cast<volatile int*>(this->memory + Shape::kNotes) + 2 * this->warp;
  }
  FW_DEVICE void note_tile(int work_tile) const {
    if (this->lane == 0) notes()[0] = work_tile;
    sync_warp();
  }
  FW_DEVICE void note_blocks() const {
    if (this->lane == 0) notes()[1] = this->blocks;
    sync_warp();
  }
  FW_DEVICE int noted_tile() const { return notes()[0]; }
  FW_DEVICE int value_blocks() const { return Shape::kTileK == 64 ? notes()[1] : this->blocks; }

  // A of the preconditioner before each token: bf16, groups of one.
  FW_DEVICE Rows rows_before(int work_tile) const {
    const Problem& x = this->args.problem;
    return {this->address(work_tile, WorkTile<Shape>::kBefore), int64_t{x.H} * x.K, 1};
  }

  // What find() takes of the arguments, in bytes; by a warp, before the first one. Read from the arguments each time, a
  // lane its own entry, it would be thousands of cycles in the way of all warps.
  FW_DEVICE void make_origins() const {
    if constexpr (Shape::kStreams) {
      using Chunk = WorkTile<Shape>;
      const GradientArgs& every = this->args;
      const Problem& x = every.problem;
      const SequenceArg& s = x.sequences;
      const int entry = this->lane;
      int64_t data = 0, sequence = 0, token = 0, head = 0;
      int divisor = 1;
      if (entry <= Chunk::kOutputGradient) {
        const TokenArg& a = entry < Chunk::kGradients        ? (&x.in.q)[entry]
                            : entry < Chunk::kOutputGradient ? (&every.grads.d.q)[entry - Chunk::kGradients]
                                                             : every.d_o;
        const int size = a.bf16 != 0 ? 2 : 4;
        data = reinterpret_cast<int64_t>(a.data), sequence = a.stride_b * size, token = a.stride_t * size,
        head = a.stride_h * size;
        divisor = a.divisor;
      } else if (entry <= Chunk::kDBeta) {
        const bool m = entry == Chunk::kM;
        data = reinterpret_cast<int64_t>(m                         ? x.m
                                         : entry == Chunk::kDM     ? every.grads.dm
                                         : entry == Chunk::kDAlpha ? every.grads.dalpha_p
                                                                   : every.grads.dbeta_p);
        head = 4 * static_cast<int64_t>(entry <= Chunk::kDM ? x.K : 1), token = (m ? x.H : x.HV) * head,
        sequence = s.T * token;
        divisor = m ? x.group : 1;
      } else if (Shape::kMakesM && entry <= Chunk::kBefore) {
        const bool share = entry == Chunk::kShare;
        data = share ? reinterpret_cast<int64_t>(every.precond.rows) : reinterpret_cast<int64_t>(x.precond_rows);
        head = share ? int64_t{sizeof(PrecondShare::Row)} : int64_t{2} * x.K, token = x.H * head,
        sequence = s.T * token;
      }
      if (data == 0) sequence = token = head = 0;
      if (s.offsets != nullptr) sequence = 0;
      int64_t* to = reinterpret_cast<int64_t*>(this->memory + Shape::kOrigins) + entry;
      to[0] = data, to[kCoordEntries] = sequence, to[2 * kCoordEntries] = token, to[3 * kCoordEntries] = head;
      reinterpret_cast<int*>(this->memory + Shape::kOrigins + 4 * 8 * kCoordEntries)[entry] = divisor;
    }
  }
  // As WorkTile's.
  FW_DEVICE void find(int work_tile) const {
    if constexpr (!Shape::kStreams) {
      WorkTile<Shape>::find(work_tile);
    } else {
      if (!this->has(work_tile)) return;
      const unsigned index = this->tile_index(work_tile);
      this->wait_for_scan(index);
      const SequenceArg& s = this->args.problem.sequences;
      const unsigned heads = static_cast<unsigned>(this->args.problem.HV), chunk = index / heads;
      const int at = static_cast<int>(chunk), hv = static_cast<int>(index - chunk * heads);
      const bool packed = s.offsets != nullptr, exists = this->there(at);
      const int n = !exists  ? 0
                    : packed ? last_sequence_from(s.chunk_base, s.N, at, this->lane)
                             : static_cast<int>(chunk / static_cast<unsigned>(s.chunks));
      const int first = packed ? s.offsets[n] : 0, end = !exists ? 0 : packed ? s.offsets[n + 1] : s.T;
      const int token = exists ? first + (at - (packed ? s.chunk_base[n] : n * s.chunks)) * kChunk : 0;
      const int64_t* from = reinterpret_cast<const int64_t*>(this->memory + Shape::kOrigins) + this->lane;
      const unsigned divisor =
          reinterpret_cast<const unsigned*>(this->memory + Shape::kOrigins + 4 * 8 * kCoordEntries)[this->lane];
      const int head = divisor == 1 ? hv : static_cast<int>(static_cast<unsigned>(hv) / divisor);
      this->addresses(work_tile)[this->lane] = reinterpret_cast<char*>(
          from[0] + n * from[kCoordEntries] + token * from[2 * kCoordEntries] + head * from[3 * kCoordEntries]);
      if (this->lane != 0) return;
      this->coords(work_tile)[0] = hv;
      this->coords(work_tile)[1] = end - token < kChunk ? end - token : kChunk;
      this->coords(work_tile)[2] = token;
      this->coords(work_tile)[3] = packed ? 0 : n;
    }
  }
};

}  // namespace fw::cuda
