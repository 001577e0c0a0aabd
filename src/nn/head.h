// Both ends of a model: the embedding and the head (final norm, then logits = h W^T with W the embedding itself or a
// weight of its own).
#pragma once

#include <string>

#include "nn/block.h"

namespace fw {

template <class T>
class Embedding {
 public:
  Embedding(const std::string& name, int64_t vocab, int64_t hidden, Params<Wide<T>>& params);
  // x [T, d] is overwritten.
  void forward(const Pass<T>& pass, const int32_t* ids, Mat<T> x) const;
  void backward(const Pass<T>& pass, const int32_t* ids, Mat<const T> dx) const;
  int index() const { return index_; }

 private:
  int64_t vocab_, hidden_;
  int index_;
};

template <class T>
class Head {
 public:
  // tied: index of the embedding's weight, or -1 for a weight of the head's own.
  Head(const std::string& norm_name, const std::string& weight_name, int tied, int64_t vocab, int64_t hidden, double eps, Params<Wide<T>>& params);
  // Logits [rows, vocab] of the residual's rows.
  void logits(const Pass<T>& pass, Residual<T>& residual, Mat<T> logits) const;
  // *sum += the loss of the rows with targets >= 0; targets [T] and nll ([T] or null) in device memory.
  void loss(const Pass<T>& pass, Residual<T>& residual, const int32_t* targets, Wide<T>* nll, LossSum* sum) const;
  // The same with gradients of grad_scale * loss: dx [T, d] is overwritten.
  void loss_backward(const Pass<T>& pass, Residual<T>& residual, const int32_t* targets, Wide<T> grad_scale, Mat<T> dx, LossSum* sum) const;

 private:
  Wide<T> eps_;
  int64_t vocab_, hidden_;
  int norm_, weight_;
};

}  // namespace fw
