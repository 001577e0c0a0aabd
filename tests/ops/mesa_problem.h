// A Mesa layer's solve on a device against the host in double: inputs that are bf16 numbers, and an error that counts
// the solution of each token and head by itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/device_list.h"

namespace fw::testing {

struct MesaProblem {
  MesaShape shape;
  SeqLayout sequences;
  std::vector<double> rhs, k, beta, g, lambda, state;  // state: none, or [N, H, K, V + K]

  int64_t heads() const { return shape.heads; }
  int64_t key_dim() const { return shape.key_dim; }
  double& key(int64_t t, int64_t head, int64_t i) { return k[at(t, head, i)]; }
  double& h(int64_t n, int64_t head, int64_t i, int64_t j) {
    const int64_t width = shape.value_dim + key_dim();
    return state[static_cast<size_t>(((n * heads() + head) * key_dim() + i) * width + shape.value_dim + j)];
  }
  size_t at(int64_t t, int64_t head, int64_t i) const {
    return static_cast<size_t>((t * heads() + head) * key_dim() + i);
  }
};

// Unit keys whose products are `cosine` on average, unit right-hand sides, gates between 0 and 1, log decays down to
// -0.1 and lambda from about 0.4 to 1.2.
inline MesaProblem mesa_problem(const SeqLayout& sequences, int64_t heads, int64_t K, uint64_t seed,
                                double cosine = 0) {
  constexpr int64_t kV = 4;
  MesaProblem p{{heads, K, kV, 0.25, 30, 1e-6}, sequences, {}, {}, {}, {}, {}, {}};
  Random random(seed);
  const auto rounded = [](double x) { return value_of(stored<Bf16>(x)); };
  const auto unit = [&] {
    std::vector<double> x(static_cast<size_t>(K));
    double square = 0;
    for (double& one : x) one = random.normal(), square += one * one;
    for (double& one : x) one /= std::sqrt(square);
    return x;
  };
  std::vector<std::vector<double>> centers;
  for (int64_t head = 0; head < heads; ++head) centers.push_back(unit());
  for (int64_t t = 0; t < sequences.tokens(); ++t) {
    for (int64_t head = 0; head < heads; ++head) {
      const std::vector<double> key = unit(), rhs = unit();
      for (size_t i = 0; i < key.size(); ++i) {
        p.k.push_back(
            rounded(std::sqrt(cosine) * centers[static_cast<size_t>(head)][i] + std::sqrt(1 - cosine) * key[i]));
        p.rhs.push_back(rounded(rhs[i]));
      }
      p.beta.push_back(rounded(random.uniform()));
      p.g.push_back(static_cast<double>(static_cast<float>(-0.1 * random.uniform())));
    }
  }
  for (int64_t i = 0; i < heads * K; ++i)
    p.lambda.push_back(static_cast<double>(static_cast<float>(-2 + 2.5 * random.uniform())));
  return p;
}

// H of `keys` random unit keys before every sequence, whose products are `cosine` on average.
inline void add_mesa_state(MesaProblem& p, int64_t keys, uint64_t seed, double cosine = 0) {
  const int64_t K = p.key_dim(), N = p.sequences.count();
  MesaProblem before = mesa_problem(SeqLayout::uniform(1, keys), p.heads(), K, seed, cosine);
  p.state.assign(static_cast<size_t>(N * p.heads() * K * (p.shape.value_dim + K)),
                 std::numeric_limits<double>::quiet_NaN());
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t head = 0; head < p.heads(); ++head) {
      for (int64_t i = 0; i < K; ++i) {
        for (int64_t j = 0; j < K; ++j) {
          double sum = 0;
          for (int64_t t = 0; t < keys; ++t) sum += before.key(t, head, i) * before.key(t, head, j);
          p.h(n, head, i, j) = static_cast<double>(static_cast<float>(sum / static_cast<double>(n + 1)));
        }
      }
    }
  }
}

// x [T, H K]. pad: columns behind each row of rhs, k and x; with an odd number nothing begins at 16 bytes.
template <class T>
std::vector<double> solve(Device& device, const MesaProblem& p, int64_t pad = 8) {
  Context<T> on(device);
  const int64_t rows = p.sequences.tokens(), width = p.heads() * p.key_dim();
  const Pass pass(device, p.sequences, std::vector<int64_t>(static_cast<size_t>(p.sequences.count()), 0));
  Matrix<T> rhs(device, rows, width, pad, p.rhs), k(device, rows, width, pad, p.k),
      beta(device, rows, p.heads(), 3, p.beta), x(device, rows, width, pad);
  Matrix<Wide<T>> g(device, rows, p.heads(), 1, p.g);
  Buffer<Wide<T>> lambda = on.template buffer<Wide<T>>(p.lambda), state = on.template buffer<Wide<T>>(p.state);
  on.exec.mesa_solve(p.shape, rhs.mat(), k.mat(), beta.mat(), g.mat(), lambda.data(), pass.layout,
                     p.state.empty() ? nullptr : state.data(), x.mat());
  return x.values();
}

// The largest |got - want| / |want| of a token's head. Of results of bf16, what is beyond their rounding: half a unit
// of the last place of each number.
template <class T>
double mesa_error(const MesaProblem& p, const std::vector<double>& got, const std::vector<double>& want) {
  double largest = 0;
  for (int64_t t = 0; t < p.sequences.tokens(); ++t) {
    for (int64_t head = 0; head < p.heads(); ++head) {
      double error = 0, square = 0;
      for (int64_t i = 0; i < p.key_dim(); ++i) {
        const double x = got[p.at(t, head, i)], y = want[p.at(t, head, i)], size = std::max(std::abs(x), std::abs(y)),
                     rounding = std::is_same_v<T, Bf16> && size > 0 ? std::ldexp(1, std::ilogb(size) - 8) : 0,
                     beyond = std::isnan(x) ? x : std::max(0.0, std::abs(x - y) - rounding);
        error += beyond * beyond, square += y * y;
      }
      const double relative = square == 0 ? std::sqrt(error) : std::sqrt(error / square);
      largest = std::isnan(relative) ? std::numeric_limits<double>::infinity() : std::max(largest, relative);
    }
  }
  return largest;
}

// Of the solve in bf16 at condition numbers below 10, beyond rounding: H, the weights and S have 2^-17 or better.
// Without the low part of any of them it would be 1e-4 or more.
inline constexpr double kMesaBound = 5e-5;

}  // namespace fw::testing
