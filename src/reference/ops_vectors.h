// Checks of the recurrence (through the C header) against values that another program computed: a safetensors file with tensors
// <rule>/<case>/<tensor>, the rules by the names below. Inputs q, k, p, a, b [B, T, H, K], v, w [B, T, HV, V], g, beta, lam,
// g_atk, beta_atk, log_atk_scale, S0, A0; cotangents do, dS; results o, S, A and d_<input>. q and k are given normalised.
#pragma once

#include <string>
#include <vector>

#include "base/comparison.h"
#include "fastweight/fastweight.h"

namespace fw {

struct OpsVectorOptions {
  // kBf16: all inputs but log-decays, states and the centre are rounded to bf16, then everything is computed in float32.
  VectorType type = VectorType::kF64;
  std::vector<fw_form> forms = {FW_FORM_CHUNK, FW_FORM_TOKEN};
};

// Largest relative error (Euclidean, tensor by tensor) that passes.
double ops_bound(VectorType type);

// For every rule of the file and every form: outputs, and gradients. A rule of another name is one entry that says so. Throws
// Error(kUsage) when the file is not of this form or lacks what a rule needs.
std::vector<Comparison> check_ops(const std::string& path, const OpsVectorOptions& options);

}  // namespace fw
