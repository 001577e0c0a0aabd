// Chunk form and token form against the reference, forward and every gradient, double and float: all presets, all
// lengths around the chunk and sub-chunk edges, all head dims. Grouped heads, initial states, packing and layouts
// rotate through the combinations so that every one of them meets every length and every dim.
#include <array>
#include <cctype>

#include "base/threads.h"
#include "support/left_out.h"
#include "support/recurrence.h"

namespace fw::testing {
namespace {

constexpr double kDoubleBound = 1e-10;
constexpr double kFloatBound = 2e-5;
// A gradient that is a vanishing part of the whole (the preconditioner's gates) is compared with this share of the norm
// of all gradients: float arithmetic on values that cancel cannot give it more digits.
constexpr double kFloatFloor = 1e-3;

constexpr std::array<int64_t, 10> kLengths = {0, 1, 2, 15, 16, 17, 63, 64, 65, 130};
constexpr std::array<int64_t, 6> kDims = {8, 16, 24, 60, 64, 128};

SeqLayout layout_of(int64_t length, int64_t kind) {
  switch (kind % 3) {
    case 0:
      return SeqLayout::uniform(1, length);
    case 1:
      return SeqLayout::uniform(2, length);
    default:
      return SeqLayout({0, length, length, length + 1, length + 1 + length / 2});
  }
}

void expect_forms(const Problem& problem, const HeaderRun& base) {
  SCOPED_TRACE(describe(problem));
  const ReferenceOutputs out = problem.forward();
  const ReferenceInputs grads = problem.backward();
  for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
    for (const fw_dtype dtype : {FW_F64, FW_F32}) {
      SCOPED_TRACE(::testing::Message() << (form == FW_FORM_CHUNK ? "chunk " : "token ") << base.chunk
                                        << (dtype == FW_F64 ? ", double" : ", float"));
      HeaderRun run = base;
      run.form = form;
      run.dtype = dtype;
      const double bound = dtype == FW_F64 ? kDoubleBound : kFloatBound;
      const double floor = dtype == FW_F64 ? 0 : kFloatFloor;
      EXPECT_TRUE(close(header_forward(problem, run), out, bound, floor));
      EXPECT_TRUE(close(header_backward(problem, run), grads, bound, floor));
    }
  }
}

class Presets : public ::testing::TestWithParam<int> {};

TEST_P(Presets, FormsMatchTheReferenceForAllLengthsAndDims) {
  const Preset& p = presets()[static_cast<size_t>(GetParam())];
  auto turn = static_cast<int64_t>(rule_seed(p.rule, 0));
  int64_t row = turn;
  for (const int64_t length : kLengths) {
    for (const int64_t K : kDims) {
      ++row;
      for (const int64_t V : kDims) {
        // Two values of V for each length and K, other ones for the next K and for a preset with another seed: together
        // they meet every pair.
        if ((++turn + row) % 3 != 0) continue;
        ProblemOptions options;
        options.sequences = layout_of(length, turn);
        options.H = 2;
        options.HV = turn / 3 % 2 == 0 ? 2 : 4;
        options.K = K;
        options.V = V;
        options.initial_state = turn / 2 % 2 == 0;
        options.gates_per_value_head = turn % 5 == 0;
        options.seed = static_cast<uint64_t>(turn) + 1;
        HeaderRun run;
        run.state_layout = turn % 4 == 0 ? FW_STATE_V_FIRST : FW_STATE_K_FIRST;
        run.seqlens = turn % 7 == 0 ? 32 : 0;
        run.row_padding = turn % 2 * 3;
        run.saved = turn % 6 != 0;
        expect_forms(random_problem(p.rule, options), run);
        if (HasFailure()) return;
      }
    }
  }
}

std::string preset_name(const ::testing::TestParamInfo<int>& info) {
  return std::string(presets()[static_cast<size_t>(info.param)].name);
}

INSTANTIATE_TEST_SUITE_P(Scan, Presets, ::testing::Range(0, static_cast<int>(presets().size())), preset_name);

ProblemOptions medium(uint64_t seed) {
  ProblemOptions options;
  options.sequences = SeqLayout({0, 70, 70, 73, 140});
  options.H = 2;
  options.HV = 4;
  options.K = 24;
  options.V = 40;
  options.seed = seed;
  return options;
}

TEST(Scan, ComposedRulesMatchTheReference) {
  int64_t turn = 0;
  for (const Rule& rule : composed_rules()) {
    if (left_out(++turn, 3)) continue;
    expect_forms(random_problem(rule, medium(rule_seed(rule, 1))), {});
  }
}

TEST(Scan, AnyChunkSizeGivesTheSame) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    const Problem problem = random_problem(rule, medium(rule_seed(rule, 100)));
    const ReferenceOutputs out = problem.forward();
    const ReferenceInputs grads = problem.backward();
    for (const int64_t chunk : {1, 2, 3, 15, 16, 17, 31, 33, 48, 64, 100, 128, 1024}) {
      if (left_out(++turn, 10)) continue;
      HeaderRun run;
      run.chunk = chunk;
      run.form = FW_FORM_CHUNK;
      EXPECT_TRUE(close(header_forward(problem, run), out, kDoubleBound)) << to_string(rule) << " chunk " << chunk;
      EXPECT_TRUE(close(header_backward(problem, run), grads, kDoubleBound)) << to_string(rule) << " chunk " << chunk;
    }
  }
}

