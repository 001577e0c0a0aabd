// What the choice of kernels depends on, as a value: the rule, the shape, and of every tensor what its memory allows.
// It is made from a call's tensors, or from a descriptor alone with the tensors that it lets one expect. Plain C++
// without CUDA.
#pragma once

#include <array>
#include <string>

#include "rule/tokens.h"
#include "scan/cuda/device_plan.h"
#include "scan/cuda/kernels.h"

namespace fw::cuda {

struct TensorTraits {
  bool present = false;
  bool bf16 = false;     // else float32
  bool shared = false;   // several value heads have one head of it
  bool aligned = false;  // rows at multiples of 16 bytes
  bool vec16 = false;    // bf16 rows in vectors of 16 bytes, wherever a sequence or head begins
  bool vec2 = false;     // pairs of neighbouring channels are one aligned access
  bool near = false;     // offsets of rows in a chunk are 32-bit numbers
  bool operator==(const TensorTraits&) const = default;
};

// A state as the token form's kernels take it (common/state/state_load.cuh).
struct StateTraits {
  bool present = false;
  bool bf16 = false;         // else float32
  bool by_channels = false;  // StateAccess::kChannels
  bool whole_heads = false;  // of those, a head is contiguous and at a multiple of 16 bytes
  bool operator==(const StateTraits&) const = default;
};

// Of tensors in the order of rule/tokens.def.
using TokenTraits = std::array<TensorTraits, kTokenTensors>;

struct CallTraits {
  Rule rule;
  int32_t K = 0, V = 0, k_tile = 0, group = 1;  // group: value heads of a key head
  int64_t N = 0, T = 0, HV = 0, chunks = 0;     // chunks: of all sequences
  int32_t sm_count = 0;                         // of the device,
  Arch gpu = Arch::kSm90;                       // and the machine code that it runs
  bool packed = false;
  bool raw = false;           // from the raw tensors, without chunk tiles (DevicePlan::direct)
  bool cut = false;           // sequences are segments (DevicePlan::cut)
  bool z = false;             // prepare makes the Z tile
  bool lo_parts = false;      // hi/lo tiles have lo parts of the keys
  bool precond_rows = false;  // forward has left A before every token
  bool fused = false;         // some logits are given to the kernels as they are
  bool one_kernel = false;    // forward is one kernel: DevicePlan::fused_forward, nothing is saved, TMA takes the rows
  TokenTraits in, d;          // d: gradients as the kernels leave them
  TensorTraits d_o;
  // The token form.
  bool token_slots = false;  // a slot for the state after every token
  bool starts = false;       // sequences without a slot start from zero
  bool has_m = false;        // M of the preconditioner is in memory
  bool ring = false;         // a step reads the states and writes a ring
  StateTraits initial_state, final_state;

  const TensorTraits& input(TokenIndex i) const { return in[static_cast<size_t>(i)]; }
  const TensorTraits& gradient(TokenIndex i) const { return d[static_cast<size_t>(i)]; }
  bool operator==(const CallTraits&) const = default;
};

// dim: channels of a row, 1 of a scalar.
TensorTraits tensor_traits(const TokenArg& a, int64_t dim);
// Of a contiguous tensor [B, T, heads, dim] that begins where cudaMalloc puts it.
TensorTraits contiguous_traits(int64_t T, int64_t heads, int64_t HV, int64_t dim, bool bf16);
TokenTraits token_traits(const Rule& rule, int64_t K, int64_t V, const TokenArgs& tensors);

// The rule and the shape of a call, without tensors.
Problem problem_shape(const Plan& plan);
// Of a call's inputs; z, lo_parts, cut, d and d_o are left.
CallTraits problem_traits(const Problem& x, int k_tile, int64_t chunks, int sm_count);
// The same with what a device plan says of them.
CallTraits call_traits(const Problem& x, const DevicePlan& device);
// Whether forward that does not save is one kernel for these tensors.
bool fuses_forward(const Problem& x, const DevicePlan& device, const TokenShape& shape, const TokenArg& o);
// And of what gradients() is given.
void add_gradients(const GradientArgs& args, CallTraits& traits);
// And of what token_forward() is given.
void add_states(const TokenForwardArgs& args, CallTraits& traits);
// Of tensors that a descriptor lets one expect: contiguous and of its io_dtype, but float32 where there is one scalar
// per head, or where they are gradients that the heads of a group add up.
CallTraits expected_traits(const Plan& plan, const DevicePlan& device);

// Whether the values that are made of a gate's logits are bf16. They are for gates and log-decays of channels where the
// call's tensors are and its products too, for such rows are what kernels look for. Those of one number are float32.
bool bf16_values(const Plan& plan, bool chunk_form, const GateSpec& gate);

// "K 128 V 128 ... in q bf16 vec16 ...", for people.
std::string to_string(const CallTraits& traits);

// How the states of a call come and go: by rows of channels, through shared memory where values are neighbours, or one
// by one.
enum class StateAccess : int32_t { kAbsent, kChannels, kStaged, kElements };
// For lanes of `channels`, and blocks of `tile` value rows.
StateAccess state_access(const StateArg& a, int K, int V, int channels, int tile);
// Channels of a lane of token_forward().
constexpr int token_channels(int K) { return K <= 64 ? 2 : K <= 128 ? 4 : 8; }

}  // namespace fw::cuda
