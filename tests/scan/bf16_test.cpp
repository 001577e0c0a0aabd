// Tensors of bf16 numbers (io_dtype): the arithmetic is float32 on the widened numbers, and what comes out is rounded once,
// so a bf16 call gives the bits of a float32 call on the same numbers, rounded.
#include "base/bf16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "reference/fields.h"
#include "support/recurrence.h"

namespace fw {
namespace {

using Bf16Tensors = HeaderRun::Bf16Tensors;

double rounded(double x) {
  const float wide = static_cast<float>(x);
  float value = 0;
  round_to_bf16_values(1, &wide, &value);
  return static_cast<double>(value);
}

ReferenceProblem bf16_problem(const Rule& rule, uint64_t seed, int64_t K, int64_t V) {
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
    for (double& x : p.in.*field.values) x = rounded(x);
  }
  for (const auto& field : reference_output_fields()) {
    if (!of_tokens(field.name)) continue;
    for (double& x : p.d.*field.values) x = rounded(x);
  }
  return p;
}

bool is_stream(const std::string& name) { return name == "q" || name == "k" || name == "erase_key" || name == "erase_write" || name == "v" || name == "o"; }

// What a float32 call gives, rounded where the bf16 call's tensor is bf16. The preconditioner adds to the gradient of k after
// the heads have written theirs: there the sum is of a rounded number, one more rounding (2^-8 of the parts).
template <class Struct>
void expect_rounded(std::span<const ReferenceField<Struct>> fields, const Struct& bf16, const Struct& f32, Bf16Tensors kind, bool precond,
                    const std::string& what) {
  for (const auto& field : fields) {
    const std::string name = field.name;
    const std::vector<double>&got = bf16.*field.values, &wide = f32.*field.values;
    ASSERT_EQ(got.size(), wide.size()) << what << " " << name;
    const bool narrow = of_tokens(name) && (kind == Bf16Tensors::kAll || is_stream(name));
    double largest = 0;
    for (double x : wide) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < got.size(); ++i) {
      const double expected = narrow ? rounded(wide[i]) : wide[i];
      if (precond && narrow && name == "k") {
        ASSERT_NEAR(got[i], expected, 0x1p-7 * largest) << what << " " << name << " " << i;
      } else {
        ASSERT_EQ(got[i], expected) << what << " " << name << " " << i;
      }
    }
  }
}

TEST(Bf16, IsTheFloatCallRounded) {
  for (const Rule& rule : testing::all_rules()) {
    const uint64_t seed = testing::rule_seed(rule, 1);
    const ReferenceProblem p = bf16_problem(rule, seed, seed % 3 == 0 ? 16 : 24, seed % 4 == 0 ? 140 : 20);
    HeaderRun run;
    run.dtype = FW_F32;
    run.row_padding = seed % 2 == 0 ? 5 : 0;
    run.form = seed % 5 == 0 ? FW_FORM_TOKEN : FW_FORM_AUTO;
    const ReferenceOutputs forward = header_forward(p, run);
    const ReferenceInputs backward = header_backward(p, run);
    for (const Bf16Tensors kind : {Bf16Tensors::kStreams, Bf16Tensors::kAll}) {
      run.bf16 = kind;
      const std::string what = testing::describe(p);
      expect_rounded(reference_output_fields(), header_forward(p, run), forward, kind, rule.uses_precond(), what);
      expect_rounded(reference_input_fields(), header_backward(p, run), backward, kind, rule.uses_precond(), what);
      run.saved = !run.saved;
    }
  }
}

TEST(Bf16, DecodeStepsGiveTheFloatStateAndRoundedOutputs) {
  for (const char* name : {"gated_deltanet2", "precond_gated_deltanet", "comba"}) {
    const ReferenceProblem p = bf16_problem(preset(name).rule, 7, 24, 20);
    HeaderRun run;
    run.dtype = FW_F32;
    const ReferenceOutputs f32 = header_steps(p, run);
    run.bf16 = Bf16Tensors::kAll;
    expect_rounded(reference_output_fields(), header_steps(p, run), f32, Bf16Tensors::kAll, false, name);
  }
}

// Products of bf16 operands: rounding of 2^-9 a factor, sums and everything else float32. Gradients of the decay are
// differences, and lose a little more.
TEST(Bf16, ProductsOfRoundedOperandsAreNearTheReference) {
  for (const Rule& rule : testing::all_rules()) {
    const uint64_t seed = testing::rule_seed(rule, 40);
    const ReferenceProblem p = bf16_problem(rule, seed, seed % 3 == 0 ? 64 : 24, seed % 4 == 0 ? 140 : 20);
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
  FW_INIT(&desc);
  desc.B = desc.T = desc.H = desc.HV = 1;
  desc.K = desc.V = 2;
  fw_sizes sizes;
  FW_INIT(&sizes);
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
  float rest[4] = {};
  const int64_t shape[4] = {1, 1, 1, 2};
  fw_inputs in;
  fw_outputs out;
  FW_INIT(&in);
  FW_INIT(&out);
  in.q = fw_tensor_of(q, FW_BF16, 4, shape);
  in.k = in.v = fw_tensor_of(rest, FW_F32, 4, shape);
  out.o = fw_tensor_of(rest + 2, FW_F32, 4, shape);
  std::vector<float> memory(sizes.forward / sizeof(float) + 32);
  void* space = memory.data();
  size_t room = memory.size() * sizeof(float);
  ASSERT_NE(std::align(64, sizes.forward, space, room), nullptr);
  EXPECT_EQ(fw_forward(&desc, &in, &out, nullptr, 0, space, room), FW_ERROR_ARGUMENT);
  EXPECT_NE(std::strstr(fw_last_error(), "q: dtype"), nullptr) << fw_last_error();
}

}  // namespace
}  // namespace fw
