// The front on tiles: coefficients from rule/front.h, then elementwise. See kernels.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_front.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <vector>

#include "rule/front.h"
#include "scan/cpu/kernels.h"
#include "scan/cpu/rows-inl.h"
#include "scan/cpu/simd_table.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// One row of the caller's tensors, readable up to the padded length.
template <class T>
struct RawRow {
  const T *q, *k, *b;
  const T *m_r, *m_w;  // the preconditioner, where it acts
};

template <class T>
class RowBuffers {
 public:
  explicit RowBuffers(const FrontTile<T>& tile) : tile_(tile), kp_(padded(tile.K)), vp_(padded(tile.V)), q_(kp_), k_(kp_), b_(kp_), m_(kp_), v_(vp_), c_(vp_) {}

  RawRow<T> raw(int64_t i) {
    const T* m = row_of(tile_.m, i, tile_.K, m_);
    return {row_of(tile_.q, i, tile_.K, q_), row_of(tile_.k, i, tile_.K, k_), row_of(tile_.erase_gate, i, tile_.K, b_),
            tile_.rule->preconditions_read() ? m : nullptr, tile_.rule->preconditions_write() ? m : nullptr};
  }
  const T* v(int64_t i) { return row_of(tile_.v, i, tile_.V, v_); }
  const T* c(int64_t i) { return row_of(tile_.write_gate, i, tile_.V, c_); }

  FrontScalars<T> scalars(int64_t i, const RawRow<T>& x) const {
    FrontScalars<T> s;
    if (tile_.rule->q_norm == Norm::kL2) s.q2 = row_dot(kp_, x.q, x.q);
    if (tile_.rule->k_norm == Norm::kL2 || tile_.rule->gain_uses_key_norm()) s.k2 = row_dot(kp_, x.k, x.k);
    if (tile_.beta) s.beta = *tile_.beta.row(i);
    if (tile_.lambda) s.lambda = *tile_.lambda.row(i);
    return s;
  }

  int64_t kp() const { return kp_; }
  int64_t vp() const { return vp_; }

 private:
  const T* row_of(const RowView<const T>& view, int64_t i, int64_t n, PadBuffer<T>& buffer) { return view ? buffer.load(view.row(i), n) : nullptr; }

  const FrontTile<T>& tile_;
  int64_t kp_, vp_;
  PadBuffer<T> q_, k_, b_, m_, v_, c_;
};

