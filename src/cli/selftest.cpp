// selftest: every named rule, forward, backward and decode, chunk and token form, in each precision that the device
// has, against the reference on this machine.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "base/error.h"
#include "base/stop.h"
#include "cli/command.h"
#include "cli/json_output.h"
#include "cli/say.h"
#include "cli/selftest_mamba3.h"
#include "cli/selftest_scans.h"
#include "cli/signals.h"
#include "fastweight/fastweight.h"
#include "gpu/device.h"
#include "reference/compare.h"
#include "reference/header_run.h"
#include "reference/rounded.h"
#include "report/table.h"

namespace fw::cli {
namespace {

// Relative L2 errors. They are not tuned to pass: rounding of the type times the length of the sums that are taken.
constexpr double kBoundDouble = 1e-10;
constexpr double kBoundFloat = 2e-5;
// Products of bf16 operands, float32 sums; these shapes have resets, where the gradient of the decay is a difference.
constexpr double kBoundProducts = 6e-3;
constexpr double kBoundProductGradients = 2e-2;
// a_log and dt_bias are sums of the log-decays' gradients, and each of those is a sum over the later tokens of its
// chunk. One token's rounding stands in up to 64 of them and does not average out. That makes 4.6 times the log-decays'
// relative error where decays are alike (3.2 to 4.3 in 40 problems each of kda, gated_deltanet and gla), and theirs is
// up to 1.3e-2 at these shapes.
constexpr double kBoundProductParameters = 6e-2;

// Of rules that a GPU runs as two rows a token: without tokens that are taken back (docs/internals/gpu.md).
bool as_two_tokens(const Rule& rule, fw_device device) { return device == FW_DEVICE_CUDA && rule.general_erase(); }

// Shapes that meet every path: packed sequences around the chunk size with an empty one, grouped value heads, a key
// dimension that fills no vector, decays of 0, -1e4 and -inf. A plain batch of the usual head size; and one whose gates
// are logits, for rules that have any. Two rows a token (as_two_tokens()) know no grouped heads.
std::vector<ProblemOptions> shapes(const Rule& rule, fw_device device) {
  ProblemOptions packed;
  packed.sequences = SeqLayout({0, 1, 131, 131, 148, 211});
  packed.H = as_two_tokens(rule, device) ? 4 : 2;
  packed.HV = 4;
  packed.K = 24;
  packed.V = 16;
  packed.edge_decays = true;
  packed.seed = 11;
  ProblemOptions plain;
  plain.sequences = SeqLayout::uniform(2, 96);
  plain.H = 2;
  plain.HV = 2;
  plain.K = 64;
  plain.V = 64;
  plain.seed = 12;
  ProblemOptions logits = plain;
  logits.gates = logits_of(rule, GateActivation::kSoftplus);
  logits.seed = 13;
  if (!any_logits(logits.gates)) return {packed, plain};
  return {packed, plain, logits};
}

// How a rule is run and what is expected of it: one row of the table.
struct Kind {
  const char* name;
  HeaderRun run;  // without its form
  // gradient_bound: backward; parameter_bound: there of a_log and dt_bias
  double bound, gradient_bound, parameter_bound;
  bool token, chunk, step;  // which forms
};

HeaderRun header_run(fw_device device, fw_dtype dtype, bool bf16_operands) {
  HeaderRun run;
  run.device = device;
  run.dtype = dtype;
  run.bf16_operands = bf16_operands;
  return run;
}

std::vector<Kind> kinds(fw_device device) {
  if (device == FW_DEVICE_CPU) {
    return {{"double", header_run(device, FW_F64, false), kBoundDouble, kBoundDouble, kBoundDouble, true, true, true},
            {"float", header_run(device, FW_F32, false), kBoundFloat, kBoundFloat, kBoundFloat, true, true, true}};
  }
  return {{"float", header_run(device, FW_F32, false), kBoundFloat, kBoundFloat, kBoundFloat, true, false, true},
          {"bf16 products", header_run(device, FW_F32, true), kBoundProducts, kBoundProductGradients,
           kBoundProductParameters, false, true, false}};
}

struct Column {
  const char* name;
  fw_form form;
  bool backward, step;
  int64_t drafted = 0;  // tokens of a call of which some are taken back; 0: none are
};
constexpr std::array kColumns = {Column{"forward, chunk", FW_FORM_CHUNK, false, false},
                                 Column{"forward, token", FW_FORM_TOKEN, false, false},
                                 Column{"backward, chunk", FW_FORM_CHUNK, true, false},
                                 Column{"backward, token", FW_FORM_TOKEN, true, false},
                                 Column{"step", FW_FORM_TOKEN, false, true},
                                 Column{"step, taken back", FW_FORM_TOKEN, false, true, 4}};

bool has(const Kind& kind, const Column& column, const Rule& rule) {
  const bool dplr_as_two_tokens = as_two_tokens(rule, kind.run.device);
  if (column.step) return kind.step && !(dplr_as_two_tokens && column.drafted > 0);
  return column.form == FW_FORM_CHUNK ? kind.chunk : kind.token;
}

// The field that comes closest to its bound, or is furthest beyond. Without a name: nothing was compared.
struct Check {
  FieldError field;
  double bound = 1;

