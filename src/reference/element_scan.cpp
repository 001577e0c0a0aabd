#include "reference/element_scan.h"

#include <cmath>

#include "base/random.h"

namespace fw {
namespace {

std::vector<double> normal_values(Random& random, int64_t n) {
  std::vector<double> x(static_cast<size_t>(n));
  for (double& value : x) value = static_cast<double>(static_cast<float>(random.normal()));  // the same in float
  return x;
}

size_t index_of(int64_t row, int64_t columns, int64_t column) { return static_cast<size_t>(row * columns + column); }

// What an element of one token's step is made of.
struct Step {
  double write, decay;
};

}  // namespace

ElementScan::Inputs ElementScan::random(uint64_t seed) const {
  Random random(seed);
  const int64_t T = sequences.tokens();
  Inputs in{normal_values(random, T * channels),
            normal_values(random, T * channels),
            normal_values(random, T * states),
            normal_values(random, T * states),
            normal_values(random, longhorn ? 0 : channels * states),
            normal_values(random, channels),
            normal_values(random, sequences.count() * states * channels)};
  for (double& x : in.step) x = static_cast<double>(static_cast<float>(0.01 + 0.5 * std::abs(x)));
  for (double& x : in.a) x = -static_cast<double>(static_cast<float>(std::exp(x)));
  return in;
}

ElementScan::Outputs ElementScan::random_cotangents(uint64_t seed) const {
  Random random(seed);
  std::vector<double> dy = normal_values(random, sequences.tokens() * channels);
  return {std::move(dy), normal_values(random, sequences.count() * states * channels)};
}

namespace {

double square_norm(const std::vector<double>& k, int64_t t, int64_t states) {
  double sum = 0;
  for (int64_t n = 0; n < states; ++n) sum += k[index_of(t, states, n)] * k[index_of(t, states, n)];
  return sum;
}

Step step_of(const ElementScan& scan, const ElementScan::Inputs& in, int64_t t, int64_t n, int64_t d, double square) {
  const double s = in.step[index_of(t, scan.channels, d)], k = in.k[index_of(t, scan.states, n)];
  if (!scan.longhorn) return {s, std::exp(s * in.a[index_of(d, scan.states, n)])};
  const double e = s / (1 + s * square);
  return {e, 1 - e * k * k};
}

}  // namespace

std::vector<double> ElementScan::all_states(const Inputs& in) const {
  const int64_t size = states * channels;
  std::vector<double> all(static_cast<size_t>((sequences.tokens() + sequences.count()) * size));
  for (int64_t i = 0; i < sequences.count(); ++i) {
    for (int64_t e = 0; e < size; ++e) all[index_of(sequences.begin(i) + i, size, e)] = in.s0[index_of(i, size, e)];
    for (int64_t t = sequences.begin(i); t < sequences.end(i); ++t) {
      const double square = square_norm(in.k, t, states);
      for (int64_t n = 0; n < states; ++n) {
        for (int64_t d = 0; d < channels; ++d) {
          const Step step = step_of(*this, in, t, n, d, square);
          const int64_t e = n * channels + d;
          all[index_of(t + i + 1, size, e)] =
              step.decay * all[index_of(t + i, size, e)] +
              in.k[index_of(t, states, n)] * step.write * in.u[index_of(t, channels, d)];
        }
      }
    }
  }
  return all;
}

ElementScan::Outputs ElementScan::forward(const Inputs& in) const {
  const std::vector<double> all = all_states(in);
  const int64_t size = states * channels;
  Outputs out{std::vector<double>(in.u.size()), std::vector<double>(in.s0.size())};
  for (int64_t i = 0; i < sequences.count(); ++i) {
    for (int64_t t = sequences.begin(i); t < sequences.end(i); ++t) {
      for (int64_t d = 0; d < channels; ++d) {
        double y = in.skip[static_cast<size_t>(d)] * in.u[index_of(t, channels, d)];
        for (int64_t n = 0; n < states; ++n)
          y += in.q[index_of(t, states, n)] * all[index_of(t + i + 1, size, n * channels + d)];
        out.y[index_of(t, channels, d)] = y;
      }
    }
    for (int64_t e = 0; e < size; ++e) out.s[index_of(i, size, e)] = all[index_of(sequences.end(i) + i, size, e)];
  }
  return out;
}

ElementScan::Inputs ElementScan::backward(const Inputs& in, const Outputs& d) const {
  const std::vector<double> all = all_states(in);
  const int64_t size = states * channels;
  Inputs g{std::vector<double>(in.u.size()), std::vector<double>(in.step.size()), std::vector<double>(in.q.size()),
           std::vector<double>(in.k.size()), std::vector<double>(in.a.size()),    std::vector<double>(in.skip.size()),
           std::vector<double>(in.s0.size())};
  for (int64_t i = 0; i < sequences.count(); ++i) {
    std::vector<double> ds(d.s.begin() + i * size, d.s.begin() + (i + 1) * size);
    for (int64_t t = sequences.end(i) - 1; t >= sequences.begin(i); --t) {
      const double square = square_norm(in.k, t, states);
      for (int64_t c = 0; c < channels; ++c) {
        const double u = in.u[index_of(t, channels, c)], s = in.step[index_of(t, channels, c)],
                     dy = d.y[index_of(t, channels, c)];
        g.skip[static_cast<size_t>(c)] += dy * u;
        g.u[index_of(t, channels, c)] += dy * in.skip[static_cast<size_t>(c)];
        double dwrite = 0;  // of s, or of Longhorn's e
        for (int64_t n = 0; n < states; ++n) {
          const Step step = step_of(*this, in, t, n, c, square);
          const size_t key = index_of(t, states, n);
          double& grad = ds[index_of(n, channels, c)];
          const double before = all[index_of(t + i, size, n * channels + c)],
                       after = all[index_of(t + i + 1, size, n * channels + c)];
          g.q[key] += after * dy;
          grad += in.q[key] * dy;
          g.u[index_of(t, channels, c)] += grad * in.k[key] * step.write;
          g.k[key] += grad * step.write * u;
          dwrite += grad * in.k[key] * u;
          const double ddecay = grad * before;
          if (longhorn) {
            dwrite -= ddecay * in.k[key] * in.k[key];
            g.k[key] -= 2 * ddecay * step.write * in.k[key];
          } else {
            const size_t rate = index_of(c, states, n);
            dwrite += ddecay * step.decay * in.a[rate];
            g.a[rate] += ddecay * step.decay * s;
          }
          grad *= step.decay;
        }
        const double root = 1 + s * square;
        g.step[index_of(t, channels, c)] += longhorn ? dwrite / (root * root) : dwrite;
        for (int64_t n = 0; longhorn && n < states; ++n)
          g.k[index_of(t, states, n)] -= 2 * in.k[index_of(t, states, n)] * dwrite * s * s / (root * root);
      }
    }
    std::copy(ds.begin(), ds.end(), g.s0.begin() + i * size);
  }
  return g;
}

}  // namespace fw
