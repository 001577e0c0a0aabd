#include "ops/cuda/linear.h"

#include <type_traits>
#include <utility>

#include "base/error.h"
#include "ops/cuda/bias.h"
#include "ops/cuda/gemm_m64.h"
#include "ops/cuda/gemm_m8.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/products.h"

namespace fw::cuda {
namespace {

template <class T>
constexpr fw_dtype kDtype = std::is_same_v<T, float> ? FW_F32 : FW_BF16;

template <class T, class R>
void multiply_whole(const Exec<T>& exec, Mat<const T> a, bool a_transposed, Mat<const T> b, bool b_transposed, Mat<R> c,
                    Mat<const R> addend) {
  Product p;
  p.m = c.rows;
  p.n = c.cols;
  p.k = a_transposed ? a.rows : a.cols;
  if (p.m == 0 || p.n == 0 || p.k == 0) return;
  p.operands = kDtype<T>;
  p.result = kDtype<R>;
  p.a = a.data;
  p.a_stride = a.stride;
  p.a_transposed = a_transposed;
  p.b = b.data;
  p.b_stride = b.stride;
  p.b_transposed = b_transposed;
  p.c = c.data;
  p.c_stride = c.stride;
  p.addend = addend.data;
  p.addend_stride = addend.stride;
  note_product(p);
  multiply(p, exec.device.stream());
}

// Rows of a weight whose number is no multiple of eight are two products, groups of 64 and the rest. cuBLASLt
// multiplies them in bf16 at a third to two thirds of the speed, however they are aligned (4620 rows 1.22 ms, 4624 rows
// .43 ms on an H200).
constexpr int64_t kColumnGroup = 64;
template <class T>
bool is_uneven(int64_t columns) {
  return std::is_same_v<T, Bf16> && columns > kColumnGroup && columns % 8 != 0;
}
template <class T>
Mat<T> col_part(Mat<T> m, int64_t begin, int64_t end) {
  return m.data == nullptr ? m : m.col_range(begin, end - begin);
}
template <class T>
Mat<T> row_part(Mat<T> m, int64_t begin, int64_t end) {
  return m.data == nullptr ? m : m.row_range(begin, end - begin);
}

// c = a b + addend, each of a and b as it is or transposed; addend c itself, apart from it, or none. The weight's rows
// are c's columns, its rows, or what is summed over. There the sums of the groups are added to those of the rest, which
// are rounded to R.
template <class T, class R>
void multiply(const Exec<T>& exec, Mat<const T> a, bool a_transposed, Mat<const T> b, bool b_transposed, Mat<R> c,
              Mat<const R> addend) {
  const int64_t rows = c.rows, cols = c.cols, inner = a_transposed ? a.rows : a.cols;
  const auto whole = [](int64_t count) { return count / kColumnGroup * kColumnGroup; };
  if (b_transposed && is_uneven<T>(cols)) {
    for (const auto& [begin, end] : {std::pair(int64_t{0}, whole(cols)), std::pair(whole(cols), cols)})
      multiply_whole(exec, a, a_transposed, row_part(b, begin, end), true, col_part(c, begin, end),
                     col_part(addend, begin, end));
  } else if (a_transposed && is_uneven<T>(rows)) {
    for (const auto& [begin, end] : {std::pair(int64_t{0}, whole(rows)), std::pair(whole(rows), rows)})
      multiply_whole(exec, col_part(a, begin, end), true, b, b_transposed, row_part(c, begin, end),
                     row_part(addend, begin, end));
  } else if (!a_transposed && !b_transposed && is_uneven<T>(inner)) {
    const int64_t most = whole(inner);
    multiply_whole(exec, col_part(a, most, inner), false, row_part(b, most, inner), false, c, addend);
    multiply_whole(exec, col_part(a, 0, most), false, row_part(b, 0, most), false, c, Mat<const R>(c));
  } else {
    multiply_whole(exec, a, a_transposed, b, b_transposed, c, addend);
  }
}

template <class R>
Mat<const R> added(Mat<R> c, bool accumulate) {
  return accumulate ? Mat<const R>(c) : Mat<const R>();
}

// Where the kernel of some rows takes them, what it does; else false. Few rows have a kernel of their own.
template <class T>
bool on_some_rows(const Exec<T>& exec, Mat<const T> x, const Weight<float>& weight, const float* bias,
                  Mat<const T> addend, Mat<T> y) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const Mat<const Bf16> w = operand<Bf16>(weight);
    if (!takes_gemm_m64(x, w)) return false;
    gemm_m64_linear(x, w, bias, addend, y, exec.device.stream());
    return true;
  }
  return false;
}

}  // namespace

