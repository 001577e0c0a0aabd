#include "scan/cuda/pipeline.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "scan/cuda/token_cut.h"

namespace fw::cuda {
namespace {

// ---- The words of kernels.def

bool channel(const CallTraits& t) { return t.rule.decay == Decay::kChannel; }
bool k256(const CallTraits& t) { return t.k_tile == kMaxTileK; }
const TensorTraits& q_of(const CallTraits& t) { return t.input(TokenIndex::q); }
const TensorTraits& k_of(const CallTraits& t) { return t.input(TokenIndex::k); }
const TensorTraits& g_of(const CallTraits& t) { return t.input(TokenIndex::g); }
bool whole(const TensorTraits& a) { return a.bf16 && a.aligned; }

Rule without_precond(const Rule& rule) {
  Rule plain = rule;
  plain.precond = Precond::kNone;
  return plain;
}

// One decay a token, or none.
bool scalar_makes_m(const CallTraits& t) {
  return !t.has_m && t.rule.uses_precond() && t.rule.precond_squashed() && !t.rule.uses_key_form() && copied(t);
}
bool scalar_multiples(const CallTraits& t) { return copied(t) && row_multiples(t.rule) && !channel_erase(t.rule); }
bool scalar_rows(const CallTraits& t) { return scalar_multiples(t) && !t.lo_parts; }
bool sums(const CallTraits& t) {
  return t.rule.is_delta() && sums_of_rows(t.rule) && !channel_erase(t.rule) && !wants_hi_lo(t.rule) && copied(t);
}
bool precond(const CallTraits& t) {
  return scalar_makes_m(t) && row_multiples(without_precond(t.rule)) && !channel_erase(t.rule) &&
         !wants_hi_lo(t.rule) && (t.rule.preconditions_write() || !t.rule.is_delta());
}
// Where prepare leaves the rows of q and k to the forward scan and makes A and P. Where streams are sums, a first pass
// over segments has fewer products with chunk tiles.
bool scan_reads_intra_chunk(const CallTraits& t) {
  return t.rule.is_delta() && ((!wants_hi_lo(t.rule) && scalar_multiples(t)) || (sums(t) && !t.cut));
}
Tiles scalar_tiles(const CallTraits& t) {
  if (scan_reads_intra_chunk(t)) return kRowScales | kIntraChunk;
  if (t.rule.is_delta() && precond(t)) return kRowTiles;
  return uses_hi_lo(t.rule) ? kFwdTiles | kLoTiles : kFwdTiles;
}

// hi/lo tiles in the shared memory that older GPUs have.
bool sm80_hi_lo(const CallTraits& t) { return t.gpu < Arch::kSm90 && uses_hi_lo(t.rule); }

// A decay a channel.
Tiles channel_tiles(const CallTraits& t) { return stores_k_hat(t.rule) ? kQeTiles | kXmTiles : kFwdTiles; }
// But for the gates.
bool takes_plain_rows(const CallTraits& t) {
  return t.rule.is_delta() && !wants_hi_lo(t.rule) && copied(t) && q_of(t).near && k_of(t).near && g_of(t).near;
}
// Erase gates of channels: their rows have a buffer only alongside bf16 log-decays. Nothing that coefficients are made
// of depends on such a gate. Z, if it is wanted, is c (.) v, from whole rows: no gain divides the value by a norm.
bool takes_plain_gates(const CallTraits& t) {
  const auto values = [&](TokenIndex i) { return whole(t.input(i)) && t.V % 8 == 0; };
  if (!g_of(t).bf16 || !t.input(TokenIndex::erase_gate).near) return false;
  if (!t.z) return t.rule.write != Gate::kChannel;
  return t.rule.write == Gate::kChannel && !t.rule.gain_uses_rho() && values(TokenIndex::v) &&
         values(TokenIndex::write_gate);
}
bool channel_makes_m(const CallTraits& t) {
  if (t.has_m || !t.rule.preconditions_write() || !t.rule.precond_squashed() || channel_erase(t.rule) ||
      t.rule.write == Gate::kChannel)
    return false;
  return row_multiples(without_precond(t.rule)) && takes_plain_rows(t);
}
bool channel_plain(const CallTraits& t) {
  if (t.rule.uses_precond()) return channel_makes_m(t);
  const bool gates = channel_erase(t.rule) ? takes_plain_gates(t) : !t.z && t.rule.write != Gate::kChannel;
  return gates && row_multiples(t.rule) && takes_plain_rows(t);
}

// Rows of plain_streams() with a preconditioner or without; without one, also linear_streams(), delta.
bool scalar_streams(const CallTraits& t) {
  return (plain_streams(t.rule) || (linear_streams(t.rule) && t.rule.is_delta())) && q_of(t).vec16 && k_of(t).vec16;
}
bool channel_rows(const CallTraits& t) {
  return q_of(t).vec16 && k_of(t).vec16 && (!channel_erase(t.rule) || t.input(TokenIndex::erase_gate).vec16) &&
         (t.rule.write != Gate::kChannel || t.input(TokenIndex::write_gate).vec16);
}
bool channel_gated(const CallTraits& t) {
  return channel_rows(t) && t.rule.is_delta() && gated_streams(t.rule) && !t.rule.uses_precond();
}
bool channel_own_key(const CallTraits& t) {
  return channel_rows(t) && t.rule.is_delta() && own_key_streams(t.rule) && t.input(TokenIndex::erase_key).vec16;
}
bool channel_streams(const CallTraits& t) { return channel_rows(t) && ungated_streams(t.rule); }
bool channel_gradients_make_m(const CallTraits& t) {
  if (!t.precond_rows || t.rule.preconditions_read() == t.rule.is_delta() || !ungated_streams(t.rule)) return false;
  const auto vec16 = [&](TokenIndex i) { return t.input(i).vec16 && t.gradient(i).vec16; };
  return vec16(TokenIndex::q) && vec16(TokenIndex::k) && vec16(TokenIndex::v) && t.d_o.vec16 && g_of(t).vec2 &&
         t.gradient(TokenIndex::g).vec2;
}

// Whole heads of many sequences with one token each, each head contiguous in whole units of 16 bytes, and room for
// three of them in an SM.
bool token_heads(const CallTraits& t) {
  constexpr int64_t kMostBytes = 64 * 1024;
  const int64_t row = t.K * (t.initial_state.bf16 ? 2 : 4);
  return !t.starts && token_channels(t.K) < 8 && !t.packed && t.T == 1 && t.N * t.HV >= 2 * int64_t{t.sm_count} &&
         row % 16 == 0 && row * t.V <= kMostBytes && t.initial_state.whole_heads &&
         (!t.final_state.present || t.final_state.by_channels);
}
// Of those, heads whose ring has room in shared memory alongside.
bool ring_heads(const CallTraits& t) {
  constexpr int64_t kMostValues = 256;
  return t.ring && t.V <= kMostValues && token_heads(t);
}
bool token_step(const CallTraits& t) { return few_tokens(t.packed, t.T, t.token_slots, t.starts); }

// Whether halves of the channels have anything to add up (K256JoinArgs, kernels.h): slopes of norms, or gradients of
// one scalar per token.
bool joins_split_k(const CallTraits& t) {
  const auto specs = token_specs(t.rule);
  return k256(t) && (t.rule.q_norm != Norm::kRaw || t.rule.k_norm != Norm::kRaw || t.rule.gain_uses_key_norm() ||
                     std::any_of(specs.begin(), specs.end(), [](const auto& s) { return s.used && s.one(); }));
}

[[noreturn]] void no_kernel(const char* phase, const CallTraits& t) {
  fail_internal("{}: expected a kernel of kernels.def that takes the call, got {}", phase, to_string(t));
}

}  // namespace

bool copied(const CallTraits& t) {
  // Rows with an erase key of its own are not, but where a decay a channel makes streams of all rows: there it is
  // copied to the buffer of an erase gate.
  const Rule& rule = t.rule;
  const bool own_key = rule.decay == Decay::kChannel && rule.k_norm == Norm::kRaw && !channel_erase(rule) &&
                       !rule.uses_precond() && whole(t.input(TokenIndex::erase_key));
  // With a preconditioner its rows are as wide as the tile.
  return (t.K == t.k_tile || (t.K % 8 == 0 && !rule.uses_precond())) && (!rule.uses_erase_key() || own_key) &&
         whole(q_of(t)) && whole(k_of(t)) && (!channel_erase(rule) || whole(t.input(TokenIndex::erase_gate))) &&
         (rule.decay != Decay::kChannel || g_of(t).aligned);
}

int grouped_heads(int64_t group, int64_t HV, int64_t chunks, int64_t sm_count) {
  int heads = static_cast<int>(std::min<int64_t>(group, kMostGroupedHeads));
  while (heads > 1 && chunks * HV / heads < 2 * kGroupedBlocks * sm_count) heads = (heads + 1) / 2;
  return heads;
}
int grouped_heads(const CallTraits& t) {
  const bool takes = !channel(t) && scalar_rows(t) && t.rule.is_delta() && !wants_hi_lo(t.rule) && !t.z && !t.fused &&
                     t.group > 1 && q_of(t).shared && k_of(t).shared;
  return takes ? grouped_heads(t.group, t.HV, t.chunks, t.sm_count) : 1;
}

bool prepare_makes_m(const CallTraits& t) {
  return channel(t) ? t.gpu >= Arch::kSm90 && channel_makes_m(t) : scalar_makes_m(t);
}
bool gradients_make_m(const CallTraits& t) {
  if (t.gpu < Arch::kSm90 || t.has_m || !t.rule.uses_precond() || !t.rule.precond_squashed() || t.group != 1)
    return false;
  return channel(t) ? channel_gradients_make_m(t) : scalar_streams(t);
}

PrepareChoice select_prepare(const CallTraits& t) {
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) \
  if (Arch::arch <= t.gpu && (takes))                            \
    return {PrepareKernel::id, PrepareKernel::id == PrepareKernel::kGrouped ? grouped_heads(t) : 1, leaves, fuses};
#include "scan/cuda/kernels.def"
  no_kernel("prepare", t);
}
ForwardScan select_forward_scan(const CallTraits& t, Tiles tiles) {
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) \
  if (Arch::arch <= t.gpu && tiles == (reads) && (takes)) return ForwardScan::id;
