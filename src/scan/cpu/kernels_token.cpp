// The recurrence one token at a time. See kernels.h.
//
// Forward reads and writes the state once a token: the rank-one update of a token is applied while the next one reads,
// and the output uses S_t^T r = Sbar^T r + (w.r) u. A panel of columns stays in the first-level cache for all rows.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_token.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <cstring>

#include "scan/cpu/kernels.h"
#include "scan/cpu/rows-inl.h"
#include "scan/cpu/simd_table.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

enum class TokenDecay { kNone, kScalar, kChannel };
// The erase: none; of the decayed state, or (kLag) of the one before the decay.
enum class TokenErase { kNone, kDecayed, kLag };

// kVectors vectors of columns beginning at column j. kOwn: what the erase finds goes along f, what is written along w.
// kOne: the tile is one token, whose decay is formed twice in place of a store between the passes, to the same bits.
template <class T, TokenDecay kDecay, TokenErase kErase, bool kOwn, bool kOne, int kVectors>
void forward_sw128(const TokenTile<T>& tile, int64_t j, int64_t kp) {
  constexpr bool kDelta = kErase != TokenErase::kNone;
  const hn::ScalableTag<T> d;
  using Vec = hn::Vec<decltype(d)>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  Vec u[kVectors], z[kVectors], acc_e[kVectors], acc_r[kVectors];
  for (int i = 0; i < kVectors; ++i) u[i] = z[i] = hn::Zero(d);
  const T *u_pending = nullptr, *z_pending = nullptr;  // vectors of the token before, whose update is still to come
  for (int64_t t = 0; t < tile.rows; ++t) {
    const T* r = tile.r + t * kp;
    const T* e = kDelta ? tile.e + t * kp : nullptr;
    const T* w = tile.w + t * kp;
    const T* f = kOwn ? tile.f + t * kp : w;
    const T* alpha = kDecay == TokenDecay::kChannel ? tile.alpha + t * kp : nullptr;
    const auto alpha_all = hn::Set(d, kDecay == TokenDecay::kScalar ? tile.alpha[t] : T(1));
    for (int i = 0; i < kVectors; ++i) acc_e[i] = acc_r[i] = hn::Zero(d);
    T* s = tile.state + j;
    for (int64_t k = 0; k < tile.K; ++k, s += tile.ld_state) {
      const auto rk = hn::Set(d, r[k]);
      const auto ek = kDelta ? hn::Set(d, e[k]) : rk;
      const auto ak = kDecay == TokenDecay::kChannel ? hn::Set(d, alpha[k]) : alpha_all;
      const auto fk = u_pending != nullptr ? hn::Set(d, u_pending[k]) : hn::Zero(d);
      const auto wk = kOwn && z_pending != nullptr ? hn::Set(d, z_pending[k]) : hn::Zero(d);
      for (int i = 0; i < kVectors; ++i) {
        auto sv = hn::LoadU(d, s + i * lanes);
        if (t > 0) sv = hn::MulAdd(fk, u[i], sv);
        if (kOwn && t > 0) sv = hn::MulAdd(wk, z[i], sv);
        if (kErase == TokenErase::kLag) acc_e[i] = hn::MulAdd(ek, sv, acc_e[i]);
        if (kDecay != TokenDecay::kNone) sv = hn::Mul(ak, sv);
        if (!kOne && (t > 0 || kDecay != TokenDecay::kNone)) hn::StoreU(sv, d, s + i * lanes);
        if (kErase == TokenErase::kDecayed) acc_e[i] = hn::MulAdd(ek, sv, acc_e[i]);
        acc_r[i] = hn::MulAdd(rk, sv, acc_r[i]);
      }
    }
    const auto wr = hn::Set(d, row_dot(kp, w, r));
    const auto fr = hn::Set(d, kOwn ? row_dot(kp, f, r) : T(0));
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = t * tile.V + j + i * lanes;
      const auto zv = hn::LoadU(d, tile.z + at);
      if (kOwn) {
        z[i] = zv;
        u[i] = hn::Neg(acc_e[i]);
        hn::StoreU(hn::MulAdd(fr, u[i], hn::MulAdd(wr, z[i], acc_r[i])), d, tile.o + at);
      } else {
        u[i] = hn::Sub(zv, acc_e[i]);
        hn::StoreU(hn::MulAdd(wr, u[i], acc_r[i]), d, tile.o + at);
      }
      hn::StoreU(u[i], d, tile.u + at);
    }
    u_pending = f;
    z_pending = w;
  }
  if (u_pending == nullptr) return;
  T* s = tile.state + j;
  for (int64_t k = 0; k < tile.K; ++k, s += tile.ld_state) {
    const auto fk = hn::Set(d, u_pending[k]), wk = hn::Set(d, z_pending[k]);
    const auto ak = kOne && kDecay != TokenDecay::kNone ? hn::Set(d, tile.alpha[kDecay == TokenDecay::kChannel ? k : 0])
                                                        : hn::Zero(d);
    for (int i = 0; i < kVectors; ++i) {
      auto sv = hn::LoadU(d, s + i * lanes);
      if (kOne && kDecay != TokenDecay::kNone) sv = hn::Mul(ak, sv);
      sv = hn::MulAdd(fk, u[i], sv);
      if (kOwn) sv = hn::MulAdd(wk, z[i], sv);
      hn::StoreU(sv, d, s + i * lanes);
    }
  }
}

