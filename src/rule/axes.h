// A rule is a point in a product of axes (recurrence.md section 2): the enums and the value type behind fw_rule, with
// the structural traits that kernels dispatch on. Plain data: device code includes this file and nothing of rule.h.
#pragma once

#include <cstdint>

#include "fastweight/fastweight.h"

namespace fw {

enum class Decay {
  kNone = FW_DECAY_NONE,
  kConstant = FW_DECAY_CONSTANT,
  kScalar = FW_DECAY_SCALAR,
  kChannel = FW_DECAY_CHANNEL
};
enum class Update { kDelta = FW_UPDATE_DELTA, kAdditive = FW_UPDATE_ADDITIVE };
enum class Gain {
  kOne = FW_GAIN_ONE,
  kGate = FW_GAIN_GATE,
  kKaczmarz = FW_GAIN_KACZMARZ,
  kNlms = FW_GAIN_NLMS,
  kLonghorn = FW_GAIN_LONGHORN,
  kEfla = FW_GAIN_EFLA,
  kPrecondLonghorn = FW_GAIN_PRECOND_LONGHORN
};
enum class Gate {
  kTied = FW_GATE_TIED,
  kChannel = FW_GATE_CHANNEL,
  kAveraged = FW_GATE_AVERAGED,
  kScalar = FW_GATE_SCALAR
};
enum class EraseKey { kTied = FW_ERASE_KEY_TIED, kOwn = FW_ERASE_KEY_OWN };
enum class EraseState { kDecayed = FW_ERASE_STATE_DECAYED, kPrevious = FW_ERASE_STATE_PREVIOUS };
enum class EraseWrite { kTied = FW_ERASE_WRITE_TIED, kOwn = FW_ERASE_WRITE_OWN };
enum class Feedback { kNone = FW_FEEDBACK_NONE, kLearned = FW_FEEDBACK_LEARNED, kFixed = FW_FEEDBACK_FIXED };
enum class Read { kPlain = FW_READ_PLAIN, kCorrected = FW_READ_CORRECTED };
enum class Precond { kNone = FW_PRECOND_NONE, kDiagonal = FW_PRECOND_DIAGONAL, kRead = FW_PRECOND_READ };
enum class PrecondForm {
  kSquash = FW_PRECOND_FORM_SQUASH,
  kSquashLow = FW_PRECOND_FORM_SQUASH_LOW,
  kSquashHigh = FW_PRECOND_FORM_SQUASH_HIGH,
  kInverse = FW_PRECOND_FORM_INVERSE,
  kInversePrevious = FW_PRECOND_FORM_INVERSE_PREVIOUS,
  kTanh = FW_PRECOND_FORM_TANH
};
enum class Normaliser {
  kNone = FW_NORMALISER_NONE,
  kKey = FW_NORMALISER_KEY,
  kOnePlus = FW_NORMALISER_ONE_PLUS,
  kGated = FW_NORMALISER_GATED
};
enum class Norm { kRaw = FW_NORM_RAW, kL2 = FW_NORM_L2 };
enum class KeySource { kGiven = FW_KEY_SOURCE_GIVEN, kDecay = FW_KEY_SOURCE_DECAY };

// What a gain is made of. The switch lists every gain: a value that it lacks does not compile (-Werror=switch), and
// would count as made of everything.
struct GainParts {
  bool beta = true;      // the gate
  bool key_norm = true;  // |k|^2 of the normalised key
  bool key_form = true;  // k.(M k)
  bool rho = true;       // e and z come times a norm, w over it
};
constexpr GainParts gain_parts(Gain gain) {
  switch (gain) {
    case Gain::kOne:
      return {false, false, false, false};
    case Gain::kGate:
      return {true, false, false, false};
    case Gain::kKaczmarz:
      return {true, true, false, true};
    case Gain::kNlms:
      return {false, true, false, true};
    case Gain::kLonghorn:
    case Gain::kEfla:
      return {true, true, false, false};
    case Gain::kPrecondLonghorn:
      return {true, false, true, false};
  }
  return {};
}
// The gains that have a part, a bit each: in device code one shift, where the switch would be a jump through a table.
constexpr uint32_t gains_with(bool GainParts::*part) {
  uint32_t gains = 0;
  for (int i = 0; i < 32; ++i) gains |= gain_parts(static_cast<Gain>(i)).*part ? uint32_t{1} << i : 0;
  return gains;
}
template <bool GainParts::*kPart>
constexpr bool gain_has(Gain gain) {
  constexpr uint32_t kGains = gains_with(kPart);
  // Modulo 32: a value outside the enum shifts within the word too.
  return (kGains >> (static_cast<uint32_t>(gain) % 32) & 1) != 0;
}

struct Rule {
  Decay decay = Decay::kNone;
  Update update = Update::kDelta;
  Gain gain = Gain::kOne;
  Gate erase = Gate::kTied;
  Gate write = Gate::kTied;
  EraseKey erase_key = EraseKey::kTied;
  Feedback feedback = Feedback::kNone;
  Read read = Read::kPlain;
  Precond precond = Precond::kNone;
  PrecondForm precond_form = PrecondForm::kSquash;
  Normaliser normaliser = Normaliser::kNone;
  Norm q_norm = Norm::kRaw;
  Norm k_norm = Norm::kRaw;
  KeySource key_source = KeySource::kGiven;
  EraseState erase_state = EraseState::kDecayed;
  EraseWrite erase_write = EraseWrite::kTied;
  double norm_eps = 1e-6;
  double gain_eps = 1e-6;
  double gain_bound = 1.0;
  double lambda = 0.5;
  double precond_x = 1.5;
  double precond_eps = 1e-6;
  double precond_ridge = 1.0;

