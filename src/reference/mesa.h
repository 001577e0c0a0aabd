// The Mesa layer's recurrence in terms of the one recurrence and a solve (recurrence.md section 9), in double: what
// checks of other programs' values run through the C header or the reference.
#pragma once

#include <functional>
#include <vector>

#include "reference/problem.h"

namespace fw {

// Layouts as ReferenceShape has them, with K = V columns of keys; lambda [H, K]; h_kv, h_kk [N, H, K, K], empty: zero.
struct MesaProblem {
  ReferenceShape shape;
  std::vector<double> q, k, v, g, beta, lambda, h_kv, h_kk;
  std::vector<double> d_o, d_h_kv, d_h_kk;  // cotangents; empty: zero
};
struct MesaResults {
  std::vector<double> o, h_kv, h_kk;
};
struct MesaGradients {
  std::vector<double> q, k, v, g, beta, lambda, h_kv, h_kk;
};

// What runs a recurrence and its gradient.
using RunForward = std::function<ReferenceOutputs(const ReferenceProblem&)>;
using RunBackward = std::function<ReferenceInputs(const ReferenceProblem&)>;

MesaResults mesa_forward(const MesaProblem& problem, const RunForward& forward);
// Two calls of `backward`.
MesaGradients mesa_backward(const MesaProblem& problem, const RunBackward& backward);

}  // namespace fw
