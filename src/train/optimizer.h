// AdamW over the flat buffers of Params<T> (float trains; double is for checks against other programs), and the global norm of the gradients. Both run over
// blocks of a fixed size, so that results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nn/params.h"

namespace fw {

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  // decoupled, for parameters with ParamSpec::weight_decay
};

template <class T>
class BasicAdamW {
 public:
  // Moments zero. specs: of an allocated Params; only shapes, offsets and weight_decay are used.
  BasicAdamW(const AdamWConfig& config, std::span<const ParamSpec> specs, int64_t size);

  // Euclidean norm of all gradients [size], summed in double. Not finite if any gradient is not.
  double norm(std::span<const T> grads) const;

  // One update, with g = grad_scale * grads, t = updates() + 1:
  //   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
  //   values -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * values).
  void update(std::span<T> values, std::span<const T> grads, double lr, double grad_scale);

  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  std::span<T> first() { return first_; }    // m [size]
  std::span<T> second() { return second_; }  // v [size]
  std::span<const T> first() const { return first_; }
  std::span<const T> second() const { return second_; }

 private:
  struct Block {  // a piece of one parameter
    int64_t begin = 0, count = 0;
    bool decay = false;
  };

  AdamWConfig config_;
  std::vector<Block> blocks_;
  std::vector<T> first_, second_;
  int64_t updates_ = 0;
};
using AdamW = BasicAdamW<float>;

// The factor that brings gradients of norm `norm` to at most `clip`: min(1, clip / (norm + 1e-6)); 1 when clip is 0.
double clip_factor(double norm, double clip);

}  // namespace fw
