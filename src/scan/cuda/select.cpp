#include "scan/cuda/select.h"

#include <algorithm>

#include "scan/cuda/token_cut.h"

namespace fw::cuda {
namespace {

uint64_t address(const void* p) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p)); }

// ---- prepare

// Raw rows of the key side that are bf16, aligned and vectors of 8 channels are fetched ahead into shared memory, with
// zeros after their K channels. Other rows (float32, K in between; with a preconditioner, whose rows are as wide as the
// tile, any K but 64 and 128) are read from memory whenever they are wanted: slower, and nothing else. So are those
// with an erase key of its own, but where a decay a channel makes streams of all rows: there it is fetched to the place
// of an erase gate.
bool can_fetch(const Problem& x, int key) {
  const auto whole = [](const TokenArg& a) { return a.bf16 != 0 && aligned_rows(a); };
  const Rule& rule = x.rule;
  const bool own_key = rule.decay == Decay::kChannel && rule.k_norm == Norm::kRaw && !channel_erase(rule) &&
                       !rule.uses_precond() && whole(x.in.erase_key);
  return (x.K == key || (x.K % 8 == 0 && !rule.uses_precond())) && (!rule.uses_erase_key() || own_key) &&
         whole(x.in.q) && whole(x.in.k) && (!channel_erase(rule) || whole(x.in.erase_gate)) &&
         (rule.decay != Decay::kChannel || aligned_rows(x.in.g)) && (address(x.m) & 15) == 0;
}
Rule without_precond(const Rule& rule) {
  Rule lo = rule;
  lo.precond = Precond::kNone;
  return lo;
}

// One decay a token, or none.
bool scalar_makes_m(const Problem& x, int key) {
  return x.rule.uses_precond() && x.rule.precond_squashed() && !x.rule.uses_key_form() && can_fetch(x, key);
}
bool scalar_multiples(const Problem& x, int key) {
  return can_fetch(x, key) && row_multiples(x.rule) && !channel_erase(x.rule);
}
bool takes_sums(const Problem& x, int key) {
  return x.rule.is_delta() && sums_of_rows(x.rule) && !channel_erase(x.rule) && !wants_hi_lo(x.rule) &&
         can_fetch(x, key);
}
bool takes_precond(const Problem& x, int key) {
  return x.boundaries != nullptr && scalar_makes_m(x, key) && row_multiples(without_precond(x.rule)) &&
         !channel_erase(x.rule) && !wants_hi_lo(x.rule) && (x.rule.preconditions_write() || !x.rule.is_delta());
}

// A decay a channel: sm90/prepare/channel_plain.cu.
// Strides of rows whose offsets in a chunk are 32-bit numbers.
bool near_rows(const TokenArg& a) { return a.stride_t >= 0 && a.stride_t < (int64_t{1} << 31) / (4 * kChunk); }
// But for the gates.
bool takes_plain_rows(const Problem& x, int key) {
  return x.rule.is_delta() && !wants_hi_lo(x.rule) && can_fetch(x, key) && near_rows(x.in.q) && near_rows(x.in.k) &&
         near_rows(x.in.g);
}
// Erase gates of channels: their rows have a place only alongside bf16 log-decays. Nothing that coefficients are made
// of depends on such a gate. Z, if it is wanted, is c (.) v, from whole rows: no gain divides the value by a norm.
bool takes_plain_gates(const PrepareArgs& args) {
  const Problem& x = args.problem;
  const auto whole = [&](const TokenArg& a) { return a.bf16 != 0 && aligned_rows(a) && x.V % 8 == 0; };
  if (x.in.g.bf16 == 0 || !near_rows(x.in.erase_gate)) return false;
  if (args.z == nullptr) return x.rule.write != Gate::kChannel;
  return x.rule.write == Gate::kChannel && !x.rule.gain_uses_rho() && whole(x.in.v) && whole(x.in.write_gate);
}
bool channel_makes_m(const Problem& x, int key) {
  if (!x.rule.preconditions_write() || !x.rule.precond_squashed() || channel_erase(x.rule) ||
      x.rule.write == Gate::kChannel)
    return false;
  return row_multiples(without_precond(x.rule)) && takes_plain_rows(x, key);
}
bool takes_channel_plain(const PrepareArgs& args, int key) {
  const Problem& x = args.problem;
  if (x.rule.uses_precond()) return x.boundaries != nullptr && channel_makes_m(x, key);
  const bool gates =
      channel_erase(x.rule) ? takes_plain_gates(args) : args.z == nullptr && x.rule.write != Gate::kChannel;
  return gates && row_multiples(x.rule) && takes_plain_rows(x, key);
}

