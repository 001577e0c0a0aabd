// The formulas of docs/rules/errata.md: as printed they differ from the recurrence by the numbers that the page gives,
// as corrected they are it. A chunk of 64 tokens, K = V = 16, one head, in double, from a random state.
#include <gtest/gtest.h>

#include <cmath>

#include "support/one_step.h"

namespace fw {
namespace {

using namespace testing;  // one_step.h's linear algebra

constexpr int64_t kC = 64, kK = 16, kV = 16;

struct Chunk {
  ReferenceInputs in;
  Vec erase;  // [C, K], x = k + lambda q
  Vec gain;   // [C], what multiplies residual and key
  Vec log_decay;
};

Vec row(const Vec& all, int64_t t, int64_t n) { return {all.begin() + t * n, all.begin() + (t + 1) * n}; }

Chunk random_chunk() {
  Random random(1);
  Chunk x;
  x.in.initial_state = normals(random, kK * kV);
  for (int64_t t = 0; t < kC; ++t) {
    Vec q = normals(random, kK), k = normals(random, kK);
    q = 1 / norm(q) * q;
    k = 1 / norm(k) * k;
    const Vec v = normals(random, kV);
    x.in.q.insert(x.in.q.end(), q.begin(), q.end());
    x.in.k.insert(x.in.k.end(), k.begin(), k.end());
    x.in.v.insert(x.in.v.end(), v.begin(), v.end());
    x.in.beta.push_back(random.uniform());
    x.in.g.push_back(std::log(random.uniform(0.8, 1)));
  }
  x.log_decay = x.in.g;
  return x;
}

Chunk random_qdelta_chunk() {
  Chunk x = random_chunk();
  Random random(2);
  for (int64_t t = 0; t < kC; ++t) {
    x.in.lambda.push_back(random.uniform());
    const Vec f = row(x.in.k, t, kK) + x.in.lambda[t] * row(x.in.q, t, kK);
    x.erase.insert(x.erase.end(), f.begin(), f.end());
  }
  x.gain = x.in.beta;
  return x;
}

Chunk random_kaczmarz_chunk() {
  Chunk x = random_chunk();
  Random random(2);
  for (double& k : x.in.k) k *= 2;  // raw keys, all of length 2
  x.erase = x.in.k;
  for (int64_t t = 0; t < kC; ++t) x.gain.push_back(x.in.beta[t] / square(row(x.in.k, t, kK)));
  return x;
}

// What a printed formula has in place of the corrected one.
struct Printed {
  bool transposes_erase = false;     // k_r . x_i in the triangular system instead of x_r . k_i
  bool drops_decay_of_read = false;  // no gamma_r / gamma_i on the queries' products with the keys
  bool counts_first_decay = false;   // gamma_{r -> i} with alpha_r in it, in what a chunk writes
};

struct ChunkOutputs {
  Vec o, state;
};

// (I + T) R = gain (V - gamma X S0), T_ri = gain_r (gamma_r / gamma_i) x_r . k_i; o = gamma q S0 + sum_{i <= r}
// (gamma_r / gamma_i) q_r . k_i R_i.
ChunkOutputs chunk(const Chunk& x, const Printed& printed) {
  Vec R(kC * kV), o, gamma_log(kC);
  double sum = 0;
  for (int64_t t = 0; t < kC; ++t) gamma_log[t] = sum += x.log_decay[t];
  const auto ratio = [&](int64_t i, int64_t r) {  // the decay behind token i up to token r
    return std::exp(gamma_log[r] - gamma_log[i] + (printed.counts_first_decay ? x.log_decay[i] : 0));
  };
  const Vec& S0 = x.in.initial_state;
  Vec state = std::exp(gamma_log[kC - 1]) * S0;
  for (int64_t r = 0; r < kC; ++r) {
    const Vec f = row(x.erase, r, kK), k = row(x.in.k, r, kK), q = row(x.in.q, r, kK);
    Vec residual = row(x.in.v, r, kV) - std::exp(gamma_log[r]) * transposed_times(S0, f, kV);
    Vec read = std::exp(gamma_log[r]) * transposed_times(S0, q, kV);
    for (int64_t i = 0; i < r; ++i) {
      const Vec ki = row(x.in.k, i, kK), written = row(R, i, kV);
      const double meets = printed.transposes_erase ? dot(k, row(x.erase, i, kK)) : dot(f, ki);
      residual = residual - std::exp(gamma_log[r] - gamma_log[i]) * meets * written;
      read = read + (printed.drops_decay_of_read ? 1 : ratio(i, r)) * dot(q, ki) * written;
    }
    residual = x.gain[r] * residual;
    std::copy(residual.begin(), residual.end(), R.begin() + r * kV);
    read = read + dot(q, k) * (printed.counts_first_decay ? ratio(r, r) : 1) * residual;
    o.insert(o.end(), read.begin(), read.end());
    state = state + ratio(r, kC - 1) * outer(k, residual);
  }
  return {o, state};
}

double off(const Vec& a, const Vec& b) { return norm(a - b) / norm(b); }

ReferenceOutputs recurrence(const std::string& rule, const Chunk& x) {
  ReferenceShape shape{SeqLayout::uniform(1, kC), 1, 1, kK, kV};
  shape.scale = 1;
  return reference_forward(parse_rule(rule), shape, x.in);
}

TEST(Errata, Qdelta) {
  const Chunk x = random_qdelta_chunk();
  const ReferenceOutputs exact = recurrence("qdelta norm_eps=0", x);
  const ChunkOutputs corrected = chunk(x, {});
  EXPECT_LE(off(corrected.o, exact.o), 1e-14);
  EXPECT_LE(off(corrected.state, exact.final_state), 1e-14);
  EXPECT_NEAR(off(chunk(x, {.drops_decay_of_read = true}).o, exact.o), 1.47, 0.005);  // Eq. 26
  EXPECT_NEAR(off(chunk(x, {.transposes_erase = true}).o, exact.o), 0.20, 0.005);     // D.2
}

TEST(Errata, Kaczmarz) {
  const Chunk x = random_kaczmarz_chunk();
  const ReferenceOutputs exact = recurrence("kaczmarz gain_eps=0 q_norm=raw", x);
  const ChunkOutputs corrected = chunk(x, {});
  EXPECT_LE(off(corrected.o, exact.o), 1e-14);
  EXPECT_LE(off(corrected.state, exact.final_state), 1e-14);
  const ChunkOutputs printed = chunk(x, {.counts_first_decay = true});
  EXPECT_NEAR(off(printed.o, exact.o), 0.068, 0.0005);                // Proposition 5
  EXPECT_NEAR(off(printed.state, exact.final_state), 0.155, 0.0005);  // Proposition 6
}

}  // namespace
}  // namespace fw
