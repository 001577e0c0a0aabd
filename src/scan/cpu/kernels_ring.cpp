// A token on a state and the ring of tokens after it, and their fold into the state (scan/ring.h). See kernels.h.
//
// A ring without tokens gives the bits of kernels_token.cpp. The state is multiplied by the product of decays and then
// summed up in the same order. What the ring holds is added after that.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_ring.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <algorithm>

#include "scan/cpu/kernels.h"
#include "scan/cpu/rows-inl.h"
#include "scan/cpu/simd_table.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

enum class RingErase { kNone, kDecayed, kLag };

// to (.)= by, a decay: a row of channels, or one number.
template <class T>
void multiply_decay(DecayKind kind, int64_t kp, const T* by, T* to) {
  if (kind == DecayKind::kNone) return;
  const hn::ScalableTag<T> d;
  const int64_t count = kind == DecayKind::kChannel ? kp : 1;
  if (count == 1) {
    *to *= *by;
    return;
  }
  for (int64_t k = 0; k < kp; k += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(hn::LoadU(d, to + k), hn::LoadU(d, by + k)), d, to + k);
}

// (decay w) . x
template <class T>
T decayed_dot(DecayKind kind, int64_t kp, const T* decay, const T* w, const T* x) {
  if (kind != DecayKind::kChannel) {
    const T sum = row_dot(kp, w, x);
    return kind == DecayKind::kScalar ? *decay * sum : sum;
  }
  const hn::ScalableTag<T> d;
  auto sum = hn::Zero(d);
  for (int64_t k = 0; k < kp; k += static_cast<int64_t>(hn::Lanes(d)))
    sum = hn::MulAdd(hn::Mul(hn::LoadU(d, decay + k), hn::LoadU(d, w + k)), hn::LoadU(d, x + k), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// What the token finds of each token in the ring, by e (coefs) and by r (after those), and the decay of the state: in
// `total`, of the state that the erase looks at.
template <class T>
void ring_coefficients(const RingTile<T>& tile, int64_t kp) {
  const RingRows<T>& ring = tile.ring;
  const DecayKind kind = ring.decay_kind;
  const int64_t decays = kind == DecayKind::kChannel ? kp : kind == DecayKind::kScalar ? 1 : 0;
  T* const total = ring.total;
  std::fill_n(total, decays, T(1));
  if (!tile.lag) multiply_decay(kind, kp, tile.alpha, total);
  for (int64_t j = ring.count - 1; j >= 0; --j) {
    const T* w = ring.w + j * kp;
    if (tile.is_delta) ring.coefs[j] = decayed_dot(kind, kp, total, w, tile.e);
    if (tile.lag) {
      std::copy_n(total, decays, total + kp);
      multiply_decay(kind, kp, tile.alpha, total + kp);
    }
    ring.coefs[ring.count + j] = decayed_dot(kind, kp, tile.lag ? total + kp : total, w, tile.r);
    multiply_decay(kind, kp, ring.decay + j * decays, total);
  }
}

template <class T, DecayKind kDecay, RingErase kErase, int kVectors>
void ring_columns(const RingTile<T>& tile, int64_t j, T wr) {
  const RingRows<T>& ring = tile.ring;
  const hn::ScalableTag<T> d;
  using Vec = hn::Vec<decltype(d)>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  Vec acc_e[kVectors], acc_r[kVectors];
  for (int i = 0; i < kVectors; ++i) acc_e[i] = acc_r[i] = hn::Zero(d);
  const T* s = tile.state + j;
  for (int64_t k = 0; k < tile.K; ++k, s += tile.ld_state) {
    const int64_t channel = kDecay == DecayKind::kChannel ? k : 0;
    const auto rk = hn::Set(d, tile.r[k]);
    const auto ek = kErase == RingErase::kNone ? rk : hn::Set(d, tile.e[k]);
    const auto pk = hn::Set(d, kDecay == DecayKind::kNone ? T(1) : ring.total[channel]);
    const auto ak = hn::Set(d, kErase == RingErase::kLag ? tile.alpha[channel] : T(1));
    for (int i = 0; i < kVectors; ++i) {
      auto sv = hn::LoadU(d, s + i * lanes);
      if (kDecay != DecayKind::kNone) sv = hn::Mul(pk, sv);
      if (kErase != RingErase::kNone) acc_e[i] = hn::MulAdd(ek, sv, acc_e[i]);
      if (kErase == RingErase::kLag) sv = hn::Mul(ak, sv);
      acc_r[i] = hn::MulAdd(rk, sv, acc_r[i]);
    }
  }
  for (int64_t t = 0; t < ring.count; ++t) {
    const auto ce = hn::Set(d, kErase == RingErase::kNone ? T(0) : ring.coefs[t]),
               cr = hn::Set(d, ring.coefs[ring.count + t]);
    for (int i = 0; i < kVectors; ++i) {
      const auto u = hn::LoadU(d, ring.u + t * tile.V + j + i * lanes);
      if (kErase != RingErase::kNone) acc_e[i] = hn::MulAdd(ce, u, acc_e[i]);
      acc_r[i] = hn::MulAdd(cr, u, acc_r[i]);
    }
  }
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = j + i * lanes;
    const auto u = hn::Sub(hn::LoadU(d, tile.z + at), acc_e[i]);
    hn::StoreU(u, d, tile.u + at);
    hn::StoreU(hn::MulAdd(hn::Set(d, wr), u, acc_r[i]), d, tile.o + at);
  }
}

template <class T, DecayKind kDecay, RingErase kErase>
void ring_tiles(const RingTile<T>& tile) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), kp = padded(tile.K);
  ring_coefficients(tile, kp);
  const T wr = row_dot(kp, tile.w, tile.r);
  int64_t j = 0;
  for (; j + 4 * lanes <= tile.V; j += 4 * lanes) ring_columns<T, kDecay, kErase, 4>(tile, j, wr);
  for (; j < tile.V; j += lanes) ring_columns<T, kDecay, kErase, 1>(tile, j, wr);
}

