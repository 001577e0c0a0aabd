#include "reference/mamba3.h"

#include <cmath>

#include "base/random.h"

namespace fw {
namespace {

constexpr double kPi = 3.14159265358979323846;

std::vector<double> normal_values(Random& random, int64_t n, double mean = 0, double deviation = 1) {
  std::vector<double> x(static_cast<size_t>(n));
  for (double& value : x) value = static_cast<double>(static_cast<float>(mean + deviation * random.normal()));
  return x;
}

size_t at(int64_t index) { return static_cast<size_t>(index); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The numbers of one token and head: what S keeps, what the token before and the token itself write.
struct Step {
  double keep, before, now, lam;
};
Step step_of(const Mamba3Problem::Inputs& in, int64_t th) {
  const double lam = sigmoid(in.trap[at(th)]), dt = in.dt[at(th)], keep = std::exp(in.g[at(th)]);
  return {keep, (1 - lam) * dt * keep, lam * dt, lam};
}

}  // namespace

struct Mamba3Problem::Rotated {
  std::vector<double> q, k;   // [T, R, H, N]
  std::vector<double> theta;  // [T, H, NA]
};

Mamba3Problem::Inputs Mamba3Problem::random(uint64_t seed) const {
  Random random(seed);
  const int64_t T = sequences.tokens(), n = sequences.count(), H = heads, N = state, P = head_dim, R = rank;
  Inputs in;
  in.q = normal_values(random, T * R * groups * N);
  in.k = normal_values(random, T * R * groups * N);
  in.v = normal_values(random, T * R * H * P);
  in.dt = normal_values(random, T * H);
  for (double& x : in.dt) x = static_cast<double>(static_cast<float>(0.01 + 0.5 * std::abs(x)));
  in.trap = normal_values(random, T * H);
  in.g = normal_values(random, T * H);
  for (double& x : in.g) x = -std::abs(x);
  in.angle = normal_values(random, T * angles);
  in.q_bias = normal_values(random, H * R * N, 1, 0.5);
  in.k_bias = normal_values(random, H * R * N, 1, 0.5);
  in.s = normal_values(random, n * H * N * P);
  in.k_last = normal_values(random, n * R * H * N);
  in.v_last = normal_values(random, n * R * H * P);
  in.theta = normal_values(random, n * H * angles);
  return in;
}

Mamba3Problem::Outputs Mamba3Problem::random_cotangents(uint64_t seed) const {
  Random random(seed);
  std::vector<double> dy = normal_values(random, sequences.tokens() * rank * heads * head_dim);
  return {std::move(dy), normal_values(random, sequences.count() * heads * state * head_dim)};
}

Mamba3Problem::Rotated Mamba3Problem::rotated(const Inputs& in) const {
  const int64_t T = sequences.tokens(), H = heads, N = state, R = rank;
  Rotated out{std::vector<double>(at(T * R * H * N)), std::vector<double>(at(T * R * H * N)),
              std::vector<double>(at(T * H * angles))};
  for (int64_t n = 0; n < sequences.count(); ++n) {
    for (int64_t t = sequences.begin(n); t < sequences.end(n); ++t) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t a = 0; a < angles; ++a) {
          const double before = t > sequences.begin(n) ? out.theta[at(((t - 1) * H + h) * angles + a)]
                                                       : in.theta[at((n * H + h) * angles + a)];
          out.theta[at((t * H + h) * angles + a)] =
              before + kPi * std::tanh(in.angle[at(t * angles + a)]) * in.dt[at(t * H + h)];
        }
        for (int64_t r = 0; r < R; ++r) {
          const int64_t from = ((t * R + r) * groups + h / (H / groups)) * N, bias = (h * R + r) * N,
                        to = ((t * R + r) * H + h) * N;
          for (int64_t c = 0; c < N; ++c) {
            out.q[at(to + c)] = in.q[at(from + c)] + in.q_bias[at(bias + c)];
            out.k[at(to + c)] = in.k[at(from + c)] + in.k_bias[at(bias + c)];
          }
          for (int64_t a = 0; a < angles; ++a) {
            const double theta = out.theta[at((t * H + h) * angles + a)], c = std::cos(theta), s = std::sin(theta);
            const int64_t i = to + (rotate_half ? a : 2 * a), j = to + (rotate_half ? a + N / 2 : 2 * a + 1);
            for (std::vector<double>* x : {&out.q, &out.k}) {
              const double x0 = (*x)[at(i)], x1 = (*x)[at(j)];
              (*x)[at(i)] = x0 * c - x1 * s;
              (*x)[at(j)] = x0 * s + x1 * c;
            }
          }
        }
      }
    }
  }
  return out;
}

