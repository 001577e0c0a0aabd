// What a training pass does not keep for its backward, which computes it again: the same operations on the same
// numbers, so that gradients have the same bits and time is paid for memory. Each level has what the one before it has.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fw {

enum class Recompute {
  kNone,
  kElementwise,  // outputs of norms, convolutions, SwiGLU
  kRecurrence,   // what the recurrence saves, and its output
  kMlp,          // the product of SwiGLU's gate and up
  kAll,          // of a block all but the residual stream before either half
};

// By level.
inline std::vector<std::string> recompute_names() { return {"none", "elementwise", "recurrence", "mlp", "all"}; }
inline Recompute parse_recompute(const std::string& name) {
  const std::vector<std::string> names = recompute_names();
  size_t level = 0;
  while (level + 1 < names.size() && names[level] != name) ++level;
  return static_cast<Recompute>(level);
}

}  // namespace fw
