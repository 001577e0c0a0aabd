// Products after norms, before SwiGLU and two at a time for the few rows of decoded tokens. On a CUDA device they
// are one kernel. Elsewhere, and where its kernel does not take the shapes, they are the operations that they are made
// of.
#pragma once

#include <cstdint>

#include "ops/exec.h"

namespace fw {

// Rows up to which a weight costs the reading of it, however few they are.
inline constexpr int64_t kGemvMaxM = 8;
// Rows up to which a product and the SwiGLU after it are one kernel.
inline constexpr int64_t kSmallGemmMaxM = 64;

// With h = rmsnorm(x) (norm [in], eps; rounded where a device likes):
// - y = h W^T + bias,
// - with swiglu: y = silu(h W0^T) (h W1^T), W0 the upper half of W's rows and W1 the lower.
//
// x [T, in], W [out, in], bias [out] or null (null with swiglu), y [T, out] or [T, out / 2]. A row's bits do not depend
// on the others of up to kGemvMaxM.
template <class T>
void normed_linear_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* norm, Wide<T> eps,
                           Weight<Wide<T>> weight, const Wide<T>* bias, bool swiglu, Mat<T> y);

// y = silu(x W0^T) (x W1^T), W0 the upper half of W's rows and W1 the lower.  x [T, in], W [out, in], y [T, out / 2].
// On a GPU one kernel, for more than kGemvMaxM and at most kSmallGemmMaxM rows, where a row's bits do not depend on the
// others.
template <class T>
void swiglu_linear_forward(const Exec<T>& exec, Mat<const T> x, Weight<Wide<T>> weight, Mat<T> y);

// y = h W^T (+ y where kAccumulate) with h = gated_rmsnorm(o, gate, norm, eps, head_dim, kind), a recurrence's way out
// of its layer. o, gate [T, in], norm [head_dim], W [out, in], y [T, out]. It may leave h in o. On a GPU a row's bits
// do not depend on the others of up to kGemvMaxM.
template <class T>
void gated_linear_forward(const Exec<T>& exec, Mat<T> o, Mat<const T> gate, const Wide<T>* norm, Wide<T> eps,
                          int64_t head_dim, GateKind kind, Weight<Wide<T>> weight, Mat<T> y, Write write);

// y = x W^T + bias.  x [T, in], W [out, in], bias [out] or null, y [T, out].
template <class T>
struct LinearPart {
  Mat<const T> x;
  Weight<Wide<T>> weight;
  const Wide<T>* bias;
  Mat<T> y;
};
// Both, of the same T, which know nothing of each other, to the bits of linear_forward. On a GPU one kernel for up to
// kSmallGemmMaxM rows of one width.
template <class T>
void linear_pair_forward(const Exec<T>& exec, const LinearPart<T>& first, const LinearPart<T>& second);

// The kernels of the CUDA device; false, and nothing is done, where they do not take the shapes, and in a build without
// CUDA.
bool gated_linear_on_cuda(const Exec<Bf16>& exec, Mat<const Bf16> o, Mat<const Bf16> gate, const float* norm, float eps,
                          int64_t head_dim, GateKind kind, const Weight<float>& weight, Mat<Bf16> y, Write write);
bool linear_pair_on_cuda(const Exec<Bf16>& exec, const LinearPart<Bf16>& first, const LinearPart<Bf16>& second);
bool swiglu_linear_on_cuda(const Exec<Bf16>& exec, Mat<const Bf16> x, const Weight<float>& weight, Mat<Bf16> y);
bool normed_linear_on_cuda(const Exec<Bf16>& exec, Mat<const Bf16> x, const float* norm, float eps,
                           const Weight<float>& weight, const float* bias, bool swiglu, Mat<Bf16> y);

}  // namespace fw
