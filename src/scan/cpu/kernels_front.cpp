// The front on tiles: coefficients from rule/front.h, then elementwise. See kernels.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_front.cpp"
// The per-target includes must come after foreach_target.h.
// clang-format off
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include <cmath>
#include <vector>

#include "rule/front.h"
#include "scan/cpu/kernels.h"
#include "scan/cpu/rows-inl.h"
#include "scan/cpu/simd_table.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#define FW_ELEMENT HWY_INLINE
#define FW_ELEMENTS_OF_THE_FRONT
#include "rule/elementwise.def"
#undef FW_ELEMENTS_OF_THE_FRONT
#undef FW_ELEMENT

// The arithmetic of vectors of channels.
struct Lanes {
  template <class V>
  static HWY_INLINE V mul_add(V a, V b, V c) {
    return hn::MulAdd(a, b, c);
  }
};

// One row of the caller's tensors, readable up to the padded length; null: absent.
template <class T>
struct RawRow {
  const T *q, *k, *p, *f;
  const T* b;          // the channel gate of the erase key
  const T* m;          // the preconditioner
  const T *m_r, *m_w;  // the same, where it acts
};

template <class T>
class RowBuffers {
 public:
  explicit RowBuffers(const FrontTile<T>& tile)
      : tile_(tile),
        rule_(*tile.rule),
        kp_(padded(tile.K)),
        vp_(padded(tile.V)),
        q_(kp_),
        k_(kp_),
        g_(kp_),
        decay_key_(tile.key_g ? static_cast<size_t>(kp_) : 0),
        p_(kp_),
        f_(kp_),
        b_(kp_),
        m_(kp_),
        v_(vp_),
        c_(vp_),
        all_(padded(tile.V_all)) {}

  RawRow<T> raw(int64_t i) {
    RawRow<T> x;
    x.q = row_of(tile_.q, i, tile_.K, q_);
    x.k = tile_.key_g ? decay_key(g_.load(tile_.key_g.row(i), tile_.K)) : row_of(tile_.k, i, tile_.K, k_);
    x.p = row_of(tile_.p, i, tile_.K, p_);
    x.f = row_of(tile_.f, i, tile_.K, f_);
    x.b = rule_.erase == Gate::kChannel ? row_of(tile_.erase_gate, i, tile_.K, b_) : nullptr;
    x.m = row_of(tile_.m, i, tile_.K, m_);
    x.m_r = rule_.preconditions_read() ? x.m : nullptr;
    x.m_w = rule_.preconditions_write() ? x.m : nullptr;
    return x;
  }
  const T* v(int64_t i) { return row_of(tile_.v, i, tile_.V, v_); }
  const T* c(int64_t i) { return rule_.write == Gate::kChannel ? row_of(tile_.write_gate, i, tile_.V, c_) : nullptr; }

  FrontScalars<T> scalars(int64_t i, const RawRow<T>& x) {
    FrontScalars<T> s;
    if (rule_.q_norm == Norm::kL2) s.q2 = row_dot(kp_, x.q, x.q);
    if (rule_.k_norm == Norm::kL2 || rule_.gain_uses_key_norm()) s.k2 = row_dot(kp_, x.k, x.k);
    if (x.p != nullptr && rule_.k_norm == Norm::kL2) s.p2 = row_dot(kp_, x.p, x.p);
    if (rule_.uses_key_form()) s.kmk = x.m != nullptr ? weighted_square(x.k, x.m) : row_dot(kp_, x.k, x.k);
    load_gates(
        rule_, static_cast<bool>(tile_.precond_g), s, [i](const RowView<const T>& rows) { return *rows.row(i); },
        tile_);
    if (tile_.erase_gate && rule_.erase == Gate::kAveraged)
      s.erase = mean(row_of(tile_.erase_gate, i, tile_.K, b_), kp_, tile_.K);
    if (tile_.write_gate_all)
      s.write = mean(row_of(tile_.write_gate_all, i, tile_.V_all, all_), padded(tile_.V_all), tile_.V_all);
    return s;
  }

  int64_t kp() const { return kp_; }
  int64_t vp() const { return vp_; }

