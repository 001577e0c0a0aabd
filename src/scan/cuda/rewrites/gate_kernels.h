// The kernels of gates given as logits (rule/gate_law.h), all of a call in one. Device memory only.
#pragma once

#include <cstdint>

#include "rule/gate_law.h"
#include "rule/gates.h"
#include "scan/cuda/args.h"

namespace fw::cuda {

struct GateArg {
  GateLaw<float> law;
  int32_t heads = 0, channels = 0;
  TokenArg x;              // the logits
  HeadArg a_log, dt_bias;  // may be absent
};
// Tokens of all sequences, and of a batch: all of them where sequences are packed. With an end there may be fewer.
struct GateTokens {
  int64_t all = 0, batch = 0;
  TokenEnd end;
};
struct GateValuesArgs {
  GateArg gates[kGates];
  TokenArg values[kGates];
  int32_t count = 0;
};
void gate_values(const GateValuesArgs& args, const GateTokens& tokens, void* stream);

struct GateGradient {
  GateArg gate;
  TokenArg d_values, d_x;      // d_x may be absent, and may be d_values
  HeadArg d_a_log, d_dt_bias;  // may be absent
  float* parts = nullptr;      // gate_parts_bytes(); null: neither is asked for
  // if not 0: gradients() has made the logits' gradient, and `parts` [fused_parts, heads, 2, channels], of dt_bias and
  // of a_log
  int64_t fused_parts = 0;
};
struct GateGradientsArgs {
  GateGradient gates[kGates];
  int32_t count = 0;
};
inline constexpr int64_t kMostGateParts = 512;  // blocks of tokens, whose sums are added in order
constexpr int64_t gate_parts_bytes(int64_t heads, int64_t channels) {
  return kMostGateParts * 2 * heads * channels * int64_t{sizeof(float)};
}
// The logits' gradients, but of gates with fused_parts; then the sums of the parts of all.
void gate_gradients(const GateGradientsArgs& args, const GateTokens& tokens, void* stream);

}  // namespace fw::cuda
