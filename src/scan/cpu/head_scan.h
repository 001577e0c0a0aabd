// One value head of one sequence: the streams of one chunk at a time, and the two forms of the recurrence on them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/gemm.h"
#include "scan/cpu/kernels.h"
#include "scan/plan.h"
#include "scan/tensors.h"

namespace fw::cpu {

inline constexpr int64_t kSubChunk = 16;     // rows whose channel decays are multiplied out one by one
inline constexpr int64_t kValueBlock = 128;  // columns of V of one forward task

// Hands out pieces of a buffer; with a null base it only counts.
template <class T>
class Bump {
 public:
  explicit Bump(T* base) : base_(base) {}
  T* take(int64_t n) {
    T* p = base_ != nullptr ? base_ + used_ : nullptr;
    used_ += padded(n);
    return p;
  }
  int64_t used() const { return used_; }

 private:
  T* base_;
  int64_t used_ = 0;
};

// No call finds more tokens in a ring, with its own: up to `tokens` of the call before may be taken back, and as many
// are its own.
inline int64_t ring_scratch_rows(const Plan& plan) { return std::min(plan.ring.rows, 3 * plan.ring.tokens); }

// Tiles of one task. Names follow recurrence.md section 4. Stacked tiles hold the block of R, then (with an erase) that
// of E.
// Where the erase takes away along a vector of its own (plan.keys() 2), w, wc, dw hold the rows of w, then those of f.
// Z, dz the values that go along them: z, then what the erase found (else one block of both, R); tri, dtri and diag
// those of each key.
template <class T>
struct HeadScratch {
  HeadScratch(const Plan& plan, bool backward, Bump<T>& bump) {
    const int64_t C = std::max<int64_t>(1, std::min(plan.chunk, plan.longest));
    const int64_t kp = padded(plan.K), vp = padded(plan.V), cp = padded(plan.chunk);
    const int64_t keys = plan.keys();
    re = bump.take(2 * C * kp);
    w = bump.take(keys * C * kp);
    wc = bump.take(keys * C * kp);
    z = bump.take(keys * C * vp);
    o = bump.take(C * vp);
    state = bump.take(plan.K * vp);
    alpha = bump.take(plan.decay_kind() == DecayKind::kChannel ? C * kp : C);
    total = bump.take(kp);
    lead = bump.take(C + 1);
    prefix = lead != nullptr ? lead + 1 : nullptr;
    suffix = bump.take(C);
    tri = bump.take(keys * 2 * C * cp);
    products = bump.take(2 * C * vp);
    if (plan.decay_kind() == DecayKind::kScalar) ratio = bump.take(C * cp);
    if (plan.decay_kind() == DecayKind::kChannel) {
      const int64_t subs = (C + kSubChunk - 1) / kSubChunk;
      rebar = bump.take(2 * C * kp);
      local = bump.take(2 * kSubChunk * kp);
      anchored = bump.take(keys * kSubChunk * subs * (subs - 1) / 2 * kp);
      block = bump.take(2 * kSubChunk * cp);
    }
    if (plan.ring) take_ring(plan, bump);
    if (!backward) return;
    dre = bump.take(2 * C * kp);
    dw = bump.take(keys * C * kp);
    dtri = bump.take(keys * 2 * C * cp);
    dz = bump.take(keys * C * vp);
    dstate = bump.take(plan.K * vp);
    terms = bump.take(C * kp);
    head = bump.take(kp);
    diag = bump.take(keys * C);
    if (plan.decay_kind() == DecayKind::kChannel) dlocal = bump.take(2 * kSubChunk * kp);
    history_rows = std::min(plan.chunk, plan.longest_token_form);
    if (history_rows > 0) history = bump.take((history_rows + 1) * plan.K * vp);
  }

  T *re, *w, *wc, *z, *o, *state, *alpha, *total, *suffix, *tri, *products;
  T *lead, *prefix;  // prefix after a 1: of rows of E that lag
  T *ratio = nullptr, *rebar = nullptr, *local = nullptr, *anchored = nullptr, *block = nullptr;
  T *dre = nullptr, *dw = nullptr, *dtri = nullptr, *dz = nullptr, *dstate = nullptr, *terms = nullptr, *head = nullptr,
    *diag = nullptr, *dlocal = nullptr;
  T* history = nullptr;
  int64_t history_rows = 0;
  RingRows<T> ring;  // of the tokens that a call finds in a ring and adds to it

