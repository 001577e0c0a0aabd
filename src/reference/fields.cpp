// The list of inputs and outputs with their shapes, and the check that a problem has what its rule needs.
#include "reference/fields.h"

#include "base/error.h"

namespace fw {
namespace {

using Shape = std::vector<int64_t>;

Shape query_key(const Rule&, const ReferenceShape& s) { return {s.sequences.tokens(), s.H, s.K}; }
Shape values(const Rule&, const ReferenceShape& s) { return {s.sequences.tokens(), s.HV, s.V}; }

Shape log_decay(const Rule& rule, const ReferenceShape& s) {
  if (rule.decay == Decay::kScalar) return {s.sequences.tokens(), s.HV};
  if (rule.decay == Decay::kChannel) return {s.sequences.tokens(), heads_or_key_heads(s.g_heads, s), s.K};
  return {};
}

Shape value_head_scalar(bool used, const ReferenceShape& s) { return used ? Shape{s.sequences.tokens(), s.HV} : Shape{}; }
Shape key_head_scalar(bool used, const ReferenceShape& s) { return used ? Shape{s.sequences.tokens(), s.H} : Shape{}; }
Shape beta(const Rule& rule, const ReferenceShape& s) { return value_head_scalar(rule.uses_beta(), s); }
Shape lambda(const Rule& rule, const ReferenceShape& s) { return value_head_scalar(rule.uses_lambda(), s); }
Shape precond_gate(const Rule& rule, const ReferenceShape& s) { return key_head_scalar(rule.uses_precond(), s); }

Shape erase_key(const Rule& rule, const ReferenceShape& s) { return rule.uses_erase_key() ? query_key(rule, s) : Shape{}; }
Shape read_correction(const Rule& rule, const ReferenceShape& s) { return value_head_scalar(rule.uses_read_correction(), s); }

Shape erase_gate(const Rule& rule, const ReferenceShape& s) {
  if (rule.erase == Gate::kScalar) return value_head_scalar(rule.uses_erase_gate(), s);
  return rule.uses_erase_gate() ? Shape{s.sequences.tokens(), heads_or_key_heads(s.erase_heads, s), s.K} : Shape{};
}

Shape write_gate(const Rule& rule, const ReferenceShape& s) {
  if (rule.write == Gate::kScalar) return value_head_scalar(true, s);
  return rule.uses_write_gate() ? values(rule, s) : Shape{};
}
Shape center(const Rule& rule, const ReferenceShape& s) { return rule.uses_precond_center() ? Shape{s.H} : Shape{}; }
Shape state(const Rule&, const ReferenceShape& s) { return {s.sequences.count(), s.HV, s.K, s.V}; }
Shape precond_state(const Rule& rule, const ReferenceShape& s) { return rule.uses_precond() ? Shape{s.sequences.count(), s.H, s.K} : Shape{}; }

template <class Struct>
void check_fields(const char* what, std::span<const ReferenceField<Struct>> fields, const Rule& rule, const ReferenceShape& s, const Struct& x,
                  bool all_optional) {
  for (const ReferenceField<Struct>& field : fields) {
    const int64_t expected = field.count(rule, s);
    const int64_t got = static_cast<int64_t>((x.*field.values).size());
    if (got == expected || (got == 0 && (field.optional || all_optional))) continue;
    fail_usage("reference: {} {}: expected {} values for this rule ({}), got {}", what, field.name, expected, to_string(rule), got);
  }
}

}  // namespace

std::span<const ReferenceField<ReferenceInputs>> reference_input_fields() {
  using In = ReferenceInputs;
  static const ReferenceField<In> list[] = {
      {"q", &In::q, query_key, false},
      {"k", &In::k, query_key, false},
      {"v", &In::v, values, false},
      {"g", &In::g, log_decay, false},
      {"beta", &In::beta, beta, false},
      {"lambda", &In::lambda, lambda, false},
      {"erase_key", &In::erase_key, erase_key, false},
      {"erase_gate", &In::erase_gate, erase_gate, false},
      {"write_gate", &In::write_gate, write_gate, false},
      {"read_correction", &In::read_correction, read_correction, false},
      {"precond_g", &In::precond_g, precond_gate, false},
      {"precond_beta", &In::precond_beta, precond_gate, false},
      {"precond_center", &In::precond_center, center, false},
      {"initial_state", &In::initial_state, state, true},
      {"initial_precond", &In::initial_precond, precond_state, true},
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

void check_shape(const ReferenceShape& s) {
  if (s.H < 1 || s.HV < 1 || s.K < 1 || s.V < 1 || s.HV % s.H != 0) {
    fail_usage("reference: shape: expected H, HV, K, V >= 1 and HV a multiple of H, got H={} HV={} K={} V={}", s.H, s.HV, s.K, s.V);
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