template <class T, DecayKind kDecay>
void ring_erase(const RingTile<T>& tile) {
  if (!tile.is_delta) return ring_tiles<T, kDecay, RingErase::kNone>(tile);
  if (kDecay != DecayKind::kNone && tile.lag) return ring_tiles<T, kDecay, RingErase::kLag>(tile);
  ring_tiles<T, kDecay, RingErase::kDecayed>(tile);
}

template <class T>
void ring_step(const RingTile<T>& tile) {
  switch (tile.ring.decay_kind) {
    case DecayKind::kNone:
      return ring_erase<T, DecayKind::kNone>(tile);
    case DecayKind::kScalar:
      return ring_erase<T, DecayKind::kScalar>(tile);
    case DecayKind::kChannel:
      return ring_erase<T, DecayKind::kChannel>(tile);
  }
}

template <class T>
void ring_fold(const RingRows<T>& ring, int64_t K, int64_t V, T* state, int64_t ld_state) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), kp = padded(K);
  const DecayKind kind = ring.decay_kind;
  const int64_t decays = kind == DecayKind::kChannel ? kp : kind == DecayKind::kScalar ? 1 : 0;
  std::fill_n(ring.total, decays, T(1));
  for (int64_t t = ring.count - 1; t >= 0; --t) {
    T* w = ring.w + t * kp;
    for (int64_t k = 0; kind != DecayKind::kNone && k < kp; k += lanes) {
      const auto p = kind == DecayKind::kChannel ? hn::LoadU(d, ring.total + k) : hn::Set(d, *ring.total);
      hn::StoreU(hn::Mul(p, hn::LoadU(d, w + k)), d, w + k);
    }
    multiply_decay(kind, kp, ring.decay + t * decays, ring.total);
  }
  for (int64_t k = 0; k < K; ++k) {
    const auto p = hn::Set(d, kind == DecayKind::kNone ? T(1) : ring.total[kind == DecayKind::kChannel ? k : 0]);
    T* s = state + k * ld_state;
    for (int64_t j = 0; j < V; j += lanes) {
      auto sv = hn::LoadU(d, s + j);
      if (kind != DecayKind::kNone) sv = hn::Mul(p, sv);
      for (int64_t t = 0; t < ring.count; ++t)
        sv = hn::MulAdd(hn::Set(d, ring.w[t * kp + k]), hn::LoadU(d, ring.u + t * V + j), sv);
      hn::StoreU(sv, d, s + j);
    }
  }
}

template <class T>
const RingKernels<T>& table_of() {
  static const RingKernels<T> table = {&ring_step<T>, &ring_fold<T>};
  return table;
}

FW_SIMD_MAKE(RingKernels)

}  // namespace fw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw::cpu {

FW_SIMD_EXPORT(RingKernels, ring_kernels)

}  // namespace fw::cpu
#endif
