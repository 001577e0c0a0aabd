// Cross-entropy on the device: the logits of a slice by a product, their softmax in place, the gradients by two
// products.
#include "ops/cuda/cross_entropy.h"

#include <algorithm>

#include "ops/cuda/linear.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

// Calls body(logits, begin, nll) for every slice of h's rows.
template <class T, class Body>
void for_slices(const Exec<T>& exec, Mat<const T> h, const Weight<float>& weight, float* nll, const Body& body) {
  if (h.rows == 0) return;
  const ArenaMark mark(exec.arena);
  const LogitsSlice<T> slice(exec.arena, h.rows, weight.values.rows, nll);
  for (int64_t begin = 0; begin < h.rows; begin += slice.rows) {
    const Mat<T> logits = slice.logits.row_range(0, std::min(slice.rows, h.rows - begin));
    linear_product(exec, h.row_range(begin, logits.rows), weight, logits, Write::kOverwrite);
    body(logits, begin, nll != nullptr ? nll + begin : slice.nll);
  }
}

}  // namespace

namespace ops {

template <class T>
void cross_entropy_forward(const Exec<T>& exec, Mat<const T> h, Weight<Wide<T>> weight, const int32_t* targets,
                           Wide<T>* nll, LossSum* sum) {
  for_slices(exec, h, weight, nll, [&](Mat<T> logits, int64_t begin, float* values) {
    softmax_cross_entropy_rows(exec, logits, targets + begin, false, 0.0F, values);
    add_loss(values, targets + begin, logits.rows, sum, exec.device.stream());
  });
}

template <class T>
void cross_entropy_backward(const Exec<T>& exec, Mat<const T> h, Weight<Wide<T>> weight, const int32_t* targets,
                            Wide<T> grad_scale, Mat<T> dh, Mat<Wide<T>> dweight, LossSum* sum) {
  for_slices(exec, h, weight, nullptr, [&](Mat<T> logits, int64_t begin, float* values) {
    softmax_cross_entropy_rows(exec, logits, targets + begin, true, grad_scale, values);
    add_loss(values, targets + begin, logits.rows, sum, exec.device.stream());
    linear_gradients(exec, Mat<const T>(logits), h.row_range(begin, logits.rows), weight,
                     dh.row_range(begin, logits.rows), dweight, Write::kOverwrite);
  });
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void cross_entropy_forward<T>(const Exec<T>&, Mat<const T>, Weight<float>, const int32_t*, float*,         \
                                         LossSum*);                                                                   \
  template void cross_entropy_backward<T>(const Exec<T>&, Mat<const T>, Weight<float>, const int32_t*, float, Mat<T>, \
                                          Mat<float>, LossSum*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
