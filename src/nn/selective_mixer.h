// The layers with a decay of every element of the state: Mamba (1) (Gu and Dao 2023) and Longhorn as it was published
// (Liu et al. 2024), which shares its layer. One projection in_proj of x gives x | z. A causal convolution with bias
// and SiLU runs over x and gives u. x_proj of u gives a vector of low rank and two keys: dt | B | C in Mamba's letters,
// dt | k | q in Longhorn's. With `law` (ops.h, ScanLaw) the step is
//   kMamba:    step = softplus(dt_proj dt + bias)      kLonghorn: step = sigmoid(dt_head dt + bias)
// the selective scan over u with skip D gives o, and out_proj of o (.) SiLU(z) the output. No norm.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"

namespace fw {

struct SelectiveSpec {
  ScanLaw law = ScanLaw::kMamba;
  int64_t hidden = 0;     // d
  int64_t inner = 0;      // D
  int64_t state = 0;      // N
  int64_t rank = 0;       // R, of the step's projection
  int64_t conv_size = 4;  // W >= 1
  InitScheme init = InitScheme::kXavier;

  int64_t keys() const { return rank + 2 * state; }  // rows of x_proj
};

// With `prefix` before the names:
// - A_log [D, N] (Mamba alone), D [D],
// - in_proj.weight [2 D, d],
// - conv1d.weight [D, 1, W], conv1d.bias [D],
// - x_proj.weight [R + 2 N, D],
// - dt_proj.weight (Longhorn: dt_head) [D, R], its bias [D],
// - out_proj.weight [d, D].
std::vector<ParamSpec> mixer_parameters(const SelectiveSpec& spec, const std::string& prefix);
// What it remembers: s [N, D]; tail [W-1, D], the convolution's last inputs, oldest first, where W > 1.
std::vector<StateTensor> mixer_state(const SelectiveSpec& spec);

template <class T>
class SelectiveMixer final : public Mixer<T> {
 public:
  SelectiveMixer(const SelectiveSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  struct Context;
  const Wide<T>* a_log(const Params<Wide<T>>& params) const { return a_log_ < 0 ? nullptr : params.value(a_log_); }

  SelectiveSpec spec_;
  int a_log_ = -1, skip_ = -1, in_proj_ = -1, conv_ = -1, conv_bias_ = -1, x_proj_ = -1, step_ = -1, step_bias_ = -1,
      out_proj_ = -1;
};

}  // namespace fw
