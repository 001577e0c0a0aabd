// Times of the kernels of rules without an erase (kernels.h: offline_*) on a GPU: medians of 20 launches by CUDA
// events, scalar decay, bf16 tensors. The inputs of a launch are larger than the L2, so they come from memory each
// time.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "bench_times.h"
#include "scan/cuda/kernels.h"

namespace fw::cuda {
namespace {

using bench::allocate;
using bench::median_ms;

// Fills device memory with copies of what the host has.
template <class T>
T* filled(int64_t count, const std::vector<T>& pattern) {
  T* const to = allocate<T>(count);
  for (int64_t done = 0; done < count; done += static_cast<int64_t>(pattern.size())) {
    const int64_t some = std::min<int64_t>(static_cast<int64_t>(pattern.size()), count - done);
    check(cudaMemcpy(to + done, pattern.data(), static_cast<size_t>(some) * sizeof(T), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }
  return to;
}

void time_kernels(const char* name, int key, int B, int T, int H, int V) {
  const int chunks = (T + 63) / 64, blocks = (V + 63) / 64;
  const int64_t tiles = static_cast<int64_t>(B) * chunks * H, tokens = static_cast<int64_t>(B) * T * H;
  uint32_t seed = 1;
  const auto random = [&] { return static_cast<int>((seed = seed * 1664525u + 1013904223u) >> 16); };
  std::vector<uint16_t> rows(1 << 20);
  for (auto& x : rows) x = static_cast<uint16_t>(0x3e00 + (random() & 0x80ff));
  std::vector<float> decays(1 << 16);
  for (auto& x : decays) x = -static_cast<float>(random() & 0xff) / 2560;
  uint16_t *const q = filled(tokens * key, rows), *const k = filled(tokens * key, rows),
                  *const v = filled(tokens * V, rows), *const d_o = filled(tokens * V, rows);
  float* const g = filled(tokens, decays);
  uint16_t *const o = allocate<uint16_t>(tokens * V), *const dq = allocate<uint16_t>(tokens * key),
                  *const dk = allocate<uint16_t>(tokens * key);
  float *const dg = allocate<float>(tokens), *const last = allocate<float>(static_cast<int64_t>(B) * H * key * V);
  uint16_t *const states = allocate<uint16_t>(tiles * blocks * 64 * key), *const d_states = allocate<uint16_t>(
                                                                              tiles * blocks * 64 * key);

  Problem x;
  x.rule.update = Update::kAdditive, x.rule.decay = Decay::kScalar, x.scale = 0.1f;
  x.B = B, x.T = T, x.H = x.HV = H, x.K = key, x.V = V, x.tokens = static_cast<int64_t>(B) * T;
  x.sequences = {nullptr, nullptr, B, T, chunks};
  const auto arg = [&](void* data, int dim, bool bf16) {
    return TokenArg{data, static_cast<int64_t>(T) * H * dim, static_cast<int64_t>(H) * dim, dim, bf16 ? 1 : 0, 1};
  };
  x.in.q = arg(q, key, true), x.in.k = arg(k, key, true), x.in.v = arg(v, V, true), x.in.g = arg(g, 1, false);
  const StateArg state{last, static_cast<int64_t>(H) * key * V, static_cast<int64_t>(key) * V, 1, key, 0};
  const double key_row = static_cast<double>(tokens) * key * 2, value_row = static_cast<double>(tokens) * V * 2,
               state_bytes = static_cast<double>(tiles) * blocks * 64 * key * 2;
  const auto line = [&](const char* what, double bytes, const std::function<void()>& launch_once) {
    const double ms = median_ms(launch_once);
    std::printf("%-22s key %3d  %-16s %8.4f ms  %6.3f GB  %5.2f TB/s\n", name, key, what, ms, bytes / 1e9,
                bytes / ms / 1e9);
    std::fflush(stdout);
  };
  AdditiveScanArgs f;
  f.problem = x, f.sequences = x.sequences, f.o = arg(o, V, true), f.to = state;
  line("forward", 2 * key_row + 2 * value_row, [&] { additive_scan(f, key, nullptr); });
  f.states = states;
  line("forward, saves", 2 * key_row + 2 * value_row + state_bytes, [&] { additive_scan(f, key, nullptr); });
  f.o = {}, f.states = nullptr;
  line("state alone", key_row + value_row, [&] { additive_scan(f, key, nullptr); });
  f.reverse = true, f.d_o = arg(d_o, V, true), f.states = d_states;
  line("reverse, saves", key_row + value_row + state_bytes, [&] { additive_scan(f, key, nullptr); });
  AdditiveGradientArgs d;
  d.problem = x, d.d_o = f.d_o, d.states = states, d.d_states = d_states;
  d.grads.d.q = arg(dq, key, true), d.grads.d.k = arg(dk, key, true), d.grads.d.v = arg(o, V, true),
  d.grads.d.g = arg(dg, 1, false);
  line("gradients", 4 * key_row + 3 * value_row + 2 * state_bytes,
       [&] { additive_gradients(d, key, static_cast<int64_t>(B) * chunks, nullptr); });
  for (void* p :
       {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v), static_cast<void*>(d_o),
        static_cast<void*>(g), static_cast<void*>(o), static_cast<void*>(dq), static_cast<void*>(dk),
        static_cast<void*>(dg), static_cast<void*>(last), static_cast<void*>(states), static_cast<void*>(d_states)})
    check(cudaFree(p), "cudaFree");
}

}  // namespace
}  // namespace fw::cuda

int main() {
  fw::cuda::time_kernels("S1: B 4, T 4096, H 16", 128, 4, 4096, 16, 128);
  fw::cuda::time_kernels("S2: 4 of T 8192, H 16", 128, 4, 8192, 16, 128);
  fw::cuda::time_kernels("B 4, T 4096, H 32", 64, 4, 4096, 32, 64);
  return 0;
}
