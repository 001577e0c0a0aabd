// Tensors of bf16 or float16 numbers (io_dtype). The arithmetic is float32 on the widened numbers, and what comes out
// is rounded once. So such a call gives the bits of a float32 call on the same numbers, rounded.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/bf16.h"
#include "base/f16.h"
#include "reference/fields.h"
#include "support/left_out.h"
#include "support/recurrence.h"

namespace fw {
namespace {

using Bf16Tensors = HeaderRun::Bf16Tensors;

enum class Type { kBf16, kFloat16 };

double rounded(Type type, double x) {
  const float wide = static_cast<float>(x);
  float value = 0;
  if (type == Type::kBf16) {
    round_to_bf16_values(1, &wide, &value);
  } else {
    F16 half{};
    round_to_f16(1, &wide, &half);
    widen_f16(1, &half, &value);
  }
  return static_cast<double>(value);
}

ReferenceProblem problem_of(Type type, const Rule& rule, uint64_t seed, int64_t K, int64_t V) {
  ProblemOptions options;
  options.sequences = SeqLayout({0, 33, 33, 34, 100});
  options.H = 2;
  options.HV = 4;
  options.K = K;
  options.V = V;
  options.gates_per_value_head = seed % 2 == 0;
  options.seed = seed;
  ReferenceProblem p = random_problem(rule, options);
  for (const auto& field : reference_input_fields()) {
    if (!of_tokens(field.name)) continue;
    for (double& x : p.in.*field.values) x = rounded(type, x);
  }
  for (const auto& field : reference_output_fields()) {
    if (!of_tokens(field.name)) continue;
    for (double& x : p.d.*field.values) x = rounded(type, x);
  }
  return p;
}

bool is_stream(const std::string& name) {
  return name == "q" || name == "k" || name == "erase_key" || name == "erase_write" || name == "v" || name == "o";
}

// What a float32 call gives, rounded where the call's tensor is narrow. The preconditioner adds to the gradient of k
// after the heads have written theirs: there the sum is of a rounded number, one more rounding (2^-8 of the parts).
template <class Struct>
void expect_rounded(Type type, std::span<const ReferenceField<Struct>> fields, const Struct& f16, const Struct& f32,
                    Bf16Tensors kind, bool precond, const std::string& what) {
  for (const auto& field : fields) {
    const std::string name = field.name;
    const std::vector<double>&got = f16.*field.values, &wide = f32.*field.values;
    ASSERT_EQ(got.size(), wide.size()) << what << " " << name;
    const bool narrow = of_tokens(name) && (kind == Bf16Tensors::kAll || is_stream(name));
    double largest = 0;
    for (double x : wide) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < got.size(); ++i) {
      const double expected = narrow ? rounded(type, wide[i]) : wide[i];
      if (precond && narrow && name == "k") {
        ASSERT_NEAR(got[i], expected, 0x1p-7 * largest) << what << " " << name << " " << i;
      } else {
        ASSERT_EQ(got[i], expected) << what << " " << name << " " << i;
      }
    }
  }
}

class Narrow : public ::testing::TestWithParam<Type> {};

TEST_P(Narrow, IsTheFloatCallRounded) {
  int64_t turn = 0;
  for (const Rule& rule : testing::all_rules()) {
    if (testing::left_out(++turn, 3)) continue;
    const uint64_t seed = testing::rule_seed(rule, 1);
    const ReferenceProblem p = problem_of(GetParam(), rule, seed, seed % 3 == 0 ? 16 : 24, seed % 4 == 0 ? 140 : 20);
    HeaderRun run;
    run.dtype = FW_F32;
    run.float16 = GetParam() == Type::kFloat16;
    run.row_padding = seed % 2 == 0 ? 5 : 0;
    run.form = seed % 5 == 0 ? FW_FORM_TOKEN : FW_FORM_AUTO;
    const ReferenceOutputs forward = header_forward(p, run);
    const ReferenceInputs backward = header_backward(p, run);
    for (const Bf16Tensors kind : {Bf16Tensors::kStreams, Bf16Tensors::kAll}) {
      run.bf16 = kind;
      const std::string what = testing::describe(p);
      expect_rounded(GetParam(), reference_output_fields(), header_forward(p, run), forward, kind, rule.uses_precond(),
                     what);
      expect_rounded(GetParam(), reference_input_fields(), header_backward(p, run), backward, kind, rule.uses_precond(),
                     what);
      run.saved = !run.saved;
    }
  }
}

TEST_P(Narrow, DecodeStepsGiveTheFloatStateAndRoundedOutputs) {
  for (const char* name : {"gated_deltanet2", "precond_gated_deltanet", "comba"}) {
    const ReferenceProblem p = problem_of(GetParam(), preset(name).rule, 7, 24, 20);
    HeaderRun run;
    run.dtype = FW_F32;
    run.float16 = GetParam() == Type::kFloat16;
    const ReferenceOutputs f32 = header_steps(p, run);
    run.bf16 = Bf16Tensors::kAll;
    expect_rounded(GetParam(), reference_output_fields(), header_steps(p, run), f32, Bf16Tensors::kAll, false, name);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Narrow, ::testing::Values(Type::kBf16, Type::kFloat16),
                         [](const auto& type) { return type.param == Type::kBf16 ? "bf16" : "float16"; });

// Gates as logits, whose gradients are rounded after the gates.
TEST(Float16, GatesAsLogits) {
  for (const char* name : {"gated_deltanet2", "precond_gated_deltanet"}) {
    ProblemOptions options;
    options.sequences = SeqLayout({0, 33, 33, 70});
    options.K = 12, options.V = 10;
    options.gates = logits_of(preset(name).rule, GateActivation::kSoftplus);
    options.seed = 5;
    const ReferenceProblem p = random_problem(preset(name).rule, options);
    HeaderRun run;
    run.dtype = FW_F32;
    run.bf16 = Bf16Tensors::kAll;
    run.float16 = true;
    EXPECT_TRUE(testing::close(header_forward(p, run), p.forward(), 2e-3)) << name;
    EXPECT_TRUE(
        testing::close(without_parameters(header_backward(p, run)), without_parameters(p.backward()), 3e-3, 1e-2))
        << name;
  }
}

// What a call writes beyond the largest number is infinite, with its sign, and what is next to it is not touched.
TEST(Float16, OverflowIsInfinite) {
  ProblemOptions options;
  options.sequences = SeqLayout::uniform(1, 3);
  options.K = options.V = 2;
  options.initial_state = false;
  ReferenceProblem p = random_problem(preset("linear_attention").rule, options);
  p.shape.scale = 1;
  p.in.q = {1, 0, 1, 0, 0, 1};
  p.in.k = {1, 0, 256, 0, 0, 1};
  p.in.v = {1, -1, 256, -512, 1, 2};
  HeaderRun run;
  run.dtype = FW_F32;
  run.bf16 = Bf16Tensors::kAll;
  run.float16 = true;
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(header_forward(p, run).o, (std::vector<double>{1, -1, infinity, -infinity, 1, 2}));
}

// Products of bf16 operands: rounding of 2^-9 a factor, sums and everything else float32. Gradients of the decay are
// differences, and lose a little more.
TEST(Bf16, ProductsOfRoundedOperandsAreNearTheReference) {
  int64_t turn = 0;
  for (const Rule& rule : testing::all_rules()) {
    if (testing::left_out(++turn, 3)) continue;
    const uint64_t seed = testing::rule_seed(rule, 40);
    const ReferenceProblem p = problem_of(Type::kBf16, rule, seed, seed % 3 == 0 ? 64 : 24, seed % 4 == 0 ? 140 : 20);
    HeaderRun run;
    run.dtype = FW_F32;
    run.form = FW_FORM_CHUNK;
    run.bf16_operands = true;
    EXPECT_TRUE(testing::close(header_forward(p, run), p.forward(), 6e-3)) << testing::describe(p);
    EXPECT_TRUE(testing::close(header_backward(p, run), p.backward(), 2e-2, 1e-2)) << testing::describe(p);
    // The same bits with one thread.
    const ReferenceOutputs two = header_forward(p, run);
    const int threads = fw_get_threads();
    fw_set_threads(1);
    EXPECT_EQ(header_forward(p, run).o, two.o);
    fw_set_threads(threads);
  }
}

TEST(Bf16, IsRefusedWhereItIsNotAskedFor) {
  fw_desc desc;
  fw_desc_init(&desc);
  desc.B = desc.T = desc.H = desc.HV = 1;
  desc.K = desc.V = 2;
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  desc.dtype = FW_F64;
  desc.io_dtype = FW_BF16;
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_ERROR_ARGUMENT);
  EXPECT_NE(std::strstr(fw_last_error(), "io_dtype"), nullptr) << fw_last_error();
  desc.dtype = FW_BF16;
  desc.io_dtype = 0;
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_ERROR_ARGUMENT);