// [T + n, H, N, P]: before each sequence, then after each of its tokens.
std::vector<double> Mamba3Problem::all_states(const Inputs& in, const Rotated& t_) const {
  const int64_t H = heads, N = state, P = head_dim, R = rank, size = H * N * P;
  std::vector<double> all(at((sequences.tokens() + sequences.count()) * size));
  for (int64_t n = 0; n < sequences.count(); ++n) {
    for (int64_t e = 0; e < size; ++e) all[at((sequences.begin(n) + n) * size + e)] = in.s[at(n * size + e)];
    for (int64_t t = sequences.begin(n); t < sequences.end(n); ++t) {
      const bool first = t == sequences.begin(n);
      for (int64_t e = 0; e < size; ++e) {
        const int64_t h = e / (N * P), c = e / P % N, p = e % P;
        const Step step = step_of(in, t * H + h);
        double x = step.keep * all[at((t + n) * size + e)];
        for (int64_t r = 0; r < R; ++r) {
          const int64_t row = (t * R + r) * H + h, last = first ? (n * R + r) * H + h : row - R * H;
          x +=
              step.before * (first ? in.k_last : t_.k)[at(last * N + c)] * (first ? in.v_last : in.v)[at(last * P + p)];
          x += step.now * t_.k[at(row * N + c)] * in.v[at(row * P + p)];
        }
        all[at((t + n + 1) * size + e)] = x;
      }
    }
  }
  return all;
}

Mamba3Problem::Outputs Mamba3Problem::forward(const Inputs& in) const {
  const int64_t H = heads, N = state, P = head_dim, R = rank, size = H * N * P;
  const Rotated t_ = rotated(in);
  const std::vector<double> all = all_states(in, t_);
  Outputs out{std::vector<double>(in.v.size()), std::vector<double>(in.s.size())};
  for (int64_t n = 0; n < sequences.count(); ++n) {
    for (int64_t t = sequences.begin(n); t < sequences.end(n); ++t) {
      for (int64_t e = 0; e < R * size; ++e) {
        const int64_t r = e / size, h = e / (N * P) % H, c = e / P % N, row = (t * R + r) * H + h;
        out.y[at(row * P + e % P)] += all[at((t + n + 1) * size + e % size)] * t_.q[at(row * N + c)];
      }
    }
    for (int64_t e = 0; e < size; ++e) out.s[at(n * size + e)] = all[at((sequences.end(n) + n) * size + e)];
  }
  return out;
}

