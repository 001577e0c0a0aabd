#include "rule/step_bound.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace fw {
namespace {

// Every switch of this file lists all values of its enum and has no default, so that the compiler names what a new
// value leaves open (-Werror=switch). After it stands the answer for a value that is not listed: no promise.

struct Range {
  double low = 0, high = INFINITY;
};

// Where the diagonal M lies.
Range preconditioner_range(const Rule& rule) {
  if (!rule.uses_precond()) return {1, 1};
  const double x = rule.precond_x;
  switch (rule.precond_form) {
    case PrecondForm::kSquash:
    case PrecondForm::kTanh:
      return {1 / x, x};
    case PrecondForm::kSquashLow:
      return {1 / x, 1};
    case PrecondForm::kSquashHigh:
      return {1, x};
    case PrecondForm::kInverse:
    case PrecondForm::kInversePrevious:
      return {0, 1 / rule.precond_ridge};
  }
  return {};
}

// What the write key is multiplied by: M, or nothing where M is on the read.
Range write_key_range(const Rule& rule) {
  switch (rule.precond) {
    case Precond::kNone:
    case Precond::kRead:
      return {1, 1};
    case Precond::kDiagonal:
      return preconditioner_range(rule);
  }
  return {};
}

// What a gain s promises. `k` is the key after its norm.
struct GainBound {
  double unit = INFINITY;        // largest s |k|^2 where |k| <= 1, which is also the largest s where |k| = 1
  double any = INFINITY;         // largest s of any key
  double projection = INFINITY;  // largest s |k|^2 of any key
};

GainBound gain_bound(const Rule& rule) {
  const double beta = rule.gain_bound;
  switch (rule.gain) {
    case Gain::kOne:
      return {1, 1, INFINITY};
    case Gain::kGate:
      return {beta, beta, INFINITY};
    case Gain::kKaczmarz:
      return {beta, INFINITY, beta};
    case Gain::kNlms:
      return {1, INFINITY, 1};
    case Gain::kLonghorn:
      return {beta / (1 + beta), beta, 1};
    case Gain::kPrecondLonghorn: {
      const double low = preconditioner_range(rule).low;
      return {beta / (1 + beta * low), beta, 1 / low};
    }
    case Gain::kEfla:
      return {-std::expm1(-beta), beta, 1};
  }
  return {};
}

// The largest n k.(M k) of the normaliser n: where |k| <= 1, and of any key.
struct NormaliserBound {
  double unit = INFINITY, any = INFINITY;
};

NormaliserBound normaliser_bound(const Rule& rule) {
  const double high = write_key_range(rule).high;
  switch (rule.normaliser) {
    case Normaliser::kNone:
      return {high, INFINITY};
    case Normaliser::kKey:
    case Normaliser::kGated:
      return {1, 1};
    case Normaliser::kOnePlus:
      return {high / (1 + high), 1};
  }
  return {};
}

// The largest beta k.(M_w k) / (1 + beta k.(M k)) of unit keys or of all, M_w what the write key is multiplied by.
double largest_implicit(const Rule& rule, bool unit_keys) {
  const Range m = preconditioner_range(rule);
  if (rule.preconditions_read()) return unit_keys ? gain_bound(rule).unit : 1 / m.low;
  return unit_keys ? rule.gain_bound * m.high / (1 + rule.gain_bound * m.high) : 1;
}

// The largest lambda: the query's part of the erase key.
double largest_feedback(const Rule& rule) {
  switch (rule.feedback) {
    case Feedback::kNone:
      return 0;
    case Feedback::kFixed:
      return rule.lambda;
    case Feedback::kLearned:
      return 1;
  }
  return INFINITY;
}

// Whether the gate of the erase leaves e parallel to the key.
bool keeps_direction(Gate erase) {
  switch (erase) {
    case Gate::kTied:
    case Gate::kAveraged:
    case Gate::kScalar:
      return true;
    case Gate::kChannel:
      return false;
  }
  return false;
}

// Whether the erase key is the write key, and the vector that an erase is written along is w.
bool shares_key(EraseKey key) {
  switch (key) {
    case EraseKey::kTied:
      return true;
    case EraseKey::kOwn:
      return false;
  }
  return false;
}
bool shares_write(EraseWrite write) {
  switch (write) {
    case EraseWrite::kTied:
      return true;
    case EraseWrite::kOwn:
      return false;
  }
  return false;
}

// Whether log-decays up to 0, which every rule expects, let no channel grow.
bool decays_shrink(Decay decay) {
  switch (decay) {
    case Decay::kNone:
    case Decay::kConstant:
    case Decay::kScalar:
    case Decay::kChannel:
      return true;
  }
  return false;
}

// Whether the erase reads the state after the decay. Without a decay both states are the same.
bool reads_decayed_state(const Rule& rule) {
  switch (rule.erase_state) {
    case EraseState::kDecayed:
      return true;
    case EraseState::kPrevious:
      return rule.decay == Decay::kNone;
  }
  return false;
}

std::string promises(const Rule& rule, const std::string& more) {
  std::vector<std::string> list;
  if (rule.uses_g()) list.emplace_back("g <= 0");
  if (rule.uses_beta()) list.push_back(fmt::format("beta in [0, {:g}]", rule.gain_bound));
  if (rule.uses_erase_gate()) list.push_back(fmt::format("b in [0, {:g}]", rule.gain_bound));
  if (rule.uses_lambda()) list.emplace_back("lambda in [0, 1]");
  if (!more.empty()) list.push_back(more);
  std::string text;
  for (const std::string& item : list) text += (text.empty() ? "" : ", ") + item;
  return text;
}

StepBound unbounded(const Rule& rule, StepBound bound, const std::string& reason, const std::string& what_helps) {
  bound.bounded = bound.shrinks_by_decay = false;
  bound.reason = reason;
  bound.inputs = promises(rule, what_helps);
  return bound;
}

// Diag(alpha) - w e^T in place of (I - w e^T) Diag(alpha). Where e is w times positive numbers the transition is
// similar to a symmetric one, between -e.w and 1.
StepBound before_decay(const Rule& rule) {
  Rule decayed = rule;
  decayed.erase_state = EraseState::kDecayed;
  StepBound bound = step_bound(decayed);
  bound.shrinks_by_decay = false;  // where a decay is 0 the step is -w e^T
  if (!bound.bounded) return bound;
  const double top = 1 - bound.low;
  if (rule.feedback != Feedback::kNone) {
    return unbounded(
        rule, bound,
        "the erase looks before the decay along a sum of two keys, so a step is Diag(decay) - w e^T with w and e apart",
        "e along w");
  }
  if (top > 1)
    return unbounded(rule, bound,
                     fmt::format("e.w can reach {:.4g} where the decay is 0, so the eigenvalue {:.4g}", top, -top),
                     "e.w <= 1");
  bound.low = -top;
  return bound;
}

// The largest lambda for which the query's part of e.w cannot outweigh k.w, as a factor on k.(M k). For unit vectors
// |q.(M k)| against k.(M k) is at most the ratio of |M k| to k.(M k) (Kantorovich).
double skew_of(const Range& m) { return m.low > 0 ? (m.low + m.high) / (2 * std::sqrt(m.low * m.high)) : INFINITY; }

StepBound with_feedback(const Rule& rule, StepBound bound, bool normalised) {
  const Range m = write_key_range(rule);
  const double lambda = largest_feedback(rule), skew = skew_of(m);
  const bool unit_both = rule.k_norm == Norm::kL2 && rule.q_norm == Norm::kL2, tied = rule.erase == Gate::kTied;
  if (!unit_both || !keeps_direction(rule.erase) || lambda * skew > 1) {
    return unbounded(rule, bound,
                     !unit_both ? "the query's part lambda q.w of e.w is not bounded by k.w when q or k is raw"
                                : "the query's part lambda q.w of e.w can outweigh k.w with the other sign",
                     "|lambda q.w| <= k.w <= 1 / (gate)");
  }
  const double gate = tied ? gain_bound(rule).unit : rule.gain_bound;
  const bool implicit = tied && rule.gain == Gain::kPrecondLonghorn && !normalised;
  const double top =
      implicit ? largest_implicit(rule, true) * (1 + lambda * skew)
               : gate * (normalised ? normaliser_bound(rule).unit * (1 + lambda * skew) : m.high * (1 + lambda));
  if (!(top <= 2))
    return unbounded(rule, bound, fmt::format("e.w can reach {:.4g}, so the eigenvalue {:.4g}", top, 1 - top),
                     "e.w <= 2");
  bound.low = 1 - top;
  // Where norm_eps makes a key shorter than the query, the query can outweigh it.
  bound.inputs = promises(rule, fmt::format("keys much longer than {:g}", std::sqrt(rule.norm_eps)));
  return bound;
}

}  // namespace

