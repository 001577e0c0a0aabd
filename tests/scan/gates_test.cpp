// Gates given as logits (recurrence.md 2.1) through the C header: every rule, form and type against the reference, the
// numbers of values given as they are, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "base/threads.h"
#include "reference/fields.h"
#include "support/left_out.h"
#include "support/recurrence.h"

namespace fw::testing {
namespace {

using ::testing::HasSubstr;

ProblemOptions with_logits(const Rule& rule, uint64_t seed) {
  ProblemOptions options;
  options.sequences = SeqLayout({0, 70, 70, 73, 140});
  options.H = 2;
  options.HV = 4;
  options.K = 24;
  options.V = 40;
  options.gates_per_value_head = seed % 2 == 0;
  options.gates = logits_of(rule, kDecayActivations[seed % 3]);
  options.gates.lower_bound = seed % 4 == 0 ? -3 : -5;
  options.gates.divisor = seed % 4 == 0 ? 4 : 16;
  options.rate_per_channel = seed % 5 < 2;
  options.seed = seed;
  return options;
}

TEST(Gates, LogitsMatchTheReferenceInEveryForm) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    for (const bool edges : {false, true}) {
      const uint64_t seed = rule_seed(rule, edges ? 2 : 1);
      ProblemOptions options = with_logits(rule, seed);
      options.edge_decays = edges;
      if (!any_logits(options.gates)) continue;
      const Problem problem = random_problem(rule, options);
      SCOPED_TRACE(describe(problem));
      const ReferenceOutputs out = problem.forward();
      const ReferenceInputs grads = problem.backward();
      for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
        for (const fw_dtype dtype : {FW_F64, FW_F32}) {
          if (left_out(++turn, 5)) continue;
          HeaderRun run;
          run.form = form;
          run.dtype = dtype;
          run.saved = seed % 6 != 0;
          run.row_padding = seed % 3;
          const double bound = dtype == FW_F64 ? 1e-10 : 2e-5, floor = dtype == FW_F64 ? 0 : 1e-3;
          EXPECT_TRUE(close(header_forward(problem, run), out, bound, floor));
          const ReferenceInputs got = header_backward(problem, run);
          if (dtype == FW_F64) {
            EXPECT_TRUE(close(got, grads, bound, floor));
          }
          EXPECT_TRUE(close(without_parameters(got), without_parameters(grads), bound, floor));
          EXPECT_TRUE(close_parameters(got, grads, bound));
        }
      }
      if (HasFailure()) return;
    }
  }
}

TEST(Gates, StepsOfLogitsEqualTheWholeSequence) {
  for (const Preset& named : presets()) {
    ProblemOptions options = with_logits(named.rule, rule_seed(named.rule, 300));
    options.sequences = SeqLayout::uniform(3, 9);
    const Problem problem = random_problem(named.rule, options);
    for (const int64_t tokens : {1, 4})
      EXPECT_TRUE(close(header_steps(problem, {}, tokens), problem.forward(), 1e-10)) << named.name;
  }
}

// A logit's parameters may be absent, which is zero; a gradient may be asked for alone.
TEST(Gates, AbsentParametersAreZero) {
  for (const char* name : {"gated_deltanet", "kda", "precond_gated_deltanet"}) {
    ProblemOptions options = with_logits(preset(name).rule, 7);
    options.gates = logits_of(preset(name).rule, GateActivation::kSoftplus);
    Problem problem = random_problem(preset(name).rule, options);
    problem.in.a_log.clear();
    problem.in.precond_dt_bias.clear();
    EXPECT_TRUE(close(header_forward(problem, {}), problem.forward(), 1e-10)) << name;
    EXPECT_TRUE(close(header_backward(problem, {}), problem.backward(), 1e-10)) << name;
    problem.in.dt_bias.clear();
    EXPECT_TRUE(close(header_backward(problem, {}), problem.backward(), 1e-10)) << name;
  }
}

