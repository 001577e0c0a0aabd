#include "rule/gates.h"

#include <cmath>

#include "base/error.h"
#include "rule/enum_names.h"
#include "rule/reserved.h"
#include "rule/rule.h"

namespace fw {
void validate(const Gates& gates, const Rule& rule) {
  const auto tokens = token_specs(rule);
  for (const GateSpec& spec : gate_specs(rule, gates)) {
    const GateActivation given = spec.given;
    const bool known =
        given == GateActivation::kValue ||
        (spec.decay ? has_rate(given) || given == GateActivation::kLogSigmoid : given == GateActivation::kSigmoid);
    if (!known) {
      fail_usage(
          "gates: {}: expected FW_GIVEN_VALUE{}, got {}", spec.name,
          spec.decay ? ", FW_GIVEN_SOFTPLUS, FW_GIVEN_LOWER_BOUND or FW_GIVEN_LOGSIGMOID" : " or FW_GIVEN_SIGMOID",
          enum_text<fw_given>(static_cast<int32_t>(given)));
    }
    if (given != GateActivation::kValue && !tokens[spec.token].used) {
      fail_usage("gates: {}: expected FW_GIVEN_VALUE, since the rule ({}) does not use it, got {}", spec.name,
                 to_string(rule), enum_text<fw_given>(static_cast<int32_t>(given)));
    }
    if (given == GateActivation::kLowerBound && !(std::isfinite(gates.lower_bound) && gates.lower_bound < 0))
      fail_usage("gates: lower_bound: expected a finite number below 0, got {}", gates.lower_bound);
    if (given == GateActivation::kLogSigmoid && !(std::isfinite(gates.divisor) && gates.divisor > 0))
      fail_usage("gates: divisor: expected a finite number above 0, got {}", gates.divisor);
  }
}

Gates from_c(const fw_gates& c) {
  for (const int32_t x : c.reserved) check_reserved("gates: reserved", x);
  Gates gates;
#define FW_GATE(name, decay, bound) gates.name = static_cast<GateActivation>(c.name);
#include "rule/gates.def"
#undef FW_GATE
  gates.lower_bound = c.lower_bound;
  gates.divisor = c.divisor;
  return gates;
}

fw_gates to_c(const Gates& gates) {
  fw_gates c{};
#define FW_GATE(name, decay, bound) c.name = static_cast<int32_t>(gates.name);
#include "rule/gates.def"
#undef FW_GATE
  c.lower_bound = gates.lower_bound;
  c.divisor = gates.divisor;
  return c;
}

}  // namespace fw
