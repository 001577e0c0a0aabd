// Tensors of tokens and states as kernels have them (args.h), and those of the workspace.
#pragma once

#include "rule/tokens.h"
#include "scan/cuda/args.h"
#include "scan/tensors.h"

namespace fw::cuda {

inline TokenArg token_arg(const Plan& plan, const TokenTensor<float>& t) {
  TokenArg a;
  if (!t) return a;
  a.bf16 = t.bf16 != nullptr ? 1 : 0;
  a.data = a.bf16 != 0 ? static_cast<void*>(t.bf16) : static_cast<void*>(t.data);
  a.stride_b = t.stride_b;
  a.stride_t = t.stride_t;
  a.stride_h = t.stride_h;
  a.divisor = static_cast<int32_t>(plan.HV / t.heads);
  return a;
}

// Contiguous rows at `data`, of heads and channels like those of `like`, T rows a batch.
inline TokenTensor<float> contiguous_rows(const TokenTensor<float>& like, int64_t T, void* data, bool bf16) {
  TokenTensor<float> rows;
  if (bf16) {
    rows.bf16 = static_cast<Bf16*>(data);
  } else {
    rows.data = static_cast<float*>(data);
  }
  rows.heads = like.heads;
  rows.dim = rows.stride_h = like.dim;
  rows.stride_t = like.heads * like.dim;
  rows.stride_b = T * rows.stride_t;
  return rows;
}

inline TokenArgs token_args(const Plan& plan, const Inputs<float>& in) {
  TokenArgs a;
  static_assert(sizeof(TokenArgs) == kTokenTensors * sizeof(TokenArg));
#define FW_TOKEN(name, heads, width, used) a.name = token_arg(plan, in.name);
#include "rule/tokens.def"
  return a;
}

// [tokens, HV, dim] of the workspace as a tensor of tokens.
inline TokenArg per_head(const Plan& plan, void* data, int64_t dim, bool bf16) {
  TokenArg a;
  a.data = data;
  a.bf16 = bf16 ? 1 : 0;
  a.stride_h = dim;
  a.stride_t = plan.HV * dim;
  a.stride_b = plan.T * a.stride_t;
  return a;
}

inline StateArg state_arg(const Plan& plan, const StateTensor<float>& t) {
  StateArg a;
  if (!t) return a;
  a.bf16 = t.bf16 != nullptr ? 1 : 0;
  a.data = a.bf16 != 0 ? static_cast<void*>(t.bf16) : static_cast<void*>(t.data);
  a.stride_n = t.stride_n;
  a.stride_h = t.stride_h;
  const bool k_first = plan.state_layout == FW_STATE_K_FIRST;
  a.stride_k = k_first ? t.stride_r : 1;
  a.stride_v = k_first ? 1 : t.stride_r;
  return a;
}

inline StateArg precond_arg(const StateTensor<float>& t) {
  StateArg a;
  if (!t) return a;
  a.data = t.data;
  a.stride_n = t.stride_n;
  a.stride_h = t.stride_h;
  a.stride_k = 1;
  return a;
}

inline TokenEnd token_end(const Plan& plan) {
  TokenEnd end;
  if (plan.device_offsets == nullptr) return end;
  end.wide = plan.offsets_are_64 ? 1 : 0;
  end.last = static_cast<const char*>(plan.device_offsets) + plan.N * (plan.offsets_are_64 ? 8 : 4);
  return end;
}

}  // namespace fw::cuda