// Decays of 0, -1e4 and -inf at random tokens: finite and right, forward and backward.
TEST(Scan, ExtremeDecays) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    if (!rule.uses_g() && !rule.uses_precond()) continue;
    for (const int64_t chunk : {0, 16, 64}) {
      if (left_out(++turn, 7)) continue;
      ProblemOptions options = medium(rule_seed(rule, 200 + static_cast<uint64_t>(chunk)));
      options.edge_decays = true;
      HeaderRun run;
      run.chunk = chunk;
      expect_forms(random_problem(rule, options), run);
    }
  }
}

// Bit-equal: other sequences in the batch, their order, the number of threads, the widths of cu_seqlens, the strides.
TEST(Scan, BitsDoNotDependOnPackingThreadsOrStrides) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    for (const fw_dtype dtype : {FW_F64, FW_F32}) {
      if (left_out(++turn, 5)) continue;
      const Problem problem = random_problem(rule, medium(rule_seed(rule, dtype == FW_F64 ? 300 : 301)));
      HeaderRun run;
      run.dtype = dtype;
      const ReferenceOutputs all = header_forward(problem, run);
      const ReferenceInputs grads = header_backward(problem, run);
      set_num_threads(1);
      const ReferenceOutputs one_thread = header_forward(problem, run);
      const ReferenceInputs one_thread_grads = header_backward(problem, run);
      set_num_threads(3);
      HeaderRun strided = run;
      strided.row_padding = 5;
      strided.seqlens = 32;
      const ReferenceOutputs three_threads = header_forward(problem, strided);
      const ReferenceInputs three_threads_grads = header_backward(problem, strided);
      set_num_threads(0);
      EXPECT_TRUE(close(one_thread, all, 0)) << to_string(rule);
      EXPECT_TRUE(close(three_threads, all, 0)) << to_string(rule);
      EXPECT_TRUE(close(one_thread_grads, grads, 0)) << to_string(rule);
      EXPECT_TRUE(close(three_threads_grads, grads, 0)) << to_string(rule);
      for (int64_t n = 0; n < problem.shape.sequences.count(); ++n) {
        const Problem alone = slice_sequence(problem, n);
        const ReferenceOutputs out = header_forward(alone, run);
        const auto row = static_cast<std::ptrdiff_t>(problem.shape.HV * problem.shape.V);
        const std::vector<double> part(all.o.begin() + problem.shape.sequences.begin(n) * row,
                                       all.o.begin() + problem.shape.sequences.end(n) * row);
        EXPECT_EQ(relative_error(out.o, part), 0) << to_string(rule) << " sequence " << n;
        const ReferenceInputs alone_grads = header_backward(alone, run);
        const auto k_row = static_cast<std::ptrdiff_t>(problem.shape.H * problem.shape.K);
        const auto key = rule.uses_k() ? &ReferenceInputs::k : &ReferenceInputs::g;
        const std::vector<double>& all_keys = grads.*key;
        const std::vector<double> dk(all_keys.begin() + problem.shape.sequences.begin(n) * k_row,
                                     all_keys.begin() + problem.shape.sequences.end(n) * k_row);
        EXPECT_EQ(relative_error(alone_grads.*key, dk), 0) << to_string(rule) << " sequence " << n;
      }
    }
  }
}

