// How a rule is added (docs/internals/add-rule.md), shown with the relaxed Kaczmarz step without decay:
// S += k (v - S^T k)^T eta / (|k|^2 + eps).
// It is a new point of axes that exist, so kernels, gradients, decode, header and program have it as soon as its axes
// are written down. What is left to do is to say the published formula once, on its own, and to compare.
#include "reference/paper.h"
#include "support/recurrence.h"

namespace fw::testing {
namespace {

// Step 1, the axes: in presets.def this would be
//   FW_PRESET(relaxed_kaczmarz, "gain=kaczmarz", "a relaxed projection step on raw keys, no decay")
constexpr std::string_view kAxes = "gain=kaczmarz";

// Step 2, the published formula, one token: in src/reference/paper.cpp with the others.
std::vector<double> relaxed_kaczmarz(PaperState& state, const PaperToken& x) {
  const auto K = x.k.size(), V = x.v.size();
  double k2 = 0;
  for (const double k : x.k) k2 += k * k;
  std::vector<double> o(V, 0.0);
  for (size_t v = 0; v < V; ++v) {
    const auto col = static_cast<int64_t>(v);
    double error = x.v[v];
    for (size_t k = 0; k < K; ++k) error -= state.S(static_cast<int64_t>(k), col) * x.k[k];
    for (size_t k = 0; k < K; ++k) {
      state.S(static_cast<int64_t>(k), col) += x.beta * error * x.k[k] / (k2 + 1e-6);
      o[v] += x.scale * x.q[k] * state.S(static_cast<int64_t>(k), col);
    }
  }
  return o;
}

Problem small_problem() {
  ProblemOptions options;
  options.sequences = SeqLayout({0, 5, 5, 42});
  options.H = 1;
  options.HV = 2;
  options.K = 6;
  options.V = 5;
  options.seed = 4;
  return random_problem(parse_rule(kAxes), options);
}

// Step 3: the reference of all rules agrees with the formula.
TEST(AddingARule, TheAxesSayWhatTheFormulaSays) {
  const Problem problem = small_problem();
  const PaperRule paper{"relaxed_kaczmarz", false, &relaxed_kaczmarz};
  EXPECT_TRUE(close(problem.forward(), paper_forward(paper, problem.rule, problem.shape, problem.in), 1e-13));
}

// Step 4: everything else is there. Both forms and the decode step, forward and backward.
TEST(AddingARule, ItRunsEverywhere) {
  const Problem problem = small_problem();
  for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
    HeaderRun run;
    run.form = form;
    EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), 1e-10));
    EXPECT_TRUE(close(header_backward(problem, run), problem.backward(), 1e-10));
  }
  ProblemOptions options;
  options.sequences = SeqLayout::uniform(2, 12);
  const Problem steps = random_problem(parse_rule(kAxes), options);
  EXPECT_TRUE(close(header_steps(steps, {}), steps.forward(), 1e-10));
}

}  // namespace
}  // namespace fw::testing
