// Times ggml's own operation for Gated DeltaNet (scalar decay) and KDA (channel decay) on this machine, for comparison
// with `fastweight bench`: the same shapes, threads and repeats, random inputs of the same kind. See bench/README.md.
// ggml_peer [tokens heads dim threads repeats]
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

// Median us per token of `repeats` runs on one sequence of `tokens`; with tokens = 1 a decode step.
double us_per_token(int64_t tokens, int64_t heads, int64_t dim, bool channel, int threads, int repeats) {
  const size_t bytes =
      static_cast<size_t>(8 * tokens * heads * dim + 4 * heads * dim * dim) * sizeof(float) + (size_t{64} << 20);
  ggml_context* context = ggml_init({bytes, nullptr, false});
  ggml_tensor* q = ggml_new_tensor_4d(context, GGML_TYPE_F32, dim, heads, tokens, 1);
  ggml_tensor* k = ggml_new_tensor_4d(context, GGML_TYPE_F32, dim, heads, tokens, 1);
  ggml_tensor* v = ggml_new_tensor_4d(context, GGML_TYPE_F32, dim, heads, tokens, 1);
  ggml_tensor* g = ggml_new_tensor_4d(context, GGML_TYPE_F32, channel ? dim : 1, heads, tokens, 1);
  ggml_tensor* beta = ggml_new_tensor_4d(context, GGML_TYPE_F32, 1, heads, tokens, 1);
  ggml_tensor* state = ggml_new_tensor_4d(context, GGML_TYPE_F32, dim, dim, heads, 1);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](ggml_tensor* t, auto&& value) {
    for (int64_t i = 0; i < ggml_nelements(t); ++i) static_cast<float*>(t->data)[i] = value();
  };
  const float unit = 1.0f / std::sqrt(static_cast<float>(dim));
  for (ggml_tensor* t : {q, k}) fill(t, [&] { return unit * normal(random); });
  fill(v, [&] { return normal(random); });
  fill(g, [&] { return -std::log1p(std::exp(normal(random) - 3)); });
  fill(beta, [&] { return 1 / (1 + std::exp(-normal(random))); });
  fill(state, [] { return 0.0f; });

  ggml_cgraph* graph = ggml_new_graph(context);
  ggml_build_forward_expand(graph, ggml_gated_delta_net(context, q, k, v, g, beta, state, 1));
  ggml_cplan plan = ggml_graph_plan(graph, threads, nullptr);
  std::vector<uint8_t> work(plan.work_size + 64);
  plan.work_data = work.data();
  // A short operation many times, so that a sample is at least some milliseconds.
  const int64_t inner = std::max<int64_t>(1, 200 / tokens);
  std::vector<double> us;
  for (int i = -1; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t j = 0; j < inner; ++j) ggml_graph_compute(graph, &plan);
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - begin;
    if (i >= 0) us.push_back(elapsed.count() / static_cast<double>(inner * tokens));  // the first run touches memory
  }
  ggml_free(context);
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int tokens = argument(1, 2048), heads = argument(2, 16), dim = argument(3, 128), threads = argument(4, 2),
            repeats = argument(5, 7);
  ggml_cpu_init();
  std::printf("ggml %s: T=%d H=%d K=V=%d, f32, %d threads, median of %d\n", ggml_commit(), tokens, heads, dim, threads,
              repeats);
  for (const bool channel : {false, true}) {
    std::printf("%-22s forward %.2f us/token, decode %.2f us/token\n", channel ? "kda" : "gated_deltanet",
                us_per_token(tokens, heads, dim, channel, threads, repeats),
                us_per_token(1, heads, dim, channel, threads, repeats));
  }
}
