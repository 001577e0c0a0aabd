// Streams, decay tiles and the forward pass of one head.
#include "scan/cpu/head_scan.h"

#include <cmath>
#include <type_traits>

#include "base/bf16_gemm.h"
#include "rule/decay.h"

namespace fw::cpu {

template <class T>
HeadScan<T>::HeadScan(const Plan& plan, const Inputs<T>& in, HeadScratch<T>& scratch, const T* m, int64_t n, int64_t hv,
                      int64_t column0, int64_t columns, RowCopies<T>* copies)
    : plan_(plan),
      in_(in),
      s_(scratch),
      m_(m),
      copies_(copies),
      n_(n),
      hv_(hv),
      h_(hv / plan.group()),
      length_(plan.length(n)),
      slot_(plan.slots.start(n)),
      end_(plan.slots.tokens != nullptr ? Slots::kNone : plan.slots.end(n)),
      column0_(column0),
      columns_(columns),
      kp_(padded(plan.K)),
      vp_(padded(columns)),
      cp_(padded(plan.chunk)),
      nb_(plan.rule.is_delta() ? 2 : 1),
      nk_(plan.keys()),
      lag_(plan.rule.erases_before_decay() ? 1 : 0),
      decay_(plan.decay_kind()),
      front_(front_kernels<T>()),
      dk_(decay_kernels<T>()),
      rk_(row_kernels<T>()) {}

namespace {

// The rows of an operand as bf16, without gaps.
const Bf16* rounded(LocalScratch& scratch, int64_t rows, int64_t cols, const float* x, int64_t ld) {
  Bf16* y = scratch.alloc<Bf16>(rows * cols);
  for (int64_t i = 0; i < rows; ++i) round_to_bf16(cols, x + i * ld, y + i * cols);
  return y;
}

// The same for machines without bf16 products: the rounded numbers as floats.
const float* rounded_values(LocalScratch& scratch, int64_t rows, int64_t cols, const float* x, int64_t ld) {
  float* y = scratch.alloc<float>(rows * cols);
  for (int64_t i = 0; i < rows; ++i) round_to_bf16_values(cols, x + i * ld, y + i * cols);
  return y;
}

void bf16_product(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
                  int64_t ldb, float beta, float* c, int64_t ldc) {
  LocalScratch scratch;
  const int64_t rows_a = ta == Trans::kNo ? m : k, cols_a = ta == Trans::kNo ? k : m;
  const int64_t rows_b = tb == Trans::kNo ? k : n, cols_b = tb == Trans::kNo ? n : k;
  if (!bf16_products_supported()) {
    const float* a_values = rounded_values(scratch, rows_a, cols_a, a, lda);
    gemm(ta, tb, m, n, k, 1.0F, a_values, cols_a, rounded_values(scratch, rows_b, cols_b, b, ldb), cols_b, beta, c,
         ldc);
    return;
  }
  if (beta != 0.0F && beta != 1.0F) {
    for (int64_t i = 0; i < m; ++i)
      std::transform(c + i * ldc, c + i * ldc + n, c + i * ldc, [&](float x) { return beta * x; });
  }
  const Bf16* a_bits = rounded(scratch, rows_a, cols_a, a, lda);
  bf16_gemm(ta, tb, m, n, k, a_bits, cols_a, rounded(scratch, rows_b, cols_b, b, ldb), cols_b, beta != 0.0F, c, ldc);
}

}  // namespace

template <class T>
void HeadScan<T>::product(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b,
                          int64_t ldb, T beta, T* c, int64_t ldc) const {
  if constexpr (std::is_same_v<T, float>) {
    if (plan_.bf16_operands) return bf16_product(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc);
  }
  gemm(ta, tb, m, n, k, T(1), a, lda, b, ldb, beta, c, ldc);
}

template <class T>
FrontTile<T> HeadScan<T>::front_tile(int64_t begin, int64_t L) const {
  FrontTile<T> tile;
  tile.rule = &plan_.rule;
  tile.scale = static_cast<T>(plan_.scale);
  tile.rows = L;
  tile.K = plan_.K;
  tile.V = columns_;
  const auto rows = [&](const TokenTensor<T>& t, int64_t head, int64_t column) -> RowView<const T> {
    const RowView<T> view = t.rows(plan_, n_, begin, head);
    return {view.data != nullptr ? view.data + column : nullptr, view.stride};
  };
  tile.q = rows(in_.q, h_, 0);
  tile.k = rows(in_.k, h_, 0);
  if (!plan_.rule.uses_k()) tile.key_g = rows(in_.g, h_, 0);
  tile.v = rows(in_.v, hv_, column0_);
  tile.p = rows(in_.erase_key, h_, 0);
  tile.f = rows(in_.erase_write, h_, 0);
  for_all_scalars([&](RowView<const T>& to, const TokenTensor<T>& from) { to = rows(from, hv_, 0); }, tile, in_);
  tile.erase_gate = rows(in_.erase_gate, head_of(in_.erase_gate), 0);
  tile.write_gate = rows(in_.write_gate, hv_, plan_.rule.write == Gate::kScalar ? 0 : column0_);
  if (plan_.rule.write == Gate::kAveraged) {
    tile.write_gate_all = rows(in_.write_gate, hv_, 0);
    tile.V_all = plan_.V;
  }
  tile.precond_g = rows(in_.precond_g, h_, 0);
  tile.precond_beta = rows(in_.precond_beta, h_, 0);
  if (m_ != nullptr) tile.m = {m_ + precond_token(begin) * kp_, kp_};
  return tile;
}

template <class T>
void HeadScan<T>::load_streams(int64_t begin, int64_t L, bool with_z) {
  if (copies_ != nullptr) copies_->load(begin, L);
  FrontTile<T> tile = front_tile(begin, L);
  tile.r = s_.re;
  tile.e = plan_.rule.is_delta() ? s_.re + L * kp_ : nullptr;
  tile.w = s_.w;
  if (nk_ == 2) tile.f_out = s_.w + key_block(1, L);
  tile.z = with_z ? s_.z : nullptr;
  front_.forward(tile);

  switch (plan_.rule.decay) {
    case Decay::kNone:
      break;
    case Decay::kConstant:
      std::fill_n(s_.alpha, L, static_cast<T>(constant_decay(hv_)));
      break;
    case Decay::kScalar: {
      const RowView<T> g = in_.g.rows(plan_, n_, begin, hv_);
      for (int64_t i = 0; i < L; ++i) s_.alpha[i] = std::exp(*g.row(i));
      break;
    }
    case Decay::kChannel: {
      const RowView<T> g = in_.g.rows(plan_, n_, begin, head_of(in_.g));
      dk_.exp_rows(L, plan_.K, {g.data, g.stride}, s_.alpha, kp_);
      break;
    }
  }
}

// Keys at the chunk's end and, with make_tri, what reads of this key: A and T.
template <class T>
void HeadScan<T>::channel_key_tiles(int64_t key, int64_t L, bool make_tri) {
  const int64_t subs = (L + kSubChunk - 1) / kSubChunk;
  const T* w = s_.w + key_block(key, L);
  T* tri = s_.tri + triangle_block(key, L);
  T* next = s_.anchored + key * kSubChunk * subs * (subs - 1) / 2 * kp_;
  const T* keys = nullptr;  // at the anchor of the last sub-chunk seen
  int64_t mid = 0;
  for (int64_t a = 0; a < L; a += kSubChunk) {
    const int64_t n = std::min(kSubChunk, L - a);
    if (a > 0) {
      dk_.anchor(mid, a, a - lag_, lag_, kp_, s_.alpha, keys, w, next);
      keys = next;
      next += a * kp_;
      mid = a;
    }
    if (!make_tri) continue;
    const T* alpha = s_.alpha + a * kp_;
    const T* re = s_.re + a * kp_;
    if (a > 0) {
      dk_.channel_prefix(n, nb_, kp_, 1 - lag_, lag_, alpha, re, L * kp_, s_.local, n * kp_, nullptr);
      product(Trans::kNo, Trans::kYes, nb_ * n, a, plan_.K, s_.local, kp_, keys, kp_, T(0), s_.block, a);
      for (int64_t b = 0; b < nb_; ++b) {
        for (int64_t i = 0; i < n; ++i)
          std::memcpy(tri + (b * L + a + i) * cp_, s_.block + (b * n + i) * a, sizeof(T) * static_cast<size_t>(a));
      }
    }
    dk_.diagonal(n, nb_, lag_, kp_, alpha, re, L * kp_, w + a * kp_, tri + a * cp_ + a, cp_, L * cp_);
  }
  dk_.anchor(mid, L, L - 1, lag_, kp_, s_.alpha, keys, w, s_.wc + key_block(key, L));
}

template <class T>
void HeadScan<T>::channel_tiles(int64_t L, bool make_tri) {
  dk_.channel_prefix(L, nb_, kp_, 0, lag_, s_.alpha, s_.re, L * kp_, s_.rebar, L * kp_, s_.total);
  for (int64_t key = 0; key < nk_; ++key) channel_key_tiles(key, L, make_tri);
}

template <class T>
void HeadScan<T>::decay_tiles(int64_t L, bool make_tri) {
  const bool scalar = decay_ == DecayKind::kScalar, channel = decay_ == DecayKind::kChannel;
  if (channel) channel_tiles(L, make_tri);
  if (scalar) {
    s_.lead[0] = 1;
    dk_.scalar(L, s_.alpha, s_.prefix, s_.suffix, s_.ratio, cp_);
    for (int64_t key = 0; key < nk_; ++key)
      dk_.scale_rows(L, kp_, s_.suffix, s_.w + key_block(key, L), kp_, s_.wc + key_block(key, L), kp_);
  }
  for (int64_t key = 0; make_tri && key < nk_; ++key) {
    T* tri = s_.tri + triangle_block(key, L);
    if (!channel)
      product(Trans::kNo, Trans::kYes, nb_ * L, L, plan_.K, s_.re, kp_, s_.w + key_block(key, L), kp_, T(0), tri, cp_);
    dk_.mask(L, nb_, lag_, tri, cp_, scalar ? s_.ratio : nullptr, cp_);
  }
}

// after = Diag(total) before + Wc^T R, of all keys; after may be before.
template <class T>
void HeadScan<T>::update_state(int64_t L, bool have_state, const T* before, const T* residual, T* after) {
  const T* wc = decay_ == DecayKind::kNone ? s_.w : s_.wc;
  T beta = have_state ? T(1) : T(0);
  if (have_state && decay_ == DecayKind::kScalar) beta = s_.prefix[L - 1];
  if (have_state && decay_ == DecayKind::kChannel) {
    dk_.scale_rows(plan_.K, vp_, s_.total, before, vp_, after, vp_);
  } else if (have_state && after != before) {
    std::memcpy(after, before, sizeof(T) * static_cast<size_t>(plan_.K * vp_));
  }
  product(Trans::kYes, Trans::kNo, plan_.K, vp_, nk_ * L, wc, kp_, residual, vp_, beta, after, vp_);
}

template <class T>
void HeadScan<T>::chunk_forward(int64_t begin, int64_t L, bool have_state, const Outputs<T>& out) {
  decay_tiles(L, true);
  const bool scalar = decay_ == DecayKind::kScalar;
  const T* re = decay_ == DecayKind::kChannel ? s_.rebar : s_.re;
  // What the erase finds is the last block of values: R itself, or U = -(I + T_f)^-1 (E S_0 + T_w Z) with a vector f of
  // its own.
  T* found = s_.z + erase_block(L);
  const T* erase_triangle = s_.tri + triangle_block(nk_ - 1, L) + L * cp_;
  if (have_state)
    product(Trans::kNo, Trans::kNo, nb_ * L, vp_, plan_.K, re, kp_, s_.state, vp_, T(0), s_.products, vp_);
  if (plan_.rule.is_delta()) {
    if (nk_ == 2) std::memset(found, 0, sizeof(T) * static_cast<size_t>(L * vp_));
    if (have_state)
      rk_.subtract_rows(L, vp_, scalar ? erase_prefix() : nullptr, s_.products + L * vp_, vp_, found, vp_);
    if (nk_ == 2) {
      product(Trans::kNo, Trans::kNo, L, vp_, L, s_.tri + L * cp_, cp_, s_.z, vp_, T(0), s_.products + L * vp_, vp_);
      rk_.subtract_rows(L, vp_, nullptr, s_.products + L * vp_, vp_, found, vp_);
    }
    rk_.solve(L, erase_triangle, cp_, found, vp_, vp_);
  }
  // O goes straight to the caller's rows when they need no padding and a product can write rows so far apart. The sums
  // of products of bf16 may depend on how far (oneDNN).
  const RowView<T> o_rows = out.o.rows(plan_, n_, begin, hv_);
  const bool direct =
      !plan_.bf16_operands && vp_ == columns_ && out.o && o_rows.stride >= columns_ && o_rows.stride <= kMostLeading;
  T* o = direct ? o_rows.data + column0_ : s_.o;
  const int64_t ldo = direct ? o_rows.stride : vp_;
  if (have_state) {
    if (scalar) {
      dk_.scale_rows(L, vp_, s_.prefix, s_.products, vp_, o, ldo);
    } else {
      for (int64_t i = 0; i < L; ++i)
        std::memcpy(o + i * ldo, s_.products + i * vp_, sizeof(T) * static_cast<size_t>(vp_));
    }
  }
  for (int64_t key = 0; key < nk_; ++key) {
    product(Trans::kNo, Trans::kNo, L, vp_, L, s_.tri + triangle_block(key, L), cp_, s_.z + value_block(key, L), vp_,
            have_state || key > 0 ? T(1) : T(0), o, ldo);
  }
  if (!direct && out.o) rk_.store_rows(L, columns_, s_.o, vp_, {o_rows.data + column0_, o_rows.stride});
  store_copies(begin, L);
  update_state(L, have_state, s_.state, s_.z, s_.state);
}

template <class T>
void HeadScan<T>::token_forward(int64_t begin, int64_t L, T* state, int64_t ld, const Outputs<T>& out) {
  TokenTile<T> tile;
  tile.rows = L;
  tile.K = plan_.K;
  tile.V = vp_;
  tile.is_delta = plan_.rule.is_delta();
  tile.alpha = decay_ == DecayKind::kNone ? nullptr : s_.alpha;
  tile.channel = decay_ == DecayKind::kChannel;
  tile.r = s_.re;
  tile.e = s_.re + L * kp_;
  tile.w = s_.w;
  tile.z = s_.z;
  if (nk_ == 2) tile.f = s_.w + key_block(1, L);
  tile.lag = lag_ > 0;
  tile.state = state;
  tile.ld_state = ld;
  tile.u = s_.z + erase_block(L);  // one block: a row's z is read before its residual is written
  tile.o = s_.o;
  token_kernels<T>().forward(tile);
  if (!out.o) return;
  const RowView<T> o_rows = out.o.rows(plan_, n_, begin, hv_);
  rk_.store_rows(L, columns_, s_.o, vp_, {o_rows.data + column0_, o_rows.stride});
  store_copies(begin, L);
}

template <class T>
bool HeadScan<T>::in_place(const Outputs<T>& out) const {
  const bool same_rows = !in_.initial_state || in_.initial_state.stride_r == out.final_state.stride_r;
  const bool bf16 = in_.initial_state.bf16 != nullptr || out.final_state.bf16 != nullptr;
  return plan_.token_form(n_) && plan_.state_layout == FW_STATE_K_FIRST && out.final_state && !out.checkpoints &&
         end_ >= 0 && same_rows && !bf16 && vp_ == columns_;
}

template <class T>
void HeadScan<T>::token_forward_in_place(const Outputs<T>& out) {
  T* state = out.final_state.at(end_, hv_) + column0_;
  const int64_t ld = out.final_state.stride_r;
  const T* initial = in_.initial_state && slot_ >= 0 ? in_.initial_state.at(slot_, hv_) + column0_ : nullptr;
  for (int64_t k = 0; k < plan_.K && initial != state; ++k) {
    if (initial == nullptr) {
      std::fill_n(state + k * ld, columns_, T(0));
    } else {
      std::copy_n(initial + k * in_.initial_state.stride_r, columns_, state + k * ld);
    }
  }
  for (int64_t begin = 0; begin < length_; begin += plan_.chunk) {
    const int64_t L = std::min(plan_.chunk, length_ - begin);
    load_streams(begin, L, true);
    token_forward(begin, L, state, ld, out);
  }
}

template <class T>
void HeadScan<T>::token_forward_to_slots(const Outputs<T>& out) {
  if (in_.initial_state) {
    load_state(in_.initial_state, slot_, s_.state);
  } else {
    std::memset(s_.state, 0, sizeof(T) * static_cast<size_t>(plan_.K * vp_));
  }
  for (int64_t t = 0; t < length_; ++t) {
    load_streams(t, 1, true);
    token_forward(t, 1, s_.state, vp_, out);
    const int64_t slot = plan_.slots.after(n_, t);
    if (out.final_state && slot >= 0) store_state(s_.state, out.final_state, slot);
  }
}

// bf16 states have no rows that the kernels take: value for value.
template <class T>
void HeadScan<T>::load_bf16_state(const StateTensor<T>& src, int64_t slot, T* dst) const {
  const Bf16* p = src.bf16 + slot * src.stride_n + hv_ * src.stride_h;
  const bool k_first = plan_.state_layout == FW_STATE_K_FIRST;
  for (int64_t k = 0; k < plan_.K; ++k) {
    for (int64_t v = 0; v < columns_; ++v) {
      float wide = 0;
      widen_bf16(1, p + (k_first ? k * src.stride_r + column0_ + v : (column0_ + v) * src.stride_r + k), &wide);
      dst[k * vp_ + v] = wide;
    }
    std::fill(dst + k * vp_ + columns_, dst + (k + 1) * vp_, T(0));
  }
}

template <class T>
void HeadScan<T>::store_bf16_state(const T* src, const StateTensor<T>& dst, int64_t slot) const {
  Bf16* p = dst.bf16 + slot * dst.stride_n + hv_ * dst.stride_h;
  const bool k_first = plan_.state_layout == FW_STATE_K_FIRST;
  for (int64_t k = 0; k < plan_.K; ++k) {
    for (int64_t v = 0; v < columns_; ++v) {
      const float wide = static_cast<float>(src[k * vp_ + v]);
      round_to_bf16(1, &wide, p + (k_first ? k * dst.stride_r + column0_ + v : (column0_ + v) * dst.stride_r + k));
    }
  }
}

template <class T>
void HeadScan<T>::load_state(const StateTensor<T>& src, int64_t slot, T* dst) const {
  if (src.bf16 != nullptr) return load_bf16_state(src, slot, dst);
  const T* p = src.at(slot, hv_);
  if (plan_.state_layout == FW_STATE_K_FIRST) {
    rk_.load_rows(plan_.K, columns_, {p + column0_, src.stride_r}, dst, vp_, T(1));
    return;
  }
  for (int64_t k = 0; k < plan_.K; ++k) {
    for (int64_t v = 0; v < columns_; ++v) dst[k * vp_ + v] = p[(column0_ + v) * src.stride_r + k];
    std::fill(dst + k * vp_ + columns_, dst + (k + 1) * vp_, T(0));
  }
}

template <class T>
void HeadScan<T>::store_state(const T* src, const StateTensor<T>& dst, int64_t slot) const {
  if (dst.bf16 != nullptr) return store_bf16_state(src, dst, slot);
  T* p = dst.at(slot, hv_);
  if (plan_.state_layout == FW_STATE_K_FIRST) {
    rk_.store_rows(plan_.K, columns_, src, vp_, {p + column0_, dst.stride_r});
    return;
  }
  for (int64_t v = 0; v < columns_; ++v) {
    for (int64_t k = 0; k < plan_.K; ++k) p[(column0_ + v) * dst.stride_r + k] = src[k * vp_ + v];
  }
}

template <class T>
void HeadScan<T>::store_checkpoint(const Outputs<T>& out, int64_t tokens) const {
  const int64_t interval = plan_.checkpoints.interval;
  if (!out.checkpoints || tokens % interval != 0) return;
  const int64_t index = plan_.checkpoint_index(n_, tokens / interval - 1);
  if (index >= 0) store_state(s_.state, out.checkpoints, index);
}

template <class T>
bool HeadScan<T>::begin_forward(const Outputs<T>& out, T* saved) {
  if (plan_.slots.tokens != nullptr) {
    token_forward_to_slots(out);
    return false;
  }
  if (saved == nullptr && in_place(out)) {
    token_forward_in_place(out);
    return false;
  }
  have_state_ = in_.initial_state && slot_ >= 0;
  if (have_state_) {
    load_state(in_.initial_state, slot_, s_.state);
  } else if (plan_.token_form(n_) || length_ == 0 || saved != nullptr) {
    std::memset(s_.state, 0, sizeof(T) * static_cast<size_t>(plan_.K * vp_));
  }
  return true;
}

template <class T>
void HeadScan<T>::forward_chunk(int64_t c, const Outputs<T>& out, T* saved) {
  const bool token = plan_.token_form(n_);
  const int64_t full_vp = padded(plan_.V), begin = c * plan_.chunk, L = rows_of(c);
  if (saved != nullptr) {
    T* dst = saved + plan_.state_index(n_, c, hv_) + column0_;
    for (int64_t k = 0; k < plan_.K; ++k)
      std::memcpy(dst + k * full_vp, s_.state + k * vp_, sizeof(T) * static_cast<size_t>(vp_));
  }
  load_streams(begin, L, true);
  if (token) {
    token_forward(begin, L, s_.state, vp_, out);
  } else {
    chunk_forward(begin, L, have_state_, out);
  }
  have_state_ = true;
  store_checkpoint(out, begin + L);
  if (saved == nullptr) return;
  T* residual = saved + plan_.residual_index(plan_.first_token(n_) + begin, hv_) + column0_;
  for (int64_t i = 0; i < L; ++i)
    std::memcpy(residual + i * full_vp, s_.z + erase_block(L) + i * vp_, sizeof(T) * static_cast<size_t>(vp_));
  if (!token && column0_ == 0 && plan_.saves_triangles()) {
    std::memcpy(saved + plan_.triangle_index(n_, c, hv_), s_.tri, sizeof(T) * static_cast<size_t>(nk_ * nb_ * L * cp_));
  }
}

template <class T>
void HeadScan<T>::end_forward(const Outputs<T>& out) {
  if (out.final_state && end_ >= 0) store_state(s_.state, out.final_state, end_);
}

template class HeadScan<float>;
template class HeadScan<double>;

}  // namespace fw::cpu
