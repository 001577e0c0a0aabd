// Time of prepare on a GPU: medians of 20 with CUDA events, inputs and outputs rotated so that nothing is left in the
//   L2 cache. prepare_bench [rule, all if none]
// nvcc -std=c++20 -gencode arch=compute_90a,code=sm_90a -O3 --expt-relaxed-constexpr -cudart static -Isrc -Itests
//   -Iinclude bench/cuda/prepare_bench.cu src/scan/cuda/sm90/prepare/*.cu -lfmt
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/selected.h"
#include "gpu/launch.h"

namespace fw::cuda {
namespace {

__global__ void fill(uint16_t* low, float* full, int64_t count, float scale, float shift, uint32_t seed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
  h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
  const float x = shift + scale * (static_cast<float>(h & 0xffffffu) / 8388608.0f - 1.0f);
  if (low != nullptr) {
    low[i] = static_cast<uint16_t>(__float_as_uint(x) >> 16);
  } else {
    full[i] = x;
  }
}

char* allocate(int64_t bytes) {
  char* memory = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&memory), static_cast<std::size_t>(bytes)), "cudaMalloc");
  return memory;
}

// [B, T, heads, dim], values in shift +- scale.
TokenArg tensor(int64_t B, int64_t T, int64_t heads, int64_t dim, bool bf16, float scale, float shift, uint32_t seed) {
  const int64_t count = B * T * heads * dim;
  TokenArg a;
  a.data = allocate(count * (bf16 ? 2 : 4));
  a.stride_b = T * heads * dim, a.stride_t = heads * dim, a.stride_h = dim, a.bf16 = bf16;
  fill<<<static_cast<unsigned>((count + 255) / 256), 256>>>(bf16 ? static_cast<uint16_t*>(a.data) : nullptr,
                                                            static_cast<float*>(a.data), count, scale, shift, seed);
  return a;
}

struct Named {
  std::string name;
  Rule rule;
  bool low_g = false;  // bf16 log-decays of channels
};

