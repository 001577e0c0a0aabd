// The gain gate where it is no plain sigmoid of a projection: one learned number, factors of a token's position, a
// decay that is what the gain leaves.
#include <algorithm>
#include <cmath>

#include "ops/cpu/operations.h"
#include "ops/cpu/positions.h"
#include "ops/cpu/row_blocks.h"

namespace fw {
namespace {

template <class T>
T factor_of(PositionFactor factor, int64_t position) {
  const double t = static_cast<double>(position);
  switch (factor) {
    case PositionFactor::kNone:
      return T(1);
    case PositionFactor::kInverse:
      return static_cast<T>(1 / t);
    case PositionFactor::kInverseSqrt:
      return static_cast<T>(1 / std::sqrt(t));
    case PositionFactor::kInverseLog:
      return static_cast<T>(1 / std::log(t + 1));
  }
  return T(1);
}

}  // namespace

namespace cpu {

template <class T>
void learned_gate_forward(const Exec<T>& exec, const T* parameter, T scale, Mat<T> y) {
  const T value = scale / (T(1) + std::exp(-*parameter));
  head_constant_forward<T>(exec, &value, y.cols, y);
}

template <class T>
void position_factor(const Exec<T>&, Mat<const T> s, PositionFactor factor, const PassLayout& layout, Mat<T> y) {
  for_each_position(layout, [&](int64_t t, int64_t position) {
    const T f = factor_of<T>(factor, position + 1);
    for (int64_t c = 0; c < s.cols; ++c) y.row(t)[c] = f * s.row(t)[c];
  });
}

template <class T>
void single_gate_decay_forward(const Exec<T>&, Mat<const T> s, Mat<T> g) {
  for_row_blocks(RowBlocks::cut(s.rows, s.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      std::transform(s.row(t), s.row(t) + s.cols, g.row(t), [](T x) { return std::log1p(-x); });
  });
}

template <class T>
void single_gate_decay_backward(const Exec<T>&, Mat<const T> dg, Mat<const T> s, Mat<T> dlogit) {
  for_row_blocks(RowBlocks::cut(dg.rows, dg.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t c = 0; c < dg.cols; ++c) dlogit.row(t)[c] -= s.row(t)[c] * dg.row(t)[c];
    }
  });
}

#define FW_INSTANTIATE(T)                                                                                 \
  template void learned_gate_forward(const Exec<T>&, const T*, T, Mat<T>);                                \
  template void position_factor(const Exec<T>&, Mat<const T>, PositionFactor, const PassLayout&, Mat<T>); \
  template void single_gate_decay_forward(const Exec<T>&, Mat<const T>, Mat<T>);                          \
  template void single_gate_decay_backward(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace cpu
}  // namespace fw
