// Where the gain gate beta [T, HV] comes from: bound * sigmoid of a projection of the token or of one learned number.
// It is multiplied by a factor of the token's position in its sequence (the ablations of the Kaczmarz paper). The same
// sigmoid can be the decay too: a single gate, decay = 1 - gain.
#pragma once

#include <cstdint>

#include "nn/mixer.h"

namespace fw {

struct GainSpec {
  bool learned = false;  // one number a layer instead of a projection
  PositionFactor factor = PositionFactor::kNone;
  bool single_gate = false;  // the decay is 1 - sigmoid; there is no projection for it
};

template <class T>
class GainGate {
 public:
  struct Context {
    Mat<T> sigmoid;  // [T, HV], bound * sigmoid, before the factor
  };

  // parameter: index of the learned number, or -1. bound: largest value.
  GainGate(const GainSpec& spec, int64_t v_heads, Wide<T> bound, int parameter)
      : spec_(spec), v_heads_(v_heads), bound_(bound), parameter_(parameter) {}

  // What makes the projection, [T, HV] from column `begin` on of a product, the sigmoid that forward() takes.
  SigmoidColumns sigmoid_of(int64_t begin) const { return {begin, spec_.learned ? 0 : v_heads_, bound_}; }
  // beta; sigmoid [T, HV]: as sigmoid_of() has it (empty when the gain is learned).
  Mat<T> forward(const Pass<T>& pass, Mat<T> sigmoid, int64_t tokens, Context& context) const;
  // g [T, HV] = log(1 - sigmoid), for a single gate.
  void log_decay(const Pass<T>& pass, const Context& context, Mat<Wide<T>> g) const;
  // dbeta [T, HV] becomes the gradient of the projection, or adds to that of the learned number. dg: of log_decay's g,
  // or empty.
  void backward(const Pass<T>& pass, const Context& context, Mat<T> dbeta, Mat<const Wide<T>> dg) const;

 private:
  GainSpec spec_;
  int64_t v_heads_;
  Wide<T> bound_;
  int parameter_;
};

}  // namespace fw