 private:
  const T* row_of(const RowView<const T>& view, int64_t i, int64_t n, PadBuffer<T>& buffer) {
    return view ? buffer.load(view.row(i), n) : nullptr;
  }

  // 1 - exp(g), with all its digits where g is near 0.
  const T* decay_key(const T* g) {
    const hn::ScalableTag<T> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    for (int64_t j = 0; j < kp_; j += lanes)
      hn::StoreU(hn::Neg(hn::Expm1(d, hn::Max(hn::Set(d, kLowestLog<T>), hn::LoadU(d, g + j)))), d, &decay_key_[j]);
    return decay_key_.data();
  }

  // sum m k^2
  T weighted_square(const T* k, const T* m) const {
    const hn::ScalableTag<T> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j < kp_; j += lanes) {
      const auto kv = hn::LoadU(d, k + j);
      sum = hn::MulAdd(hn::LoadU(d, m + j), hn::Mul(kv, kv), sum);
    }
    return hn::GetLane(hn::SumOfLanes(d, sum));
  }

  // Of n values; the padding is zero.
  static T mean(const T* x, int64_t padded_n, int64_t n) {
    const hn::ScalableTag<T> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j < padded_n; j += lanes) sum = hn::Add(sum, hn::LoadU(d, x + j));
    return hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<T>(n);
  }

  const FrontTile<T>& tile_;
  const Rule& rule_;
  int64_t kp_, vp_;
  PadBuffer<T> q_, k_, g_;
  std::vector<T> decay_key_;
  PadBuffer<T> p_, f_, b_, m_, v_, c_, all_;
};

template <class T>
void front_forward(const FrontTile<T>& tile) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  RowBuffers<T> rows(tile);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const RawRow<T> x = rows.raw(i);
    const FrontScalars<T> numbers = rows.scalars(i, x);
    const FrontCoefs<T> c = front_coefs(*tile.rule, tile.scale, numbers);
    const auto r_q = hn::Set(d, c.r_q), r_k = hn::Set(d, c.r_k), e_k = hn::Set(d, c.e_k), e_q = hn::Set(d, c.e_q),
               e_p = hn::Set(d, c.e_p);
    const auto w_k = hn::Set(d, c.w_k);
    T* r = tile.r + i * rows.kp();
    T* w = tile.w + i * rows.kp();
    T* e = tile.e != nullptr ? tile.e + i * rows.kp() : nullptr;
    for (int64_t j = 0; j < rows.kp(); j += lanes) {
      const auto q = hn::LoadU(d, x.q + j), k = hn::LoadU(d, x.k + j);
      auto rv = FrontElements<Lanes>::read(r_q, r_k, q, k);
      if (x.m_r != nullptr) rv = hn::Mul(rv, hn::LoadU(d, x.m_r + j));
      hn::StoreU(rv, d, r + j);
      auto wv = hn::Mul(w_k, k);
      if (x.m_w != nullptr) wv = hn::Mul(wv, hn::LoadU(d, x.m_w + j));
      hn::StoreU(wv, d, w + j);
      if (e == nullptr) continue;
      auto ev = FrontElements<Lanes>::erase(e_k, e_q, k, q);
      if (x.p != nullptr) ev = FrontElements<Lanes>::with_own_key(ev, e_p, hn::LoadU(d, x.p + j));
      if (x.b != nullptr) ev = hn::Mul(ev, hn::LoadU(d, x.b + j));
      hn::StoreU(ev, d, e + j);
    }
    if (x.f != nullptr) {
      const auto f_f = hn::Set(d, erase_write_factor(*tile.rule, numbers));
      for (int64_t j = 0; j < rows.kp(); j += lanes)
        hn::StoreU(hn::Mul(f_f, hn::LoadU(d, x.f + j)), d, tile.f_out + i * rows.kp() + j);
    }
    if (tile.z == nullptr) continue;
    const T* v = rows.v(i);
    const T* gate = rows.c(i);
    T* z = tile.z + i * rows.vp();
    const auto z_v = hn::Set(d, c.z_v);
    for (int64_t j = 0; j < rows.vp(); j += lanes) {
      auto zv = hn::Mul(z_v, hn::LoadU(d, v + j));
      if (gate != nullptr) zv = hn::Mul(zv, hn::LoadU(d, gate + j));
      hn::StoreU(zv, d, z + j);
    }
  }
}

