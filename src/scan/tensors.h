// The caller's tensors, checked against the plan and typed.
#pragma once

#include <type_traits>

#include "base/bf16.h"
#include "base/f16.h"
#include "fastweight/fastweight.h"
#include "rule/tokens.h"
#include "scan/cpu/kernels.h"
#include "scan/plan.h"

namespace fw {

// [B, T, heads, dim] or [B, T, heads] (dim 1): rows of one head. A head index of the recurrence (value head) maps onto
// `heads` by division when the tensor has one per key head. A tensor of bf16 or float16 numbers has no rows. A task
// works on a float copy of what it needs of it (cpu/stage.h), whose rows are those of that task's sequence and head
// alone.
template <class T>
struct TokenTensor {
  T* data = nullptr;
  Bf16* bf16 = nullptr;  // instead of data
  F16* f16 = nullptr;    // the same
  int64_t heads = 0, dim = 0;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  bool staged = false;
  int64_t staged_first = 0;  // of a staged copy: the token that its first row is

  bool narrow() const { return bf16 != nullptr || f16 != nullptr; }
  explicit operator bool() const { return data != nullptr || narrow(); }
  // `count` numbers from element `at` on of a tensor that is narrow(), as floats, and rounded back.
  void widen(int64_t at, int64_t count, T* to) const {
    if constexpr (std::is_same_v<T, float>)
      f16 != nullptr ? widen_f16(count, f16 + at, to) : widen_bf16(count, bf16 + at, to);
  }
  void round(int64_t at, int64_t count, const T* from) const {
    if constexpr (std::is_same_v<T, float>)
      f16 != nullptr ? round_to_f16(count, from, f16 + at) : round_to_bf16(count, from, bf16 + at);
  }
  int64_t offset(const Plan& plan, int64_t n, int64_t begin, int64_t head) const {
    if (staged) return (begin - staged_first) * stride_t;
    const int64_t b = plan.packed ? 0 : n;
    const int64_t t = plan.packed ? plan.first_token(n) + begin : begin;
    return b * stride_b + t * stride_t + head * stride_h;
  }
  cpu::RowView<T> rows(const Plan& plan, int64_t n, int64_t begin, int64_t head) const {
    if (data == nullptr) return {};
    return {data + offset(plan, n, begin, head), stride_t};
  }
};

// [N, heads, rows, cols]: states; cols contiguous.
template <class T>
struct StateTensor {
  T* data = nullptr;
  Bf16* bf16 = nullptr;  // instead of data: the initial and the final state of forward
  int64_t stride_n = 0, stride_h = 0, stride_r = 0;
  explicit operator bool() const { return data != nullptr || bf16 != nullptr; }
  T* at(int64_t n, int64_t h) const { return data + n * stride_n + h * stride_h; }
};

// A parameter with a number a head, or a channel of one: [heads] (stride_k 0) or [heads, K].
template <class T>
struct HeadTensor {
  T* data = nullptr;
  int64_t heads = 0, stride_h = 0, stride_k = 0;
  explicit operator bool() const { return data != nullptr; }
};
// Of a log-decay given as logits.
template <class T>
struct DecayParameters {
  HeadTensor<T> a_log, dt_bias;
  explicit operator bool() const { return a_log || dt_bias; }
};

template <class T>
struct Inputs {
#define FW_TOKEN(name, heads, width, used) TokenTensor<T> name;
#include "rule/tokens.def"
  T* precond_center = nullptr;
  int64_t center_stride = 1;
  StateTensor<T> initial_state, initial_precond;
  DecayParameters<T> decay, precond_decay;  // of g and of precond_g
};

// The tensors of tokens in the order of token_specs() (rule/tokens.h).
template <class T>
inline constexpr TokenTensor<T> Inputs<T>::*kInputTokens[] = {
#define FW_TOKEN(name, heads, width, used) &Inputs<T>::name,
#include "rule/tokens.def"
};

template <class T>
struct Outputs {
  TokenTensor<T> o;
  StateTensor<T> final_state, final_precond;
  StateTensor<T> checkpoints, precond_checkpoints;  // Plan::checkpoints
  StateTensor<T> ring;                              // Plan::ring: [states, HV, rows, ring_width()]
};

// What a tensor struct is: decides which tensors must be there and the name in messages.
enum class TensorRole { kInput, kGradient };

// Throw Error(kUsage) naming the tensor, what was expected and what came.
template <class T>
Inputs<T> check_inputs(const Plan& plan, const fw_inputs& in, TensorRole role);
// Those of backward, of these inputs: a gate that is given as logits has its own heads in its gradient and in those of
// its parameters.
template <class T>
Inputs<T> check_gradients(const Plan& plan, const fw_inputs& grads, const Inputs<T>& in);
template <class T>
Outputs<T> check_outputs(const Plan& plan, const fw_outputs& out, TensorRole role);
// What a ring asks of both.
template <class T>
void check_ring_tensors(const Plan& plan, const Inputs<T>& in, const Outputs<T>& out);

}  // namespace fw
