// What emulation.h needs of the emulator: where the running thread is, how a grid is run, and the operations after its
// templates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace fw::cuda::emulation {

// Of the thread that runs on this thread of the system.
struct Position {
  unsigned thread;
  unsigned threads;
  unsigned block[3];
  unsigned grid[3];
  char* shared;
  std::size_t shared_bytes;
};
extern constinit thread_local Position position;

struct GridShape {
  unsigned x, y, z, threads;
  std::size_t shared_bytes;
  const void* kernel;  // its name in messages
  bool overlapped;     // launch_overlapped(): it may begin before the grid before it is over
  unsigned cluster;    // blocks along x that run side by side
};
// Calls kernel() once for each thread of each block. With FW_EMULATION_EARLY not before the next call or finish()
// (gpu.h), so that the next grid's blocks can begin before.
void run_grid(const GridShape& shape, std::function<void()> kernel);

// By a thread of a grid that may have begun early: returns when the grid in front is over.
void grid_wait();
// first: before this thread's block has waited.
void grid_launch(bool first);

enum class Shuffle { kXor, kUp, kDown, kIndex };
uint32_t shuffle(uint32_t x, Shuffle kind, int parameter, int width);

void cp_async_wait(int groups);
void bulk_wait(int groups, bool written);

// What a TensorMap holds here: extents and strides in bytes of channels, heads, tokens and batches, and the tokens of a
// SW128 tile.
struct TensorBox {
  const char* data;
  int64_t extent[4], stride[4];
  int rows;
};

struct Wgmma {
  float* d;
  const uint32_t* a;  // registers, or null:
  uint64_t a_descriptor;
  uint64_t b_descriptor;
  int n;
  bool transpose_a, transpose_b, accumulate;
};
void wgmma(const Wgmma& product);
void wgmma_wait(int groups);

}  // namespace fw::cuda::emulation