Mamba3Problem::Inputs Mamba3Problem::backward(const Inputs& in, const Outputs& d) const {
  const int64_t T = sequences.tokens(), H = heads, N = state, P = head_dim, R = rank, size = H * N * P;
  const Rotated t_ = rotated(in);
  const std::vector<double> all = all_states(in, t_);
  const auto zeros = [](const std::vector<double>& like) { return std::vector<double>(like.size()); };
  Inputs g{zeros(in.q),      zeros(in.k),      zeros(in.v),      zeros(in.dt),     zeros(in.trap),
           zeros(in.g),      zeros(in.angle),  zeros(in.q_bias), zeros(in.k_bias), d.s,
           zeros(in.k_last), zeros(in.v_last), zeros(in.theta)};
  std::vector<double> dq(at(T * R * H * N)), dk(at(T * R * H * N));  // of the rotated ones
  for (int64_t n = 0; n < sequences.count(); ++n) {
    double* ds = g.s.data() + n * size;
    for (int64_t t = sequences.end(n) - 1; t >= sequences.begin(n); --t) {
      const bool first = t == sequences.begin(n);
      for (int64_t h = 0; h < H; ++h) {
        const Step step = step_of(in, t * H + h);
        double of_keep = 0, of_before = 0, of_now = 0;
        for (int64_t e = h * N * P; e < (h + 1) * N * P; ++e) {
          const int64_t c = e / P % N, p = e % P;
          for (int64_t r = 0; r < R; ++r) {
            const int64_t row = (t * R + r) * H + h;
            const double dy = d.y[at(row * P + p)];
            dq[at(row * N + c)] += all[at((t + n + 1) * size + e)] * dy;
            ds[e] += t_.q[at(row * N + c)] * dy;
          }
          of_keep += ds[e] * all[at((t + n) * size + e)];
          for (int64_t r = 0; r < R; ++r) {
            const int64_t row = (t * R + r) * H + h, last = first ? (n * R + r) * H + h : row - R * H;
            const double k = t_.k[at(row * N + c)], v = in.v[at(row * P + p)];
            const double k_last = (first ? in.k_last : t_.k)[at(last * N + c)],
                         v_last = (first ? in.v_last : in.v)[at(last * P + p)];
            of_now += ds[e] * k * v;
            of_before += ds[e] * k_last * v_last;
            dk[at(row * N + c)] += step.now * ds[e] * v;
            g.v[at(row * P + p)] += step.now * ds[e] * k;
            (first ? g.k_last : dk)[at(last * N + c)] += step.before * ds[e] * v_last;
            (first ? g.v_last : g.v)[at(last * P + p)] += step.before * ds[e] * k_last;
          }
          ds[e] *= step.keep;
        }
        const double dt = in.dt[at(t * H + h)], of_lam = dt * (of_now - step.keep * of_before);
        g.g[at(t * H + h)] = step.keep * of_keep + step.before * of_before;
        g.trap[at(t * H + h)] = of_lam * step.lam * (1 - step.lam);
        g.dt[at(t * H + h)] = step.lam * of_now + (1 - step.lam) * step.keep * of_before;
      }
    }
  }
  // Through the rotations, the last token first: theta of a token holds those of all before it.
  for (int64_t n = 0; n < sequences.count(); ++n) {
    double* sum = g.theta.data() + n * H * angles;
    for (int64_t t = sequences.end(n) - 1; t >= sequences.begin(n); --t) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t r = 0; r < R; ++r) {
          const int64_t from = ((t * R + r) * groups + h / (H / groups)) * N, bias = (h * R + r) * N,
                        row = ((t * R + r) * H + h) * N;
          for (int64_t a = 0; a < angles; ++a) {
            const double theta = t_.theta[at((t * H + h) * angles + a)], c = std::cos(theta), s = std::sin(theta);
            const int64_t i = row + (rotate_half ? a : 2 * a), j = row + (rotate_half ? a + N / 2 : 2 * a + 1);
            sum[h * angles + a] +=
                dq[at(j)] * t_.q[at(i)] - dq[at(i)] * t_.q[at(j)] + dk[at(j)] * t_.k[at(i)] - dk[at(i)] * t_.k[at(j)];
            for (std::vector<double>* x : {&dq, &dk}) {
              const double d0 = (*x)[at(i)], d1 = (*x)[at(j)];
              (*x)[at(i)] = d0 * c + d1 * s;
              (*x)[at(j)] = d1 * c - d0 * s;
            }
          }
          for (int64_t c = 0; c < N; ++c) {
            g.q[at(from + c)] += dq[at(row + c)];
            g.k[at(from + c)] += dk[at(row + c)];
            g.q_bias[at(bias + c)] += dq[at(row + c)];
            g.k_bias[at(bias + c)] += dk[at(row + c)];
          }
        }
        for (int64_t a = 0; a < angles; ++a) {
          const double tanh = std::tanh(in.angle[at(t * angles + a)]), of_theta = kPi * sum[h * angles + a];
          g.dt[at(t * H + h)] += of_theta * tanh;
          g.angle[at(t * angles + a)] += of_theta * in.dt[at(t * H + h)] * (1 - tanh * tanh);
        }
      }
    }
  }
  return g;
}

}  // namespace fw
