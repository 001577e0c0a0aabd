#include "rule/gates.h"

#include <cmath>
#include <iterator>
#include <string>

#include "base/error.h"
#include "rule/rule.h"

namespace fw {
namespace {

constexpr std::string_view kGivenNames[] = {"FW_GIVEN_VALUE", "FW_GIVEN_SIGMOID", "FW_GIVEN_SOFTPLUS",
                                            "FW_GIVEN_LOWER_BOUND", "FW_GIVEN_LOGSIGMOID"};

std::string text_of(Given given) {
  const int number = static_cast<int>(given);
  return number >= 0 && number < static_cast<int>(std::size(kGivenNames))
             ? std::string(kGivenNames[static_cast<size_t>(number)])
             : std::to_string(number);
}

}  // namespace

void validate(const Gates& gates, const Rule& rule) {
  const auto tokens = token_specs(rule);
  for (const GateSpec& spec : gate_specs(rule, gates)) {
    const Given given = spec.given;
    const bool known = given == Given::kValue ||
                       (spec.decay ? has_rate(given) || given == Given::kLogSigmoid : given == Given::kSigmoid);
    if (!known) {
      fail_usage(
          "gates: {}: expected FW_GIVEN_VALUE{}, got {}", spec.name,
          spec.decay ? ", FW_GIVEN_SOFTPLUS, FW_GIVEN_LOWER_BOUND or FW_GIVEN_LOGSIGMOID" : " or FW_GIVEN_SIGMOID",
          text_of(given));
    }
    if (given != Given::kValue && !tokens[spec.token].used) {
      fail_usage("gates: {}: expected FW_GIVEN_VALUE, since the rule ({}) does not use it, got {}", spec.name,
                 to_string(rule), text_of(given));
    }
    if (given == Given::kLowerBound && !(std::isfinite(gates.lower_bound) && gates.lower_bound < 0))
      fail_usage("gates: lower_bound: expected a finite number below 0, got {}", gates.lower_bound);
    if (given == Given::kLogSigmoid && !(std::isfinite(gates.divisor) && gates.divisor > 0))
      fail_usage("gates: divisor: expected a finite number above 0, got {}", gates.divisor);
  }
}

Gates from_c(const fw_gates& c) {
  Gates gates;
#define FW_GATE(name, decay, bound) gates.name = static_cast<Given>(c.name);
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
