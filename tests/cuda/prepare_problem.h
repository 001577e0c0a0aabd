// Random problems for prepare, as the device has them and as numbers, and every chunk tile of a chunk by the
// definitions of recurrence.md (sections 1 and 4) in double. For prepare_test.cu.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "rule/front.h"
#include "scan/cuda/common/front/unscaled_keys.cuh"
#include "scan/cuda/kernels.h"
#include "test_numbers.h"

namespace fw::cuda::test {

using testing::from_bf16;
using testing::to_bf16;

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum class Keys { kRandom, kAlike, kIdentical };
enum class Types { kBf16, kFloat, kPadded };  // kPadded: bf16 rows that are not aligned to anything
enum class Decays { kAny, kBf16, kFloat };    // of channels; kAny: not the same from case to case

struct Case {
  std::string name;
  Rule rule;
  int B = 1, T = 64, H = 2, HV = 2, K = 128, V = 128;
  std::vector<int> lengths;  // packed, if not empty
  std::vector<double> decays = {-0.05};
  double rare_decay = 0;  // of every 500th number, if not 0
  Decays decay_type = Decays::kAny;
  double beta_max = 1;
  Keys keys = Keys::kRandom;
  Types types = Types::kBf16;
  bool z = false;
  double tolerance = 6e-3;
  bool bf16_gates = false;  // those of one number a row, besides the decay
  bool cut = false;         // sequences are, which says what is left of sums
  bool keys_lo = false;     // of rules with hi/lo tiles: what bf16 leaves out of e and k is wanted
};

// A tensor [B, T, heads, dim] as the device has it, and the numbers it holds.
struct Tensor {
  std::vector<double> values;
  std::unique_ptr<DeviceBuffer<uint8_t>> memory;
  TokenArg arg;
  int heads = 0, dim = 0;
  bool present() const { return dim > 0; }
  double at(int64_t token, int head, int i) const {
    return values[static_cast<std::size_t>((token * heads + head) * dim + i)];
  }
};

inline std::mt19937_64 generator;
inline double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(generator); }
inline double normal() { return std::normal_distribution<double>()(generator); }
inline int below(int n) { return static_cast<int>(generator() % static_cast<uint64_t>(n)); }

// make(token, head, channel)
template <class Make>
Tensor tensor(int B, int64_t T, int heads, int dim, int HV, bool bf16, bool padded, const Make& make) {
  Tensor t;
  t.heads = heads, t.dim = dim;
  const int64_t tokens = B * T, row = dim + (padded ? 3 : 0), token_row = row * heads, size = bf16 ? 2 : 4;
  t.values.resize(static_cast<std::size_t>(tokens * heads * dim));
  std::vector<uint8_t> bytes(static_cast<std::size_t>(tokens * token_row * size + 64), 0xff);
  for (int64_t i = 0; i < tokens; ++i) {
    for (int h = 0; h < heads; ++h) {
      for (int c = 0; c < dim; ++c) {
        const float x = static_cast<float>(make(i, h, c));
        const std::size_t at = static_cast<std::size_t>((i * token_row + h * row + c) * size);
        if (bf16) {
          const uint16_t bits = to_bf16(x);
          std::memcpy(&bytes[at], &bits, 2);
          t.values[static_cast<std::size_t>((i * heads + h) * dim + c)] = from_bf16(bits);
        } else {
          std::memcpy(&bytes[at], &x, 4);
          t.values[static_cast<std::size_t>((i * heads + h) * dim + c)] = x;
        }
      }
    }
  }
  t.memory = std::make_unique<DeviceBuffer<uint8_t>>(bytes);
  t.arg.data = t.memory->data();
  t.arg.stride_b = T * token_row, t.arg.stride_t = token_row, t.arg.stride_h = row;
  t.arg.bf16 = bf16;
  t.arg.divisor = HV / heads;
  return t;
}

using Matrix = std::vector<double>;  // [64, columns]

struct Inputs : TokenScalars<Tensor> {
  Tensor q, k, v, g, p, b, c, precond_g, precond_beta;
  std::vector<double> m_values;
  std::unique_ptr<DeviceBuffer<float>> m;
};

