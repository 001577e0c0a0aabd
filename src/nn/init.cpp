#include "nn/init.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/init_random.h"

namespace fw {

namespace {

// What initialisers are: each value from kDraws numbers of the generator.
struct Constant {
  static constexpr int kDraws = 0;
  double value;
  void operator()(std::span<double> out, Random&) const { std::fill(out.begin(), out.end(), value); }
};

struct Normal {
  static constexpr int kDraws = 2;
  double deviation;
  void operator()(std::span<double> out, Random& random) const {
    for (double& x : out) x = deviation * random.normal();
  }
};

struct Uniform {
  static constexpr int kDraws = 1;
  double bound;
  void operator()(std::span<double> out, Random& random) const {
    for (double& x : out) x = random.uniform(-bound, bound);
  }
};

struct DecayA {
  static constexpr int kDraws = 1;
  double low;
  void operator()(std::span<double> out, Random& random) const {
    for (double& x : out) x = std::log(std::max(random.uniform(low, 16.0), 1e-4));
  }
};

struct DecayDelta {
  static constexpr int kDraws = 1;
  void operator()(std::span<double> out, Random& random) const {
    for (double& x : out) {
      const double dt = std::max(std::exp(random.uniform(std::log(1e-3), std::log(0.1))), 1e-4);
      x = dt + std::log(-std::expm1(-dt));  // softplus(x) = dt
    }
  }
};

struct ByIndex {
  static constexpr int kDraws = 0;
  std::function<double(double)> f;
  void operator()(std::span<double> out, Random&) const {
    for (size_t i = 0; i < out.size(); ++i) out[i] = f(static_cast<double>(i));
  }
};

template <class... Kinds>
int draws_if(const Initialiser& init) {
  int draws = -1;
  ((init.target<Kinds>() != nullptr ? void(draws = Kinds::kDraws) : void()), ...);
  return draws;
}

}  // namespace

Initialiser constant_init(double value) { return Constant{value}; }
Initialiser index_init(std::function<double(double)> f) { return ByIndex{std::move(f)}; }
Initialiser normal_init(double deviation) { return Normal{deviation}; }
Initialiser uniform_init(double bound) { return Uniform{bound}; }

Initialiser projection_init(InitScheme scheme, int64_t out, int64_t in) {
  if (scheme == InitScheme::kNormal) return normal_init(0.02);
  if (scheme == InitScheme::kTorch) return uniform_init(1 / std::sqrt(static_cast<double>(in)));
  const double gain = std::exp2(-2.5);
  return uniform_init(gain * std::sqrt(6.0 / static_cast<double>(in + out)));
}

Initialiser decay_a_init(double low) { return DecayA{low}; }
Initialiser decay_delta_init() { return DecayDelta(); }

int draws_of(const Initialiser& init) { return draws_if<Constant, ByIndex, Normal, Uniform, DecayA, DecayDelta>(init); }
std::optional<LinearDraw> linear_draw_of(const Initialiser& init) {
  if (const auto* normal = init.target<Normal>()) return LinearDraw{2, normal->deviation, 0};
  if (const auto* uniform = init.target<Uniform>())
    return LinearDraw{1, uniform->bound - -uniform->bound, -uniform->bound};
  return std::nullopt;
}
bool counts_indices(const Initialiser& init) { return init.target<ByIndex>() != nullptr; }

}  // namespace fw
