// Mamba-3's layer (Lahoti et al. 2026; docs/rules/mamba3.md): one projection in_proj of x gives z | x | B | C | dt | A
// | trap | angle; B and C pass an RMSNorm of N; dt = softplus(. + dt_bias) and the decay rate max(f(A), floor) are of
// every head, the angles of all heads; the recurrence of mamba3_scan.h with C as query and B as key, x as value (MIMO:
// spread over R rows by mimo_x). Y = o + D v, optionally normed per head, times SiLU(z) (MIMO: of mimo_z z, then summed
// over the rows by mimo_o); out_proj.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"
#include "rule/rule.h"

namespace fw {

struct Mamba3Spec {
  int64_t hidden = 0;        // d
  int64_t heads = 0;         // H
  int64_t head_dim = 0;      // P
  int64_t groups = 1;        // G, divides H: heads that share B and C
  int64_t state = 0;         // N
  int64_t mimo_rank = 0;     // R; 0: SISO, one row a token and no mimo_x, mimo_z, mimo_o
  int64_t angles = 0;        // NA, 1 to N / 2
  bool rotate_half = false;  // pairs of channels (i, i + N / 2), else (2i, 2i + 1)
  Mamba3Decay decay;
  bool output_norm = false;
  double norm_eps = 1e-5;
  InitScheme init = InitScheme::kXavier;

  int64_t inner() const { return heads * head_dim; }
  int64_t rank() const { return mimo_rank > 0 ? mimo_rank : 1; }
  int64_t shared() const { return rank() * groups * state; }  // of B and of C
  int64_t columns() const { return 2 * inner() + 2 * shared() + 3 * heads + angles; }
  Mamba3Shape shape() const { return {heads, groups, state, head_dim, rank(), angles, rotate_half}; }
};

// dt_bias, D [H], B_bias, C_bias [H, R, N], in_proj.weight [columns, d], B_norm.weight, C_norm.weight [N],
// out_proj.weight [d, H P]. With MIMO mimo_x, mimo_z, mimo_o [H, R, P]; with an output norm norm.weight [H P]; `prefix`
// before the names.
std::vector<ParamSpec> mixer_parameters(const Mamba3Spec& spec, const std::string& prefix);
// What it remembers: s [H, N, P]; the last token's rotated keys k [R, H N] and values v [R, H P], which the next one
// still writes. Angle [2, H NA], in turns and what their digits leave.
std::vector<StateTensor> mixer_state(const Mamba3Spec& spec);

template <class T>
class Mamba3Mixer final : public Mixer<T> {
 public:
  Mamba3Mixer(const Mamba3Spec& spec, const std::string& prefix, Params<Wide<T>>& params);
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  struct Context;
  Mamba3Spec spec_;
  int dt_bias_ = -1, skip_ = -1, b_bias_ = -1, c_bias_ = -1, in_proj_ = -1, b_norm_ = -1, c_norm_ = -1, out_proj_ = -1;
  int mimo_x_ = -1, mimo_z_ = -1, mimo_o_ = -1, norm_ = -1;
};

}  // namespace fw
