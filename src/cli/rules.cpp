// rules: the named rules, their axes and what they take.
#include <fmt/format.h>

#include "base/error.h"
#include "cli/command.h"
#include "report/table.h"
#include "rule/rule.h"

namespace fw::cli {
namespace {

const char* decay_word(Decay decay) {
  switch (decay) {
    case Decay::kNone:
      return "none";
    case Decay::kConstant:
      return "constant";
    case Decay::kScalar:
      return "scalar";
    case Decay::kChannel:
      return "channel";
  }
  return "?";
}

const char* gain_word(const Rule& rule) {
  if (!rule.uses_gain()) return "-";
  switch (rule.gain) {
    case Gain::kOne:
      return "one";
    case Gain::kGate:
      return "gate";
    case Gain::kKaczmarz:
      return "kaczmarz";
    case Gain::kNlms:
      return "nlms";
    case Gain::kLonghorn:
      return "longhorn";
    case Gain::kEfla:
      return "efla";
  }
  return "?";
}

// The gain that depends on |k|^2, as a formula.
std::string gain_formula(const Rule& rule) {
  switch (rule.gain) {
    case Gain::kOne:
    case Gain::kGate:
      return "";
    case Gain::kKaczmarz:
      return fmt::format("beta / (|k|^2 + {:g})", rule.gain_eps);
    case Gain::kNlms:
      return fmt::format("1 / (|k|^2 + {:g})", rule.gain_eps);
    case Gain::kLonghorn:
      return "beta / (1 + beta |k|^2)";
    case Gain::kEfla:
      return "(1 - exp(-beta |k|^2)) / |k|^2";
  }
  return "?";
}

std::string gate_word(Gate gate) { return gate == Gate::kTied ? "tied" : "channel"; }

const char* norm_word(Norm norm) { return norm == Norm::kRaw ? "raw" : "L2"; }

Table overview() {
  Table table;
  for (const char* heading : {"rule", "decay", "erase", "write", "gain", "q, k", "other", "in words"}) table.column(heading, Table::Align::kLeft);
  for (const Preset& p : presets()) {
    const Rule& r = p.rule;
    std::string other;
    if (r.uses_lambda()) other = "query feedback";
    if (r.uses_precond()) other += std::string(other.empty() ? "" : ", ") + (r.preconditions_read() ? "preconditioned read" : "preconditioned write key");
    if (other.empty()) other = "-";
    const std::string norms = r.q_norm == r.k_norm ? norm_word(r.q_norm) : fmt::format("{}, {}", norm_word(r.q_norm), norm_word(r.k_norm));
    table.row({std::string(p.name), decay_word(r.decay), r.online() ? gate_word(r.erase) : "none", gate_word(r.write), gain_word(r), norms, other,
               std::string(p.summary)});
  }
  return table;
}

// The five streams of a rule, as recurrence.md section 1 names them.
std::string formulas(const Rule& r) {
  const std::string k = r.k_norm == Norm::kL2 ? "k/|k|" : "k";
  const std::string q = r.q_norm == Norm::kL2 ? "q/|q|" : "q";
  const char* gain = r.gain == Gain::kOne ? "" : r.gain == Gain::kGate ? "beta " : "s ";
  std::string text = "  streams of token t, q and k as normalised:\n";
  text += fmt::format("    q = {}, k = {}\n", q, k);
  if (r.uses_gain() && r.gain_uses_key_norm()) text += fmt::format("    s = {}\n", gain_formula(r));
  text += fmt::format("    read   r = K^-1/2 {}q\n", r.preconditions_read() ? "M " : "");
  text += fmt::format("    write  w = {}k\n", r.preconditions_write() ? "M " : "");
  const std::string key = r.uses_lambda() ? "(k + lambda q)" : "k";
  text += fmt::format("    erase  e = {}\n", !r.online() ? "0" : r.erase == Gate::kChannel ? "b " + key : gain + key);
  text += fmt::format("    value  z = {}v\n", r.write == Gate::kChannel ? "c " : gain);
  static constexpr const char* kDecays[] = {"1", "1 - 2^(-5-h), h the value head", "exp g, one g per value head", "exp g, one g per key channel"};
  text += fmt::format("    decay  {}\n", kDecays[static_cast<size_t>(r.decay)]);
  text += "  recurrence:  Sbar = decay S;  u = z - Sbar^T e;  S = Sbar + w u^T;  o = S^T r\n";
  return text;
}

std::string inputs(const Rule& r) {
  std::string text = "  inputs: q, k, v";
  if (r.uses_g()) text += ", g";
  if (r.uses_beta()) text += ", beta";
  if (r.uses_erase_gate()) text += ", b (erase gate)";
  if (r.uses_write_gate()) text += ", c (write gate)";
  if (r.uses_lambda()) text += ", lambda";
  if (r.uses_precond()) text += fmt::format(", the preconditioner's decay, gain and center (M within [1/x, x], x = {:g})", r.precond_x);
  return text + "\n";
}

class Rules : public Command {
 public:
  std::string name() const override { return "rules"; }
  std::string summary() const override { return "list the named rules; 'rules NAME' says more about one"; }
  std::string details() const override {
    return "A rule is a point in a product of axes: any combination is valid where a rule is asked for, as \"decay=channel gain=kaczmarz feedback=learned\", "
           "or "
           "as a name followed by changes: \"kda solve=offline\".";
  }
  void declare(Options& options) override {
    options.positional("NAME", &names_, "a rule's name, or axes", false);
    options.add("markdown", "", &markdown_, "the list as a Markdown table");
  }
  int run(Options&) override {
    if (names_.empty()) {
      fmt::print("{}", markdown_ ? overview().markdown() : overview().text());
      return kExitOk;
    }
    const std::string text = fmt::format("{}", fmt::join(names_, " "));
    const Rule rule = parse_rule(text);
    validate(rule);
    fmt::print("{}\n", text);
    for (const Preset& p : presets()) {
      if (p.rule == rule) fmt::print("  {}: {}\n", p.name, p.summary);
    }
    fmt::print("  axes: {}\n{}{}", to_string(rule), formulas(rule), inputs(rule));
    return kExitOk;
  }

 private:
  StringList names_;
  bool markdown_ = false;
};

}  // namespace

std::unique_ptr<Command> rules_command() { return std::make_unique<Rules>(); }

}  // namespace fw::cli
