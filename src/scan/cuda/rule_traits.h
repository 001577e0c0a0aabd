// What a rule's streams are made of, as far as kernels differ by it: constexpr, for kernels ask too. The choice of
// kernels (pipeline.h) is made of this and of what a call's tensors are (traits.h).
#pragma once

#include "rule/token_scalars.h"
#include "scan/cuda/kernels.h"

namespace fw::cuda {

// No streams that are sums, and no token scalars but beta: what kernels that load beta alone can have. A number that is
// new goes to the general kernels.
constexpr bool beta_alone(const Rule& r) { return r.feedback == Feedback::kNone && !takes_other_scalars(r); }

constexpr bool channel_erase(const Rule& rule) { return rule.uses_erase_gate() && rule.erase == Gate::kChannel; }

// The simplest front: the gain is 1 or a gate, and nothing else but gates of e and z and an elementwise preconditioner.
constexpr bool plain_front(const Rule& r) {
  return (r.gain == Gain::kOne || r.gain == Gain::kGate) && r.erase_key == EraseKey::kTied && beta_alone(r) &&
         !r.uses_key_form();
}
// Of those, without gates of e and z: streams that are q and k times a scale per row, and M.
constexpr bool plain_streams(const Rule& r) {
  return plain_front(r) && r.erase == Gate::kTied && r.write == Gate::kTied;
}

// r, e and w are multiples of the raw q, k (e also times a gate of channels) and k, by factors that need nothing but
// norms and gates of one number: any gain.
constexpr bool row_multiples(const Rule& rule) {
  return !rule.uses_erase_key() && beta_alone(rule) && !rule.uses_precond() && !rule.uses_key_form() &&
         !(rule.uses_erase_gate() && rule.erase == Gate::kAveraged) && rule.write != Gate::kAveraged;
}
// r or e is a sum of q and k (query feedback, corrected read) ...
constexpr bool mixed_streams(const Rule& r) { return r.feedback != Feedback::kNone || r.read != Read::kPlain; }
// ... and the rule is one of row_multiples() otherwise.
constexpr bool sums_of_rows(const Rule& rule) {
  Rule plain = rule;
  plain.feedback = Feedback::kNone, plain.read = Read::kPlain;
  return mixed_streams(rule) && row_multiples(plain);
}
// Streams that are q and k, or sums of the two, times scales per row: any gain, gates of one value a head.
constexpr bool linear_streams(const Rule& r) {
  return (r.erase == Gate::kTied || r.erase == Gate::kScalar) && (r.write == Gate::kTied || r.write == Gate::kScalar) &&
         r.erase_key == EraseKey::kTied && r.precond == Precond::kNone && !r.uses_key_form();
}

// Any gain, gates of channels or none.
constexpr bool gain_streams(const Rule& r) {
  return r.erase_key == EraseKey::kTied && beta_alone(r) && !r.uses_key_form() &&
         (r.erase == Gate::kTied || r.erase == Gate::kChannel) && (r.write == Gate::kTied || r.write == Gate::kChannel);
}
constexpr bool ungated_streams(const Rule& r) {
  return gain_streams(r) && r.erase == Gate::kTied && r.write == Gate::kTied;
}
// As plain_streams(), but for an erase key of its own that is not normalised.
constexpr bool own_key_streams(const Rule& r) {
  return r.uses_erase_key() && (r.gain == Gain::kOne || r.gain == Gain::kGate) && r.k_norm == Norm::kRaw &&
         beta_alone(r) && !r.uses_key_form() && !r.uses_precond() && r.erase == Gate::kTied && r.write == Gate::kTied;
}
constexpr bool gated_streams(const Rule& r) {
  return gain_streams(r) && r.erase == Gate::kChannel && r.write == Gate::kChannel;
}

// Rules with a gain that may exceed 1: errors do not fade unless decays do it, and A is large where keys point the same
// way. Two bf16 terms (tiles.h).
constexpr bool wants_hi_lo(const Rule& rule) { return rule.gain_bound > 1; }
constexpr bool uses_hi_lo(const Rule& rule) { return wants_hi_lo(rule) && rule.is_delta(); }
// Of rules that have hi/lo tiles: whether e and k there are the raw keys, and only their scales have gains, norms and
// decays.
constexpr bool keeps_raw_keys(const Rule& rule) {
  return row_multiples(rule) && !channel_erase(rule) && rule.decay != Decay::kChannel;
}

// Where the reverse scan takes E and Q as the forward scan has them, Khat, A and P, and leaves dZ (tiles.h: QETiles).
constexpr bool stores_k_hat(const Rule& rule) {
  return rule.is_delta() && rule.decay == Decay::kChannel && !wants_hi_lo(rule);
}

// Where the reverse scan takes raw rows of q and k, scales per row, A and P, and leaves dZ (tiles.h: RowScalesBwd).
constexpr bool reverse_takes_rows(const Rule& rule) {
  return rule.is_delta() && rule.decay != Decay::kChannel && !wants_hi_lo(rule) &&
         (row_multiples(rule) || sums_of_rows(rule)) && !channel_erase(rule);
}

// Delta rules whose gain is a gate, with nothing but that.
constexpr bool gain_is_gate(const Rule& rule) {
  return rule.is_delta() && rule.gain == Gain::kGate && plain_streams(rule);
}
// Rules whose chunk tiles are of unscaled keys (common/front/unscaled_keys.cuh): those with a gain that is a gate and
// nothing but, and without decays in the keys. prepare and the gradients agree on it.
constexpr bool unscaled_keys(const Rule& rule) {
  return uses_hi_lo(rule) && rule.decay != Decay::kChannel && gain_is_gate(rule) && !rule.uses_precond();
}
// Where R.dZ makes the gradient of the gain (common/front/unscaled_keys.cuh). Not where streams are sums of q and k: a
// kernel more, for a gain there only where outputs are above their bounds already (docs/numerics.md).
constexpr bool gain_by_residual(const Rule& rule) {
  return rule.is_delta() && rule.gain != Gain::kOne && rule.erase == Gate::kTied && rule.write == Gate::kTied &&
         beta_alone(rule);
}

// No erase, streams that are q, k and v times a scale per row, one decay a token or none: from the raw tensors, without
// chunk tiles (sm90/additive/).
constexpr bool direct_rule(const Rule& rule) {
  return !rule.is_delta() && rule.decay != Decay::kChannel && rule.write == Gate::kTied &&
         (rule.gain == Gain::kOne || rule.gain == Gain::kGate) && !takes_other_scalars(rule) && !rule.uses_precond() &&
         !rule.uses_key_form();
}

// Those whose forward can be one kernel (sm90/fused/). They erase, have one decay a token or none, and their streams
// are rows of q, k and v times scales. The step is a gate, over a function of |k|^2 or not.
constexpr bool fused_forward_rule(const Rule& rule) {
  const bool step = rule.gain == Gain::kOne || rule.gain == Gain::kGate || rule.gain == Gain::kLonghorn ||
                    rule.gain == Gain::kNlms || rule.gain == Gain::kKaczmarz;
  return rule.is_delta() && (rule.decay == Decay::kScalar || rule.decay == Decay::kNone) && step &&
         ungated_streams(rule) && row_multiples(rule) && !mixed_streams(rule) && !wants_hi_lo(rule) &&
         !rule.general_erase() && !rule.erases_before_decay();
}

// Those whose keys may have 129 to 256 channels in the chunk form (sm90/k256/), with gains up to 1 and no
// preconditioner. One decay a token or none: nothing erased, or rows of k times any gain, or (k256_sums()) sums of q
// and k and gates of one value a head. A decay a channel (Hopper alone): any erase but along a vector of its own.
constexpr bool k256_sums(const Rule& rule) {
  return rule.is_delta() && rule.decay != Decay::kChannel && linear_streams(rule) &&
         (mixed_streams(rule) ? sums_of_rows(rule) : row_multiples(rule)) &&
         !(ungated_streams(rule) && rule.gain != Gain::kOne);
}
constexpr bool k256_channels(const Rule& rule) {
  return stores_k_hat(rule) && !rule.uses_precond() && !rule.uses_key_form() && !rule.uses_erase_key() &&
         !(rule.uses_erase_gate() && rule.erase == Gate::kAveraged) && rule.write != Gate::kAveraged;
}
constexpr bool k256_rule(const Rule& rule) {
  if (rule.decay == Decay::kChannel) return k256_channels(rule);
  const bool rows = rule.is_delta() ? ungated_streams(rule) && rule.gain != Gain::kOne : plain_streams(rule);
  return !wants_hi_lo(rule) && ((rows && !rule.uses_precond()) || k256_sums(rule));
}

// Those whose keys may have as many because no channel of the state knows of another (rewrites/split_k.h): nothing
// erased, a decay a channel, no norm over all.
constexpr bool split_rule(const Rule& rule) {
  return plain_streams(rule) && !rule.is_delta() && rule.decay == Decay::kChannel && !rule.uses_precond() &&
         rule.q_norm == Norm::kRaw && rule.k_norm == Norm::kRaw;
}

// ---- What gradient kernels of one phase differ by

// M of the preconditioner in the gradients: none, read, or made there.
enum class RowM { kNone, kRead, kMade };
// What makes the gradient of a gain, where there is one decay a token or none, by the rules that it takes:
// - kAny: any gain, gates a row, and e and r may be sums of q and k,
// - kTied: gain_by_residual(), of any gain,
// - kGate: gain_is_gate(),
// - kUnscaled: of those, the ones with unscaled_keys() and no log-decays,
// - kUnscaledDecays: the same with log-decays.
enum class ScalarGain { kAny, kTied, kGate, kUnscaled, kUnscaledDecays };

}  // namespace fw::cuda