// ---- gradients

// Of gradients/scalar: plain_streams() with a preconditioner or without; without one, also linear_streams(), delta.
bool scalar_rows(const Problem& x) {
  const bool streams = plain_streams(x.rule) || (linear_streams(x.rule) && x.rule.is_delta());
  return streams && is_vec16(x.in.q, x.K) && is_vec16(x.in.k, x.K);
}
bool channel_gradients_make_m(const GradientArgs& args) {
  const Problem& x = args.problem;
  const TokenArgs& d = args.grads.d;
  if (x.precond_rows == nullptr || x.rule.preconditions_read() == x.rule.is_delta() || !ungated_streams(x.rule))
    return false;
  return is_vec16(x.in.q, x.K) && is_vec16(x.in.k, x.K) && is_vec16(x.in.v, x.V) && is_vec2(x.in.g, x.K) &&
         is_vec16(args.d_o, x.V) && is_vec16(d.q, x.K) && is_vec16(d.k, x.K) && is_vec16(d.v, x.V) && is_vec2(d.g, x.K);
}
GradientChoice select_channel_gradients(const GradientArgs& args) {
  const Problem& x = args.problem;
  const Rule& rule = x.rule;
  GradientChoice choice;
  choice.kernel = GradientKernel::kChannel;
  if (args.precond.rows != nullptr) {
    choice.streams = true, choice.m = RowM::kMade;
    return choice;
  }
  const bool copied = is_vec16(x.in.q, x.K) && is_vec16(x.in.k, x.K) &&
                      (!channel_erase(rule) || is_vec16(x.in.erase_gate, x.K)) &&
                      (rule.write != Gate::kChannel || is_vec16(x.in.write_gate, x.V));
  choice.gates = copied && rule.is_delta() && gated_streams(rule) && !rule.uses_precond();
  choice.own_key = copied && rule.is_delta() && own_key_streams(rule) && is_vec16(x.in.erase_key, x.K);
  choice.streams = choice.gates || choice.own_key || (copied && ungated_streams(rule));
  if (choice.streams && rule.uses_precond()) choice.m = RowM::kRead;
  choice.fused = x.fused.g.given != Given::kValue;
  return choice;
}
GradientChoice select_scalar_gradients(const GradientArgs& args) {
  const Rule& rule = args.problem.rule;
  const bool rows = scalar_rows(args.problem);
  GradientChoice choice;
  if (unscaled_keys(rule)) {
    choice.kernel = rows ? GradientKernel::kScalar : GradientKernel::kGeneral;
    choice.gain = rows && rule.decay == Decay::kScalar ? ScalarGain::kUnscaledDecays : ScalarGain::kUnscaled;
    return choice;
  }
  if (args.precond.rows == nullptr && !rows) return choice;
  choice.kernel = GradientKernel::kScalar;
  choice.m = args.precond.rows != nullptr ? RowM::kMade : rule.uses_precond() ? RowM::kRead : RowM::kNone;
  if (gain_is_gate(rule)) {
    choice.gain = ScalarGain::kGate;
  } else if (choice.m == RowM::kNone && gain_by_residual(rule)) {
    choice.gain = ScalarGain::kTied;
  }
  return choice;
}

}  // namespace

