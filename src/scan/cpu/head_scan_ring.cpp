// Steps of one head on a state and a ring, and the fold of the ring into the state (scan/ring.h).
#include <algorithm>
#include <type_traits>

#include "base/bf16.h"
#include "rule/decay.h"
#include "scan/cpu/head_scan.h"
#include "scan/ring.h"

namespace fw::cpu {

template <class T>
void HeadScan<T>::load_ring(const Outputs<T>& out, int64_t first, int64_t last) {
  const int64_t D = ring_decays();
  for (int64_t at = first, i = 0; at < last; ++at, ++i) {
    const T* row = ring_row(out, at);
    const auto copy = [&](const T* from, int64_t count, T* to, int64_t room) {
      std::copy_n(from, count, to);
      std::fill(to + count, to + room, T(0));
    };
    copy(row, plan_.K, s_.ring.w + i * kp_, kp_);
    copy(row + plan_.K + column0_, columns_, s_.ring.u + i * vp_, vp_);
    if (plan_.ring.decays > 0) copy(row + plan_.K + plan_.V, plan_.ring.decays, s_.ring.decay + i * D, D);
    if (plan_.rule.decay == Decay::kConstant) s_.ring.decay[i] = static_cast<T>(constant_decay(hv_));
  }
}

template <class T>
RingRows<T> HeadScan<T>::ring_rows_from(int64_t first, int64_t count) const {
  RingRows<T> rows = s_.ring;
  rows.decay_kind = decay_;
  rows.count = count;
  rows.w += first * kp_;
  rows.u += first * vp_;
  if (rows.decay != nullptr) rows.decay += first * ring_decays();
  return rows;
}

template <class T>
void HeadScan<T>::fold_rows(int64_t first, int64_t count, bool stored, RingState<T>& state) {
  if (!stored && state.rows != s_.state) {  // the caller's memory stays as it is
    for (int64_t k = 0; k < plan_.K; ++k) std::copy_n(state.rows + k * state.ld, columns_, s_.state + k * vp_);
    state = {s_.state, vp_};
  }
  ring_kernels<T>().fold(ring_rows_from(first, count), plan_.K, vp_, state.rows, state.ld);
  if (state.rows != s_.state) return;
  if constexpr (std::is_same_v<T, float>) {
    if (in_.initial_state.bf16 != nullptr) round_to_bf16_values(plan_.K * vp_, s_.state, s_.state);
  }
  if (stored) store_state(s_.state, in_.initial_state, slot_);
}

template <class T>
RingState<T> HeadScan<T>::ring_state() const {
  const StateTensor<T>& states = in_.initial_state;
  if (plan_.state_layout == FW_STATE_K_FIRST && states.bf16 == nullptr && vp_ == columns_)
    return {states.at(slot_, hv_) + column0_, states.stride_r};
  load_state(states, slot_, s_.state);
  return {s_.state, vp_};
}

template <class T>
void HeadScan<T>::step_ring(const Outputs<T>& out) {
  const Ring& ring = plan_.ring;
  const RingSpan span = ring_span(static_cast<int>(ring.tokens), ring.keeps(), ring.positions[n_],
                                  ring.keeps() ? ring.previous[n_] : 0, static_cast<int>(length_));
  if (length_ == 0 && !span.folds()) return;
  load_ring(out, span.base, span.position);
  RingState<T> state = ring_state();
  const int64_t D = ring_decays();
  int64_t folded = span.base;
  const auto fold_until = [&](int64_t end) {
    for (; folded < end; folded += ring.tokens) fold_rows(folded - span.base, ring.tokens, folded < span.stored, state);
  };
  for (int64_t t = 0; t < length_; ++t) {
    const int64_t at = span.position + t, i = at - span.base, first = span.begin(static_cast<int>(at)) - span.base;
    fold_until(first + span.base);
    load_streams(t, 1, true);
    std::copy_n(s_.w, kp_, s_.ring.w + i * kp_);
    std::copy_n(s_.alpha, D, s_.ring.decay + i * D);
    RingTile<T> tile;
    tile.ring = ring_rows_from(first, i - first);
    tile.K = plan_.K;
    tile.V = vp_;
    tile.is_delta = plan_.rule.is_delta();
    tile.lag = lag_ > 0;
    tile.alpha = s_.alpha;
    tile.r = s_.re;
    tile.e = s_.re + kp_;
    tile.w = s_.w;
    tile.z = s_.z;
    tile.state = state.rows;
    tile.ld_state = state.ld;
    tile.u = s_.ring.u + i * vp_;
    tile.o = s_.o;
    ring_kernels<T>().step(tile);
    if (out.o) {
      const RowView<T> o_rows = out.o.rows(plan_, n_, t, hv_);
      rk_.store_rows(1, columns_, s_.o, vp_, {o_rows.data + column0_, o_rows.stride});
      store_copies(t, 1);
    }
    if (at < span.kept()) continue;
    // What is not in the state after the call, ahead of folds, which change keys. The first columns' task writes those.
    T* row = ring_row(out, at);
    std::copy_n(s_.ring.u + i * vp_, columns_, row + plan_.K + column0_);
    if (column0_ > 0) continue;
    std::copy_n(s_.ring.w + i * kp_, plan_.K, row);
    if (ring.decays > 0) std::copy_n(s_.ring.decay + i * D, ring.decays, row + plan_.K + plan_.V);
  }
  fold_until(span.last);
}

template <class T>
void HeadScan<T>::fold_ring(const Outputs<T>& out) {
  const Ring& ring = plan_.ring;
  const RingSpan span = ring_span(static_cast<int>(ring.tokens), ring.keeps(), ring.positions[n_],
                                  ring.keeps() ? ring.previous[n_] : 0, 0);
  if (span.base == span.position) return;
  load_ring(out, span.base, span.position);
  RingState<T> state = ring_state();
  const int64_t all = span.position - span.base;
  for (int64_t first = 0; first < all; first += ring.tokens)
    fold_rows(first, std::min(ring.tokens, all - first), true, state);
}

template void HeadScan<float>::step_ring(const Outputs<float>&);
template void HeadScan<double>::step_ring(const Outputs<double>&);
template void HeadScan<float>::fold_ring(const Outputs<float>&);
template void HeadScan<double>::fold_ring(const Outputs<double>&);

}  // namespace fw::cpu
