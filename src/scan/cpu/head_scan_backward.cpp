// The backward pass of one head (recurrence.md section 5): chunks in reverse, everything from R, P and products.
#include <cmath>
#include <utility>
#include <vector>

#include "scan/cpu/head_scan.h"

namespace fw::cpu {
namespace {

template <class T>
void negate_rows(const RowKernels<T>& kernels, int64_t rows, int64_t cols, const T* src, T* dst) {
  kernels.load_rows(rows, cols, {src, cols}, dst, cols, T(-1));
}

}  // namespace

// dre, dw, dz and dstate of one chunk; the stacked cotangent [dO; -P] is left in `products`. Where there is a g, what a
// token reads of its own write (the diagonal of dA) is left out of dre and dw and kept in `diag`: see
// chunk_decay_gradient.
template <class T>
void HeadScan<T>::chunk_backward(int64_t c, const Outputs<T>& d, const T* saved, bool have_state, bool have_dstate,
                                 bool need_dstate) {
  const int64_t begin = c * plan_.chunk, L = rows_of(c);
  const int64_t K = plan_.K;
  const bool is_delta = plan_.rule.is_delta(), scalar = decay_ == DecayKind::kScalar,
             channel = decay_ == DecayKind::kChannel;
  const T* residual = saved + plan_.residual_index(plan_.first_token(n_) + begin, hv_);
  const T* state = saved + plan_.state_index(n_, c, hv_);
  const T* tri = plan_.saves_triangles() ? saved + plan_.triangle_index(n_, c, hv_) : s_.tri;
  const T* tri_found = tri + triangle_block(nk_ - 1, L);  // of what the erase finds
  T* d_found = s_.dz + erase_block(L);
  T* d_o = s_.products;
  T* minus_p = s_.products + L * vp_;

  if (d.o) {
    const RowView<T> rows = d.o.rows(plan_, n_, begin, hv_);
    rk_.load_rows(L, columns_, {rows.data, rows.stride}, d_o, vp_, T(1));
  } else {
    std::memset(d_o, 0, sizeof(T) * static_cast<size_t>(L * vp_));
  }
  // Z of a key w that has nothing to do with the erase; R
  const auto values = [&](int64_t key) { return key + 1 < nk_ ? s_.z : residual; };
  // dR = A^T dO + Kc dS;  dZ = P = (I + T)^-T dR
  product(Trans::kYes, Trans::kNo, L, vp_, L, tri_found, cp_, d_o, vp_, T(0), d_found, vp_);
  const T* wc = decay_ == DecayKind::kNone ? s_.w : s_.wc;
  if (have_dstate)
    product(Trans::kNo, Trans::kNo, L, vp_, K, wc + key_block(nk_ - 1, L), kp_, s_.dstate, vp_, T(1), d_found, vp_);
  if (is_delta) {
    rk_.solve_transposed(L, tri_found + L * cp_, cp_, d_found, vp_, vp_);
    negate_rows(rk_, L, vp_, d_found, minus_p);
  }
  if (nk_ == 2) {  // dZ = A_w^T dO - T_w^T P + Kc_w dS
    product(Trans::kYes, Trans::kNo, L, vp_, nb_ * L, tri, cp_, s_.products, vp_, T(0), s_.dz, vp_);
    if (have_dstate) product(Trans::kNo, Trans::kNo, L, vp_, K, wc, kp_, s_.dstate, vp_, T(1), s_.dz, vp_);
  }
  // dA, dT = tril([dO; -P] R^T), with the decays that A and T carry
  for (int64_t key = 0; key < nk_; ++key) {
    T* dtri = s_.dtri + triangle_block(key, L);
    product(Trans::kNo, Trans::kYes, nb_ * L, L, vp_, s_.products, vp_, values(key), vp_, T(0), dtri, cp_);
    dk_.mask(L, nb_, lag_, dtri, cp_, scalar ? s_.ratio : nullptr, cp_);
    if (!splits_diagonal()) continue;
    for (int64_t i = 0; i < L; ++i) s_.diag[key * L + i] = std::exchange(dtri[i * cp_ + i], T(0));
  }

  // What reaches r and e through the state before the chunk, and w through the state after it.
  if (have_state) {
    product(Trans::kNo, Trans::kYes, nb_ * L, K, vp_, s_.products, vp_, state, vp_, T(0), s_.dre, kp_);
    if (scalar) {
      for (int64_t b = 0; b < nb_; ++b)
        dk_.scale_rows(L, kp_, b == 1 ? erase_prefix() : s_.prefix, s_.dre + b * L * kp_, kp_, s_.dre + b * L * kp_,
                       kp_);
    }
    if (channel) dk_.channel_prefix(L, nb_, kp_, 0, lag_, s_.alpha, s_.dre, L * kp_, s_.dre, L * kp_, nullptr);
  }
  if (have_dstate) {
    for (int64_t key = 0; key < nk_; ++key) {
      T* dw = s_.dw + key_block(key, L);
      product(Trans::kNo, Trans::kYes, L, K, vp_, values(key), vp_, s_.dstate, vp_, T(0), dw, kp_);
      if (scalar) dk_.scale_rows(L, kp_, s_.suffix, dw, kp_, dw, kp_);
    }
  }
  if (channel) {
    if (!have_state) std::memset(s_.dre, 0, sizeof(T) * static_cast<size_t>(nb_ * L * kp_));
    if (!have_dstate) std::memset(s_.dw, 0, sizeof(T) * static_cast<size_t>(nk_ * L * kp_));
  }
  for (int64_t key = 0; key < nk_; ++key) {
    if (channel) {
      channel_backward(key, L, have_dstate);
      continue;
    }
    const T* dtri = s_.dtri + triangle_block(key, L);
    product(Trans::kNo, Trans::kNo, nb_ * L, K, L, dtri, cp_, s_.w + key_block(key, L), kp_,
            have_state || key > 0 ? T(1) : T(0), s_.dre, kp_);
    product(Trans::kYes, Trans::kNo, L, K, nb_ * L, dtri, cp_, s_.re, kp_, have_dstate ? T(1) : T(0),
            s_.dw + key_block(key, L), kp_);
  }
  if (!need_dstate) return;

  // dS0 = Diag(total) dS + [Q; E]^T [dO; -P]
  T beta = have_dstate ? T(1) : T(0);
  const T* re = s_.re;
  if (scalar) {
    for (int64_t b = 0; b < nb_; ++b)
      dk_.scale_rows(L, vp_, b == 1 ? erase_prefix() : s_.prefix, s_.products + b * L * vp_, vp_,
                     s_.products + b * L * vp_, vp_);
    beta *= s_.prefix[L - 1];
  }
  if (channel) {
    re = s_.rebar;
    if (have_dstate) dk_.scale_rows(K, vp_, s_.total, s_.dstate, vp_, s_.dstate, vp_);
  }
  product(Trans::kYes, Trans::kNo, K, vp_, nb_ * L, re, kp_, s_.products, vp_, beta, s_.dstate, vp_);
}

// Channel decay: the adjoint of channel_key_tiles, anchors from the last to the first. dw comes in as the gradient of
// the keys at the chunk's end and moves from anchor to anchor.
template <class T>
void HeadScan<T>::channel_backward(int64_t key, int64_t L, bool have_dstate) {
  const int64_t subs = (L + kSubChunk - 1) / kSubChunk;
  const T* w = s_.w + key_block(key, L);
  const T* anchored = s_.anchored + key * kSubChunk * subs * (subs - 1) / 2 * kp_;
  const T* dtri = s_.dtri + triangle_block(key, L);
  T* dw = s_.dw + key_block(key, L);
  const int64_t last = (L - 1) / kSubChunk * kSubChunk;
  int64_t to = L - 1, rows = L;
  bool moving = have_dstate;  // dw holds something
  for (int64_t a = last; a > 0; a -= kSubChunk) {
    const int64_t n = std::min(kSubChunk, L - a);
    if (moving) dk_.anchor(a, rows, to, lag_, kp_, s_.alpha, dw, nullptr, dw);
    to = a - lag_;
    rows = a;
    moving = true;
    const T* alpha = s_.alpha + a * kp_;
    const int64_t j = a / kSubChunk;
    const T* keys = anchored + kSubChunk * j * (j - 1) / 2 * kp_;
    dk_.channel_prefix(n, nb_, kp_, 1 - lag_, lag_, alpha, s_.re + a * kp_, L * kp_, s_.local, n * kp_, nullptr);
    for (int64_t b = 0; b < nb_; ++b) {
      for (int64_t i = 0; i < n; ++i)
        std::memcpy(s_.block + (b * n + i) * a, dtri + (b * L + a + i) * cp_, sizeof(T) * static_cast<size_t>(a));
    }
    product(Trans::kYes, Trans::kNo, a, plan_.K, nb_ * n, s_.block, a, s_.local, kp_, T(1), dw, kp_);
    product(Trans::kNo, Trans::kNo, nb_ * n, plan_.K, a, s_.block, a, keys, kp_, T(0), s_.dlocal, kp_);
    dk_.channel_prefix(n, nb_, kp_, 1 - lag_, lag_, alpha, s_.dlocal, n * kp_, s_.dlocal, n * kp_, nullptr);
    for (int64_t b = 0; b < nb_; ++b) rk_.add_rows(n * kp_, s_.dlocal + b * n * kp_, s_.dre + (b * L + a) * kp_);
  }
  if (moving) dk_.anchor(0, rows, to, lag_, kp_, s_.alpha, dw, nullptr, dw);
  for (int64_t a = 0; a < L; a += kSubChunk) {
    const int64_t n = std::min(kSubChunk, L - a);
    dk_.diagonal_backward(n, nb_, lag_, kp_, s_.alpha + a * kp_, s_.re + a * kp_, L * kp_, w + a * kp_,
                          dtri + a * cp_ + a, cp_, L * cp_, s_.dre + a * kp_, L * kp_, dw + a * kp_);
  }
}

template <class T>
void HeadScan<T>::token_backward(int64_t c, const Outputs<T>& d, const T* saved) {
  const int64_t begin = c * plan_.chunk, L = rows_of(c);
  TokenTileGrad<T> grad;
  grad.in.rows = L;
  grad.in.K = plan_.K;
  grad.in.V = vp_;
  grad.in.is_delta = plan_.rule.is_delta();
  grad.in.alpha = decay_ == DecayKind::kNone ? nullptr : s_.alpha;
  grad.in.channel = decay_ == DecayKind::kChannel;
  grad.in.r = s_.re;
  grad.in.e = s_.re + L * kp_;
  grad.in.w = s_.w;
  grad.in.lag = lag_ > 0;
  std::memcpy(s_.state, saved + plan_.state_index(n_, c, hv_), sizeof(T) * static_cast<size_t>(plan_.K * vp_));
  std::memcpy(s_.z + erase_block(L), saved + plan_.residual_index(plan_.first_token(n_) + begin, hv_),
              sizeof(T) * static_cast<size_t>(L * vp_));
  grad.in.state = s_.state;
  grad.in.u = s_.z + erase_block(L);
  if (nk_ == 2) {
    grad.in.z = s_.z;
    grad.in.f = s_.w + key_block(1, L);
    grad.df = s_.dw + key_block(1, L);
    grad.du = s_.dz + erase_block(L);
  }
  grad.history = s_.history;
  if (d.o) {
    const RowView<T> rows = d.o.rows(plan_, n_, begin, hv_);
    rk_.load_rows(L, columns_, {rows.data, rows.stride}, s_.products, vp_, T(1));
  } else {
    std::memset(s_.products, 0, sizeof(T) * static_cast<size_t>(L * vp_));
  }
  grad.d_o = s_.products;
  grad.dstate = s_.dstate;
  grad.dr = s_.dre;
  grad.de = s_.dre + L * kp_;
  grad.dw = s_.dw;
  grad.dz = s_.dz;
  grad.dalpha = s_.terms;
  token_kernels<T>().backward(grad);
}

// rowsum(S (.) dS), all rows: S before chunk c and the cotangent of that state, which lies in s_.dstate.
template <class T>
double HeadScan<T>::state_gradient(int64_t c, const T* saved) {
  std::memset(s_.head, 0, sizeof(T) * static_cast<size_t>(kp_));
  rk_.row_dots(plan_.K, vp_, saved + plan_.state_index(n_, c, hv_), s_.dstate, s_.head);
  double sum = 0;
  for (int64_t k = 0; k < plan_.K; ++k) sum += static_cast<double>(s_.head[k]);
  return sum;
}

// dg of a chunk (recurrence.md 5). Its gradient with respect to the cumulative log-decay is r dr + e de - w dw a row,
// and the sum of these from any row on, plus rowsum(S_C (.) dS_C), is the gradient of that row's g. Summed from the
// chunk's start instead, where it is rowsum(S_0 (.) dS_0), nothing has to cancel where no state precedes; and the
// diagonal, which enters r dr and w dw alike, stays out. A decay of 0 cuts every path across it: the sum there is
// exactly 0. A scalar decay sums from both ends (the end's sum of state and cotangent is *tail; null: not known) and
// takes of each row the sum that less was added to. So the rows after the last one that has a cotangent get exactly 0,
// and not what rounding leaves of the others.
template <class T>
void HeadScan<T>::chunk_decay_gradient(int64_t c, int64_t L, const T* saved, bool have_state, const double* tail,
                                       const Inputs<T>& grads, bool first) {
  const int64_t begin = c * plan_.chunk;
  rk_.decay_terms(L, nb_, lag_, nk_, kp_, s_.re, s_.dre, L * kp_, s_.w, s_.dw, s_.terms);
  const T *e = s_.re + L * kp_, *de = s_.dre + L * kp_;
  const int64_t first_erase = lag_ > 0 ? plan_.K : 0;  // the first row's erase reads S_0 past every decay of the chunk
  if (decay_ == DecayKind::kChannel) {
    std::memset(s_.head, 0, sizeof(T) * static_cast<size_t>(kp_));
    if (have_state) rk_.row_dots(plan_.K, vp_, saved + plan_.state_index(n_, c, hv_), s_.dstate, s_.head);
    for (int64_t k = 0; k < (have_state ? first_erase : 0); ++k) s_.head[k] -= e[k] * de[k];
    const int64_t head = head_of(grads.g);
    rk_.channel_dg(L, plan_.K, kp_, s_.terms, s_.alpha, s_.head, grads.g.rows(plan_, n_, begin, head),
                   !first && grads.g.heads != plan_.HV);
    return;
  }
  std::vector<double> sums(static_cast<size_t>(L)), after(static_cast<size_t>(L)), added_after(static_cast<size_t>(L));
  rk_.row_sums(L, kp_, s_.terms, sums.data());
  if (tail != nullptr) {
    double sum = *tail, added = std::abs(sum);
    for (size_t i = sums.size(); i-- > 0;) {
      after[i] = sum += sums[i];
      added_after[i] = added += std::abs(sums[i]);
      if (s_.alpha[i] == T(0)) sum = added = 0;
    }
  }
  double sum = have_state ? state_gradient(c, saved) : 0;
  for (int64_t k = 0; k < (have_state ? first_erase : 0); ++k)
    sum -= static_cast<double>(e[k]) * static_cast<double>(de[k]);
  double added = std::abs(sum);
  const RowView<T> dg = grads.g.rows(plan_, n_, begin, hv_);
  for (int64_t row = 0; row < L; ++row) {
    const auto i = static_cast<size_t>(row);
    if (s_.alpha[row] == T(0)) sum = added = 0;
    *dg.row(row) = static_cast<T>(tail != nullptr && added_after[i] < added ? after[i] : sum);
    sum -= sums[i];
    added += std::abs(sums[i]);
  }
}

template <class T>
void HeadScan<T>::token_decay_gradient(int64_t begin, int64_t L, const Inputs<T>& grads, bool first) {
  if (decay_ == DecayKind::kChannel) {
    const RowView<T> dg = grads.g.rows(plan_, n_, begin, head_of(grads.g));
    const bool add = !first && grads.g.heads != plan_.HV;
    for (int64_t i = 0; i < L; ++i) {
      for (int64_t k = 0; k < plan_.K; ++k) dg.row(i)[k] = s_.terms[i * kp_ + k] + (add ? dg.row(i)[k] : T(0));
    }
    return;
  }
  std::vector<double> sums(static_cast<size_t>(L));
  rk_.row_sums(L, kp_, s_.terms, sums.data());
  const RowView<T> dg = grads.g.rows(plan_, n_, begin, hv_);
  for (int64_t i = 0; i < L; ++i) *dg.row(i) = static_cast<T>(sums[static_cast<size_t>(i)]);
}

template <class T>
void HeadScan<T>::backward(const Outputs<T>& d, const Inputs<T>& grads, const T* saved,
                           const PrecondGradRows<T>& precond, bool first) {
  const bool token = plan_.token_backward(n_);
  bool have_dstate = static_cast<bool>(d.final_state);
  if (have_dstate) {
    load_state(d.final_state, n_, s_.dstate);
  } else {
    std::memset(s_.dstate, 0, sizeof(T) * static_cast<size_t>(plan_.K * vp_));
  }
  const bool want_dg = plan_.rule.uses_g() && grads.g;
  for (int64_t c = plan_.chunks(n_) - 1; c >= 0; --c) {
    const int64_t begin = c * plan_.chunk, L = rows_of(c);
    load_streams(begin, L, nk_ == 2);
    if (token) {
      token_backward(c, d, saved);
      if (want_dg) token_decay_gradient(begin, L, grads, first);
    } else {
      decay_tiles(L, !plan_.saves_triangles());
      const bool have_state = c > 0 || in_.initial_state, scalar = decay_ == DecayKind::kScalar;
      const bool tail_known = !have_dstate || c + 1 < plan_.chunks(n_);
      const double tail = want_dg && scalar && have_dstate && tail_known ? state_gradient(c + 1, saved) : 0;
      chunk_backward(c, d, saved, have_state, have_dstate, c > 0 || grads.initial_state || (have_state && want_dg));
      if (want_dg) chunk_decay_gradient(c, L, saved, have_state, tail_known ? &tail : nullptr, grads, first);
      for (int64_t key = 0; splits_diagonal() && key < nk_; ++key) {
        rk_.add_diagonal(L, kp_, s_.diag + key * L, s_.re, s_.w + key_block(key, L), s_.dre, s_.dw + key_block(key, L));
      }
    }
    have_dstate = true;

    FrontTileGrad<T> tile;
    tile.in = front_tile(begin, L);
    tile.dr = s_.dre;
    tile.de = plan_.rule.is_delta() ? s_.dre + L * kp_ : nullptr;
    tile.dw = s_.dw;
    if (nk_ == 2) tile.df = s_.dw + key_block(1, L);
    tile.dz = s_.dz;
    tile.dq = grads.q.rows(plan_, n_, begin, h_);
    tile.dk = grads.k.rows(plan_, n_, begin, h_);
    // after what the decay has written there
    if (!plan_.rule.uses_k()) tile.dkey_g = grads.g.rows(plan_, n_, begin, h_);
    tile.dv = grads.v.rows(plan_, n_, begin, hv_);
    tile.dp = grads.erase_key.rows(plan_, n_, begin, h_);
    tile.df_out = grads.erase_write.rows(plan_, n_, begin, h_);
    for_all_scalars([&](RowView<T>& to, const TokenTensor<T>& from) { to = from.rows(plan_, n_, begin, hv_); },
                    tile.dscalars, grads);
    tile.derase_gate = grads.erase_gate.rows(plan_, n_, begin, head_of(grads.erase_gate));
    tile.dwrite_gate = grads.write_gate.rows(plan_, n_, begin, hv_);
    if (precond.dm != nullptr) tile.dm = {precond.dm + precond_token(begin) * kp_, kp_};
    if (precond.dg != nullptr) tile.dlog_alpha_p = {precond.dg + precond_token(begin), 1};
    if (precond.dbeta != nullptr) tile.dbeta_p = {precond.dbeta + precond_token(begin), 1};
    tile.add_key_head = !first;
    tile.add_erase_gate = !first && grads.erase_gate.heads != plan_.HV;
    tile.add_m = !first;
    front_.backward(tile);
  }
  if (grads.initial_state) store_state(s_.dstate, grads.initial_state, n_);
}

template void HeadScan<float>::backward(const Outputs<float>&, const Inputs<float>&, const float*,
                                        const PrecondGradRows<float>&, bool);
template void HeadScan<double>::backward(const Outputs<double>&, const Inputs<double>&, const double*,
                                         const PrecondGradRows<double>&, bool);

}  // namespace fw::cpu
