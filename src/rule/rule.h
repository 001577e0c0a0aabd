// Rules by name and as text: the presets, validation, the axes as values; the type itself is in axes.h.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fastweight/fastweight.h"
#include "rule/axes.h"

namespace fw {

// Throws Error(kUsage) for values outside the enums, and for a preconditioned step that cannot be stable. Such a step
// has gain_bound times the largest M above 2, or an inverse form without a normaliser: an eigenvalue would leave the
// unit disk.
void validate(const Rule& rule);

// The named rules, presets.def in order.
struct Preset {
  std::string_view name;
  Rule rule;
  std::string_view summary;  // one line: the recurrence in words and the paper
};
std::span<const Preset> presets();
// What papers take away from a rule or exchange in it, by name; ablations.def in order.
std::span<const Preset> ablations();
// Of both lists. Throws Error(kUsage) with the nearest known name.
const Preset& preset(std::string_view name);

// The axes and the numbers as values, for help texts and generators: names as parse_rule reads them.
struct AxisInfo {
  std::string_view name;
  std::vector<std::string_view> values;  // in order of their numbers; the first is a default Rule's
  int (*get)(const Rule&);
  void (*set)(Rule&, int);
};
std::span<const AxisInfo> rule_axes();
struct NumberInfo {
  std::string_view name;
  double Rule::*field;
};
std::span<const NumberInfo> rule_numbers();

// "decay=channel gain=kaczmarz feedback=learned ...": axes that differ from the default Rule. parse_rule accepts a
// preset's name, such a list, or a name followed by a list that changes it.
std::string to_string(const Rule& rule);
Rule parse_rule(std::string_view text);

Rule from_c(const fw_rule& rule);  // validates
fw_rule to_c(const Rule& rule);

}  // namespace fw
