// Tasks of the CPU scan: which heads run where, the preconditioner before and after them, and the workspace.
#include "scan/cpu/scan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/threads.h"
#include "scan/cpu/gates.h"
#include "scan/cpu/head_scan.h"
#include "scan/cpu/stage.h"

namespace fw::cpu {
namespace {

constexpr int64_t kMostHeadsTogether = 4;

// Value heads that a forward task takes through the sequence side by side. A token's rows of neighbouring heads are
// neighbours in memory, and those of one token and the next mostly on different pages.
int64_t heads_together(const Plan& plan) {
  constexpr int64_t kTasksOfThread = 2;  // what is left when a thread ends sooner
  if (plan.longest <= plan.chunk) return 1;
  return std::clamp<int64_t>(plan.N * plan.HV / (kTasksOfThread * plan.threads), 1,
                             std::min(plan.HV, kMostHeadsTogether));
}

// What one thread has: float copies of narrower tensors, then the tiles of a head, and states of others beside it.
template <class T>
struct ThreadSpace {
  ThreadSpace(const Plan& plan, bool backward, Bump<T>& bump)
      : stage(plan, backward, bump), before_tiles(bump.used()), tiles(plan, backward, bump) {
    if (!backward) states = bump.take((heads_together(plan) - 1) * plan.K * padded(plan.V));
  }
  Stage<T> stage;
  int64_t before_tiles;
  HeadScratch<T> tiles;
  T* states = nullptr;
};

template <class T>
int64_t thread_elements(const Plan& plan, bool backward) {
  Bump<T> count(nullptr);
  ThreadSpace<T>(plan, backward, count);
  return count.used();
}

// Padding columns of tiles that products do not write must be zero.
template <class T>
ThreadSpace<T> thread_space(const Plan& plan, bool backward, T* base, int64_t elements) {
  T* mine = base + thread_index() * elements;
  Bump<T> bump(mine);
  const ThreadSpace<T> space(plan, backward, bump);
  if (padded(plan.K) != plan.K || padded(plan.V) != plan.V) {
    std::memset(mine + space.before_tiles, 0, sizeof(T) * static_cast<size_t>(elements - space.before_tiles));
  }
  return space;
}

// Preconditioner rows of all tokens, [tokens, H, kp] each, and one state row per task.
template <class T>
struct PrecondSpace {
  PrecondSpace(const Plan& plan, bool backward, Bump<T>& bump) {
    if (!plan.rule.uses_precond()) return;
    const int64_t all = plan.tokens() * plan.H * padded(plan.K);
    m = bump.take(all);
    states = bump.take(plan.N * plan.H * padded(plan.K));
    if (backward || plan.slots.tokens != nullptr) history = bump.take(all);
    if (!backward) return;
    grads.dm = bump.take(all);
    if (plan.rule.normaliser == Normaliser::kGated) {
      grads.dg = bump.take(plan.tokens() * plan.H);
      grads.dbeta = bump.take(plan.tokens() * plan.H);
    }
    dstates = bump.take(plan.N * plan.H * padded(plan.K));
  }
  T *m = nullptr, *states = nullptr, *history = nullptr, *dstates = nullptr;
  PrecondGradRows<T> grads;
};

template <class T>
class PrecondPass {
 public:
  // threads: thread_space() of this and the passes over heads.
  PrecondPass(const Plan& plan, const Inputs<T>& in, const PrecondSpace<T>& space, bool backward, T* threads,
              int64_t elements)
      : plan_(plan), space_(space), backward_(backward), threads_(threads), elements_(elements), kp_(padded(plan.K)) {
    in_.k = in.k;
    in_.precond_g = in.precond_g;
    in_.precond_beta = in.precond_beta;
    in_.precond_center = in.precond_center;
    in_.center_stride = in.center_stride;
    in_.initial_precond = in.initial_precond;
  }

