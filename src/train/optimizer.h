// AdamW over the flat buffers of Params (float trains; double is for checks against other programs), and the global
// norm of the gradients: the moments and the count of updates. The arithmetic is the device's (ops.def).
#pragma once

#include <cstdint>

#include "nn/params.h"
#include "ops/exec.h"

namespace fw {

// What the moments are kept as. In bf16 they are rounded up or down at random (ops/stochastic_rounding.h): 4 bytes a
// parameter in place of 8.
enum class MomentFormat { kFloat32, kBf16 };
const char* name_of(MomentFormat format);  // "float32" or "bf16"

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;                      // decoupled, for parameters with ParamSpec::weight_decay
  MomentFormat moments = MomentFormat::kFloat32;  // kBf16: of float parameters
  // of the random numbers that moments in bf16 are rounded with, with the number of the update and the index
  uint64_t seed = 0;
};

// Elements begin to end of the flat buffers and the pieces in them: what one optimiser is of, all or (data_parallel.h)
// a rank's part.
struct ParamRange {
  int64_t first_piece = 0, pieces = 0;
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
template <class W>
ParamRange whole_range(const Params<W>& params);

template <class T>
class BasicAdamW {
 public:
  using W = Wide<T>;

  // Moments zero, on the device of the parameters, which are allocated. Of a range, begin is a multiple of 16 elements.
  BasicAdamW(const AdamWConfig& config, const Params<W>& params) : BasicAdamW(config, params, whole_range(params)) {}
  BasicAdamW(const AdamWConfig& config, const Params<W>& params, const ParamRange& range)
      : BasicAdamW(config, params, range, params.device()) {}
  // On another device than theirs: to keep and to write, not to update with.
  BasicAdamW(const AdamWConfig& config, const Params<W>& params, const ParamRange& range, Device& moments);

  const AdamWConfig& config() const { return config_; }
  const ParamRange& range() const { return range_; }
  // Those of the range, counted from its begin.
  ParamPieces pieces(const Params<W>& params) const;

  // *sum (device memory) = the sum of squares of all gradients, in double. Not finite if any gradient is not.
  void square_norm(const Exec<T>& exec, const Params<W>& params, double* sum) const;

  // One update by grad_scale * gradients (ops.def has the formula); of the range alone. The second takes the range's
  // gradients, in device memory, from elsewhere than params.grads().
  void update(const Exec<T>& exec, Params<W>& params, double lr, double grad_scale);
  void update(const Exec<T>& exec, Params<W>& params, const W* grads, double lr, double grad_scale);

  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  MomentFormat format() const { return config_.moments; }
  // Zero moments of another format in place of these.
  void begin_anew(MomentFormat format);
  // m and v, laid out as the range of the parameters' buffers; of the format that is not kept, empty.
  Buffer<W>& first() { return first_; }
  Buffer<W>& second() { return second_; }
  const Buffer<W>& first() const { return first_; }
  const Buffer<W>& second() const { return second_; }
  Buffer<Bf16>& first_bf16() { return first_bf16_; }
  Buffer<Bf16>& second_bf16() { return second_bf16_; }
  const Buffer<Bf16>& first_bf16() const { return first_bf16_; }
  const Buffer<Bf16>& second_bf16() const { return second_bf16_; }
  // What lies in the range of moments of the elements from `offset` on of the whole buffers; rounded to the nearest
  // bf16 where that is the format.
  void write_first(int64_t offset, std::span<const W> values) { write_part(first_, first_bf16_, offset, values); }
  void write_second(int64_t offset, std::span<const W> values) { write_part(second_, second_bf16_, offset, values); }

 private:
  void write_part(Buffer<W>& moments, Buffer<Bf16>& narrow, int64_t offset, std::span<const W> values) const;

  AdamWConfig config_;
  ParamRange range_;
  Device* device_;             // of the moments
  Buffer<ParamPiece> pieces_;  // of a part, counted from its begin; the whole has those of the parameters
  Buffer<W> first_, second_;
  Buffer<Bf16> first_bf16_, second_bf16_;
  int64_t updates_ = 0;
};
using AdamW = BasicAdamW<float>;

// The factor that brings gradients of norm `norm` to at most `clip`: min(1, clip / (norm + 1e-6)); 1 when clip is 0.
double clip_factor(double norm, double clip);

}  // namespace fw
