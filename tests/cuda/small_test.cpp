// Every kernel once or twice at shapes small enough for compute-sanitizer (tools/gpu_test.sh): tails, packed and empty
// sequences, grouped heads, each decay kind, delta and additive, all key sizes, channel gates, the preconditioner.
#include <gtest/gtest.h>

#include <string>

#include "cuda/device_runs.h"
#ifdef FW_CUDA_EMULATION
#include "emulation/gpu.h"
#endif
#include "gpu/device.h"
#include "ops/mesa_problem.h"
#include "scan/cuda/pipeline.h"

namespace fw::testing {
namespace {

TEST(Small, EveryKernel) {
  uint64_t seed = 900;
  // The chunk form with whole bf16 rows (which kernels fetch ahead), and with any rows.
  struct Form {
    fw_form form;
    bool bf16;
  };
  int number = -1;
  for (const char* name :
       {"gated_deltanet", "kda", "gated_deltanet2", "mamba2", "gla", "deltanet", "precond_gated_deltanet",
        "precond_kda", "precond_mamba2", "comba", "qdelta", "deltanet_neg", "kda_neg", "precond_deltanet"}) {
    ++number;
    for (const auto& [form, bf16] :
         {Form{FW_FORM_CHUNK, true}, Form{FW_FORM_CHUNK, false}, Form{FW_FORM_TOKEN, seed % 2 == 0}}) {
      ++seed;
      ProblemOptions options;
      options.sequences = SeqLayout({0, 70, 70, 75});
      options.H = 1;
      const bool whole = form == FW_FORM_CHUNK && bf16;
      options.HV = (whole ? number : static_cast<int>(seed)) % 3 == 0 ? 2 : 1;
      options.K = whole ? (number % 2 == 0 ? 64 : 128) : bf16 || seed % 2 == 0 ? 64 : 96;
      options.V = seed % 5 == 0 ? 40 : 64;
      options.seed = seed;
      const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
      HeaderRun run = device_run(form);
      if (whole && number % 4 == 1) run.segment = 64;
      run.bf16 = bf16 ? HeaderRun::Bf16Tensors::kAll : HeaderRun::Bf16Tensors::kNone;
      SCOPED_TRACE(describe(problem));
      const double bound =
          run.bf16 == HeaderRun::Bf16Tensors::kNone && form == FW_FORM_TOKEN ? kTokenBound : ChunkBounds{}.output;
      EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), bound, kChunkFloor));
      EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
    }
  }
}

// Few steps suffice where lambda is large.
TEST(Small, MesaInChunks) {
  for (const int64_t K : {64, 128}) {
    MesaProblem p = mesa_problem(K == 64 ? SeqLayout({0, 20, 20, 90}) : SeqLayout({0, 70}), 1, K, 980);
    if (K == 64) add_mesa_state(p, 2, 981);
    p.shape.least = 4, p.shape.cg_steps = 6;
    EXPECT_LE(mesa_error<Bf16>(p, solve<Bf16>(cuda_device(), p), solve<double>(host_device(), p)), kMesaBound) << K;
  }
}

// Gates as logits, one scalar per head and channels, in wide loads and single ones: values before kernels that may
// begin before these are made.
TEST(Small, Rings) {
  uint64_t seed = 940;
  for (const char* name : {"kda", "gated_deltanet", "precond_gated_deltanet", "gla"}) {
    for (const bool packed : {false, true}) {
      ++seed;
      ProblemOptions options;
      options.sequences = packed ? SeqLayout({0, 7, 7, 11}) : SeqLayout::uniform(2, 5);
      options.K = seed % 3 == 0 ? 64 : 40;
      options.V = 16;
      options.seed = seed;
      const Problem problem = random_problem(preset(name).rule, options);
      HeaderRun run = device_run(FW_FORM_TOKEN);
      run.state_layout = packed ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
      HeaderRing ring;
      ring.tokens = 3;
      ring.per_call = packed ? 2 : 1;
      ring.takes_back = packed && !problem.rule.uses_precond();
      EXPECT_TRUE(close(header_ring(problem, run, ring), problem.forward(), kTokenBound, kChunkFloor)) << name;
    }
  }
  ProblemOptions heads;  // enough of them that a block has half a head
  heads.sequences = SeqLayout::uniform(132, 2);
  heads.H = heads.HV = 2;
  heads.K = 32;
  heads.V = 8;
  const Problem problem = random_problem(preset("kda").rule, heads);
  HeaderRun run = device_run(FW_FORM_TOKEN);
  run.state_layout = FW_STATE_V_FIRST;
  HeaderRing ring;
  ring.tokens = 2;
  EXPECT_TRUE(close(header_ring(problem, run, ring), problem.forward(), kTokenBound, kChunkFloor));
}

