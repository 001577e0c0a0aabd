// Tensors of float16 numbers (FW_F16) on the device. The token form is within float32's errors and one rounding. The
// chunk form is within the bounds of bf16 tensors of what its operands are, and of the numbers themselves a little
// more. Offsets on the device, logits, lengths around a chunk, and what is beyond the largest number.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "base/f16.h"
#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

Problem of_float16_numbers(Problem p) {
  return with_rounded_tokens(std::move(p), [](float x) {
    F16 half{};
    float value = 0;
    round_to_f16(1, &x, &half);
    widen_f16(1, &half, &value);
    return value;
  });
}

HeaderRun float16_run(fw_form form) {
  HeaderRun run = device_run(form);
  run.bf16 = HeaderRun::Bf16Tensors::kAll;
  run.float16 = true;
  return run;
}

// What the chunk form's operands are: tensors of channels as bf16 values, but for log-decays and logits.
Problem of_operands(Problem p) {
  const auto round = [](std::vector<double>& values) {
    for (double& x : values) x = static_cast<double>(as_bf16(static_cast<float>(x)));
  };
  const bool logits = any_logits(p.shape.gates);
  for (std::vector<double>* x : {&p.in.q, &p.in.k, &p.in.v, &p.in.erase_key, &p.d.o}) round(*x);
  if (!logits && p.rule.erase == Gate::kChannel) round(p.in.erase_gate);
  if (!logits && p.rule.write == Gate::kChannel) round(p.in.write_gate);
  return p;
}
// Rounding tensors to bf16 comes on top of what the bounds are for.
constexpr ChunkBounds kOfFloat16Numbers{8e-3, 1.3e-2, 1.3e-2, 2e-2};

constexpr double kOneRounding = 1e-3;  // 2^-11, of tensors whose errors are measured against their own size

TEST(DeviceFloat16, EveryRuleMatchesTheReference) {
  uint64_t seed = 3100;
  for (const Preset& named : presets()) {
    ++seed;
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      const bool general = named.rule.general_erase();
      ProblemOptions options;
      options.sequences = form == FW_FORM_TOKEN ? SeqLayout({0, 5, 5, 12})
                          : seed % 2 == 0       ? SeqLayout::uniform(2, 65)
                                                : SeqLayout({0, 63, 63, 127, 192});
      options.H = general ? 2 : 1;
      options.HV = general || seed % 2 == 0 ? 2 : 1;
      options.K = seed % 3 == 0 ? 20 : 64;
      options.V = seed % 3 == 1 ? 24 : 64;
      options.seed = seed;
      if (seed % 4 == 1 && !general) options.gates = logits_of(named.rule, GateActivation::kSoftplus);
      const Problem problem = of_float16_numbers(random_problem(named.rule, options));
      SCOPED_TRACE(fmt::format("seed {}: {} {}", seed, named.name, describe(problem)));
      HeaderRun run = float16_run(form);
      run.row_padding = seed % 4 == 2 ? 3 : 0;
      run.saved = seed % 3 != 0;
      const ReferenceOutputs expected = problem.forward();
      const ReferenceInputs gradients = problem.backward();
      const bool chunk = form == FW_FORM_CHUNK;
      const ReferenceOutputs out = header_forward(problem, run);
      EXPECT_TRUE(close(out, expected, chunk ? kOfFloat16Numbers.output : kOneRounding, kChunkFloor));
      const ReferenceInputs got = without_parameters(header_backward(problem, run)),
                            own = without_parameters(gradients);
      if (chunk) {
        EXPECT_TRUE(close_gradients(got, own, named.rule, false, kOfFloat16Numbers));
        const Problem operands = of_operands(problem);
        EXPECT_TRUE(close(out, operands.forward(), ChunkBounds{}.output, kChunkFloor));
        EXPECT_TRUE(close_gradients(got, without_parameters(operands.backward()), named.rule, false));
      } else {
        EXPECT_TRUE(close(got, own, kOneRounding, kChunkFloor));
      }
      if (!chunk && !general) {
        EXPECT_TRUE(close(header_steps(problem, run, 2), expected, kOneRounding, kChunkFloor));
      }
    }
  }
}

