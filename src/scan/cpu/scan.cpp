// Tasks of the CPU scan: which heads run where, the preconditioner before and after them, and the workspace.
#include "scan/scan.h"

#include <vector>

#include "base/threads.h"
#include "scan/cpu/head_scan.h"

namespace fw::cpu {
namespace {

template <class T>
int64_t scratch_elements(const Plan& plan, bool backward) {
  Bump<T> count(nullptr);
  HeadScratch<T>(plan, backward, count);
  return count.used();
}

// Padding columns of tiles that products do not write must be zero.
template <class T>
HeadScratch<T> thread_scratch(const Plan& plan, bool backward, T* base, int64_t elements) {
  T* mine = base + thread_index() * elements;
  if (padded(plan.K) != plan.K || padded(plan.V) != plan.V) std::memset(mine, 0, sizeof(T) * static_cast<size_t>(elements));
  Bump<T> bump(mine);
  return HeadScratch<T>(plan, backward, bump);
}

// Preconditioner rows of all tokens, [tokens, H, kp] each, and one state row per task.
template <class T>
struct PrecondSpace {
  PrecondSpace(const Plan& plan, bool backward, Bump<T>& bump) {
    if (!plan.rule.uses_precond()) return;
    const int64_t all = plan.tokens() * plan.H * padded(plan.K);
    m = bump.take(all);
    states = bump.take(plan.N * plan.H * padded(plan.K));
    if (!backward) return;
    history = bump.take(all);
    grads.dm = bump.take(all);
    zeroed = all;
    if (plan.rule.normaliser == Normaliser::kGated) {
      grads.dg = bump.take(plan.tokens() * plan.H);
      grads.dbeta = bump.take(plan.tokens() * plan.H);
      zeroed = grads.dm == nullptr ? 0 : grads.dbeta + plan.tokens() * plan.H - grads.dm;
    }
    dstates = bump.take(plan.N * plan.H * padded(plan.K));
  }
  T *m = nullptr, *states = nullptr, *history = nullptr, *dstates = nullptr;
  PrecondGradRows<T> grads;
  int64_t zeroed = 0;  // elements from grads.dm on that heads add to
};

template <class T>
class PrecondPass {
 public:
  PrecondPass(const Plan& plan, const Inputs<T>& in, const PrecondSpace<T>& space) : plan_(plan), in_(in), space_(space), kp_(padded(plan.K)) {}

  // The kernels walk rows that lie one after the other: one task's rows are contiguous, [n][h][token][kp].
  void forward(const Outputs<T>* out) const {
    parallel_for(plan_.N * plan_.H, [&](int64_t i) {
      PrecondTask<T> x = task(i);
      precond_kernels<T>().forward(x);
      if (out != nullptr && out->final_precond) std::memcpy(out->final_precond.at(i / plan_.H, i % plan_.H), x.state, sizeof(T) * static_cast<size_t>(plan_.K));
    });
  }

  void backward(const Outputs<T>& d, const Inputs<T>& grads, std::vector<double>& dcenter) const {
    parallel_for(plan_.N * plan_.H, [&](int64_t i) {
      const int64_t n = i / plan_.H, h = i % plan_.H;
      PrecondGrad<T> grad;
      grad.in = task(i);
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
      if (grads.initial_precond) std::memcpy(grads.initial_precond.at(n, h), grad.dstate, sizeof(T) * static_cast<size_t>(plan_.K));
    });
  }

 private:
  int64_t row_index(int64_t n, int64_t h) const { return (plan_.first_token(n) * plan_.H + h * plan_.length(n)) * kp_; }

  void load(const StateTensor<T>& src, int64_t n, int64_t h, T* dst) const {
    std::memset(dst, 0, sizeof(T) * static_cast<size_t>(kp_));
    if (src) std::memcpy(dst, src.at(n, h), sizeof(T) * static_cast<size_t>(plan_.K));
  }