StateAccess state_access(const StateArg& a, int K, int V, int channels, int tile) {
  if (a.data == nullptr) return StateAccess::kAbsent;
  const int64_t size = a.bf16 != 0 ? 2 : 4, vector = channels * size < 16 ? channels * size : 16;
  const int64_t base = static_cast<int64_t>(address(a.data)) | (a.stride_n | a.stride_h) * size;
  if (a.stride_k == 1 && K % channels == 0 && ((base | a.stride_v * size) & (vector - 1)) == 0)
    return StateAccess::kChannels;
  if (a.stride_v == 1 && tile * size >= 16 && V * size % 16 == 0 && ((base | a.stride_k * size) & 15) == 0)
    return StateAccess::kStaged;
  return StateAccess::kElements;
}

PrepareChoice select_prepare(const PrepareArgs& args, int key) {
  const Problem& x = args.problem;
  PrepareChoice choice;
  choice.fetched = can_fetch(x, key);
  if (x.rule.decay == Decay::kChannel) {
    choice.kernel = uses_hi_lo(x.rule)               ? PrepareKernel::kChannelHiLo
                    : takes_channel_plain(args, key) ? PrepareKernel::kChannelPlain
                                                     : PrepareKernel::kChannel;
    choice.multiples = choice.fetched && row_multiples(x.rule);
  } else if (takes_sums(x, key)) {
    choice.kernel = PrepareKernel::kSums;
  } else if (takes_precond(x, key)) {
    choice.kernel = PrepareKernel::kPrecond;
  } else {
    choice.multiples = scalar_multiples(x, key) && args.forward_lo.lo_parts == nullptr;
  }
  return choice;
}
bool prepare_makes_m(const Problem& x, int key) {
  return x.rule.decay == Decay::kChannel ? channel_makes_m(x, key) : scalar_makes_m(x, key);
}
bool scan_reads_rows(const Problem& x, int key) {
  return x.rule.decay != Decay::kChannel && x.rule.is_delta() && takes_precond(x, key);
}
bool scan_reads_intra_chunk(const Problem& x, int key, bool cut) {
  return x.rule.decay != Decay::kChannel && x.rule.is_delta() &&
         ((!wants_hi_lo(x.rule) && scalar_multiples(x, key)) || (takes_sums(x, key) && !cut));
}

ScanForm select_scan(const ScanForwardArgs& args) {
  if (!args.is_delta) return ScanForm::kAdditive;
  if (args.hi_lo.chunk_tiles != nullptr) return ScanForm::kHiLo;
  if (args.solved != nullptr) return ScanForm::kApart;
  if (args.pairs != nullptr) return args.mixed ? ScanForm::kSums : ScanForm::kPairs;
  return args.rows.k.data != nullptr ? ScanForm::kRows : ScanForm::kChunkTiles;
}