  // The kernels walk rows that lie one after the other: one task's rows are contiguous, [n][h][token][kp].
  void forward(const Outputs<T>* out) const {
    parallel_for(plan_.N * plan_.H, [&](int64_t i) {
      const int64_t n = i / plan_.H, h = i % plan_.H, slot = plan_.slots.start(n);
      if (plan_.slots.skipped(n)) return;
      ThreadSpace<T> mine = thread_space(plan_, backward_, threads_, elements_);
      PrecondTask<T> x = task(i, slot, mine.stage.read(in_, n, h * plan_.group(), true));
      const auto store = [&](const T* state, const StateTensor<T>& states, int64_t to) {
        if (to >= 0) std::memcpy(states.at(to, h), state, sizeof(T) * static_cast<size_t>(plan_.K));
      };
      for (int64_t c = 0; out != nullptr && out->precond_checkpoints && c < plan_.checkpoints_of(n); ++c) {
        advance(x, plan_.checkpoints.interval);
        store(x.state, out->precond_checkpoints, plan_.checkpoint_index(n, c));
      }
      advance(x, x.rows);
      if (out == nullptr || !out->final_precond) return;
      if (plan_.slots.tokens == nullptr) return store(x.state, out->final_precond, plan_.slots.end(n));
      const T* const history = space_.history + row_index(n, h);
      for (int64_t t = 0; t < plan_.length(n); ++t)
        store(history + t * kp_, out->final_precond, plan_.slots.after(n, t));
    });
  }

  void backward(const Outputs<T>& d, const Inputs<T>& all_grads, std::vector<double>& dcenter) const {
    Inputs<T> own;  // of those gradients that this pass writes
    own.k = all_grads.k;
    own.precond_g = all_grads.precond_g;
    own.precond_beta = all_grads.precond_beta;
    own.initial_precond = all_grads.initial_precond;
    parallel_for(plan_.N * plan_.H, [&](int64_t i) {
      const int64_t n = i / plan_.H, h = i % plan_.H, hv = h * plan_.group();
      ThreadSpace<T> mine = thread_space(plan_, backward_, threads_, elements_);
      const Inputs<T> grads = mine.stage.open_to_add(own, n, hv);
      PrecondGrad<T> grad;
      grad.in = task(i, n, mine.stage.read(in_, n, hv, true));
      grad.dm = space_.grads.dm + row_index(n, h);
      if (space_.grads.dg != nullptr) {
        grad.dg_direct = space_.grads.dg + row_index(n, h) / kp_;
        grad.dbeta_direct = space_.grads.dbeta + row_index(n, h) / kp_;
      }
      grad.dstate = space_.dstates + i * kp_;
      load(d.final_precond, n, h, grad.dstate);
      grad.dk = grads.k.rows(plan_, n, 0, h);
      grad.dg = grads.precond_g.rows(plan_, n, 0, h);
      grad.dbeta = grads.precond_beta.rows(plan_, n, 0, h);
      precond_kernels<T>().backward(grad);
      dcenter[static_cast<size_t>(i)] = grad.dcenter;
      mine.stage.close(own, grads, n, hv, true);
      if (grads.initial_precond)
        std::memcpy(grads.initial_precond.at(n, h), grad.dstate, sizeof(T) * static_cast<size_t>(plan_.K));
    });
  }

 private:
  int64_t row_index(int64_t n, int64_t h) const { return (plan_.first_token(n) * plan_.H + h * plan_.length(n)) * kp_; }

  void load(const StateTensor<T>& src, int64_t n, int64_t h, T* dst) const {
    std::memset(dst, 0, sizeof(T) * static_cast<size_t>(kp_));
    if (src && n >= 0) std::memcpy(dst, src.at(n, h), sizeof(T) * static_cast<size_t>(plan_.K));
  }

  // The first `rows` rows of a task; it has the others afterwards.
  void advance(PrecondTask<T>& x, int64_t rows) const {
    PrecondTask<T> part = x;
    part.rows = rows;
    precond_kernels<T>().forward(part);
    x.rows -= rows;
    for (RowView<const T>* view : {&x.k, &x.g, &x.beta}) view->data += rows * view->stride;
    x.m += rows * kp_;
    if (x.history != nullptr) x.history += rows * kp_;
  }

