// The kernels that a call runs, as a value: planned from its traits, run by call/, printed by call/text.cpp, and made a
// page by tests/scan/kernel_page_test.cpp. kernels.def has the kernels. Plain C++ without CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "gpu/device.h"
#include "scan/cuda/kernel_ids.h"
#include "scan/cuda/rule_traits.h"
#include "scan/cuda/traits.h"

namespace fw::cuda {

// ---- The choices of one phase

PrepareChoice select_prepare(const CallTraits& t);
// For tiles that prepare leaves. Throws Error(kInternal) where no scan reads just these.
ForwardScan select_forward_scan(const CallTraits& t, Tiles tiles);
ReverseScan select_reverse_scan(const CallTraits& t);
GradientKernel select_gradients(const CallTraits& t);
TokenChoice select_token(const CallTraits& t);

// Whether prepare, or gradients, makes M of the preconditioner itself: it is nowhere in memory then.
bool prepare_makes_m(const CallTraits& t);
bool gradients_make_m(const CallTraits& t);
// Whether gradients adds up dq and dk of the value heads that share a key head itself.
bool gradients_sum_heads(const CallTraits& t);
// Whether prepare can make values of log-decays and gates of channels that are logits itself; whether gradients can
// make them and the gradients of logits, in place of d. Below, the same of gates and log-decays of one number a
// token.
bool prepare_fuses_gates(const CallTraits& t);
bool gradients_fuse_gates(const CallTraits& t);
bool prepare_fuses_scalars(const CallTraits& t);
bool gradients_fuse_scalars(const CallTraits& t);
// Value heads that share keys in a block of prepare/grouped: so many that each SM has its blocks twice; 1: it is not
// taken. The bits are the same.
int grouped_heads(const CallTraits& t);
// Of `group` value heads that share keys, HV in all.
int grouped_heads(int64_t group, int64_t HV, int64_t chunks, int64_t sm_count);
// Raw rows of the key side are copied into shared memory ahead of their use, as bf16 in vectors of 8 channels; other
// rows are read from memory whenever they are wanted: slower, and nothing else.
bool copied(const CallTraits& t);

// ---- A direction of a call

// What one step of a pipeline is, in the order in which a call may have them. Cut sequences have a first pass of the
// scan over the segments, a join of what these do to a state, and a second pass.
enum class StageKind : uint8_t {
  kPrecond,        // precond/: M or what kernels make it from
  kPrecondTokens,  // token/: M of every token with the bits of steps
  kPrepare,
  kFirstScan,
  kJoin,
  kScan,
  kFirstReverse,
  kJoinReverse,
  kReverse,
  kGradients,
  kK256Join,
  kToken,
  kTokenBackward,
  kSumGroups,
  kPrecondBackward,
};

struct Pipeline {
  std::array<StageKind, 8> stages{};
  int count = 0;
  bool makes_m = false;        // prepare (backward: gradients) makes M of the preconditioner
  bool steps_precond = false;  // token/forward makes the step of A too
  bool sums_heads = false;     // gradients adds up heads
  PrepareChoice prepare;
  ForwardScan scan = ForwardScan::kTiles;
  ReverseScan reverse = ReverseScan::kTiles;
  GradientKernel gradients = GradientKernel::kAnyGain;
  TokenChoice token;

  const StageKind* begin() const { return stages.data(); }
  const StageKind* end() const { return stages.data() + count; }
  void add(StageKind stage) { stages[static_cast<size_t>(count++)] = stage; }
};
Pipeline plan_forward(const CallTraits& t, const Plan& plan, const DevicePlan& device);
Pipeline plan_backward(const CallTraits& t, const Plan& plan, const DevicePlan& device);
// "prepare/scalar (raw rows) -> scan/forward (raw rows, A and P)".
std::string to_string(const Pipeline& pipeline);

// ---- Of each kernel

const char* name_of(PrepareKernel kernel);
const char* name_of(ForwardScan kernel);
const char* name_of(ReverseScan kernel);
const char* name_of(GradientKernel kernel);
std::string name_of(const TokenChoice& choice);
// Forms of the recurrence that a GPU has all phases of.
struct Forms {
  bool token = false, chunk = false;
};
Forms forms_of(Arch gpu);

}  // namespace fw::cuda
