// A tensor of tokens as kernels have it (args.h), and one of the workspace.
#pragma once

#include "scan/cuda/call/args.h"
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

inline TokenEnd token_end(const Plan& plan) {
  TokenEnd end;
  if (plan.device_offsets == nullptr) return end;
  end.wide = plan.wide_offsets ? 1 : 0;
  end.last = static_cast<const char*>(plan.device_offsets) + plan.N * (plan.wide_offsets ? 8 : 4);
  return end;
}

}  // namespace fw::cuda