  PrecondTask<T> task(int64_t i) const {
    const int64_t n = i / plan_.H, h = i % plan_.H;
    const auto view = [&](const TokenTensor<T>& t) -> RowView<const T> {
      const RowView<T> rows = t.rows(plan_, n, 0, h);
      return {rows.data, rows.stride};
    };
    PrecondTask<T> x;
    x.rule = &plan_.rule;
    x.rows = plan_.length(n);
    x.K = plan_.K;
    x.k = view(in_.k);
    x.g = view(in_.precond_g);
    x.beta = view(in_.precond_beta);
    x.center = in_.precond_center != nullptr ? in_.precond_center[h * in_.center_stride] : T(0);
    x.state = space_.states + i * kp_;
    load(in_.initial_precond, n, h, x.state);
    x.m = space_.m + row_index(n, h);
    x.history = space_.history != nullptr ? space_.history + row_index(n, h) : nullptr;
    return x;
  }

  const Plan& plan_;
  const Inputs<T>& in_;
  const PrecondSpace<T>& space_;
  int64_t kp_;
};

}  // namespace

template <class T>
size_t forward_elements(const Plan& plan) {
  Bump<T> shared(nullptr);
  PrecondSpace<T>(plan, false, shared);
  return static_cast<size_t>(shared.used() + plan.threads * scratch_elements<T>(plan, false));
}

template <class T>
size_t backward_elements(const Plan& plan) {
  Bump<T> shared(nullptr);
  PrecondSpace<T>(plan, true, shared);
  return static_cast<size_t>(shared.used() + plan.threads * scratch_elements<T>(plan, true));
}

template <class T>
void scan_forward(const Plan& plan, const Inputs<T>& in, const Outputs<T>& out, T* saved, T* workspace) {
  Bump<T> bump(workspace);
  const PrecondSpace<T> space(plan, false, bump);
  if (plan.rule.uses_precond()) PrecondPass<T>(plan, in, space).forward(&out);
  T* scratch = workspace + bump.used();
  const int64_t elements = scratch_elements<T>(plan, false);
  const int64_t blocks = (plan.V + kValueBlock - 1) / kValueBlock;
  parallel_for(plan.N * plan.HV * blocks, [&](int64_t task) {
    const int64_t block = task % blocks, hv = task / blocks % plan.HV, n = task / blocks / plan.HV;
    const int64_t column0 = block * kValueBlock;
    HeadScratch<T> tiles = thread_scratch(plan, false, scratch, elements);
    HeadScan<T>(plan, in, tiles, space.m, n, hv, column0, std::min(kValueBlock, plan.V - column0)).forward(out, saved);
  });
}

template <class T>
void scan_backward(const Plan& plan, const Inputs<T>& in, const Outputs<T>& d, const Inputs<T>& grads, const T* saved, T* workspace) {
  Bump<T> bump(workspace);
  const PrecondSpace<T> space(plan, true, bump);
  const PrecondPass<T> precond(plan, in, space);
  if (plan.rule.uses_precond()) {
    precond.forward(nullptr);
    std::memset(space.grads.dm, 0, sizeof(T) * static_cast<size_t>(space.zeroed));
  }
  T* scratch = workspace + bump.used();
  const int64_t elements = scratch_elements<T>(plan, true);
  parallel_for(plan.N * plan.H, [&](int64_t task) {
    const int64_t n = task / plan.H, h = task % plan.H;
    HeadScratch<T> tiles = thread_scratch(plan, true, scratch, elements);
    for (int64_t i = 0; i < plan.group(); ++i) {
      HeadScan<T>(plan, in, tiles, space.m, n, h * plan.group() + i, 0, plan.V).backward(d, grads, saved, space.grads, i == 0);
    }
  });
  if (!plan.rule.uses_precond()) return;
  std::vector<double> dcenter(static_cast<size_t>(plan.N * plan.H));
  precond.backward(d, grads, dcenter);
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
