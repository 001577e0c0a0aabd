// How the tensors of gates are given: as values or as logits (recurrence.md 2.1). What makes a value of a logit is in
// gate_law.h.
#pragma once

#include <array>
#include <cstddef>

#include "rule/tokens.h"

namespace fw {

// How a gate's value comes from its tensor: it is the value itself, or a logit.
enum class GateActivation {
  kValue = FW_GIVEN_VALUE,
  kSigmoid = FW_GIVEN_SIGMOID,
  kSoftplus = FW_GIVEN_SOFTPLUS,
  kLowerBound = FW_GIVEN_LOWER_BOUND,
  kLogSigmoid = FW_GIVEN_LOGSIGMOID
};

// Whether a log-decay with this activation has an a_log.
constexpr bool has_rate(GateActivation activation) {
  return activation == GateActivation::kSoftplus || activation == GateActivation::kLowerBound;
}

struct Gates {
#define FW_GATE(name, decay, bound) GateActivation name = GateActivation::kValue;
#include "rule/gates.def"
#undef FW_GATE
  double lower_bound = -5;
  double divisor = 16;

  bool operator==(const Gates&) const = default;
};

struct GateSpec {
  std::string_view name;
  size_t token = 0;  // its number in token_specs()
  GateActivation given = GateActivation::kValue;
  bool decay = false;  // a log-decay: it may have an a_log and a dt_bias
  double factor = 1;   // of its law (gate_law.h)

  constexpr bool logits() const { return given != GateActivation::kValue; }
};

#define FW_GATE(name, decay, bound) +1
inline constexpr size_t kGates = 0
#include "rule/gates.def"
    ;
#undef FW_GATE

constexpr std::array<GateSpec, kGates> gate_specs([[maybe_unused]] const Rule& r, const Gates& gates) {
  const auto factor = [&](GateActivation given, double bound) {
    return given == GateActivation::kSigmoid      ? bound
           : given == GateActivation::kLowerBound ? gates.lower_bound
           : given == GateActivation::kLogSigmoid ? 1 / gates.divisor
                                                  : 1.0;
  };
  return {{
#define FW_GATE(name, decay, bound) \
  {#name, static_cast<size_t>(TokenIndex::name), gates.name, decay, factor(gates.name, bound)},
#include "rule/gates.def"
#undef FW_GATE
  }};
}

// Whether any is given as a logit.
constexpr bool any_logits(const Gates& gates) {
  for (const GateSpec& spec : gate_specs(Rule(), gates)) {
    if (spec.logits()) return true;
  }
  return false;
}

// Throws Error(kUsage) naming the gate: a tensor that is given in no way it can be, or that the rule has not, or
// numbers outside their range.
void validate(const Gates& gates, const Rule& rule);

Gates from_c(const fw_gates& gates);  // validate() is the caller's
fw_gates to_c(const Gates& gates);

}  // namespace fw