// As ChunkForm.EveryLength, and packed after a sequence of that length. Of so few tokens a gradient of one value a
// token is a difference of sums that nearly cancel. Of one head some draws are above any bound (2.0e-2 to 3.0e-2 in 6
// of 390 problems on an H200).
TEST(DeviceFloat16, OfEveryLength) {
  const int64_t step = emulated() ? 13 : 1;
  const char* const names[] = {"gated_deltanet", "mamba2", "gated_deltanet2"};
  for (int64_t length = 0; length <= 130; length += length >= 62 && length < 66 ? 1 : step) {
    ProblemOptions options;
    options.sequences = SeqLayout({0, length, length, length + 3});
    options.H = options.HV = emulated() ? 2 : 8;
    options.K = 64, options.V = 64;
    options.seed = static_cast<uint64_t>(length) + 1;
    const Rule rule = preset(names[length % 3]).rule;
    const Problem problem = of_float16_numbers(random_problem(rule, options)), operands = of_operands(problem);
    SCOPED_TRACE(describe(problem));
    const HeaderRun run = float16_run(FW_FORM_CHUNK);
    const ReferenceOutputs out = header_forward(problem, run);
    const ReferenceInputs gradients = header_backward(problem, run);
    EXPECT_TRUE(close(out, problem.forward(), kOfFloat16Numbers.output, kChunkFloor));
    EXPECT_TRUE(close(out, operands.forward(), ChunkBounds{}.output, kChunkFloor));
    EXPECT_TRUE(close_gradients(gradients, problem.backward(), rule, false, kOfFloat16Numbers));
    EXPECT_TRUE(close_gradients(gradients, operands.backward(), rule, false));
  }
}

// Rows after the last sequence are neither read nor written.
TEST(DeviceFloat16, OffsetsOnTheDevice) {
  for (const char* name : {"gated_deltanet", "hgrn2", "precond_kda"}) {
    ProblemOptions options;
    options.sequences = SeqLayout({0, 65, 65, 66, 140});
    options.K = 64, options.V = 32;
    options.seed = 12;
    const Problem problem = of_float16_numbers(random_problem(preset(name).rule, options));
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      HeaderRun run = float16_run(form);
      run.segment = form == FW_FORM_CHUNK ? -1 : 0;
      const ReferenceOutputs out = header_forward(problem, run);
      const ReferenceInputs grads = header_backward(problem, run);
      run.device_seqlens = true;
      run.spare_tokens = 150;
      EXPECT_TRUE(close(header_forward(problem, run), out, 0)) << name;
      EXPECT_TRUE(close(header_backward(problem, run), grads, 0)) << name;
    }
  }
}

TEST(DeviceFloat16, OverflowIsInfinite) {
  for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(1, 3);
    options.K = options.V = 8;
    options.initial_state = false;
    Problem p = random_problem(preset("linear_attention").rule, options);
    p.shape.scale = 1;
    for (std::vector<double>* x : {&p.in.q, &p.in.k, &p.in.v}) std::fill(x->begin(), x->end(), 0.0);
    p.in.q[0] = p.in.q[8] = p.in.k[0] = p.in.v[0] = 1;
    p.in.v[1] = -1;
    p.in.k[8] = p.in.v[8] = 256;
    p.in.v[9] = -512;
    const double infinity = std::numeric_limits<double>::infinity();
    const std::vector<double> o = header_forward(p, float16_run(form)).o;
    EXPECT_EQ(o[0], 1);
    EXPECT_EQ(o[1], -1);
    EXPECT_EQ(o[8], infinity);
    EXPECT_EQ(o[9], -infinity);
    EXPECT_EQ(o[10], 0);
  }
}

}  // namespace
}  // namespace fw::testing
