// Mamba-2's own layer: one projection in_proj of x gives z | x B C | dt; a causal convolution with bias and SiLU over
// x, B and C; the time step dt = softplus(. + dt_bias) of every head is the write gate. Times A = -exp(A_log) it is the
// log-decay. The recurrence is `mamba2` with C as query and B as key of a group of heads, scale 1. Then y = o + D x,
// times SiLU(z), RMSNorm over the whole width, out_proj.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"
#include "rule/rule.h"

namespace fw {

struct SsdSpec {
  int64_t hidden = 0;     // d
  int64_t heads = 0;      // H
  int64_t head_dim = 0;   // P
  int64_t groups = 1;     // G, divides H: heads that share B and C
  int64_t state = 0;      // N
  int64_t conv_size = 4;  // W >= 1
  double norm_eps = 1e-5;
  InitScheme init = InitScheme::kXavier;

  int64_t inner() const { return heads * head_dim; }
  int64_t conv_channels() const { return inner() + 2 * groups * state; }
  int64_t columns() const { return inner() + conv_channels() + heads; }
  static Rule rule();
};

// A_log, D, dt_bias [H], in_proj.weight [columns, d], conv1d.weight [channels, 1, W], conv1d.bias, norm.weight [H P],
// out_proj.weight [d, H P], with `prefix` before the names.
std::vector<ParamSpec> mixer_parameters(const SsdSpec& spec, const std::string& prefix);
// Its recurrence, but for the form.
RecurrenceShape recurrence_of(const SsdSpec& spec);
// What it remembers: s [H, N, P]; tail [W-1, channels], the convolution's last inputs, x | B | C, oldest first, where W
// > 1.
std::vector<StateTensor> mixer_state(const SsdSpec& spec);

template <class T>
class SsdMixer final : public Mixer<T> {
 public:
  SsdMixer(const SsdSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  struct Context;
  SsdSpec spec_;
  int a_log_ = -1, skip_ = -1, dt_bias_ = -1, in_proj_ = -1, conv_ = -1, conv_bias_ = -1, norm_ = -1, out_proj_ = -1;
};

}  // namespace fw
