// Every preset has a function written from its paper's formula, and the general reference agrees with it.
#include "reference/paper.h"

#include <gtest/gtest.h>

#include "support/recurrence.h"

namespace fw {
namespace {

using testing::close;
using testing::describe;

class PaperFormula : public ::testing::TestWithParam<std::string> {};

TEST_P(PaperFormula, EqualsTheGeneralReference) {
  const PaperRule* paper = find_paper_rule(GetParam());
  ASSERT_NE(paper, nullptr) << "presets.def lists " << GetParam()
                            << ", but src/reference/paper.cpp has no formula for it";
  const Rule& rule = preset(GetParam()).rule;
  uint64_t seed = 10;
  for (const SeqLayout& sequences :
       {SeqLayout::uniform(1, 1), SeqLayout::uniform(2, 33), SeqLayout({0, 7, 7, 8, 30})}) {
    for (const bool initial_state : {false, true}) {
      for (const int64_t group : {1, 2}) {
        ProblemOptions o;
        o.sequences = sequences;
        o.H = 2;
        o.HV = o.H * group;
        o.K = 8;
        o.V = 5;
        o.initial_state = initial_state;
        o.gates_per_value_head = seed % 2 == 0;
        o.edge_decays = seed % 3 == 0;
        o.scale = seed % 4 == 0 ? 0.3 : 0;
        o.seed = ++seed;
        const ReferenceProblem p = random_problem(rule, o);
        SCOPED_TRACE(describe(p));
        EXPECT_TRUE(close(p.forward(), paper_forward(*paper, rule, p.shape, p.in), 1e-13));
      }
    }
  }
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& p : presets()) names.emplace_back(p.name);
  for (const Preset& p : ablations()) names.emplace_back(p.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Presets, PaperFormula, ::testing::ValuesIn(preset_names()),
                         [](const auto& param) { return param.param; });

TEST(PaperFormula, NoneIsLeftWithoutPreset) {
  for (const PaperRule& paper : paper_rules()) EXPECT_NO_THROW(preset(paper.name)) << paper.name;
  EXPECT_EQ(find_paper_rule("no_such_rule"), nullptr);
}

}  // namespace
}  // namespace fw