#include "scan/cuda/kernels.def"
  no_kernel("forward scan", t);
}
ReverseScan select_reverse_scan(const CallTraits& t) {
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) \
  if (Arch::arch <= t.gpu && (takes)) return ReverseScan::id;
#include "scan/cuda/kernels.def"
  no_kernel("reverse scan", t);
}
GradientKernel select_gradients(const CallTraits& t) {
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) \
  if (Arch::arch <= t.gpu && (takes)) return GradientKernel::id;
#include "scan/cuda/kernels.def"
  no_kernel("gradients", t);
}
TokenChoice select_token(const CallTraits& t) {
  TokenChoice choice;
  const auto select = [&]() -> TokenKernel {
#define FW_TOKEN_FORWARD(id, name, arch, takes) \
  if (Arch::arch <= t.gpu && (takes)) return TokenKernel::id;
#include "scan/cuda/kernels.def"
    no_kernel("token forward", t);
  };
  const int64_t heads = t.N * t.HV, enough = 2 * int64_t{t.sm_count};
  constexpr int64_t kManyBlocks = 2048;
  choice.kernel = select();
  choice.channels = token_channels(t.K);
  choice.rows = t.V > 8 && heads * ((t.V + 31) / 32) >= enough ? 8 : 2;
  // Two blocks a head begin and end sooner; where many come after another one is better, as it is where it steps the
  // preconditioner.
  if (choice.kernel == TokenKernel::kHeads)
    choice.parts = heads < kManyBlocks && !(t.rule.uses_precond() && !t.has_m) ? 2 : 1;
  if (choice.kernel == TokenKernel::kRingHeads) choice.parts = 2;
  return choice;
}

