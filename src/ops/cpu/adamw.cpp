// AdamW: elementwise over the pieces of all parameters, a piece a task.
#include "base/threads.h"
#include "ops/cpu/operations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/adamw.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fw::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class T>
HWY_INLINE void adamw_lanes(D d, const AdamWStep<T>& s, T* HWY_RESTRICT p, const T* HWY_RESTRICT g, T* HWY_RESTRICT m, T* HWY_RESTRICT v) {
  const auto grad = hn::Mul(hn::LoadU(d, g), hn::Set(d, s.grad_scale));
  const auto value = hn::LoadU(d, p);
  const auto first = hn::MulAdd(hn::Set(d, s.one_minus_beta1), grad, hn::Mul(hn::Set(d, s.beta1), hn::LoadU(d, m)));
  const auto second = hn::MulAdd(hn::Mul(hn::Set(d, s.one_minus_beta2), grad), grad, hn::Mul(hn::Set(d, s.beta2), hn::LoadU(d, v)));
  const auto root = hn::MulAdd(hn::Sqrt(second), hn::Set(d, s.inv_sqrt_debias2), hn::Set(d, s.eps));
  const auto change = hn::MulAdd(hn::Set(d, s.decay), value, hn::Div(hn::Mul(hn::Set(d, s.step), first), root));
  hn::StoreU(first, d, m);
  hn::StoreU(second, d, v);
  hn::StoreU(hn::Sub(value, change), d, p);
}

template <class T>
void adamw_block(const AdamWStep<T>& s, T* HWY_RESTRICT p, const T* HWY_RESTRICT g, T* HWY_RESTRICT m, T* HWY_RESTRICT v, size_t count) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> one;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) adamw_lanes(d, s, p + i, g + i, m + i, v + i);
  for (; i < count; ++i) adamw_lanes(one, s, p + i, g + i, m + i, v + i);
}

void adamw_block_f32(const AdamWStep<float>& s, float* p, const float* g, float* m, float* v, size_t count) { adamw_block(s, p, g, m, v, count); }
void adamw_block_f64(const AdamWStep<double>& s, double* p, const double* g, double* m, double* v, size_t count) { adamw_block(s, p, g, m, v, count); }

}  // namespace fw::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(adamw_block_f32);
HWY_EXPORT(adamw_block_f64);

void run_block(const AdamWStep<float>& s, float* p, const float* g, float* m, float* v, size_t count) {
  HWY_DYNAMIC_DISPATCH(adamw_block_f32)(s, p, g, m, v, count);
}
void run_block(const AdamWStep<double>& s, double* p, const double* g, double* m, double* v, size_t count) {
  HWY_DYNAMIC_DISPATCH(adamw_block_f64)(s, p, g, m, v, count);
}

}  // namespace

namespace cpu {

template <class T>
void adamw(const Exec<T>&, const AdamWStep<T>& step, ParamPieces pieces, const T* grads, T* values, T* m, T* v) {
  parallel_for(pieces.count, [&](int64_t i) {
    const ParamPiece& piece = pieces.data[i];
    AdamWStep<T> mine = step;
    if (piece.decay == 0) mine.decay = T(0);
    run_block(mine, values + piece.begin, grads + piece.begin, m + piece.begin, v + piece.begin, static_cast<size_t>(piece.count));
  });
}

template void adamw(const Exec<float>&, const AdamWStep<float>&, ParamPieces, const float*, float*, float*, float*);
template void adamw(const Exec<double>&, const AdamWStep<double>&, ParamPieces, const double*, double*, double*, double*);

}  // namespace cpu
}  // namespace fw
#endif