// Gradients of the seven coefficients of row i, from those of the streams.
template <class T>
FrontCoefs<T> coefficient_gradients(const FrontTileGrad<T>& tile, int64_t i, const RawRow<T>& x, const T* v,
                                    const T* gate, int64_t kp, int64_t vp) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* dr = tile.dr + i * kp;
  const T* dw = tile.dw + i * kp;
  const T* de = tile.de != nullptr ? tile.de + i * kp : nullptr;
  const T* dz = tile.dz + i * vp;
  const auto one = hn::Set(d, T(1));
  const bool corrected = tile.in.rule->uses_read_correction();
  auto sum_rq = hn::Zero(d), sum_rk = hn::Zero(d), sum_ek = hn::Zero(d), sum_eq = hn::Zero(d), sum_ep = hn::Zero(d),
       sum_wk = hn::Zero(d), sum_zv = hn::Zero(d);
  for (int64_t j = 0; j < kp; j += lanes) {
    const auto q = hn::LoadU(d, x.q + j), k = hn::LoadU(d, x.k + j);
    const auto mdr = hn::Mul(x.m_r != nullptr ? hn::LoadU(d, x.m_r + j) : one, hn::LoadU(d, dr + j));
    const auto m_w = x.m_w != nullptr ? hn::LoadU(d, x.m_w + j) : one;
    sum_rq = hn::MulAdd(q, mdr, sum_rq);
    if (corrected) sum_rk = hn::MulAdd(k, mdr, sum_rk);
    sum_wk = hn::MulAdd(hn::Mul(m_w, k), hn::LoadU(d, dw + j), sum_wk);
    if (de == nullptr) continue;
    const auto bde = hn::Mul(x.b != nullptr ? hn::LoadU(d, x.b + j) : one, hn::LoadU(d, de + j));
    sum_ek = hn::MulAdd(k, bde, sum_ek);
    sum_eq = hn::MulAdd(q, bde, sum_eq);
    if (x.p != nullptr) sum_ep = hn::MulAdd(hn::LoadU(d, x.p + j), bde, sum_ep);
  }
  for (int64_t j = 0; j < vp; j += lanes) {
    const auto cdz = hn::Mul(gate != nullptr ? hn::LoadU(d, gate + j) : one, hn::LoadU(d, dz + j));
    sum_zv = hn::MulAdd(hn::LoadU(d, v + j), cdz, sum_zv);
  }
  FrontCoefs<T> dc;
  dc.r_q = hn::GetLane(hn::SumOfLanes(d, sum_rq));
  dc.r_k = hn::GetLane(hn::SumOfLanes(d, sum_rk));
  dc.e_k = hn::GetLane(hn::SumOfLanes(d, sum_ek));
  dc.e_q = hn::GetLane(hn::SumOfLanes(d, sum_eq));
  dc.e_p = hn::GetLane(hn::SumOfLanes(d, sum_ep));
  dc.w_k = hn::GetLane(hn::SumOfLanes(d, sum_wk));
  dc.z_v = hn::GetLane(hn::SumOfLanes(d, sum_zv));
  return dc;
}

// Row i of a gradient whose n values are all the same: those of a gate that was averaged.
template <class T>
void store_mean_gradient(const RowView<T>& view, int64_t i, int64_t n, T sum, bool add) {
  T* row = view.row(i);
  const T each = sum / static_cast<T>(n);
  for (int64_t j = 0; j < n; ++j) row[j] = each + (add ? row[j] : T(0));
}