bool prepare_fuses_gates(const CallTraits& t) {
  return t.gpu >= Arch::kSm90 && channel(t) && !t.rule.uses_precond() && g_of(t).bf16 && !g_of(t).shared &&
         channel_plain(t);
}
bool gradients_fuse_gates(const CallTraits& t) {
  const TensorTraits &d_g = t.gradient(TokenIndex::g), &d_erase_gate = t.gradient(TokenIndex::erase_gate);
  const auto pairs = [](const TensorTraits& a) { return a.bf16 && a.vec2; };
  if (t.gpu < Arch::kSm90 || !channel(t) || !t.rule.is_delta() || t.rule.uses_precond() || !pairs(g_of(t)) ||
      !pairs(d_g))
    return false;
  // With gates besides there are too few registers at the smaller tile.
  if (channel_gated(t)) return t.K > 64 && !d_erase_gate.shared && d_erase_gate.vec16;
  return !channel_own_key(t) && channel_streams(t);
}
bool prepare_fuses_scalars(const CallTraits& t) {
  return !t.rule.uses_precond() && !t.one_kernel && select_prepare(t).fuses_scalars;
}
bool gradients_fuse_scalars(const CallTraits& t) {
  if (t.gpu < Arch::kSm90 || t.rule.uses_precond()) return false;
  return channel(t) ? channel_gated(t) || channel_own_key(t) || channel_streams(t) : scalar_streams(t);
}
bool gradients_sum_heads(const CallTraits& t) {
  constexpr int kMost = 16;
  if (t.group < 2 || t.group > kMost || !std::has_single_bit(static_cast<unsigned>(t.group)) || t.rule.uses_precond() ||
      direct_rule(t.rule))
    return false;
  switch (select_gradients(t)) {
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) \
  case GradientKernel::id:                                      \
    return sums_heads;
#include "scan/cuda/kernels.def"
  }
  return false;
}

