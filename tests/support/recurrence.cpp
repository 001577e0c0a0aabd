#include "support/recurrence.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/bf16.h"

namespace fw::testing {
namespace {

::testing::AssertionResult within(const std::vector<FieldError>& errors, double bound) {
  std::string text;
  for (const FieldError& e : errors) {
    if (!(e.error <= bound)) text += fmt::format(" {}: {:.3g}", e.name, e.error);
  }
  if (text.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "relative error above " << bound << ":" << text;
}

}  // namespace

Problem with_states_of_some(Problem problem) {
  const size_t count = static_cast<size_t>(problem.shape.sequences.count());
  for (std::vector<double>* states : {&problem.in.initial_state, &problem.in.initial_precond}) {
    const auto state = static_cast<std::ptrdiff_t>(states->size() / count);
    for (size_t n = 0; n < count; n += 3)
      std::fill_n(states->begin() + static_cast<std::ptrdiff_t>(n) * state, state, 0.0);
  }
  return problem;
}

void round_values(std::vector<double>& values) {
  for (double& x : values) {
    const float wide = static_cast<float>(x);
    float value = 0;
    round_to_bf16_values(1, &wide, &value);
    x = static_cast<double>(value);
  }
}
void round_states(Problem& problem) { round_values(problem.in.initial_state); }

std::string describe(const Problem& p) {
  const ReferenceShape& s = p.shape;
  return fmt::format("{}; T={} N={} H={} HV={} K={} V={}{}", to_string(p.rule), s.sequences.tokens(),
                     s.sequences.count(), s.H, s.HV, s.K, s.V, p.in.initial_state.empty() ? "" : " initial state");
}

::testing::AssertionResult close(const ReferenceOutputs& got, const ReferenceOutputs& expected, double bound,
                                 double floor_share) {
  return within(compare(got, expected, floor_share), bound);
}

::testing::AssertionResult close(const ReferenceInputs& got, const ReferenceInputs& expected, double bound,
                                 double floor_share) {
  return within(compare(got, expected, floor_share), bound);
}

::testing::AssertionResult close_parameters(const ReferenceInputs& got, const ReferenceInputs& expected, double bound,
                                            double floor_share) {
  return within(compare_parameters(got, expected, floor_share), bound);
}

std::vector<Rule> composed_rules() {
  std::vector<Rule> rules;
  for (const Preset& p : ablations()) rules.push_back(p.rule);
  for (const char* text : {
           // kaczmarz_channel
           "decay=channel gain=kaczmarz q_norm=l2",
           // the issue's own example
           "decay=channel gain=kaczmarz feedback=learned write=channel q_norm=l2",
           // precond_kda
           "decay=channel gain=gate precond=diagonal q_norm=l2 k_norm=l2",
           // precond_deltanet
           "gain=gate precond=diagonal q_norm=l2 k_norm=l2",
           // everything with channels
           "decay=channel erase=channel write=channel feedback=learned precond=diagonal q_norm=l2 k_norm=l2",
           "decay=scalar gain=kaczmarz feedback=learned precond=diagonal q_norm=l2",  //
           // b-only, tied write
           "decay=channel gain=gate erase=channel q_norm=l2 k_norm=l2",
           // w-only, tied erase
           "decay=scalar gain=gate write=channel q_norm=l2 k_norm=l2",
           "decay=scalar gain=kaczmarz erase=channel",                            //
           "decay=constant gain=gate feedback=learned q_norm=l2 k_norm=l2",       //
           "decay=constant gain=one q_norm=l2 k_norm=l2",                         //
           "decay=channel update=additive gain=gate precond=diagonal k_norm=l2",  //
           "update=additive gain=kaczmarz write=tied q_norm=l2",                  //
           "decay=scalar update=additive write=channel",                          //
           // negative eigenvalues
           "decay=channel erase=channel write=channel gain_bound=2 q_norm=l2 k_norm=l2",
           "decay=scalar gain=gate gain_bound=2 precond=diagonal precond_x=1 q_norm=l2 k_norm=l2",  //
           "decay=scalar gain=gate norm_eps=0.01 q_norm=l2 k_norm=raw",                             //
           "decay=channel gain=gate q_norm=raw k_norm=l2 feedback=learned",                         //
           // raw keys
           "decay=channel gain=longhorn feedback=learned write=channel q_norm=l2",
           "decay=scalar gain=efla precond=diagonal q_norm=l2 k_norm=l2",  //
           "decay=constant gain=nlms erase=channel q_norm=l2",             //
           // online, preconditioned read
           "decay=channel gain=efla precond=read feedback=learned q_norm=l2",
           "update=additive gain=longhorn precond=read write=channel",  //
           // erases before its decay
           "decay=scalar gain=gate erase_key=own erase_state=previous q_norm=l2 k_norm=l2",
           "decay=channel gain=gate erase_state=previous q_norm=l2 k_norm=l2",  //
           // f over rho
           "decay=constant gain=kaczmarz feedback=learned erase_state=previous erase_write=own q_norm=l2",
           // along f, after the decay
           "decay=scalar erase_key=own erase_write=own q_norm=l2 k_norm=l2",
           // M on w alone
           "decay=channel gain=gate erase_write=own precond=diagonal q_norm=l2 k_norm=l2",
           // no decay: both states are one
           "gain=gate erase=channel erase_key=own erase_state=previous erase_write=own k_norm=l2",
           "decay=channel erase=scalar erase_key=own erase_state=previous erase_write=own key_source=decay "
           "k_norm=l2",  //
           // Comba's general form
           "decay=scalar gain=gate erase_key=own",
           "decay=channel erase_key=own erase=channel write=scalar feedback=learned q_norm=l2 k_norm=l2",  //
           "gain=kaczmarz erase_key=own erase=scalar read=corrected q_norm=l2",                            //
           "decay=channel erase=averaged write=averaged read=corrected feedback=fixed lambda=0.2 q_norm=l2 "
           "k_norm=l2",                                                                                            //
           "decay=scalar gain=longhorn erase=averaged q_norm=l2",                                                  //
           "gain=nlms write=averaged read=corrected",                                                              //
           "update=additive write=averaged read=corrected precond=read normaliser=key q_norm=l2 k_norm=l2",        //
           "decay=channel gain=gate precond=read normaliser=gated precond_form=inverse read=corrected q_norm=l2",  //
           // the exact step,
           "decay=channel gain=gate precond=diagonal normaliser=gated precond_form=inverse_previous "
           "precond_ridge=0.1 q_norm=l2 k_norm=l2",
           // decayed
           // raw keys
           "decay=scalar gain=gate precond=diagonal normaliser=key precond_form=inverse q_norm=l2",
           // another squashing function
           "decay=channel update=additive gain=gate precond=read precond_form=tanh q_norm=l2",
           // keys of the decay, erased
           "decay=channel gain=kaczmarz key_source=decay feedback=learned write=channel q_norm=l2",
           "decay=channel erase=channel key_source=decay read=corrected normaliser=one_plus q_norm=l2 k_norm=l2",  //
           // raw keys
           "decay=channel gain=precond_longhorn precond=diagonal precond_form=inverse feedback=learned",
           "decay=scalar update=additive gain=precond_longhorn precond=read normaliser=gated k_norm=l2",  //
           // no preconditioner
           "gain=precond_longhorn erase=channel q_norm=l2 k_norm=l2",
           // a normaliser without M, channels
           "decay=channel gain=gate normaliser=one_plus q_norm=l2 k_norm=l2",
           // w = k / |k|^2
           "gain=one normaliser=key",
           // no preconditioner: 1 / (1 + |k|^2)
           "decay=constant gain=kaczmarz normaliser=gated erase=scalar q_norm=l2",
       }) {
    rules.push_back(parse_rule(text));
  }
  return rules;
}

std::vector<Rule> all_rules() {
  std::vector<Rule> rules = composed_rules();
  for (const Preset& p : presets()) rules.push_back(p.rule);
  return rules;
}

uint64_t rule_seed(const Rule& rule, uint64_t turn) {
  const std::string text = fmt::format("{} {}", turn, to_string(rule));
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash % 1000000;  // short enough to be typed again
}

}  // namespace fw::testing
