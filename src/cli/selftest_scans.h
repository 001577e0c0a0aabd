// The selective scans (ops.def) against their reference on this machine's processor, for selftest.
#pragma once

#include <string>
#include <vector>

#include "reference/compare.h"

namespace fw::cli {

struct ScanErrors {
  std::string layer;  // mamba, longhorn_diag
  bool is_double = false;
  FieldError forward{}, backward{}, step{};  // the worst tensor of each; step: token by token
};

// Every law in every type, over packed sequences around the chunk's length and channels that fill no vector.
std::vector<ScanErrors> check_scans_here();

}  // namespace fw::cli