 private:
  void take_ring(const Plan& plan, Bump<T>& bump) {
    const int64_t kp = padded(plan.K), rows = ring_scratch_rows(plan);
    ring.w = bump.take(rows * kp);
    ring.u = bump.take(rows * padded(plan.V));
    if (plan.decay_kind() != DecayKind::kNone)
      ring.decay = bump.take(rows * (plan.decay_kind() == DecayKind::kChannel ? kp : 1));
    ring.total = bump.take(2 * kp);
    ring.coefs = bump.take(2 * rows);
  }
};

// Gradients that reach the preconditioner from the value heads of a group:
// - of M (laid out like it; the first head writes, the others add),
// - past its state, of its gates ([N][H][tokens of n], added to).
//
// Null: none.
template <class T>
struct PrecondGradRows {
  T *dm = nullptr, *dg = nullptr, *dbeta = nullptr;
};

// A state [K, vp] of which steps with a ring read: the caller's memory where kernels can work on it, else its copy.
template <class T>
struct RingState {
  T* rows;
  int64_t ld;
};

// Where tensors of tokens are copies of some rows at a time: load() is called before rows are read, store() when rows
// of o have been written.
template <class T>
class RowCopies {
 public:
  virtual ~RowCopies() = default;
  virtual void load(int64_t begin, int64_t rows) = 0;
  virtual void store(int64_t begin, int64_t rows) = 0;
};

template <class T>
class HeadScan {
 public:
  // column0, columns: the block of value columns (forward). m: preconditioner rows (precond_row) or null. copies: of
  // `in` and of forward's outputs, or null.
  HeadScan(const Plan& plan, const Inputs<T>& in, HeadScratch<T>& scratch, const T* m, int64_t n, int64_t hv,
           int64_t column0, int64_t columns, RowCopies<T>* copies = nullptr);

  // o (not written when out.o is absent) and the final state; saved may be null. Not of a sequence that has no slot.
  // After begin_forward() comes forward_chunk() of all chunks in order, then end_forward(); false: all is done. Between
  // them another head may use the scratch, but for the state.
  bool begin_forward(const Outputs<T>& out, T* saved);
  void forward_chunk(int64_t c, const Outputs<T>& out, T* saved);
  void end_forward(const Outputs<T>& out);
  // The same of a step with a ring: the state is written where tokens are folded into it.
  void step_ring(const Outputs<T>& out);
  // All that is in the ring into the initial state, in place.
  void fold_ring(const Outputs<T>& out);
  // Gradients of this head. `first`: no other head of the group has written yet.
  void backward(const Outputs<T>& d, const Inputs<T>& grads, const T* saved, const PrecondGradRows<T>& precond,
                bool first);

 private:
  // Streams of rows [begin, begin + L): re, w (and f), z (unless with_z is false), alpha.
  void load_streams(int64_t begin, int64_t L, bool with_z);
  // tri, wc, total and what the decay kind needs of prefix, suffix, ratio, rebar, anchored. make_tri: also A and T.
  void decay_tiles(int64_t L, bool make_tri);
  void channel_tiles(int64_t L, bool make_tri);
  void channel_key_tiles(int64_t key, int64_t L, bool make_tri);
  void chunk_forward(int64_t begin, int64_t L, bool have_state, const Outputs<T>& out);
  // state: [K, vp], rows ld apart
  void token_forward(int64_t begin, int64_t L, T* state, int64_t ld, const Outputs<T>& out);
  void update_state(int64_t L, bool have_state, const T* before, const T* residual, T* after);

  void chunk_backward(int64_t c, const Outputs<T>& d, const T* saved, bool have_state, bool have_dstate,
                      bool need_dstate);
  void channel_backward(int64_t key, int64_t L, bool have_dstate);
  void token_backward(int64_t c, const Outputs<T>& d, const T* saved);
  void token_decay_gradient(int64_t begin, int64_t L, const Inputs<T>& grads, bool first);
  double state_gradient(int64_t c, const T* saved);
  void chunk_decay_gradient(int64_t c, int64_t L, const T* saved, bool have_state, const double* tail,
                            const Inputs<T>& grads, bool first);