void bench(const Named& named, const char* shape, int B, int T, int H) {
  constexpr int K = 128, V = 128, kCopies = 2, kRuns = 20;
  const Rule& rule = named.rule;
  const int64_t chunks = static_cast<int64_t>(B) * (T / 64), items = chunks * H,
                tokens = static_cast<int64_t>(B) * T * H;
  const bool z = rule.write == Gate::kChannel;
  const int erase_gates = rule.erase == Gate::kScalar ? 1 : K;
  std::vector<PrepareArgs> copies(kCopies);
  std::vector<void*> memory;
  for (int c = 0; c < kCopies; ++c) {
    PrepareArgs& a = copies[static_cast<std::size_t>(c)];
    Problem& x = a.problem;
    x.rule = rule, x.scale = 0.088f, x.B = B, x.T = T, x.H = x.HV = H, x.K = K, x.V = V;
    x.tokens = static_cast<int64_t>(B) * T;
    x.sequences.N = B, x.sequences.T = T, x.sequences.chunks = T / 64;
    const uint32_t seed = static_cast<uint32_t>(c) * 77u;
    x.in.q = tensor(B, T, H, K, true, 1, 0, seed + 1), x.in.k = tensor(B, T, H, K, true, 1, 0, seed + 2),
    x.in.v = tensor(B, T, H, V, true, 1, 0, seed + 3);
    if (rule.uses_g())
      x.in.g = tensor(B, T, H, rule.decay == Decay::kChannel ? K : 1, named.low_g, 0.05f, -0.06f, seed + 4);
    for_each_scalar(
        rule,
        [&, salt = 20u](TokenArg& to) mutable {
          to = tensor(B, T, H, 1, false, 0.4f, 0.5f, seed + salt++);
          memory.push_back(to.data);
        },
        x.in);
    if (rule.uses_erase_gate()) x.in.erase_gate = tensor(B, T, H, erase_gates, erase_gates > 1, 0.4f, 0.5f, seed + 6);
    if (rule.uses_write_gate()) x.in.write_gate = tensor(B, T, H, V, true, 0.4f, 0.5f, seed + 7);
    if (rule.uses_precond()) {
      x.in.precond_g = tensor(B, T, H, 1, false, 0.05f, -0.06f, seed + 10),
      x.in.precond_beta = tensor(B, T, H, 1, false, 0.4f, 0.5f, seed + 11);
      x.precond_center = static_cast<const float*>(tensor(1, 1, H, 1, false, 0, -0.2f, seed + 12).data);
      const TokenArg a_before = tensor(1, chunks, H, K, false, 0.2f, 0.3f, seed + 13),
                     m = tensor(B, T, H, K, false, 0.3f, 1, seed + 8);
      prepare_makes_m(problem_traits(x, K, chunks, sm_count()))
          ? x.boundaries = static_cast<const float*>(a_before.data)
          : x.m = static_cast<const float*>(m.data);
      a.spare_m = static_cast<float*>(m.data);
      for (void* p : {x.in.precond_g.data, x.in.precond_beta.data, a_before.data, m.data}) memory.push_back(p);
      if (rule.decay == Decay::kChannel) {
        x.precond_rows = reinterpret_cast<uint16_t*>(allocate(tokens * K * 2));
        memory.push_back(x.precond_rows);
      }
    }
    a.forward = allocate(items * static_cast<int64_t>(sizeof(FwdTiles<K>)));
    a.keeps_intra_chunk = (selected(a, K, chunks).leaves & kIntraChunk) != 0;
    if (reverse_takes_rows(rule)) {
      a.numbers = reinterpret_cast<RowScalesBwd*>(allocate(items * static_cast<int64_t>(sizeof(RowScalesBwd))));
    } else if (stores_k_hat(rule)) {
      a.solved = allocate(items * static_cast<int64_t>(sizeof(XMTiles<K>)));
      a.keys = reinterpret_cast<uint16_t*>(allocate(items * 64 * K * 2));
    } else {
      a.backward = allocate(items * static_cast<int64_t>(sizeof(BwdTiles<K>)));
    }
    a.pairs = reinterpret_cast<IntraChunk*>(allocate(items * static_cast<int64_t>(sizeof(IntraChunk))));
    if (uses_hi_lo(rule)) {
      for (HiLoTiles* hi_lo : {&a.forward_lo, &a.backward_lo}) {
        hi_lo->chunk_tiles = allocate(items * static_cast<int64_t>(sizeof(LoTiles<K>)));
        memory.push_back(hi_lo->chunk_tiles);
        if (rule.decay != Decay::kChannel) continue;
        hi_lo->lo_parts = reinterpret_cast<uint16_t*>(allocate(items * 64 * K * 2));
        memory.push_back(hi_lo->lo_parts);
      }
    }
    if (z) a.z = reinterpret_cast<uint16_t*>(allocate(tokens * V * 2));
    for (const TokenArg& t : {x.in.q, x.in.k, x.in.v, x.in.g, x.in.erase_gate, x.in.write_gate})
      memory.push_back(t.data);
    for (void* p : {a.forward, a.solved, static_cast<void*>(a.keys), a.backward, static_cast<void*>(a.numbers),
                    static_cast<void*>(a.pairs), static_cast<void*>(a.z)})
      memory.push_back(p);
  }
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&stop), "event");
  for (const bool training : {false, true}) {
    std::vector<float> times;
    for (int i = 0; i < kRuns + 3; ++i) {
      PrepareArgs a = copies[static_cast<std::size_t>(i % kCopies)];
      if (!training) a.backward = nullptr, a.numbers = nullptr, a.keys = nullptr, a.problem.precond_rows = nullptr;
      if (!training && !a.keeps_intra_chunk) a.pairs = nullptr;
      check(cudaEventRecord(start), "record");
      prepare(a, selected(a, K, chunks), K, chunks, nullptr);
      check(cudaEventRecord(stop), "record");
      check(cudaEventSynchronize(stop), "prepare");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, start, stop), "elapsed");
      if (i >= 3) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    const bool is_delta = rule.is_delta();
    double bytes = 512 + (rule.decay == Decay::kChannel ? (named.low_g ? 256 : 512) : 4) +
                   (rule.uses_precond() ? 512 : 0) +
                   (rule.uses_erase_gate() ? (erase_gates > 1 ? 2 * erase_gates : 8) : 4) + (z ? 768 : 0);
    const bool pairs = copies[0].keeps_intra_chunk;
    bytes += (pairs                                                ? 30 + 256
              : selected(copies[0], K, chunks).leaves == kRowTiles ? 396
              : is_delta                                           ? 904
                                                                   : 648) +
             (!training                  ? 0
              : reverse_takes_rows(rule) ? 22 + (pairs ? 0 : 256)
              : stores_k_hat(rule)       ? 256 + 256
              : is_delta                 ? 768 + 256
                                         : 512 + 128) +
             (uses_hi_lo(rule) ? (training ? 2 : 1) * (rule.decay == Decay::kChannel ? 516 : 260) : 0);
    const double ms = times[times.size() / 2];
    std::printf("%-16s %s %-9s %.4f ms  %.2f us a chunk and SM  %.2f TB/s\n", named.name.c_str(), shape,
                training ? "training" : "forward", ms, ms * 1e3 * 132 / static_cast<double>(items),
                bytes * static_cast<double>(tokens) / ms * 1e-9);
  }
  std::fflush(stdout);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  for (void* p : memory) cudaFree(p);
}

}  // namespace
}  // namespace fw::cuda