TEST(Small, GatesAsLogits) {
  uint64_t seed = 930;
  for (const char* name : {"gated_deltanet", "gated_deltanet2", "hgrn2", "precond_kda", "precond_gated_deltanet"}) {
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      ProblemOptions options;
      options.sequences = SeqLayout({0, 70, 70, 75});
      options.K = ++seed % 2 == 0 ? 64 : 38;
      options.V = 40;
      options.H = 1;
      options.HV = form == FW_FORM_CHUNK ? 2 : 1;
      options.gates = logits_of(preset(name).rule, GateActivation::kSoftplus);
      options.seed = seed;
      const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
      HeaderRun run = device_run(form);
      run.bf16 = HeaderRun::Bf16Tensors::kAll;
      SCOPED_TRACE(describe(problem));
      EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
      const ReferenceInputs got = header_backward(problem, run), expected = problem.backward();
      EXPECT_TRUE(close_gradients(without_parameters(got), without_parameters(expected), problem.rule, false));
      EXPECT_TRUE(close_parameters(got, expected, kStrongDecay));
    }
  }
}

// Value heads that share keys, two in a block of prepare: of so many chunks as that takes (prepare/grouped.cu),
// most of a token or two.
TEST(Small, HeadsThatShareKeys) {
  uint64_t seed = 935;
  for (const int64_t K : {64, 128}) {
    std::vector<int64_t> offsets = {0, 70, 70, 75};
    for (int n = 0; !emulated() && n < 200; ++n) offsets.push_back(offsets.back() + 1 + n % 2);
    ProblemOptions options;
    options.sequences = SeqLayout(offsets);
    options.H = 1;
    options.HV = 8;
    options.K = K;
    options.V = 64;
    options.seed = ++seed;
    const int64_t chunks = 3 + (static_cast<int64_t>(offsets.size()) - 4);  // one of each of the added
    ASSERT_GT(cuda::grouped_heads(8, 8, chunks, cuda::persistent_ctas()), 1) << "too few chunks for that kernel";
    const Problem problem =
        of_bf16_numbers(random_problem(preset(K == 64 ? "deltanet" : "gated_deltanet").rule, options));
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    SCOPED_TRACE(describe(problem));
    EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
    EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
  }
}

