// Cross-entropy on the device: the logits of a slice by a product, their softmax in place, the gradients by two products.
#include "ops/cuda/cross_entropy.h"

#include <algorithm>

#include "ops/cuda/linear.h"
#include "ops/cuda/operations.h"

namespace fw::cuda {
namespace {

// Rows of a slice: 128 Mi logits at most where the vocabulary allows it, so that the products are large and the logits small beside the activations.
int64_t slice_rows(int64_t rows, int64_t vocab) { return std::min(rows, std::max<int64_t>(256, (int64_t{1} << 27) / vocab / 128 * 128)); }

// Calls body(logits, begin, nll) for every slice of h's rows.
template <class T, class Body>
void for_slices(const Exec<T>& exec, Mat<const T> h, const Weight<float>& weight, float* nll, const Body& body) {
  if (h.rows == 0) return;
  const Arena::Mark mark = exec.arena.mark();
  const int64_t vocab = weight.values.rows, size = slice_rows(h.rows, vocab);
  constexpr int64_t kAlign = 128 / static_cast<int64_t>(sizeof(T));
  const int64_t stride = (vocab + kAlign - 1) / kAlign * kAlign;
  const Mat<T> all(exec.arena.template alloc<T>(size * stride), size, vocab, stride);
  float* of_slice = nll != nullptr ? nullptr : exec.arena.template alloc<float>(size);
  for (int64_t begin = 0; begin < h.rows; begin += size) {
    const Mat<T> logits = all.row_range(0, std::min(size, h.rows - begin));
    linear_product(exec, h.row_range(begin, logits.rows), weight, logits, Write::kOverwrite);
    body(logits, begin, nll != nullptr ? nll + begin : of_slice);
  }
  exec.arena.rewind(mark);
}

}  // namespace

namespace ops {

template <class T>
void cross_entropy_forward(const Exec<T>& exec, Mat<const T> h, Weight<Wide<T>> weight, const int32_t* targets, Wide<T>* nll, LossSum* sum) {
  for_slices(exec, h, weight, nll, [&](Mat<T> logits, int64_t begin, float* values) {
    softmax_cross_entropy_rows(exec, logits, targets + begin, false, 0.0F, values);
    add_loss(values, targets + begin, logits.rows, sum, exec.device.stream());
  });
}

template <class T>
void cross_entropy_backward(const Exec<T>& exec, Mat<const T> h, Weight<Wide<T>> weight, const int32_t* targets, Wide<T> grad_scale, Mat<T> dh,
                            Mat<Wide<T>> dweight, LossSum* sum) {
  for_slices(exec, h, weight, nullptr, [&](Mat<T> logits, int64_t begin, float* values) {
    softmax_cross_entropy_rows(exec, logits, targets + begin, true, grad_scale, values);
    add_loss(values, targets + begin, logits.rows, sum, exec.device.stream());
    linear_gradients(exec, Mat<const T>(logits), h.row_range(begin, logits.rows), weight, dh.row_range(begin, logits.rows), dweight, Write::kOverwrite);
  });
}

#define FW_INSTANTIATE(T)                                                                                                \
  template void cross_entropy_forward<T>(const Exec<T>&, Mat<const T>, Weight<float>, const int32_t*, float*, LossSum*); \
  template void cross_entropy_backward<T>(const Exec<T>&, Mat<const T>, Weight<float>, const int32_t*, float, Mat<T>, Mat<float>, LossSum*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
