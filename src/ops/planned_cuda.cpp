// Operations that compute nothing: with a PlanDevice of the CUDA kind a pass only allocates, and takes what that
// device's operations would. The device planned for has warp groups, as those for which large models are planned.
#include "ops/backend.h"
#include "ops/cuda/kinds.h"
#include "ops/cuda/scratch.h"

namespace fw {
namespace {

template <class Function>
struct Skip;
template <class... Args>
struct Skip<void (*)(Args...)> {
  static void call(Args...) {}
};

// Takes and gives back what gradients of parameters need: partial sums of an elementwise operation over x.
template <class T, class W>
void plan_sums(const Exec<T>& exec, int sums, const Mat<W>& x, bool of_groups = false) {
  if (x.rows == 0 || x.cols == 0) return;
  const ArenaMark mark(exec.arena);
  cuda::partial_sums(exec.arena, sums * cuda::elementwise_sum_rows(x.rows), x.cols);
  if (of_groups) cuda::partial_sums(exec.arena, 1, x.cols);
}

// The operations that take scratch, by the names of the list.
template <class T>
struct Plan {
  using W = Wide<T>;
  using E = const Exec<T>&;

  static void linear_backward(E exec, Mat<const T> dy, Mat<const T>, Weight<W>, Mat<T>, Mat<W>, W* dbias, Write) {
    const ArenaMark mark(exec.arena);
    if (dbias != nullptr) cuda::partial_sums(exec.arena, cuda::parts_of(dy.rows, cuda::kBiasRun), dy.cols);
  }
  static void embedding_backward(E exec, const int32_t*, Mat<const T> dout, Mat<W>) {
    const ArenaMark mark(exec.arena);
    const cuda::EmbeddingScratch scratch(exec.arena, dout.rows, dout.cols);
  }
  static void rmsnorm_backward(E exec, Mat<const T>, Mat<const T> x, const W*, const W*, Mat<T>, W*, Write) {
    const ArenaMark mark(exec.arena);
    cuda::partial_sums(exec.arena, cuda::norm_sums(x.rows), x.cols);
  }
  static void gated_rmsnorm_backward(E exec, Mat<const T>, Mat<const T> o, Mat<const T>, const W*, const W*, const W*,
                                     int64_t head_dim, GateKind, Mat<T>, Mat<T>, W*) {
    const ArenaMark mark(exec.arena);
    cuda::partial_sums(exec.arena, cuda::head_norm_sums(o.rows * (o.cols / head_dim)), head_dim);
  }
  static void short_conv_backward(E exec, Mat<const T>, Mat<const T> x, const W*, const W* bias, int64_t width,
                                  const PassLayout&, const T*, Mat<T>, W*, W*) {
    const ArenaMark mark(exec.arena);
    const int64_t runs = cuda::parts_of(x.rows, cuda::kConvRun);
    cuda::partial_sums(exec.arena, runs, x.cols * width);
    if (bias != nullptr) cuda::partial_sums(exec.arena, runs, x.cols);
  }
  static void gated_conv_backward(E exec, Mat<const T>, Mat<const T> x, Mat<const T>, const W*, const W*, int64_t width,
                                  const PassLayout&, const T*, Mat<T>, Mat<T>, W*, W*) {
    const ArenaMark mark(exec.arena);
    const int64_t runs = cuda::parts_of(x.rows, cuda::kGatedConvRun);
    cuda::partial_sums(exec.arena, runs, x.cols * width);
    cuda::partial_sums(exec.arena, runs, x.cols);
  }
  static void sigmoid_gate_backward(E exec, Mat<const T>, Mat<const T> y, W, Mat<T>, W* dbias) {
    if (dbias != nullptr) plan_sums(exec, 1, y, true);
  }
  static void decay_gate_backward(E exec, Mat<const W>, Mat<const T> x, const W*, const W*, int64_t, Mat<T>, W*, W*) {
    plan_sums(exec, 2, x, true);
  }
  static void log_sigmoid_decay_backward(E exec, Mat<const W>, Mat<const T> x, const W*, W, Mat<T>, W*) {
    plan_sums(exec, 1, x);
  }
  static void bounded_decay_forward(E exec, Mat<const T> x, Mat<const W>, int64_t, Mat<W>) {
    const ArenaMark mark(exec.arena);
    const cuda::BoundsScratch scratch(exec.arena, x.cols);
  }
  static void bounded_decay_backward(E exec, Mat<const W>, Mat<const T> x, Mat<const W>, int64_t, Mat<T>, Mat<W>) {
    const ArenaMark mark(exec.arena);
    const cuda::BoundsScratch scratch(exec.arena, x.cols);
    plan_sums(exec, 1, x);
  }
  static void head_scale_backward(E exec, Mat<const T>, Mat<const T> x, const W*, int64_t, Mat<T>, W*) {
    plan_sums(exec, 1, x, true);
  }
  static void head_constant_backward(E exec, Mat<const T> dy, int64_t group, W*) {
    if (dy.rows == 0 || dy.cols == 0) return;
    const ArenaMark mark(exec.arena);
    cuda::head_constant_sums(exec.arena, dy.rows, dy.cols / group);
  }
  static void head_add_backward(E exec, Mat<const T>, Mat<const T> x, const W*, int64_t, Mat<T>, W*) {
    plan_sums(exec, 1, x, true);
  }
  static void time_step_backward(E exec, Mat<const T>, Mat<const W>, Mat<const T> x, const W*, const W*, Mat<T>, W*,
                                 W*) {
    plan_sums(exec, 2, x);
  }
  static void selective_scan_forward(E exec, ScanLaw, Mat<const T> u, Mat<const T> step, Mat<const T> q, Mat<const T> k,
                                     const W*, const W*, const PassLayout& layout, const W*, W*, W*, Mat<T> y) {
    const ArenaMark mark(exec.arena);
    plan_scan_parts(exec, layout, u, q, cuda::scan_in_packets(u, step, q, k, y));
  }
  static void plan_scan_parts(E exec, const PassLayout& layout, const Mat<const T>& u, const Mat<const T>& q,
                              bool packets) {
    cuda::ScanPartsScratch(exec.arena, layout.host.count(), cuda::scan_parts(layout.host, u.cols, q.cols, packets),
                           u.cols, q.cols);
  }
  static void selective_scan_backward(E exec, ScanLaw law, Mat<const T> dy, Mat<const T> u, Mat<const T> step,
                                      Mat<const T> q, Mat<const T> k, const W*, const W*, const PassLayout& layout,
                                      const W*, const W*, Mat<T> du, Mat<T> dstep, Mat<T>, Mat<T>, W*, W*, W*) {
    if (layout.host.count() == 0) return;
    const ArenaMark mark(exec.arena);
    const bool packets = cuda::scan_in_packets(u, step, q, k, dy, du, dstep);
    const int64_t pieces = layout.host.count() * cuda::scan_parts(layout.host, u.cols, q.cols, packets);
    const cuda::SelectiveScratch scratch(exec.arena, law, u.rows, pieces, u.cols, q.cols, packets);
    plan_scan_parts(exec, layout, u, q, packets);
  }
  // Sums over tokens of kSums numbers a column (head_rows.cuh).
  static void plan_head_rows(E exec, int sums, const Mat<const T>& x) {
    if (x.rows == 0) return;
    const ArenaMark mark(exec.arena);
    cuda::partial_sums(exec.arena, sums * cuda::parts_of(x.rows, cuda::kHeadRun), x.cols);
  }
  static void group_norm_backward(E exec, Mat<const T>, Mat<const T> x, int64_t, const W*, const W*, Mat<T>, W*, W*,
                                  Write) {
    plan_head_rows(exec, 2, x);
  }
  static void rwkv7_front_backward(E exec, const Rwkv7Shape&, Mat<const W>, Mat<const T>, Mat<const T>, Mat<const T>,
                                   Mat<const T>, Mat<const T>, Mat<const T> k, const W*, const W*, Mat<T>, Mat<T>,
                                   Mat<T>, W*, W*) {
    plan_head_rows(exec, 2, k);
  }
  static void bonus_gate_backward(E exec, Mat<const T>, Mat<const T> o, Mat<const T>, Mat<const T>, Mat<const T>,
                                  Mat<const T>, const W*, int64_t, Mat<T>, Mat<T>, Mat<T>, Mat<T>, Mat<T>, W*) {
    plan_head_rows(exec, 1, o);
  }
  static void token_shift_backward(E exec, Mat<const T>, Mat<const T> x, const W*, int64_t count, const PassLayout&,
                                   const T*, Mat<T>, W*) {
    const ArenaMark mark(exec.arena);
    cuda::partial_sums(exec.arena, cuda::parts_of(x.rows, cuda::kShiftRun), count * x.cols);
  }
  static void mamba3_time_backward(E exec, const Mamba3Decay&, Mat<const T>, Mat<const W>, Mat<const T> dt_in,
                                   Mat<const T>, const W*, Mat<T>, Mat<T>, W*) {
    plan_sums(exec, 1, dt_in);
  }
  static void mamba3_rotary_forward(E exec, const Mamba3Shape& shape, Mat<const T>, Mat<const T>, const W*, const W*,
                                    Mat<const T> angle, Mat<const T>, const PassLayout& layout, W*, W* checkpoints,
                                    Mat<T>, Mat<T>, Mat<W>) {
    if (angle.rows == 0) return;
    const ArenaMark mark(exec.arena);
    const cuda::RotaryScratch scratch(exec.arena, shape, angle.rows, angle.cols, layout.host.count(),
                                      checkpoints != nullptr);
  }
  static void mamba3_rotary_backward(E exec, const Mamba3Shape& shape, Mat<const T>, Mat<const T>, Mat<const W>,
                                     Mat<const T>, Mat<const T>, const W*, const W*, Mat<const T> angle, Mat<const T>,
                                     const W*, const PassLayout& layout, Mat<T>, Mat<T>, Mat<T>, Mat<T>, W*, W*, W*) {
    if (angle.rows == 0) return;
    const ArenaMark mark(exec.arena);
    const cuda::RotaryBackwardScratch scratch(exec.arena, shape, angle.rows, angle.cols, layout.host.count());
  }
  static void mamba3_diag_backward(E exec, const Mamba3Shape& shape, Mat<const T>, Mat<const W>, Mat<const T>,
                                   Mat<const W> now, Mat<const W>, const W* skip, Mat<T>, Mat<W>, Mat<W>, Mat<W>, W*) {
    if (skip == nullptr || now.rows == 0) return;
    const ArenaMark mark(exec.arena);
    cuda::near_sums(exec.arena, now.rows, shape.heads);
    plan_sums(exec, 1, now);
  }
  static void mamba3_expand_backward(E exec, const Mamba3Shape& shape, Mat<const T>, Mat<const T> x, const W*, Mat<T>,
                                     W*) {
    const ArenaMark mark(exec.arena);
    cuda::factor_sums(exec.arena, shape);
    plan_head_rows(exec, static_cast<int>(shape.rank), x);
  }
  static void mamba3_gate_backward(E exec, const Mamba3Shape& shape, Mat<const T>, Mat<const T>, Mat<const T> z,
                                   const W* up, const W*, const W* norm, const W*, Mat<T>, Mat<T>, W*, W*, W*) {
    const int factors = up != nullptr ? static_cast<int>(shape.rank) : 0,
              sums = 2 * factors + (norm != nullptr ? 1 : 0);
    if (sums == 0) return;
    const ArenaMark mark(exec.arena);
    if (factors > 0) cuda::factor_sums(exec.arena, shape);
    plan_head_rows(exec, sums, z);
  }
  static void mesa_solve(E exec, const MesaShape& shape, Mat<const T> rhs, Mat<const T> k, Mat<const T>, Mat<const W>,
                         const W*, const PassLayout& layout, const W*, Mat<T> x) {
    if (x.rows == 0 || !cuda::takes_mesa_chunks(shape, rhs, k, x)) return;
    const ArenaMark mark(exec.arena);
    cuda::mesa_scratch(exec.arena, shape, x.rows, layout.host.count());
  }
  static void mesa_lambda_backward(E exec, Mat<const T> x, Mat<const T>, const W*, W*) { plan_sums(exec, 1, x); }
  static void head_subtract_backward(E exec, Mat<const T>, Mat<const T> x, const W*, int64_t, Mat<T>, W*) {
    plan_sums(exec, 1, x, true);
  }
  static void route_forward(E exec, const RouterShape& shape, Mat<const T> logits, const W*, Mat<T>, const ExpertRows&,
                            Mat<T>, int64_t*) {
    const ArenaMark mark(exec.arena);
    const cuda::RouteScratch scratch(exec.arena, logits.rows, shape);
  }

