// rules: the named rules, their axes and what they take.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "cli/command.h"
#include "cli/json_output.h"
#include "cli/say.h"
#include "report/progress.h"
#include "report/table.h"
#include "rule/formula.h"
#include "rule/rule.h"
#include "rule/step_bound.h"
#include "rule/tokens.h"

namespace fw::cli {
namespace {

// The value of an axis, as parse_rule reads it.
std::string word(const Rule& rule, std::string_view axis) {
  for (const AxisInfo& info : rule_axes()) {
    if (info.name == axis) return std::string(info.values[static_cast<size_t>(info.get(rule))]);
  }
  fail_internal("rules: no axis '{}'", axis);
}

const char* norm_word(Norm norm) { return norm == Norm::kRaw ? "raw" : "L2"; }

// What a rule has besides decay, gain and gates.
std::string others(const Rule& r) {
  std::vector<std::string> list;
  if (!r.uses_k()) list.emplace_back("key 1 - decay");
  if (r.uses_erase_key()) list.emplace_back("own erase key");
  if (r.erases_before_decay()) list.emplace_back("erase before decay");
  if (r.uses_erase_write()) list.emplace_back("own erase-write vector");
  if (r.is_delta() && r.feedback == Feedback::kLearned) list.emplace_back("query feedback");
  if (r.is_delta() && r.feedback == Feedback::kFixed) list.push_back(fmt::format("query feedback {:g}", r.lambda));
  if (r.uses_read_correction()) list.emplace_back("corrected read");
  if (r.uses_precond())
    list.push_back(fmt::format("{} ({})", r.preconditions_read() ? "preconditioned read" : "preconditioned write key",
                               word(r, "precond_form")));
  if (r.normaliser != Normaliser::kNone) list.push_back("normaliser " + word(r, "normaliser"));
  if (r.gain_bound > 1) list.push_back(fmt::format("bound {:g}", r.gain_bound));
  return list.empty() ? "-" : fmt::format("{}", fmt::join(list, ", "));
}

Table overview(std::span<const Preset> list) {
  Table table;
  for (const char* heading : {"rule", "decay", "erase", "write", "gain", "q, k", "other", "in words"})
    table.column(heading, Table::Align::kLeft);
  for (const Preset& p : list) {
    const Rule& r = p.rule;
    const std::string norms =
        r.q_norm == r.k_norm ? norm_word(r.q_norm) : fmt::format("{}, {}", norm_word(r.q_norm), norm_word(r.k_norm));
    table.row({std::string(p.name), word(r, "decay"), r.is_delta() ? word(r, "erase") : "none", word(r, "write"),
               r.uses_gain() ? word(r, "gain") : "-", norms, others(r), std::string(p.summary)});
  }
  return table;
}

// A gate's letter: the gain, a channel gate, its mean, one value a head.
std::string gate_letter(Gate gate, const std::string& gain, const char* letter) {
  switch (gate) {
    case Gate::kTied:
      return gain;
    case Gate::kChannel:
      return fmt::format("{} (.) ", letter);
    case Gate::kAveraged:
      return fmt::format("mean({}) ", letter);
    case Gate::kScalar:
      return fmt::format("{} ", letter);
  }
  return "?";
}

std::string preconditioner_formula(const Rule& r) {
  const std::string squash =
      fmt::format("s = y / (1 + |y|), y = log(A + {:g}) - center, x = {:g}", r.precond_eps, r.precond_x);
  switch (r.precond_form) {
    case PrecondForm::kSquash:
      return "x^-s, " + squash;
    case PrecondForm::kTanh:
      return fmt::format("x^-tanh(y), y = log(A + {:g}) - center, x = {:g}", r.precond_eps, r.precond_x);
    case PrecondForm::kSquashLow:
      return "x^(-(1 + s)/2), " + squash;
    case PrecondForm::kSquashHigh:
      return "x^((1 - s)/2), " + squash;
    case PrecondForm::kInverse:
      return fmt::format("1 / (A + {:g})", r.precond_ridge);
    case PrecondForm::kInversePrevious:
      return fmt::format("1 / (A of the token before + {:g})", r.precond_ridge);
  }
  return "?";
}

const char* normaliser_formula(Normaliser normaliser) {
  switch (normaliser) {
    case Normaliser::kNone:
      return "1";
    case Normaliser::kKey:
      return "1 / (k.(M k))";
    case Normaliser::kOnePlus:
      return "1 / (1 + k.(M k))";
    case Normaliser::kGated:
      return "betaP / (alphaP + betaP k.(M k))";
  }
  return "?";
}

// The five streams of a rule, as recurrence.md section 1 names them: a line each, of q and k as normalised.
std::vector<std::string> formulas(const Rule& r) {
  const std::string k = r.k_norm == Norm::kL2 ? "k/|k|" : "k";
  const std::string q = r.q_norm == Norm::kL2 ? "q/|q|" : "q";
  const std::string gain = r.gain == Gain::kOne ? "" : r.gain == Gain::kGate ? "beta " : "s ";
  const bool normalised = r.normaliser != Normaliser::kNone;
  const std::string M = std::string(normalised ? "n " : "") + (r.uses_precond() ? "M (.) " : "");
  std::vector<std::string> lines{fmt::format("q = {}, k = {}", q, k)};
  if (!r.uses_k()) lines[0] += ", k = 1 - exp g";
  if (r.uses_gain() && !gain_formula(r).empty()) lines.push_back(fmt::format("s = {}", gain_formula(r)));
  if (r.uses_precond())
    lines.push_back(fmt::format("A = alphaP A + betaP k (.) k,  M = {}", preconditioner_formula(r)));
  if (normalised)
    lines.push_back(
        fmt::format("n = {}{}", normaliser_formula(r.normaliser), r.uses_precond() ? "" : "  (M, alphaP, betaP = 1)"));
  const std::string read = r.uses_read_correction() ? "(q - d k)" : "q";
  lines.push_back(fmt::format("read   r = K^-1/2 {}{}", r.preconditions_read() ? M : "", read));
  lines.push_back(fmt::format("write  w = {}k", r.preconditions_read() ? "" : M));
  std::string key = r.uses_erase_key() ? "p" : "k";
  if (r.feedback == Feedback::kLearned) key = "(" + key + " + lambda q)";
  if (r.feedback == Feedback::kFixed) key = fmt::format("({} + {:g} q)", key, r.lambda);
  lines.push_back(fmt::format("erase  e = {}", !r.is_delta() ? "0" : gate_letter(r.erase, gain, "b") + key));
  lines.push_back(fmt::format("value  z = {}v", gate_letter(r.write, gain, "c")));
  static constexpr const char* kDecays[] = {"1", "1 - 2^(-5-h), h the value head", "exp g, one g per value head",
                                            "exp g, one g per key channel"};
  lines.push_back(fmt::format("decay  {}", kDecays[static_cast<size_t>(r.decay)]));
  return lines;
}

std::string recurrence_of(const Rule& r) {
  const char* seen = r.erases_before_decay() ? "S" : "Sbar";
  if (!r.uses_erase_write()) return fmt::format("Sbar = decay S;  u = z - {}^T e;  S = Sbar + w u^T;  o = S^T r", seen);
  return fmt::format("Sbar = decay S;  S = Sbar - f (S^T e)^T + w z^T, S^T e of {};  o = S^T r",
                     r.erases_before_decay() ? "the state before" : "Sbar");
}

// A tensor that a rule takes: the field of fw_inputs, the letter of the formulas, and the shape ("[B, T, HV]").
struct Input {
  std::string tensor, letter, shape;
};

std::string shape_of(const TokenSpec& spec) {
  const char* heads = spec.heads == TokenHeads::kKey ? "H" : spec.heads == TokenHeads::kValue ? "HV" : "H or HV";
  const char* channels = spec.one() ? "" : spec.width == TokenWidth::kKey ? ", K" : ", V";
  return fmt::format("[B, T, {}{}]", heads, channels);
}

std::vector<Input> inputs(const Rule& r) {
  const auto of_gate = [](std::string_view letter, Gate gate) {
    return fmt::format("{}{}", letter, gate == Gate::kScalar ? ", one a value head)" : ")");
  };
  // Of those whose letter is not their name.
  const std::map<std::string_view, std::string> letters = {
      {"erase_key", "p (erase key)"},
      {"erase_write", "f (what is erased goes along it)"},
      {"erase_gate", of_gate("b (erase gate", r.erase)},
      {"write_gate", of_gate("c (write gate", r.write)},
      {"read_correction", "d"},
      {"precond_g", "alphaP (the preconditioner's decay)"},
      {"precond_beta", "betaP (its gain)"},
  };
  std::vector<Input> list;
  list.reserve(kTokenTensors + 1);
  for (const TokenSpec& spec : token_specs(r)) {
    const auto letter = letters.find(spec.name);
    if (spec.used)
      list.push_back(
          {std::string(spec.name), letter != letters.end() ? letter->second : std::string(spec.name), shape_of(spec)});
  }
  if (r.uses_precond_center()) list.push_back({"precond_center", "center (its center)", "[H]"});
  return list;
}

// Names in the lists that have these axes.
std::vector<const Preset*> named(const Rule& rule) {
  std::vector<const Preset*> found;
  for (const std::span<const Preset> list : {presets(), ablations()}) {
    for (const Preset& p : list) {
      if (p.rule == rule) found.push_back(&p);
    }
  }
  return found;
}

Json json_of(const std::string& name, const Rule& rule) {
  Json axes = Json::object(), numbers = Json::object(), tensors = Json::array(), shapes = Json::object(),
       same_as = Json::array();
  for (const AxisInfo& axis : rule_axes()) axes[std::string(axis.name)] = word(rule, axis.name);
  for (const NumberInfo& number : rule_numbers()) numbers[std::string(number.name)] = rule.*number.field;
  for (const Input& input : inputs(rule)) {
    tensors.push_back(input.tensor);
    shapes[input.tensor] = input.shape;
  }
  std::string summary;
  for (const Preset* p : named(rule)) {
    same_as.push_back(p->name);
    if (summary.empty() || p->name == name) summary = p->summary;
  }
  const StepBound bound = step_bound(rule);
  const Json step = {{"bounded", bound.bounded},
                     {"eigenvalue", bound.bounded ? Json::array({bound.low, bound.high}) : Json()},
                     {"inputs", bound.inputs},
                     {"reason", bound.reason},
                     {"symmetric", bound.symmetric}};
  return {{"name", name},     {"summary", summary}, {"same_as", same_as},         {"text", to_string(rule)},
          {"axes", axes},     {"numbers", numbers}, {"formulas", formulas(rule)}, {"inputs", tensors},
          {"shapes", shapes}, {"step", step}};
}

Json json_of(std::span<const Preset> list) {
  Json array = Json::array();
  for (const Preset& p : list) array.push_back(json_of(std::string(p.name), p.rule));
  return array;
}

// Everything that the list without a name says.
Json json_of_all() {
  Json report = json_report("rules"), axes = Json::object(), numbers = Json::object();
  for (const AxisInfo& axis : rule_axes()) axes[std::string(axis.name)] = axis.values;
  for (const NumberInfo& number : rule_numbers()) numbers[std::string(number.name)] = Rule().*number.field;
  report["rules"] = json_of(presets());
  report["ablations"] = json_of(ablations());
  report["axes"] = axes;
  report["numbers"] = numbers;
  return report;
}

// Entries of --layers that are systems of their own.
constexpr const char* kLayers =
    "layers that are no points of the axes (train --layers; docs/models.md)\n"
    "  ssd                     Mamba-2's own: S = exp(A dt) S + dt B x^T a head, y = S^T C + D x\n"
    "  mamba                   Mamba (1): S[n,d] = exp(s_d A[n,d]) S[n,d] + k_n s_d u_d,\n"
    "                          y = S^T q + D u\n"
    "  longhorn_diag           Longhorn as published: S[n,d] = (1 - e_d k_n^2) S[n,d] + k_n e_d u_d,\n"
    "                          e = s / (1 + s |k|^2)\n"
    "  mesa                    MesaNet: o = G^T (H + Lambda)^-1 q, where H sums beta k k^T and G sums\n"
    "                          beta k v^T, both decayed\n"
    "  rwkv7                   RWKV-7: token shift and gates of low rank around the rule dplr\n"
    "  mamba3                  Mamba-3: S = exp(A dt) (S + (1 - lam) dt k' v'^T) + lam dt k v^T,\n"
    "                          k' and v' the token's before, q and k turned; MIMO: sums over R rows\n";

// Name and summary of each, as wide as the terminal.
std::string list_text(std::span<const Preset> list) {
  const size_t width = static_cast<size_t>(std::clamp(terminal_width(1), 60, 120));
  std::string text;
  constexpr size_t kColumn = 26;
  for (const Preset& p : list) {
    const std::string head = fmt::format("  {}", p.name);
    text += head + std::string(head.size() < kColumn ? kColumn - head.size() : 1, ' ') +
            wrap(p.summary, width - kColumn, kColumn) + "\n";
  }
  return text;
}

// Every axis with its values, what --compose may say.
std::string axes_text() {
  std::string text = "axes (the first value is what a composition without the axis has):\n";
  for (const AxisInfo& axis : rule_axes())
    text += fmt::format("  {:<13} {}\n", axis.name, fmt::join(axis.values, " | "));
  const Rule standard;
  text += "numbers:\n ";
  for (const NumberInfo& number : rule_numbers()) text += fmt::format(" {}={:g}", number.name, standard.*number.field);
  return text + "\n";
}

class Rules : public Command {
 public:
  std::string name() const override { return "rules"; }
  std::string summary() const override { return "list the named rules; 'rules NAME' or --compose says more about one"; }
  std::string details() const override {
    return "A rule is a point in a product of axes: any combination is valid where a rule is asked for, as "
           "\"decay=channel gain=kaczmarz feedback=learned\", "
           "or as a name followed by changes: \"kda update=additive\". A preconditioned step that could leave the unit "
           "disk is refused, with the reason. Of "
           "every rule is said whether its step is "
           "bounded, and for which inputs; several names show each.";
  }
  void declare(Options& options) override {
    options.positional("NAME", &names_, "a rule's name, or axes", false).words = rule_names();
    options.add("compose", "AXES", &compose_,
                "check a combination of axes, as \"decay=channel gain=kaczmarz erase=channel\", and show it");
    options.add("markdown", "", &markdown_, "the list as a Markdown table");
    options.add("json", "", &json_, "print JSON instead");
  }
  int run(Options& options) override {
    if (!compose_.empty() && !names_.empty()) fail_usage("rules: expected a NAME or --compose, got both");
    if (markdown_ && json_) fail_usage("--markdown and --json: expected one of them, both came");
    if (!compose_.empty() || !names_.empty()) {
      options.expect_only({"--compose", "--json"}, "with the name or the axes of a rule: the list alone is a table");
      const bool several = names_.size() > 1 && std::none_of(names_.begin(), names_.end(), [](const std::string& n) {
                             return n.find('=') != std::string::npos;
                           });
      if (several) {
        show(names_);
      } else {
        show({compose_.empty() ? fmt::format("{}", fmt::join(names_, " ")) : compose_});
      }
      return kExitOk;
    }
    if (json_) {
      print_json_report(json_of_all());
      return kExitOk;
    }
    if (markdown_) {
      say("{}", overview(presets()).markdown());
      return kExitOk;
    }
    say("rules ('fastweight rules NAME': axes, formula, inputs, bound; --markdown: a table of the axes)\n{}\nablations "
        "of the papers\n{}\n{}\n{}",
        list_text(presets()), list_text(ablations()), kLayers, axes_text());
    return kExitOk;
  }

