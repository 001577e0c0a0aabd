// First weights by scheme: their bounds and deviations.
#include "nn/init.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "nn/mlp.h"
#include "nn/params.h"

namespace fw {
namespace {

struct Moments {
  double largest = 0, deviation = 0;
};

Moments moments(const Initialiser& init, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  Random random(7);
  init(values, random);
  Moments m;
  for (const double x : values) {
    m.largest = std::max(m.largest, std::abs(x));
    m.deviation += x * x / static_cast<double>(count);
  }
  m.deviation = std::sqrt(m.deviation);
  return m;
}

TEST(FirstWeights, OfAProjectionByScheme) {
  constexpr int64_t out = 96, in = 400;
  const Moments xavier = moments(projection_init(InitScheme::kXavier, out, in), out * in);
  EXPECT_LE(xavier.largest, std::exp2(-2.5) * std::sqrt(6.0 / (out + in)));
  EXPECT_NEAR(xavier.deviation, std::exp2(-2.5) * std::sqrt(2.0 / (out + in)), 0.01 * xavier.deviation);
  EXPECT_NEAR(moments(projection_init(InitScheme::kNormal, out, in), out * in).deviation, 0.02, 2e-4);
  const Moments torch = moments(projection_init(InitScheme::kTorch, out, in), out * in);
  EXPECT_LE(torch.largest, 0.05);
  EXPECT_NEAR(torch.deviation, 0.05 / std::sqrt(3.0), 5e-4);
}

// SwiGLU's output is smaller the more layers add to the residual stream, with PyTorch's first weights alone.
TEST(FirstWeights, OfSwigluByScheme) {
  MlpSpec spec{.hidden = 64, .size = 256};
  spec.layers = 8;
  for (const InitScheme scheme : {InitScheme::kXavier, InitScheme::kTorch}) {
    spec.init = scheme;
    const std::vector<ParamSpec> specs = mlp_parameters(spec, "mlp.");
    ASSERT_EQ(specs.size(), 3U);
    for (const ParamSpec& p : specs) {
      const bool output = p.name == "mlp.down_proj.weight";
      double bound = std::exp2(-2.5) * std::sqrt(6.0 / (64 + 256));
      if (scheme == InitScheme::kTorch) bound = output ? 1.0 / (16 * 4) : 1.0 / 8;
      const Moments m = moments(p.init, 64 * 256);
      EXPECT_LE(m.largest, bound) << p.name;
      EXPECT_GE(m.largest, 0.99 * bound) << p.name;
    }
  }
}

}  // namespace
}  // namespace fw
