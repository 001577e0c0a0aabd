#include "nn/head.h"

#include "nn/activations.h"

namespace fw {
namespace {

constexpr double kDeviation = 0.02;  // of embeddings, under every scheme

}  // namespace

template <class T>
Embedding<T>::Embedding(const std::string& name, int64_t vocab, int64_t hidden, Params<Wide<T>>& params)
    : vocab_(vocab), hidden_(hidden), index_(params.declare({name, {vocab, hidden}, normal_init(kDeviation), true})) {}

template <class T>
void Embedding<T>::forward(const Pass<T>& pass, const int32_t* ids, Mat<T> x) const {
  const Params<Wide<T>>& params = pass.params;
  pass.exec.embedding_forward(ids, params.weight(index_, vocab_, hidden_), x);
}

template <class T>
void Embedding<T>::backward(const Pass<T>& pass, const int32_t* ids, Mat<const T> dx) const {
  pass.exec.embedding_backward(ids, dx, pass.params.grad_matrix(index_, vocab_, hidden_));
}

template <class T>
Head<T>::Head(const std::string& norm_name, const std::string& weight_name, int tied, int64_t vocab, int64_t hidden, double eps, Params<Wide<T>>& params)
    : eps_(static_cast<Wide<T>>(eps)), vocab_(vocab), hidden_(hidden), norm_(params.declare(norm_parameter(norm_name, hidden))), weight_(tied) {
  if (tied < 0) weight_ = params.declare({weight_name, {vocab, hidden}, normal_init(kDeviation), true});
}

template <class T>
void Head<T>::logits(const Pass<T>& pass, Residual<T>& residual, Mat<T> logits) const {
  const Params<Wide<T>>& params = pass.params;
  const Mat<T> h = new_matrix<T>(pass.exec.arena, residual.x.rows, hidden_);
  settle(pass, residual, params.value(norm_), eps_, h, pass.exec.arena.template alloc<Wide<T>>(h.rows));
  pass.exec.linear_forward(h, params.weight(weight_, vocab_, hidden_), nullptr, logits, Write::kOverwrite);
}

template <class T>
void Head<T>::loss(const Pass<T>& pass, Residual<T>& residual, const int32_t* targets, Wide<T>* nll, LossSum* sum) const {
  const Params<Wide<T>>& params = pass.params;
  const Mat<T> h = new_matrix<T>(pass.exec.arena, residual.x.rows, hidden_);
  settle(pass, residual, params.value(norm_), eps_, h, pass.exec.arena.template alloc<Wide<T>>(h.rows));
  pass.exec.cross_entropy_forward(h, params.weight(weight_, vocab_, hidden_), targets, nll, sum);
}

template <class T>
void Head<T>::loss_backward(const Pass<T>& pass, Residual<T>& residual, const int32_t* targets, Wide<T> grad_scale, Mat<T> dx, LossSum* sum) const {
  Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const Mat<T> h = new_matrix<T>(arena, residual.x.rows, hidden_);
  Wide<T>* rstd = arena.alloc<Wide<T>>(h.rows);
  settle(pass, residual, params.value(norm_), eps_, h, rstd);
  const Mat<T> dh = new_matrix<T>(arena, h.rows, hidden_);
  pass.exec.cross_entropy_backward(h, params.weight(weight_, vocab_, hidden_), targets, grad_scale, dh, params.grad_matrix(weight_, vocab_, hidden_), sum);
  pass.exec.rmsnorm_backward(dh, residual.x, params.value(norm_), rstd, dx, params.grad(norm_), Write::kOverwrite);
}

template class Embedding<float>;
template class Embedding<double>;
template class Embedding<Bf16>;
template class Head<float>;
template class Head<double>;
template class Head<Bf16>;

}  // namespace fw
