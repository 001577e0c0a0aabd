// Checks of the recurrence (through the C header, or of the reference) against values that another program computed: a
// safetensors file with tensors <rule>/<case>/<tensor>, the rules by the names below. Inputs q, k, p, a, b [B, T, H,
// K], v, w [B, T, HV, V], g, beta, lam, g_atk, beta_atk, log_atk_scale, S0, A0; cotangents do, dS; results o, S, A and
// d_<input>. q and k are given normalised.
#pragma once

#include <string>
#include <vector>

#include "base/comparison.h"
#include "fastweight/fastweight.h"

namespace fw {

struct OpsConformanceOptions {
  // kBf16: q, k, p, v, o and their gradients are bf16 tensors (FW_BF16), gates and states float32, and so is the
  // arithmetic.
  ConformanceType type = ConformanceType::kF64;
  std::vector<fw_form> forms = {FW_FORM_CHUNK, FW_FORM_TOKEN};
  bool reference = false;  // the reference itself, in float64, in place of the C header
  // CUDA: kF32 or kBf16, whose products have bf16 operands.
  fw_device device = FW_DEVICE_CPU;
};

// Largest relative error (Euclidean, tensor by tensor) that passes.
double ops_bound(ConformanceType type);

// For every rule of the file and every form: outputs, and gradients. A rule of another name is one entry that says so.
// Throws Error(kUsage) when the file is not of this form or lacks what a rule needs.
std::vector<Comparison> check_ops(const std::string& path, const OpsConformanceOptions& options);

}  // namespace fw
