// The diagonal preconditioner (recurrence.md section 3) and its adjoint, one key head of one sequence. See kernels.h.
//     A_t = exp(g) A_{t-1} + beta khat (.) khat;  y = log(A_t + eps) - center;  M_t = exp(-log(x) y / (1 + |y|))
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_precond.cpp"
// The per-target includes must come after foreach_target.h.
// clang-format off
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include <cmath>

#include "rule/front.h"
#include "scan/cpu/kernels.h"
#include "scan/cpu/rows-inl.h"
#include "scan/cpu/simd_table.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
T normalisation(const PrecondTask<T>& task, int64_t kp, const T* k) {
  return task.rule->k_norm == Norm::kL2 ? k_factor(*task.rule, row_dot(kp, k, k)) : T(1);
}

template <class T>
void precond_forward(const PrecondTask<T>& task) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t kp = padded(task.K);
  PadBuffer<T> buffer(kp);
  const auto one = hn::Set(d, T(1)), eps = hn::Set(d, static_cast<T>(task.rule->precond_eps)), center = hn::Set(d, task.center);
  const auto minus_log_x = hn::Set(d, static_cast<T>(-std::log(task.rule->precond_x)));
  for (int64_t t = 0; t < task.rows; ++t) {
    const T* k = buffer.load(task.k.row(t), task.K);
    const T kn = normalisation(task, kp, k);
    const auto alpha = hn::Set(d, std::exp(*task.g.row(t))), gain = hn::Set(d, *task.beta.row(t) * kn * kn);
    for (int64_t j = 0; j < kp; j += lanes) {
      const auto kv = hn::LoadU(d, k + j);
      const auto a = hn::MulAdd(alpha, hn::LoadU(d, task.state + j), hn::Mul(gain, hn::Mul(kv, kv)));
      hn::StoreU(a, d, task.state + j);
      if (task.history != nullptr) hn::StoreU(a, d, task.history + t * kp + j);
      const auto y = hn::Sub(hn::Log(d, hn::Add(a, eps)), center);
      const auto squashed = hn::Div(y, hn::Add(one, hn::Abs(y)));
      hn::StoreU(hn::Exp(d, hn::Mul(minus_log_x, squashed)), d, task.m + t * kp + j);
    }
  }
}

template <class T>
void precond_backward(PrecondGrad<T>& grad) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const PrecondTask<T>& task = grad.in;
  const int64_t kp = padded(task.K);
  PadBuffer<T> k_buffer(kp), dk_buffer(kp);
  const auto one = hn::Set(d, T(1)), eps = hn::Set(d, static_cast<T>(task.rule->precond_eps)), center = hn::Set(d, task.center);
  const auto minus_log_x = hn::Set(d, static_cast<T>(-std::log(task.rule->precond_x)));
  grad.dcenter = 0;
  for (int64_t t = task.rows - 1; t >= 0; --t) {
    const T* k = k_buffer.load(task.k.row(t), task.K);
    const T k2 = row_dot(kp, k, k);
    const T kn = normalisation(task, kp, k);
    const T alpha = std::exp(*task.g.row(t)), gain = *task.beta.row(t);
    const T* a_now = task.history + t * kp;
    const T* a_before = t > 0 ? a_now - kp : task.state;
    const auto alpha_v = hn::Set(d, alpha);
    auto sum_center = hn::Zero(d), sum_alpha = hn::Zero(d), sum_gain = hn::Zero(d);
    for (int64_t j = 0; j < kp; j += lanes) {
      const auto shifted = hn::Add(hn::LoadU(d, a_now + j), eps);
      const auto y = hn::Sub(hn::Log(d, shifted), center);
      const auto scale = hn::Div(one, hn::Add(one, hn::Abs(y)));
      const auto dmv = hn::LoadU(d, grad.dm + t * kp + j);
      const auto dy = hn::Mul(hn::Mul(dmv, hn::LoadU(d, task.m + t * kp + j)), hn::Mul(minus_log_x, hn::Mul(scale, scale)));
      sum_center = hn::Sub(sum_center, dy);
      const auto da = hn::Add(hn::LoadU(d, grad.dstate + j), hn::Div(dy, shifted));
      const auto kv = hn::LoadU(d, k + j);
      sum_alpha = hn::MulAdd(da, hn::LoadU(d, a_before + j), sum_alpha);
      sum_gain = hn::MulAdd(da, hn::Mul(kv, kv), sum_gain);
      hn::StoreU(da, d, grad.dstate + j);  // before the decay: used once more below
    }
    // sum_gain = sum_i dA_i k_i^2 of the raw key; khat = kn k.
    const T raw_sum = hn::GetLane(hn::SumOfLanes(d, sum_gain));
    grad.dcenter += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum_center)));
    if (grad.dg) *grad.dg.row(t) = alpha == T(0) ? T(0) : alpha * hn::GetLane(hn::SumOfLanes(d, sum_alpha));
    if (grad.dbeta) *grad.dbeta.row(t) = kn * kn * raw_sum;
    // d/dk of gain kn^2 sum_i dA_i k_i^2; kn depends on |k|^2: d(kn^2)/dk = -2 kn^4 k.
    const T own = T(2) * gain * kn * kn;
    const T common = task.rule->k_norm == Norm::kL2 && k2 + static_cast<T>(task.rule->norm_eps) > T(0) ? -T(2) * gain * kn * kn * kn * kn * raw_sum : T(0);
    const auto own_v = hn::Set(d, own), common_v = hn::Set(d, common);
    T* dk = dk_buffer.open(grad.dk, t, task.K, true);
    for (int64_t j = 0; j < kp; j += lanes) {
      const auto da = hn::LoadU(d, grad.dstate + j);
      if (dk != nullptr) store_or_add(d, hn::Mul(hn::MulAdd(own_v, da, common_v), hn::LoadU(d, k + j)), dk + j, true);
      hn::StoreU(hn::Mul(alpha_v, da), d, grad.dstate + j);
    }
    dk_buffer.close();
  }
}

template <class T>
const PrecondKernels<T>& table_of() {
  static const PrecondKernels<T> table = {&precond_forward<T>, &precond_backward<T>};
  return table;
}

FW_SIMD_MAKE(PrecondKernels)

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace fw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw::cpu {

FW_SIMD_EXPORT(PrecondKernels, precond_kernels)

HWY_EXPORT(target_name);
const char* simd_target_name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace fw::cpu
#endif
