// Vectors of unit length on the device, head by head: y = x f, f = 1 / sqrt(|x|^2 + eps);  dx = f dy - f^3 (x.dy) x.
#include "ops/cuda/head_rows.cuh"

namespace fw::cuda {
namespace {

template <class T>
struct Unit {
  Accessor2d<const T> x;
  Accessor2d<T> y;
  float eps;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float*) const {
    const float factor =
        1.0f / sqrtf(head_sum(first, dim, lane, [&](int64_t c, int) { return x.get(t, c) * x.get(t, c); }) + eps);
    for_head(first, dim, lane, [&](int64_t c, int) { y.set(t, c, factor * x.get(t, c)); });
  }
};

template <class T>
struct UnitBackward {
  Accessor2d<const T> dy, x;
  Accessor2d<T> dx;
  float eps;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float*) const {
    const float factor =
        1.0f / sqrtf(head_sum(first, dim, lane, [&](int64_t c, int) { return x.get(t, c) * x.get(t, c); }) + eps);
    const float along = factor * factor * factor *
                        head_sum(first, dim, lane, [&](int64_t c, int) { return x.get(t, c) * dy.get(t, c); });
    for_head(first, dim, lane, [&](int64_t c, int) { dx.set(t, c, factor * dy.get(t, c) - along * x.get(t, c)); });
  }
};

}  // namespace

namespace ops {

template <class T>
void l2_norm_forward(const Exec<T>& exec, Mat<const T> x, int64_t dim, Wide<T> eps, Mat<T> y) {
  for_head_rows(exec, Unit<T>{Accessor2d(x), Accessor2d(y), eps}, x.rows, x.cols / dim, dim);
}

template <class T>
void l2_norm_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, int64_t dim, Wide<T> eps, Mat<T> dx) {
  for_head_rows(exec, UnitBackward<T>{Accessor2d(dy), Accessor2d(x), Accessor2d(dx), eps}, x.rows, x.cols / dim, dim);
}

#define FW_INSTANTIATE(T)                                                                 \
  template void l2_norm_forward<T>(const Exec<T>&, Mat<const T>, int64_t, float, Mat<T>); \
  template void l2_norm_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, int64_t, float, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
