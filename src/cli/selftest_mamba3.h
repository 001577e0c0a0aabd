// The recurrence of Mamba-3's layers (nn/mamba3_scan.h) against its reference on this machine's processor, for
// selftest.
#pragma once

#include <string>
#include <vector>

#include "reference/compare.h"

namespace fw::cli {

struct Mamba3Errors {
  std::string layer;  // mamba3, mamba3 mimo
  bool is_double = false;
  // the worst tensor of each; step: token by token
  FieldError chunk_forward{}, token_forward{}, chunk_backward{}, token_backward{}, step{};
};

// SISO and MIMO in every type, over packed sequences around the chunk's length.
std::vector<Mamba3Errors> check_mamba3_here();

}  // namespace fw::cli
