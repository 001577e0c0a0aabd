// A mixture of experts in an MLP's place (Shazeer et al. 2017; DeepSeek-V3 for the sigmoid router):
//   y = sum over the k chosen experts e of w_e swiglu_e(x), + swiglu(x) of a shared expert, times sigmoid(x Ws^T) where
//   it has a gate.
// The rows of all tokens are sorted by expert, so that each expert's product is one. No token is dropped.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/mixer.h"
#include "nn/mlp.h"

namespace fw {

// MLP of the shared expert.
MlpSpec shared_expert_spec(const MlpSpec& spec);
// gate.weight [E, d], gate.e_score_correction_bias [E], experts.gate_up_proj [E, 2 m, d], experts.down_proj [E, d, m],
// shared_expert.{gate,up,down}_proj.weight and shared_expert_gate.weight [1, d]; names as transformers has them.
std::vector<ParamSpec> experts_parameters(const MlpSpec& spec, const std::string& prefix);

template <class T>
class Experts {
 public:
  struct Context {
    Mat<T> scores;      // [T, E]
    ExpertRows rows;    // R = T k
    Mat<T> weights;     // [R, 1]
    Mat<T> gate_up;     // [R, 2 m]; backward turns it into its gradient
    Mat<T> act;         // [R, m]
    Mat<T> shared_out;  // [T, d], before its gate
    Mat<T> gate;        // [T, 1]
    typename Mlp<T>::Context shared;
  };

  Experts(const MlpSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  // As Mlp has them.
  void forward(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Context& context) const;
  void backward(const Pass<T>& pass, Context& context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const;

 private:
  int64_t experts() const { return spec_.experts.router.experts; }
  int64_t size() const { return spec_.experts.size; }
  Weight<Wide<T>> gate_up_weight(const Pass<T>& pass) const;
  Weight<Wide<T>> down_weight(const Pass<T>& pass) const;
  void route(const Pass<T>& pass, Mat<const T> x, Context& context) const;
  void project(const Pass<T>& pass, Mat<const T> x, Context& context) const;
  void activate(const Pass<T>& pass, Context& context) const;
  void add_shared(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Context& context) const;
  void shared_backward(const Pass<T>& pass, Context& context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const;

  MlpSpec spec_;
  int router_ = -1, bias_ = -1, gate_up_ = -1, down_ = -1, shared_gate_ = -1;
  std::unique_ptr<Mlp<T>> shared_;  // null: none
};

}  // namespace fw
