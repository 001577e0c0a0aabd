// AdamW over the flat buffers of Params (float trains; double is for checks against other programs), and the global norm of the
// gradients: the moments and the count of updates; the arithmetic is the device's (ops.def).
#pragma once

#include <cstdint>

#include "nn/params.h"
#include "ops/exec.h"

namespace fw {

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  // decoupled, for parameters with ParamSpec::weight_decay
};

template <class T>
class BasicAdamW {
 public:
  using W = Wide<T>;

  // Moments zero, on the device of the parameters, which are allocated.
  BasicAdamW(const AdamWConfig& config, const Params<W>& params) : config_(config), first_(params.like()), second_(params.like()) {}

  // *sum (device memory) = the sum of squares of all gradients, in double. Not finite if any gradient is not.
  void square_norm(const Exec<T>& exec, const Params<W>& params, double* sum) const;

  // One update by grad_scale * gradients (ops.def has the formula).
  void update(const Exec<T>& exec, Params<W>& params, double lr, double grad_scale);

  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  // m and v, laid out as the parameters' buffers.
  Buffer<W>& first() { return first_; }
  Buffer<W>& second() { return second_; }
  const Buffer<W>& first() const { return first_; }
  const Buffer<W>& second() const { return second_; }

 private:
  AdamWConfig config_;
  Buffer<W> first_, second_;
  int64_t updates_ = 0;
};
using AdamW = BasicAdamW<float>;

// The factor that brings gradients of norm `norm` to at most `clip`: min(1, clip / (norm + 1e-6)); 1 when clip is 0.
double clip_factor(double norm, double clip);

}  // namespace fw
