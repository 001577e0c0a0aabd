// Checks of the Mamba-3 recurrence (nn/mamba3_scan.h) against values that another program computed: of a file of
// recurrences (reference/ops_conformance.h), the rules
//   mamba3              SISO; pairs of channels (2i, 2i + 1)
//   mamba3_mimo         MIMO of R rows; channels (i, i + K / 2)
//   mamba3_mimo_pairs   the same with pairs (2i, 2i + 1)
// Their tensors:
// - q, k [B, T, G, K] (MIMO [B, T, R, G, K]), v, z [B, T, H, V],
// - g, dt, trap [B, T, H], angle [B, T, H, NA],
// - q_bias, k_bias [H, K] ([H, R, K]), D [H], mimo_x, mimo_z, mimo_o [H, R, V],
// - S0 [B, H, K, V], k0, v0 [B, H, K], [B, H, V] ([B, H, R, ...]), angle0 [B, H, NA],
// - cotangents do, dS,
// - results o (after D and SiLU(z)), S, k_end, v_end, angle_end (compared as an angle) and d_<input>.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/comparison.h"
#include "fastweight/fastweight.h"

namespace fw {

// Outputs and gradients of each of these rules that the file has, in every form; kBf16 computes in float32. Throws
// Error(kUsage) where a tensor is missing or of another shape.
std::vector<Comparison> check_mamba3(const std::string& path, ConformanceType type, const std::vector<fw_form>& forms,
                                     double bound);

// Whether it is the name of such a rule.
bool is_mamba3(std::string_view rule);

}  // namespace fw
