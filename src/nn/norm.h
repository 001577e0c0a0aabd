// The norm of each half of a block, before the head and after an embedding: RMSNorm with a weight, or LayerNorm
// with weight and bias (Ba, Kiros and Hinton 2016).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/mixer.h"

namespace fw {

enum class NormKind { kRms, kLayer };
// Where a block has its norms: before mixer and MLP, or behind them.
enum class NormPosition { kBefore, kBehind };

struct NormSpec {
  NormKind kind = NormKind::kRms;
  int64_t size = 0;  // d
  double eps = 0;
  bool zero_centered = false;  // RMSNorm times 1 + weight, which begins at 0 (Qwen3-Next)
};
// name.weight [d], and of a LayerNorm name.bias [d].
std::vector<ParamSpec> norm_parameters(const NormSpec& spec, const std::string& name);

template <class T>
class RowNorm {
 public:
  RowNorm(const NormSpec& spec, const std::string& name, Params<Wide<T>>& params);
  // y = norm(x); x, y [T, d]; rstd [T] is saved.
  void forward(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Wide<T>* rstd) const;
  // y = norm(x) W^T + bias with the sigmoids of `gates`, or with swiglu ops.def's activation of it, in one operation
  // (normed_linear_forward): an RMSNorm's, which fits() says.
  bool fits() const { return spec_.kind == NormKind::kRms; }
  void product(const Pass<T>& pass, Mat<const T> x, Weight<Wide<T>> weight, const Wide<T>* bias, bool swiglu,
               const SigmoidColumns& gates, Mat<T> y) const;
  // x += delta, then y = norm(x).
  void add_forward(const Pass<T>& pass, Mat<T> x, Mat<const T> delta, Mat<T> y, Wide<T>* rstd) const;
  // x and rstd as forward had them; gradients of the parameters accumulate.
  void backward(const Pass<T>& pass, Mat<const T> dy, Mat<const T> x, const Wide<T>* rstd, Mat<T> dx,
                Write write) const;

 private:
  NormSpec spec_;
  Wide<T> eps_;
  int weight_ = -1, bias_ = -1;
};

// A half's first product y = x W^T + bias, after the pass's norm where it has one; then the sigmoids of `gates`.
template <class T>
void project(const Pass<T>& pass, Mat<const T> x, Weight<Wide<T>> weight, const Wide<T>* bias, Mat<T> y,
             const SigmoidColumns& gates = {}) {
  if (pass.norm != nullptr) return pass.norm->product(pass, x, weight, bias, false, gates, y);
  pass.exec.linear_forward(x, weight, bias, y, Write::kOverwrite);
  sigmoid_columns(pass.exec, gates, y);
}

}  // namespace fw
