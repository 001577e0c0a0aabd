// The quantities that have a distribution over tokens: names, formulas, which rules have them. docs/analyze.md explains
// each.
#pragma once

#include <span>
#include <string_view>

#include "analyze/distribution.h"
#include "rule/rule.h"

namespace fw {

// In the order of the table in quantity.cpp.
enum class Quantity {
  kDecay,
  kBeta,
  kGain,
  kEraseGate,
  kWriteGate,
  kLambda,
  kEigenvalue,
  kKeyWrite,
  kPrecondDecay,
  kPrecondGain,
  kPrecondRaw,
  kPrecond,
  kPrecondTanh,
  kCosKeyRead,
  kCosQueryRead,
  kCosPriorReads,
  kEffectiveStep,
  kTargetMove,
  kPredictionMove,
  kDiscrepancy,
  kFeedback,
  kFeedbackToKey,
  kFeedbackToWrite,
  kStateNorm,
  kEffectiveRank,
};
inline constexpr int kQuantities = static_cast<int>(Quantity::kEffectiveRank) + 1;

struct QuantityInfo {
  Quantity id;
  std::string_view name;
  std::string_view formula;          // in the letters of docs/analyze.md
  bool (*of_key_head)(const Rule&);  // one for every key head, not for every value head
  bool (*applies)(const Rule&);
  bool (*logarithmic)(const Rule&);

  Distribution::Scale scale(const Rule& rule) const {
    return logarithmic(rule) ? Distribution::Scale::kLog10 : Distribution::Scale::kLinear;
  }
};

// All of them, kQuantities entries.
std::span<const QuantityInfo> quantities();
const QuantityInfo& info(Quantity id);

}  // namespace fw
