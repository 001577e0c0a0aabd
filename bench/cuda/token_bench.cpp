// Times the kernels that go token by token, and the preconditioner, on a GPU: medians of a graph of launches over
// different memory (more than the cache holds), and of plain launches. K = V = 128, 16 heads. token_bench [part of a
// line's text] [once]: only those lines; once, without a graph, for a profiler.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "cuda/selected.h"
#include "gpu/device.h"
#include "gpu/launch.h"
#include "gpu/upload.h"
#include "rule/rule.h"
#include "scan/cuda/kernels.h"

namespace fw::cuda::test {
namespace {

constexpr int kHeads = 16, kDim = 128;

const char* only = "";
bool once = false;

struct Memory {
  std::vector<void*> blocks;
  ~Memory() {
    for (void* p : blocks) cudaFree(p);
  }
  template <class T>
  T* zeros(int64_t count) {
    void* p = nullptr;
    check(cudaMalloc(&p, static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T)), "cudaMalloc");
    check(cudaMemset(p, 0, static_cast<size_t>(count) * sizeof(T)), "cudaMemset");
    blocks.push_back(p);
    return static_cast<T*>(p);
  }
  // Numbers near zero.
  float* noise(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    uint32_t state = 54321;
    for (float& v : values) {
      state = state * 1664525u + 1013904223u;
      v = 0.01f * (static_cast<float>(state >> 8) / 8388608.0f - 1.0f);
    }
    float* p = zeros<float>(count);
    check(cudaMemcpy(p, values.data(), values.size() * 4, cudaMemcpyHostToDevice), "copy");
    return p;
  }
  // Numbers near `mean` as bf16.
  TokenArg tensor(int64_t B, int64_t T, int64_t dim, float mean) {
    const int64_t count = B * T * kHeads * dim;
    std::vector<uint16_t> values(static_cast<size_t>(count));
    uint32_t state = 12345;
    for (uint16_t& v : values) {
      state = state * 1664525u + 1013904223u;
      const float x = mean + 0.1f * (static_cast<float>(state >> 8) / 8388608.0f - 1.0f);
      uint32_t bits;
      __builtin_memcpy(&bits, &x, 4);
      v = static_cast<uint16_t>(bits >> 16);
    }
    uint16_t* p = zeros<uint16_t>(count);
    check(cudaMemcpy(p, values.data(), values.size() * 2, cudaMemcpyHostToDevice), "copy");
    return {p, T * kHeads * dim, kHeads * dim, dim, 1, 1};
  }
  TokenArg floats(int64_t B, int64_t T, int64_t dim) {
    return {zeros<float>(B * T * kHeads * dim), T * kHeads * dim, kHeads * dim, dim, 0, 1};
  }
  StateArg state(int64_t N, bool bf16, bool v_first) {
    const int64_t one = kDim * kDim;
    void* p = bf16 ? static_cast<void*>(zeros<uint16_t>(N * kHeads * one)) : zeros<float>(N * kHeads * one);
    return {p, kHeads * one, one, v_first ? 1 : kDim, v_first ? kDim : 1, bf16 ? 1 : 0};
  }
};

Problem problem(Memory& memory, const char* rule, int64_t B, int64_t T) {
  Problem x;
  x.rule = preset(rule).rule;
  x.scale = 0.0884f;
  x.B = static_cast<int32_t>(B), x.T = static_cast<int32_t>(T);
  x.H = x.HV = kHeads, x.K = x.V = kDim;
  x.tokens = B * T;
  x.sequences.N = x.B, x.sequences.T = x.T, x.sequences.chunks = static_cast<int32_t>((T + kChunk - 1) / kChunk);
  x.in.q = memory.tensor(B, T, kDim, 0), x.in.k = memory.tensor(B, T, kDim, 0), x.in.v = memory.tensor(B, T, kDim, 0);
  if (x.rule.uses_g()) x.in.g = memory.tensor(B, T, x.rule.decay == Decay::kChannel ? kDim : 1, -0.2f);
  if (x.rule.uses_beta()) x.in.beta = memory.tensor(B, T, 1, 0.5f);
  if (x.rule.uses_erase_gate()) x.in.erase_gate = memory.tensor(B, T, kDim, 0.5f);
  if (x.rule.uses_write_gate()) x.in.write_gate = memory.tensor(B, T, kDim, 0.5f);
  if (x.rule.uses_precond()) {
    x.in.precond_g = memory.tensor(B, T, 1, -0.2f), x.in.precond_beta = memory.tensor(B, T, 1, 0.5f);
    x.precond_center = memory.zeros<float>(kHeads);
  }
  return x;
}

// Median microseconds of one of `count` calls, in a graph and one by one.
struct Times {
  double graph, plain;
};
Times times(int count, const std::function<void(int, void*)>& call) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  for (int i = 0; i < count; ++i) call(i, stream);
  check(cudaStreamSynchronize(stream), "kernels");
  if (once) return {0, 0};
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < count; ++i) call(i, stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  const auto median = [&](const std::function<void()>& run) {
    std::vector<double> all;
    for (int i = 0; i < 23; ++i) {
      check(cudaEventRecord(begin, stream), "event");
      run();
      check(cudaEventRecord(end, stream), "event");
      check(cudaStreamSynchronize(stream), "kernels");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "event");
      if (i >= 3) all.push_back(1e3 * static_cast<double>(ms) / count);
    }
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  };
  Times result{};
  result.graph = median([&] { check(cudaGraphLaunch(exec, stream), "graph"); });
  result.plain = median([&] {
    for (int i = 0; i < count; ++i) call(i, stream);
  });
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return result;
}

