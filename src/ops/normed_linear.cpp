#include "ops/normed_linear.h"

#include <type_traits>

#include "base/arena_mark.h"
#include "base/plan_device.h"
#include "ops/new_matrix.h"
#include "ops/profile.h"

namespace fw {
namespace {

// Whether a kernel of its own may run: none adds what a low rank gives.
template <class T>
bool is_one_kernel(const Exec<T>& exec, const Weight<Wide<T>>& weight) {
  return !only_plans(exec.device) && weight.low_ranks == 0;
}

}  // namespace

template <class T>
void normed_linear_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* norm, Wide<T> eps,
                           Weight<Wide<T>> weight, const Wide<T>* bias, bool swiglu, Mat<T> y) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const double values = static_cast<double>(weight.values.rows) * static_cast<double>(x.cols);
    const ProfiledCall timed("linear_forward, normed", exec.device, 2 * values,
                             2 * values * static_cast<double>(x.rows));
    if (is_one_kernel(exec, weight) && normed_linear_on_cuda(exec, x, norm, eps, weight, bias, swiglu, y)) return;
  }
  const ArenaMark mark(exec.arena);
  const Mat<T> h = new_matrix<T>(exec.arena, x.rows, x.cols);
  exec.rmsnorm_forward(x, norm, eps, h, exec.arena.template alloc<Wide<T>>(x.rows));
  swiglu ? swiglu_linear_forward(exec, Mat<const T>(h), weight, y)
         : exec.linear_forward(h, weight, bias, y, Write::kOverwrite);
}

template <class T>
void swiglu_linear_forward(const Exec<T>& exec, Mat<const T> x, Weight<Wide<T>> weight, Mat<T> y) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const double values = static_cast<double>(weight.values.rows) * static_cast<double>(x.cols);
    const ProfiledCall timed("linear_forward, swiglu", exec.device, 2 * values,
                             2 * values * static_cast<double>(x.rows));
    if (is_one_kernel(exec, weight) && swiglu_linear_on_cuda(exec, x, weight, y)) return;
  }
  const ArenaMark mark(exec.arena);
  const Mat<T> both = new_matrix<T>(exec.arena, x.rows, 2 * y.cols);
  exec.linear_forward(x, weight, nullptr, both, Write::kOverwrite);
  exec.swiglu_forward(both.col_range(0, y.cols), both.col_range(y.cols, y.cols), y);
}

template <class T>
void gated_linear_forward(const Exec<T>& exec, Mat<T> o, Mat<const T> gate, const Wide<T>* norm, Wide<T> eps,
                          int64_t head_dim, GateKind kind, Weight<Wide<T>> weight, Mat<T> y, Write write) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const double values = static_cast<double>(weight.values.rows) * static_cast<double>(o.cols);
    const ProfiledCall timed("linear_forward, gated", exec.device, 2 * values,
                             2 * values * static_cast<double>(o.rows));
    if (is_one_kernel(exec, weight) && gated_linear_on_cuda(exec, o, gate, norm, eps, head_dim, kind, weight, y, write))
      return;
  }
  const ArenaMark mark(exec.arena);
  Wide<T>* const rstd = exec.arena.template alloc<Wide<T>>(o.rows * (o.cols / head_dim));
  exec.gated_rmsnorm_forward(o, gate, nullptr, norm, eps, head_dim, kind, o, rstd);
  exec.linear_forward(o, weight, nullptr, y, write);
}

template <class T>
void linear_pair_forward(const Exec<T>& exec, const LinearPart<T>& first, const LinearPart<T>& second) {
  const auto one_by_one = [&] {
    for (const LinearPart<T>* of : {&first, &second})
      exec.linear_forward(of->x, of->weight, of->bias, of->y, Write::kOverwrite);
  };
  if constexpr (std::is_same_v<T, Bf16>) {
    if (first.x.rows <= kSmallGemmMaxM) {
      double values = 0;
      for (const LinearPart<T>* of : {&first, &second})
        values += static_cast<double>(of->y.cols) * static_cast<double>(of->x.cols);
      const ProfiledCall timed("linear_forward, pair", exec.device, 2 * values,
                               2 * values * static_cast<double>(first.x.rows));
      const bool fits = is_one_kernel(exec, first.weight) && is_one_kernel(exec, second.weight);
      if (!fits || !linear_pair_on_cuda(exec, first, second)) one_by_one();
      return;
    }
  }
  one_by_one();
}

#define FW_INSTANTIATE(T)                                                                                        \
  template void normed_linear_forward<T>(const Exec<T>&, Mat<const T>, const Wide<T>*, Wide<T>, Weight<Wide<T>>, \
                                         const Wide<T>*, bool, Mat<T>);                                          \
  template void swiglu_linear_forward<T>(const Exec<T>&, Mat<const T>, Weight<Wide<T>>, Mat<T>);                 \
  template void linear_pair_forward<T>(const Exec<T>&, const LinearPart<T>&, const LinearPart<T>&);              \
  template void gated_linear_forward<T>(const Exec<T>&, Mat<T>, Mat<const T>, const Wide<T>*, Wide<T>, int64_t,  \
                                        GateKind, Weight<Wide<T>>, Mat<T>, Write);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace fw
