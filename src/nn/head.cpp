#include "nn/head.h"

#include "nn/activations.h"
#include "ops/backend.h"

namespace fw {
namespace {

constexpr double kDeviation = 0.02;  // of embeddings, under every scheme

}  // namespace

template <class T>
Embedding<T>::Embedding(const std::string& name, int64_t vocab, int64_t hidden, const NormSpec* norm,
                        const std::string& norm_name, Params<Wide<T>>& params)
    : vocab_(vocab), hidden_(hidden), index_(params.declare({name, {vocab, hidden}, normal_init(kDeviation), true})) {
  if (norm != nullptr) norm_ = std::make_unique<RowNorm<T>>(*norm, norm_name, params);
}

template <class T>
void Embedding<T>::forward(const Pass<T>& pass, const int32_t* ids, Mat<T> x) {
  const Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const Arena::Mark mark = arena.mark();
  const Mat<T> rows = norm_ == nullptr ? x : new_matrix<T>(arena, x.rows, hidden_);
  pass.exec.embedding_forward(ids, params.weight(index_, vocab_, hidden_), rows);
  if (norm_ == nullptr) return;
  Wide<T>* rstd = arena.alloc<Wide<T>>(x.rows);
  norm_->forward(pass, rows, x, rstd);
  if (pass.keep) {
    context_ = {rows, rstd};
  } else {
    arena.rewind(mark);
  }
}

template <class T>
void Embedding<T>::backward(const Pass<T>& pass, const int32_t* ids, Mat<const T> dx) const {
  if (pass.params.frozen()) return;  // nothing before it wants a gradient
  Arena& arena = pass.exec.arena;
  const Arena::Mark mark = arena.mark();
  Mat<const T> drows = dx;
  if (norm_ != nullptr) {
    const Mat<T> to = new_matrix<T>(arena, dx.rows, hidden_);
    norm_->backward(pass, dx, context_.rows, context_.rstd, to, Write::kOverwrite);
    drows = to;
  }
  pass.exec.embedding_backward(ids, drows, pass.params.grad_matrix(index_, vocab_, hidden_));
  arena.rewind(mark);
}

template <class T>
Head<T>::Head(const std::string& norm_name, const std::string& weight_name, int tied, int64_t vocab, int64_t hidden,
              const NormSpec& norm, Params<Wide<T>>& params)
    : vocab_(vocab), hidden_(hidden), norm_(norm, norm_name, params), weight_(tied) {
  if (tied < 0) weight_ = params.declare({weight_name, {vocab, hidden}, normal_init(kDeviation), true});
}

template <class T>
void Head<T>::logits(const Pass<T>& pass, Residual<T>& residual, Mat<T> logits) const {
  const Params<Wide<T>>& params = pass.params;
  if (!residual.pending && residual.x.rows <= row_limits(pass.exec.device).decode && norm_.fits()) {
    return norm_.product(pass, residual.x, params.weight(weight_, vocab_, hidden_), nullptr, false, {}, logits);
  }
  const Mat<T> h = new_matrix<T>(pass.exec.arena, residual.x.rows, hidden_);
  settle(pass, residual, norm_, h, pass.exec.arena.template alloc<Wide<T>>(h.rows));
  pass.exec.linear_forward(h, params.weight(weight_, vocab_, hidden_), nullptr, logits, Write::kOverwrite);
}

template <class T>
void Head<T>::loss(const Pass<T>& pass, Residual<T>& residual, const int32_t* targets, Wide<T>* nll,
                   LossSum* sum) const {
  const Params<Wide<T>>& params = pass.params;
  const Mat<T> h = new_matrix<T>(pass.exec.arena, residual.x.rows, hidden_);
  settle(pass, residual, norm_, h, pass.exec.arena.template alloc<Wide<T>>(h.rows));
  pass.exec.cross_entropy_forward(h, params.weight(weight_, vocab_, hidden_), targets, nll, sum);
}

template <class T>
void Head<T>::loss_backward(const Pass<T>& pass, Residual<T>& residual, const int32_t* targets, Wide<T> grad_scale,
                            Mat<T> dx, LossSum* sum) const {
  Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const Mat<T> h = new_matrix<T>(arena, residual.x.rows, hidden_);
  Wide<T>* rstd = arena.alloc<Wide<T>>(h.rows);
  settle(pass, residual, norm_, h, rstd);
  const Mat<T> dh = new_matrix<T>(arena, h.rows, hidden_);
  pass.exec.cross_entropy_backward(h, params.weight(weight_, vocab_, hidden_), targets, grad_scale, dh,
                                   params.grad_matrix(weight_, vocab_, hidden_), sum);
  norm_.backward(pass, dh, residual.x, rstd, dx, Write::kOverwrite);
}

template class Embedding<float>;
template class Embedding<double>;
template class Embedding<Bf16>;
template class Head<float>;
template class Head<double>;
template class Head<Bf16>;

}  // namespace fw
