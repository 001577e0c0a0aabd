// Operations that compute nothing: with a PlanDevice a pass only allocates, and takes what the host's operations would.
#include "ops/backend.h"
#include "ops/cpu/scratch.h"

namespace fw {
namespace {

template <class Function>
struct Skip;
template <class... Args>
struct Skip<void (*)(Args...)> {
  static void call(Args...) {}
};

template <class T>
void plan_cross_entropy_forward(const Exec<T>& exec, Mat<const T> h, Weight<T> weight, const int32_t*, T*, LossSum*) {
  const ArenaMark mark(exec.arena);
  const cpu::LogitsSlice<T> slice(exec.arena, h.rows, weight.values.rows);
}

template <class T>
void plan_cross_entropy_backward(const Exec<T>& exec, Mat<const T> h, Weight<T> weight, const int32_t*, T, Mat<T>,
                                 Mat<T>, LossSum*) {
  const ArenaMark mark(exec.arena);
  const cpu::LogitsSlice<T> slice(exec.arena, h.rows, weight.values.rows);
}

template <class T>
void plan_attention_backward(const Exec<T>& exec, Mat<const T>, Mat<const T> q, Mat<const T>, Mat<const T>,
                             const AttentionShape& shape, const PassLayout& layout, Pages<T>, Pages<T>, Mat<const T>,
                             Mat<const T>, Mat<T>, Mat<T>, Mat<T>) {
  const ArenaMark mark(exec.arena);
  const cpu::AttentionScratch<T> scratch(exec.arena, shape, q.rows, cpu::attention_partial_rows(shape, layout));
}

template <class T>
void plan_scan_backward(const Exec<T>& exec, ScanLaw law, Mat<const T>, Mat<const T> u, Mat<const T>, Mat<const T> q,
                        Mat<const T>, const T*, const T*, const PassLayout& layout, const T*, const T*, Mat<T>, Mat<T>,
                        Mat<T>, Mat<T>, T*, T*, T*) {
  const ArenaMark mark(exec.arena);
  const cpu::ScanScratch<T> scratch(exec.arena, law, u.rows, layout.host.count(), u.cols, q.cols);
}

}  // namespace

template <class T>
const Ops<T>& planned_ops() {
  static constexpr Ops<T> kTable = [] {
    Ops<T> ops;
#define FW_OP(name, args) ops.name = &Skip<decltype(ops.name)>::call;
#include "ops/ops.def"
#undef FW_OP
    ops.cross_entropy_forward = &plan_cross_entropy_forward<T>;
    ops.cross_entropy_backward = &plan_cross_entropy_backward<T>;
    ops.attention_backward = &plan_attention_backward<T>;
    ops.selective_scan_backward = &plan_scan_backward<T>;
    return ops;
  }();
  return kTable;
}

template const Ops<float>& planned_ops<float>();
template const Ops<double>& planned_ops<double>();

}  // namespace fw
