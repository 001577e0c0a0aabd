// AdamW: elementwise over the pieces of all parameters, a piece a task. Moments in bf16 go through float, some of a
// piece at a time.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "base/error.h"
#include "base/threads.h"
#include "ops/cpu/operations.h"
#include "ops/stochastic_rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/adamw.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fw::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class T>
HWY_INLINE void adamw_lanes(D d, const AdamWStep<T>& s, T* HWY_RESTRICT p, const T* HWY_RESTRICT g, T* HWY_RESTRICT m,
                            T* HWY_RESTRICT v) {
  const auto grad = hn::Mul(hn::LoadU(d, g), hn::Set(d, s.grad_scale));
  const auto value = hn::LoadU(d, p);
  const auto first = hn::MulAdd(hn::Set(d, s.one_minus_beta1), grad, hn::Mul(hn::Set(d, s.beta1), hn::LoadU(d, m)));
  const auto second =
      hn::MulAdd(hn::Mul(hn::Set(d, s.one_minus_beta2), grad), grad, hn::Mul(hn::Set(d, s.beta2), hn::LoadU(d, v)));
  const auto root = hn::MulAdd(hn::Sqrt(second), hn::Set(d, s.inv_sqrt_debias2), hn::Set(d, s.eps));
  const auto change = hn::MulAdd(hn::Set(d, s.decay), value, hn::Div(hn::Mul(hn::Set(d, s.step), first), root));
  hn::StoreU(first, d, m);
  hn::StoreU(second, d, v);
  hn::StoreU(hn::Sub(value, change), d, p);
}

template <class T>
void adamw_block(const AdamWStep<T>& s, T* HWY_RESTRICT p, const T* HWY_RESTRICT g, T* HWY_RESTRICT m,
                 T* HWY_RESTRICT v, size_t count) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> one;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) adamw_lanes(d, s, p + i, g + i, m + i, v + i);
  for (; i < count; ++i) adamw_lanes(one, s, p + i, g + i, m + i, v + i);
}

void adamw_block_f32(const AdamWStep<float>& s, float* p, const float* g, float* m, float* v, size_t count) {
  adamw_block(s, p, g, m, v, count);
}
void adamw_block_f64(const AdamWStep<double>& s, double* p, const double* g, double* m, double* v, size_t count) {
  adamw_block(s, p, g, m, v, count);
}

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

constexpr int64_t kAtOnce = 1024;

void widen(const Bf16* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i].bits) << 16);
}

// words[i] = the random word of element `index` + i of the update (ops.h).
void fill_random(uint64_t index, uint64_t update, uint64_t key, int64_t n, uint32_t* words) {
  for (int64_t i = 0; i < n;) {
    const uint64_t at = index + static_cast<uint64_t>(i);
    const RandomWords four = random_words(at / 4, update, key);
    for (uint64_t k = at % 4; k < 4 && i < n; ++k, ++i) words[i] = four.x[k];
  }
}

// A piece whose moments are bf16.
void run_narrow(const AdamWStep<float>& s, const ParamPiece& piece, const float* grads, float* values, Bf16* m,
                Bf16* v) {
  float first[kAtOnce], second[kAtOnce];
  uint32_t words[kAtOnce];
  for (int64_t begin = piece.begin, end = begin + piece.count; begin < end; begin += kAtOnce) {
    const int64_t n = std::min(kAtOnce, end - begin);
    widen(m + begin, n, first);
    widen(v + begin, n, second);
    run_block(s, values + begin, grads + begin, first, second, static_cast<size_t>(n));
    fill_random(s.first + static_cast<uint64_t>(begin), s.update, s.seed, n, words);
    for (int64_t i = 0; i < n; ++i) {
      m[begin + i].bits = round_stochastically(std::bit_cast<uint32_t>(first[i]), words[i]);
      v[begin + i].bits = round_stochastically(std::bit_cast<uint32_t>(second[i]), words[i] >> 16);
    }
  }
}

}  // namespace

namespace cpu {

template <class T>
void adamw(const Exec<T>&, const AdamWStep<T>& step, ParamPieces pieces, const T* grads, ParamValues<T> values,
           MomentValues<T> moments) {
  if (values.values == nullptr) fail_internal("adamw: expected whole values on the host, got split ones");
  const bool narrow = moments.first == nullptr;
  if (narrow && !std::is_same_v<T, float>) fail_internal("adamw: expected moments in double, got bf16");
  parallel_for(pieces.count, [&](int64_t i) {
    const ParamPiece& piece = pieces.data[i];
    AdamWStep<T> mine = step;
    if (piece.decay == 0) mine.decay = T(0);
    if constexpr (std::is_same_v<T, float>) {
      if (narrow) return run_narrow(mine, piece, grads, values.values, moments.first_bf16, moments.second_bf16);
    }
    run_block(mine, values.values + piece.begin, grads + piece.begin, moments.first + piece.begin,
              moments.second + piece.begin, static_cast<size_t>(piece.count));
  });
}

template void adamw(const Exec<float>&, const AdamWStep<float>&, ParamPieces, const float*, ParamValues<float>,
                    MomentValues<float>);
template void adamw(const Exec<double>&, const AdamWStep<double>&, ParamPieces, const double*, ParamValues<double>,
                    MomentValues<double>);

}  // namespace cpu
}  // namespace fw
#endif
