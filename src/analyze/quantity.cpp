#include "analyze/quantity.h"

#include <array>

namespace fw {
namespace {

bool always(const Rule&) { return true; }
bool never(const Rule&) { return false; }
bool decays(const Rule& r) { return r.decay != Decay::kNone; }
bool online(const Rule& r) { return r.online(); }
bool fed_back(const Rule& r) { return r.uses_lambda(); }
bool preconditioned(const Rule& r) { return r.uses_precond(); }
// Over keys of any length |k|^2 and what is divided by it spread over decades.
bool raw_keys(const Rule& r) { return r.k_norm == Norm::kRaw; }
bool gain_of_raw_keys(const Rule& r) { return raw_keys(r) && r.gain_uses_key_norm(); }

constexpr std::array<QuantityInfo, kQuantities> kTable = {{
    {Quantity::kDecay, "decay", "exp(g), every channel", false, decays, never},
    {Quantity::kBeta, "beta", "the gate before the gain is made of it", false, [](const Rule& r) { return r.uses_beta(); }, never},
    {Quantity::kGain, "gain", "s, the scalar on e and z", false, [](const Rule& r) { return r.uses_gain(); }, gain_of_raw_keys},
    {Quantity::kEraseGate, "erase_gate", "b, every key channel", true, [](const Rule& r) { return r.uses_erase_gate(); }, never},
    {Quantity::kWriteGate, "write_gate", "c, every value channel", false, [](const Rule& r) { return r.uses_write_gate(); }, never},
    {Quantity::kLambda, "lambda", "the weight of the query in the erase key", false, fed_back, never},
    {Quantity::kEigenvalue, "eigenvalue", "1 - e.w", false, online, never},
    {Quantity::kKeyWrite, "key_write", "k.w", true, always, raw_keys},
    {Quantity::kPrecondDecay, "precond_decay", "exp(gP)", true, preconditioned, never},
    {Quantity::kPrecondGain, "precond_gain", "betaP", true, preconditioned, never},
    {Quantity::kPrecondRaw, "precond_raw", "y = log(A + eps) - center, every channel", true, preconditioned, never},
    {Quantity::kPrecond, "precond", "M = exp(-log(x) y / (1 + |y|)), every channel", true, preconditioned, never},
    {Quantity::kCosKeyRead, "cos_key_read", "cos(v, S^T k)", false, always, never},
    {Quantity::kCosQueryRead, "cos_query_read", "cos(v, o)", false, always, never},
    {Quantity::kEffectiveStep, "effective_step", "e.k / |k|^2 = s a with a = k.(k + lambda q) / |k|^2", false, fed_back, never},
    {Quantity::kDrift, "drift", "|Sbar^T f|", false, fed_back, never},
    {Quantity::kDriftToKey, "drift_to_key", "|Sbar^T f| / |Sbar^T (e - f)|", false, fed_back, always},
    {Quantity::kDriftToWrite, "drift_to_write", "|Sbar^T f| / |z - Sbar^T e|", false, fed_back, always},
    {Quantity::kStateNorm, "state_norm", "|S|_F, sampled", false, always, never},
    {Quantity::kEffectiveRank, "effective_rank", "exp(entropy of the normalised singular values of S), sampled", false, always, never},
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