#ifdef FW_CUDA_EMULATION
// The kernels of sm80/, each form of the scans once: of raw rows, of sums of them, of a preconditioner's rows, without
// an erase, and of rows that cannot be copied. With K above 128: rows, sums, no erase, other gains, rows of any kind.
// With a decay a channel: any gates, a preconditioner, two rows a token,
// and decays that are bounded. With steps above 1: raw rows, streams, and rows that cannot be copied.
TEST(Small, KernelsOfOlderGpus) {
  struct Case {
    const char *rule, *forward, *backward;
    int64_t K, V, HV;
    bool bf16, edge_decays = false;
  };
  const cuda::emulation::Gpu before = cuda::emulation::gpu;
  cuda::emulation::gpu.major = 8;
  uint64_t seed = 950;
  for (const Case& c : {Case{"gated_deltanet", "(raw rows, A and P)", "(rows) -> sm80/gradients", 64, 64, 2, true},
                        Case{"comba", "(sums of raw rows, A and P)", "(rows) -> sm80/gradients", 128, 40, 1, true},
                        Case{"precond_deltanet", "(raw rows)", "(tiles) -> sm80/gradients", 128, 64, 1, true},
                        Case{"mamba2", "(additive)", "(tiles) -> sm80/gradients", 64, 100, 1, true},
                        Case{"deltanet", "(tiles)", "(rows) -> sm80/gradients", 62, 64, 1, false},
                        Case{"gated_deltanet", "(K 256)", "(K 256) -> sm80/gradients (split K)", 256, 64, 2, true},
                        Case{"qdelta", "(K 256, sums)", "(K 256, sums) -> sm80/gradients (split K)", 160, 40, 1, true},
                        Case{"mamba2", "(K 256)", "(K 256) -> sm80/gradients (split K)", 192, 64, 2, true},
                        Case{"kaczmarz", "(K 256)", "(K 256) -> sm80/gradients (split K)", 256, 72, 1, true},
                        Case{"deltanet", "(K 256)", "(K 256) -> sm80/gradients (split K)", 150, 33, 1, false},
                        Case{"kda", "(split tiles)", "(keys) -> sm80/gradients_channel", 128, 100, 2, true},
                        Case{"kda", "(split tiles)", "(keys) -> sm80/gradients_channel", 64, 64, 1, true, true},
                        Case{"gated_deltanet2", "(split tiles)", "(keys) -> sm80/gradients_channel", 64, 40, 2, true},
                        Case{"gla", "(additive)", "(tiles) -> sm80/gradients_channel", 128, 100, 1, true},
                        Case{"gla", "(additive)", "(tiles) -> sm80/gradients_channel", 128, 64, 1, false, true},
                        Case{"precond_kda", "(split tiles)", "(keys) -> sm80/gradients_channel", 62, 64, 1, false},
                        Case{"dplr", "(split tiles)", "(keys) -> sm80/gradients_channel", 128, 40, 1, true},
                        Case{"gated_deltanet_neg", "(hi_lo)", "(tiles) -> sm80/gradients", 128, 100, 2, true},
                        Case{"deltanet_neg", "(hi_lo)", "(tiles) -> sm80/gradients", 64, 64, 1, true},
                        Case{"gated_deltanet_neg", "(hi_lo)", "(tiles) -> sm80/gradients", 62, 64, 1, false, true},
                        Case{"qdelta gain_bound=2", "(hi_lo)", "(tiles) -> sm80/gradients", 128, 64, 2, true},
                        Case{"kda_neg", "(hi_lo)", "(tiles) -> sm80/gradients_channel", 128, 100, 2, true},
                        Case{"gated_deltanet2_neg", "(hi_lo)", "(tiles) -> sm80/gradients_channel", 64, 40, 1, true},
                        Case{"kda_neg", "(hi_lo)", "(tiles) -> sm80/gradients_channel", 62, 64, 1, false, true}}) {
    ProblemOptions options;
    options.sequences = SeqLayout({0, 70, 70, 75});
    options.H = 1, options.HV = c.HV;
    options.K = c.K, options.V = c.V;
    options.edge_decays = c.edge_decays;
    options.seed = ++seed;
    const Problem problem = of_bf16_numbers(random_problem(parse_rule(c.rule), options));
    HeaderRun run = device_run(FW_FORM_CHUNK);
    if (c.V == 100) run.segment = 64;
    run.bf16 = c.bf16 ? HeaderRun::Bf16Tensors::kAll : HeaderRun::Bf16Tensors::kNone;
    std::string text;
    run.plan_text = &text;
    SCOPED_TRACE(describe(problem));
    EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
    EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, c.edge_decays));
    EXPECT_NE(text.find(fmt::format("sm80/forward {}", c.forward)), std::string::npos) << text;
    EXPECT_NE(text.find(fmt::format("sm80/reverse {}", c.backward)), std::string::npos) << text;
  }
  cuda::emulation::gpu = before;
}

// The fused forward, which a device of one SM takes for so few heads. On a GPU fused_forward_test runs it at such
// shapes.
TEST(Small, ForwardInOneKernel) {
  if (cuda::current_arch() < cuda::Arch::kSm90) GTEST_SKIP() << "Hopper alone has it";
  const EmulatedSms one(1);
  ProblemOptions options;
  options.sequences = SeqLayout({0, 450, 450});
  options.H = 1, options.HV = 2;
  options.K = options.V = 128;
  options.seed = 938;
  const Problem problem = of_bf16_numbers(random_problem(preset("gated_deltanet").rule, options));
  HeaderRun run = device_run(FW_FORM_CHUNK);
  run.bf16 = HeaderRun::Bf16Tensors::kAll;
  std::string text;
  run.plan_text = &text;
  EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
  EXPECT_TRUE(is_fused(text)) << text;
}
#endif