inline Inputs make_inputs(const Case& test, int64_t T) {
  const Rule& rule = test.rule;
  const bool low = test.types != Types::kFloat, padded = test.types == Types::kPadded;
  Inputs in;
  const auto rows = [&](int heads, int dim, const auto& make) {
    return tensor(test.B, T, heads, dim, test.HV, low, padded, make);
  };
  const auto gates = [&](int heads, double least, double most) {
    return tensor(test.B, T, heads, 1, test.HV, test.bf16_gates, padded,
                  [&](int64_t, int, int) { return uniform(least, most); });
  };
  std::vector<double> direction(static_cast<std::size_t>(test.K));
  for (double& x : direction) x = normal();
  const auto key = [&](int64_t, int, int i) {
    const double common = direction[static_cast<std::size_t>(i)];
    return test.keys == Keys::kRandom  ? normal()
           : test.keys == Keys::kAlike ? std::sqrt(0.9) * common + std::sqrt(0.1) * normal()
                                       : common;
  };
  // Keys that are neither normalised nor divided by a norm are kept at length 1, or T is astronomically large.
  const bool unscaled =
      rule.k_norm == Norm::kRaw && (rule.gain == Gain::kOne || rule.gain == Gain::kGate || !rule.uses_gain());
  const double size = unscaled ? 1 / std::sqrt(static_cast<double>(test.K)) : 0.7;
  in.q = rows(test.H, test.K, [&](int64_t, int, int) { return size * normal(); });
  in.k = rows(test.H, test.K, [&](int64_t t, int h, int i) { return size * key(t, h, i); });
  in.v = rows(test.HV, test.V, [&](int64_t, int, int) { return normal(); });
  if (rule.uses_g()) {
    const int dim = rule.decay == Decay::kChannel ? test.K : 1;
    const bool low_g =
        test.decay_type == Decays::kAny ? low && dim > 1 && below(2) == 0 : test.decay_type == Decays::kBf16;
    in.g = tensor(test.B, T, test.HV, dim, test.HV, low_g, padded, [&](int64_t, int, int) {
      if (test.rare_decay != 0 && below(500) == 0) return test.rare_decay;
      const double g = test.decays[static_cast<std::size_t>(below(static_cast<int>(test.decays.size())))];
      return std::isinf(g) ? g : g * uniform(0.5, 1.5);
    });
  }
  for_each_scalar(
      rule, [&](Tensor& x) { x = gates(test.HV, 0, &x == &in.beta ? test.beta_max : 1); }, in);
  if (rule.uses_erase_key()) in.p = rows(test.H, test.K, [&](int64_t t, int h, int i) { return size * key(t, h, i); });
  if (rule.uses_erase_gate())
    in.b = rows(test.H, rule.erase == Gate::kScalar ? 1 : test.K,
                [&](int64_t, int, int) { return uniform(0, test.beta_max); });
  if (rule.uses_write_gate())
    in.c = rows(test.HV, rule.write == Gate::kScalar ? 1 : test.V, [&](int64_t, int, int) { return uniform(0, 1); });
  if (rule.uses_precond()) {
    in.precond_g = gates(test.H, -1, 0);
    in.precond_beta = gates(test.H, 0, 1);
    std::vector<float> m(static_cast<std::size_t>(test.B * T * test.H * test.K));
    for (float& x : m) x = static_cast<float>(uniform(1 / 1.5, 1.5));
    in.m_values.assign(m.begin(), m.end());
    in.m = std::make_unique<DeviceBuffer<float>>(m);
  }
  return in;
}

// One chunk of one value head in double.
struct Chunk {
  Matrix e, q, x, m, k, y, qt, a, p, t, gamma, z_scale;
  Matrix of_row = Matrix(64, 1.0), of_column = Matrix(64, 1.0);  // a is A times these (b and a of unscaled_keys.cuh)
  double p_terms = 0;                                            // norm of P without the cancellation in its sums
  // the largest entry of A: what rounding errors of T are multiplied by, 1 for every stable rule
  double growth = 1;
};

inline double mean(const Tensor& t, int64_t token, int head) {
  double sum = 0;
  for (int i = 0; i < t.dim; ++i) sum += t.at(token, head, i);
  return sum / t.dim;
}

