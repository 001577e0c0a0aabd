// The recurrence of Mamba-3 (Lahoti et al. 2026) token by token in double, as the paper has it, with its gradients: the
// trapezoid is written as two terms, and nothing is shifted. With lam = sigmoid(trap), a = exp(g), q and k with their
// biases, rotated by theta_t = theta_{t-1} + pi tanh(angle_t) dt_t,
//   S_t = a S_{t-1} + (1 - lam_t) dt_t a sum_j k^j_{t-1} v^j_{t-1}^T + lam_t dt_t sum_j k^j_t v^j_t^T        y^i_t = S_t^T q^i_t
#pragma once

#include <cstdint>
#include <vector>

#include "base/seq_layout.h"

namespace fw {

struct Mamba3Problem {
  int64_t heads = 0, groups = 1, state = 0, head_dim = 0, rank = 1, angles = 0;  // H, G, N, P, R, NA
  // pairs (i, i + N / 2), else (2i, 2i + 1)
  bool rotate_half = false;
  SeqLayout sequences;

  struct Inputs {
    std::vector<double> q, k;               // [T, R, G, N]
    std::vector<double> v;                  // [T, R, H, P]
    std::vector<double> dt, trap, g;        // [T, H]
    std::vector<double> angle;              // [T, NA], of all heads
    std::vector<double> q_bias, k_bias;     // [H, R, N]
    std::vector<double> s, k_last, v_last;  // before each sequence: [n, H, N, P], [n, R, H, N] (rotated), [n, R, H, P]
    std::vector<double> theta;              // [n, H, NA]
  };
  struct Outputs {
    std::vector<double> y;  // [T, R, H, P]
    std::vector<double> s;  // [n, H, N, P], after each sequence
  };

  Inputs random(uint64_t seed) const;  // floats, the same in float
  Outputs random_cotangents(uint64_t seed) const;
  Outputs forward(const Inputs& in) const;
  Inputs backward(const Inputs& in, const Outputs& d) const;

 private:
  struct Rotated;
  Rotated rotated(const Inputs& in) const;
  std::vector<double> all_states(const Inputs& in, const Rotated& rotated) const;
};

}  // namespace fw