namespace {

// Whether heads' gradients of other tensors than q and k are added up by a kernel of their own.
bool sums_others(const CallTraits& t) {
  return t.input(TokenIndex::erase_key).shared || (channel_erase(t.rule) && t.input(TokenIndex::erase_gate).shared) ||
         (channel(t) && g_of(t).shared);
}

}  // namespace

Pipeline plan_forward(const CallTraits& traits, const Plan& plan, const DevicePlan& device) {
  Pipeline p;
  CallTraits t = traits;
  const bool uses_precond = t.rule.uses_precond();
  if (!device.chunk_form) {
    // One token a sequence: token/forward makes the step of A too.
    p.steps_precond = uses_precond && !plan.packed && plan.T == 1 && plan.slots.tokens == nullptr &&
                      (plan.slots.skips || !plan.slots);
    t.has_m = uses_precond && !p.steps_precond;
    if (t.has_m) p.add(plan.bits_of_steps ? StageKind::kPrecondTokens : StageKind::kPrecond);
    p.token = select_token(t);
    p.add(StageKind::kToken);
    return p;
  }
  if (uses_precond) {
    p.makes_m = prepare_makes_m(t);
    t.has_m = !p.makes_m;
    p.add(StageKind::kPrecond);
  }
  if (t.raw || t.one_kernel) {
    p.scan = select_forward_scan(t, kNoTiles);
  } else {
    p.prepare = select_prepare(t);
    p.add(StageKind::kPrepare);
    p.scan = select_forward_scan(t, p.prepare.leaves);
  }
  if (device.segments) {
    p.add(StageKind::kFirstScan);
    p.add(StageKind::kJoin);
  }
  p.add(StageKind::kScan);
  return p;
}

Pipeline plan_backward(const CallTraits& traits, const Plan& plan, const DevicePlan& device) {
  Pipeline p;
  CallTraits t = traits;
  const bool uses_precond = t.rule.uses_precond();
  if (uses_precond) {
    p.makes_m = device.chunk_form && gradients_make_m(t);
    t.has_m = !p.makes_m;
    if (t.has_m) p.add(plan.slots.tokens != nullptr ? StageKind::kPrecondTokens : StageKind::kPrecond);
  }
  if (device.chunk_form) {
    p.reverse = select_reverse_scan(t);
    p.gradients = select_gradients(t);
    if (device.segments.backward) {
      p.add(StageKind::kFirstReverse);
      p.add(StageKind::kJoinReverse);
    }
    p.add(StageKind::kReverse);
    p.sums_heads = device.backward.head_sums.bytes > 0 && gradients_sum_heads(t);
    p.add(StageKind::kGradients);
    if (joins_split_k(t)) p.add(StageKind::kK256Join);
  } else {
    p.add(StageKind::kTokenBackward);
  }
  if (t.group > 1 && (!p.sums_heads || sums_others(t))) p.add(StageKind::kSumGroups);
  if (uses_precond) p.add(StageKind::kPrecondBackward);
  return p;
}