// Rows `first` .. first + rows - 1 of all tokens. key: columns of the chunk tiles.
inline Chunk reference_chunk(const Case& test, const Inputs& in, double scale, int64_t first, int rows, int hv,
                             int key) {
  const Rule& rule = test.rule;
  const auto head = [&](const Tensor& t) { return hv / (test.HV / t.heads); };
  const std::size_t width = static_cast<std::size_t>(key);
  Matrix r(64 * width), e(64 * width), w(64 * width);
  Chunk c;
  c.z_scale.assign(64, 0);
  std::vector<std::vector<double>> g(64, std::vector<double>(width, 0.0));
  for (int i = 0; i < rows; ++i) {
    const int64_t t = first + i;
    const auto channel = [&](const Tensor& x, int j) { return x.at(t, head(x), j); };
    const auto m_at = [&](int j) {
      return in.m_values.empty()
                 ? 1.0
                 : in.m_values[static_cast<std::size_t>((t * test.H + hv / (test.HV / test.H)) * test.K + j)];
    };
    FrontScalars<double> s;
    const auto in_norm = [&](double y) { return uses_hi_lo(rule) && !test.keys_lo ? from_bf16(to_bf16(y)) : y; };
    for (int j = 0; j < test.K; ++j) {
      s.q2 += in_norm(channel(in.q, j)) * in_norm(channel(in.q, j));
      s.k2 += in_norm(channel(in.k, j)) * in_norm(channel(in.k, j));
      if (in.p.present()) s.p2 += channel(in.p, j) * channel(in.p, j);
      s.kmk += m_at(j) * channel(in.k, j) * channel(in.k, j);
    }
    if (rule.feedback == Feedback::kFixed) s.lambda = rule.lambda;
    for_each_scalar(
        rule, [&](double& to, const Tensor& x) { to = channel(x, 0); }, s, in);
    if (rule.uses_erase_gate() && rule.erase == Gate::kScalar) s.erase = channel(in.b, 0);
    if (rule.uses_erase_gate() && rule.erase == Gate::kAveraged) s.erase = mean(in.b, t, head(in.b));
    if (rule.write == Gate::kScalar) s.write = channel(in.c, 0);
    if (rule.write == Gate::kAveraged) s.write = mean(in.c, t, head(in.c));
    if (rule.normaliser == Normaliser::kGated && rule.uses_precond()) {
      s.alpha_p = std::exp(channel(in.precond_g, 0));
      s.beta_p = channel(in.precond_beta, 0);
    }
    FrontCoefs<double> f = front_coefs(rule, scale, s);
    if (unscaled_keys(rule)) {
      int exponent = 0;
      const double b = f.w_k, a = f.z_v == 0 ? b : 2 * std::frexp(std::abs(f.z_v), &exponent) * b;
      c.of_row[static_cast<std::size_t>(i)] = b, c.of_column[static_cast<std::size_t>(i)] = a;
      f.e_k /= a, f.z_v /= a, f.w_k /= b;
    }
    c.z_scale[static_cast<std::size_t>(i)] = test.z ? 1 : f.z_v;
    for (int j = 0; j < test.K; ++j) {
      const std::size_t at = static_cast<std::size_t>(i) * width + static_cast<std::size_t>(j);
      const double q = channel(in.q, j), k = channel(in.k, j), p = in.p.present() ? channel(in.p, j) : 0;
      const double b = rule.uses_erase_gate() && rule.erase == Gate::kChannel ? channel(in.b, j) : 1;
      r[at] = (rule.preconditions_read() ? m_at(j) : 1) * (f.r_q * q + f.r_k * k);
      e[at] = rule.is_delta() ? b * (f.e_k * k + f.e_q * q + f.e_p * p) : 0;
      w[at] = (rule.preconditions_read() ? 1 : m_at(j)) * f.w_k * k;
    }
    for (int j = 0; j < key; ++j) {
      double step = 0;
      if (rule.decay == Decay::kScalar) step = channel(in.g, 0);
      if (rule.decay == Decay::kConstant) step = std::log1p(-std::exp2(-5.0 - hv));
      if (rule.decay == Decay::kChannel && j < test.K) step = channel(in.g, j);
      g[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] = step;
    }
  }
  const auto index = [&](int i, int j) { return static_cast<std::size_t>(i) * width + static_cast<std::size_t>(j); };
  // Decay of channel j over rows a .. b.
  const auto decay = [&](int a, int b, int j) {
    double sum = 0;
    for (int i = a; i <= b; ++i) sum += g[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
    return std::exp(sum);
  };
  c.e.assign(64 * width, 0), c.q = c.k = c.x = c.y = c.qt = c.e;
  c.gamma.resize(width);
  for (int j = 0; j < key; ++j) {
    c.gamma[static_cast<std::size_t>(j)] = decay(0, 63, j);
    for (int i = 0; i < 64; ++i) {
      c.e[index(i, j)] = -decay(0, i, j) * e[index(i, j)];
      c.q[index(i, j)] = decay(0, i, j) * r[index(i, j)];
      c.k[index(i, j)] = decay(i + 1, 63, j) * w[index(i, j)];
    }
  }
  const auto pair = [](int i, int j) { return static_cast<std::size_t>(i * 64 + j); };
  c.t.assign(64 * 64, 0), c.p = c.a = c.m = c.t;
  for (int j = 0; j < rows; ++j) {
    std::vector<double> running(width, 1.0);
    for (int i = j; i < rows; ++i) {
      for (int channel = 0; channel < test.K; ++channel) {
        double& d = running[static_cast<std::size_t>(channel)];
        if (i > j) d *= std::exp(g[static_cast<std::size_t>(i)][static_cast<std::size_t>(channel)]);
        const double scaled = c.of_column[static_cast<std::size_t>(i)] * c.of_row[static_cast<std::size_t>(j)];
        if (i > j) c.t[pair(i, j)] += scaled * d * e[index(i, channel)] * w[index(j, channel)];
        const double read = d * r[index(i, channel)] * w[index(j, channel)];
        c.p[pair(i, j)] += read;
        c.p_terms += read * read;
      }
    }
  }
  for (int j = 0; j < 64; ++j) {
    c.a[pair(j, j)] = 1;
    for (int i = j + 1; i < 64; ++i) {
      double sum = 0;
      for (int n = j; n < i; ++n) sum += c.t[pair(i, n)] * c.a[pair(n, j)];
      c.a[pair(i, j)] = -sum;
    }
  }
  c.p_terms = std::sqrt(c.p_terms);
  for (const double x : c.a) c.growth = std::max(c.growth, std::abs(x));
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j)
      c.a[pair(i, j)] *= c.of_row[static_cast<std::size_t>(i)] * c.of_column[static_cast<std::size_t>(j)];
  }
  for (int i = 0; i < 64; ++i) {
    for (int n = 0; n < 64; ++n) {
      for (int j = 0; j < 64; ++j) c.m[pair(i, j)] += c.p[pair(i, n)] * c.a[pair(n, j)];
      for (int j = 0; j < key; ++j) {
        c.x[index(i, j)] += c.a[pair(n, i)] * c.k[index(n, j)];
        c.y[index(i, j)] -= c.a[pair(i, n)] * c.e[index(n, j)];
      }
    }
  }
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < key; ++j) {
      c.qt[index(i, j)] = c.q[index(i, j)];
      for (int n = 0; n < 64; ++n) c.qt[index(i, j)] -= c.p[pair(i, n)] * c.y[index(n, j)];
    }
  }
  return c;
}

inline Problem problem_of(const Case& test, const Inputs& in, int64_t T) {
  Problem x;
  x.rule = test.rule;
  x.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(test.K)));
  x.B = test.B, x.T = static_cast<int32_t>(T), x.H = test.H, x.HV = test.HV, x.K = test.K, x.V = test.V,
  x.group = test.HV / test.H;
  x.tokens = test.B * T;
  x.in.q = in.q.arg, x.in.k = in.k.arg, x.in.v = in.v.arg, x.in.g = in.g.arg;
  for_all_scalars([](TokenArg& to, const Tensor& tensor) { to = tensor.arg; }, x.in, in);
  x.in.erase_key = in.p.arg, x.in.erase_gate = in.b.arg, x.in.write_gate = in.c.arg;
  x.in.precond_g = in.precond_g.arg, x.in.precond_beta = in.precond_beta.arg;
  if (in.m) x.m = in.m->data();
  return x;
}

}  // namespace fw::cuda::test