// bf16 logits are widened and everything after them is float32: the bits of a float32 call on the same numbers,
// gradients rounded once.
TEST(Gates, Bf16LogitsAreTheFloatCallRounded) {
  const auto rounded = [](double x) {
    const float wide = static_cast<float>(x);
    float value = 0;
    round_to_bf16_values(1, &wide, &value);
    return static_cast<double>(value);
  };
  uint64_t seed = 400;
  for (const char* name : {"gated_deltanet", "kda", "gated_deltanet2", "qdelta", "mamba2"}) {
    Problem problem = random_problem(preset(name).rule, with_logits(preset(name).rule, ++seed));
    for (const auto& field : reference_input_fields()) {
      for (double& x : problem.in.*field.values) x = of_tokens(field.name) ? rounded(x) : x;
    }
    for (const auto& field : reference_output_fields()) {
      for (double& x : problem.d.*field.values) x = of_tokens(field.name) ? rounded(x) : x;
    }
    HeaderRun run;
    run.dtype = FW_F32;
    const ReferenceOutputs out = header_forward(problem, run);
    const ReferenceInputs grads = header_backward(problem, run);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    const ReferenceOutputs narrow = header_forward(problem, run);
    const ReferenceInputs narrow_grads = header_backward(problem, run);
    for (size_t i = 0; i < out.o.size(); ++i) ASSERT_EQ(narrow.o[i], rounded(out.o[i])) << name;
    EXPECT_EQ(narrow.final_state, out.final_state) << name;
    for (const auto& field : reference_input_fields()) {
      const std::vector<double>&got = narrow_grads.*field.values, &wide = grads.*field.values;
      ASSERT_EQ(got.size(), wide.size());
      for (size_t i = 0; i < got.size(); ++i)
        ASSERT_EQ(got[i], of_tokens(field.name) ? rounded(wide[i]) : wide[i]) << name << " " << field.name;
    }
  }
}

// Sums over tokens and sequences too.
TEST(Gates, BitsDoNotDependOnTheNumberOfThreads) {
  for (const char* name : {"gated_deltanet", "kda"}) {
    ProblemOptions options = with_logits(preset(name).rule, 12);
    options.sequences = SeqLayout({0, 300, 301, 900});
    options.gates = logits_of(preset(name).rule, GateActivation::kSoftplus);
    const Problem problem = random_problem(preset(name).rule, options);
    HeaderRun run;
    run.dtype = FW_F32;
    set_num_threads(1);
    const ReferenceInputs one = header_backward(problem, run);
    set_num_threads(3);
    const ReferenceInputs three = header_backward(problem, run);
    set_num_threads(0);
    EXPECT_TRUE(close(three, one, 0)) << name;
  }
}

struct SmallCall {
  explicit SmallCall(const char* rule) {
    fw_desc_init(&desc);
    EXPECT_EQ(fw_rule_preset(rule, &desc.rule), FW_OK);
    desc.B = desc.T = desc.H = desc.HV = 1;
    desc.K = desc.V = 2;
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    const int64_t four[4] = {1, 1, 1, 2}, three[3] = {1, 1, 1};
    in.q = in.k = in.v = fw_tensor_of(numbers, FW_F32, 4, four);
    in.g = in.beta = fw_tensor_of(numbers, FW_F32, 3, three);
    out.o = fw_tensor_of(result, FW_F32, 4, four);
  }
  std::string forward() {
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    if (fw_workspace_query(&desc, &sizes) != FW_OK) return fw_last_error();
    std::vector<float> memory(sizes.forward / sizeof(float) + 32);
    void* space = memory.data();
    size_t room = memory.size() * sizeof(float);
    if (std::align(64, sizes.forward, space, room) == nullptr) return "no room";
    return fw_forward(&desc, &in, &out, nullptr, 0, space, room) == FW_OK ? "" : fw_last_error();
  }
  float numbers[2] = {-0.5f, 0.25f}, result[2] = {};
  fw_desc desc;
  fw_inputs in;
  fw_outputs out;
};