// A sequence cut anywhere, the state handed on, gives the same as uncut; token by token it gives the same bits.
TEST(Scan, SplittingWithTheStateHandedOn) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    ProblemOptions options = medium(rule_seed(rule, 400));
    options.sequences = SeqLayout::uniform(2, 90);
    const Problem problem = random_problem(rule, options);
    const ReferenceOutputs whole = problem.forward();
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      HeaderRun run;
      run.form = form;
      const ReferenceOutputs uncut = header_forward(problem, run);
      for (const int64_t cut : {0, 1, 16, 37, 64, 90}) {
        if (left_out(++turn, 5)) continue;
        const Problem head = slice_tokens(problem, 0, cut);
        Problem tail = slice_tokens(problem, cut, 90);
        const ReferenceOutputs first = header_forward(head, run);
        tail.in.initial_state = first.final_state;
        tail.in.initial_precond = first.final_precond;
        const ReferenceOutputs second = header_forward(tail, run);
        EXPECT_LE(relative_error(second.final_state, whole.final_state), kDoubleBound)
            << to_string(rule) << " cut " << cut;
        if (form == FW_FORM_TOKEN) {
          EXPECT_EQ(relative_error(second.final_state, uncut.final_state), 0) << to_string(rule) << " cut " << cut;
        }
      }
    }
  }
}

TEST(Scan, StepsInPlaceEqualTheWholeSequence) {
  int64_t turn = 0;
  for (const Rule& rule : all_rules()) {
    ProblemOptions options = medium(rule_seed(rule, 500));
    options.sequences = SeqLayout::uniform(3, 20);
    const Problem problem = random_problem(rule, options);
    const ReferenceOutputs out = problem.forward();
    for (const int64_t tokens : {1, 2, 8}) {
      for (const fw_state_layout layout : {FW_STATE_K_FIRST, FW_STATE_V_FIRST}) {
        if (left_out(++turn, 7)) continue;
        HeaderRun run;
        run.state_layout = layout;
        EXPECT_TRUE(close(header_steps(problem, run, tokens), out, kDoubleBound)) << to_string(rule);
        run.dtype = FW_F32;
        EXPECT_TRUE(close(header_steps(problem, run, tokens), out, kFloatBound)) << to_string(rule);
      }
    }
  }
}

// FW_FORM_DECODE: forward to the bits of single steps, saved for backward or not; gradients in chunks of any size.
TEST(Scan, DecodeFormHasTheBitsOfStepsAndGradientsInChunks) {
  for (const Rule& rule : all_rules()) {
    ProblemOptions options = medium(rule_seed(rule, 700));
    options.sequences = SeqLayout::uniform(2, 70);
    const Problem steps = random_problem(rule, options), packed = random_problem(rule, medium(rule_seed(rule, 701)));
    const ReferenceOutputs out = packed.forward();
    const ReferenceInputs grads = packed.backward();
    for (const fw_dtype dtype : {FW_F64, FW_F32}) {
      HeaderRun run;
      run.dtype = dtype;
      run.form = FW_FORM_DECODE;
      const double bound = dtype == FW_F64 ? kDoubleBound : kFloatBound, floor = dtype == FW_F64 ? 0 : kFloatFloor;
      const ReferenceOutputs one_by_one = header_steps(steps, run, 1);
      for (const bool saves : {false, true}) {
        run.forward_saves = saves;
        EXPECT_TRUE(close(header_forward(steps, run), one_by_one, 0)) << to_string(rule);
      }
      EXPECT_TRUE(close(header_forward(packed, run), out, bound, floor)) << to_string(rule);
      run.chunk = dtype == FW_F64 ? 17 : 0;
      const ReferenceInputs saved = header_backward(packed, run);
      EXPECT_TRUE(close(saved, grads, bound, floor)) << to_string(rule);
      run.saved = false;
      EXPECT_TRUE(close(header_backward(packed, run), saved, 0)) << to_string(rule);
    }
  }
}

TEST(Scan, DecodeFormIsInThePlan) {
  ProblemOptions options = medium(1);
  std::string text;
  HeaderRun run;
  run.form = FW_FORM_DECODE;
  run.plan_text = &text;
  header_forward(random_problem(preset("kda").rule, options), run);
  EXPECT_NE(text.find("form: decode: forward by the token form, backward in chunks"), std::string::npos) << text;
}

// More value columns than a forward task takes at once.
TEST(Scan, WideValues) {
  for (const char* name : {"gated_deltanet", "gated_deltanet2", "kaczmarz"}) {
    ProblemOptions options = medium(600);
    options.K = 20;
    options.V = 300;
    expect_forms(random_problem(preset(name).rule, options), {});
  }
}

TEST(Scan, HundredThousandSequences) {
  std::vector<int64_t> offsets = {0};
  for (int64_t n = 0; n < 100000; ++n) offsets.push_back(offsets.back() + n % 3);
  ProblemOptions options;
  options.sequences = SeqLayout(offsets);
  options.K = 4;
  options.V = 3;
  options.initial_state = false;
  expect_forms(random_problem(preset("gated_deltanet2").rule, options), {});
}

}  // namespace
}  // namespace fw::testing