  static void attention_forward(E exec, Mat<const T> q, Mat<const T> k, Mat<const T> v, const AttentionShape& shape,
                                const PassLayout& layout, Pages<T> past, Pages<T>, Mat<T> o, Mat<W>) {
    if (q.rows == 0 || !cuda::takes_attention_tiles<T>(shape, {}, q, k, v, o)) return;
    const cuda::KeysBefore before(layout, shape.window);
    if (past && layout.host_positions == nullptr) return;
    const ArenaMark mark(exec.arena);
    if (before.any) {
      cuda::key_offsets(exec.arena, before.sequences);
      for (int tensors = 0; tensors < 2; ++tensors) cuda::all_keys<T>(exec.arena, shape, before.rows);
    }
    cuda::attention_rows(exec.arena, shape, q.rows);
    cuda::attention_list(exec.arena, cuda::attention_tile_count(layout));
  }
  static void attention_backward(E exec, Mat<const T> d_o, Mat<const T> q, Mat<const T> k, Mat<const T> v,
                                 const AttentionShape& shape, const PassLayout& layout, Pages<T> past, Pages<T>,
                                 Mat<const T> o, Mat<const W>, Mat<T> dq, Mat<T> dk, Mat<T> dv) {
    if (q.rows == 0) return;
    const ArenaMark mark(exec.arena);
    cuda::attention_rows(exec.arena, shape, q.rows);
    if (!cuda::takes_attention_tiles<T>(shape, past, d_o, q, k, v, o, dq, dk, dv)) return;
    cuda::attention_rows(exec.arena, shape, q.rows);
    for (int lists = 0; lists < 2; ++lists) cuda::attention_list(exec.arena, cuda::attention_tile_count(layout));
  }