// ---- Names

const char* name_of(PrepareKernel kernel) {
  switch (kernel) {
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) \
  case PrepareKernel::id:                                        \
    return name;
#include "scan/cuda/kernels.def"
  }
  fail_internal("prepare: expected a kernel of kernels.def, got number {}", static_cast<int>(kernel));
}
const char* name_of(ForwardScan kernel) {
  switch (kernel) {
#define FW_FORWARD_SCAN(id, name, arch, reads, launch, takes) \
  case ForwardScan::id:                                       \
    return name;
#include "scan/cuda/kernels.def"
  }
  fail_internal("forward scan: expected a kernel of kernels.def, got number {}", static_cast<int>(kernel));
}
const char* name_of(ReverseScan kernel) {
  switch (kernel) {
#define FW_REVERSE_SCAN(id, name, arch, launch, takes) \
  case ReverseScan::id:                                \
    return name;
#include "scan/cuda/kernels.def"
  }
  fail_internal("reverse scan: expected a kernel of kernels.def, got number {}", static_cast<int>(kernel));
}
const char* name_of(GradientKernel kernel) {
  switch (kernel) {
#define FW_GRADIENTS(id, name, arch, sums_heads, launch, takes) \
  case GradientKernel::id:                                      \
    return name;
#include "scan/cuda/kernels.def"
  }
  fail_internal("gradients: expected a kernel of kernels.def, got number {}", static_cast<int>(kernel));
}
std::string name_of(const TokenChoice& choice) {
  const bool heads = choice.kernel == TokenKernel::kHeads || choice.kernel == TokenKernel::kRingHeads;
  const int number = heads ? choice.parts : choice.rows;
  switch (choice.kernel) {
#define FW_TOKEN_FORWARD(id, name, arch, takes) \
  case TokenKernel::id:                         \
    return fmt::format(name, number);
#include "scan/cuda/kernels.def"
  }
  fail_internal("token forward: expected a kernel of kernels.def, got number {}", static_cast<int>(choice.kernel));
}

Forms forms_of(Arch gpu) {
  Forms forms;
#define FW_PREPARE(id, name, arch, leaves, fuses, launch, takes) forms.chunk = forms.chunk || Arch::arch <= gpu;
#define FW_TOKEN_FORWARD(id, name, arch, takes) forms.token = forms.token || Arch::arch <= gpu;
#include "scan/cuda/kernels.def"
  return forms;
}

std::string to_string(const Pipeline& p) {
  const bool raw = p.scan == ForwardScan::kRaw || p.reverse == ReverseScan::kRaw;
  const auto name = [&](StageKind stage) -> std::string {
    switch (stage) {
      case StageKind::kPrecond:
        return "precond/forward";
      case StageKind::kPrecondTokens:
        return "token/precond_tokens";
      case StageKind::kPrepare:
        return p.prepare.heads > 1 ? fmt::format("{} ({} value heads)", name_of(p.prepare.kernel), p.prepare.heads)
                                   : name_of(p.prepare.kernel);
      case StageKind::kFirstScan:
      case StageKind::kScan:
        return name_of(p.scan);
      case StageKind::kFirstReverse:
      case StageKind::kReverse:
        return name_of(p.reverse);
      case StageKind::kJoin:
      case StageKind::kJoinReverse:
        return raw ? "additive/join" : "scan/join";
      case StageKind::kGradients:
        return fmt::format("{}{}", name_of(p.gradients), p.sums_heads ? " (adds up heads)" : "");
      case StageKind::kK256Join:
        return "k256/join";
      case StageKind::kToken:
        return name_of(p.token);
      case StageKind::kTokenBackward:
        return "token/backward";
      case StageKind::kSumGroups:
        return "gradients/sum_groups";
      case StageKind::kPrecondBackward:
        return p.makes_m ? "precond/backward (carry)" : "precond/backward";
    }
    fail_internal("a stage without a name");
  };
  std::string all;
  for (const StageKind stage : p) all += (all.empty() ? "" : " -> ") + name(stage);
  return all;
}

}  // namespace fw::cuda