  double share() const { return field.error / bound; }
};

// A shape's problem and what the reference says of it.
struct Expected {
  ReferenceProblem problem;
  ReferenceOutputs forward;
  ReferenceInputs backward;

  explicit Expected(ReferenceProblem p)
      : problem(std::move(p)), forward(problem.forward()), backward(problem.backward()) {}
};

// Without a name where this GPU has no chunk form of the call.
Check check(const Expected& expected, const Kind& kind, const Column& column) {
  const auto& [problem, forward, backward] = expected;
  HeaderRun run = kind.run;
  run.form = column.form;
  if (run.device == FW_DEVICE_CUDA && column.form == FW_FORM_CHUNK && cuda::current_arch() != cuda::Arch::kSm90) {
    std::string plan;
    run.form = FW_FORM_AUTO;
    run.plan_text = &plan;
    header_forward(problem, run);
    if (plan.find("form: chunk") == std::string::npos) return {};
    run.plan_text = nullptr;
  }
  // Gradients that are a small part of the whole (the preconditioner's gates) are measured against a share of it.
  const double floor_share = run.bf16_operands ? 1e-2 : 1e-3;
  if (column.backward) {
    const ReferenceInputs got = header_backward(problem, run);
    const Check parameters{worst(compare_parameters(got, backward, floor_share)), kind.parameter_bound};
    const Check others{worst(compare(without_parameters(got), without_parameters(backward), floor_share)),
                       kind.gradient_bound};
    return parameters.share() > others.share() ? parameters : others;
  }
  if (column.drafted > 0)
    return {worst(compare(header_speculation(problem, run, column.drafted), forward)), kind.bound};
  return {worst(compare(column.step ? header_steps(problem, run) : header_forward(problem, run), forward)), kind.bound};
}

class Selftest : public Command {
 public:
  std::string name() const override { return "selftest"; }
  std::string summary() const override { return "check every rule against the reference on this machine"; }
  std::string details() const override {
    return fmt::format(
        "Prints the largest relative error (L2, over outputs, final states and all gradients) of the library against a "
        "reference in double precision that "
        "shares no code with it. Bounds: {:g} in double, {:g} in float; products of bf16 operands (cuda) {:g}, "
        "gradients {:g}, of a_log and dt_bias {:g}. "
        "The table has what comes closest to its bound. Exit code 1 if one is exceeded.",
        kBoundDouble, kBoundFloat, kBoundProducts, kBoundProductGradients, kBoundProductParameters);
  }
  void declare(Options& options) override {
    options.add("rule", "RULE,...", &names_, "these rules only (names or axes); without: all named rules", ',').words =
        rule_names();
    options.add("device", "NAME", &device_, "cpu or cuda").words = {"cpu", "cuda"};
    options.add("json", "", &json_, "print JSON instead of a table");
    declare_threads(options, threads_);
  }
  int run(Options& options) override;

