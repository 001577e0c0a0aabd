// Time of the gradient kernel on synthetic tiles larger than the L2 cache: gradients_bench [rule ...]. Medians of 20
// runs.
#include <algorithm>

#include "cuda/selected.h"
#include "gradients_problem.h"

using namespace gradients_test;
namespace fc = fw::cuda;

namespace {

// Random bf16 (small numbers) or float32 in [low, high].
void* random_memory(size_t count, bool bf16, double low, double high) {
  static std::mt19937 random(1);
  const size_t pattern = std::min<size_t>(count, 1 << 22), size = bf16 ? 2 : 4;
  std::vector<char> host(pattern * size);
  for (size_t i = 0; i < pattern; ++i) {
    const double x = low + (high - low) * (random() / 4294967296.0);
    if (bf16) {
      reinterpret_cast<uint16_t*>(host.data())[i] = to_bf16(x);
    } else {
      reinterpret_cast<float*>(host.data())[i] = static_cast<float>(x);
    }
  }
  char* p = static_cast<char*>(device_alloc(count * size));
  for (size_t at = 0; at < count; at += pattern)
    to_device(p + at * size, host.data(), std::min(pattern, count - at) * size);
  return p;
}

struct Memory {
  std::vector<void*> all;
  size_t bytes = 0;  // that the kernel has to move
  ~Memory() {
    for (void* p : all) device_free(p);
  }
  void* make(size_t count, bool bf16, double low, double high) {
    all.push_back(random_memory(count, bf16, low, high));
    bytes += count * (bf16 ? 2 : 4);
    return all.back();
  }
  TokenArg tokens(int B, int T, int heads, int dim, bool bf16, int divisor, double low, double high) {
    TokenArg a;
    a.data = make(static_cast<size_t>(B) * T * heads * dim, bf16, low, high);
    a.stride_h = dim, a.stride_t = static_cast<int64_t>(heads) * dim, a.stride_b = a.stride_t * T;
    a.bf16 = bf16, a.divisor = divisor;
    return a;
  }
};

void measure(const std::string& name, int B, int T, int H, int D) {
  Memory memory;
  fc::GradientArgs a;
  fc::Problem& p = a.problem;
  p.rule = rule_of(name);
  const fw::Rule& r = p.rule;
  p.scale = 1 / std::sqrt(static_cast<float>(D));
  p.B = B, p.T = T, p.H = p.HV = H, p.K = p.V = D;
  p.tokens = static_cast<int64_t>(B) * T;
  p.sequences.N = B, p.sequences.T = T, p.sequences.chunks = (T + 63) / 64;
  const int64_t chunks = static_cast<int64_t>(B) * p.sequences.chunks, tiles = chunks * H;
  const int blocks = (D + 63) / 64;
  const auto in = [&](int dim, double low, double high) { return memory.tokens(B, T, H, dim, true, 1, low, high); };
  p.in.q = in(D, -1, 1), p.in.k = in(D, -1, 1), p.in.v = in(D, -1, 1), a.d_o = in(D, -1, 1);
  fc::TokenArgs& d = a.grads.d;
  d.q = in(D, 0, 0), d.k = in(D, 0, 0), d.v = in(D, 0, 0);
  if (r.uses_g()) {
    const int dim = r.decay == fw::Decay::kChannel ? D : 1;
    p.in.g = memory.tokens(B, T, H, dim, dim > 1, 1, -0.2, 0);
    d.g = memory.tokens(B, T, H, dim, dim > 1, 1, 0, 0);
  }
  fw::for_each_scalar(
      r, [&](fc::TokenArg& input, fc::TokenArg& gradient) { input = in(1, 0, 1), gradient = in(1, 0, 0); }, p.in, d);
  const int erase = r.erase == fw::Gate::kScalar ? 1 : D, write = r.write == fw::Gate::kScalar ? 1 : D;
  if (r.uses_erase_gate()) p.in.erase_gate = in(erase, 0, 1), d.erase_gate = in(erase, 0, 0);
  if (r.uses_write_gate()) p.in.write_gate = in(write, 0, 1), d.write_gate = in(write, 0, 0);
  if (r.uses_precond() && r.decay == fw::Decay::kChannel)
    p.precond_rows = static_cast<uint16_t*>(memory.make(static_cast<size_t>(p.tokens) * H * D, true, 0.2, 1));
  a.problem = p;
  fc::CallTraits traits = fc::problem_traits(p, D, chunks, fc::sm_count());
  fc::add_gradients(a, traits);
  if (fc::gradients_make_m(traits)) {
    const size_t heads = static_cast<size_t>(chunks) * H;
    const auto floats = [&](size_t count, double low, double high) {
      return static_cast<float*>(memory.make(count, false, low, high));
    };
    p.in.precond_g = memory.tokens(B, T, H, 1, false, 1, -0.2, 0), p.in.precond_beta = in(1, 0, 1);
    p.precond_center = floats(static_cast<size_t>(H), -0.2, -0.2);
    p.boundaries = floats(heads * D, 0.2, 1);
    a.precond = fc::precond_share(p, floats(heads * (2 * D + 2), 0, 0), floats(heads, 0, 0),
                                  floats(static_cast<size_t>(p.tokens) * H * 8, 0, 0), chunks);
  } else if (r.uses_precond()) {
    p.m = static_cast<const float*>(memory.make(static_cast<size_t>(p.tokens) * H * D, false, 0.7, 1.5));
    a.grads.dm = static_cast<float*>(memory.make(static_cast<size_t>(p.tokens) * H * D, false, 0, 0));
  }
  const auto tile = [&](int64_t count) {
    return static_cast<const uint16_t*>(memory.make(static_cast<size_t>(count), true, -0.2, 0.2));
  };
  a.pairs = reinterpret_cast<const fc::IntraChunk*>(tile(tiles * 8192));
  a.states = tile(tiles * blocks * 64 * D), a.d_states = tile(tiles * blocks * 64 * D);
  a.w = tile(tiles * blocks * 4096), a.v = tile(tiles * blocks * 4096);

  cudaEvent_t from, to;
  must(cudaEventCreate(&from)), must(cudaEventCreate(&to));
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    must(cudaEventRecord(from));
    fc::gradients(a, fc::selected(a, D, chunks), D, chunks, nullptr);
    must(cudaEventRecord(to));
    must(cudaEventSynchronize(to));
    float ms = 0;
    must(cudaEventElapsedTime(&ms, from, to));
    if (i >= 3) times.push_back(ms);
  }
  must(cudaDeviceSynchronize());
  std::sort(times.begin(), times.end());
  std::printf("%-24s B%d T%d H%d D%d: %.4f ms (least %.4f), %.2f TB/s, %.2f us a chunk and SM\n", name.c_str(), B, T, H,
              D, times[10], times[0], static_cast<double>(memory.bytes) / times[10] / 1e9,
              times[10] * 1e3 / static_cast<double>(tiles) * 132);
  must(cudaEventDestroy(from)), must(cudaEventDestroy(to));
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> rules(argv + 1, argv + argc);
  if (rules.empty())
    rules = {"gated_deltanet", "deltanet", "kda", "gated_deltanet2", "mamba2", "gla", "precond_gated_deltanet"};
  for (const std::string& name : rules) {
    measure(name, 4, 4096, 16, 128);
    measure(name, 1, 32768, 16, 128);
    measure(name, 4, 4096, 32, 64);
  }
  return 0;
}
