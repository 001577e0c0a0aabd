// The gated convolution that Zoology's hybrids put before the mixer under study: y = x + (conv(x) + b) (x P^T + c), a
// causal depthwise convolution of W taps without activation times a projection, elementwise. It mixes neighbours and
// nothing further away.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/init.h"
#include "nn/mixer.h"

namespace fw {

struct ConvSpec {
  int64_t hidden = 0;  // d
  int64_t kernel = 3;  // W >= 1
  InitScheme init = InitScheme::kXavier;
};

// conv.weight [d, 1, W], conv.bias, projection.weight [d, d], projection.bias, with `prefix` before the names.
std::vector<ParamSpec> mixer_parameters(const ConvSpec& spec, const std::string& prefix);
// What it remembers: tail [W-1, d], the last inputs, oldest first, where W > 1.
std::vector<StateTensor> mixer_state(const ConvSpec& spec);

template <class T>
class ConvMixer final : public Mixer<T> {
 public:
  ConvMixer(const ConvSpec& spec, const std::string& prefix, Params<Wide<T>>& params);
  MixerContext* forward(const Pass<T>& pass, Mat<const T> x, LayerState<T> state, Mat<T> y) const override;
  void backward(const Pass<T>& pass, MixerContext* context, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const override;

 private:
  struct Context;
  ConvSpec spec_;
  int conv_ = -1, conv_bias_ = -1, projection_ = -1, projection_bias_ = -1;
};

}  // namespace fw
