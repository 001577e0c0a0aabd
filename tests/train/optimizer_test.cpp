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

template <class T = float>
Params<T> make_params() {
  Params<T> params;
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

template <class T = float>
const Exec<T>& exec() {
  static Arena arena, contexts;
  static const Exec<T> instance{host_ops<T>(), host_device(), arena, contexts};
  return instance;
}

// Gradients of very different sizes, some zero; nothing between the parameters.
template <class T>
void fill(Params<T>& params, Random& random) {
  for (const ParamSpec& spec : params.specs()) {
    for (T& g : params.grads().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size()))) {
      const double scale = std::pow(10.0, -6.0 * random.uniform());  // drawn first with every compiler
      g = random.below(10) == 0 ? T(0) : static_cast<T>(scale * random.normal());
    }
  }
}

double norm(const AdamW& adam, const Params<float>& params) {
  double sum = -1;
  adam.square_norm(exec(), params, &sum);
  return std::sqrt(sum);
}

// Six updates beside the formula in double; tolerance: in units of T's rounding.
template <class T>
void check_formula(double tolerance) {
  Params<T> params = make_params<T>();
  const AdamWConfig config{0.9, 0.95, 1e-8, 0.1};
  BasicAdamW<T> adam(config, params);
  const double unit = tolerance * std::numeric_limits<T>::epsilon();
  const size_t n = params.values().size();
  std::vector<double> value(params.values().begin(), params.values().end()), first(n), second(n);
  std::vector<double> terms(n);  // of the first moment, without their signs: what its rounding is relative to
  Random random(4);
  for (int t = 1; t <= 6; ++t) {
    const double lr = 1e-2 / t, grad_scale = t % 2 == 0 ? 0.37 : 1.0;
    fill(params, random);
    for (const ParamSpec& spec : params.specs()) {
      for (size_t i = static_cast<size_t>(spec.offset); i < static_cast<size_t>(spec.offset + spec.size()); ++i) {
        const double g = grad_scale * static_cast<double>(params.grads()[i]);
        first[i] = config.beta1 * first[i] + (1 - config.beta1) * g;
        terms[i] = config.beta1 * terms[i] + (1 - config.beta1) * std::abs(g);
        second[i] = config.beta2 * second[i] + (1 - config.beta2) * g * g;
        const double m_hat = first[i] / (1 - std::pow(config.beta1, t)),
                     v_hat = second[i] / (1 - std::pow(config.beta2, t));
        value[i] -=
            lr * (m_hat / (std::sqrt(v_hat) + config.eps) + (spec.weight_decay ? config.weight_decay : 0) * value[i]);
      }
    }
    adam.update(exec<T>(), params, lr, grad_scale);
    ASSERT_EQ(adam.updates(), t);
    for (size_t i = 0; i < n; ++i) {
      ASSERT_NEAR(params.values()[i], value[i], unit * (std::abs(value[i]) + 2 * lr)) << i << " after " << t;
      ASSERT_NEAR(adam.first().span()[i], first[i], unit * terms[i]) << i;
      ASSERT_NEAR(adam.second().span()[i], second[i], 2 * unit * second[i] + 1e-37) << i;
    }
  }
}

TEST(AdamW, FollowsTheFormula) { check_formula<float>(8); }

// Every number of an update in double: a decay rounded to float would be 6e-8 of the step off.
TEST(AdamW, InDoubleNothingIsFloat) { check_formula<double>(8); }

TEST(AdamW, LeavesTheGapsBetweenParametersZero) {
  Params<float> params = make_params();
  AdamW adam({}, params);
  Random random(8);
  for (int t = 0; t < 3; ++t) {
    fill(params, random);
    adam.update(exec(), params, 1e-2, 1.0);
  }
  std::vector<bool> in_parameter(params.values().size(), false);
  for (const ParamSpec& spec : params.specs()) std::fill_n(in_parameter.begin() + spec.offset, spec.size(), true);
  EXPECT_GT(std::count(in_parameter.begin(), in_parameter.end(), false), 30);
  for (size_t i = 0; i < in_parameter.size(); ++i) {
    if (in_parameter[i]) continue;
    for (const float x : {params.values()[i], params.grads()[i], adam.first().span()[i], adam.second().span()[i]})
      ASSERT_EQ(x, 0.0f) << i;
  }
}

TEST(AdamW, DecaysOnlyWhatIsDeclaredToDecay) {
  Params<float> params = make_params();
  const std::vector<float> before(params.values().begin(), params.values().end());
  AdamW adam({0.9, 0.95, 1e-8, 0.5}, params);
  adam.update(exec(), params, 0.1, 1.0);  // all gradients zero
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
  const AdamW adam({}, params);
  EXPECT_EQ(norm(adam, params), 0.0);
  Random random(5);
  fill(params, random);
  params.grads()[18] = 1e30f;  // its square is beyond float
  long double sum = 0;
  for (const float g : params.grads()) sum += static_cast<long double>(g) * g;
  EXPECT_NEAR(norm(adam, params) / static_cast<double>(std::sqrt(sum)), 1.0, 1e-13);
}

TEST(AdamW, NormOfAnyGradientThatIsNotFiniteIsNotFinite) {
  Params<float> params = make_params();
  const AdamW adam({}, params);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const ParamSpec& spec : params.specs()) {
      float& last = params.grads()[static_cast<size_t>(spec.offset + spec.size() - 1)];
      last = bad;
      EXPECT_FALSE(std::isfinite(norm(adam, params))) << spec.name << " " << bad;
      last = 0;
    }
  }
}

TEST(AdamW, ResultsDoNotDependOnTheNumberOfThreads) {
  const auto run = [](int threads, double* length) {
    set_num_threads(threads);
    Params<float> params = make_params();
    AdamW adam({}, params);
    Random random(6);
    for (int t = 0; t < 3; ++t) {
      fill(params, random);
      *length = norm(adam, params);
      adam.update(exec(), params, 1e-3, 1.0);
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
