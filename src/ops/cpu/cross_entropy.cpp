// Cross-entropy over slices of rows: the logits of one slice, their softmax and, in the backward pass, the two products
// of their gradient, before the next slice overwrites them.
#include "ops/cpu/linear.h"
#include "ops/cpu/operations.h"
#include "ops/cpu/scratch.h"
#include "ops/cpu/small_m.h"
#include "ops/cpu/softmax_rows.h"

namespace fw {
namespace {

// body(logits, begin) for every slice after its logits are there; it leaves the slice's nll. Sums them in order.
template <class T, class Body>
LossSum over_slices(const Exec<T>& exec, Mat<const T> h, const Weight<T>& weight, LinearProducts<T>& products,
                    const int32_t* targets, T* nll, const Body& body) {
  const ArenaMark mark(exec.arena);
  const int64_t vocab = weight.values.rows;
  const cpu::LogitsSlice<T> slice(exec.arena, h.rows, vocab);
  LossSum sum;
  for (int64_t begin = 0; begin < h.rows; begin += slice.rows) {
    const int64_t rows = std::min(slice.rows, h.rows - begin);
    const Mat<T> logits(slice.logits, rows, vocab);
    if (exec.decode_bits) {
      small_m_product(h.row_range(begin, rows), weight, logits, exec.precision, false);
    } else {
      products.forward(h.row_range(begin, rows), logits, Write::kOverwrite);
    }
    T* values = nll == nullptr ? slice.nll : nll + begin;
    body(logits, begin, values);
    for (int64_t t = 0; t < rows; ++t) {
      if (targets[begin + t] < 0) continue;
      sum.nll += static_cast<double>(values[t]);
      ++sum.count;
    }
  }
  return sum;
}

void add(const LossSum& slice_sum, LossSum* sum) {
  sum->nll += slice_sum.nll;
  sum->count += slice_sum.count;
}

}  // namespace

namespace cpu {

template <class T>
void cross_entropy_forward(const Exec<T>& exec, Mat<const T> h, Weight<T> weight, const int32_t* targets, T* nll,
                           LossSum* sum) {
  LinearProducts<T> products(weight, exec.precision);
  add(over_slices(exec, h, weight, products, targets, nll,
                  [&](Mat<T> logits, int64_t begin, T* values) { softmax_nll(logits, targets + begin, values); }),
      sum);
}

template <class T>
void cross_entropy_backward(const Exec<T>& exec, Mat<const T> h, Weight<T> weight, const int32_t* targets, T grad_scale,
                            Mat<T> dh, Mat<T> dweight, LossSum* sum) {
  LinearProducts<T> products(weight, exec.precision);
  add(over_slices(exec, h, weight, products, targets, static_cast<T*>(nullptr),
                  [&](Mat<T> logits, int64_t begin, T* values) {
                    softmax_nll_gradient(logits, targets + begin, grad_scale, values);
                    products.backward(logits, h.row_range(begin, logits.rows), dh.row_range(begin, logits.rows),
                                      dweight, Write::kOverwrite);
                  }),
      sum);
}

template void cross_entropy_forward(const Exec<float>&, Mat<const float>, Weight<float>, const int32_t*, float*,
                                    LossSum*);
template void cross_entropy_backward(const Exec<float>&, Mat<const float>, Weight<float>, const int32_t*, float,
                                     Mat<float>, Mat<float>, LossSum*);
template void cross_entropy_forward(const Exec<double>&, Mat<const double>, Weight<double>, const int32_t*, double*,
                                    LossSum*);
template void cross_entropy_backward(const Exec<double>&, Mat<const double>, Weight<double>, const int32_t*, double,
                                     Mat<double>, Mat<double>, LossSum*);

}  // namespace cpu
}  // namespace fw
