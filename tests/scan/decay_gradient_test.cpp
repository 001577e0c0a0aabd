// Tokens that nothing scores: what an output no longer reaches has a gradient of exactly 0, also that of a decay, whose
// chunk form sums over the tokens (recurrence.md section 5). AdamW divides a gradient by its size, so that what
// rounding leaves there would move weights by a whole step.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/recurrence.h"

namespace fw::testing {
namespace {

struct Unscored {
  int64_t tokens;  // of a sequence
  int64_t scored;  // its first; the cotangents of the others are 0
  bool initial_state;
};

class DecayGradient : public ::testing::TestWithParam<Unscored> {};

TEST_P(DecayGradient, IsExactlyZeroBehindTheLastScoredToken) {
  for (const char* rule : {"mamba2", "gated_deltanet"}) {
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(2, GetParam().tokens);
    options.H = options.HV = 2;
    options.K = 24;
    options.V = 16;
    options.initial_state = GetParam().initial_state;
    Problem problem = random_problem(parse_rule(rule), options);
    problem.d.final_state.clear();
    const auto row = static_cast<size_t>(problem.shape.HV * problem.shape.V);
    const auto unscored = [&](size_t token) {
      return static_cast<int64_t>(token) % GetParam().tokens >= GetParam().scored;
    };
    for (size_t i = 0; i < problem.d.o.size(); ++i) {
      if (unscored(i / row)) problem.d.o[i] = 0;
    }
    const ReferenceInputs expected = problem.backward();
    for (const fw_dtype dtype : {FW_F64, FW_F32}) {
      HeaderRun run;
      run.dtype = dtype;
      run.form = FW_FORM_CHUNK;
      const ReferenceInputs got = header_backward(problem, run);
      EXPECT_TRUE(close(got, expected, dtype == FW_F64 ? 1e-12 : 5e-5)) << rule;
      for (size_t i = 0; i < got.g.size(); ++i) {
        if (unscored(i / static_cast<size_t>(problem.shape.HV))) {
          EXPECT_EQ(got.g[i], 0.0) << rule << ", dg[" << i << "]";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Lengths, DecayGradient,
                         ::testing::Values(Unscored{60, 59, false}, Unscored{60, 53, true}, Unscored{65, 64, false},
                                           Unscored{130, 129, true}, Unscored{130, 50, false}, Unscored{200, 63, true}),
                         [](const auto& one) {
                           return fmt::format("{}Of{}{}", one.param.scored, one.param.tokens,
                                              one.param.initial_state ? "AfterAState" : "");
                         });

}  // namespace
}  // namespace fw::testing
