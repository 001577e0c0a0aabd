// One token of one head of a rule, from a given state, with the little linear algebra that statements about it need.
// States are [K, V], row-major; a Vec is a vector or a state.
#pragma once

#include <cmath>
#include <numeric>
#include <string>

#include "base/random.h"
#include "support/recurrence.h"

namespace fw::testing {

using Vec = std::vector<double>;

inline double dot(const Vec& a, const Vec& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }
inline double square(const Vec& a) { return dot(a, a); }
inline double norm(const Vec& a) { return std::sqrt(square(a)); }

inline Vec operator*(double s, Vec x) {
  for (double& y : x) y *= s;
  return x;
}
inline Vec operator+(Vec a, const Vec& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}
inline Vec operator-(Vec a, const Vec& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

// a b^T
inline Vec outer(const Vec& a, const Vec& b) {
  Vec S;
  S.reserve(a.size() * b.size());
  for (const double x : a) {
    for (const double y : b) S.push_back(x * y);
  }
  return S;
}

// S^T x, S [K, V]
inline Vec transposed_times(const Vec& S, const Vec& x, size_t V) {
  Vec y(V, 0.0);
  for (size_t i = 0; i < S.size(); ++i) y[i % V] += S[i] * x[i / V];
  return y;
}

inline Vec normals(Random& random, size_t n) {
  Vec x(n);
  for (double& y : x) y = random.normal();
  return x;
}

struct Step {
  size_t V = 1;
  Vec q, k, v, S0;     // [K], [K], [V], [K, V]
  ReferenceInputs in;  // the rule's gates; the four above are put in by state_after
  uint64_t seed = 1;
};

// S0^T k - v for any state
inline Vec residual(const Step& x, const Vec& S) { return transposed_times(S, x.k, x.V) - x.v; }

// The state that the public reference of the rule has after the token. rule: as parse_rule reads it.
inline Vec state_after(const std::string& rule, const Step& x) {
  ReferenceShape shape;
  shape.sequences = SeqLayout::uniform(1, 1);
  shape.K = static_cast<int64_t>(x.k.size());
  shape.V = static_cast<int64_t>(x.V);
  ReferenceInputs in = x.in;
  in.q = x.q;
  in.k = x.k;
  in.v = x.v;
  in.initial_state = x.S0;
  return reference_forward(parse_rule(rule), shape, in).final_state;
}

// q and k of a length between 0.3 and 3, beta between 0.05 and 0.95.
inline Step random_step(int64_t K, int64_t V, uint64_t seed) {
  Random random(seed);
  Step x;
  x.V = static_cast<size_t>(V);
  x.seed = seed;
  for (Vec* key : {&x.q, &x.k}) {
    *key = normals(random, static_cast<size_t>(K));
    *key = random.uniform(0.3, 3) / norm(*key) * *key;
  }
  x.v = normals(random, x.V);
  x.S0 = normals(random, static_cast<size_t>(K * V));
  x.in.beta = {random.uniform(0.05, 0.95)};
  return x;
}

// body(step) for random ones of many sizes.
template <class Body>
void for_each_step(Body&& body) {
  uint64_t seed = 1;
  for (const int64_t K : {1, 2, 3, 8}) {
    for (const int64_t V : {1, 4}) {
      for (int i = 0; i < 5; ++i) {
        const Step x = random_step(K, V, ++seed);
        SCOPED_TRACE(::testing::Message() << "K=" << K << " V=" << V << " seed=" << seed);
        body(x);
      }
    }
  }
}

}  // namespace fw::testing