void report(const char* what, const Times& t, double bytes) {
  std::printf("%-64s graph %9.2f us  plain %9.2f us  %7.0f GB/s (%.0f%% of 4270)\n", what, t.graph, t.plain,
              bytes / t.graph * 1e-3, bytes / t.graph * 1e-3 / 42.7);
  std::fflush(stdout);
}

void decode(const char* rule, int64_t sequences, int64_t T, bool bf16_state, bool v_first) {
  char text[160];
  std::snprintf(text, sizeof text, "decode %s, %lld x 16 heads, %lld token, state %s %s", rule,
                static_cast<long long>(sequences), static_cast<long long>(T), bf16_state ? "bf16" : "f32",
                v_first ? "[V, K]" : "[K, V]");
  if (std::strstr(text, only) == nullptr) return;
  Memory memory;
  const Problem base = problem(memory, rule, sequences, T);
  const double bytes = 2.0 * static_cast<double>(sequences * kHeads * kDim * kDim) * (bf16_state ? 2 : 4);
  const int layers = once ? 1 : static_cast<int>(std::clamp(4e8 / bytes, 4.0, 64.0));
  std::vector<TokenForwardArgs> args;
  const TokenArg o = memory.tensor(sequences, T, kDim, 0);
  for (int i = 0; i < layers; ++i) {
    TokenForwardArgs a;
    a.problem = base;
    a.problem.initial_state = a.final_state = memory.state(sequences, bf16_state, v_first);
    if (base.rule.uses_precond()) {
      a.problem.initial_precond = {memory.zeros<float>(sequences * kHeads * kDim), kHeads * kDim, kDim, 1, 0, 0};
      a.final_precond = a.problem.initial_precond;
    }
    a.o = o;
    args.push_back(a);
  }
  report(text,
         times(layers,
               [&](int i, void* stream) {
                 token_forward(args[static_cast<size_t>(i)], selected(args[static_cast<size_t>(i)]), stream);
               }),
         bytes);
}