  static void attention_step(E exec, Mat<T> q, Mat<T>, Mat<const T>, const AttentionShape& shape, const PassLayout&,
                             Pages<T> past, Pages<T>, Mat<T>) {
    const ArenaMark mark(exec.arena);
    cuda::decode_parts(exec.arena, shape, q.rows, cuda::decode_runs(shape, past));
  }

  static void cross_entropy_forward(E exec, Mat<const T> h, Weight<W> weight, const int32_t*, W* nll, LossSum*) {
    plan_slice(exec, h, weight, nll);
  }
  static void cross_entropy_backward(E exec, Mat<const T> h, Weight<W> weight, const int32_t*, W, Mat<T>, Mat<W>,
                                     LossSum*) {
    plan_slice(exec, h, weight, nullptr);
  }
  static void plan_slice(E exec, Mat<const T> h, const Weight<W>& weight, W* nll) {
    if (h.rows == 0) return;
    const ArenaMark mark(exec.arena);
    const cuda::LogitsSlice<T> slice(exec.arena, h.rows, weight.values.rows, nll);
  }

  static void square_sum(E exec, const W*, ParamPieces pieces, double*) {
    const ArenaMark mark(exec.arena);
    cuda::square_sums(exec.arena, pieces.count);
  }
  static void bf16_square_sum(E exec, const Bf16*, ParamPieces pieces, double* sum) {
    square_sum(exec, nullptr, pieces, sum);
  }
};

}  // namespace

template <class T>
const Ops<T>& planned_cuda_ops() {
  static constexpr Ops<T> kTable = [] {
    Ops<T> ops;
#define FW_LAYER_OP(kind, name, args) \
  if constexpr (cuda::kinds::kind) ops.name = &Skip<decltype(ops.name)>::call;
#define FW_OP(name, args) ops.name = &Skip<decltype(ops.name)>::call;
#include "ops/ops.def"
#undef FW_OP
    using P = Plan<T>;
    ops.linear_backward = &P::linear_backward;
    ops.embedding_backward = &P::embedding_backward;
    ops.rmsnorm_backward = &P::rmsnorm_backward;
    ops.gated_rmsnorm_backward = &P::gated_rmsnorm_backward;
    ops.short_conv_backward = &P::short_conv_backward;
    ops.gated_conv_backward = &P::gated_conv_backward;
    ops.sigmoid_gate_backward = &P::sigmoid_gate_backward;
    ops.decay_gate_backward = &P::decay_gate_backward;
    ops.log_sigmoid_decay_backward = &P::log_sigmoid_decay_backward;
    ops.bounded_decay_forward = &P::bounded_decay_forward;
    ops.bounded_decay_backward = &P::bounded_decay_backward;
    ops.head_scale_backward = &P::head_scale_backward;
    ops.head_constant_backward = &P::head_constant_backward;
    ops.head_add_backward = &P::head_add_backward;
    ops.time_step_backward = &P::time_step_backward;
    ops.selective_scan_forward = &P::selective_scan_forward;
    ops.selective_scan_backward = &P::selective_scan_backward;
    ops.head_subtract_backward = &P::head_subtract_backward;
    ops.group_norm_backward = &P::group_norm_backward;
    ops.rwkv7_front_backward = &P::rwkv7_front_backward;
    ops.bonus_gate_backward = &P::bonus_gate_backward;
    ops.token_shift_backward = &P::token_shift_backward;
    ops.mamba3_time_backward = &P::mamba3_time_backward;
    ops.mamba3_rotary_forward = &P::mamba3_rotary_forward;
    ops.mamba3_rotary_backward = &P::mamba3_rotary_backward;
    ops.mamba3_diag_backward = &P::mamba3_diag_backward;
    ops.mamba3_expand_backward = &P::mamba3_expand_backward;
    ops.mamba3_gate_backward = &P::mamba3_gate_backward;
    ops.mesa_solve = &P::mesa_solve;
    ops.mesa_lambda_backward = &P::mesa_lambda_backward;
    ops.route_forward = &P::route_forward;
    ops.attention_forward = &P::attention_forward;
    ops.attention_backward = &P::attention_backward;
    ops.attention_step = &P::attention_step;
    ops.cross_entropy_forward = &P::cross_entropy_forward;
    ops.cross_entropy_backward = &P::cross_entropy_backward;
    ops.square_sum = &P::square_sum;
    ops.bf16_square_sum = &P::bf16_square_sum;
    return ops;
  }();
  return kTable;
}

template const Ops<float>& planned_cuda_ops<float>();
template const Ops<Bf16>& planned_cuda_ops<Bf16>();

}  // namespace fw
