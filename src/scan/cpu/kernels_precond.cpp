// The diagonal preconditioner (recurrence.md section 3) and its adjoint, one key head of one sequence. See kernels.h.
// M of A is rule/elementwise.def's.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_precond.cpp"
// The per-target includes must come after foreach_target.h.
// clang-format off
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include <cmath>

#include "rule/precond.h"
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

#define FW_ELEMENT HWY_INLINE
#define FW_ELEMENTS_OF_THE_PRECONDITIONER
#include "rule/elementwise.def"
#undef FW_ELEMENTS_OF_THE_PRECONDITIONER
#undef FW_ELEMENT

// The arithmetic of vectors of channels; powers of e.
template <class T>
struct Lanes {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr bool kHasTanh = true;
  static HWY_INLINE V log(V a) { return hn::Log(D(), a); }
  static HWY_INLINE V tanh(V a) { return hn::Tanh(D(), a); }
  static HWY_INLINE V power(V a) { return hn::Exp(D(), a); }
  static HWY_INLINE V inverse(V a) { return hn::Div(hn::Set(D(), T(1)), a); }
  static HWY_INLINE V quotient(V a, V b) { return hn::Div(a, b); }
  static HWY_INLINE V mul_add(V a, V b, V c) { return hn::MulAdd(a, b, c); }
  static HWY_INLINE V one_plus_abs(V a) { return hn::Add(hn::Set(D(), T(1)), hn::Abs(a)); }
};

template <class T>
PrecondMap<typename Lanes<T>::V> map_of_lanes(const PrecondTask<T>& task) {
  const auto map = precond_map(*task.rule, static_cast<T>(std::log(task.rule->precond_x)), task.center);
  const auto all = [](T x) { return hn::Set(hn::ScalableTag<T>(), x); };
  return {map.squashed,    map.previous,   map.tanh,       all(map.eps),
          all(map.center), all(map.slope), all(map.shift), all(map.ridge)};
}

// dm times the slope of M, which forward left, with respect to A; dcenter is reduced by what reaches the center.
template <class T, class V>
HWY_INLINE V through_map(const PrecondMap<V>& map, V a, V m, V dm, V& dcenter) {
  using Math = Lanes<T>;
  if (!map.squashed) return hn::Neg(hn::Mul(dm, hn::Mul(m, m)));
  const V shifted = hn::Add(a, map.eps), y = PrecondElements<Math>::argument(map, shifted);
  // The slope of tanh, 4 z / (1 + z)^2 with z = exp(-2 |y|), or of y / (1 + |y|).
  const V number = hn::Set(hn::ScalableTag<T>(), T(map.tanh ? 4 : 1));
  const V z = map.tanh ? Math::power(hn::Mul(hn::Set(hn::ScalableTag<T>(), T(-2)), hn::Abs(y))) : hn::Abs(y);
  const V scale = Math::inverse(Math::one_plus_abs(z));
  const V of_y = hn::Mul(map.tanh ? hn::Mul(number, z) : number, hn::Mul(scale, scale));
  const V dy = hn::Mul(hn::Mul(dm, m), hn::Mul(map.slope, of_y));
  dcenter = hn::Sub(dcenter, dy);
  return hn::Div(dy, shifted);
}

template <class T>
void precond_forward(const PrecondTask<T>& task) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t kp = padded(task.K);
  PadBuffer<T> buffer(kp);
  const auto map = map_of_lanes(task);
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
      hn::StoreU(PrecondElements<Lanes<T>>::value(map, map.previous ? before : a), d, task.m + t * kp + j);
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
  const auto map = map_of_lanes(task);
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
      if (!map.previous) {
        da = hn::Add(da, through_map<T>(map, hn::LoadU(d, a_now + j), hn::LoadU(d, task.m + t * kp + j),
                                        hn::LoadU(d, grad.dm + t * kp + j), sum_center));
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
      *grad.dg.row(t) = (alpha == T(0) ? T(0) : alpha * hn::GetLane(hn::SumOfLanes(d, sum_alpha))) +
                        (grad.dg_direct != nullptr ? grad.dg_direct[t] : T(0));
    }
    if (grad.dbeta)
      *grad.dbeta.row(t) = kn * kn * raw_sum + (grad.dbeta_direct != nullptr ? grad.dbeta_direct[t] : T(0));
    // d/dk of gain kn^2 sum_i dA_i k_i^2; kn depends on |k|^2: d(kn^2)/dk = -2 kn^4 k.
    const T own = T(2) * gain * kn * kn;
    const T common = task.rule->k_norm == Norm::kL2 && k2 + static_cast<T>(task.rule->norm_eps) > T(0)
                         ? -T(2) * gain * kn * kn * kn * kn * raw_sum
                         : T(0);
    const auto own_v = hn::Set(d, own), common_v = hn::Set(d, common);
    T* dk = dk_buffer.open(grad.dk, t, task.K, true);
    for (int64_t j = 0; j < kp; j += lanes) {
      auto da = hn::LoadU(d, grad.dstate + j);
      if (dk != nullptr) store_or_add(d, hn::Mul(hn::MulAdd(own_v, da, common_v), hn::LoadU(d, k + j)), dk + j, true);
      da = hn::Mul(alpha_v, da);
      if (map.previous) {
        auto no_center = hn::Zero(d);
        da = hn::Add(da, through_map<T>(map, hn::LoadU(d, a_before + j), hn::LoadU(d, task.m + t * kp + j),
                                        hn::LoadU(d, grad.dm + t * kp + j), no_center));
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