template <class T, TokenDecay kDecay, TokenErase kErase, bool kOwn, bool kOne>
void forward_sw128_panels(const TokenTile<T>& tile) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t kp = padded(tile.K);
  int64_t j = 0;
  for (; j + 4 * lanes <= tile.V; j += 4 * lanes) forward_sw128<T, kDecay, kErase, kOwn, kOne, 4>(tile, j, kp);
  for (; j < tile.V; j += lanes) forward_sw128<T, kDecay, kErase, kOwn, kOne, 1>(tile, j, kp);
}

template <class T, TokenDecay kDecay, TokenErase kErase, bool kOwn>
void forward_sw128_tiles(const TokenTile<T>& tile) {
  tile.rows == 1 ? forward_sw128_panels<T, kDecay, kErase, kOwn, true>(tile)
                 : forward_sw128_panels<T, kDecay, kErase, kOwn, false>(tile);
}

template <class T, TokenDecay kDecay>
void forward_erase(const TokenTile<T>& tile) {
  if (!tile.is_delta) return forward_sw128_tiles<T, kDecay, TokenErase::kNone, false>(tile);
  const bool own = tile.f != nullptr;
  if (kDecay != TokenDecay::kNone && tile.lag) {
    return own ? forward_sw128_tiles<T, kDecay, TokenErase::kLag, true>(tile)
               : forward_sw128_tiles<T, kDecay, TokenErase::kLag, false>(tile);
  }
  return own ? forward_sw128_tiles<T, kDecay, TokenErase::kDecayed, true>(tile)
             : forward_sw128_tiles<T, kDecay, TokenErase::kDecayed, false>(tile);
}

template <class T>
void token_forward(const TokenTile<T>& tile) {
  const TokenDecay decay = tile.alpha == nullptr ? TokenDecay::kNone
                           : tile.channel        ? TokenDecay::kChannel
                                                 : TokenDecay::kScalar;
  switch (decay) {
    case TokenDecay::kNone:
      return forward_erase<T, TokenDecay::kNone>(tile);
    case TokenDecay::kScalar:
      return forward_erase<T, TokenDecay::kScalar>(tile);
    case TokenDecay::kChannel:
      return forward_erase<T, TokenDecay::kChannel>(tile);
  }
}

// alpha of channel k at row t.
template <class T>
T alpha_at(const TokenTile<T>& tile, int64_t kp, int64_t t, int64_t k) {
  if (tile.alpha == nullptr) return T(1);
  return tile.channel ? tile.alpha[t * kp + k] : tile.alpha[t];
}

