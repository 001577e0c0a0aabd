#include "nn/experts.h"

#include "base/arena_mark.h"
#include "nn/activations.h"
#include "ops/low_rank.h"

namespace fw {
namespace {

// Without the padding of new_matrix's rows.
template <class T>
Mat<T> new_column(Arena& arena, int64_t rows) {
  return {arena.alloc<T>(rows), rows, 1};
}

}  // namespace

template <class T>
Experts<T>::Experts(const MlpSpec& spec, const std::string& prefix, Params<Wide<T>>& params) : spec_(spec) {
  const ExpertsSpec& of = spec.experts;
  std::vector<ParamSpec> list = experts_parameters(spec, prefix);
  size_t next = 0;
  router_ = params.declare(std::move(list[next++]));
  if (of.correction_bias) bias_ = params.declare(std::move(list[next++]));
  gate_up_ = params.declare(std::move(list[next++]));
  down_ = params.declare(std::move(list[next++]));
  if (of.shared_size == 0) return;
  shared_ = std::make_unique<Mlp<T>>(shared_expert_spec(spec), prefix + "shared_expert.", params);
  if (of.shared_gate) shared_gate_ = params.declare(std::move(list.back()));
}

template <class T>
Weight<Wide<T>> Experts<T>::gate_up_weight(const Pass<T>& pass) const {
  return pass.params.weight(gate_up_, experts() * 2 * size(), spec_.hidden);
}

template <class T>
Weight<Wide<T>> Experts<T>::down_weight(const Pass<T>& pass) const {
  return pass.params.weight(down_, experts() * spec_.hidden, size());
}

template <class T>
void Experts<T>::route(const Pass<T>& pass, Mat<const T> x, Context& c) const {
  Arena& arena = pass.exec.arena;
  const RouterShape& router = spec_.experts.router;
  const int64_t rows = x.rows * router.chosen;
  c.rows = {router.experts, router.chosen, arena.alloc<int32_t>(router.experts + 1)};
  c.rows.source = arena.alloc<int32_t>(rows);
  c.rows.row_of = arena.alloc<int32_t>(rows);
  c.rows.expert = arena.alloc<int32_t>(rows);
  c.weights = new_column<T>(arena, rows);
  c.scores = new_matrix<T>(arena, x.rows, router.experts);
  pass.exec.linear_forward(x, pass.params.weight(router_, router.experts, spec_.hidden), nullptr, c.scores,
                           Write::kOverwrite);
  pass.exec.route_forward(router, c.scores, bias_ >= 0 ? pass.params.value(bias_) : nullptr, c.scores, c.rows,
                          c.weights, pass.expert_load);
}

template <class T>
void Experts<T>::project(const Pass<T>& pass, Mat<const T> x, Context& c) const {
  const Exec<T>& exec = pass.recompute >= Recompute::kMlp ? pass.transient_exec() : pass.exec;
  c.gate_up = new_matrix<T>(exec.arena, c.weights.rows, 2 * size());
  const ArenaMark mark(pass.exec.arena);
  const Mat<T> rows = new_matrix<T>(pass.exec.arena, c.weights.rows, spec_.hidden);
  pass.exec.gather_expert_rows(x, c.rows, rows);
  expert_product_forward<T>(pass.exec, rows, c.rows, gate_up_weight(pass), c.gate_up);
}

template <class T>
void Experts<T>::activate(const Pass<T>& pass, Context& c) const {
  c.act = new_matrix<T>(pass.transient_exec().arena, c.weights.rows, size());
  pass.exec.swiglu_forward(c.gate_up.col_range(0, size()), c.gate_up.col_range(size(), size()), c.act);
}

template <class T>
void Experts<T>::add_shared(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Context& c) const {
  if (shared_gate_ < 0) {
    Pass<T> adding = pass;
    adding.adds = true;
    return shared_->forward(adding, x, {}, y, c.shared);
  }
  Arena& arena = pass.exec.arena;
  c.shared_out = new_matrix<T>(arena, x.rows, spec_.hidden);
  shared_->forward(pass, x, {}, c.shared_out, c.shared);
  c.gate = new_column<T>(arena, x.rows);
  pass.exec.linear_forward(x, pass.params.weight(shared_gate_, 1, spec_.hidden), nullptr, c.gate, Write::kOverwrite);
  pass.exec.sigmoid_gate_forward(c.gate, nullptr, Wide<T>(1), c.gate);
  const ArenaMark mark(arena);
  const Mat<T> gated = new_matrix<T>(arena, x.rows, spec_.hidden);
  pass.exec.scale_rows_forward(c.shared_out, c.gate, gated);
  pass.exec.add_rows(gated, y);
}

template <class T>
void Experts<T>::forward(const Pass<T>& pass, Mat<const T> x, Mat<T> y, Context& c) const {
  route(pass, x, c);
  project(pass, x, c);
  activate(pass, c);
  {
    Arena& arena = pass.exec.arena;
    const ArenaMark mark(arena);
    const Mat<T> weighted = new_matrix<T>(arena, c.act.rows, size());
    pass.exec.scale_rows_forward(c.act, c.weights, weighted);
    const Mat<T> out = new_matrix<T>(arena, c.act.rows, spec_.hidden);
    expert_product_forward<T>(pass.exec, weighted, c.rows, down_weight(pass), out);
    pass.exec.sum_expert_rows(out, c.rows, y, Write::kOverwrite);
  }
  if (shared_ != nullptr) add_shared(pass, x, y, c);
}

// Adds to dx.
template <class T>
void Experts<T>::shared_backward(const Pass<T>& pass, Context& c, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const {
  Arena& arena = pass.exec.arena;
  const ArenaMark mark(arena);
  Mat<const T> dshared = dy;
  if (shared_gate_ >= 0) {
    const Mat<T> before_gate = new_matrix<T>(arena, x.rows, spec_.hidden), dgate = new_column<T>(arena, x.rows);
    pass.exec.scale_rows_backward(dy, c.shared_out, c.gate, before_gate, dgate);
    pass.exec.sigmoid_gate_backward(dgate, c.gate, Wide<T>(1), dgate, nullptr);
    pass.exec.linear_backward(dgate, x, pass.params.weight(shared_gate_, 1, spec_.hidden), dx,
                              pass.params.grad_matrix(shared_gate_, 1, spec_.hidden), nullptr, Write::kAccumulate);
    dshared = before_gate;
  }
  const Mat<T> dx_shared = new_matrix<T>(arena, x.rows, spec_.hidden);
  shared_->backward(pass, c.shared, x, dshared, dx_shared);
  pass.exec.add_rows(dx_shared, dx);
}

template <class T>
void Experts<T>::backward(const Pass<T>& pass, Context& c, Mat<const T> x, Mat<const T> dy, Mat<T> dx) const {
  Params<Wide<T>>& params = pass.params;
  Arena& arena = pass.exec.arena;
  const RouterShape& router = spec_.experts.router;
  if (pass.recompute >= Recompute::kMlp) project(pass, x, c);
  if (pass.recompute_exec != nullptr) activate(pass, c);

  const int64_t rows = c.weights.rows;
  const Mat<T> dweights = new_column<T>(arena, rows);
  {
    const ArenaMark mark(arena);
    const Mat<T> wide = new_matrix<T>(arena, rows, spec_.hidden), weighted = new_matrix<T>(arena, rows, size()),
                 dact = new_matrix<T>(arena, rows, size());
    pass.exec.scale_rows_forward(c.act, c.weights, weighted);
    pass.exec.gather_expert_rows(dy, c.rows, wide);
    expert_product_backward<T>(pass.exec, wide, weighted, c.rows, down_weight(pass), dact,
                               params.grad_matrix(down_, experts() * spec_.hidden, size()));
    pass.exec.scale_rows_backward(dact, c.act, c.weights, dact, dweights);
    const Mat<T> gate = c.gate_up.col_range(0, size()), up = c.gate_up.col_range(size(), size());
    pass.exec.swiglu_backward(dact, gate, up, gate, up);
    pass.exec.gather_expert_rows(x, c.rows, wide);
    const Mat<T> dwide = new_matrix<T>(arena, rows, spec_.hidden);
    expert_product_backward<T>(pass.exec, c.gate_up, wide, c.rows, gate_up_weight(pass), dwide,
                               params.grad_matrix(gate_up_, experts() * 2 * size(), spec_.hidden));
    pass.exec.sum_expert_rows(dwide, c.rows, dx, Write::kOverwrite);
  }
  const Mat<T> dlogits = new_matrix<T>(arena, x.rows, router.experts);
  pass.exec.route_backward(router, dweights, c.scores, c.rows, c.weights, pass.balance, dlogits);
  pass.exec.linear_backward(dlogits, x, params.weight(router_, router.experts, spec_.hidden), dx,
                            params.grad_matrix(router_, router.experts, spec_.hidden), nullptr, Write::kAccumulate);
  if (shared_ != nullptr) shared_backward(pass, c, x, dy, dx);
}

template class Experts<float>;
template class Experts<double>;
template class Experts<Bf16>;

}  // namespace fw