template <class T>
Mat<const T> operand(const Weight<float>& weight) {
  if constexpr (std::is_same_v<T, float>) {
    if (weight.values.data == nullptr)
      fail_internal("linear: expected the values of a weight [{}, {}]", weight.values.rows, weight.values.cols);
    return weight.values;
  } else {
    if (weight.rounded.data == nullptr)
      fail_internal("linear: expected the bf16 copy of a weight [{}, {}]", weight.values.rows, weight.values.cols);
    return weight.rounded;
  }
}

template <class T>
void linear_product(const Exec<T>& exec, Mat<const T> x, const Weight<float>& weight, Mat<T> y, Write write) {
  multiply(exec, x, false, operand<T>(weight), true, y, added(y, write == Write::kAccumulate));
}

template <class T>
void linear_gradients(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Weight<float>& weight, Mat<T> dx,
                      Mat<float> dweight, Write write) {
  if (dx.data != nullptr)
    multiply(exec, dy, false, operand<T>(weight), false, dx, added(dx, write == Write::kAccumulate));
  if (dweight.data != nullptr) multiply(exec, dy, true, x, false, dweight, added(dweight, true));
}

template Mat<const float> operand<float>(const Weight<float>&);
template Mat<const Bf16> operand<Bf16>(const Weight<float>&);
template void linear_product(const Exec<float>&, Mat<const float>, const Weight<float>&, Mat<float>, Write);
template void linear_product(const Exec<Bf16>&, Mat<const Bf16>, const Weight<float>&, Mat<Bf16>, Write);
template void linear_gradients(const Exec<float>&, Mat<const float>, Mat<const float>, const Weight<float>&, Mat<float>,
                               Mat<float>, Write);
template void linear_gradients(const Exec<Bf16>&, Mat<const Bf16>, Mat<const Bf16>, const Weight<float>&, Mat<Bf16>,
                               Mat<float>, Write);

namespace ops {

template <class T>
void linear_forward(const Exec<T>& exec, Mat<const T> x, Weight<Wide<T>> weight, const Wide<T>* bias, Mat<T> y,
                    Write write) {
  if (x.rows == 0) return;
  // A decoded token's products read the weight once, however few its rows.
  if (x.rows <= kGemmM8MaxM) return gemm_m8_linear<T>(x, operand<T>(weight), bias, y, write, exec.device.stream());
  if (on_some_rows<T>(exec, x, weight, bias, added(y, write == Write::kAccumulate), y)) return;
  linear_product(exec, x, weight, y, write);
  if (bias != nullptr) add_bias(exec, bias, y);
}

template <class T>
void linear_add_forward(const Exec<T>& exec, Mat<const T> x, Weight<Wide<T>> weight, Mat<const T> addend, Mat<T> y) {
  if (x.rows == 0) return;
  if (x.rows > kGemmM8MaxM) {
    if (!on_some_rows<T>(exec, x, weight, nullptr, addend, y))
      multiply(exec, x, false, operand<T>(weight), true, y, addend);
    return;
  }
  copy_rows<T>(exec, addend, y);
  gemm_m8_linear<T>(x, operand<T>(weight), nullptr, y, Write::kAccumulate, exec.device.stream());
}

template <class T>
void linear_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, Weight<Wide<T>> weight, Mat<T> dx,
                     Mat<Wide<T>> dweight, Wide<T>* dbias, Write write) {
  if (dy.rows == 0) return;
  linear_gradients(exec, dy, x, weight, dx, dweight, write);
  if (dbias != nullptr) add_bias_gradient(exec, dy, dbias);
}

#define FW_INSTANTIATE(T)                                                                                         \
  template void linear_forward<T>(const Exec<T>&, Mat<const T>, Weight<float>, const float*, Mat<T>, Write);      \
  template void linear_add_forward<T>(const Exec<T>&, Mat<const T>, Weight<float>, Mat<const T>, Mat<T>);         \
  template void linear_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Weight<float>, Mat<T>, Mat<float>, \
                                   float*, Write);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
