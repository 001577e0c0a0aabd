// Times of the chunk form's scans on a GPU, over chunk tiles of small random numbers: medians of 20 launches by CUDA
// events. The inputs of a launch are larger than the L2, so they come from memory each time.
// Build: `nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a -O3 -cudart static -Isrc -Itests -Iinclude -lfmt`. Its
// files: bench/cuda/scan_bench.cu, src/scan/cuda/sm90/scan/{forward,reverse}.cu, src/gpu/tensor_{map.cu,arg.cpp}.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench_times.h"
#include "cuda/selected.h"
#include "scan/cuda/kernels.h"

namespace fw::cuda {
namespace {

using bench::allocate;
using bench::median_ms;

// Fills device memory with copies of what the host has.
void fill(void* to, int64_t bytes, const void* pattern, int64_t pattern_bytes) {
  for (int64_t done = 0; done < bytes; done += pattern_bytes)
    check(cudaMemcpy(static_cast<char*>(to) + done, pattern, static_cast<size_t>(std::min(pattern_bytes, bytes - done)),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
}

template <int kTileK>
void time_kernels(const char* name, int B, int T, int H, int V) {
  const int chunks = (T + 63) / 64, blocks = (V + 63) / 64;
  const int64_t chunk_tiles = static_cast<int64_t>(B) * chunks * H, tokens = static_cast<int64_t>(B) * T * H;
  uint32_t seed = 1;
  const auto random = [&] { return static_cast<int>((seed = seed * 1664525u + 1013904223u) >> 16); };
  // bf16 values of either sign, 1/64 to 1/16.
  const auto small = [&] { return static_cast<uint16_t>(0x3c80 + (random() & 0x80ff)); };
  constexpr int kDistinct = 64;
  std::vector<FwdTiles<kTileK>> forward(kDistinct);
  std::vector<BwdTiles<kTileK>> backward(kDistinct);
  for (auto& chunk_tile : forward) {
    std::generate_n(chunk_tile.e, 64 * kTileK, small);
    std::generate_n(chunk_tile.q, 64 * kTileK, small);
    std::generate_n(chunk_tile.x, 64 * kTileK, small);
    std::generate_n(chunk_tile.m, kSw128Elements, small);
    std::fill_n(chunk_tile.gamma, kTileK, 0.9f);
    std::fill_n(chunk_tile.z_scale, 64, 0.5f);
  }
  for (auto& chunk_tile : backward) {
    std::generate_n(chunk_tile.k, 64 * kTileK, small);
    std::generate_n(chunk_tile.y, 64 * kTileK, small);
    std::generate_n(chunk_tile.q, 64 * kTileK, small);
    std::fill_n(chunk_tile.gamma, kTileK, 0.9f);
  }
  std::vector<LoTiles<kTileK>> hi_lo(kDistinct);
  for (auto& chunk_tile : hi_lo) {
    // 2^-8 of the others
    std::generate_n(chunk_tile.lo, 64 * kTileK, [&] { return static_cast<uint16_t>(small() - 0x400); });
    std::fill_n(chunk_tile.scale, 64, 0.5f);
  }
  std::vector<RowTiles<kTileK>> of_rows(kDistinct);
  for (auto& chunk_tile : of_rows) {
    std::generate_n(chunk_tile.x, 64 * kTileK, small);
    std::generate_n(chunk_tile.m, kSw128Elements, small);
    std::fill_n(chunk_tile.e, 64, 0.5f);
    std::fill_n(chunk_tile.q, 64, 0.5f);
    std::fill_n(chunk_tile.z_scale, 64, 0.5f);
    std::fill_n(chunk_tile.gamma, 4, 0.9f);
  }
  std::vector<uint16_t> rows(1 << 20);
  for (auto& x : rows) x = static_cast<uint16_t>(0x3f00 + (random() & 0x80ff));

  auto* const fwd_tiles = allocate<FwdTiles<kTileK>>(chunk_tiles);
  auto* const bwd_tiles = allocate<BwdTiles<kTileK>>(chunk_tiles);
  auto *const v = allocate<uint16_t>(tokens * V), *const o = allocate<uint16_t>(tokens * V);
  auto *const states = allocate<uint16_t>(chunk_tiles * blocks * 64 * kTileK), *const w = allocate<uint16_t>(
                                                                                   chunk_tiles * blocks *
                                                                                   kSw128Elements);
  auto* const final_state = allocate<float>(static_cast<int64_t>(B) * H * kTileK * V);
  fill(fwd_tiles, chunk_tiles * static_cast<int64_t>(sizeof(FwdTiles<kTileK>)), forward.data(),
       static_cast<int64_t>(forward.size() * sizeof(forward[0])));
  fill(bwd_tiles, chunk_tiles * static_cast<int64_t>(sizeof(BwdTiles<kTileK>)), backward.data(),
       static_cast<int64_t>(backward.size() * sizeof(backward[0])));
  auto* const lo_tiles = allocate<LoTiles<kTileK>>(chunk_tiles);
  fill(lo_tiles, chunk_tiles * static_cast<int64_t>(sizeof(LoTiles<kTileK>)), hi_lo.data(),
       static_cast<int64_t>(hi_lo.size() * sizeof(hi_lo[0])));
  auto* const row_tiles = allocate<RowTiles<kTileK>>(chunk_tiles);
  fill(row_tiles, chunk_tiles * static_cast<int64_t>(sizeof(RowTiles<kTileK>)), of_rows.data(),
       static_cast<int64_t>(of_rows.size() * sizeof(of_rows[0])));
  auto *const q = allocate<uint16_t>(tokens * kTileK), *const k = allocate<uint16_t>(tokens * kTileK);
  for (uint16_t* keys : {q, k}) fill(keys, tokens * kTileK * 2, of_rows[0].x, 64 * kTileK * 2);
  fill(v, tokens * V * 2, rows.data(), static_cast<int64_t>(rows.size() * 2));

  const SequenceArg sequences{nullptr, nullptr, B, T, chunks};
  const auto rows_arg = [&](uint16_t* data) {
    return TokenArg{data, static_cast<int64_t>(T) * H * V, static_cast<int64_t>(H) * V, V, 1, 1};
  };
  const auto rows_of_keys = [&](uint16_t* data) {
    return TokenArg{data, static_cast<int64_t>(T) * H * kTileK, static_cast<int64_t>(H) * kTileK, kTileK, 1, 1};
  };
  const StateArg state{final_state, static_cast<int64_t>(H) * kTileK * V, static_cast<int64_t>(kTileK) * V, V, 1, 0};

  const double tiles_bytes = static_cast<double>(chunk_tiles) * sizeof(FwdTiles<kTileK>),
               matrix = static_cast<double>(chunk_tiles) * 64 * kTileK * 2,
               rows_bytes = static_cast<double>(tokens) * V * 2,
               save_bytes = static_cast<double>(chunk_tiles) * blocks * (64 * kTileK + kSw128Elements) * 2;
  const auto line = [&](const std::string& what, double bytes, const std::function<void()>& launch_once) {
    const double ms = median_ms(launch_once);
    const int grid = B * H * blocks, waves = (grid + 131) / 132;
    std::printf("%-22s key %3d  %-34s grid %4d  %8.4f ms  %6.3f us a chunk  %6.3f GB  %5.2f TB/s\n", name, kTileK,
                what.c_str(), grid, ms, ms * 1e3 / chunks / waves, bytes / 1e9, bytes / ms / 1e9);
    std::fflush(stdout);
  };
  enum { kAdditive, kDelta, kHiLo, kRows };
  for (const int kind : {kRows, kDelta, kHiLo, kAdditive}) {
    const bool is_delta = kind != kAdditive;
    const std::string of_kind = kind == kRows ? " from rows" : kind == kHiLo ? " fine" : is_delta ? "" : " offline";
    const double lo_bytes = kind == kHiLo ? static_cast<double>(chunk_tiles) * sizeof(LoTiles<kTileK>) : 0;
    ScanForwardArgs f;
    f.sequences = sequences, f.HV = H, f.K = kTileK, f.V = V, f.is_delta = is_delta, f.chunk_tiles = fwd_tiles,
    f.v = rows_arg(v), f.o = rows_arg(o);
    f.final_state = state;
    f.shape = {B, T};
    if (kind == kHiLo) f.hi_lo.chunk_tiles = lo_tiles;
    if (kind == kRows) f.chunk_tiles = row_tiles, f.rows = {rows_of_keys(q), rows_of_keys(k)};
    const double read = tiles_bytes - (is_delta ? 0 : matrix) + lo_bytes;
    line("forward" + of_kind, read + 2 * rows_bytes, [&] { scan_forward(f, selected(f), kTileK, nullptr); });
    f.states = states, f.w = w;
    line("forward" + of_kind + ", saves", read + 2 * rows_bytes + save_bytes,
         [&] { scan_forward(f, selected(f), kTileK, nullptr); });
    f.o = {};
    const double needed = (is_delta ? 2 : 1) * matrix + rows_bytes + lo_bytes;
    line("saves only" + of_kind, needed + save_bytes, [&] { scan_forward(f, selected(f), kTileK, nullptr); });
    f.states = f.w = nullptr;
    line("state only" + of_kind, needed, [&] { scan_forward(f, selected(f), kTileK, nullptr); });
    if (kind == kRows) continue;

    ScanReverseArgs r;
    r.sequences = sequences, r.HV = H, r.K = kTileK, r.V = V, r.is_delta = is_delta, r.chunk_tiles = bwd_tiles,
    r.d_o = rows_arg(v);
    r.shape = {B, T};
    if (kind == kHiLo) r.hi_lo.chunk_tiles = lo_tiles;
    r.d_initial_state = state, r.d_states = states, r.v = w;
    line("reverse" + of_kind, (is_delta ? 3 : 2) * matrix + rows_bytes + save_bytes + lo_bytes,
         [&] { scan_reverse(r, selected(r), kTileK, nullptr); });
  }
  for (void* p :
       {static_cast<void*>(fwd_tiles), static_cast<void*>(bwd_tiles), static_cast<void*>(v), static_cast<void*>(o),
        static_cast<void*>(states), static_cast<void*>(w), static_cast<void*>(final_state),
        static_cast<void*>(lo_tiles), static_cast<void*>(row_tiles), static_cast<void*>(q), static_cast<void*>(k)})
    check(cudaFree(p), "cudaFree");
}

}  // namespace
}  // namespace fw::cuda

int main() {
  fw::cuda::time_kernels<128>("S1: B 4, T 4096, H 16", 4, 4096, 16, 128);
  fw::cuda::time_kernels<128>("S2: B 1, T 32768, H 16", 1, 32768, 16, 128);
  fw::cuda::time_kernels<64>("B 4, T 4096, H 32", 4, 4096, 32, 64);
  return 0;
}
