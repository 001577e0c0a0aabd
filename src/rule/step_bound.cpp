#include "rule/step_bound.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace fw {
namespace {

// Where the diagonal M lies.
std::pair<double, double> preconditioner_range(const Rule& rule) {
  if (!rule.uses_precond()) return {1, 1};
  const double x = rule.precond_x;
  switch (rule.precond_form) {
    case PrecondForm::kSquash:
      return {1 / x, x};
    case PrecondForm::kSquashLow:
      return {1 / x, 1};
    case PrecondForm::kSquashHigh:
      return {1, x};
    case PrecondForm::kInverse:
    case PrecondForm::kInversePrevious:
      return {0, 1 / rule.precond_ridge};
  }
  return {1, 1};
}

// Whether the gain divides by |k|^2, so that gain * |k|^2 is bounded for every key.
bool divides_by_key(Gain gain) { return gain != Gain::kOne && gain != Gain::kGate && gain != Gain::kPrecondLonghorn; }

// The largest gain of unit keys, or of all keys: infinity where eps is all that keeps it finite.
double largest_gain(const Rule& rule, bool unit_keys) {
  switch (rule.gain) {
    case Gain::kOne:
      return 1;
    case Gain::kGate:
      return rule.gain_bound;
    case Gain::kKaczmarz:
      return unit_keys ? rule.gain_bound : INFINITY;
    case Gain::kNlms:
      return unit_keys ? 1 : INFINITY;
    case Gain::kLonghorn:
      return unit_keys ? rule.gain_bound / (1 + rule.gain_bound) : rule.gain_bound;
    case Gain::kPrecondLonghorn:
      return unit_keys ? rule.gain_bound / (1 + rule.gain_bound * preconditioner_range(rule).first) : rule.gain_bound;
    case Gain::kEfla:
      return unit_keys ? -std::expm1(-rule.gain_bound) : rule.gain_bound;
  }
  return INFINITY;
}

// The largest gain * |k|^2 of any key; for gains that divide by it.
double largest_projection(const Rule& rule) {
  switch (rule.gain) {
    case Gain::kKaczmarz:
      return rule.gain_bound;
    default:
      return 1;
  }
}

// The largest beta k.(M_w k) / (1 + beta k.(M k)) of unit keys or of all, M_w what the write key is multiplied by: M, or nothing where it is on the read.
double largest_implicit(const Rule& rule, bool unit_keys) {
  const auto [m_low, m_high] = preconditioner_range(rule);
  if (rule.preconditions_read()) return unit_keys ? largest_gain(rule, true) : 1 / m_low;
  return unit_keys ? rule.gain_bound * m_high / (1 + rule.gain_bound * m_high) : 1;
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
  bound.bounded = false;
  bound.reason = reason;
  bound.inputs = promises(rule, what_helps);
  return bound;
}

}  // namespace

namespace {

// Diag(alpha) - w e^T in place of (I - w e^T) Diag(alpha). Where e is w times positive numbers the transition is similar to a symmetric one, between -e.w
// and 1.
StepBound before_decay(const Rule& rule) {
  Rule decayed = rule;
  decayed.erase_state = EraseState::kDecayed;
  StepBound bound = step_bound(decayed);
  if (!bound.bounded) return bound;
  const double top = 1 - bound.low;
  if (rule.feedback != Feedback::kNone) {
    return unbounded(rule, bound, "the erase looks before the decay along a sum of two keys, so a step is Diag(decay) - w e^T with w and e apart", "e along w");
  }
  if (top > 1) return unbounded(rule, bound, fmt::format("e.w can reach {:.4g} where the decay is 0, so the eigenvalue {:.4g}", top, -top), "e.w <= 1");
  bound.low = -top;
  return bound;
}

}  // namespace

