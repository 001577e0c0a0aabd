// Exec's fused operations: the backend's kernel, or the operations that it is made of. No kernel adds what a low rank
// of the weight gives (LowRank in ops.h).
#include <type_traits>

#include "base/arena_mark.h"
#include "ops/backend.h"
#include "ops/exec.h"
#include "ops/new_matrix.h"
#include "ops/profile.h"
#include "ops/rotary_heads.h"

namespace fw {
namespace {

// body() in a profile under a name, which moves so many values; bf16 alone has kernels of its own.
template <class T, class Body>
void profiled(const char* name, const Exec<T>& exec, int64_t values, double flops, const Body& body) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const ProfiledCall call(name, exec.device, 2 * static_cast<double>(values), flops);
    body();
  } else {
    body();
  }
}

// As a product of x [rows, cols] with so many values of weights.
template <class T, class Body>
void profiled_product(const char* name, const Exec<T>& exec, int64_t rows, int64_t weights, const Body& body) {
  profiled(name, exec, weights, 2 * static_cast<double>(weights) * static_cast<double>(rows), body);
}

}  // namespace

template <class T>
void Exec<T>::normed_linear_forward(Mat<const T> x, const W* norm, W eps, Weight<W> weight, const W* bias, bool swiglu,
                                    const SigmoidColumns& gates, Mat<T> y) const {
  profiled_product("linear_forward, normed", *this, x.rows, weight.values.rows * x.cols, [&] {
    if (ops.normed_linear_forward != nullptr && weight.low_ranks == 0 &&
        ops.normed_linear_forward(*this, x, norm, eps, weight, bias, swiglu, gates, y))
      return;
    const ArenaMark mark(arena);
    const Mat<T> h = new_matrix<T>(arena, x.rows, x.cols);
    rmsnorm_forward(x, norm, eps, h, arena.alloc<W>(x.rows));
    if (swiglu) return swiglu_linear_forward(h, weight, y);
    linear_forward(h, weight, bias, y, Write::kOverwrite);
    sigmoid_columns(*this, gates, y);
  });
}

template <class T>
void Exec<T>::swiglu_linear_forward(Mat<const T> x, Weight<W> weight, Mat<T> y) const {
  profiled_product("linear_forward, swiglu", *this, x.rows, weight.values.rows * x.cols, [&] {
    if (ops.swiglu_linear_forward != nullptr && weight.low_ranks == 0 && ops.swiglu_linear_forward(*this, x, weight, y))
      return;
    const ArenaMark mark(arena);
    const Mat<T> both = new_matrix<T>(arena, x.rows, 2 * y.cols);
    linear_forward(x, weight, nullptr, both, Write::kOverwrite);
    swiglu_forward(both.col_range(0, y.cols), both.col_range(y.cols, y.cols), y);
  });
}

template <class T>
void Exec<T>::gated_linear_forward(Mat<T> o, Mat<const T> gate, const W* norm, W eps, int64_t head_dim, GateKind kind,
                                   Weight<W> weight, Mat<T> y, Write write) const {
  profiled_product("linear_forward, gated", *this, o.rows, weight.values.rows * o.cols, [&] {
    if (ops.gated_linear_forward != nullptr && weight.low_ranks == 0 &&
        ops.gated_linear_forward(*this, o, gate, norm, eps, head_dim, kind, weight, y, write))
      return;
    const ArenaMark mark(arena);
    W* const rstd = arena.alloc<W>(o.rows * (o.cols / head_dim));
    gated_rmsnorm_forward(o, gate, nullptr, norm, eps, head_dim, kind, o, rstd);
    linear_forward(o, weight, nullptr, y, write);
  });
}

template <class T>
void Exec<T>::gated_attention_step(Mat<T> q, Mat<T> k, Mat<const T> v, Mat<T> gate, const AttentionShape& shape,
                                   const PassLayout& layout, Pages<T> past_k, Pages<T> past_v, Mat<T> o) const {
  profiled("attention_step, gated", *this, q.rows * (3 * q.cols + 2 * k.cols), 0, [&] {
    if (ops.gated_attention_step != nullptr &&
        ops.gated_attention_step(*this, q, k, v, gate, shape, layout, past_k, past_v, o))
      return;
    attention_step(q, k, v, shape, layout, past_k, past_v, o);
    sigmoid_gate_forward(gate, nullptr, W(1), gate);
    product_forward(o, gate, o);
  });
}

template <class T>
void Exec<T>::normed_rotary(Mat<T> q, Mat<T> k, const W* q_norm, const W* k_norm, W eps, const AttentionShape& shape,
                            const PassLayout& layout) const {
  profiled("rotary, normed", *this, 2 * q.rows * (q.cols + k.cols), 0, [&] {
    if (ops.normed_rotary != nullptr && ops.normed_rotary(*this, q, k, q_norm, k_norm, eps, shape, layout)) return;
    const ArenaMark mark(arena);
    W* const rstd = arena.alloc<W>(q.rows * shape.heads);
    gated_rmsnorm_forward(q, Mat<const T>(), nullptr, q_norm, eps, shape.dim, GateKind::kNone, q, rstd);
    gated_rmsnorm_forward(k, Mat<const T>(), nullptr, k_norm, eps, shape.dim, GateKind::kNone, k, rstd);
    if (!shape.turns()) return;
    rotary_heads(q, k, [&](Mat<T> x) { rotary(x, shape.dim, shape.rotated, shape.theta, layout, Rotation::kForward); });
  });
}

template <class T>
void Exec<T>::linear_pair_forward(const LinearPart<T>& first, const LinearPart<T>& second) const {
  const auto one_by_one = [&] {
    for (const LinearPart<T>* of : {&first, &second})
      linear_forward(of->x, of->weight, of->bias, of->y, Write::kOverwrite);
  };
  if (first.x.rows > row_limits(device).swiglu) return one_by_one();
  const int64_t weights = first.y.cols * first.x.cols + second.y.cols * second.x.cols;
  profiled_product("linear_forward, pair", *this, first.x.rows, weights, [&] {
    if (ops.linear_pair_forward == nullptr || first.weight.low_ranks != 0 || second.weight.low_ranks != 0 ||
        !ops.linear_pair_forward(*this, first, second))
      one_by_one();
  });
}

#define FW_INSTANTIATE(T)                                                                                              \
  template void Exec<T>::normed_linear_forward(Mat<const T>, const W*, W, Weight<W>, const W*, bool,                   \
                                               const SigmoidColumns&, Mat<T>) const;                                   \
  template void Exec<T>::swiglu_linear_forward(Mat<const T>, Weight<W>, Mat<T>) const;                                 \
  template void Exec<T>::linear_pair_forward(const LinearPart<T>&, const LinearPart<T>&) const;                        \
  template void Exec<T>::gated_attention_step(Mat<T>, Mat<T>, Mat<const T>, Mat<T>, const AttentionShape&,             \
                                              const PassLayout&, Pages<T>, Pages<T>, Mat<T>) const;                    \
  template void Exec<T>::normed_rotary(Mat<T>, Mat<T>, const W*, const W*, W, const AttentionShape&,                   \
                                       const PassLayout&) const;                                                       \
  template void Exec<T>::gated_linear_forward(Mat<T>, Mat<const T>, const W*, W, int64_t, GateKind, Weight<W>, Mat<T>, \
                                              Write) const;
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace fw
