#include "train/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "base/random.h"
#include "base/threads.h"

namespace fw {
namespace {

// Sizes around the vector lengths and around the block of the optimiser.
const std::vector<int64_t> kSizes = {1, 7, 8, 33, 16384, 40001, 3};

Params<float> make_params() {
  Params<float> params;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    ParamSpec spec;
    spec.name = "p" + std::to_string(i);
    spec.shape = {kSizes[i]};
    spec.init = [](std::span<double> values, Random& random) {
      for (double& v : values) v = random.normal();
    };
    spec.weight_decay = i % 2 == 1;
    params.declare(std::move(spec));
  }
  params.allocate();
  Random random(3);
  params.init(random);
  params.zero_grads();
  return params;
}

// Gradients of very different sizes, some zero.
void fill(std::span<float> grads, Random& random) {
  for (float& g : grads) g = random.below(10) == 0 ? 0.0f : static_cast<float>(random.normal() * std::pow(10.0, -6.0 * random.uniform()));
}

TEST(AdamW, FollowsTheFormulaInDouble) {
  Params<float> params = make_params();
  const AdamWConfig config{0.9, 0.95, 1e-8, 0.1};
  AdamW adam(config, params.specs(), params.size());
  const size_t n = static_cast<size_t>(params.size());
  std::vector<double> value(params.values().begin(), params.values().end()), first(n), second(n);
  Random random(4);
  for (int t = 1; t <= 6; ++t) {
    const double lr = 1e-2 / t, grad_scale = t % 2 == 0 ? 0.37 : 1.0;
    fill(params.grads(), random);
    for (const ParamSpec& spec : params.specs()) {
      for (size_t i = static_cast<size_t>(spec.offset); i < static_cast<size_t>(spec.offset + spec.size()); ++i) {
        const double g = grad_scale * params.grads()[i];
        first[i] = config.beta1 * first[i] + (1 - config.beta1) * g;
        second[i] = config.beta2 * second[i] + (1 - config.beta2) * g * g;
        const double m_hat = first[i] / (1 - std::pow(config.beta1, t)), v_hat = second[i] / (1 - std::pow(config.beta2, t));
        value[i] -= lr * (m_hat / (std::sqrt(v_hat) + config.eps) + (spec.weight_decay ? config.weight_decay : 0) * value[i]);
      }
    }
    adam.update(params.values(), params.grads(), lr, grad_scale);
    ASSERT_EQ(adam.updates(), t);
    for (size_t i = 0; i < n; ++i) {
      ASSERT_NEAR(params.values()[i], value[i], 1e-6 * std::abs(value[i]) + 2e-6 * lr) << i << " after " << t;
      ASSERT_NEAR(adam.first()[i], first[i], 1e-6 * std::abs(first[i]) + 1e-8) << i;
      ASSERT_NEAR(adam.second()[i], second[i], 2e-6 * second[i] + 1e-37) << i;
    }
  }
}

TEST(AdamW, DecaysOnlyWhatIsDeclaredToDecay) {
  Params<float> params = make_params();
  const std::vector<float> before(params.values().begin(), params.values().end());
  AdamW adam({0.9, 0.95, 1e-8, 0.5}, params.specs(), params.size());
  adam.update(params.values(), params.grads(), 0.1, 1.0);  // all gradients zero
  for (const ParamSpec& spec : params.specs()) {
    for (size_t i = static_cast<size_t>(spec.offset); i < static_cast<size_t>(spec.offset + spec.size()); ++i) {
      if (spec.weight_decay) {
        ASSERT_NEAR(params.values()[i], 0.95 * before[i], 1e-6 * std::abs(before[i])) << spec.name;
      } else {
        ASSERT_EQ(params.values()[i], before[i]) << spec.name;
      }
    }
  }
}

TEST(AdamW, NormIsTheEuclideanNormInDouble) {
  Params<float> params = make_params();
  const AdamW adam({}, params.specs(), params.size());
  EXPECT_EQ(adam.norm(params.grads()), 0.0);
  Random random(5);
  fill(params.grads(), random);
  params.grads()[2] = 1e30f;  // its square is beyond float
  long double sum = 0;
  for (const float g : params.grads()) sum += static_cast<long double>(g) * g;
  EXPECT_NEAR(adam.norm(params.grads()) / static_cast<double>(std::sqrt(sum)), 1.0, 1e-13);
}

TEST(AdamW, NormOfAnyGradientThatIsNotFiniteIsNotFinite) {
  Params<float> params = make_params();
  const AdamW adam({}, params.specs(), params.size());
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    for (const ParamSpec& spec : params.specs()) {
      float& last = params.grads()[static_cast<size_t>(spec.offset + spec.size() - 1)];
      last = bad;
      EXPECT_FALSE(std::isfinite(adam.norm(params.grads()))) << spec.name << " " << bad;
      last = 0;
    }
  }
}

TEST(AdamW, ResultsDoNotDependOnTheNumberOfThreads) {
  const auto run = [](int threads, double* norm) {
    set_num_threads(threads);
    Params<float> params = make_params();
    AdamW adam({}, params.specs(), params.size());
    Random random(6);
    for (int t = 0; t < 3; ++t) {
      fill(params.grads(), random);
      *norm = adam.norm(params.grads());
      adam.update(params.values(), params.grads(), 1e-3, 1.0);
    }
    set_num_threads(0);
    return std::vector<float>(params.values().begin(), params.values().end());
  };
  double norm1 = 0, norm3 = 0;
  const std::vector<float> one = run(1, &norm1), three = run(3, &norm3);
  EXPECT_EQ(one, three);
  EXPECT_EQ(norm1, norm3);
}

TEST(ClipFactor, ScalesOnlyWhatIsTooLong) {
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_factor(0.0, 1.0), 1.0);
  EXPECT_DOUBLE_EQ(clip_factor(4.0, 1.0), 1.0 / (4.0 + 1e-6));
  EXPECT_DOUBLE_EQ(clip_factor(3.0, 2.0), 2.0 / (3.0 + 1e-6));
  EXPECT_EQ(clip_factor(1e9, 0.0), 1.0);
}

}  // namespace
}  // namespace fw
