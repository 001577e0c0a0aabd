// The Mesa layer: every token solves the regularised least squares of all before it. With k and q of unit length, g =
// log sigmoid and beta = sigmoid of projections with bias, lambda = softplus(lambda_params) + a least value,
//     H_kk = exp(g) H_kk + beta k k^T        H_kv = exp(g) H_kv + beta k v^T        x = (H_kk + Diag(lambda))^-1 q        o = H_kv^T x
// Both states are one recurrence (`mamba2` with a write gate, scale 1) whose values are v | k. Backward needs no other.
// With y = (H_kk + Diag(lambda))^-1 (H_kv do) it is dq = y, dlambda = -sum y x. The gradients of k, v, g, beta are the
// sum of two backward calls:
// - one that read with x and has the cotangent do | 0 (its gradient of the query is H_kv do),
// - one that read with y and has 0 | -x.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"
#include "nn/recurrence.h"
#include "rule/rule.h"

namespace fw {

struct MesaSpec {
  int64_t hidden = 0;     // d
  int64_t heads = 0;      // H
  int64_t dim = 0;        // K = V
  int64_t conv_size = 4;  // W >= 1, of q and k
  GateKind gate = GateKind::kNone;
  double least_lambda = 0.25;
  int64_t cg_steps = 0;        // 0: exact, by Cholesky; else conjugate gradients, at most so many steps ...
  double cg_tolerance = 1e-6;  // ... and until the residual is this share of the right-hand side
  double norm_eps = 1e-5;
  InitScheme init = InitScheme::kXavier;

  int64_t size() const { return heads * dim; }
  int64_t columns() const { return (gate == GateKind::kNone ? 3 : 4) * size(); }  // q | k | v | gate
  static Rule rule();
};

// With `prefix` before the names:
// - {q,k,v}_proj.weight [H K, d], g_proj.weight with a gate,
// - a_proj, b_proj .weight [H, d], .bias,
// - {q,k}_conv1d.weight [H K, 1, W],
// - lambda_params [H K],
// - o_norm.weight [K], o_proj.weight [d, H K].
std::vector<ParamSpec> mixer_parameters(const MesaSpec& spec, const std::string& prefix);
// What it remembers: s [H, K, 2 K], H_kv | H_kk; tail [W-1, 2 H K], the convolution's last inputs, q | k, oldest first,
// where W > 1.
std::vector<StateTensor> mixer_state(const MesaSpec& spec);

template <class T>
class MesaMixer final : public Mixer<T> {
 public:
  MesaMixer(const MesaSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  struct Context;
  const Recurrence<T>& planned(const Pass<T>& pass) const;
  Mat<T> solve(const Pass<T>& pass, const Context& c, Mat<const T> rhs) const;

  MesaSpec spec_;
  int stack_ = -1, decay_ = -1, decay_bias_ = -1, gain_ = -1, gain_bias_ = -1, conv_ = -1, lambda_ = -1, norm_ = -1,
      out_ = -1;
};

}  // namespace fw