TEST(Gates, WhatTheyCannotBeIsRefused) {
  const int64_t one[1] = {1}, two[1] = {2};
  const auto message = [](auto&& change) {
    SmallCall call("gated_deltanet");
    change(call);
    return call.forward();
  };
  EXPECT_EQ(message([](SmallCall&) {}), "");
  EXPECT_THAT(message([](SmallCall& c) { c.desc.gates.g = FW_GIVEN_SIGMOID; }),
              HasSubstr("gates: g: expected FW_GIVEN_VALUE, FW_GIVEN_SOFTPLUS"));
  EXPECT_THAT(message([](SmallCall& c) { c.desc.gates.beta = FW_GIVEN_SOFTPLUS; }),
              HasSubstr("gates: beta: expected FW_GIVEN_VALUE or FW_GIVEN_SIGMOID"));
  EXPECT_THAT(message([](SmallCall& c) { c.desc.gates.beta = 17; }), HasSubstr("got 17"));
  EXPECT_THAT(message([](SmallCall& c) { c.desc.gates.lambda = FW_GIVEN_SIGMOID; }),
              HasSubstr("gates: lambda: expected FW_GIVEN_VALUE, since the rule"));
  EXPECT_THAT(message([](SmallCall& c) { c.desc.gates.g = FW_GIVEN_LOWER_BOUND, c.desc.gates.lower_bound = 1; }),
              HasSubstr("gates: lower_bound"));
  EXPECT_THAT(message([](SmallCall& c) { c.desc.gates.g = FW_GIVEN_LOGSIGMOID, c.desc.gates.divisor = 0; }),
              HasSubstr("gates: divisor"));
  EXPECT_THAT(message([&](SmallCall& c) { c.in.a_log = fw_tensor_of(c.numbers, FW_F32, 1, one); }),
              HasSubstr("a_log: expected none"));
  EXPECT_THAT(message([&](SmallCall& c) {
                c.desc.gates.g = FW_GIVEN_LOGSIGMOID;
                c.in.a_log = fw_tensor_of(c.numbers, FW_F32, 1, one);
              }),
              HasSubstr("a_log: expected none"));
  EXPECT_THAT(message([&](SmallCall& c) {
                c.desc.gates.g = FW_GIVEN_SOFTPLUS;
                c.in.dt_bias = fw_tensor_of(c.numbers, FW_F32, 1, two);
              }),
              HasSubstr("dt_bias: shape: expected [1], got [2]"));
}

// On CUDA values lie in the workspace: plan and sizes say so, where there is no device too.
TEST(Gates, AreInThePlanOfCuda) {
  SmallCall call("gated_deltanet");
  call.desc.device = FW_DEVICE_CUDA;
  call.desc.T = 100;
  fw_sizes values, logits;
  fw_sizes_init(&values);
  fw_sizes_init(&logits);
  ASSERT_EQ(fw_workspace_query(&call.desc, &values), FW_OK) << fw_last_error();
  call.desc.gates.beta = FW_GIVEN_SIGMOID;
  ASSERT_EQ(fw_workspace_query(&call.desc, &logits), FW_OK) << fw_last_error();
  EXPECT_GE(logits.forward, values.forward + 100 * sizeof(float));
  EXPECT_GE(logits.backward, values.backward + 200 * sizeof(float));
  EXPECT_EQ(logits.saved, values.saved);
  std::vector<char> text(10000);
  ASSERT_GT(fw_plan_text(&call.desc, text.data(), text.size()), 0u) << fw_last_error();
  EXPECT_THAT(text.data(), HasSubstr("kernels forward: gates -> "));
}

// Two rows a token (scan/cuda/rewrites/dplr_as_two_tokens.h) cannot say what a norm of the key makes of a key over its
// decay.
TEST(GeneralErase, OfNormalisedKeysIsRefusedOnCuda) {
  SmallCall call("kda");
  call.desc.device = FW_DEVICE_CUDA;
  call.desc.rule.erase_state = FW_ERASE_STATE_PREVIOUS;
  EXPECT_THAT(call.forward(),
              HasSubstr("rule: expected k_norm=raw with erase_state=previous or erase_write=own on CUDA"));
  call.desc.rule.erase_state = FW_ERASE_STATE_DECAYED;
  call.desc.rule.erase_write = FW_ERASE_WRITE_OWN;
  EXPECT_THAT(call.forward(), HasSubstr("run it on the CPU"));
}

TEST(PrecondForm, TanhIsRefusedOnCuda) {
  SmallCall call("precond_gated_deltanet");
  call.desc.rule.precond_form = FW_PRECOND_FORM_TANH;
  call.desc.device = FW_DEVICE_CUDA;
  EXPECT_THAT(call.forward(), HasSubstr("rule: expected precond_form=squash on CUDA, got 'decay=scalar"));
}

// Rows are 32-bit numbers, and a token is two of them.
TEST(GeneralErase, OfMoreTokensThanHalfTheRowsIsRefusedOnCuda) {
  const auto refusal = [](int64_t tokens) {
    SmallCall call("dplr");
    call.desc.device = FW_DEVICE_CUDA;
    call.desc.T = tokens;
    fw_sizes sizes;
    fw_sizes_init(&sizes);
    return std::string(fw_workspace_query(&call.desc, &sizes) == FW_OK ? "" : fw_last_error());
  };
  constexpr int64_t kMost = (int64_t{1} << 30) - 32;
  EXPECT_EQ(refusal(kMost), "");
  EXPECT_THAT(refusal(kMost + 1), HasSubstr("descriptor: T: expected at most 1073741792 tokens in all on CUDA with "
                                            "erase_state=previous or erase_write=own, "
                                            "got 1073741793"));
}

}  // namespace
}  // namespace fw::testing
