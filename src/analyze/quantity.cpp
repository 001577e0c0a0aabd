#include "analyze/quantity.h"

#include <array>

namespace fw {
namespace {

bool always(const Rule&) { return true; }
bool never(const Rule&) { return false; }
bool decays(const Rule& r) { return r.decay != Decay::kNone; }
bool is_delta(const Rule& r) { return r.is_delta(); }
bool fed_back(const Rule& r) { return r.is_delta() && r.feedback != Feedback::kNone; }
// The erase key is the step size times a key: what that key finds is a prediction of v.
bool predicts(const Rule& r) {
  return r.is_delta() && r.uses_gain() && r.erase == Gate::kTied && r.write == Gate::kTied;
}
bool preconditioned(const Rule& r) { return r.uses_precond(); }
bool squashed(const Rule& r) { return r.uses_precond_center(); }
bool erase_of_key_head(const Rule& r) { return r.erase != Gate::kScalar; }
// Over keys of any length |k|^2 and what is divided by it spread over decades.
bool raw_keys(const Rule& r) { return r.k_norm == Norm::kRaw; }
bool gain_of_raw_keys(const Rule& r) { return raw_keys(r) && r.gain_uses_key_norm(); }

constexpr std::array<QuantityInfo, kQuantities> kTable = {{
    {Quantity::kDecay, "decay", "exp(g), every channel", never, decays, never},
    {Quantity::kBeta, "beta", "the gate before the gain is made of it", never,
     [](const Rule& r) { return r.uses_beta(); }, never},
    {Quantity::kGain, "gain", "s, the scalar on e and z", never, [](const Rule& r) { return r.uses_gain(); },
     gain_of_raw_keys},
    {Quantity::kEraseGate, "erase_gate", "b, every key channel", erase_of_key_head,
     [](const Rule& r) { return r.uses_erase_gate(); }, never},
    {Quantity::kWriteGate, "write_gate", "c, every value channel", never,
     [](const Rule& r) { return r.uses_write_gate(); }, never},
    {Quantity::kLambda, "lambda", "the weight of the query in the erase key", never,
     [](const Rule& r) { return r.uses_lambda(); }, never},
    {Quantity::kEigenvalue, "eigenvalue", "1 - e.w", never, is_delta, never},
    {Quantity::kKeyWrite, "key_write", "k.w", always, always, raw_keys},
    {Quantity::kPrecondDecay, "precond_decay", "exp(gP)", always, preconditioned, never},
    {Quantity::kPrecondGain, "precond_gain", "betaP", always, preconditioned, never},
    {Quantity::kPrecondRaw, "precond_raw", "y = log(A + eps) - center, every channel", always, squashed, never},
    {Quantity::kPrecond, "precond", "M, every channel", always, preconditioned, never},
    {Quantity::kPrecondTanh, "precond_tanh", "M with tanh(y) in place of y / (1 + |y|), every channel", always,
     squashed, never},
    {Quantity::kCosKeyRead, "cos_key_read", "cos(v, S^T k)", never, always, never},
    {Quantity::kCosQueryRead, "cos_query_read", "cos(v, o)", never, always, never},
    {Quantity::kCosPriorReads, "cos_prior_reads", "cos(S_{t-1}^T q, S_{t-1}^T k)", never, always, never},
    {Quantity::kEffectiveStep, "effective_step", "e.k / |k|^2, that is s a with a = k.(k + lambda q) / |k|^2", never,
     fed_back, never},
    {Quantity::kTargetMove, "target_move", "|dv|, dv = v_t - v_{t-1}", never, predicts, never},
    {Quantity::kPredictionMove, "prediction_move", "|dp|, dp = Sbar^T x_t - S_{t-1}^T x_{t-1}, x = e / s", never,
     predicts, never},
    {Quantity::kDiscrepancy, "discrepancy", "|r|, r = dv - dp", never, predicts, never},
    {Quantity::kFeedback, "feedback", "|Sbar^T f|", never, fed_back, never},
    {Quantity::kFeedbackToKey, "feedback_to_key", "|Sbar^T f| / |Sbar^T (e - f)|", never, fed_back, always},
    {Quantity::kFeedbackToWrite, "feedback_to_write", "|Sbar^T f| / |z - Sbar^T e|", never, fed_back, always},
    {Quantity::kStateNorm, "state_norm", "|S|_F, sampled", never, always, never},
    {Quantity::kEffectiveRank, "effective_rank", "exp(entropy of the normalised singular values of S), sampled", never,
     always, never},
}};

constexpr bool in_order() {
  for (int i = 0; i < kQuantities; ++i) {
    if (static_cast<int>(kTable[static_cast<size_t>(i)].id) != i) return false;
  }
  return true;
}
static_assert(in_order());

}  // namespace

std::span<const QuantityInfo> quantities() { return kTable; }
const QuantityInfo& info(Quantity id) { return kTable[static_cast<size_t>(id)]; }

}  // namespace fw
