// Parameters: one declaration each (name, shape, initialisation, weight decay or not), values and gradients in two flat
// buffers in order of declaration, so that weights declared one after the other with the same columns are also one
// taller matrix (the mixer's projections run as one product).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/mat.h"
#include "base/random.h"

namespace fw {

struct ParamSpec {
  std::string name;  // as flash-linear-attention's checkpoints have it
  std::vector<int64_t> shape;
  // Fills `values` (double, shape order) when a model is initialised.
  std::function<void(std::span<double> values, Random& random)> init;
  bool weight_decay = false;
  int64_t offset = 0;  // elements from the start of the flat buffers, set by declare()
  int64_t size() const;
};

template <class T>
class Params {
 public:
  // Returns the index. Throws Error(kInternal) for a repeated name or after allocate().
  int declare(ParamSpec spec);
  void allocate();
  void init(Random& random);  // every parameter in order of declaration

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int64_t size() const { return total_; }
  T* value(int index) { return values_.data() + specs_[static_cast<size_t>(index)].offset; }
  const T* value(int index) const { return values_.data() + specs_[static_cast<size_t>(index)].offset; }
  T* grad(int index) { return grads_.data() + specs_[static_cast<size_t>(index)].offset; }
  std::span<T> values() { return values_; }
  std::span<const T> values() const { return values_; }
  std::span<T> grads() { return grads_; }
  std::span<const T> grads() const { return grads_; }
  bool has_grads() const { return allocated_ && static_cast<int64_t>(grads_.size()) == total_; }
  void zero_grads();

  // The weights declared from `first` on, `rows` rows of `cols` columns together, as one matrix.
  Mat<const T> matrix(int first, int64_t rows, int64_t cols) const { return {value(first), rows, cols}; }
  Mat<T> grad_matrix(int first, int64_t rows, int64_t cols) { return {grad(first), rows, cols}; }

 private:
  std::vector<ParamSpec> specs_;
  std::unordered_set<std::string> names_;
  int64_t total_ = 0;
  bool allocated_ = false;
  std::vector<T> values_;
  std::vector<T> grads_;  // allocated by the first zero_grads(): inference never pays for it
};

}  // namespace fw
