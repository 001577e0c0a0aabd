// Everything else a model needs besides the recurrence: forward and backward of each operation, device-neutral
// signatures (CPU: src/ops/cpu, one operation per file). T is float or double.
//
// Contract of every function here:
//   - forward overwrites its outputs; backward overwrites gradients of activations unless a Write argument says
//     kAccumulate, and always ACCUMULATES gradients of parameters (the caller zeroes them once a step);
//   - outputs may alias inputs only where said;
//   - results do not depend on the number of threads;
//   - shapes are checked by the caller (src/nn), not here; rows are tokens, strides are free, columns contiguous.
#pragma once

#include <cstdint>
#include <span>

#include "base/arena.h"
#include "base/mat.h"
#include "base/seq_layout.h"

namespace fw {

enum class Write { kOverwrite, kAccumulate };

// Operands of matrix products: the type itself, or rounded to bfloat16 with float accumulation (T = float only).
enum class Precision { kNative, kBf16 };

enum class GateKind { kNone, kSilu, kSigmoid };

// What q and k pass before the recurrence: nothing, elu(x) + 1, relu(x), or the product of two learned affine maps of a head.
enum class FeatureMap { kNone, kElu, kRelu, kProduct };

// ---- embedding.cpp: out[t] = weight[ids[t]];  weight [vocab, d], out [T, d]
template <class T>
void embedding_forward(std::span<const int32_t> ids, Mat<const T> weight, Mat<T> out);
template <class T>
void embedding_backward(std::span<const int32_t> ids, Mat<const T> dout, Mat<T> dweight);

// ---- linear.cpp: y = x W^T + bias;  x [T, in], W [out, in] (as checkpoints have it), bias [out] or nullptr, y [T, out]
template <class T>
void linear_forward(Mat<const T> x, Mat<const T> weight, const T* bias, Mat<T> y, Precision precision, Write write = Write::kOverwrite);
// dx [T, in] (skipped when dx.data is null), dweight [out, in] and dbias [out] accumulate (skipped when null).
template <class T>
void linear_backward(Mat<const T> dy, Mat<const T> x, Mat<const T> weight, Mat<T> dx, Mat<T> dweight, T* dbias, Precision precision,
                     Write write = Write::kOverwrite);

// ---- rmsnorm.cpp: y = x * rstd * weight, rstd = 1/sqrt(mean(x^2) + eps);  x, y [T, d], weight [d], rstd [T] is saved
template <class T>
void rmsnorm_forward(Mat<const T> x, const T* weight, T eps, Mat<T> y, T* rstd);
// The residual stream and the norm that follows it in one pass: x += delta (in place), then y = rmsnorm(x).
template <class T>
void add_rmsnorm_forward(Mat<T> x, Mat<const T> delta, const T* weight, T eps, Mat<T> y, T* rstd);
template <class T>
void rmsnorm_backward(Mat<const T> dy, Mat<const T> x, const T* weight, const T* rstd, Mat<T> dx, T* dweight, Write write);

// ---- gated_rmsnorm.cpp: y = rmsnorm(o, weight) * act(gate), per head;  o, y [T*heads, V] as rows, gate likewise (its
// data may be null with kNone); y may alias o or gate in forward. Heads are given as [T, heads*V] matrices.
template <class T>
void gated_rmsnorm_forward(Mat<const T> o, Mat<const T> gate, const T* weight, T eps, int64_t head_dim, GateKind kind, Mat<T> y, T* rstd);
// rstd [T, heads] as saved; d_o and dgate are overwritten.
template <class T>
void gated_rmsnorm_backward(Mat<const T> dy, Mat<const T> o, Mat<const T> gate, const T* weight, const T* rstd, int64_t head_dim, GateKind kind, Mat<T> d_o,
                            Mat<T> dgate, T* dweight);

// ---- short_conv.cpp: y[t] = silu(sum_j weight[c, W-1-j] x[t-j]), causal, depthwise, restarting at every sequence
// x, y [T, D], weight [D, W] (checkpoints: [D, 1, W]); tails [N, W-1, D]: the last W-1 inputs of each sequence, oldest
// first, zeros before the sequence began. tail_in may be null (zeros), tail_out may be null; they may be the same memory.
template <class T>
void short_conv_forward(Mat<const T> x, const T* weight, int64_t width, const SeqLayout& layout, const T* tail_in, T* tail_out, Mat<T> y);
// The pre-activation is recomputed from x. Gradients do not flow into tail_in.
template <class T>
void short_conv_backward(Mat<const T> dy, Mat<const T> x, const T* weight, int64_t width, const SeqLayout& layout, const T* tail_in, Mat<T> dx, T* dweight);

// ---- gates.cpp
// y = scale * sigmoid(x + bias);  x, y [T, n]; bias: one number for all columns, or nullptr. May run in place.
template <class T>
void sigmoid_gate_forward(Mat<const T> x, const T* bias, T scale, Mat<T> y);
// From y: dx = dy * y * (1 - y / scale); dbias (one number) accumulates. dx may alias dy.
template <class T>
void sigmoid_gate_backward(Mat<const T> dy, Mat<const T> y, T scale, Mat<T> dx, T* dbias);
// g = -exp(a_log[c / group]) * softplus(x[c] + dt_bias[c]);  x, g [T, n], a_log [n / group], dt_bias [n]
template <class T>
void decay_gate_forward(Mat<const T> x, const T* a_log, const T* dt_bias, int64_t group, Mat<T> g);
template <class T>
void decay_gate_backward(Mat<const T> dg, Mat<const T> x, const T* a_log, const T* dt_bias, int64_t group, Mat<T> dx, T* da_log, T* ddt_bias);

// ---- log_sigmoid_decay.cpp: g = scale * log(sigmoid(x + bias));  x, g [T, n], bias [n], scale > 0. May run in place.
template <class T>
void log_sigmoid_decay_forward(Mat<const T> x, const T* bias, T scale, Mat<T> g);
// From x; dbias [n] accumulates. dx may alias dg.
template <class T>
void log_sigmoid_decay_backward(Mat<const T> dg, Mat<const T> x, const T* bias, T scale, Mat<T> dx, T* dbias);

// ---- feature_map.cpp: y = map(x) elementwise, kElu or kRelu;  x, y [T, n]; dx may alias dy
template <class T>
void feature_map_forward(FeatureMap map, Mat<const T> x, Mat<T> y);
template <class T>
void feature_map_backward(FeatureMap map, Mat<const T> dy, Mat<const T> x, Mat<T> dx);
// y = a * b elementwise;  all [T, n]; da, db may alias dy, but not each other
template <class T>
void product_forward(Mat<const T> a, Mat<const T> b, Mat<T> y);
template <class T>
void product_backward(Mat<const T> dy, Mat<const T> a, Mat<const T> b, Mat<T> da, Mat<T> db);

// ---- rotary.cpp: in x [T, heads * dim] the pair (c, c + dim / 2) of every head is turned by position * theta^(-2 c / dim), in
// place. The position counts from positions[n] (0 where null) at the first token of sequence n. kBack turns the other way: the
// gradient, since a rotation's transpose is its inverse.
enum class Turn { kForth, kBack };
template <class T>
void rotary(Mat<T> x, int64_t dim, double theta, const SeqLayout& layout, const int64_t* positions, Turn turn);

// ---- head_gates.cpp: parameters of a head as gates of every token;  x, y [T, n], s [n / group]
// y = sigmoid(s[c / group]) x
template <class T>
void head_scale_forward(Mat<const T> x, const T* s, int64_t group, Mat<T> y);
// dx += sigmoid(s) dy; ds accumulates.
template <class T>
void head_scale_backward(Mat<const T> dy, Mat<const T> x, const T* s, int64_t group, Mat<T> dx, T* ds);
// y[t, c] = s[c / group]
template <class T>
void head_constant_forward(const T* s, int64_t group, Mat<T> y);
template <class T>
void head_constant_backward(Mat<const T> dy, int64_t group, T* ds);
// y -= s[c / group] x
template <class T>
void head_subtract_forward(Mat<const T> x, const T* s, int64_t group, Mat<T> y);
// dx -= s dy; ds accumulates.
template <class T>
void head_subtract_backward(Mat<const T> dy, Mat<const T> x, const T* s, int64_t group, Mat<T> dx, T* ds);

// y[t, c] = mean of the n / m neighbouring columns of x [T, n] from c n / m on, y [T, m]; an x without data is 0.
template <class T>
void group_mean_forward(Mat<const T> x, Mat<T> y);
// dx += (skipped when absent)
template <class T>
void group_mean_backward(Mat<const T> dy, Mat<T> dx);

// ---- swiglu.cpp: y = silu(gate) * up;  all [T, n]
template <class T>
void swiglu_forward(Mat<const T> gate, Mat<const T> up, Mat<T> y);
// dgate, dup may alias gate, up.
template <class T>
void swiglu_backward(Mat<const T> dy, Mat<const T> gate, Mat<const T> up, Mat<T> dgate, Mat<T> dup);

// ---- cross_entropy.cpp: logits = h W^T, loss = sum over t with targets[t] >= 0 of -log softmax(logits)[targets[t]].
// h [T, d], weight [vocab, d]. Logits exist for a slice of the rows at a time (in scratch, slice_rows). Negative targets are not
// scored and give no gradient. Returns the sum in double and the number of scored positions.
struct LossSum {
  double nll = 0;
  int64_t count = 0;
};
// nll: per position [T] or nullptr (0 where not scored).
template <class T>
LossSum cross_entropy_forward(Mat<const T> h, Mat<const T> weight, std::span<const int32_t> targets, T* nll, Precision precision, Arena& scratch);
// The same with gradients of grad_scale * sum: dh [T, d] overwritten, dweight accumulates.
template <class T>
LossSum cross_entropy_backward(Mat<const T> h, Mat<const T> weight, std::span<const int32_t> targets, T grad_scale, Mat<T> dh, Mat<T> dweight,
                               Precision precision, Arena& scratch);

}  // namespace fw
