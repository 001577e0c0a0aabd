// Keys that come from the decay (KeySource::kDecay) as rows of a workspace, so that no kernel of the scan knows of
// them. They are made before a call, and their gradient is added to that of the log-decay after it.
#pragma once

#include <cstddef>

#include "scan/plan.h"
#include "scan/tensors.h"

namespace fw::cuda {

// [tokens, H, K] at `rows` as a tensor of tokens; bf16: of bf16 values (what the chunk form's kernels copy as they
// are), else float32.
TokenTensor<float> key_tensor(const Plan& plan, void* rows, bool bf16);
// Bytes of such rows, a multiple of 64.
size_t key_bytes(const Plan& plan, bool bf16);

// k = 1 - exp(g)
void make_key_from_decay(const Plan& plan, const TokenTensor<float>& g, const TokenTensor<float>& k);
// dg -= exp(g) dk
void add_key_from_decay(const Plan& plan, const TokenTensor<float>& g, const TokenTensor<float>& dk,
                        const TokenTensor<float>& dg);

}  // namespace fw::cuda