int main(int argc, char** argv) {
  using namespace fw;
  using cuda::Named;
  std::vector<Named> rules(9);
  rules[0].name = "gated_deltanet", rules[1].name = "kda", rules[2].name = "gated_deltanet2", rules[3].name = "mamba2",
  rules[4].name = "deltanet_neg";
  rules[5].name = "qdelta", rules[6].name = "comba", rules[7].name = "precond_gated_deltanet",
  rules[8].name = "precond_mamba2";
  for (Named& named : rules) named.rule.q_norm = named.rule.k_norm = Norm::kL2, named.rule.decay = Decay::kChannel;
  rules[0].rule.decay = Decay::kScalar, rules[0].rule.gain = rules[1].rule.gain = Gain::kGate;
  rules[2].rule.erase = rules[2].rule.write = Gate::kChannel;
  rules[3].rule.decay = Decay::kScalar, rules[3].rule.update = Update::kAdditive,
  rules[3].rule.q_norm = rules[3].rule.k_norm = Norm::kRaw;
  rules[4].rule.decay = Decay::kNone, rules[4].rule.gain = Gain::kGate, rules[4].rule.gain_bound = 2;
  rules[5].rule.decay = rules[6].rule.decay = Decay::kScalar, rules[5].rule.gain = rules[6].rule.gain = Gain::kGate;
  rules[5].rule.feedback = Feedback::kLearned, rules[6].rule.erase = Gate::kScalar,
  rules[6].rule.read = Read::kCorrected;
  rules[7].rule.decay = rules[8].rule.decay = Decay::kScalar, rules[7].rule.gain = rules[8].rule.gain = Gain::kGate;
  rules[7].rule.precond = Precond::kDiagonal, rules[8].rule.precond = Precond::kRead,
  rules[8].rule.update = Update::kAdditive;
  rules.push_back(rules[1]);
  rules.back().name = "kda_bf16_g", rules.back().low_g = true;
  rules.push_back(rules[2]);
  rules.back().name = "gated_deltanet2_bf16_g", rules.back().low_g = true;
  rules.push_back(rules[1]);
  rules.back().name = "precond_kda", rules.back().rule.precond = Precond::kDiagonal;
  rules.push_back(rules[1]);
  rules.back().name = "kda_neg", rules.back().rule.gain_bound = 2;
  try {
    for (const Named& named : rules) {
      if (argc > 1 && named.name != argv[1]) continue;
      cuda::bench(named, "S1", 4, 4096, 16);
      cuda::bench(named, "S2", 1, 32768, 16);
    }
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
  return 0;
}
