// Small vector kernels under the CPU scan, chosen at run time for the processor (Highway). They work on tiles:
// row-major scratch whose rows are padded with zeros to a multiple of kPad, so that only loads and stores of the
// caller's tensors have tails. L rows of a tile are tokens of one chunk. nb is the number of stacked blocks: [R; E]
// with an erase, [R] without. lag is 1 where the erase looks at the state before its row's decay, as if the rows of E
// stood one earlier; else 0.
#pragma once

#include <cstdint>

#include "rule/gate_law.h"
#include "rule/rule.h"
#include "rule/token_scalars.h"
#include "scan/plan.h"

namespace fw::cpu {

// Rows of a caller's tensor: row i of one head begins at data + i * stride. data == nullptr: absent.
template <class T>
struct RowView {
  T* data = nullptr;
  int64_t stride = 0;
  T* row(int64_t i) const { return data + i * stride; }
  explicit operator bool() const { return data != nullptr; }
};

// ---- kernels_front.cpp: raw rows -> canonical streams and its vector-Jacobian product (rule/front.h)
// Its base: the numbers of tokens.def, one value a row.
template <class T>
struct FrontTile : TokenScalars<RowView<const T>> {
  const Rule* rule = nullptr;
  T scale = 1;
  int64_t rows = 0, K = 0, V = 0;
  RowView<const T> q, k, v, p;
  RowView<const T> f;                        // what an erase takes away along (EraseWrite::kOwn)
  RowView<const T> key_g;                    // KeySource::kDecay: the log-decay that k is made of, in its place
  RowView<const T> precond_g, precond_beta;  // one value a row
  RowView<const T> erase_gate, write_gate;   // a value a channel or, Gate::kScalar, one a row
  RowView<const T> write_gate_all;           // Gate::kAveraged: all V_all channels, of which the tile has V
  int64_t V_all = 0;
  RowView<const T> m;
  T *r = nullptr, *e = nullptr, *w = nullptr;  // [rows, padded K]; e null: no erase
  T* f_out = nullptr;                          // [rows, padded K]: f as a stream; null: none
  T* z = nullptr;                              // [rows, padded V]; null: not made
};

template <class T>
struct FrontTileGrad {
  FrontTile<T> in;  // r, e, w, f_out, z unused
  const T *dr = nullptr, *de = nullptr, *dw = nullptr, *df = nullptr, *dz = nullptr;
  // Absent gradients are not written. The flags say where earlier value heads of the group have written already.
  RowView<T> dq, dk, dv, dp, df_out, derase_gate, dwrite_gate, dm;
  TokenScalars<RowView<T>> dscalars;
  RowView<T> dkey_g;                 // of key_g, added to
  RowView<T> dlog_alpha_p, dbeta_p;  // of precond_g and precond_beta through the normaliser; added to
  bool add_key_head = false;         // dq, dk, dp, df_out
  bool add_erase_gate = false, add_m = false;
};

template <class T>
struct FrontKernels {
  void (*forward)(const FrontTile<T>& tile);
  void (*backward)(const FrontTileGrad<T>& tile);
};
template <class T>
const FrontKernels<T>& front_kernels();

// ---- kernels_decay.cpp: decays as products of exp(g) <= 1, never as quotients, so that any g in [-inf, 0] is right
template <class T>
struct DecayKernels {
  // Scalar decay of L rows: alpha = exp(g); prefix[r] = prod alpha[0..r]; suffix[s] = prod alpha[s+1..L-1];
  // ratio [L, ld] lower triangle: prod alpha[s+1..r], 0 above.
  void (*scalar)(int64_t L, const T* alpha, T* prefix, T* suffix, T* ratio, int64_t ld);
  // tri[b][r][s] (nb blocks of L rows) *= ratio[r][s] (1 if null; in block 1 ratio[r - lag][s]), 0 where s > r, and in
  // block 1 where s == r.
  void (*mask)(int64_t L, int64_t nb, int64_t lag, T* tri, int64_t ld, const T* ratio, int64_t ld_ratio);
  // dst[i] = factor[i] * src[i], rows of `cols` (padded) values; dst may be src.
  void (*scale_rows)(int64_t rows, int64_t cols, const T* factor, const T* src, int64_t ld_src, T* dst, int64_t ld_dst);
  // alpha = exp(g) of caller rows.
  void (*exp_rows)(int64_t rows, int64_t cols, RowView<const T> g, T* alpha, int64_t ld);
  // dst[b][r] = src[b][r] (.) prod alpha[first..r], in block 1 prod alpha[first..r-lag]; total (may be null) = prod
  // alpha[0..L-1] (for first = 0). first = 0: from the state before the tile; first = 1: from its first row.
  void (*channel_prefix)(int64_t L, int64_t nb, int64_t cols, int64_t first, int64_t lag, const T* alpha, const T* src,
                         int64_t block_src, T* dst, int64_t block_dst, T* total);
  // Keys at the anchor row `to` (recurrence.md 6). Rows [0, mid) of src stand at anchor mid - lag (scaled by prod
  // alpha[s+1..mid-lag]); rows [mid, rows) of w are raw. dst: all of them at anchor `to` >= rows - 1. w == nullptr: src
  // is overwritten, all rows as they are multiplied (the adjoint moves gradients the same way).
  void (*anchor)(int64_t mid, int64_t rows, int64_t to, int64_t lag, int64_t cols, const T* alpha, const T* src,
                 const T* w, T* dst);
  // Inside a sub-chunk of n <= 16 rows: tri[b][r][s] = sum_k x_b[r][k] w[s][k] prod alpha[s+1..r][k] (in block 1 to r -
  // lag). It is zero above the diagonal, and on it in block 1. x: nb blocks, block_x apart; tri: nb blocks, block_tri
  // apart.
  void (*diagonal)(int64_t n, int64_t nb, int64_t lag, int64_t cols, const T* alpha, const T* x, int64_t block_x,
                   const T* w, T* tri, int64_t ld, int64_t block_tri);
  // Its adjoint below the diagonal: dx += ..., dw += ..., from dtri (entries on and above the diagonal are not read).
  void (*diagonal_backward)(int64_t n, int64_t nb, int64_t lag, int64_t cols, const T* alpha, const T* x,
                            int64_t block_x, const T* w, const T* dtri, int64_t ld, int64_t block_tri, T* dx,
                            int64_t block_dx, T* dw);
};
template <class T>
const DecayKernels<T>& decay_kernels();

// ---- kernels_rows.cpp
template <class T>
struct RowKernels {
  // x = (I + tri)^-1 x, tri strictly lower [L, ld], x [L, cols]: forward substitution.
  void (*solve)(int64_t L, const T* tri, int64_t ld, T* x, int64_t ldx, int64_t cols);
  // x = (I + tri)^-T x.
  void (*solve_transposed)(int64_t L, const T* tri, int64_t ld, T* x, int64_t ldx, int64_t cols);
  // x[i] -= factor[i] * y[i] (factor null: 1), padded rows.
  void (*subtract_rows)(int64_t rows, int64_t cols, const T* factor, const T* y, int64_t ldy, T* x, int64_t ldx);
  // x += y, n values (a multiple of kPad).
  void (*add_rows)(int64_t n, const T* y, T* x);
  // out[k] = sum_v a[k][v] b[k][v]
  void (*row_dots)(int64_t rows, int64_t cols, const T* a, const T* b, T* out);
  // out[t][k] = sum_b x_b dx_b - sum w dw over nk keys, blocks as far apart: the gradient of the cumulative log-decay
  // (recurrence.md 5). With lag row t of E adds to the row before it, the first one to none.
  void (*decay_terms)(int64_t L, int64_t nb, int64_t lag, int64_t nk, int64_t cols, const T* x, const T* dx,
                      int64_t block, const T* w, const T* dw, T* out);
  // dg[r] (+)= head - sum_{s < r} terms[s], where a row of alpha = 0 sets the sum to 0. head is used up.
  void (*channel_dg)(int64_t L, int64_t cols, int64_t ld, const T* terms, const T* alpha, T* head, RowView<T> dg,
                     bool add);
  // dx[t] += diag[t] w[t], dw[t] += diag[t] x[t]: what a token's read takes of its own write
  void (*add_diagonal)(int64_t L, int64_t cols, const T* diag, const T* x, const T* w, T* dx, T* dw);
  // Copies between caller rows and padded tiles.
  void (*load_rows)(int64_t rows, int64_t cols, RowView<const T> src, T* dst, int64_t ld, T factor);
  void (*store_rows)(int64_t rows, int64_t cols, const T* src, int64_t ld, RowView<T> dst);
  // out[i] = sum_j terms[i][j] in double
  void (*row_sums)(int64_t rows, int64_t cols, const T* x, double* out);
};
template <class T>
const RowKernels<T>& row_kernels();

// ---- kernels_token.cpp: the recurrence one token at a time
template <class T>
struct TokenTile {
  int64_t rows = 0, K = 0, V = 0;  // V: padded columns of the value block
  bool is_delta = true;
  const T* alpha = nullptr;  // channel: [rows, padded K]; scalar: [rows]; null: no decay
  bool channel = false;
  bool lag = false;  // the erase looks before the decay
  const T *r = nullptr, *e = nullptr, *w = nullptr, *z = nullptr;
  // what the erase takes away along; null: w, and u = z less what it found. Else u is that alone: S += w z^T + f u^T
  const T* f = nullptr;
  T* state = nullptr;  // [K, V], rows ld_state apart (backward: V), updated
  int64_t ld_state = 0;
  T* u = nullptr;  // [rows, V]: residuals (scratch)
  T* o = nullptr;  // [rows, V]
};

template <class T>
struct TokenTileGrad {
  TokenTile<T> in;         // state: the one before the first row, not changed; u as forward left it
  T* history = nullptr;    // [(rows + 1), K, V] scratch
  const T* d_o = nullptr;  // [rows, V]
  T* dstate = nullptr;     // [K, V]: in the gradient of the last state, out of the first
  T *dr = nullptr, *de = nullptr, *dw = nullptr, *dz = nullptr;
  T *df = nullptr, *du = nullptr;  // where there is an f; du [rows, V] scratch
  T* dalpha = nullptr;             // [rows, padded K]: alpha * gradient (the gradient of g), or null
};

template <class T>
struct TokenKernels {
  void (*forward)(const TokenTile<T>& tile);
  void (*backward)(const TokenTileGrad<T>& tile);
};
template <class T>
const TokenKernels<T>& token_kernels();

// ---- kernels_ring.cpp: a token on a state and the tokens after it (scan/ring.h)
template <class T>
struct RingRows {
  DecayKind decay_kind = DecayKind::kNone;
  int64_t count = 0;                     // tokens, the oldest first
  T* w = nullptr;                        // [count, padded K]; a fold multiplies decays in
  T* decay = nullptr;                    // channel: [count, padded K]; scalar: [count]
  T* u = nullptr;                        // [count, V]
  T *total = nullptr, *coefs = nullptr;  // scratch: [2, padded K]; [2, count]
};

template <class T>
struct RingTile {
  RingRows<T> ring;
  int64_t K = 0, V = 0;  // V: padded columns of the value block
  bool is_delta = true;
  bool lag = false;          // the erase looks before the decay
  const T* alpha = nullptr;  // of the token, as a row of ring.decay
  const T *r = nullptr, *e = nullptr, *w = nullptr, *z = nullptr;
  const T* state = nullptr;  // [K, V], rows ld_state apart
  int64_t ld_state = 0;
  T *u = nullptr, *o = nullptr;  // [V]
};

template <class T>
struct RingKernels {
  void (*step)(const RingTile<T>& tile);
  // The ring's tokens into the state; V: padded columns.
  void (*fold)(const RingRows<T>& ring, int64_t K, int64_t V, T* state, int64_t ld_state);
};
template <class T>
const RingKernels<T>& ring_kernels();

// ---- kernels_precond.cpp: the diagonal preconditioner of one key head and sequence (recurrence.md 3)
template <class T>
struct PrecondTask {
  const Rule* rule = nullptr;
  int64_t rows = 0, K = 0;
  RowView<const T> k, g, beta;  // g, beta: one value a row
  T center = 0;
  T* state = nullptr;    // [padded K]: A, updated
  T* m = nullptr;        // [rows, padded K]
  T* history = nullptr;  // [rows, padded K]: A after each row, or null
};

template <class T>
struct PrecondGrad {
  // m, history as forward left them; state: A before the first row
  PrecondTask<T> in;
  const T* dm = nullptr;                                  // [rows, padded K]
  const T *dg_direct = nullptr, *dbeta_direct = nullptr;  // [rows]: of g and beta past A, or null
  T* dstate = nullptr;                                    // [padded K]: in the gradient of the last A, out of the first
  RowView<T> dk;                                          // added to (may be absent)
  RowView<T> dg, dbeta;                                   // written (may be absent)
  double dcenter = 0;                                     // out
};

template <class T>
struct PrecondKernels {
  void (*forward)(const PrecondTask<T>& task);
  void (*backward)(PrecondGrad<T>& task);
};
template <class T>
const PrecondKernels<T>& precond_kernels();

// ---- kernels_gates.cpp: gates given as logits (rule/gate_law.h). Rows of n numbers with bias and rate = exp(a_log) of
// their own; all have room for a multiple of kPad.
template <class T>
struct GateKernels {
  void (*forward)(const GateLaw<T>& law, int64_t n, const T* x, const T* bias, const T* rate, T* value);
  // dx is written, dbias and drate are added to. dx may be dvalue.
  void (*backward)(const GateLaw<T>& law, int64_t n, const T* x, const T* bias, const T* rate, const T* dvalue, T* dx,
                   T* dbias, T* drate);
};
template <class T>
const GateKernels<T>& gate_kernels();

const char* simd_target_name();

}  // namespace fw::cpu
