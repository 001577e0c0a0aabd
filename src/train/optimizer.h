// AdamW over the flat buffers of Params (float trains; double is for checks against other programs), and the global norm of the
// gradients: the moments and the count of updates; the arithmetic is the device's (ops.def).
#pragma once

#include <cstdint>

#include "nn/params.h"
#include "ops/exec.h"

namespace fw {

// What the moments are kept as. In bf16 they are rounded up or down at random (ops/stochastic_rounding.h): 4 bytes a parameter in place of 8.
enum class MomentFormat { kFloat32, kBf16 };
const char* name_of(MomentFormat format);  // "float32" or "bf16"

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;                      // decoupled, for parameters with ParamSpec::weight_decay
  MomentFormat moments = MomentFormat::kFloat32;  // kBf16: of float parameters
  uint64_t seed = 0;                              // of the random numbers that moments in bf16 are rounded with, with the number of the update and the place
};

template <class T>
class BasicAdamW {
 public:
  using W = Wide<T>;

  // Moments zero, on the device of the parameters, which are allocated.
  BasicAdamW(const AdamWConfig& config, const Params<W>& params);

  // *sum (device memory) = the sum of squares of all gradients, in double. Not finite if any gradient is not.
  void square_norm(const Exec<T>& exec, const Params<W>& params, double* sum) const;

  // One update by grad_scale * gradients (ops.def has the formula).
  void update(const Exec<T>& exec, Params<W>& params, double lr, double grad_scale);

  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  MomentFormat format() const { return config_.moments; }
  // Zero moments of another format in place of these.
  void begin_anew(MomentFormat format, const Params<W>& params);
  // m and v, laid out as the parameters' buffers; of the format that is not kept, empty.
  Buffer<W>& first() { return first_; }
  Buffer<W>& second() { return second_; }
  const Buffer<W>& first() const { return first_; }
  const Buffer<W>& second() const { return second_; }
  const Buffer<Bf16>& first_bf16() const { return first_bf16_; }
  const Buffer<Bf16>& second_bf16() const { return second_bf16_; }
  // Those of the elements from `offset` on of the buffers; rounded to the nearest bf16 where that is the format.
  void write_first(int64_t offset, std::span<const W> values) { write_part(first_, first_bf16_, offset, values); }
  void write_second(int64_t offset, std::span<const W> values) { write_part(second_, second_bf16_, offset, values); }

 private:
  void write_part(Buffer<W>& moments, Buffer<Bf16>& narrow, int64_t offset, std::span<const W> values) const;

  AdamWConfig config_;
  Buffer<W> first_, second_;
  Buffer<Bf16> first_bf16_, second_bf16_;
  int64_t updates_ = 0;
};
using AdamW = BasicAdamW<float>;

// The factor that brings gradients of norm `norm` to at most `clip`: min(1, clip / (norm + 1e-6)); 1 when clip is 0.
double clip_factor(double norm, double clip);

}  // namespace fw
