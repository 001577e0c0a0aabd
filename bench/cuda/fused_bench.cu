// Times of the fused forward alone (scan/cuda/sm90/fused) on a GPU, over random inputs: medians of 20 launches by
// CUDA events. `fastweight bench --rule gated_deltanet --device cuda --operands bf16` has whole calls, and with
// --segment -1 those of prepare and scan.
// Build: `nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a -O3 --expt-relaxed-constexpr -cudart static -Isrc
// -Itests -Iinclude -lfmt`. Its files: bench/cuda/fused_bench.cu, src/scan/cuda/sm90/fused/forward.cu,
// src/gpu/tensor_{map.cu,arg.cpp}.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "bench_times.h"
#include "scan/cuda/kernels.h"

namespace fw::cuda {
namespace {

using bench::allocate;
using bench::median_ms;

constexpr int kDim = 128;

uint32_t fused_seed = 1;
float uniform() {
  fused_seed = fused_seed * 1664525u + 1013904223u;
  return static_cast<float>(fused_seed >> 8) / (1 << 24);
}
// Fills device memory with copies of 2^20 values of `make`.
template <class T, class Make>
T* filled(int64_t count, const Make& make) {
  T* const to = allocate<T>(count);
  std::vector<T> values(static_cast<size_t>(std::min<int64_t>(count, 1 << 20)));
  for (T& x : values) x = make();
  for (int64_t done = 0; done < count; done += static_cast<int64_t>(values.size())) {
    const auto part = static_cast<size_t>(std::min<int64_t>(count - done, static_cast<int64_t>(values.size())));
    check(cudaMemcpy(to + done, values.data(), part * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  return to;
}

void time_fused(int B, int T, int H, int HV, bool states) {
  const int64_t tokens = int64_t{B} * T;
  const auto row = [] {
    const float x = 3 * (uniform() - 0.5f);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
  };
  auto *const q = filled<uint16_t>(tokens * H * kDim, row), *const k = filled<uint16_t>(tokens * H * kDim, row);
  auto *const v = filled<uint16_t>(tokens * HV * kDim, row), *const o = allocate<uint16_t>(tokens * HV * kDim);
  auto* const g = filled<float>(tokens * HV, [] { return -std::log1p(std::exp(4 * (uniform() - 0.5f))); });
  auto *const step = filled<float>(tokens * HV, uniform), *const state =
                                                              filled<float>(int64_t{B} * HV * kDim * kDim, uniform);
  FusedForwardArgs args;
  Problem& x = args.problem;
  x.rule.decay = Decay::kScalar, x.rule.gain = Gain::kGate;
  x.rule.q_norm = x.rule.k_norm = Norm::kL2;
  x.scale = 0.088f;
  x.B = B, x.T = T, x.H = H, x.HV = HV, x.K = x.V = kDim, x.group = HV / H, x.tokens = tokens;
  x.sequences.N = B, x.sequences.T = T, x.sequences.chunks = (T + 63) / 64;
  const auto tensor = [&](void* data, int heads, int dim, bool bf16) {
    return TokenArg{data, int64_t{T} * heads * dim, int64_t{heads} * dim, dim, bf16 ? 1 : 0, HV / heads};
  };
  x.in.q = tensor(q, H, kDim, true), x.in.k = tensor(k, H, kDim, true), x.in.v = tensor(v, HV, kDim, true);
  x.in.g = tensor(g, HV, 1, false), x.in.beta = tensor(step, HV, 1, false);
  args.o = tensor(o, HV, kDim, true);
  args.shape = {B, T};
  const int64_t head = kDim * kDim;
  if (states) args.initial_state = args.final_state = {state, HV * head, head, 1, kDim, 0};
  const double ms = median_ms([&] { fused_forward(args, nullptr); });
  const int grid = B * HV, rounds = (grid + 131) / 132;
  const double bytes = static_cast<double>(tokens) * (H + HV) * 2 * kDim * 2;
  std::printf("%d x %d, %d key and %d value heads%s: %.4f ms, %.3f us a chunk, %.2f TB/s\n", B, T, H, HV,
              states ? ", states" : "", ms, ms * 1e3 / x.sequences.chunks / rounds, bytes / ms / 1e9);
  std::fflush(stdout);
  for (void* p : {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v), static_cast<void*>(o),
                  static_cast<void*>(g), static_cast<void*>(step), static_cast<void*>(state)})
    check(cudaFree(p), "cudaFree");
}

}  // namespace
}  // namespace fw::cuda

int main() {
  for (int turn = 0; turn < 2; ++turn) {
    fw::cuda::time_fused(8, 8192, 16, 16, false);
    fw::cuda::time_fused(8, 8192, 16, 16, true);
    fw::cuda::time_fused(4, 8192, 16, 64, false);
    fw::cuda::time_fused(4, 4096, 16, 16, false);
  }
  return 0;
}
