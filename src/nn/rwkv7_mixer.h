// RWKV-7's layer (Peng et al. 2025, docs/rules/rwkv7.md), a front of low ranks around the rule `dplr`, scale 1. Six
// mixes of x and the token before it:
//   r, k, v = W_r x_r, W_k x_k, W_v x_v     g = -exp(-1/2) sigmoid(w_lora x_w)     a = sigmoid(a_lora x_a)     gate = g_lora x_g
//   v = v + (v_first - v) sigmoid(v_lora x_v), but in the model's first such layer, whose v is v_first
//   p = normed(k (.) k_k)     f = p (.) a     key = k (.) (1 + (a - 1) (.) k_a)
//   S = Diag(exp g) S - f (p^T S) + key v^T     o = S^T r
//   y = W_o ((GroupNorm(o) + (sum of r key r_k) v) (.) gate)
// x_lora is up(act(down x)): tanh in w, sigmoid in g, nothing in a and v; all but g have a bias.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "nn/mixer.h"
#include "nn/recurrence.h"
#include "rule/rule.h"

namespace fw {

struct Rwkv7Spec {
  int64_t hidden = 0;  // d = H K
  int64_t dim = 0;     // K = V
  int64_t decay_rank = 0, rate_rank = 0, value_rank = 0, gate_rank = 0;
  double key_eps = 0;                    // of the key's norm, inside its root; 0: the norm is at least 1e-12
  double norm_eps = 1e-5;                // of the GroupNorm, times K
  bool first = false;                    // its value is the first one
  int64_t layer = 0, layers = 1;         // by which mixes and gates begin
  static constexpr double kScale = 1.0;  // of the read vector
  int64_t heads() const { return hidden / dim; }
  static Rule rule();
};

// With `prefix` before the names:
// - x_r, x_w, x_k, x_v, x_a, x_g [1, 1, d],
// - k_k, k_a [d], r_k [H, K],
// - {r,k,v,o}_proj.weight [d, d],
// - w_lora, v_lora (not in the first layer), a_lora, g_lora: .lora.0.weight [rank, d], .lora.2.weight [d, rank],
//   .lora.2.bias [d] (not of g),
// - g_norm.weight, .bias [d].
std::vector<ParamSpec> mixer_parameters(const Rwkv7Spec& spec, const std::string& prefix);
// Its recurrence, but for form and layout.
RecurrenceShape recurrence_of(const Rwkv7Spec& spec);
// What it remembers: s [H, K, K], K-first; shift [1, d], the last row of x.
std::vector<StateTensor> mixer_state(const Rwkv7Spec& spec);

template <class T>
class Rwkv7Mixer final : public Mixer<T> {
 public:
  Rwkv7Mixer(const Rwkv7Spec& spec, const std::string& prefix, Params<Wide<T>>& params);
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  enum Mix { kR, kW, kK, kV, kA, kG, kMixes };  // in order of declaration
  // A projection of low rank: its parameters, and what backward needs of it.
  struct LowRank {
    int down = -1, up = -1, bias = -1;
    int64_t rank = 0;
    FeatureMap map = FeatureMap::kNone;
    bool sigmoid = false;  // between the factors
  };
  struct Inner {
    Mat<T> in, out;  // [T, rank]: before and after what is between the factors; one where that is nothing
  };
  struct Context;
  const Recurrence<T>& planned(const Pass<T>& pass, const StepSlots& slots = {}) const;
  Mat<T> mixed(const Context& c, Mix mix) const;
  void shift(const Pass<T>& pass, Mat<const T> x, T* tail_out, Context& c) const;
  Mat<T> project(const Pass<T>& pass, int weight, Mat<const T> x) const;
  Mat<T> low_rank_forward(const Pass<T>& pass, const LowRank& p, Mat<const T> x, Inner& inner) const;
  // dx is overwritten or added to.
  void low_rank_backward(const Pass<T>& pass, const LowRank& p, const Inner& inner, Mat<const T> dy, Mat<const T> x,
                         Mat<T> dx, Write write) const;

  Rwkv7Spec spec_;
  int mix_ = -1, k_k_ = -1, k_a_ = -1, r_k_ = -1, r_ = -1, k_ = -1, v_ = -1, o_ = -1, norm_ = -1, norm_bias_ = -1;
  LowRank decay_, value_, rate_, gate_;
};

}  // namespace fw