// Decode that writes a ring in place of the states: the mean over the positions between two folds, all sequences at the
// same one. Bytes: states read, and the sixteenth of them written; rows read on average; a row written.
void ring(const char* rule, int64_t sequences) {
  constexpr int kTokens = 16;
  char text[160];
  std::snprintf(text, sizeof text, "ring of %d, %s, %lld x 16 heads, state f32 [V, K]", kTokens, rule,
                static_cast<long long>(sequences));
  if (std::strstr(text, only) == nullptr) return;
  Memory memory;
  const Problem base = problem(memory, rule, sequences, 1);
  const int64_t row = 2 * kDim + (base.in.g.data == nullptr ? 0 : base.rule.decay == Decay::kChannel ? kDim : 4);
  const double heads = static_cast<double>(sequences * kHeads);
  const double bytes = 4 * heads * (kDim * kDim * (1 + 1.0 / kTokens) + static_cast<double>(row) * (kTokens + 1) / 2);
  const int layers = once ? 1 : 4;
  std::vector<int32_t*> positions(kTokens);
  for (int t = 0; t < kTokens; ++t) {
    const std::vector<int32_t> same(static_cast<size_t>(sequences), t);
    positions[static_cast<size_t>(t)] = memory.zeros<int32_t>(sequences);
    check(cudaMemcpy(positions[static_cast<size_t>(t)], same.data(), same.size() * 4, cudaMemcpyHostToDevice), "copy");
  }
  const TokenArg o = memory.tensor(sequences, 1, kDim, 0);
  std::vector<TokenForwardArgs> args;
  for (int i = 0; i < layers; ++i) {
    TokenForwardArgs a;
    a.problem = base;
    a.problem.initial_state = a.final_state = memory.state(sequences, false, true);
    a.o = o;
    a.ring.data = memory.noise(sequences * kHeads * kTokens * row);
    a.ring.stride_r = row, a.ring.stride_h = kTokens * row, a.ring.stride_n = kHeads * a.ring.stride_h;
    a.ring.tokens = a.ring.rows = a.ring.span = kTokens, a.ring.length = 1;
    args.push_back(a);
  }
  report(text,
         times(layers * kTokens,
               [&](int i, void* stream) {
                 TokenForwardArgs& a = args[static_cast<size_t>(i % layers)];
                 a.ring.positions = positions[static_cast<size_t>(i / layers)];
                 token_forward(a, selected(a), stream);
               }),
         bytes);
}

void long_token(int64_t B, int64_t T) {
  if (std::strstr("long", only) == nullptr) return;
  Memory memory;
  TokenForwardArgs a;
  a.problem = problem(memory, "gated_deltanet", B, T);
  a.o = memory.tensor(B, T, kDim, 0);
  char text[160];
  std::snprintf(text, sizeof text, "token_forward gated_deltanet B%lld T%lld", static_cast<long long>(B),
                static_cast<long long>(T));
  const double bytes = static_cast<double>(B * T) * kHeads * kDim * 8;
  report(text, times(2, [&](int, void* stream) { token_forward(a, selected(a), stream); }), bytes);
  TokenBackwardArgs b;
  b.problem = a.problem;
  b.d_o = a.o;
  b.grads.d.q = memory.floats(B, T, kDim), b.grads.d.k = memory.floats(B, T, kDim),
  b.grads.d.v = memory.floats(B, T, kDim);
  b.grads.d.g = memory.floats(B, T, 1), b.grads.d.beta = memory.floats(B, T, 1);
  b.workspace = memory.zeros<char>(token_backward_bytes(B, kHeads, kDim, kDim, T, sm_count()));
  std::snprintf(text, sizeof text, "token_backward gated_deltanet B%lld T%lld", static_cast<long long>(B),
                static_cast<long long>(T));
  report(text, times(2, [&](int, void* stream) { token_backward(b, T, stream); }), 2.5 * bytes);
}