StepBound step_bound(const Rule& rule) {
  StepBound bound;
  if (rule.erases_before_decay() && !rule.uses_erase_write()) return before_decay(rule);
  if (!rule.online()) {
    bound.inputs = promises(rule, "");
    return bound;
  }
  const auto [m_low, m_high] = rule.preconditions_write() ? preconditioner_range(rule) : std::pair<double, double>(1, 1);
  const bool unit = rule.k_norm == Norm::kL2, normalised = rule.normaliser != Normaliser::kNone && !rule.preconditions_read();
  const bool feedback = rule.feedback != Feedback::kNone, own = rule.uses_erase_key();
  bound.symmetric = !rule.preconditions_write() && !feedback && !own && !rule.uses_erase_write() && rule.erase != Gate::kChannel;

  const bool tied = rule.erase == Gate::kTied;

  if (rule.uses_erase_write()) {
    return unbounded(rule, bound, "what is erased goes along a vector f of its own, and f.e takes any value", "f.e from 0 to 2");
  }
  if (own) {
    // p points where it likes, so e.w takes either sign.
    return unbounded(rule, bound, "the erase key p need not point where the write key does: where p.w < 0 the eigenvalue 1 - e.w is above 1",
                     "p.w from 0 to 2 / (gate)");
  }
  if (feedback) {
    const double lambda = rule.feedback == Feedback::kFixed ? rule.lambda : 1.0;
    // |q.(M k)| against k.(M k): at most the ratio of |M k| to k.(M k) for unit vectors (Kantorovich).
    const double skew = m_low > 0 ? (m_low + m_high) / (2 * std::sqrt(m_low * m_high)) : INFINITY;
    const bool unit_both = unit && rule.q_norm == Norm::kL2;
    if (!unit_both || rule.erase == Gate::kChannel || lambda * skew > 1) {
      return unbounded(rule, bound,
                       !unit_both ? "the query's part lambda q.w of e.w is not bounded by k.w when q or k is raw"
                                  : "the query's part lambda q.w of e.w can outweigh k.w with the other sign",
                       "|lambda q.w| <= k.w <= 1 / (gate)");
    }
    const double gate = tied ? largest_gain(rule, true) : rule.gain_bound;
    const double share = rule.normaliser == Normaliser::kOnePlus ? m_high / (1 + m_high) : 1;  // what n leaves of k.(M k)
    const bool implicit = tied && rule.gain == Gain::kPrecondLonghorn && !normalised;
    const double top =
        implicit ? largest_implicit(rule, true) * (1 + lambda * skew) : gate * (normalised ? share * (1 + lambda * skew) : m_high * (1 + lambda));
    if (top > 2) return unbounded(rule, bound, fmt::format("e.w can reach {:.4g}, so the eigenvalue {:.4g}", top, 1 - top), "e.w <= 2");
    bound.low = 1 - top;
    // Where norm_eps makes a key shorter than the query, the query can outweigh it.
    bound.inputs = promises(rule, fmt::format("keys much longer than {:g}", std::sqrt(rule.norm_eps)));
    return bound;
  }

  // e.w = gate * n * k.(M k) <= top.
  double top;
  if (normalised) {
    top = tied ? largest_gain(rule, false) : rule.gain_bound;
    if (rule.normaliser == Normaliser::kOnePlus && tied && divides_by_key(rule.gain)) top = std::min(top, largest_projection(rule) * m_high);
    if (std::isinf(top)) {
      return unbounded(rule, bound, "the gain grows without bound as a key becomes short, and the normaliser has taken |k|^2 out", "(gain) <= 2");
    }
  } else if (tied && rule.gain == Gain::kPrecondLonghorn && std::isfinite(largest_implicit(rule, unit))) {
    top = largest_implicit(rule, unit);
  } else if (tied && divides_by_key(rule.gain)) {
    top = (unit ? largest_gain(rule, true) : largest_projection(rule)) * m_high;
  } else if (unit) {
    top = (tied ? largest_gain(rule, true) : rule.gain_bound) * m_high;
  } else {
    return unbounded(rule, bound, "keys are raw and nothing divides by |k|^2, so 1 - e.w falls without bound as a key becomes long", "(gate) k.w <= 2");
  }
  if (top > 2) return unbounded(rule, bound, fmt::format("e.w can reach {:.4g}, so the eigenvalue {:.4g}", top, 1 - top), "e.w <= 2");
  bound.low = 1 - top;
  bound.inputs = promises(rule, "");
  return bound;
}

std::string describe(const StepBound& bound) {
  std::string text;
  if (bound.bounded) {
    text = bound.low == bound.high ? "bounded: nothing is erased, a step only decays"
                                   : fmt::format("bounded: the eigenvalue 1 - e.w that a write moves stays in [{:.4g}, {:g}]", bound.low, bound.high);
    if (!bound.inputs.empty()) text += fmt::format(", for {}", bound.inputs);
  } else {
    text = fmt::format("NOT bounded: {}; bounded only for inputs that keep {}", bound.reason, bound.inputs);
  }
  if (bound.bounded && !bound.symmetric) text += ". Its vectors e and w are not parallel, so the norm of a step can exceed 1";
  return text;
}

}  // namespace fw
