// What follows the mixer in a block.
//   SwiGLU:       y = (silu(x Wg^T) * (x Wu^T)) Wd^T. Wg and Wu are declared one after the other and run as one product.
//   channel mix:  y = relu(x' Wk^T)^2 Wv^T with x'[t] = x[t] + (x[t-1] - x[t]) mix, which remembers a row (RWKV-7, Peng
//   et al. 2025).
#pragma once

#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"

namespace fw {

enum class MlpKind { kSwiglu, kChannelMix, kExperts };

// Of a mixture of experts (experts.h).
struct ExpertsSpec {
  RouterShape router;
  bool correction_bias = false;  // added to the scores for the choice alone
  int64_t size = 0;              // m of an expert
  int64_t shared_size = 0;       // of the shared expert, which every token passes; 0: none
  bool shared_gate = false;      // its output times the sigmoid of a number of the token
};

struct MlpSpec {
  int64_t hidden = 0;  // d
  int64_t size = 0;    // m; 0: no MLP
  InitScheme init = InitScheme::kXavier;
  MlpKind kind = MlpKind::kSwiglu;
  // a channel mix begins by its depth, SwiGLU's output with PyTorch's weights by the number
  int64_t layer = 0, layers = 1;
  ExpertsSpec experts;  // of kExperts, whose `size` is not 0
};
// gate_proj [m, d], up_proj [m, d], down_proj [d, m], or x_k [d], key [m, d], value [d, m], with `prefix` before the
// names, or those of experts.h; none for a size of 0.
std::vector<ParamSpec> mlp_parameters(const MlpSpec& spec, const std::string& prefix);
// What it remembers: nothing, or mlp_shift [1, d], the last row.
std::vector<StateTensor> mlp_state(const MlpSpec& spec);

template <class T>
class Mlp {
 public:
  struct Context {
    Mat<T> shifted;           // [T, d], of a channel mix
    Mat<T> gate_up;           // [T, 2 m], [T, m]; backward turns it into its gradient
    Mat<T> act;               // [T, m]
    const T* tail = nullptr;  // the row before this pass [N, d]
  };

  Mlp(const MlpSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  // Whether it understands Pass::norm and Pass::adds, as mixers say (mixer.h).
  bool takes_norm() const { return !shifts(); }
  // y [T, d] is overwritten; activations come from the arena.
  void forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y, Context& context) const;
  // x as forward had it; dx [T, d] is overwritten; uses the context up.
  void backward(const Pass<T>& pass, Context& context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const;

 private:
  bool shifts() const { return spec_.kind == MlpKind::kChannelMix; }
  int64_t width() const { return shifts() ? spec_.size : 2 * spec_.size; }
  // tail_out: where the last row goes, or null.
  void shift(const Pass<T>& pass, Mat<const T> x, T* tail_out, Context& context) const;
  void project(const Pass<T>& pass, Mat<const T> x, Context& context) const;
  void activate(const Pass<T>& pass, Context& context) const;

  MlpSpec spec_;
  int mix_ = -1, gate_up_ = -1, down_ = -1;
};

}  // namespace fw
