// Bit for bit on the device: run to run, whatever memory held before, alone or packed, causal, cut at a chunk's
// boundary with the state handed on.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "cuda/device_runs.h"
#include "gpu/device.h"
#include "scan/cuda/pipeline.h"

namespace fw::testing {
namespace {

// With tensors of tokens of bf16 in the chunk form (whole rows of which kernels take as they are) or of float32. K
// above 128: kernels of their own.
struct Tested {
  const char* name;
  bool bf16 = true;
  int64_t K = 64;
};
const Tested kRules[] = {{"gated_deltanet"},
                         {"gated_deltanet", false},
                         {"kda"},
                         {"kda", false},
                         {"gated_deltanet2"},
                         {"mamba2"},
                         {"mamba2", false},
                         {"qdelta"},
                         {"precond_kda"},
                         {"precond_gated_deltanet"},
                         {"gated_deltanet_neg"},
                         {"kda_neg"},
                         {"dplr"},
                         {"gated_deltanet", true, 192},
                         {"comba", true, 192},
                         {"qdelta", false, 137}};

Problem packed_problem(const Tested& rule, uint64_t seed) {
  ProblemOptions options;
  options.sequences = SeqLayout({0, 65, 65, 66, 194});
  options.H = 2;
  options.HV = 2;
  options.K = rule.K;
  options.V = 72;
  options.seed = seed;
  return of_bf16_numbers(random_problem(preset(rule.name).rule, options));
}

class Bits : public ::testing::TestWithParam<fw_form> {};

// In the emulation the token form's rules take long, and differ in the front alone.
bool left_out(fw_form form, const Tested& rule) {
  if (form == FW_FORM_CHUNK) return false;
  return !rule.bf16 || rule.K > 128 || (emulated() && std::string(rule.name) != "kda");
}

HeaderRun run_of(fw_form form, const Tested& rule) {
  HeaderRun run = device_run(form);
  if (form == FW_FORM_CHUNK && rule.bf16) run.bf16 = HeaderRun::Bf16Tensors::kAll;
  return run;
}

TEST_P(Bits, AreTheSameAgain) {
  uint64_t seed = 1;
  for (const Tested& rule : kRules) {
    if (left_out(GetParam(), rule)) continue;
    const char* const name = rule.name;
    const Problem problem = packed_problem(rule, ++seed);
    HeaderRun run = run_of(GetParam(), rule);
    const ReferenceOutputs out = header_forward(problem, run);
    const ReferenceInputs grads = header_backward(problem, run);
    for (int again = 0; again < (emulated() ? 1 : 3); ++again) {
      EXPECT_TRUE(close(header_forward(problem, run), out, 0)) << name;
      EXPECT_TRUE(close(header_backward(problem, run), grads, 0)) << name;
    }
    run.saved = false;
    run.row_padding = 8;
    run.seqlens = 32;
    EXPECT_TRUE(close(header_forward(problem, run), out, 0)) << name;
    EXPECT_TRUE(close(header_backward(problem, run), grads, 0)) << name;
  }
}

TEST_P(Bits, ASequenceAloneOrPacked) {
  uint64_t seed = 10;
  for (const Tested& rule : kRules) {
    if (left_out(GetParam(), rule)) continue;
    const char* const name = rule.name;
    const Problem problem = packed_problem(rule, ++seed);
    HeaderRun run = run_of(GetParam(), rule);
    if (GetParam() == FW_FORM_CHUNK) run.segment = seed % 2 == 0 ? 64 : -1;
    const ReferenceOutputs all = header_forward(problem, run);
    const ReferenceInputs grads = header_backward(problem, run);
    const auto v_row = static_cast<std::ptrdiff_t>(problem.shape.HV * problem.shape.V);
    const auto k_row = static_cast<std::ptrdiff_t>(problem.shape.H * problem.shape.K);
    for (int64_t n = 0; n < problem.shape.sequences.count(); ++n) {
      const Problem alone = slice_sequence(problem, n);
      const int64_t begin = problem.shape.sequences.begin(n), end = problem.shape.sequences.end(n);
      EXPECT_EQ(header_forward(alone, run).o,
                std::vector<double>(all.o.begin() + begin * v_row, all.o.begin() + end * v_row))
          << name << " sequence " << n;
      EXPECT_EQ(header_backward(alone, run).k,
                std::vector<double>(grads.k.begin() + begin * k_row, grads.k.begin() + end * k_row))
          << name << " sequence " << n;
    }
  }
}

// Alone its gradients begin alongside the reverse scan; among so many others there is no room for them (plan.h:
// overlap_grad_with_scan).
TEST(BitsBesideTheScan, ASequenceAloneOrAmongMany) {
  uint64_t seed = 60;
  for (const Tested& rule : kRules) {
    if (!rule.bf16 || rule.K > 128) continue;  // K above 128 have no gradients there
    const char* const name = rule.name;
    std::vector<int64_t> offsets{0, 260};
    for (int n = 0; n < 200; ++n) offsets.push_back(offsets.back() + 1);
    ProblemOptions options;
    options.sequences = SeqLayout(offsets);
    options.K = ++seed % 2 == 0 ? 64 : 128;
    options.V = 64;
    options.seed = seed;
    Problem problem = random_problem(preset(name).rule, options);
    if (problem.rule.gain_bound > 1) hardly_decay(problem);
    problem = of_bf16_numbers(problem);
    const Problem alone = slice_sequence(problem, 0);
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    run.segment = -1;
    const ReferenceInputs among = header_backward(problem, run), own = header_backward(alone, run);
    for (const auto& field : reference_input_fields()) {
      const std::vector<double>&x = own.*field.values, &y = among.*field.values;
      if (!of_tokens(field.name) || x.empty()) continue;
      EXPECT_EQ(x, std::vector<double>(y.begin(), y.begin() + static_cast<std::ptrdiff_t>(x.size())))
          << name << " " << field.name;
    }
  }
}

TEST_P(Bits, OutputsDoNotKnowTheFuture) {
  uint64_t seed = 20;
  for (const Tested& rule : kRules) {
    if (left_out(GetParam(), rule)) continue;
    const char* const name = rule.name;
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(1, 130);
    options.K = rule.K;
    options.V = 64;
    options.seed = ++seed;
    const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
    options.seed += 1000;
    const Problem other = of_bf16_numbers(random_problem(preset(name).rule, options));
    const HeaderRun run = run_of(GetParam(), rule);
    const ReferenceOutputs out = header_forward(problem, run);
    for (const int64_t from : {1, 17, 70, 129}) {
      Problem changed = problem;
      for (const auto& field : reference_input_fields()) {
        std::vector<double>& x = changed.in.*field.values;
        const std::vector<double>& y = other.in.*field.values;
        if (!of_tokens(field.name) || x.empty()) continue;
        const auto at = static_cast<std::ptrdiff_t>(x.size()) / 130 * from;
        std::copy(y.begin() + at, y.end(), x.begin() + at);
      }
      const ReferenceOutputs got = header_forward(changed, run);
      const auto before = static_cast<std::ptrdiff_t>(from * problem.shape.V);
      EXPECT_TRUE(std::equal(got.o.begin(), got.o.begin() + before, out.o.begin())) << name << " from token " << from;
    }
  }
}

TEST_P(Bits, CutWithTheStateHandedOn) {
  uint64_t seed = 30;
  for (const Tested& rule : kRules) {
    if (left_out(GetParam(), rule)) continue;
    const char* const name = rule.name;
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(2, 200);
    options.K = rule.K;
    options.V = 64;
    options.seed = ++seed;
    const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
    const HeaderRun run = run_of(GetParam(), rule);
    const ReferenceOutputs uncut = header_forward(problem, run);
    for (const int64_t cut : {0, 64, 128, 200}) {
      const Problem head = slice_tokens(problem, 0, cut);
      Problem tail = slice_tokens(problem, cut, 200);
      const ReferenceOutputs first = header_forward(head, run);
      tail.in.initial_state = first.final_state;
      tail.in.initial_precond = first.final_precond;
      const ReferenceOutputs second = header_forward(tail, run);
      EXPECT_EQ(second.final_state, uncut.final_state) << name << " cut " << cut;
      std::vector<double> both;
      const auto append = [&](const ReferenceOutputs& part, int64_t tokens, int64_t n) {
        const auto count = static_cast<std::ptrdiff_t>(tokens * problem.shape.HV * problem.shape.V);
        both.insert(both.end(), part.o.begin() + n * count, part.o.begin() + (n + 1) * count);
      };
      for (int64_t n = 0; n < 2; ++n) append(first, cut, n), append(second, 200 - cut, n);
      EXPECT_EQ(both, uncut.o) << name << " cut " << cut;
    }
  }
}

// What is not a number in one packed sequence is not in another one.
TEST_P(Bits, ANeighbourOfNoNumbers) {
  uint64_t seed = 80;
  for (const Tested& rule : kRules) {
    if (left_out(GetParam(), rule)) continue;
    const char* const name = rule.name;
    for (const bool whole : {true, false}) {
      const Problem problem = packed_problem(rule, ++seed);
      Problem damaged = problem;
      // between sequences of 65 and 128 tokens: none, and one
      const auto bad = [](int64_t n) { return n == 1 || n == 2; };
      // Tokens and states of these sequences (a preconditioner's center belongs to none).
      const auto fill = [&](const auto& fields, auto& values_of, double with) {
        const SeqLayout& sequences = problem.shape.sequences;
        for (const auto& field : fields) {
          std::vector<double>& x = values_of.*field.values;
          if (x.empty() || std::string(field.name) == "precond_center") continue;
          const bool tokens = of_tokens(field.name);
          const int64_t row = static_cast<int64_t>(x.size()) / (tokens ? sequences.tokens() : sequences.count());
          for (int64_t n = 0; n < sequences.count(); ++n) {
            if (bad(n))
              std::fill(x.begin() + (tokens ? sequences.begin(n) : n) * row,
                        x.begin() + (tokens ? sequences.end(n) : n + 1) * row, with);
          }
        }
      };
      const double nan = std::numeric_limits<double>::quiet_NaN();
      fill(reference_input_fields(), damaged.in, nan);
      fill(reference_output_fields(), damaged.d, nan);
      HeaderRun run = run_of(GetParam(), rule);
      if (GetParam() == FW_FORM_CHUNK) run.segment = seed % 2 == 0 ? 64 : -1;
      run.row_padding = whole ? 0 : 3;
      ReferenceOutputs expected = header_forward(problem, run), out = header_forward(damaged, run);
      ReferenceInputs grads = header_backward(problem, run), got = header_backward(damaged, run);
      // Of the damaged sequences nothing is compared.
      fill(reference_output_fields(), expected, 0), fill(reference_output_fields(), out, 0);
      fill(reference_input_fields(), grads, 0), fill(reference_input_fields(), got, 0);
      for (const auto& field : reference_output_fields())
        EXPECT_EQ(out.*field.values, expected.*field.values) << name << " " << field.name;
      for (const auto& field : reference_input_fields()) {
        if (std::string(field.name) == "precond_center") continue;
        EXPECT_EQ(got.*field.values, grads.*field.values) << name << " " << field.name;
      }
    }
  }
}

// Whether forward saves for backward or not. (The token form saves nothing.)
TEST(BitsIfForwardSaves, OutputsAreTheSame) {
  uint64_t seed = 110;
  for (const Tested& rule : kRules) {
    for (const int64_t K : {rule.K, std::max<int64_t>(rule.K, 128)}) {
      ProblemOptions options;
      options.sequences = SeqLayout({0, 130, 130, 150});
      options.H = 1;
      options.HV = ++seed % 3 == 0 && !preset(rule.name).rule.general_erase() ? 2 : 1;
      options.K = K;
      options.V = 64;
      options.seed = seed;
      const Problem problem = of_bf16_numbers(random_problem(preset(rule.name).rule, options));
      HeaderRun run = run_of(FW_FORM_CHUNK, rule);
      run.segment = seed % 2 == 0 ? 64 : -1;
      const ReferenceOutputs out = header_forward(problem, run);
      run.forward_saves = true;
      EXPECT_TRUE(close(header_forward(problem, run), out, 0)) << rule.name << " K " << K;
    }
  }
}

// Value heads that share keys, several in a block of prepare (prepare/grouped.cu) where there are enough of them,
// and the same keys given to each by itself.
TEST(BitsOfGroupedHeads, AreThoseOfRepeatedKeys) {
  uint64_t seed = 140;
  for (const auto& [name, K] : {std::pair("gated_deltanet", int64_t{128}), std::pair("deltanet", int64_t{64}),
                                std::pair("kaczmarz", int64_t{64}), std::pair("longhorn", int64_t{128})}) {
    SCOPED_TRACE(::testing::Message() << name << " K " << K);
    std::vector<int64_t> offsets = {0, 65, 65, 130, 200};
    for (int n = 0; !emulated() && n < 170; ++n) offsets.push_back(offsets.back() + 3);
    ProblemOptions options;
    options.sequences = SeqLayout(offsets);
    options.H = 2;
    options.HV = 20;
    options.K = K;
    options.V = 64;
    options.seed = ++seed;
    const Problem grouped = of_bf16_numbers(random_problem(preset(name).rule, options));
    int64_t chunks = 0;
    for (size_t n = 1; n < offsets.size(); ++n) chunks += (offsets[n] - offsets[n - 1] + 63) / 64;
    ASSERT_GT(cuda::grouped_heads(options.HV / options.H, options.HV, chunks, cuda::persistent_ctas()), 1)
        << "another shape, or that kernel is not run";
    Problem apart = grouped;
    apart.shape.H = options.HV;
    for (const auto& [from, to] : {std::pair(&grouped.in.q, &apart.in.q), std::pair(&grouped.in.k, &apart.in.k)}) {
      to->clear();
      const auto group = options.HV / options.H;
      for (auto head = from->begin(); head != from->end(); head += static_cast<std::ptrdiff_t>(K)) {
        for (int64_t i = 0; i < group; ++i) to->insert(to->end(), head, head + static_cast<std::ptrdiff_t>(K));
      }
    }
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    run.segment = -1;
    const ReferenceOutputs out = header_forward(apart, run), got = header_forward(grouped, run);
    EXPECT_EQ(got.o, out.o);
    EXPECT_EQ(got.final_state, out.final_state);
    const ReferenceInputs grads = header_backward(apart, run), of_grouped = header_backward(grouped, run);
    EXPECT_EQ(of_grouped.v, grads.v);
    EXPECT_EQ(of_grouped.beta, grads.beta);
    EXPECT_EQ(of_grouped.g, grads.g);
  }
}

// dq and dk of value heads that share keys, which the gradients' kernels add up in the order of the heads
// (sm90/gradients/common/head_sums.cuh), against the reference. The bits are the same whether the gradients begin
// alongside the reverse scan, from the last chunk on, or after it. They begin after it where the offsets are on the
// device.
TEST(BitsOfGroupedHeads, AddUpInTheirOrder) {
  struct Case {
    const char* name;
    int64_t K, H, HV;
  };
  uint64_t seed = 150;
  for (const Case& c : {Case{"gated_deltanet", 128, 2, 8}, Case{"kaczmarz", 64, 1, 16}, Case{"deltanet", 40, 2, 4},
                        Case{"gated_deltanet_neg", 64, 1, 4}, Case{"kda", 128, 1, 4}, Case{"kda", 64, 2, 4},
                        Case{"gated_deltanet2", 128, 1, 8}, Case{"gla", 64, 1, 4}, Case{"qdelta", 128, 1, 4}}) {
    SCOPED_TRACE(::testing::Message() << c.name << " K " << c.K << " heads " << c.H << " of " << c.HV);
    const Rule& rule = preset(c.name).rule;
    ProblemOptions options;
    options.sequences = ++seed % 2 == 0 ? SeqLayout({0, 3, 400}) : SeqLayout({0, 390});
    options.H = c.H, options.HV = c.HV, options.K = c.K, options.V = 64;
    options.gates_per_value_head = true;
    options.seed = seed;
    const Problem problem = of_bf16_numbers(random_problem(rule, options));
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    run.segment = -1;
    const std::string text = text_of_call(problem, 1, 390);
    const std::string_view name = c.name;
    if (on_hopper()) {
      EXPECT_EQ(text.find("adds up heads") != std::string::npos, name != "qdelta" && name != "gated_deltanet_neg")
          << text;
      EXPECT_NE(text.find("gradients: beside the reverse scan"), std::string::npos) << text;
    }
    const ReferenceInputs beside = header_backward(problem, run);
    EXPECT_TRUE(close_gradients(beside, problem.backward(), rule, false));
    run.seqlens = 32;
    run.device_seqlens = true;
    EXPECT_TRUE(close(header_backward(problem, run), beside, 0));
  }
}

INSTANTIATE_TEST_SUITE_P(Device, Bits, ::testing::Values(FW_FORM_TOKEN, FW_FORM_CHUNK),
                         [](const ::testing::TestParamInfo<fw_form>& form) {
                           return form.param == FW_FORM_TOKEN ? "token" : "chunk";
                         });

}  // namespace
}  // namespace fw::testing