  // slot: of the initial state.
  PrecondTask<T> task(int64_t i, int64_t slot, const Inputs<T>& in) const {
    const int64_t n = i / plan_.H, h = i % plan_.H;
    const auto view = [&](const TokenTensor<T>& t) -> RowView<const T> {
      const RowView<T> rows = t.rows(plan_, n, 0, h);
      return {rows.data, rows.stride};
    };
    PrecondTask<T> x;
    x.rule = &plan_.rule;
    x.rows = plan_.length(n);
    x.K = plan_.K;
    x.k = view(in.k);
    x.g = view(in.precond_g);
    x.beta = view(in.precond_beta);
    x.center = in_.precond_center != nullptr ? in_.precond_center[h * in_.center_stride] : T(0);
    x.state = space_.states + i * kp_;
    load(in_.initial_precond, slot, h, x.state);
    x.m = space_.m + row_index(n, h);
    x.history = space_.history != nullptr ? space_.history + row_index(n, h) : nullptr;
    return x;
  }

  const Plan& plan_;
  Inputs<T> in_;
  const PrecondSpace<T>& space_;
  bool backward_;
  T* threads_;
  int64_t elements_, kp_;
};

// On the CPU slots that are not in the pool can be told from those that are.
void check_slots(const Plan& plan) {
  const Slots& slots = plan.slots;
  const auto check = [](const char* name, int64_t n, int64_t slot, int64_t count) {
    if (slot >= count) fail_usage("{} of sequence {}: expected a slot below {}, got {}", name, n, count, slot);
  };
  for (int64_t n = 0; slots && n < plan.N; ++n) {
    check(slots.accepted != nullptr ? "speculation.token_slots" : "state_pool.slots", n, slots.start(n), plan.states);
    if (slots.finals != nullptr) check("state_pool.final_slots", n, slots.end(n), plan.final_states);
    for (int64_t t = 0; slots.tokens != nullptr && t < plan.length(n); ++t)
      check("speculation.token_slots", n, slots.after(n, t), plan.final_states);
  }
  for (int64_t n = 0; plan.checkpoints.slots != nullptr && n < plan.N; ++n) {
    for (int64_t i = 0; i < plan.checkpoints_of(n); ++i)
      check("checkpoints.slots", n, plan.checkpoint_index(n, i), plan.checkpoints.count);
  }
}

// And positions that break the limits.
void check_positions(const Plan& plan) {
  const Ring& ring = plan.ring;
  for (int64_t n = 0; ring && n < plan.N; ++n) {
    if (plan.slots.start(n) < 0) continue;
    const int64_t position = ring.positions[n], length = plan.slots.skips ? plan.length(n) : 0;
    if (position < 0 || position > std::numeric_limits<int32_t>::max() - length)
      fail_usage("ring.positions of sequence {}: expected 0 to {}, got {}", n,
                 std::numeric_limits<int32_t>::max() - length, position);
    if (!ring.keeps()) continue;
    if (const int64_t previous = ring.previous[n];
        previous < 0 || previous > position || position - previous > ring.tokens) {
      fail_usage("ring.previous of sequence {}: expected {} to {}, since the call before had at most {} tokens, got {}",
                 n, std::max<int64_t>(0, position - ring.tokens), position, ring.tokens, previous);
    }
    const int64_t base = ring.previous[n] / ring.tokens * ring.tokens;
    if (position + length - base > ring.rows) {
      fail_usage("ring.rows: expected at least {}, the tokens of sequence {} that are not in its state, got {}",
                 position + length - base, n, ring.rows);
    }
  }
}

// The output of a sequence that is skipped.
template <class T>
void clear_output(const Plan& plan, const TokenTensor<T>& o, int64_t n, int64_t hv, int64_t column0, int64_t columns) {
  if (!plan.slots.clears || !o) return;
  for (int64_t t = 0; t < plan.length(n); ++t) {
    const int64_t at = o.offset(plan, n, t, hv) + column0;
    if (o.bf16 != nullptr) {
      std::fill_n(o.bf16 + at, columns, Bf16{});
    } else if (o.f16 != nullptr) {
      std::fill_n(o.f16 + at, columns, F16{});
    } else {
      std::fill_n(o.data + at, columns, T(0));
    }
  }
}

// In front of a forward call: what lies in rings into the states that it starts from.
template <class T>
void fold_rings(const Plan& plan, const Inputs<T>& in, const Outputs<T>& out, T* threads, int64_t elements) {
  const int64_t blocks = (plan.V + kValueBlock - 1) / kValueBlock;
  parallel_for(plan.N * plan.HV * blocks, [&](int64_t task) {
    const int64_t block = task % blocks, hv = task / blocks % plan.HV, n = task / blocks / plan.HV;
    if (plan.slots.start(n) < 0) return;
    ThreadSpace<T> mine = thread_space(plan, false, threads, elements);
    const int64_t column0 = block * kValueBlock;
    HeadScan<T>(plan, in, mine.tiles, nullptr, n, hv, column0, std::min(kValueBlock, plan.V - column0)).fold_ring(out);
  });
}

}  // namespace

template <class T>
size_t forward_elements(const Plan& plan) {
  Bump<T> shared(nullptr);
  GatePass<T>(plan, false, shared);
  PrecondSpace<T>(plan, false, shared);
  return static_cast<size_t>(shared.used() + plan.threads * thread_elements<T>(plan, false));
}

template <class T>
size_t backward_elements(const Plan& plan) {
  Bump<T> shared(nullptr);
  GatePass<T>(plan, true, shared);
  PrecondSpace<T>(plan, true, shared);
  return static_cast<size_t>(shared.used() + plan.threads * thread_elements<T>(plan, true));
}

// A head of a forward task. state: its own in place of that of the tiles, or null.
template <class T>
class ForwardHead {
 public:
  ForwardHead(const Plan& plan, const Inputs<T>& in, const Outputs<T>& out, const ThreadSpace<T>& mine, T* state,
              const T* m, int64_t n, int64_t hv, int64_t column0, int64_t columns)
      : tiles_(mine.tiles),
        copies_(mine.stage, in, out, n, hv, column0, columns),
        head_(plan, copies_.in(), tiles_, m, n, hv, column0, columns,
              plan.bf16_io || plan.f16_io ? &copies_ : nullptr) {
    if (state != nullptr) tiles_.state = state;
  }
  ForwardHead(const ForwardHead&) = delete;
  ForwardHead& operator=(const ForwardHead&) = delete;
  void begin(const Plan& plan, T* saved) {
    if (plan.ring && plan.slots.skips) return head_.step_ring(copies_.out());
    goes_on_ = head_.begin_forward(copies_.out(), saved);
  }
  void chunk(int64_t c, T* saved) {
    if (goes_on_) head_.forward_chunk(c, copies_.out(), saved);
  }
  void end() {
    if (goes_on_) head_.end_forward(copies_.out());
  }

