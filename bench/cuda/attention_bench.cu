// Times of attention on the device, one JSON line a shape: forward, backward (both passes) and their shares of what the
// products alone would need at `tflops` (7 products back instead of 5). Operations counted are of the pairs that are
// seen, 4 D forward and 10 D backward each, as others count them.
// turned_ms: backward that turns dq and dk back as well (rotary position embedding), of heads of 64 or 128 channels;
// else 0.
//
//   attention_bench [B T H HK D W]...
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "bench_times.h"
#include "ops/cuda/attention.h"

namespace {

using namespace fw::cuda;

struct Shape {
  int B, T, H, HK, D, W;
};

uint16_t* random_rows(int64_t count, uint32_t seed) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& x : values) {
    seed = seed * 1664525u + 1013904223u;
    const float f = (static_cast<float>(seed >> 8) / (1 << 24) - 0.5f) * 3.4f;
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    x = static_cast<uint16_t>(bits >> 16);
  }
  uint16_t* device = bench::allocate<uint16_t>(count);
  check(cudaMemcpy(device, values.data(), values.size() * 2, cudaMemcpyHostToDevice), "copy");
  return device;
}

void time_shape(const Shape& s) {
  const int64_t rows = static_cast<int64_t>(s.B) * s.T, q_size = rows * s.H * s.D, kv_size = rows * s.HK * s.D;
  std::vector<AttentionSequence> sequences;
  for (int b = 0; b < s.B; ++b) sequences.push_back({b * s.T, s.T, b * s.T, s.T});
  AttentionArgs args;
  const auto tensor = [&](uint16_t* data, int heads) {
    return TokenArg{data, 0, static_cast<int64_t>(heads) * s.D, s.D, 1, 1};
  };
  args.q = tensor(random_rows(q_size, 1), s.H), args.k = tensor(random_rows(kv_size, 2), s.HK),
  args.v = tensor(random_rows(kv_size, 3), s.HK);
  args.d_o = tensor(random_rows(q_size, 4), s.H), args.o = tensor(bench::allocate<uint16_t>(q_size), s.H);
  args.dq = tensor(bench::allocate<uint16_t>(q_size), s.H);
  args.dk = tensor(bench::allocate<uint16_t>(kv_size), s.HK),
  args.dv = tensor(bench::allocate<uint16_t>(kv_size), s.HK);
  args.lse = bench::allocate<float>(rows * s.H), args.delta = bench::allocate<float>(rows * s.H);
  args.heads = s.H, args.kv_heads = s.HK, args.dim = s.D, args.window = s.W, args.query_rows = args.key_rows = rows;
  check(cudaDeviceGetAttribute(&args.sm_count, cudaDevAttrMultiProcessorCount, 0), "device");
  args.scale = 1 / std::sqrt(static_cast<float>(s.D));
  const auto upload = [](const std::vector<AttentionTile>& tiles) {
    auto* device = bench::allocate<AttentionTile>(static_cast<int64_t>(tiles.size()));
    check(cudaMemcpy(device, tiles.data(), tiles.size() * sizeof(AttentionTile), cudaMemcpyHostToDevice), "copy");
    return device;
  };
  const std::vector<AttentionTile> of_queries = attention_tiles(sequences, false, s.W),
                                   of_keys = attention_tiles(sequences, true, s.W);
  AttentionArgs keys = args;
  args.tiles = upload(of_queries), args.tile_count = static_cast<int>(of_queries.size());
  keys.tiles = upload(of_keys), keys.tile_count = static_cast<int>(of_keys.size());
  const double forward = bench::median_ms([&] { attention_forward(args, nullptr); });
  const double queries = bench::median_ms([&] { attention_backward_queries(args, nullptr); });
  const double of_key = bench::median_ms([&] { attention_backward_keys(keys, nullptr); });
  const double both = bench::median_ms([&] {
    attention_backward_queries(args, nullptr);
    attention_backward_keys(keys, nullptr);
  });
  double turned = 0;
  if (s.D == 64 || s.D == 128) {
    args.theta = keys.theta = 10000;
    turned = bench::median_ms([&] {
      attention_backward_queries(args, nullptr);
      attention_backward_keys(keys, nullptr);
    });
  }
  double pairs = 0;
  for (int64_t t = 0; t < s.T; ++t) pairs += static_cast<double>(s.W == 0 ? t + 1 : std::min<int64_t>(t + 1, s.W));
  pairs *= static_cast<double>(s.B) * s.H;
  std::printf(
      "{\"peer\": \"fastweight\", \"B\": %d, \"T\": %d, \"H\": %d, \"HK\": %d, \"D\": %d, \"window\": %d, "
      "\"forward_ms\": %.4f, \"backward_ms\": %.4f, "
      "\"queries_ms\": %.4f, \"keys_ms\": %.4f, \"turned_ms\": %.4f, \"forward_tflops\": %.1f, \"backward_tflops\": "
      "%.1f}\n",
      s.B, s.T, s.H, s.HK, s.D, s.W, forward, both, queries, of_key, turned, 4e-9 * pairs * s.D / forward,
      10e-9 * pairs * s.D / both);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Shape> shapes;
  for (int i = 1; i + 5 < argc; i += 6) {
    shapes.push_back({std::atoi(argv[i]), std::atoi(argv[i + 1]), std::atoi(argv[i + 2]), std::atoi(argv[i + 3]),
                      std::atoi(argv[i + 4]), std::atoi(argv[i + 5])});
  }
  if (shapes.empty()) {
    shapes = {{8, 2048, 16, 16, 128, 2048}, {1, 16384, 16, 16, 128, 2048}, {1, 16384, 16, 16, 128, 0},
              {1, 16384, 16, 4, 128, 0},    {8, 2048, 16, 16, 64, 512},    {2, 8192, 32, 32, 64, 0}};
  }
  for (const Shape& s : shapes) time_shape(s);
  return 0;
}
