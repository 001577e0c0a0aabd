// What device code knows of a call: plain structs, passed to kernels by value. Device memory only.
#pragma once

#include <cstdint>

#include "gpu/sequences.h"
#include "gpu/tensor_arg.h"
#include "rule/axes.h"
#include "rule/gate_law.h"

namespace fw::cuda {

inline constexpr int kValueBlock = 64;  // value columns that one consumer warp group of a scan owns
constexpr int value_block_count(int columns) { return (columns + kValueBlock - 1) / kValueBlock; }

enum class Direction { kForward, kReverse };  // through the tokens of a sequence

// The channels of a tensor from number `first` on.
FW_HOST_DEVICE inline TokenArg from_channel(TokenArg a, int first) {
  if (a.data != nullptr) a.data = static_cast<char*>(a.data) + first * (a.bf16 != 0 ? 2 : 4);
  return a;
}

// States [N or slots, heads, K, V] in either layout, or [N, H, K] of the preconditioner (stride_v 0). data null:
// absent.
struct StateArg {
  void* data = nullptr;
  int64_t stride_n = 0, stride_h = 0, stride_k = 0, stride_v = 0;
  int32_t bf16 = 0;  // else float32
  // for kernels of the chunk form: the state of sequence n is at slots[n], below first_slot: there is none; null: at n
  const int32_t* slots = nullptr;
  int32_t first_slot = 0;
};

// Where the states of sequences lie in a pool (scan/plan.h: Slots). All null: those of sequence n at n.
struct SlotArg {
  const int32_t* own = nullptr;     // [N]
  const int32_t* tokens = nullptr;  // [N, columns]: of the states after every token, instead of those after the last
  const int32_t* finals = nullptr;  // [N]: where the final states go, if not where the sequence starts
  // [N]: tokens of the call before, whose last one's slot is where the sequence starts
  const int32_t* accepted = nullptr;
  int32_t columns = 0, first = 0;  // slots below `first` are none
  int32_t token_rows = 1;          // 1 or 2: the states after the last row of a token go to the token's slot
  int32_t skips = 0;               // a sequence without a slot is skipped; else it starts from zero
  int32_t clears = 0;              // o of skipped sequences is zero
};

FW_HOST_DEVICE inline StateArg from_channel(StateArg a, int first) {
  if (a.data != nullptr) a.data = static_cast<char*>(a.data) + first * a.stride_k * (a.bf16 != 0 ? 2 : 4);
  return a;
}

// Sequences of the call. Packed: device tables of N + 1 entries (offsets: tokens before sequence n; chunk_base: chunks
// before it). Else N sequences of T tokens each.
struct SequenceArg {
  const int32_t* offsets = nullptr;
  const int32_t* chunk_base = nullptr;
  int32_t N = 0, T = 0, chunks = 0;  // chunks: of every sequence, if not packed
  int32_t batch = 0;                 // tables of segments of [B, T] tensors (plan.h): T; else 0
  // made of offsets that the host does not know: of chunks and tokens there may be fewer than the call is planned for
  int32_t bounded = 0;
};

// Copies of the states every so many tokens of a sequence (scan/plan.h: Checkpoints): of the preconditioner as StateArg
// has those.
struct CheckpointArg {
  StateArg states;                       // data null: none
  const int32_t* slots = nullptr;        // [N, columns]; null: in slots by the sequence's first row
  int32_t columns = 0, first_slot = 0;   // slots below it are none
  int32_t chunks = 0;                    // of 64 tokens from one to the next
  SequenceArg whole;                     // the sequences that have them, where a kernel is given segments
  const int32_t* sequence_of = nullptr;  // of segments: [segments]; null: they are the sequences themselves
};

// The last offset of sequences whose lengths the host does not know, for kernels before the tables and after them.
// null: it knows.
struct TokenEnd {
  const void* last = nullptr;
  int32_t wide = 0;  // int64_t
};

// The inputs of a call, or (same names) the gradients that are asked for.
struct TokenArgs {
#define FW_TOKEN(name, heads, width, used) TokenArg name;
#include "rule/tokens.def"
};

// A parameter of heads: [heads] (stride_k 0) or [heads, K]. data null: absent.
struct HeadArg {
  float* data = nullptr;
  int64_t stride_h = 0, stride_k = 0;
};
// Laws of gates whose tensors are logits that kernels of the scan make the values of themselves, as the kernels of
// rewrites/gate_logits.h would. In the chunk form prepare() and gradients() (pipeline.h: prepare_fuses_gates(),
// gradients_fuse_gates()), rounded to bf16: log-decays and gates of channels, all that the rule has, or none. Besides,
// of one scalar per token, in float32 (common/front/token_scalars.cuh): all that the rule has, or none. Forward the
// first kernel that reads them makes the values, and backward, where these are given, gradients() those of the logits.
// In the token form token_forward(), of few tokens or with the bits of steps. a_log and dt_bias are the log-decay's.
struct FusedGates {
  GateLaw<float> g, erase_gate, write_gate, beta, lambda;
  HeadArg a_log, dt_bias;
  // Where the values of numbers are left in the chunk form, float32 [tokens, HV]; null: nobody else reads them.
  struct Numbers {
    float *g = nullptr, *erase_gate = nullptr, *write_gate = nullptr, *beta = nullptr, *lambda = nullptr;
  } numbers;
  FW_HOST_DEVICE bool any() const {
    return g.given != GateActivation::kValue || erase_gate.given != GateActivation::kValue ||
           write_gate.given != GateActivation::kValue || beta.given != GateActivation::kValue ||
           lambda.given != GateActivation::kValue;
  }
};

struct Problem {
  Rule rule;
  float scale = 1;
  int32_t B = 0, T = 0, H = 0, HV = 0, K = 0, V = 0, group = 1;  // group: value heads of a key head
  int64_t tokens = 0;                                            // of all sequences
  SequenceArg sequences;
  TokenArgs in;
  FusedGates fused;
  const float* precond_center = nullptr;  // [H]
  int64_t center_stride = 1;
  StateArg initial_state, initial_precond;
  // [tokens, H, K]: M of the preconditioner, made before the kernels that read it; null without one
  const float* m = nullptr;
  // [chunks, H, K]: A of the preconditioner before every chunk, for kernels that make M themselves (m is null)
  const float* boundaries = nullptr;
  // bf16 [tokens, H, K]: A before every token, which forward leaves for backward where channels decay; else null
  uint16_t* precond_rows = nullptr;
};

}  // namespace fw::cuda
