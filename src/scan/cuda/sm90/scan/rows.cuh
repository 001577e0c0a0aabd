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

// SW128 tiles of the rows of a head of a tensor with K channels, of which copy_tile() can take 16 bytes at a time;
// zeros after them.
template <int kTileK>
FW_DEVICE void copy_rows(const TokenArg& a, const SequenceArg& sequences, const ScanCoord& coord, int c, int K,
                         char* sw128_tiles) {
  const TileRows rows{rows_of(a, sequences, coord.n, coord.hv), coord.length, 0, K, true};
  FW_UNROLL
  for (int sw128 = 0; sw128 < kTileK / 64; ++sw128) {
    TileRows part = rows;
    part.column = 64 * sw128;
    copy_tile(part, c, sw128_tiles + sw128 * kSw128Bytes);
  }
}

// By the 64 threads of warps 0 and 1: of rows of any kind.
template <int kTileK>
FW_DEVICE void fill_rows(const TokenArg& tensor, const SequenceArg& sequences, const ScanCoord& coord, int c, int K,
                         char* sw128_tiles) {
  TileRows rows = tile_rows(tensor, sequences, coord, K);
  FW_UNROLL
  for (int sw128 = 0; sw128 < kTileK / 64; ++sw128) {
    rows.column = 64 * sw128;
    fill_tile(rows, c, sw128_tiles + sw128 * kSw128Bytes);
  }
}

}  // namespace fw::cuda