 private:
  StringList names_;
  std::string device_ = "cpu";
  bool json_ = false;
  int64_t threads_ = 0;
};

int Selftest::run(Options&) {
  stop_on_signal();
  apply_threads(threads_);
  if (device_ != "cpu" && device_ != "cuda") fail_usage("--device: expected cpu or cuda, got '{}'", device_);
  const fw_device device = device_ == "cuda" ? FW_DEVICE_CUDA : FW_DEVICE_CPU;
  if (fw_device_check(device) != FW_OK) fail_usage("{}", fw_last_error());
  const bool all = names_.empty();
  if (all) {
    for (const Preset& p : presets()) names_.emplace_back(p.name);
  }
  std::vector<Rule> rules;
  for (const std::string& rule : names_) rules.push_back(parse_rule(rule));

  Table table;
  table.column("rule", Table::Align::kLeft);
  table.column("type", Table::Align::kLeft);
  for (const Column& column : kColumns) table.column(column.name);
  table.column("", Table::Align::kLeft);
  const std::vector<Kind> all_kinds = kinds(device);
  std::vector<std::string> failures;
  Json results = Json::array();
  // A row; a check without a name is of a column that the kind does not have.
  const auto add_row = [&](const std::string& rule, const char* type, const std::array<Check, kColumns.size()>& row) {
    std::vector<std::string> cells{rule, type};
    Json checks = Json::array();
    bool ok = true;
    for (size_t c = 0; c < kColumns.size(); ++c) {
      const auto& [e, bound] = row[c];
      cells.push_back(e.name.empty() ? "" : fmt::format("{:.1e}", e.error));
      if (e.name.empty()) continue;
      checks.push_back({{"name", kColumns[c].name},
                        {"error", e.error},
                        {"bound", bound},
                        {"tensor", e.name},
                        {"ok", e.error <= bound}});
      if (e.error <= bound) continue;
      ok = false;
      failures.push_back(fmt::format("{}, {}, {}: {} has a relative error of {:.2e}, at most {:g} expected", rule, type,
                                     kColumns[c].name, e.name, e.error, bound));
    }
    results.push_back({{"rule", rule}, {"type", type}, {"ok", ok}, {"checks", std::move(checks)}});
    cells.emplace_back(ok ? "ok" : "FAILED");
    table.row(std::move(cells));
  };
  for (size_t i = 0; i < rules.size(); ++i) {
    // A vector, not an array of arrays: clang 14 (clang-tidy) crashes on evaluating an array of strings as a constant.
    std::vector<std::array<Check, kColumns.size()>> rows(all_kinds.size());
    for (const ProblemOptions& shape : shapes(rules[i], device)) {
      stop_point("selftest", static_cast<int64_t>(i), static_cast<int64_t>(rules.size()), "rules");
      const Expected exact(random_problem(rules[i], shape));
      // The chunk form on a GPU makes rows of bf16 of float32 tensors: what that rounds is not its products' error.
      std::optional<Expected> rounded;
      if (device == FW_DEVICE_CUDA) rounded.emplace(of_bf16_numbers(exact.problem));
      for (size_t kind = 0; kind < all_kinds.size(); ++kind) {
        for (size_t c = 0; c < kColumns.size(); ++c) {
          if (!has(all_kinds[kind], kColumns[c], rules[i])) continue;
          const Check now = check(all_kinds[kind].run.bf16_operands ? *rounded : exact, all_kinds[kind], kColumns[c]);
          if (now.field.name.empty()) continue;
          if (rows[kind][c].field.name.empty() || now.share() > rows[kind][c].share()) rows[kind][c] = now;
        }
      }
    }
    for (size_t kind = 0; kind < all_kinds.size(); ++kind) {
      if (std::any_of(kColumns.begin(), kColumns.end(),
                      [&](const Column& column) { return has(all_kinds[kind], column, rules[i]); }))
        add_row(names_[i], all_kinds[kind].name, rows[kind]);
    }
  }
  // Layers that are no rules: one form, which is the token's.
  if (all && device == FW_DEVICE_CPU) {
    for (const ScanErrors& e : check_scans_here()) {
      const double bound = e.is_double ? kBoundDouble : kBoundFloat;
      add_row(e.layer, e.is_double ? "double" : "float",
              {Check(), Check{e.forward, bound}, Check(), Check{e.backward, bound}, Check{e.step, bound}});
    }
    for (const Mamba3Errors& e : check_mamba3_here()) {
      const double bound = e.is_double ? kBoundDouble : kBoundFloat;
      add_row(e.layer, e.is_double ? "double" : "float",
              {Check{e.chunk_forward, bound}, Check{e.token_forward, bound}, Check{e.chunk_backward, bound},
               Check{e.token_backward, bound}, Check{e.step, bound}});
    }
  }
  const std::string runs_on = device == FW_DEVICE_CUDA ? device_info().name : fw_simd_target();
  if (json_) {
    Json report = json_report("selftest");
    report.update({{"device", device_}, {"runs_on", runs_on}, {"failed", failures.size()}});
    report["results"] = std::move(results);
    print_json_report(report);
    return failures.empty() ? kExitOk : kExitFailed;
  }
  say("{}", table.text());
  for (const std::string& failure : failures) say("{}\n", failure);
  say("{} on {}: {}\n", fw_version(), runs_on,
      failures.empty() ? "all within bounds" : fmt::format("{} beyond their bounds", failures.size()));
  return failures.empty() ? kExitOk : kExitFailed;
}

}  // namespace

std::unique_ptr<Command> selftest_command() { return std::make_unique<Selftest>(); }

}  // namespace fw::cli
