#include "reference/mesa.h"

#include <cmath>

namespace fw {
namespace {

using Vec = std::vector<double>;

// (H + Diag(lambda))^-1 rhs at every token and head, by Gauss and Jordan: the matrix is positive definite.
Vec solve(const MesaProblem& p, const Vec& rhs) {
  const ReferenceShape& s = p.shape;
  const size_t K = static_cast<size_t>(s.K), heads = static_cast<size_t>(s.H);
  Vec x(rhs.size());
  for (int64_t n = 0; n < s.sequences.count(); ++n) {
    for (size_t h = 0; h < heads; ++h) {
      Vec H(K * K, 0.0);
      if (!p.h_kk.empty())
        H.assign(p.h_kk.begin() + static_cast<std::ptrdiff_t>((static_cast<size_t>(n) * heads + h) * K * K),
                 p.h_kk.begin() + static_cast<std::ptrdiff_t>((static_cast<size_t>(n) * heads + h + 1) * K * K));
      for (int64_t t = s.sequences.begin(n); t < s.sequences.end(n); ++t) {
        const size_t at = static_cast<size_t>(t) * heads + h;
        Vec a(K * K), y(rhs.begin() + static_cast<std::ptrdiff_t>(at * K),
                        rhs.begin() + static_cast<std::ptrdiff_t>((at + 1) * K));
        for (size_t i = 0; i < K; ++i) {
          for (size_t j = 0; j < K; ++j) {
            H[i * K + j] = std::exp(p.g[at]) * H[i * K + j] + p.beta[at] * p.k[at * K + i] * p.k[at * K + j];
            a[i * K + j] = H[i * K + j] + (i == j ? p.lambda[h * K + i] : 0);
          }
        }
        for (size_t pivot = 0; pivot < K; ++pivot) {
          for (size_t i = 0; i < K; ++i) {
            if (i == pivot) continue;
            const double factor = a[i * K + pivot] / a[pivot * K + pivot];
            for (size_t j = pivot; j < K; ++j) a[i * K + j] -= factor * a[pivot * K + j];
            y[i] -= factor * y[pivot];
          }
        }
        for (size_t i = 0; i < K; ++i) x[at * K + i] = y[i] / a[i * K + i];
      }
    }
  }
  return x;
}

// Rows [n, K] and [n, K] as [n, 2 K], an empty one as zeros.
Vec joined(const Vec& left, const Vec& right, size_t count, size_t K) {
  Vec both(2 * count * K, 0.0);
  for (size_t row = 0; row < count; ++row) {
    for (size_t i = 0; i < K; ++i) {
      if (!left.empty()) both[2 * row * K + i] = left[row * K + i];
      if (!right.empty()) both[(2 * row + 1) * K + i] = right[row * K + i];
    }
  }
  return both;
}
// The left half, or the right one.
Vec half(const Vec& both, size_t K, bool right) {
  Vec part(both.size() / 2);
  for (size_t i = 0; i < part.size(); ++i) part[i] = both[(2 * (i / K) + (right ? 1 : 0)) * K + i % K];
  return part;
}

void add(Vec& to, const Vec& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

// The recurrence of both states, read with `read`.
ReferenceProblem scan_of(const MesaProblem& p, Vec read) {
  const size_t K = static_cast<size_t>(p.shape.K), rows = p.k.size() / K,
               state_rows = static_cast<size_t>(p.shape.sequences.count() * p.shape.H) * K;
  ReferenceProblem x;
  x.rule = parse_rule("mamba2 write=scalar");
  x.shape = p.shape;
  x.shape.V = 2 * p.shape.K;
  x.shape.scale = 1;
  x.in.q = std::move(read);
  x.in.k = p.k;
  x.in.v = joined(p.v, p.k, rows, K);
  x.in.g = p.g;
  x.in.write_gate = p.beta;
  x.in.initial_state = joined(p.h_kv, p.h_kk, state_rows, K);
  return x;
}

}  // namespace

MesaResults mesa_forward(const MesaProblem& p, const RunForward& forward) {
  const size_t K = static_cast<size_t>(p.shape.K);
  const ReferenceOutputs out = forward(scan_of(p, solve(p, p.q)));
  return {half(out.o, K, false), half(out.final_state, K, false), half(out.final_state, K, true)};
}

MesaGradients mesa_backward(const MesaProblem& p, const RunBackward& backward) {
  const size_t K = static_cast<size_t>(p.shape.K), rows = p.k.size() / K,
               state_rows = static_cast<size_t>(p.shape.sequences.count() * p.shape.H) * K;
  const Vec x = solve(p, p.q);
  ReferenceProblem values = scan_of(p, x);
  values.d.o = joined(p.d_o, {}, rows, K);
  values.d.final_state = joined(p.d_h_kv, p.d_h_kk, state_rows, K);
  ReferenceInputs d = backward(values);  // that of the query is H_kv do
  const Vec y = solve(p, d.q);
  ReferenceProblem keys = scan_of(p, y);
  Vec minus_x = x;
  for (double& value : minus_x) value = -value;
  keys.d.o = joined({}, minus_x, rows, K);
  const ReferenceInputs e = backward(keys);
  add(d.k, e.k);
  add(d.v, e.v);
  add(d.g, e.g);
  add(d.write_gate, e.write_gate);
  add(d.initial_state, e.initial_state);
  MesaGradients grad{y,
                     d.k,
                     half(d.v, K, false),
                     d.g,
                     d.write_gate,
                     Vec(p.lambda.size(), 0.0),
                     half(d.initial_state, K, false),
                     half(d.initial_state, K, true)};
  add(grad.k, half(d.v, K, true));
  for (size_t i = 0; i < x.size(); ++i) grad.lambda[i % p.lambda.size()] -= x[i] * y[i];
  return grad;
}

}  // namespace fw
