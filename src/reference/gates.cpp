#include "reference/gates.h"

#include <cmath>

#include "rule/tokens.h"

namespace fw {
namespace {

using Vec = std::vector<double>;

// Member of ReferenceInputs by number in token_specs().
constexpr Vec ReferenceInputs::*kTokens[] = {
#define FW_TOKEN(name, heads, width, used) &ReferenceInputs::name,
#include "rule/tokens.def"
};

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

// One gate: its logits, and with what number of its heads and channels each of them goes.
struct Logits {
  GateSpec spec;
  const Vec &x, &a_log, &dt_bias;
  int64_t row;       // numbers of a token
  int64_t channels;  // of a head

  double a(int64_t i) const { return a_log.empty() ? 1.0 : std::exp(a_log[rate_at(i)]); }
  double y(int64_t i) const { return x[i] + (dt_bias.empty() ? 0.0 : dt_bias[i % row]); }
  // a_log has a number a head or a channel.
  int64_t rate_at(int64_t i) const { return static_cast<int64_t>(a_log.size()) == row ? i % row : i % row / channels; }

  double value(int64_t i) const {
    switch (spec.given) {
      case GateActivation::kSigmoid:
        return spec.factor * sigmoid(x[i]);
      case GateActivation::kSoftplus:
        return -a(i) * softplus(y(i));
      case GateActivation::kLowerBound:
        return spec.factor * sigmoid(a(i) * y(i));
      case GateActivation::kLogSigmoid:
        return -spec.factor * softplus(-y(i));
      default:
        return x[i];
    }
  }
  // d value / d x.
  double slope(int64_t i) const {
    switch (spec.given) {
      case GateActivation::kSigmoid:
        return spec.factor * sigmoid(x[i]) * sigmoid(-x[i]);
      case GateActivation::kSoftplus:
        return -a(i) * sigmoid(y(i));
      case GateActivation::kLowerBound:
        return spec.factor * a(i) * sigmoid(a(i) * y(i)) * sigmoid(-a(i) * y(i));
      case GateActivation::kLogSigmoid:
        return spec.factor * sigmoid(-y(i));
      default:
        return 1;
    }
  }
  // d value / d a_log.
  double rate_slope(int64_t i) const { return spec.given == GateActivation::kSoftplus ? value(i) : slope(i) * y(i); }
};

template <class Body>
void for_each_gate(const Rule& rule, const ReferenceShape& s, const ReferenceInputs& in, Body&& body) {
  static const Vec none;
  const auto tokens = token_specs(rule);
  for (const GateSpec& spec : gate_specs(rule, s.gates)) {
    const Vec& x = in.*kTokens[spec.token];
    if (!spec.logits() || x.empty()) continue;
    const bool of_g = spec.token == static_cast<size_t>(TokenIndex::g);
    const Vec& a_log = !spec.decay ? none : of_g ? in.a_log : in.precond_a_log;
    const Vec& dt_bias = !spec.decay ? none : of_g ? in.dt_bias : in.precond_dt_bias;
    body(Logits{spec, x, a_log, dt_bias, static_cast<int64_t>(x.size()) / s.sequences.tokens(),
                tokens[spec.token].channels(s.K, s.V)});
  }
}

}  // namespace

ReferenceInputs gate_values(const Rule& rule, const ReferenceShape& s, const ReferenceInputs& in) {
  ReferenceInputs made = in;
  for_each_gate(rule, s, in, [&](const Logits& gate) {
    Vec& values = made.*kTokens[gate.spec.token];
    for (size_t i = 0; i < values.size(); ++i) values[i] = gate.value(static_cast<int64_t>(i));
  });
  return made;
}

void gate_gradients(const Rule& rule, const ReferenceShape& s, const ReferenceInputs& in, ReferenceInputs& grad) {
  grad.a_log.assign(in.a_log.size(), 0.0);
  grad.dt_bias.assign(in.dt_bias.size(), 0.0);
  grad.precond_a_log.assign(in.precond_a_log.size(), 0.0);
  grad.precond_dt_bias.assign(in.precond_dt_bias.size(), 0.0);
  for_each_gate(rule, s, in, [&](const Logits& gate) {
    const bool of_g = gate.spec.token == static_cast<size_t>(TokenIndex::g);
    Vec& of_rate = of_g ? grad.a_log : grad.precond_a_log;
    Vec& of_bias = of_g ? grad.dt_bias : grad.precond_dt_bias;
    Vec& d = grad.*kTokens[gate.spec.token];
    for (size_t at = 0; at < d.size(); ++at) {
      const int64_t i = static_cast<int64_t>(at);
      if (!gate.a_log.empty()) of_rate[gate.rate_at(i)] += d[at] * gate.rate_slope(i);
      d[at] *= gate.slope(i);
      if (!gate.dt_bias.empty()) of_bias[i % gate.row] += d[at];
    }
  });
}

}  // namespace fw
