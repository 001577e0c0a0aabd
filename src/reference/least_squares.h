// Least squares solved exactly, token by token, with the full inverse Gram matrix: what the diagonal preconditioner
// approximates (recurrence.md section 3), and the case in which the two solves of a rule meet. One head, double,
// K-first.
//
// With weights beta, a decay p of the Gram matrix and a decay a of the state:
//     A_t = p_t A_{t-1} + beta_t k_t k_t^T,  A_0 = ridge I,  P_t = A_t^-1 by Sherman and Morrison
//     online    S_t = a_t S_{t-1} + P_t k_t (beta_t (v_t - a_t S_{t-1}^T k_t))^T     o_t = S_t^T q_t         writes P k
//     offline   B_t = a_t p_t B_{t-1} + beta_t k_t v_t^T,  B_0 = ridge S_0           o_t = B_t^T (P_t q_t)   reads P q
//
// Theorem 3.1 of the preconditioned paper, with decays: A_t S_t = B_t at every t, so that both give the same outputs.
// At t = 0 by choice of B_0. If it holds at t - 1, then, because A_t P_t = I and p A_{t-1} = A_t - beta k k^T,
//     A_t S_t = a A_t S_{t-1} + beta k v^T - beta k k^T a S_{t-1} = a (A_t - beta k k^T) S_{t-1} + beta k v^T
//             = a p A_{t-1} S_{t-1} + beta k v^T = a p B_{t-1} + beta k v^T = B_t.
// So the decay of what is accumulated is the product of the two others. It may stand:
// - on the state alone (p = 1: online and offline rule decay alike, the Gram matrix does not),
// - on the Gram matrix alone (a = 1: recursive least squares with forgetting, the online state does not decay),
// - on both.
//
// A Gram matrix that decays by a and an online state that decays by a too go with an accumulation that decays by a^2.
// S_t is the minimiser of
//     sum_i beta_i p_{i+1} .. p_t |S^T k_i - a_{i+1} .. a_t v_i|^2 + ridge p_1 .. p_t |S - a_1 .. a_t S_0|^2.
//
// Gram::kDiagonal keeps the diagonal of A only. Then A_t P_t = I still holds, but p A_{t-1} = A_t - beta Diag(k (.) k),
// and the proof fails for keys with more than one channel: the two solves are different rules.
#pragma once

#include <cstdint>
#include <vector>

namespace fw {

struct LeastSquaresProblem {
  int64_t T = 0, K = 1, V = 1;
  double ridge = 1;                   // > 0
  std::vector<double> q, k;           // [T, K]
  std::vector<double> v;              // [T, V]
  std::vector<double> beta;           // [T], weights >= 0; empty: 1
  std::vector<double> state_decay;    // [T], a, 0 <= a <= 1; empty: 1
  std::vector<double> gram_decay;     // [T], p, 0 < p <= 1 (a Gram matrix forgotten at once has no inverse); empty: 1
  std::vector<double> initial_state;  // [K, V], S_0; empty: zero
};

struct LeastSquaresOutputs {
  std::vector<double> o;            // [T, V]
  std::vector<double> final_state;  // [K, V], S_T; for the offline solve P_T B_T
};

enum class Gram { kFull, kDiagonal };

// Each throws Error(kUsage) naming the input that does not fit.
LeastSquaresOutputs least_squares_online(const LeastSquaresProblem& problem, Gram gram = Gram::kFull);
LeastSquaresOutputs least_squares_offline(const LeastSquaresProblem& problem, Gram gram = Gram::kFull);

}  // namespace fw