template <class T>
void token_backward(const TokenTileGrad<T>& grad) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const TokenTile<T>& tile = grad.in;
  const int64_t V = tile.V, K = tile.K, kp = padded(K);
  const int64_t state_size = K * V;
  const bool own = tile.f != nullptr;
  const T* f_rows = own ? tile.f : tile.w;  // what u goes along
  std::memcpy(grad.history, tile.state, sizeof(T) * static_cast<size_t>(state_size));
  for (int64_t t = 0; t < tile.rows; ++t) {
    const T* before = grad.history + t * state_size;
    T* after = grad.history + (t + 1) * state_size;
    const T* u = tile.u + t * V;
    const T* z = own ? tile.z + t * V : nullptr;
    for (int64_t k = 0; k < K; ++k) {
      const auto ak = hn::Set(d, alpha_at(tile, kp, t, k)), fk = hn::Set(d, f_rows[t * kp + k]),
                 wk = hn::Set(d, tile.w[t * kp + k]);
      for (int64_t j = 0; j < V; j += lanes) {
        auto s = hn::MulAdd(fk, hn::LoadU(d, u + j), hn::Mul(ak, hn::LoadU(d, before + k * V + j)));
        if (own) s = hn::MulAdd(wk, hn::LoadU(d, z + j), s);
        hn::StoreU(s, d, after + k * V + j);
      }
    }
  }
  for (int64_t t = tile.rows - 1; t >= 0; --t) {
    const T* before = grad.history + t * state_size;
    const T* after = grad.history + (t + 1) * state_size;
    const T* u = tile.u + t * V;
    const T* d_o = grad.d_o + t * V;
    const T* z = own ? tile.z + t * V : nullptr;
    T* dz = own ? grad.dz + t * V : nullptr;
    T* du = own ? grad.du + t * V : grad.dz + t * V;  // tied: z enters u alone
    for (int64_t j = 0; j < V; j += lanes) hn::StoreU(hn::Zero(d), d, du + j);
    for (int64_t j = 0; own && j < V; j += lanes) hn::StoreU(hn::Zero(d), d, dz + j);
    for (int64_t k = 0; k < K; ++k) {
      const auto rk = hn::Set(d, tile.r[t * kp + k]), fk = hn::Set(d, f_rows[t * kp + k]),
                 wk = hn::Set(d, tile.w[t * kp + k]);
      auto dr = hn::Zero(d), df = hn::Zero(d), dw = hn::Zero(d);
      T* ds = grad.dstate + k * V;
      for (int64_t j = 0; j < V; j += lanes) {
        const auto dov = hn::LoadU(d, d_o + j);
        const auto dsv = hn::MulAdd(rk, dov, hn::LoadU(d, ds + j));
        hn::StoreU(dsv, d, ds + j);
        dr = hn::MulAdd(hn::LoadU(d, after + k * V + j), dov, dr);
        df = hn::MulAdd(dsv, hn::LoadU(d, u + j), df);
        hn::StoreU(hn::MulAdd(fk, dsv, hn::LoadU(d, du + j)), d, du + j);
        if (!own) continue;
        dw = hn::MulAdd(dsv, hn::LoadU(d, z + j), dw);
        hn::StoreU(hn::MulAdd(wk, dsv, hn::LoadU(d, dz + j)), d, dz + j);
      }
      grad.dr[t * kp + k] = hn::GetLane(hn::SumOfLanes(d, dr));
      (own ? grad.df : grad.dw)[t * kp + k] = hn::GetLane(hn::SumOfLanes(d, df));
      if (own) grad.dw[t * kp + k] = hn::GetLane(hn::SumOfLanes(d, dw));
    }
    for (int64_t k = 0; k < K; ++k) {
      const T alpha = alpha_at(tile, kp, t, k);
      const auto ak = hn::Set(d, alpha);
      const auto ek = hn::Set(d, tile.is_delta ? tile.e[t * kp + k] : T(0));
      auto de = hn::Zero(d), dalpha = hn::Zero(d);
      T* ds = grad.dstate + k * V;
      for (int64_t j = 0; j < V; j += lanes) {
        const auto duv = hn::LoadU(d, du + j);
        const auto s = hn::LoadU(d, before + k * V + j);
        de = hn::MulAdd(s, duv, de);
        if (tile.lag) {
          const auto dsv = hn::LoadU(d, ds + j);
          dalpha = hn::MulAdd(s, dsv, dalpha);
          hn::StoreU(hn::NegMulAdd(ek, duv, hn::Mul(ak, dsv)), d, ds + j);
          continue;
        }
        const auto dsbar = hn::NegMulAdd(ek, duv, hn::LoadU(d, ds + j));
        dalpha = hn::MulAdd(s, dsbar, dalpha);
        hn::StoreU(hn::Mul(ak, dsbar), d, ds + j);
      }
      if (tile.is_delta) grad.de[t * kp + k] = -(tile.lag ? T(1) : alpha) * hn::GetLane(hn::SumOfLanes(d, de));
      if (grad.dalpha != nullptr) grad.dalpha[t * kp + k] = alpha * hn::GetLane(hn::SumOfLanes(d, dalpha));
    }
    for (int64_t k = K; k < kp; ++k) {
      grad.dr[t * kp + k] = grad.dw[t * kp + k] = 0;
      if (own) grad.df[t * kp + k] = 0;
      if (tile.is_delta) grad.de[t * kp + k] = 0;
      if (grad.dalpha != nullptr) grad.dalpha[t * kp + k] = 0;
    }
  }
}

template <class T>
const TokenKernels<T>& table_of() {
  static const TokenKernels<T> table = {&token_forward<T>, &token_backward<T>};
  return table;
}

FW_SIMD_MAKE(TokenKernels)

}  // namespace fw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw::cpu {

FW_SIMD_EXPORT(TokenKernels, token_kernels)

}  // namespace fw::cpu
#endif