 private:
  void show(const StringList& texts) const {
    std::vector<Rule> rules;
    for (const std::string& text : texts) rules.push_back(parse_rule(text));  // all, before the first is shown
    if (json_) {
      Json report = json_report("rules");
      report["rules"] = Json::array();
      for (size_t i = 0; i < rules.size(); ++i) report["rules"].push_back(json_of(texts[i], rules[i]));
      print_json_report(report);
      return;
    }
    for (size_t i = 0; i < rules.size(); ++i) show(texts[i], rules[i]);
  }
  static void show(const std::string& text, const Rule& rule) {
    say("{}\n", text);
    for (const Preset* p : named(rule)) say("  {}: {}\n", p->name, p->summary);
    say("  axes: {}\n  streams of token t, q and k as normalised:\n", to_string(rule));
    for (const std::string& line : formulas(rule)) say("    {}\n", line);
    std::string letters;
    for (const Input& input : inputs(rule)) letters += (letters.empty() ? "" : ", ") + input.letter;
    say("  recurrence:  {}\n  inputs: {}\n  step: {}\n", recurrence_of(rule), letters, describe(step_bound(rule)));
    say("  shapes (B batch, T tokens, H key heads, HV value heads, K key dim, V value dim):\n");
    for (const Input& input : inputs(rule)) say("    {:<16} {}\n", input.tensor, input.shape);
  }

  StringList names_;
  std::string compose_;
  bool markdown_ = false, json_ = false;
};

}  // namespace

std::unique_ptr<Command> rules_command() { return std::make_unique<Rules>(); }

}  // namespace fw::cli
