// selftest: every named rule, forward, backward and decode, chunk and token form, float and double, against the reference
// on this machine.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "cli/command.h"
#include "fastweight/fastweight.h"
#include "reference/compare.h"
#include "reference/header_run.h"
#include "report/table.h"

namespace fw::cli {
namespace {

// Relative L2 errors. They are not tuned to pass: rounding of the type times the length of the sums that are taken.
constexpr double kBoundDouble = 1e-10;
constexpr double kBoundFloat = 2e-5;

// Shapes that meet every path: packed sequences around the chunk size with an empty one, grouped value heads, a key
// dimension that fills no vector, decays of 0, -1e4 and -inf; and a plain batch of the usual head size.
std::vector<ProblemOptions> shapes() {
  ProblemOptions packed;
  packed.sequences = SeqLayout({0, 1, 131, 131, 148, 211});
  packed.H = 2;
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
  return {packed, plain};
}

struct Column {
  const char* name;
  FieldError (*error)(const ReferenceProblem&, const ReferenceOutputs& forward, const ReferenceInputs& backward, fw_dtype);
};

HeaderRun header_run(fw_dtype dtype, fw_form form) {
  HeaderRun run;
  run.dtype = dtype;
  run.form = form;
  return run;
}

template <fw_form form>
FieldError forward_error(const ReferenceProblem& problem, const ReferenceOutputs& expected, const ReferenceInputs&, fw_dtype dtype) {
  return worst(compare(header_forward(problem, header_run(dtype, form)), expected));
}

template <fw_form form>
FieldError backward_error(const ReferenceProblem& problem, const ReferenceOutputs&, const ReferenceInputs& expected, fw_dtype dtype) {
  // Gradients that are a small part of the whole (the preconditioner's gates) are measured against a thousandth of it.
  constexpr double kFloorShare = 1e-3;
  return worst(compare(header_backward(problem, header_run(dtype, form)), expected, kFloorShare));
}

FieldError step_error(const ReferenceProblem& problem, const ReferenceOutputs& expected, const ReferenceInputs&, fw_dtype dtype) {
  return worst(compare(header_steps(problem, header_run(dtype, FW_FORM_AUTO)), expected));
}

constexpr std::array kColumns = {
    Column{"forward, chunk", &forward_error<FW_FORM_CHUNK>},
    Column{"forward, token", &forward_error<FW_FORM_TOKEN>},
    Column{"backward, chunk", &backward_error<FW_FORM_CHUNK>},
    Column{"backward, token", &backward_error<FW_FORM_TOKEN>},
    Column{"step", &step_error},
};

class Selftest : public Command {
 public:
  std::string name() const override { return "selftest"; }
  std::string summary() const override { return "check every rule against the reference on this machine"; }
  std::string details() const override {
    return fmt::format(
        "Prints the largest relative error (L2, over outputs, final states and all gradients) of the library against a reference in double precision that "
        "shares no code with it. Bounds: {:g} in double, {:g} in float. Exit code 1 if one is exceeded.",
        kBoundDouble, kBoundFloat);
  }
  void declare(Options& options) override {
    options.add("rules", "NAME,NAME,...", &names_, "these rules only (names or axes); without: all named rules", ',');
    declare_threads(options, threads_);
  }
  int run(Options& options) override;

 private:
  StringList names_;
  int64_t threads_ = 0;
};

int Selftest::run(Options&) {
  apply_threads(threads_);
  if (names_.empty()) {
    for (const Preset& p : presets()) names_.emplace_back(p.name);
  }
  std::vector<Rule> rules;
  for (const std::string& rule : names_) rules.push_back(parse_rule(rule));

  Table table;
  table.column("rule", Table::Align::kLeft);
  table.column("type", Table::Align::kLeft);
  for (const Column& column : kColumns) table.column(column.name);
  table.column("", Table::Align::kLeft);
  std::vector<std::string> failures;
  for (size_t i = 0; i < rules.size(); ++i) {
    // A vector, not an array of arrays: clang 14 (clang-tidy) crashes on evaluating an array of strings as a constant.
    std::vector<std::array<FieldError, kColumns.size()>> errors(2);
    for (const ProblemOptions& shape : shapes()) {
      const ReferenceProblem problem = random_problem(rules[i], shape);
      const ReferenceOutputs forward = problem.forward();
      const ReferenceInputs backward = problem.backward();
      for (size_t type = 0; type < 2; ++type) {
        for (size_t c = 0; c < kColumns.size(); ++c) {
          const FieldError e = kColumns[c].error(problem, forward, backward, type == 0 ? FW_F64 : FW_F32);
          if (errors[type][c].name.empty() || e.error > errors[type][c].error) errors[type][c] = e;
        }
      }
    }
    for (size_t type = 0; type < 2; ++type) {
      const double bound = type == 0 ? kBoundDouble : kBoundFloat;
      std::vector<std::string> cells{names_[i], type == 0 ? "double" : "float"};
      bool ok = true;
      for (size_t c = 0; c < kColumns.size(); ++c) {
        const FieldError& e = errors[type][c];
        cells.push_back(fmt::format("{:.1e}", e.error));
        if (e.error <= bound) continue;
        ok = false;
        failures.push_back(
            fmt::format("{}, {}, {}: {} has a relative error of {:.2e}, at most {:g} expected", names_[i], cells[1], kColumns[c].name, e.name, e.error, bound));
      }
      cells.emplace_back(ok ? "ok" : "FAILED");
      table.row(std::move(cells));
    }
  }
  fmt::print("{}", table.text());
  for (const std::string& failure : failures) fmt::print("{}\n", failure);
  fmt::print("{} on {}: {}\n", fw_version(), fw_simd_target(), failures.empty() ? "all within bounds" : fmt::format("{} beyond their bounds", failures.size()));
  return failures.empty() ? kExitOk : kExitFailed;
}

}  // namespace

std::unique_ptr<Command> selftest_command() { return std::make_unique<Selftest>(); }

}  // namespace fw::cli
