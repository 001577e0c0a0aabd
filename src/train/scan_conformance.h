// Checks of the selective scans (ops.def) against values that another program computed: of a file of recurrences
// (reference/ops_conformance.h), the rules
//   mamba1          u, dt [B, T, D] (dt after softplus), A [D, N], B, C [B, T, N], D [D], S0 [B, N, D]
//   longhorn_diag   u, dt [B, T, D] (dt before its sigmoid), q, k [B, T, N], D [D]
// with cotangents do, dS; results o [B, T, D] and S [B, N, D], and d_<input>.
#pragma once

#include <string>
#include <vector>

#include "base/comparison.h"
#include "base/device.h"

namespace fw {

// Outputs and gradients of each of these rules that the file has, on the device; there is no bf16 form of them: kBf16
// computes in float32. Throws Error(kUsage) where a tensor is missing or of another shape, or for kF64 on a CUDA
// device.
std::vector<Comparison> check_scans(const std::string& path, ConformanceType type, double bound,
                                    Device& device = host_device());

}  // namespace fw