GradientChoice select_gradients(const GradientArgs& args) {
  return args.problem.rule.decay == Decay::kChannel ? select_channel_gradients(args) : select_scalar_gradients(args);
}
bool prepare_fuses_gates(const PrepareArgs& args, int key) {
  const Problem& x = args.problem;
  return x.rule.decay == Decay::kChannel && !x.rule.uses_precond() && x.in.g.bf16 != 0 && x.in.g.divisor == 1 &&
         takes_channel_plain(args, key);
}
bool gradients_fuse_gates(const Problem& x, const TokenArg& d_g, const TokenArg& d_erase_gate) {
  const auto pairs = [&](const TokenArg& a) { return a.bf16 != 0 && is_vec2(a, x.K); };
  if (x.rule.decay != Decay::kChannel || !x.rule.is_delta() || x.rule.uses_precond() || !pairs(x.in.g) || !pairs(d_g))
    return false;
  GradientArgs args;
  args.problem = x;
  const GradientChoice choice = select_channel_gradients(args);
  // With gates besides there are too few registers at the smaller tile.
  return choice.streams && !choice.own_key &&
         (!choice.gates || (x.K > 64 && d_erase_gate.divisor == 1 && is_vec16(d_erase_gate, x.K)));
}
bool prepare_fuses_scalars(const PrepareArgs& args, int key) {
  if (args.problem.rule.uses_precond()) return false;
  const PrepareChoice choice = select_prepare(args, key);
  return choice.kernel == PrepareKernel::kSums ||
         (choice.kernel == PrepareKernel::kChannelPlain && !channel_erase(args.problem.rule)) ||
         (choice.kernel == PrepareKernel::kScalar && choice.multiples);
}
bool gradients_fuse_scalars(const Problem& problem) {
  if (problem.rule.uses_precond()) return false;
  GradientArgs args;
  args.problem = problem;
  const GradientChoice choice = select_gradients(args);
  return choice.kernel == GradientKernel::kScalar || (choice.kernel == GradientKernel::kChannel && choice.streams);
}
bool gradients_sum_heads(const Problem& problem) {
  constexpr int kMost = 16;
  const int group = problem.group;
  if (group < 2 || group > kMost || (group & (group - 1)) != 0 || problem.rule.uses_precond() ||
      direct_rule(problem.rule))
    return false;
  GradientArgs args;
  args.problem = problem;
  const GradientChoice choice = select_gradients(args);
  if (choice.kernel == GradientKernel::kChannel) return choice.streams;
  return choice.kernel == GradientKernel::kScalar && problem.rule.is_delta() &&
         (choice.gain == ScalarGain::kGate || choice.gain == ScalarGain::kTied);
}
bool gradients_make_m(const GradientArgs& args) {
  const Problem& x = args.problem;
  if (!x.rule.uses_precond() || !x.rule.precond_squashed() || x.group != 1) return false;
  return x.rule.decay == Decay::kChannel ? channel_gradients_make_m(args) : scalar_rows(x);
}

TokenChoice select_token(const TokenForwardArgs& args, int sm_count) {
  const Problem& x = args.problem;
  const int64_t heads = static_cast<int64_t>(x.sequences.N) * x.HV, row = x.K * (x.initial_state.bf16 != 0 ? 2 : 4),
                enough = 2 * int64_t{sm_count};
  const bool packed = x.sequences.offsets != nullptr;
  const bool starts = args.slots.own != nullptr && args.slots.skips == 0;
  TokenChoice choice;
  choice.channels = x.K <= 64 ? 2 : x.K <= 128 ? 4 : 8;
  choice.rows = x.V > 8 && heads * ((x.V + 31) / 32) >= enough ? 8 : 2;
  if (few_tokens(packed, x.sequences.T, args.slots.tokens != nullptr, starts)) choice.kernel = TokenKernel::kStep;
  // Whole heads: enough of them, each contiguous in whole units of 16 bytes, and room for three of them in an SM.
  constexpr int64_t kMostBytes = 64 * 1024, kManyBlocks = 2048;
  if (starts || choice.channels == 8 || packed || x.sequences.T != 1 || heads < enough || row % 16 != 0 ||
      row * x.V > kMostBytes)
    return choice;
  // Two blocks a head begin and end sooner; where many come after another one is better, as it is where it steps the
  // preconditioner.
  choice.parts = heads < kManyBlocks && !(x.rule.uses_precond() && x.m == nullptr) ? 2 : 1;
  const auto whole = [](const StateArg& a) {
    return (address(a.data) & 15) == 0 && ((a.stride_n | a.stride_h) * (a.bf16 != 0 ? 2 : 4)) % 16 == 0;
  };
  const auto access = [&](const StateArg& a) { return state_access(a, x.K, x.V, choice.channels, x.V); };
  const bool from =
      access(x.initial_state) == StateAccess::kChannels && x.initial_state.stride_v == x.K && whole(x.initial_state);
  const bool to = args.final_state.data == nullptr || access(args.final_state) == StateAccess::kChannels;
  if (from && to) choice.kernel = TokenKernel::kHeads;
  return choice;
}

}  // namespace fw::cuda
