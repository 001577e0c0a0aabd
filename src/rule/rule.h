// A rule is a point in a product of axes (recurrence.md section 2). This is the value
// type behind fw_rule: the same fields as enums, validated, with the structural traits that kernels dispatch on.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fastweight/fastweight.h"

namespace fw {

enum class Decay { kNone = FW_DECAY_NONE, kConstant = FW_DECAY_CONSTANT, kScalar = FW_DECAY_SCALAR, kChannel = FW_DECAY_CHANNEL };
enum class Solve { kOnline = FW_SOLVE_ONLINE, kOffline = FW_SOLVE_OFFLINE };
enum class Gain {
  kOne = FW_GAIN_ONE,
  kGate = FW_GAIN_GATE,
  kKaczmarz = FW_GAIN_KACZMARZ,
  kNlms = FW_GAIN_NLMS,
  kLonghorn = FW_GAIN_LONGHORN,
  kEfla = FW_GAIN_EFLA
};
enum class Gate { kTied = FW_GATE_TIED, kChannel = FW_GATE_CHANNEL };
enum class Feedback { kNone = FW_FEEDBACK_NONE, kLearned = FW_FEEDBACK_LEARNED };
enum class Precond { kNone = FW_PRECOND_NONE, kDiagonal = FW_PRECOND_DIAGONAL, kRead = FW_PRECOND_READ };
enum class Norm { kRaw = FW_NORM_RAW, kL2 = FW_NORM_L2 };

struct Rule {
  Decay decay = Decay::kNone;
  Solve solve = Solve::kOnline;
  Gain gain = Gain::kOne;
  Gate erase = Gate::kTied;
  Gate write = Gate::kTied;
  Feedback feedback = Feedback::kNone;
  Precond precond = Precond::kNone;
  Norm q_norm = Norm::kRaw;
  Norm k_norm = Norm::kRaw;
  double norm_eps = 1e-6;
  double gain_eps = 1e-6;
  double gain_bound = 1.0;
  double precond_x = 1.5;
  double precond_eps = 1e-6;

  // Structure: which inputs the recurrence takes. Everything else about a rule is elementwise (front.h).
  bool online() const { return solve == Solve::kOnline; }
  bool uses_g() const { return decay == Decay::kScalar || decay == Decay::kChannel; }
  bool uses_erase_gate() const { return online() && erase == Gate::kChannel; }
  bool uses_write_gate() const { return write == Gate::kChannel; }
  // The gain matters where a gate is tied to it.
  bool uses_gain() const { return (online() && erase == Gate::kTied) || write == Gate::kTied; }
  bool uses_beta() const { return uses_gain() && gain != Gain::kOne && gain != Gain::kNlms; }
  bool gain_uses_key_norm() const { return gain != Gain::kOne && gain != Gain::kGate; }
  bool uses_lambda() const { return online() && feedback == Feedback::kLearned; }
  bool uses_precond() const { return precond != Precond::kNone; }
  bool preconditions_write() const { return precond == Precond::kDiagonal; }
  bool preconditions_read() const { return precond == Precond::kRead; }

  bool operator==(const Rule&) const = default;
};

// Throws Error(kUsage) for values outside the enums and for a configuration that cannot be stable
// (gain_bound * precond_x > 2: an eigenvalue would leave the unit disk).
void validate(const Rule& rule);

// The named rules, presets.def in order.
struct Preset {
  std::string_view name;
  Rule rule;
  std::string_view summary;  // one line: the recurrence in words and the paper
};
std::span<const Preset> presets();
// Throws Error(kUsage) with the nearest known name.
const Preset& preset(std::string_view name);

// "decay=channel gain=kaczmarz feedback=learned ...": axes that differ from the default Rule. parse_rule accepts a preset's
// name, such a list, or a name followed by a list that changes it.
std::string to_string(const Rule& rule);
Rule parse_rule(std::string_view text);

Rule from_c(const fw_rule& rule);  // validates
fw_rule to_c(const Rule& rule);

}  // namespace fw
