// The kernels of kernels.def as numbers, by phase, and what a choice of one says besides.
#pragma once

#include <cstdint>

namespace fw::cuda {

// What prepare leaves in memory for the forward scan (tiles.h).
using Tiles = uint32_t;
inline constexpr Tiles kNoTiles = 0, kFwdTiles = 1, kRowTiles = 2, kRowScales = 4, kIntraChunk = 8, kQeTiles = 16,
                       kXmTiles = 32, kLoTiles = 64;

enum class PrepareKernel : uint8_t {
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) id,
#include "scan/cuda/kernels.def"
};
enum class ForwardScan : uint8_t {
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) id,
#include "scan/cuda/kernels.def"
};
enum class ReverseScan : uint8_t {
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) id,
#include "scan/cuda/kernels.def"
};
enum class GradientKernel : uint8_t {
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) id,
#include "scan/cuda/kernels.def"
};
enum class TokenKernel : uint8_t {
#define FW_TOKEN_FORWARD(id, name, arch, takes) id,
#include "scan/cuda/kernels.def"
};

inline constexpr int kMostGroupedHeads = 8;  // of a block of prepare/grouped
inline constexpr int kGroupedBlocks = 3;     // of it, of an SM

struct PrepareChoice {
  PrepareKernel kernel = PrepareKernel::kScalarRead;
  int heads = 1;  // kGrouped: value heads of a block
  Tiles leaves = kNoTiles;
  bool fuses_scalars = false;  // takes gates of one value per token as logits
};
struct TokenChoice {
  TokenKernel kernel = TokenKernel::kTokens;
  int channels = 4;  // of a lane: 2, 4 or 8
  int rows = 2;      // of a warp: 2 or 8, so that every SM has two blocks
  int parts = 1;     // kHeads, kRingHeads: blocks of a head
};

}  // namespace fw::cuda