StepBound step_bound(const Rule& rule) {
  StepBound bound;
  if (!decays_shrink(rule.decay))
    return unbounded(rule, bound, "nothing is known of what the decay does", "(decay) <= 1");
  if (!rule.is_delta()) {
    bound.inputs = promises(rule, "");
    bound.shrinks_by_decay = true;
    return bound;
  }
  const bool tied_write = shares_write(rule.erase_write);
  if (!reads_decayed_state(rule) && tied_write) return before_decay(rule);

  const bool unit = rule.k_norm == Norm::kL2,
             normalised = rule.normaliser != Normaliser::kNone && !rule.preconditions_read();
  const bool feedback = rule.feedback != Feedback::kNone, tied = rule.erase == Gate::kTied;
  const Range m = write_key_range(rule);
  bound.symmetric = m.low == 1 && m.high == 1 && !rule.preconditions_write() && !feedback &&
                    shares_key(rule.erase_key) && tied_write && keeps_direction(rule.erase);

  if (!tied_write) {
    return unbounded(rule, bound, "what is erased goes along a vector f of its own, and f.e takes any value",
                     "f.e from 0 to 2");
  }
  if (!shares_key(rule.erase_key)) {
    // p points where it likes, so e.w takes either sign.
    return unbounded(
        rule, bound,
        "the erase key p need not point where the write key does: where p.w < 0 the eigenvalue 1 - e.w is above 1",
        "p.w from 0 to 2 / (gate)");
  }
  if (feedback) return with_feedback(rule, bound, normalised);

  // e.w = gate * n * k.(M k) <= top.
  double top;
  if (normalised) {
    const GainBound gain = gain_bound(rule);
    top = (tied ? gain.any : rule.gain_bound) * normaliser_bound(rule).any;
    if (rule.normaliser == Normaliser::kOnePlus && tied) top = std::min(top, gain.projection * m.high);  // n <= 1
    if (std::isinf(top)) {
      return unbounded(rule, bound,
                       "the gain grows without bound as a key becomes short, and the normaliser has taken |k|^2 out",
                       "(gain) <= 2");
    }
  } else if (tied && rule.gain == Gain::kPrecondLonghorn && std::isfinite(largest_implicit(rule, unit))) {
    top = largest_implicit(rule, unit);
  } else {
    const GainBound gain = gain_bound(rule);
    const double gate = tied ? (unit ? gain.unit : gain.projection) : (unit ? rule.gain_bound : INFINITY);
    top = gate * m.high;
    if (std::isinf(gate)) {
      return unbounded(rule, bound,
                       unit ? "nothing is known of how far the gain goes"
                            : "keys are raw and the gain does not divide by |k|^2, so 1 - e.w falls without bound as a "
                              "key becomes long",
                       "(gate) k.w <= 2");
    }
  }
  if (!(top <= 2))
    return unbounded(rule, bound, fmt::format("e.w can reach {:.4g}, so the eigenvalue {:.4g}", top, 1 - top),
                     "e.w <= 2");
  bound.low = 1 - top;
  bound.inputs = promises(rule, "");
  bound.shrinks_by_decay = bound.symmetric;
  return bound;
}

std::string describe(const StepBound& bound) {
  std::string text;
  if (bound.bounded) {
    text = bound.low == bound.high
               ? "bounded: nothing is erased, a step only decays"
               : fmt::format("bounded: the eigenvalue 1 - e.w that a write moves stays in [{:.4g}, {:g}]", bound.low,
                             bound.high);
    if (!bound.inputs.empty()) text += fmt::format(", for {}", bound.inputs);
  } else {
    text = fmt::format("NOT bounded: {}; bounded only for inputs that keep {}", bound.reason, bound.inputs);
  }
  if (bound.bounded && !bound.symmetric)
    text += ". Its vectors e and w are not parallel, so the norm of a step can exceed 1";
  return text;
}

}  // namespace fw
