// Runs a reference problem through the C header (fw_forward, fw_backward, fw_step) and returns doubles, so that tests
// and selftest compare like with like. Padding between rows is NaN, workspaces start as NaN and end with a guard:
// reading what was not given, or writing outside, fails the run.
#pragma once

#include "reference/problem.h"

namespace fw {

struct HeaderRun {
  fw_device device = FW_DEVICE_CPU;  // CUDA: every tensor and buffer is copied to device memory and back
  fw_dtype dtype = FW_F64;
  fw_form form = FW_FORM_AUTO;
  int64_t chunk = 0;
  int64_t segment = 0;
  fw_state_layout state_layout = FW_STATE_K_FIRST;
  // 32 or 64: packed with cu_seqlens of that width. 0: [B, T] where all sequences are equally long, else 64
  int seqlens = 0;
  bool device_seqlens = false;  // the offsets are in device memory, with bounds in the descriptor (always packed)
  // with device_seqlens: rows that the tensors of tokens have after the last sequence; NaN, and must stay so
  int64_t spare_tokens = 0;
  int64_t row_padding = 0;  // elements between rows of every tensor but the states
  // header_backward(): the same for forward, whose tensors lie elsewhere then; -1: they are backward's
  int64_t forward_padding = -1;
  bool bf16_states = false;  // initial and final state of forward (with dtype FW_F32)
  // header_forward(): states at slots of a pool, the final ones at others unless state_in_place; those that are 0 have
  // no slot
  bool pool = false;
  bool state_in_place = false;  // the final states are written over the initial ones, where those are given
  enum class Bf16Tensors { kNone, kStreams, kAll };
  Bf16Tensors bf16 = Bf16Tensors::kNone;  // with dtype FW_F32: q, k, p, v and o, or all tensors of tokens
  bool float16 = false;                   // those are float16 instead
  bool bf16_operands = false;             // with dtype FW_F32
  bool saved = true;                      // backward gets what forward saved; false: it recomputes
  bool forward_saves = false;             // header_forward() has forward save too
  std::string* plan_text = nullptr;       // gets fw_plan_text() of the last call's descriptor
};

// Each throws Error(kInternal) with fw_last_error's text when a call fails or memory outside its own was written.
ReferenceOutputs header_forward(const ReferenceProblem& problem, const HeaderRun& run);
ReferenceInputs header_backward(const ReferenceProblem& problem, const HeaderRun& run);
// What fw_forward leaves with checkpoint_interval: the outputs, and every checkpoint that was wanted. With `pool` they
// have slots, in no order, and every third is not wanted.
struct HeaderCheckpoint {
  int64_t sequence, tokens;  // of the sequence, before it
  std::vector<double> state, precond;
};
struct HeaderCheckpoints {
  ReferenceOutputs outputs;
  std::vector<HeaderCheckpoint> all;
};
HeaderCheckpoints header_checkpoints(const ReferenceProblem& problem, const HeaderRun& run, int64_t interval);
// Decodes with fw_step, tokens_per_call tokens of every sequence at a time, the states updated in place.
ReferenceOutputs header_steps(const ReferenceProblem& problem, const HeaderRun& run, int64_t tokens_per_call = 1);
// The same as speculation does: `drafted` tokens of every sequence a call, of which 1 to `drafted` are accepted,
// another number of each sequence each time. The states after every token lie at slots of a pool (fw_desc.token_slots),
// and what was not accepted is computed once more.
ReferenceOutputs header_speculation(const ReferenceProblem& problem, const HeaderRun& run, int64_t drafted);
// The same with a ring (fw_desc.ring) of `tokens` tokens from fold to fold, whose slots and the states' are those of a
// pool. The final states are those of a forward call without tokens, which folds what is left.
struct HeaderRing {
  int64_t tokens = 16;
  int64_t per_call = 1;       // tokens of every sequence a call
  bool takes_back = false;    // of which 0 to all stay, another number of each sequence each time
  int64_t spare_rows = 0;     // of the ring, more than it needs
  int64_t forward_every = 0;  // every so many calls, the first one too, one is of fw_forward; 0: none
};
ReferenceOutputs header_ring(const ReferenceProblem& problem, const HeaderRun& run, const HeaderRing& ring);

}  // namespace fw
