// The diagonal preconditioner (recurrence.md section 3) and its adjoint, one key head of one sequence. See kernels.h.
//     A_t = exp(g) A_{t-1} + beta khat (.) khat;  y = log(A_t + eps) - center;  M_t = exp(-log(x) (a y / (1 + |y|) + b))
// with a, b by the range, or M_t = 1 / (A + ridge) of the A at t or before it.
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

// M of a state and its slope, by the rule's form.
template <class T>
class Squash {
 public:
  explicit Squash(const PrecondTask<T>& task)
      : squashed_(task.rule->precond_squashed()),
        eps_(hn::Set(d_, static_cast<T>(task.rule->precond_eps))),
        center_(hn::Set(d_, task.center)),
        ridge_(hn::Set(d_, static_cast<T>(task.rule->precond_ridge))),
        one_(hn::Set(d_, T(1))) {
    const double log_x = std::log(task.rule->precond_x);
    const PrecondForm form = task.rule->precond_form;
    const double shift = form == PrecondForm::kSquashLow ? 0.5 : form == PrecondForm::kSquashHigh ? -0.5 : 0.0;
    slope_ = hn::Set(d_, static_cast<T>(form == PrecondForm::kSquash ? -log_x : -0.5 * log_x));
    shift_ = hn::Set(d_, static_cast<T>(-log_x * shift));
  }

  using V = hn::Vec<hn::ScalableTag<T>>;
  V value(V a) const {
    if (!squashed_) return hn::Div(one_, hn::Add(a, ridge_));
    const V y = hn::Sub(hn::Log(d_, hn::Add(a, eps_)), center_);
    return hn::Exp(d_, hn::MulAdd(slope_, hn::Div(y, hn::Add(one_, hn::Abs(y))), shift_));
  }
  // dm times the slope of M with respect to A; dcenter is reduced by what reaches the center.
  V gradient(V a, V m, V dm, V& dcenter) const {
    if (!squashed_) return hn::Neg(hn::Mul(dm, hn::Mul(m, m)));
    const V shifted = hn::Add(a, eps_);
    const V y = hn::Sub(hn::Log(d_, shifted), center_);
    const V scale = hn::Div(one_, hn::Add(one_, hn::Abs(y)));
    const V dy = hn::Mul(hn::Mul(dm, m), hn::Mul(slope_, hn::Mul(scale, scale)));
    dcenter = hn::Sub(dcenter, dy);
    return hn::Div(dy, shifted);
  }

 private:
  hn::ScalableTag<T> d_;
  bool squashed_;
  V eps_, center_, ridge_, one_, slope_, shift_;
};

template <class T>
void precond_forward(const PrecondTask<T>& task) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t kp = padded(task.K);
  PadBuffer<T> buffer(kp);
  const Squash<T> squash(task);
  const bool previous = task.rule->precond_form == PrecondForm::kInversePrevious;
  for (int64_t t = 0; t < task.rows; ++t) {
    const T* k = buffer.load(task.k.row(t), task.K);
    const T kn = normalisation(task, kp, k);
    const auto alpha = hn::Set(d, std::exp(*task.g.row(t))), gain = hn::Set(d, *task.beta.row(t) * kn * kn);
    for (int64_t j = 0; j < kp; j += lanes) {
      const auto kv = hn::LoadU(d, k + j);
      const auto before = hn::LoadU(d, task.state + j);
      const auto a = hn::MulAdd(alpha, before, hn::Mul(gain, hn::Mul(kv, kv)));
      hn::StoreU(a, d, task.state + j);
      if (task.history != nullptr) hn::StoreU(a, d, task.history + t * kp + j);
      hn::StoreU(squash.value(previous ? before : a), d, task.m + t * kp + j);
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
  const Squash<T> squash(task);
  const bool previous = task.rule->precond_form == PrecondForm::kInversePrevious;
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
      auto da = hn::LoadU(d, grad.dstate + j);
      if (!previous) {
        da = hn::Add(da, squash.gradient(hn::LoadU(d, a_now + j), hn::LoadU(d, task.m + t * kp + j), hn::LoadU(d, grad.dm + t * kp + j), sum_center));
      }
      const auto kv = hn::LoadU(d, k + j);
      sum_alpha = hn::MulAdd(da, hn::LoadU(d, a_before + j), sum_alpha);
      sum_gain = hn::MulAdd(da, hn::Mul(kv, kv), sum_gain);
      hn::StoreU(da, d, grad.dstate + j);  // before the decay: used once more below
    }
    // sum_gain = sum_i dA_i k_i^2 of the raw key; khat = kn k.
    const T raw_sum = hn::GetLane(hn::SumOfLanes(d, sum_gain));
    grad.dcenter += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum_center)));
    if (grad.dg) {
      *grad.dg.row(t) = (alpha == T(0) ? T(0) : alpha * hn::GetLane(hn::SumOfLanes(d, sum_alpha))) + (grad.dg_direct != nullptr ? grad.dg_direct[t] : T(0));
    }
    if (grad.dbeta) *grad.dbeta.row(t) = kn * kn * raw_sum + (grad.dbeta_direct != nullptr ? grad.dbeta_direct[t] : T(0));
    // d/dk of gain kn^2 sum_i dA_i k_i^2; kn depends on |k|^2: d(kn^2)/dk = -2 kn^4 k.
    const T own = T(2) * gain * kn * kn;
    const T common = task.rule->k_norm == Norm::kL2 && k2 + static_cast<T>(task.rule->norm_eps) > T(0) ? -T(2) * gain * kn * kn * kn * kn * raw_sum : T(0);
    const auto own_v = hn::Set(d, own), common_v = hn::Set(d, common);
    T* dk = dk_buffer.open(grad.dk, t, task.K, true);
    for (int64_t j = 0; j < kp; j += lanes) {
      auto da = hn::LoadU(d, grad.dstate + j);
      if (dk != nullptr) store_or_add(d, hn::Mul(hn::MulAdd(own_v, da, common_v), hn::LoadU(d, k + j)), dk + j, true);
      da = hn::Mul(alpha_v, da);
      if (previous) {
        auto no_center = hn::Zero(d);
        da = hn::Add(da, squash.gradient(hn::LoadU(d, a_before + j), hn::LoadU(d, task.m + t * kp + j), hn::LoadU(d, grad.dm + t * kp + j), no_center));
      }
      hn::StoreU(da, d, grad.dstate + j);
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
