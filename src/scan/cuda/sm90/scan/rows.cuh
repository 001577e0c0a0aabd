// How the scans load rows of tensors of tokens. TMA loads them as SW128 tiles (value heads of a group find each other's
// in the L2 cache). The threads of two warps load where it cannot take a tensor, and for the last rows of a sequence
// after which another one begins.
#pragma once

#include "gpu/sm90/ptx.cuh"
#include "gpu/tensor_map.h"
#include "scan/cuda/sm90/scan/parts.cuh"

namespace fw::cuda {

// What TMA can load of a stage: v, and where the forward scan takes the raw rows (tiles.h: RowTiles) k and q.
struct StageMaps {
  TensorMap v, k, q;
  int32_t values = 0, rows = 0;
};

inline bool map_tensor(const TokenArg& a, const TokenShape& shape, int HV, int dim, TensorMap& map) {
  return make_tensor_map(a, shape.B, shape.T, HV / a.divisor, dim, map);
}

inline bool map_rows(const ScanRows& rows, const TokenShape& shape, int HV, int K, StageMaps& maps) {
  return map_tensor(rows.k, shape, HV, K, maps.k) && map_tensor(rows.q, shape, HV, K, maps.q);
}

// Of one sequence or segment and value head.
struct TmaCoord {
  int batch, token, length;
  bool packed;  // after the sequence's last row there may be another's
  FW_DEVICE TmaCoord(const SequenceArg& sequences, const ScanCoord& coord)
      : length(coord.length), packed(sequences.offsets != nullptr) {
    const SequenceStart start = sequence_start(sequences, coord.n);
    batch = static_cast<int>(start.b), token = static_cast<int>(start.t);
  }
  // TMA puts zeros only after the end of a tensor.
  FW_DEVICE bool takes(int c) const { return !packed || c * kChunk + kChunk <= length; }
  // By one thread; the bytes, kTensorBytes a SW128 tile, count towards `full`.
  FW_DEVICE void bring(const TensorMap& map, int column, int head, int c, char* sw128, uint64_t* full) const {
    tensor_load(sw128, map, column, head, token + c * kChunk, batch, full);
  }
};

}  // namespace fw::cuda