  // Structure: which inputs the recurrence takes. Everything else about a rule is elementwise (front.h).
  constexpr bool is_delta() const { return update == Update::kDelta; }
  constexpr bool uses_k() const { return key_source == KeySource::kGiven; }
  constexpr bool uses_g() const { return decay == Decay::kScalar || decay == Decay::kChannel; }
  constexpr bool uses_erase_gate() const { return is_delta() && erase != Gate::kTied; }
  constexpr bool uses_write_gate() const { return write != Gate::kTied; }
  constexpr bool uses_erase_key() const { return is_delta() && erase_key == EraseKey::kOwn; }
  // What the erase finds in S_{t-1}, before the decay; without one both states are the same.
  constexpr bool erases_before_decay() const {
    return is_delta() && erase_state == EraseState::kPrevious && decay != Decay::kNone;
  }
  constexpr bool uses_erase_write() const { return is_delta() && erase_write == EraseWrite::kOwn; }
  // Whether an erase before the decay is one after it with another gate, the gate over the decay: both are one number
  // (scan/cuda/rewrites/erase_over_decay.h).
  constexpr bool can_divide_erase_gate() const {
    const bool is_gain = gain == Gain::kOne || gain == Gain::kGate;
    return erases_before_decay() && !uses_erase_write() && decay == Decay::kScalar &&
           (erase == Gate::kScalar || (erase == Gate::kTied && is_gain && !uses_precond()));
  }
  // Another erase that is not u = z - Sbar^T e written along w: a GPU takes two rows a token of some
  // (scan/cuda/rewrites/dplr_as_two_tokens.h).
  constexpr bool general_erase() const {
    return (erases_before_decay() && !can_divide_erase_gate()) || uses_erase_write();
  }
  // The gain matters where a gate is tied to it.
  constexpr bool uses_gain() const { return (is_delta() && erase == Gate::kTied) || write == Gate::kTied; }
  constexpr bool uses_beta() const { return uses_gain() && gain_has<&GainParts::beta>(gain); }
  // Whether |k|^2 of the normalised key enters a coefficient.
  constexpr bool gain_uses_key_norm() const { return gain_has<&GainParts::key_norm>(gain); }
  // Whether k.(M k) does.
  constexpr bool uses_key_form() const {
    return normaliser != Normaliser::kNone || gain_has<&GainParts::key_form>(gain);
  }
  // Whether e and z come times a norm and w over it (front.h: GainPair).
  constexpr bool gain_uses_rho() const { return gain_has<&GainParts::rho>(gain); }
  constexpr bool uses_lambda() const { return is_delta() && feedback == Feedback::kLearned; }
  constexpr bool uses_read_correction() const { return read == Read::kCorrected; }
  constexpr bool uses_precond() const { return precond != Precond::kNone; }
  constexpr bool preconditions_write() const { return precond == Precond::kDiagonal; }
  constexpr bool preconditions_read() const { return precond == Precond::kRead; }
  constexpr bool precond_squashed() const {
    return precond_form != PrecondForm::kInverse && precond_form != PrecondForm::kInversePrevious;
  }
  constexpr bool uses_precond_center() const { return uses_precond() && precond_squashed(); }

  bool operator==(const Rule&) const = default;
};

}  // namespace fw
