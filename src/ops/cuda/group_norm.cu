// GroupNorm on the device: y = n weight + bias, n = (x - mean) rstd, of every group of columns; with h = dy weight
//   dx = rstd (h - mean(h) - n mean(h n))     dweight = sum of dy n     dbias = sum of dy
// A variance is the mean of squares about the mean, never a difference of sums.
#include "ops/cuda/head_rows.cuh"

namespace fw::cuda {
namespace {

template <class T>
struct GroupNorm {
  Accessor2d<const T> x;
  Accessor2d<T> y;
  const float *weight, *bias;
  float eps;
  float* rstd;  // [T, groups]
  int64_t groups;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float*) const {
    const float mean =
        head_sum(first, dim, lane, [&](int64_t c, int) { return x.get(t, c); }) / static_cast<float>(dim);
    const float square =
        head_sum(first, dim, lane, [&](int64_t c, int) { return (x.get(t, c) - mean) * (x.get(t, c) - mean); });
    const float r = 1.0f / sqrtf(square / static_cast<float>(dim) + eps);
    if (lane == 0) rstd[t * groups + first / dim] = r;
    for_head(first, dim, lane, [&](int64_t c, int) { y.set(t, c, (x.get(t, c) - mean) * r * weight[c] + bias[c]); });
  }
};

template <class T>
struct GroupNormBackward {
  Accessor2d<const T> dy, x;
  Accessor2d<T> dx;
  const float *weight, *rstd;
  int64_t groups;
  bool accumulate;

  FW_DEVICE void operator()(int64_t t, int64_t first, int dim, int lane, float* sums) const {
    const float size = static_cast<float>(dim), r = rstd[t * groups + first / dim];
    const float mean = head_sum(first, dim, lane, [&](int64_t c, int) { return x.get(t, c); }) / size;
    const float of_h = head_sum(first, dim, lane, [&](int64_t c, int) { return dy.get(t, c) * weight[c]; }) / size;
    const float along =
        head_sum(first, dim, lane,
                 [&](int64_t c, int) { return dy.get(t, c) * weight[c] * ((x.get(t, c) - mean) * r); }) /
        size;
    for_head(first, dim, lane, [&](int64_t c, int i) {
      const float n = (x.get(t, c) - mean) * r, grad = dy.get(t, c), value = r * (grad * weight[c] - of_h - n * along);
      sums[i] += grad * n;
      sums[dim + i] += grad;
      dx.set(t, c, accumulate ? dx.get(t, c) + value : value);
    });
  }
};

}  // namespace

namespace ops {

template <class T>
void group_norm_forward(const Exec<T>& exec, Mat<const T> x, int64_t dim, const Wide<T>* weight, const Wide<T>* bias,
                        Wide<T> eps, Mat<T> y, Wide<T>* rstd) {
  const int64_t groups = x.cols / dim;
  for_head_rows(exec, GroupNorm<T>{Accessor2d(x), Accessor2d(y), weight, bias, eps, rstd, groups}, x.rows, groups, dim);
}

template <class T>
void group_norm_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, int64_t dim, const Wide<T>* weight,
                         const Wide<T>* rstd, Mat<T> dx, Wide<T>* dweight, Wide<T>* dbias, Write write) {
  const int64_t groups = x.cols / dim;
  const GroupNormBackward<T> f{
      Accessor2d(dy), Accessor2d(x), Accessor2d(dx), weight, rstd, groups, write == Write::kAccumulate};
  sum_head_rows<2>(exec, f, x.rows, groups, dim, [&](const float* partial, int64_t runs) {
    add_column_sums(partial, runs, x.cols, dweight, exec.device.stream());
    add_column_sums(partial + runs * x.cols, runs, x.cols, dbias, exec.device.stream());
  });
}

#define FW_INSTANTIATE(T)                                                                                       \
  template void group_norm_forward<T>(const Exec<T>&, Mat<const T>, int64_t, const float*, const float*, float, \
                                      Mat<T>, float*);                                                          \
  template void group_norm_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, int64_t, const float*,       \
                                       const float*, Mat<T>, float*, float*, Write);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