template <class T>
void front_forward(const FrontTile<T>& tile) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  RowBuffers<T> rows(tile);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const RawRow<T> x = rows.raw(i);
    const FrontCoefs<T> c = front_coefs(*tile.rule, tile.scale, rows.scalars(i, x));
    const auto r_q = hn::Set(d, c.r_q), e_k = hn::Set(d, c.e_k), e_q = hn::Set(d, c.e_q), w_k = hn::Set(d, c.w_k);
    T* r = tile.r + i * rows.kp();
    T* w = tile.w + i * rows.kp();
    T* e = tile.e != nullptr ? tile.e + i * rows.kp() : nullptr;
    for (int64_t j = 0; j < rows.kp(); j += lanes) {
      const auto q = hn::LoadU(d, x.q + j), k = hn::LoadU(d, x.k + j);
      auto rv = hn::Mul(r_q, q);
      if (x.m_r != nullptr) rv = hn::Mul(rv, hn::LoadU(d, x.m_r + j));
      hn::StoreU(rv, d, r + j);
      auto wv = hn::Mul(w_k, k);
      if (x.m_w != nullptr) wv = hn::Mul(wv, hn::LoadU(d, x.m_w + j));
      hn::StoreU(wv, d, w + j);
      if (e == nullptr) continue;
      auto ev = hn::MulAdd(e_q, q, hn::Mul(e_k, k));
      if (x.b != nullptr) ev = hn::Mul(ev, hn::LoadU(d, x.b + j));
      hn::StoreU(ev, d, e + j);
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

template <class T>
void front_backward(const FrontTileGrad<T>& tile) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const Rule& rule = *tile.in.rule;
  RowBuffers<T> rows(tile.in);
  const int64_t kp = rows.kp(), vp = rows.vp();
  PadBuffer<T> dq_row(kp), dk_row(kp), db_row(kp), dm_row(kp), dv_row(vp), dc_row(vp);
  const auto one = hn::Set(d, T(1));
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

    // First the gradients of the five coefficients.
    auto sum_rq = hn::Zero(d), sum_ek = hn::Zero(d), sum_eq = hn::Zero(d), sum_wk = hn::Zero(d), sum_zv = hn::Zero(d);
    for (int64_t j = 0; j < kp; j += lanes) {
      const auto q = hn::LoadU(d, x.q + j), k = hn::LoadU(d, x.k + j);
      const auto m_r = x.m_r != nullptr ? hn::LoadU(d, x.m_r + j) : one;
      const auto m_w = x.m_w != nullptr ? hn::LoadU(d, x.m_w + j) : one;
      sum_rq = hn::MulAdd(hn::Mul(m_r, q), hn::LoadU(d, dr + j), sum_rq);
      sum_wk = hn::MulAdd(hn::Mul(m_w, k), hn::LoadU(d, dw + j), sum_wk);
      if (de == nullptr) continue;
      const auto bde = hn::Mul(x.b != nullptr ? hn::LoadU(d, x.b + j) : one, hn::LoadU(d, de + j));
      sum_ek = hn::MulAdd(k, bde, sum_ek);
      sum_eq = hn::MulAdd(q, bde, sum_eq);
    }
    for (int64_t j = 0; j < vp; j += lanes) {
      const auto cdz = hn::Mul(gate != nullptr ? hn::LoadU(d, gate + j) : one, hn::LoadU(d, dz + j));
      sum_zv = hn::MulAdd(hn::LoadU(d, v + j), cdz, sum_zv);
    }
    FrontCoefs<T> dc;
    dc.r_q = hn::GetLane(hn::SumOfLanes(d, sum_rq));
    dc.e_k = hn::GetLane(hn::SumOfLanes(d, sum_ek));
    dc.e_q = hn::GetLane(hn::SumOfLanes(d, sum_eq));
    dc.w_k = hn::GetLane(hn::SumOfLanes(d, sum_wk));
    dc.z_v = hn::GetLane(hn::SumOfLanes(d, sum_zv));
    const FrontScalars<T> ds = front_coefs_vjp(rule, tile.in.scale, s, dc);
    if (tile.dbeta) *tile.dbeta.row(i) = ds.beta;
    if (tile.dlambda) *tile.dlambda.row(i) = ds.lambda;

    // Then the rows.
    const auto r_q = hn::Set(d, c.r_q), e_k = hn::Set(d, c.e_k), e_q = hn::Set(d, c.e_q), w_k = hn::Set(d, c.w_k);
    const auto two_dq2 = hn::Set(d, T(2) * ds.q2), two_dk2 = hn::Set(d, T(2) * ds.k2);
    T* dq_out = dq_row.open(tile.dq, i, tile.in.K, tile.add_qk);
    T* dk_out = dk_row.open(tile.dk, i, tile.in.K, tile.add_qk);
    T* db_out = db_row.open(tile.derase_gate, i, tile.in.K, tile.add_erase_gate);
    T* dm_out = dm_row.open(tile.dm, i, tile.in.K, tile.add_m);
    for (int64_t j = 0; j < kp; j += lanes) {
      const auto q = hn::LoadU(d, x.q + j), k = hn::LoadU(d, x.k + j);
      auto mdr = hn::LoadU(d, dr + j), mdw = hn::LoadU(d, dw + j);
      if (dm_out != nullptr) {
        store_or_add(d, x.m_r != nullptr ? hn::Mul(hn::Mul(mdr, r_q), q) : hn::Mul(hn::Mul(mdw, w_k), k), dm_out + j, tile.add_m);
      }
      if (x.m_r != nullptr) mdr = hn::Mul(mdr, hn::LoadU(d, x.m_r + j));
      if (x.m_w != nullptr) mdw = hn::Mul(mdw, hn::LoadU(d, x.m_w + j));
      auto dqv = hn::MulAdd(r_q, mdr, hn::Mul(two_dq2, q));
      auto dkv = hn::MulAdd(w_k, mdw, hn::Mul(two_dk2, k));
      if (de != nullptr) {
        auto bde = hn::LoadU(d, de + j);
        if (db_out != nullptr) store_or_add(d, hn::Mul(bde, hn::MulAdd(e_q, q, hn::Mul(e_k, k))), db_out + j, tile.add_erase_gate);
        if (x.b != nullptr) bde = hn::Mul(bde, hn::LoadU(d, x.b + j));
        dqv = hn::MulAdd(e_q, bde, dqv);
        dkv = hn::MulAdd(e_k, bde, dkv);
      }
      if (dq_out != nullptr) store_or_add(d, dqv, dq_out + j, tile.add_qk);
      if (dk_out != nullptr) store_or_add(d, dkv, dk_out + j, tile.add_qk);
    }
    dq_row.close();
    dk_row.close();
    db_row.close();
    dm_row.close();

    const auto z_v = hn::Set(d, c.z_v);
    T* dv_out = dv_row.open(tile.dv, i, tile.in.V, false);
    T* dc_out = dc_row.open(tile.dwrite_gate, i, tile.in.V, false);
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