  desc.dtype = FW_F64;
  desc.operands = FW_BF16;
  EXPECT_EQ(fw_workspace_query(&desc, &sizes), FW_ERROR_ARGUMENT);
  EXPECT_NE(std::strstr(fw_last_error(), "operands"), nullptr) << fw_last_error();
  desc.operands = 0;

  desc.dtype = FW_F32;
  ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK);
  Bf16 q[2] = {};
  float others[4] = {};
  const int64_t shape[4] = {1, 1, 1, 2};
  fw_inputs in;
  fw_outputs out;
  fw_inputs_init(&in);
  fw_outputs_init(&out);
  in.q = fw_tensor_of(q, FW_BF16, 4, shape);
  in.k = in.v = fw_tensor_of(others, FW_F32, 4, shape);
  out.o = fw_tensor_of(others + 2, FW_F32, 4, shape);
  std::vector<float> memory(sizes.forward / sizeof(float) + 32);
  void* space = memory.data();
  size_t room = memory.size() * sizeof(float);
  ASSERT_NE(std::align(64, sizes.forward, space, room), nullptr);
  EXPECT_EQ(fw_forward(&desc, &in, &out, nullptr, 0, space, room), FW_ERROR_ARGUMENT);
  EXPECT_NE(std::strstr(fw_last_error(), "q: dtype"), nullptr) << fw_last_error();
}

}  // namespace
}  // namespace fw