 private:
  HeadScratch<T> tiles_;
  StagedChunks<T> copies_;
  HeadScan<T> head_;
  bool goes_on_ = false;
};

template <class T>
void scan_forward(const Plan& plan, const Inputs<T>& given, const Outputs<T>& out, T* saved, T* workspace) {
  check_slots(plan);
  check_positions(plan);
  Bump<T> bump(workspace);
  const Inputs<T> in = GatePass<T>(plan, false, bump).values(given);
  const PrecondSpace<T> space(plan, false, bump);
  T* threads = workspace + bump.used();
  const int64_t elements = thread_elements<T>(plan, false);
  if (plan.rule.uses_precond()) PrecondPass<T>(plan, in, space, false, threads, elements).forward(&out);
  const int64_t blocks = (plan.V + kValueBlock - 1) / kValueBlock;
  if (plan.ring && !plan.slots.skips) fold_rings(plan, in, out, threads, elements);
  const int64_t together = heads_together(plan), groups = (plan.HV + together - 1) / together;
  parallel_for(plan.N * groups * blocks, [&](int64_t task) {
    const int64_t block = task % blocks, group = task / blocks % groups, n = task / blocks / groups;
    const int64_t first = group * together, count = std::min(together, plan.HV - first);
    const int64_t column0 = block * kValueBlock, columns = std::min(kValueBlock, plan.V - column0);
    if (plan.slots.skipped(n)) {
      for (int64_t hv = first; hv < first + count; ++hv) clear_output(plan, out.o, n, hv, column0, columns);
      return;
    }
    ThreadSpace<T> mine = thread_space(plan, false, threads, elements);
    std::array<std::optional<ForwardHead<T>>, kMostHeadsTogether> heads;
    for (int64_t i = 0; i < count; ++i) {
      T* const state = i == 0 ? nullptr : mine.states + (i - 1) * plan.K * padded(plan.V);
      heads[static_cast<size_t>(i)].emplace(plan, in, out, mine, state, space.m, n, first + i, column0, columns);
      heads[static_cast<size_t>(i)]->begin(plan, saved);
    }
    for (int64_t c = 0; c < plan.chunks(n); ++c) {
      for (int64_t i = 0; i < count; ++i) heads[static_cast<size_t>(i)]->chunk(c, saved);
    }
    for (int64_t i = 0; i < count; ++i) heads[static_cast<size_t>(i)]->end();
  });
}

template <class T>
void scan_backward(const Plan& plan, const Inputs<T>& given, const Outputs<T>& d, const Inputs<T>& wanted,
                   const T* saved, T* workspace) {
  Bump<T> bump(workspace);
  const GatePass<T> gates(plan, true, bump);
  const Inputs<T> in = gates.values(given), grads = gates.open(given, wanted);
  const PrecondSpace<T> space(plan, true, bump);
  T* threads = workspace + bump.used();
  const int64_t elements = thread_elements<T>(plan, true);
  const PrecondPass<T> precond(plan, in, space, true, threads, elements);
  if (plan.rule.uses_precond()) {
    precond.forward(nullptr);
    // Columns of the padding, which no head writes.
    if (padded(plan.K) != plan.K) std::fill_n(space.grads.dm, plan.tokens() * plan.H * padded(plan.K), T(0));
    for (T* sums : {space.grads.dg, space.grads.dbeta}) {
      if (sums != nullptr) std::fill_n(sums, plan.tokens() * plan.H, T(0));
    }
  }
  // The preconditioner's gates get theirs afterwards.
  Inputs<T> head_grads = grads;
  head_grads.precond_g = head_grads.precond_beta = {};
  parallel_for(plan.N * plan.H, [&](int64_t task) {
    const int64_t n = task / plan.H, h = task % plan.H, first = h * plan.group();
    ThreadSpace<T> mine = thread_space(plan, true, threads, elements);
    const Inputs<T> staged = mine.stage.open(head_grads);
    for (int64_t hv = first; hv < first + plan.group(); ++hv) {
      const Inputs<T> inputs = mine.stage.read(in, n, hv, hv == first);
      HeadScan<T>(plan, inputs, mine.tiles, space.m, n, hv, 0, plan.V)
          .backward(mine.stage.read(d, n, hv), staged, saved, space.grads, hv == first);
      mine.stage.close(head_grads, staged, n, hv, hv + 1 == first + plan.group());
    }
  });
  std::vector<double> dcenter(static_cast<size_t>(plan.N * plan.H));
  if (plan.rule.uses_precond()) precond.backward(d, grads, dcenter);
  gates.close(given, grads, wanted);
  if (grads.precond_center == nullptr) return;
  for (int64_t h = 0; h < plan.H; ++h) {
    double sum = 0;
    for (int64_t n = 0; n < plan.N; ++n) sum += dcenter[static_cast<size_t>(n * plan.H + h)];
    grads.precond_center[h * grads.center_stride] = static_cast<T>(sum);
  }
}

#define FW_INSTANTIATE(T)                                                                  \
  template size_t forward_elements<T>(const Plan&);                                        \
  template size_t backward_elements<T>(const Plan&);                                       \
  template void scan_forward<T>(const Plan&, const Inputs<T>&, const Outputs<T>&, T*, T*); \
  template void scan_backward<T>(const Plan&, const Inputs<T>&, const Outputs<T>&, const Inputs<T>&, const T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
