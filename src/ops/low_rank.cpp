// Exec's linear operations: the backend's, and what the low-rank additions of the weight give (LowRank in ops.h). With
// u = scale x A^T the forward pass adds u B^T. The backward pass makes u again, which costs less than keeping it:
// dB += dy^T u, dA += scale (dy B)^T x, dx += scale (dy B) A.
#include "ops/low_rank.h"

#include "base/arena_mark.h"
#include "ops/exec.h"
#include "ops/new_matrix.h"

namespace fw {
namespace {

template <class T>
Mat<T> scaled(const Exec<T>& exec, const LowRank<Wide<T>>& of, Mat<const T> x) {
  const Mat<T> y = new_matrix<T>(exec.arena, x.rows, x.cols);
  exec.device.fill(y.data, 0, static_cast<size_t>(y.rows * y.stride) * sizeof(T));
  exec.head_add_forward(x, of.scale, x.cols, y);
  return y;
}

// u [T, rank]
template <class T>
Mat<T> scaled_down(const Exec<T>& exec, const LowRank<Wide<T>>& of, Mat<const T> x) {
  const Mat<T> down = new_matrix<T>(exec.arena, x.rows, of.a.values.rows);
  exec.linear_forward(x, of.a, nullptr, down, Write::kOverwrite);
  return scaled<T>(exec, of, down);
}

template <class T>
void add_low_ranks(const Exec<T>& exec, Mat<const T> x, const Weight<Wide<T>>& weight, Mat<T> y) {
  if (x.rows == 0) return;
  for (int64_t i = 0; i < weight.low_ranks; ++i) {
    const LowRank<Wide<T>>& of = weight.low_rank[i];
    const ArenaMark mark(exec.arena);
    const Mat<T> u = scaled_down(exec, of, x);
    exec.linear_forward(u, of.b, nullptr, y.col_range(of.first, of.b.values.rows), Write::kAccumulate);
  }
}

}  // namespace

template <class T>
void Exec<T>::linear_forward(Mat<const T> x, Weight<W> weight, const W* bias, Mat<T> y, Write write) const {
  ops.linear_forward(*this, x, weight, bias, y, write);
  add_low_ranks(*this, x, weight, y);
}

template <class T>
void Exec<T>::linear_add_forward(Mat<const T> x, Weight<W> weight, Mat<const T> addend, Mat<T> y) const {
  ops.linear_add_forward(*this, x, weight, addend, y);
  add_low_ranks(*this, x, weight, y);
}

template <class T>
void Exec<T>::linear_backward(Mat<const T> dy, Mat<const T> x, Weight<W> weight, Mat<T> dx, Mat<W> dweight, W* dbias,
                              Write write) const {
  ops.linear_backward(*this, dy, x, weight, dx, dweight, dbias, write);
  if (dy.rows == 0) return;
  for (int64_t i = 0; i < weight.low_ranks; ++i) {
    const LowRank<W>& of = weight.low_rank[i];
    const ArenaMark mark(arena);
    const Mat<const T> part = dy.col_range(of.first, of.b.values.rows);
    const Mat<T> du = new_matrix<T>(arena, dy.rows, of.b.values.cols);
    if (x.data == nullptr) {  // a product with the weight, not its transpose
      linear_backward(part, x, of.b, du, Mat<W>(), nullptr, Write::kOverwrite);
      linear_backward(scaled<T>(*this, of, du), x, of.a, dx, Mat<W>(), nullptr, Write::kAccumulate);
      continue;
    }
    linear_backward(part, scaled_down(*this, of, x), of.b, du, of.db, nullptr, Write::kOverwrite);
    linear_backward(scaled<T>(*this, of, du), x, of.a, dx, of.da, nullptr, Write::kAccumulate);
  }
}

namespace {

// u [R, rank]
template <class T>
Mat<T> experts_scaled_down(const Exec<T>& exec, const LowRank<Wide<T>>& of, Mat<const T> x, const ExpertRows& rows) {
  const Mat<T> down = new_matrix<T>(exec.arena, x.rows, of.b.values.cols);
  exec.expert_linear_forward(x, rows, of.a, down);
  return scaled<T>(exec, of, down);
}

}  // namespace

template <class T>
void expert_product_forward(const Exec<T>& exec, Mat<const T> x, const ExpertRows& rows, Weight<Wide<T>> weight,
                            Mat<T> y) {
  exec.expert_linear_forward(x, rows, weight, y);
  if (x.rows == 0) return;
  for (int64_t i = 0; i < weight.low_ranks; ++i) {
    const LowRank<Wide<T>>& of = weight.low_rank[i];
    const ArenaMark mark(exec.arena);
    const Mat<T> u = experts_scaled_down(exec, of, x, rows), up = new_matrix<T>(exec.arena, y.rows, y.cols);
    exec.expert_linear_forward(u, rows, of.b, up);
    exec.add_rows(up, y);
  }
}

template <class T>
void expert_product_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const ExpertRows& rows,
                             Weight<Wide<T>> weight, Mat<T> dx, Mat<Wide<T>> dweight) {
  exec.expert_linear_backward(dy, x, rows, weight, dx, dweight);
  if (dy.rows == 0) return;
  for (int64_t i = 0; i < weight.low_ranks; ++i) {
    const LowRank<Wide<T>>& of = weight.low_rank[i];
    const ArenaMark mark(exec.arena);
    const Mat<T> u = experts_scaled_down(exec, of, x, rows), du = new_matrix<T>(exec.arena, u.rows, u.cols),
                 more = new_matrix<T>(exec.arena, dx.rows, dx.cols);
    exec.expert_linear_backward(dy, u, rows, of.b, du, of.db);
    exec.expert_linear_backward(scaled<T>(exec, of, du), x, rows, of.a, more, of.da);
    exec.add_rows(more, dx);
  }
}

#define FW_INSTANTIATE(T)                                                                                             \
  template void expert_product_forward(const Exec<T>&, Mat<const T>, const ExpertRows&, Weight<Wide<T>>, Mat<T>);     \
  template void expert_product_backward(const Exec<T>&, Mat<const T>, Mat<const T>, const ExpertRows&,                \
                                        Weight<Wide<T>>, Mat<T>, Mat<Wide<T>>);                                       \
  template void Exec<T>::linear_forward(Mat<const T>, Weight<Wide<T>>, const Wide<T>*, Mat<T>, Write) const;          \
  template void Exec<T>::linear_add_forward(Mat<const T>, Weight<Wide<T>>, Mat<const T>, Mat<T>) const;               \
  template void Exec<T>::linear_backward(Mat<const T>, Mat<const T>, Weight<Wide<T>>, Mat<T>, Mat<Wide<T>>, Wide<T>*, \
                                         Write) const;
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace fw
