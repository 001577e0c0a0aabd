// The products of a decoded token in bf16, one JSON line each. Rows of x: 1, 4 or 8 by gemm_m8.h, and 16, 32 or 64 by
// gemm_m64.h. A line has the microseconds of a product and its weight's bytes, as a share of what a copy moves in the
// same time. With --tiles also 16, 32 and 64 rows by every tile of
// gemm_m64.h. A captured graph holds 40 products over weights that do not fit into
// the L2 cache.
#include <algorithm>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bench_times.h"
#include "ops/cuda/gemm_m64.h"
#include "ops/cuda/gemm_m8.h"

namespace fw::cuda::bench {
namespace {

constexpr int kProducts = 40;
constexpr size_t kPool = size_t{1} << 31;  // bytes of weights that the products go through in turn

double graph_ms(const std::function<void(cudaStream_t)>& record) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t run;
  check(cudaStreamCreate(&stream), "stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  record(stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&run, graph, 0), "graph");
  const double ms = median_ms([&] { check(cudaGraphLaunch(run, nullptr), "graph"); });
  check(cudaGraphExecDestroy(run), "graph");
  check(cudaGraphDestroy(graph), "graph");
  check(cudaStreamDestroy(stream), "stream");
  return ms;
}

void run(bool all_tiles) {
  char* pool = allocate<char>(kPool);
  Bf16* x = allocate<Bf16>(kGemmM64MaxM * 16384);
  Bf16* y = allocate<Bf16>(kGemmM64MaxM * 65536);
  check(cudaMemset(pool, 0x3c, kPool), "fill");
  check(cudaMemset(x, 0x3c, sizeof(Bf16) * kGemmM64MaxM * 16384), "fill");
  const double copy_ms =
      median_ms([&] { check(cudaMemcpyAsync(pool, pool + kPool / 2, kPool / 2, cudaMemcpyDeviceToDevice), "copy"); });
  const double copy_rate = static_cast<double>(kPool) / copy_ms * 1e-9;  // TB/s, read and written
  std::printf("{\"copy_TB_s\": %.2f}\n", copy_rate);
  struct Shape {
    const char* name;
    int64_t out, in;
  };
  for (const Shape& s : {Shape{"in_proj", 10496, 2048},
                         {"o_proj", 2048, 2048},
                         {"qkv", 6144, 2048},
                         {"gate_up", 11264, 2048},
                         {"down", 2048, 5632},
                         {"head", 32000, 2048},
                         {"0.4B d", 1024, 1024},
                         {"low rank", 2048, 128}}) {
    const auto bytes = static_cast<size_t>(s.out * s.in) * 2;
    const size_t copies = kPool / bytes;
    std::vector<std::pair<int64_t, std::optional<GemmM64Tiles>>> cases;  // without tiles: the library's choice
    for (const int64_t rows : {1, 4, 8, 16, 32, 64}) cases.push_back({rows, std::nullopt});
    for (const int rows : {32, 48, 64, 80, 96, 128}) {
      for (const int slices : {1, 2, 4}) {
        if (!all_tiles || (slices > 1 && rows > 64)) continue;
        for (const int64_t tokens : {16, 32, 64}) cases.push_back({tokens, GemmM64Tiles{rows, slices}});
      }
    }
    for (const auto& [rows, tiles] : cases) {
      const double ms = graph_ms([&](cudaStream_t stream) {
                          for (size_t i = 0; i < kProducts; ++i) {
                            const auto* weight = reinterpret_cast<const Bf16*>(pool + i % copies * bytes);
                            const Mat<const Bf16> from(x, rows, s.in), w(weight, s.out, s.in);
                            const Mat<Bf16> to(y, rows, s.out);
                            if (rows <= kGemmM8MaxM) {
                              gemm_m8_linear<Bf16>(from, w, nullptr, to, Write::kOverwrite, stream);
                            } else if (tiles) {
                              gemm_m64_linear(from, w, nullptr, {}, to, *tiles, stream);
                            } else {
                              gemm_m64_linear(from, w, nullptr, {}, to, stream);
                            }
                          }
                        }) /
                        kProducts;
      const double rate = static_cast<double>(bytes) / ms * 1e-9;
      std::printf("{\"product\": \"%s\", \"rows\": %d, \"us\": %.2f, \"MB\": %.1f, \"TB_s\": %.2f, \"of_copy\": %.3f",
                  s.name, static_cast<int>(rows), ms * 1e3, static_cast<double>(bytes) * 1e-6, rate, rate / copy_rate);
      if (tiles) std::printf(", \"block_rows\": %d, \"slices\": %d", tiles->rows, tiles->slices);
      std::printf("}\n");
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace fw::cuda::bench

int main(int count, char** arguments) {
  fw::cuda::bench::run(count > 1 && std::string_view(arguments[1]) == "--tiles");
  return 0;
}