template <class T>
void store_scalar_gradients(const FrontTileGrad<T>& tile, int64_t i, const FrontScalars<T>& x,
                            const FrontScalars<T>& dx) {
  const Rule& rule = *tile.in.rule;
  for_all_scalars(
      [i](const RowView<T>& to, T gradient) {
        if (to) *to.row(i) = gradient;
      },
      tile.dscalars, dx);
  if (tile.derase_gate && rule.erase == Gate::kScalar) *tile.derase_gate.row(i) = dx.erase;
  if (tile.derase_gate && rule.erase == Gate::kAveraged)
    store_mean_gradient(tile.derase_gate, i, tile.in.K, dx.erase, tile.add_erase_gate);
  if (tile.dwrite_gate && rule.write == Gate::kScalar) *tile.dwrite_gate.row(i) = dx.write;
  if (tile.dwrite_gate && rule.write == Gate::kAveraged)
    store_mean_gradient(tile.dwrite_gate, i, tile.in.V, dx.write, false);
  if (tile.dlog_alpha_p) *tile.dlog_alpha_p.row(i) += dx.alpha_p * x.alpha_p;
  if (tile.dbeta_p) *tile.dbeta_p.row(i) += dx.beta_p;
}

template <class T>
void front_backward(const FrontTileGrad<T>& tile) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const Rule& rule = *tile.in.rule;
  RowBuffers<T> rows(tile.in);
  const int64_t kp = rows.kp(), vp = rows.vp();
  PadBuffer<T> dq_row(kp), dk_row(kp), dg_row(kp), dp_row(kp), df_row(kp), db_row(kp), dm_row(kp), dv_row(vp),
      dc_row(vp);
  const RowView<T> no_rows;
  const RowView<T>& db_rows = rule.erase == Gate::kChannel ? tile.derase_gate : no_rows;
  const RowView<T>& dc_rows = rule.write == Gate::kChannel ? tile.dwrite_gate : no_rows;
  const auto zero = hn::Zero(d), one = hn::Set(d, T(1));
  for (int64_t i = 0; i < tile.in.rows; ++i) {
    const RawRow<T> x = rows.raw(i);
    const T* v = rows.v(i);
    const T* gate = rows.c(i);
    const T* dr = tile.dr + i * kp;
    const T* dw = tile.dw + i * kp;
    const T* de = tile.de != nullptr ? tile.de + i * kp : nullptr;
    const T* dz = tile.dz + i * vp;
    const FrontScalars<T> s = rows.scalars(i, x);
    const FrontCoefs<T> c = front_coefs(rule, tile.in.scale, s);
    const T* df = tile.df != nullptr ? tile.df + i * kp : nullptr;
    const FrontScalars<T> ds =
        front_coefs_vjp(rule, tile.in.scale, s, coefficient_gradients(tile, i, x, v, gate, kp, vp),
                        df != nullptr ? row_dot(kp, x.f, df) : T(0));
    store_scalar_gradients(tile, i, s, ds);

    const auto r_q = hn::Set(d, c.r_q), r_k = hn::Set(d, c.r_k), e_k = hn::Set(d, c.e_k), e_q = hn::Set(d, c.e_q),
               e_p = hn::Set(d, c.e_p);
    const auto w_k = hn::Set(d, c.w_k);
    const auto two_dq2 = hn::Set(d, T(2) * ds.q2), two_dk2 = hn::Set(d, T(2) * ds.k2),
               two_dp2 = hn::Set(d, T(2) * ds.p2), dkmk = hn::Set(d, ds.kmk);
    const auto two_dkmk = hn::Add(dkmk, dkmk);
    const bool has_kmk = rule.uses_key_form(), corrected = rule.uses_read_correction();
    T* dq_out = dq_row.open(tile.dq, i, tile.in.K, tile.add_key_head);
    T* dk_out = dk_row.open(tile.dk, i, tile.in.K, tile.add_key_head);
    T* dg_out = dg_row.open(tile.dkey_g, i, tile.in.K, true);
    T* dp_out = dp_row.open(tile.dp, i, tile.in.K, tile.add_key_head);
    T* db_out = db_row.open(db_rows, i, tile.in.K, tile.add_erase_gate);
    T* dm_out = dm_row.open(tile.dm, i, tile.in.K, tile.add_m);
    for (int64_t j = 0; j < kp; j += lanes) {
      const auto q = hn::LoadU(d, x.q + j), k = hn::LoadU(d, x.k + j);
      auto mdr = hn::LoadU(d, dr + j), mdw = hn::LoadU(d, dw + j);
      if (dm_out != nullptr) {
        auto dm =
            x.m_r != nullptr ? hn::Mul(mdr, FrontElements<Lanes>::read(r_q, r_k, q, k)) : hn::Mul(hn::Mul(mdw, w_k), k);
        if (has_kmk) dm = hn::MulAdd(hn::Mul(dkmk, k), k, dm);
        store_or_add(d, dm, dm_out + j, tile.add_m);
      }
      if (x.m_r != nullptr) mdr = hn::Mul(mdr, hn::LoadU(d, x.m_r + j));
      if (x.m_w != nullptr) mdw = hn::Mul(mdw, hn::LoadU(d, x.m_w + j));
      auto dqv = hn::MulAdd(r_q, mdr, hn::Mul(two_dq2, q));
      auto dkv = hn::MulAdd(w_k, mdw, hn::Mul(two_dk2, k));
      if (corrected) dkv = hn::MulAdd(r_k, mdr, dkv);
      if (has_kmk) dkv = hn::MulAdd(two_dkmk, x.m != nullptr ? hn::Mul(hn::LoadU(d, x.m + j), k) : k, dkv);
      auto bde = zero;
      if (de != nullptr) {
        bde = hn::LoadU(d, de + j);
        if (db_out != nullptr) {
          auto key = FrontElements<Lanes>::erase(e_k, e_q, k, q);
          if (x.p != nullptr) key = FrontElements<Lanes>::with_own_key(key, e_p, hn::LoadU(d, x.p + j));
          store_or_add(d, hn::Mul(bde, key), db_out + j, tile.add_erase_gate);
        }
        if (x.b != nullptr) bde = hn::Mul(bde, hn::LoadU(d, x.b + j));
        dqv = hn::MulAdd(e_q, bde, dqv);
        dkv = hn::MulAdd(e_k, bde, dkv);
      }
      if (dq_out != nullptr) store_or_add(d, dqv, dq_out + j, tile.add_key_head);
      if (dk_out != nullptr) store_or_add(d, dkv, dk_out + j, tile.add_key_head);
      // dk / dg = -exp(g) = k - 1
      if (dg_out != nullptr) store_or_add(d, hn::Mul(hn::Sub(k, one), dkv), dg_out + j, true);
      if (dp_out != nullptr)
        store_or_add(d, hn::MulAdd(e_p, bde, hn::Mul(two_dp2, hn::LoadU(d, x.p + j))), dp_out + j, tile.add_key_head);
    }
    if (T* df_out = df != nullptr ? df_row.open(tile.df_out, i, tile.in.K, tile.add_key_head) : nullptr;
        df_out != nullptr) {
      const auto f_f = hn::Set(d, erase_write_factor(rule, s));
      for (int64_t j = 0; j < kp; j += lanes)
        store_or_add(d, hn::Mul(f_f, hn::LoadU(d, df + j)), df_out + j, tile.add_key_head);
      df_row.close();
    }
    dq_row.close();
    dk_row.close();
    dg_row.close();
    dp_row.close();
    db_row.close();
    dm_row.close();

    const auto z_v = hn::Set(d, c.z_v);
    T* dv_out = dv_row.open(tile.dv, i, tile.in.V, false);
    T* dc_out = dc_row.open(dc_rows, i, tile.in.V, false);
    for (int64_t j = 0; j < vp; j += lanes) {
      const auto zdz = hn::Mul(z_v, hn::LoadU(d, dz + j));
      if (dv_out != nullptr) hn::StoreU(gate != nullptr ? hn::Mul(zdz, hn::LoadU(d, gate + j)) : zdz, d, dv_out + j);
      if (dc_out != nullptr) hn::StoreU(hn::Mul(zdz, hn::LoadU(d, v + j)), d, dc_out + j);
    }
    dv_row.close();
    dc_row.close();
  }
}

template <class T>
const FrontKernels<T>& table_of() {
  static const FrontKernels<T> table = {&front_forward<T>, &front_backward<T>};
  return table;
}

FW_SIMD_MAKE(FrontKernels)

}  // namespace fw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw::cpu {

FW_SIMD_EXPORT(FrontKernels, front_kernels)

}  // namespace fw::cpu
#endif