// Logits that prepare and gradients take as they are, some of them beyond what they bound; and keys split along K.
TEST(Small, FusedGatesAndSplitKeys) {
  uint64_t seed = 940;
  for (const char* name : {"kda", "gated_deltanet2", "gla"}) {
    const Rule rule = preset(name).rule;
    ProblemOptions options;
    options.sequences = SeqLayout({0, 70, 70, 75});
    options.K = rule.is_delta() ? (rule.uses_write_gate() ? 128 : 64) : 136;
    options.V = 40;
    options.H = 1;
    options.HV = rule.uses_erase_gate() ? 1 : 2;
    options.gates_per_value_head = true;
    if (rule.is_delta()) options.gates = logits_of(rule, GateActivation::kSoftplus);
    options.seed = ++seed;
    Problem problem = random_problem(rule, options);
    for (size_t i = 0; i < problem.in.g.size() && rule.is_delta(); i += 31) problem.in.g[i] = 60;
    problem = of_bf16_numbers(std::move(problem));
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    SCOPED_TRACE(describe(problem));
    EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
    const ReferenceInputs got = header_backward(problem, run), expected = problem.backward();
    EXPECT_TRUE(close_gradients(without_parameters(got), without_parameters(expected), problem.rule, true));
    EXPECT_TRUE(close_parameters(got, expected, kStrongDecay, kChunkFloor));
  }
}

// Two rows a token, in wide accesses and single ones, decays of channels and of a head.
TEST(Small, DplrAsTwoTokens) {
  uint64_t seed = 950;
  for (const char* text : {"decay=channel erase_key=own erase_state=previous erase_write=own",
                           "decay=scalar erase_state=previous erase_write=own gain=gate"}) {
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      const Rule rule = parse_rule(text);
      ProblemOptions options;
      options.sequences = SeqLayout({0, 35, 35, 38});
      options.H = options.HV = 2;
      options.K = ++seed % 2 == 0 ? 64 : 38;
      options.V = 40;
      options.seed = seed;
      const Problem problem = of_bf16_numbers(random_problem(rule, options));
      HeaderRun run = device_run(form);
      run.bf16 = HeaderRun::Bf16Tensors::kAll;
      SCOPED_TRACE(describe(problem));
      EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
      EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), rule, false));
    }
  }
}

// States on the way, where segments begin and elsewhere, and float16 tensors in wide loads and single ones. What they
// are is looked at in checkpoints_test.cpp and float16_test.cpp.
TEST(Small, CheckpointsAndFloat16) {
  uint64_t seed = 960;
  for (const char* name : {"gated_deltanet", "mamba2", "precond_gated_deltanet"}) {
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      ProblemOptions options;
      options.sequences = SeqLayout({0, 65, 65, 193});
      options.H = options.HV = 1;
      options.K = ++seed % 2 == 0 ? 64 : 38;
      options.V = 40;
      options.seed = seed;
      const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
      HeaderRun run = device_run(form);
      run.bf16 = HeaderRun::Bf16Tensors::kAll;
      run.float16 = true;
      run.segment = form == FW_FORM_CHUNK ? 64 : 0;
      SCOPED_TRACE(describe(problem));
      const HeaderCheckpoints got = header_checkpoints(problem, run, 64);
      EXPECT_EQ(got.all.size(), 3U);
      EXPECT_TRUE(close(got.outputs, problem.forward(), ChunkBounds{}.output, kChunkFloor));
      EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
    }
  }
}

// Keys above 128, rows that TMA loads and that threads copy, after which it loads whole ones again.
TEST(Small, K256Keys) {
  uint64_t seed = 940;
  for (const char* name : {"gated_deltanet", "mamba2", "comba", "qdelta", "kaczmarz", "kda", "gated_deltanet2"}) {
    for (const bool bf16 : {true, false}) {
      // no other kernels than those before
      if (!bf16 && (name == std::string_view("kaczmarz") || name == std::string_view("gated_deltanet2"))) continue;
      ProblemOptions options;
      options.sequences = SeqLayout({0, 130, 130, 135});
      options.H = 1;
      options.HV = ++seed % 2 == 0 ? 2 : 1;
      options.K = bf16 ? 256 : 150;
      options.V = bf16 ? 64 : 40;
      options.seed = seed;
      const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
      HeaderRun run = device_run(FW_FORM_CHUNK);
      run.bf16 = bf16 ? HeaderRun::Bf16Tensors::kAll : HeaderRun::Bf16Tensors::kNone;
      run.saved = bf16;
      SCOPED_TRACE(describe(problem));
      EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
      EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
    }
  }
}

