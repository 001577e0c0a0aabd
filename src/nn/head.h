// Both ends of a model: the embedding and the head (final norm, then logits = h W^T with W the embedding itself or a
// weight of its own).
#pragma once

#include <memory>
#include <string>

#include "nn/block.h"

namespace fw {

template <class T>
class Embedding {
 public:
  // norm: after it, or null.
  Embedding(const std::string& name, int64_t vocab, int64_t hidden, const NormSpec* norm, const std::string& norm_name,
            Params<Wide<T>>& params);
  // x [T, d] is overwritten. A pass that keeps contexts keeps what the norm's backward needs.
  void forward(const Pass<T>& pass, const int32_t* ids, Mat<T> x);
  void backward(const Pass<T>& pass, const int32_t* ids, Mat<const T> dx) const;
  int index() const { return index_; }

 private:
  int64_t vocab_, hidden_;
  int index_;
  std::unique_ptr<RowNorm<T>> norm_;
  struct {
    Mat<T> rows;  // [T, d], before the norm
    Wide<T>* rstd = nullptr;
  } context_;  // of the last pass that kept contexts
};

template <class T>
class Head {
 public:
  // tied: index of the embedding's weight, or -1 for a weight of the head's own.
  Head(const std::string& norm_name, const std::string& weight_name, int tied, int64_t vocab, int64_t hidden,
       const NormSpec& norm, Params<Wide<T>>& params);
  // Logits [rows, vocab] of the residual's rows.
  void logits(const Pass<T>& pass, Residual<T>& residual, Mat<T> logits) const;
  // *sum += the loss of the rows with targets >= 0; targets [T] and nll ([T] or null) in device memory.
  void loss(const Pass<T>& pass, Residual<T>& residual, const int32_t* targets, Wide<T>* nll, LossSum* sum) const;
  // The same with gradients of grad_scale * loss: dx [T, d] is overwritten.
  void loss_backward(const Pass<T>& pass, Residual<T>& residual, const int32_t* targets, Wide<T> grad_scale, Mat<T> dx,
                     LossSum* sum) const;

 private:
  int64_t vocab_, hidden_;
  RowNorm<T> norm_;
  int weight_;
};

}  // namespace fw
