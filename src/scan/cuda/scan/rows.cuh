// How the scans bring rows of tensors of tokens: the copy engine as panels (value heads of a group find each other's in the L2 cache), or, where it cannot take
// a tensor and for the last rows of a sequence behind which another one begins, the threads of two warps.
#pragma once

#include "scan/cuda/call/tensor_map.h"
#include "scan/cuda/scan/parts.cuh"

namespace fw::cuda {

// What the engine can bring of a stage: v, and where the forward scan takes the raw rows (tiles.h: RowTiles) k and q.
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
  bool packed;  // behind the sequence's last row there may be another's
  FW_DEVICE TmaCoord(const SequenceArg& sequences, const ScanCoord& place) : length(place.length), packed(sequences.offsets != nullptr) {
    const SequenceStart start = sequence_start(sequences, place.n);
    batch = static_cast<int>(start.b), token = static_cast<int>(start.t);
  }
  // The engine puts zeros only behind the end of a tensor.
  FW_DEVICE bool takes(int c) const { return !packed || c * kChunk + kChunk <= length; }
  // By one thread; the bytes, kTensorBytes a panel, count towards `full`.
  FW_DEVICE void bring(const TensorMap& map, int column, int head, int c, char* panel, uint64_t* full) const {
    tensor_load(panel, map, column, head, token + c * kChunk, batch, full);
  }
};

// Panels of the rows of a head of a tensor with K channels, of which copy_tile() can take 16 bytes at a time; zeros behind them.
template <int kTileK>
FW_DEVICE void copy_rows(const TokenArg& a, const SequenceArg& sequences, const ScanCoord& place, int c, int K, char* panels) {
  const TileRows rows{rows_of(a, sequences, place.n, place.hv), place.length, 0, K, true};
  FW_UNROLL
  for (int panel = 0; panel < kTileK / 64; ++panel) {
    TileRows part = rows;
    part.column = 64 * panel;
    copy_tile(part, c, panels + panel * kSw128Bytes);
  }
}

// By the 64 threads of warps 0 and 1: of rows of any kind.
template <int kTileK>
FW_DEVICE void fill_rows(const TokenArg& tensor, const SequenceArg& sequences, const ScanCoord& place, int c, int K, char* panels) {
  TileRows rows = tile_rows(tensor, sequences, place, K);
  FW_UNROLL
  for (int panel = 0; panel < kTileK / 64; ++panel) {
    rows.column = 64 * panel;
    fill_tile(rows, c, panels + panel * kSw128Bytes);
  }
}

}  // namespace fw::cuda
