// The selective scans in double, token by token, with a backward pass of their own that keeps every state: what
// selftest and the tests compare with.
//   mamba:     S[n,d] = exp(step_d a_nd) S[n,d] + k_n step_d u_d          longhorn: S[n,d] = (1 - e k_n^2) S[n,d] + k_n e u_d, e = step_d / (1 + step_d |k|^2)
//   y_d = sum_n q_n S[n,d] + skip_d u_d
#pragma once

#include <cstdint>
#include <vector>

#include "base/seq_layout.h"

namespace fw {

struct ElementScan {
  bool longhorn = false;
  SeqLayout sequences;
  int64_t channels = 0, states = 0;  // D, N

  // Tensors of the inputs, and of their gradients: u, step [T, D], q, k [T, N], a [D, N] (negative; empty with
  // longhorn), skip [D], s0 [sequences, N, D].
  struct Inputs {
    std::vector<double> u, step, q, k, a, skip, s0;
  };
  // y [T, D], final states [sequences, N, D]; their cotangents have the same type.
  struct Outputs {
    std::vector<double> y, s;
  };

  Inputs random(uint64_t seed) const;
  Outputs random_cotangents(uint64_t seed) const;
  Outputs forward(const Inputs& in) const;
  Inputs backward(const Inputs& in, const Outputs& d) const;

 private:
  // Before every token, and after the last of a sequence: [T + sequences, N, D], sequence i's first at begin(i) + i.
  std::vector<double> all_states(const Inputs& in) const;
};

}  // namespace fw