  // C [m, n] = op(A) op(B) + beta C; the operands rounded to bf16 where the plan says so.
  void product(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb,
               T beta, T* c, int64_t ldc) const;

  // The token form on the final state's own memory, which then holds the initial state: the caller's state is read and
  // written once a token and never copied when it is updated in place.
  bool in_place(const Outputs<T>& out) const;
  void token_forward_in_place(const Outputs<T>& out);
  // The token form with the state after every token stored at its slot.
  void token_forward_to_slots(const Outputs<T>& out);

  // Rows of the ring from position `first` to `last` as the scratch's first ones.
  void load_ring(const Outputs<T>& out, int64_t first, int64_t last);
  RingRows<T> ring_rows_from(int64_t first, int64_t count) const;
  // Folds `count` of these rows and stores the state. Not stored: the caller's memory stays, and `state` is a copy.
  void fold_rows(int64_t first, int64_t count, bool stored, RingState<T>& state);
  RingState<T> ring_state() const;
  T* ring_row(const Outputs<T>& out, int64_t at) const {
    return out.ring.at(slot_, hv_) + at % plan_.ring.rows * out.ring.stride_r;
  }
  int64_t ring_decays() const { return decay_ == DecayKind::kChannel ? kp_ : decay_ == DecayKind::kScalar ? 1 : 0; }

  void store_copies(int64_t begin, int64_t L) const {
    if (copies_ != nullptr) copies_->store(begin, L);
  }
  // The state [K, vp] after the sequence's first `tokens` tokens, if that is a checkpoint.
  void store_checkpoint(const Outputs<T>& out, int64_t tokens) const;

  void load_state(const StateTensor<T>& src, int64_t slot, T* dst) const;
  void store_state(const T* src, const StateTensor<T>& dst, int64_t slot) const;
  void load_bf16_state(const StateTensor<T>& src, int64_t slot, T* dst) const;
  void store_bf16_state(const T* src, const StateTensor<T>& dst, int64_t slot) const;
  FrontTile<T> front_tile(int64_t begin, int64_t L) const;
  bool splits_diagonal() const { return plan_.rule.uses_g(); }
  // Head of a tensor that may have one per key head.
  int64_t head_of(const TokenTensor<T>& tensor) const { return tensor.heads == plan_.HV ? hv_ : h_; }
  // Preconditioner rows of one key head of one sequence are contiguous: [N][H][tokens of n][kp].
  int64_t precond_token(int64_t begin) const { return plan_.first_token(n_) * plan_.H + h_ * length_ + begin; }
  // Blocks of the tiles that have one a key, in a chunk of L rows.
  int64_t key_block(int64_t key, int64_t L) const { return key * L * kp_; }
  int64_t value_block(int64_t key, int64_t L) const { return key * L * vp_; }
  int64_t triangle_block(int64_t key, int64_t L) const { return key * nb_ * L * cp_; }
  // Of the key that what the erase found goes along: the last.
  int64_t erase_block(int64_t L) const { return value_block(nk_ - 1, L); }
  // Decays from the state before a chunk to the rows of E.
  const T* erase_prefix() const { return lag_ > 0 ? s_.lead : s_.prefix; }
  int64_t rows_of(int64_t c) const { return std::min(plan_.chunk, length_ - c * plan_.chunk); }

  const Plan& plan_;
  const Inputs<T>& in_;
  HeadScratch<T>& s_;
  const T* m_;
  RowCopies<T>* const copies_;
  const int64_t n_, hv_, h_, length_;
  const int64_t slot_, end_;  // of the initial and of the final state; -1: none
  const int64_t column0_, columns_;
  const int64_t kp_, vp_, cp_;
  const int64_t nb_;   // stacked blocks: 2 with an erase, else 1
  const int64_t nk_;   // keys a row: w, and f where the erase has a vector of its own
  const int64_t lag_;  // 1: the erase looks before the decay
  const DecayKind decay_;
  bool have_state_ = false;  // in forward: the state is not zero for want of an initial one
  const FrontKernels<T>& front_;
  const DecayKernels<T>& dk_;
  const RowKernels<T>& rk_;
};

}  // namespace fw::cpu