void precond(int64_t B, int64_t T) {
  if (std::strstr("precond", only) == nullptr) return;
  Memory memory;
  const Problem x = problem(memory, "precond_gated_deltanet", B, T);
  const int64_t chunks = B * x.sequences.chunks, tokens = B * T;
  PrecondForwardArgs a;
  a.problem = x;
  a.m = memory.zeros<float>(tokens * kHeads * kDim);
  a.boundaries = memory.zeros<float>(chunks * kHeads * kDim);
  a.scratch = memory.zeros<float>(chunks * kHeads * (kDim + 1));
  char text[160];
  std::snprintf(text, sizeof text, "precond_forward B%lld T%lld (least bytes)", static_cast<long long>(B),
                static_cast<long long>(T));
  const double elements = static_cast<double>(tokens * kHeads * kDim);
  report(text, times(4, [&](int, void* stream) { precond_forward(a, chunks, stream); }), 6 * elements);
  PrecondBackwardArgs b;
  b.problem = x;
  b.boundaries = a.boundaries;
  b.scratch = memory.zeros<float>(chunks * kHeads * (2 * kDim + 2));
  b.grads.dm = memory.noise(tokens * kHeads * kDim);
  b.dk = b.grads.d.k = memory.tensor(B, T, kDim, 0);  // in place
  b.dprecond_g = memory.floats(B, T, 1), b.dprecond_beta = memory.floats(B, T, 1);
  b.dcenter_parts = memory.zeros<float>(chunks * kHeads);
  b.dcenter = memory.zeros<float>(kHeads);
  std::snprintf(text, sizeof text, "precond_backward B%lld T%lld (least bytes)", static_cast<long long>(B),
                static_cast<long long>(T));
  report(text, times(4, [&](int, void* stream) { precond_backward(b, chunks, stream); }), 10 * elements);
  PrecondBackwardArgs after = b;
  after.share = precond_share(x, b.scratch, b.dcenter_parts, memory.noise(tokens * kHeads * 8), chunks);
  std::snprintf(text, sizeof text, "precond_backward B%lld T%lld after gradients with M (least bytes)",
                static_cast<long long>(B), static_cast<long long>(T));
  report(text, times(4, [&](int, void* stream) { precond_backward(after, chunks, stream); }), 6 * elements);
  Problem grouped = x;
  grouped.H = kHeads / 2, grouped.group = 2;
  TokenArg out = b.dk;
  out.stride_t = kHeads / 2 * kDim, out.stride_b = T * out.stride_t;
  const TokenArg dm{b.grads.dm, T * kHeads * kDim, kHeads * kDim, kDim, 0, 1};
  std::snprintf(text, sizeof text, "sum_groups B%lld T%lld, groups of 2", static_cast<long long>(B),
                static_cast<long long>(T));
  report(text, times(4, [&](int, void* stream) { sum_groups(grouped, dm, kDim, out, stream); }), 5 * elements);
}

void uploads() {
  if (std::strstr("upload", only) == nullptr) return;
  Memory memory;
  int32_t* device = memory.zeros<int32_t>(200002);
  std::vector<int32_t> values(200002, 3);
  for (const int64_t count : {65, 8000, 200002}) {
    char text[160];
    std::snprintf(text, sizeof text, "upload of %lld numbers", static_cast<long long>(count));
    report(text, times(8, [&](int, void* stream) { upload(values.data(), count, device, stream); }),
           4.0 * static_cast<double>(count));
  }
}

}  // namespace
}  // namespace fw::cuda::test

int main(int argc, char** argv) {
  using namespace fw::cuda::test;
  if (argc > 1) only = argv[1];
  once = argc > 2;
  for (const int64_t n : {1, 8, 64, 256}) decode("gated_deltanet", n, 1, false, true);
  for (const int64_t n : {1, 64}) decode("gated_deltanet", n, 1, false, false);
  for (const int64_t n : {1, 64}) decode("gated_deltanet", n, 1, true, true);
  for (const int64_t n : {1, 64}) decode("kda", n, 1, false, true);
  for (const int64_t n : {1, 64}) decode("gated_deltanet2", n, 1, false, true);
  for (const int64_t n : {1, 64}) decode("gated_deltanet", n, 4, false, true);
  for (const int64_t n : {1, 64}) decode("precond_gated_deltanet", n, 1, false, true);
  for (const int64_t n : {1, 64}) decode("precond_gated_deltanet", n, 1, true, true);
  for (const char* rule : {"gated_deltanet", "kda"})
    for (const int64_t n : {8, 64, 256}) ring(rule, n);
  long_token(4, 32);
  long_token(1, 1024);
  precond(4, 4096);
  precond(1, 32768);
  uploads();
  return 0;
}