// Blocks that stay take one chunk after another: many sequences, so that the coords of later chunks have to be found in
// time.
TEST(Small, ManyTurns) {
  std::vector<int64_t> offsets = {0};
  for (int64_t n = 0; n < (emulated() ? 24 : 700); ++n) offsets.push_back(offsets.back() + (n % 7 == 3 ? 70 : n % 4));
  uint64_t seed = 950;
  for (const char* name :
       {"gated_deltanet", "kda", "gated_deltanet2", "mamba2", "qdelta", "kaczmarz", "kaczmarz_channel",
        "precond_gated_deltanet", "precond_kda", "gated_deltanet_neg", "gated_deltanet2_neg"}) {
    ProblemOptions options;
    options.sequences = SeqLayout(offsets);
    options.K = options.V = 16;
    options.seed = ++seed;
    const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
    HeaderRun run = device_run(FW_FORM_CHUNK);
    run.bf16 = HeaderRun::Bf16Tensors::kAll;
    SCOPED_TRACE(describe(problem));
    EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
    EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
  }
}

// Sequences of several chunks and few heads: the gradients begin alongside the reverse scan, of whole sequences and of
// segments (plan.h: overlap_grad_with_scan).
TEST(Small, GradientsBesideTheScan) {
  uint64_t seed = 980;
  for (const char* name : {"gated_deltanet", "kda", "gated_deltanet2", "precond_gated_deltanet", "precond_kda",
                           "qdelta", "deltanet_neg", "gla", "gated_deltanet_neg"}) {
    for (const bool bf16 : {true, false}) {
      // float32 tensors are bf16 rows before kernels begin, where steps are at most 1.
      if (!bf16 && preset(name).rule.gain_bound <= 1) continue;
      ProblemOptions options;
      options.sequences = SeqLayout({0, 260, 260, 330});
      options.H = options.HV = 1;
      options.K = ++seed / 2 % 2 == 0 ? 64 : 128;
      options.V = seed % 3 == 0 ? 72 : 64;
      options.seed = seed;
      Problem problem = random_problem(preset(name).rule, options);
      if (problem.rule.gain_bound > 1) hardly_decay(problem);
      problem = of_bf16_numbers(problem);
      HeaderRun run = device_run(FW_FORM_CHUNK);
      run.bf16 = bf16 ? HeaderRun::Bf16Tensors::kAll : HeaderRun::Bf16Tensors::kNone;
      run.segment = seed % 3 == 1 ? 128 : -1;
      SCOPED_TRACE(describe(problem));
      std::string text;
      run.plan_text = &text;
      EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
      if (on_hopper()) {
        EXPECT_NE(text.find("beside the reverse scan"), std::string::npos) << text;
      }
    }
  }
}

// A packed sequence in segments that are longer than the scan has stages, the last of them with a short chunk: TMA
// overwrites a tile that threads have filled.
TEST(Small, SegmentsWithAShortTail) {
  ProblemOptions options;
  options.sequences = SeqLayout({0, 65, 651});
  options.H = options.HV = 1;
  options.K = options.V = 64;
  options.seed = 995;
  const Problem problem = of_bf16_numbers(random_problem(preset("gated_deltanet").rule, options));
  HeaderRun run = device_run(FW_FORM_CHUNK);
  run.bf16 = HeaderRun::Bf16Tensors::kAll;
  run.segment = 320;
  EXPECT_TRUE(close(header_forward(problem, run), problem.forward(), ChunkBounds{}.output, kChunkFloor));
  EXPECT_TRUE(close_gradients(header_backward(problem, run), problem.backward(), problem.rule, false));
}

}  // namespace
}  // namespace fw::testing
