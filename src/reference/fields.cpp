// The list of inputs and outputs with their shapes, and the check that a problem has what its rule needs.
#include "reference/fields.h"

#include "base/error.h"
#include "rule/tokens.h"

namespace fw {
namespace {

using Shape = std::vector<int64_t>;

Shape values(const Rule&, const ReferenceShape& s) { return {s.sequences.tokens(), s.HV, s.V}; }

// Of tensor i of token_specs().
template <size_t kIndex>
Shape token_shape(const Rule& rule, const ReferenceShape& s) {
  const TokenSpec spec = token_specs(rule)[kIndex];
  if (!spec.used) return {};
  const int64_t either = heads_or_key_heads(spec.name == "g" ? s.g_heads : s.erase_heads, s);
  const int64_t heads = spec.heads == TokenHeads::kEither ? either : spec.heads == TokenHeads::kKey ? s.H : s.HV;
  if (spec.one()) return {s.sequences.tokens(), heads};
  return {s.sequences.tokens(), heads, spec.channels(s.K, s.V)};
}
enum TokenCoord : size_t {
#define FW_TOKEN(name, heads, width, used) kIndexOf_##name,
#include "rule/tokens.def"
};
// Of a log-decay's parameters: one number a head, or one a channel.
Shape of_heads(GateActivation given, bool rate, int64_t heads, int64_t channels) {
  if (rate ? !has_rate(given) : given == GateActivation::kValue) return {};
  return channels > 0 ? Shape{heads, channels} : Shape{heads};
}
Shape of_decay(const Rule& rule, const ReferenceShape& s, bool rate) {
  const bool channel = rule.decay == Decay::kChannel, per_channel = channel && (!rate || s.rate_per_channel);
  return of_heads(s.gates.g, rate, channel ? heads_or_key_heads(s.g_heads, s) : s.HV, per_channel ? s.K : 0);
}
Shape a_log(const Rule& rule, const ReferenceShape& s) { return of_decay(rule, s, true); }
Shape dt_bias(const Rule& rule, const ReferenceShape& s) { return of_decay(rule, s, false); }
Shape precond_a_log(const Rule&, const ReferenceShape& s) { return of_heads(s.gates.precond_g, true, s.H, 0); }
Shape precond_dt_bias(const Rule&, const ReferenceShape& s) { return of_heads(s.gates.precond_g, false, s.H, 0); }
Shape center(const Rule& rule, const ReferenceShape& s) { return rule.uses_precond_center() ? Shape{s.H} : Shape{}; }
Shape state(const Rule&, const ReferenceShape& s) { return {s.sequences.count(), s.HV, s.K, s.V}; }
Shape precond_state(const Rule& rule, const ReferenceShape& s) {
  return rule.uses_precond() ? Shape{s.sequences.count(), s.H, s.K} : Shape{};
}

template <class Struct>
void check_fields(const char* what, std::span<const ReferenceField<Struct>> fields, const Rule& rule,
                  const ReferenceShape& s, const Struct& x, bool all_optional) {
  for (const ReferenceField<Struct>& field : fields) {
    const int64_t expected = field.count(rule, s);
    const int64_t got = static_cast<int64_t>((x.*field.values).size());
    if (got == expected || (got == 0 && (field.optional || all_optional))) continue;
    fail_usage("reference: {} {}: expected {} values for this rule ({}), got {}", what, field.name, expected,
               to_string(rule), got);
  }
}

}  // namespace

std::span<const ReferenceField<ReferenceInputs>> reference_input_fields() {
  using In = ReferenceInputs;
  static const ReferenceField<In> list[] = {
#define FW_TOKEN(name, heads, width, used) {#name, &In::name, token_shape<kIndexOf_##name>, false},
#include "rule/tokens.def"
      {"precond_center", &In::precond_center, center, false},
      {"initial_state", &In::initial_state, state, true},
      {"initial_precond", &In::initial_precond, precond_state, true},
      {"a_log", &In::a_log, a_log, true},
      {"dt_bias", &In::dt_bias, dt_bias, true},
      {"precond_a_log", &In::precond_a_log, precond_a_log, true},
      {"precond_dt_bias", &In::precond_dt_bias, precond_dt_bias, true},
  };
  return list;
}

std::span<const ReferenceField<ReferenceOutputs>> reference_output_fields() {
  using Out = ReferenceOutputs;
  static const ReferenceField<Out> list[] = {
      {"o", &Out::o, values, false},
      {"final_state", &Out::final_state, state, true},
      {"final_precond", &Out::final_precond, precond_state, true},
  };
  return list;
}

bool of_tokens(std::string_view name) {
  for (const TokenSpec& spec : token_specs(Rule())) {
    if (spec.name == name) return true;
  }
  return name == "o";
}

bool is_parameter(std::string_view name) {
  return !of_tokens(name) && name.find("initial_") != 0 && name.find("final_") != 0;
}

void check_shape(const ReferenceShape& s) {
  if (s.H < 1 || s.HV < 1 || s.K < 1 || s.V < 1 || s.HV % s.H != 0) {
    fail_usage("reference: shape: expected H, HV, K, V >= 1 and HV a multiple of H, got H={} HV={} K={} V={}", s.H,
               s.HV, s.K, s.V);
  }
  for (int64_t heads : {s.g_heads, s.erase_heads}) {
    if (heads != 0 && heads != s.H && heads != s.HV)
      fail_usage("reference: shape: expected g_heads and erase_heads 0, H={} or HV={}, got {}", s.H, s.HV, heads);
  }
}

void check_inputs(const Rule& rule, const ReferenceShape& shape, const ReferenceInputs& in) {
  check_shape(shape);
  check_fields("input", reference_input_fields(), rule, shape, in, false);
}

void check_cotangents(const Rule& rule, const ReferenceShape& shape, const ReferenceOutputs& d) {
  check_fields("cotangent", reference_output_fields(), rule, shape, d, true);
}

}  // namespace fw
