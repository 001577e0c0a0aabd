// States on the way of fw_forward (fw_desc.checkpoint_interval) on the device: by the token form, the chunk form of all
// kinds of scans, and of sequences that are cut into segments.
#include "support/checkpoints.h"

#include <gtest/gtest.h>

#include "cuda/device_runs.h"

namespace fw::testing {
namespace {

TEST(DeviceCheckpoints, AreWhereAForwardGoesOnWithTheSameBits) {
  uint64_t seed = 2700;
  for (const Preset& named : presets()) {
    ++seed;
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      SCOPED_TRACE(named.name);
      ProblemOptions options;
      options.sequences = seed % 2 == 0 ? SeqLayout({0, 128, 193}) : SeqLayout({0, 63, 63, 127, 192});
      options.H = 1;
      options.HV = named.rule.general_erase() ? 1 : 1 + static_cast<int64_t>(seed % 2);
      options.K = seed % 3 == 0 ? 40 : seed % 5 == 0 ? 128 : 64;
      options.V = seed % 3 == 1 ? 24 : 64;
      options.initial_state = seed % 3 == 1;
      options.seed = seed;
      const Problem problem = of_bf16_numbers(random_problem(named.rule, options));
      HeaderRun run = device_run(form);
      run.bf16 = seed % 4 == 3 ? HeaderRun::Bf16Tensors::kNone : HeaderRun::Bf16Tensors::kAll;
      run.state_layout = seed % 4 < 2 ? FW_STATE_K_FIRST : FW_STATE_V_FIRST;
      run.pool = seed % 3 == 1;
      run.forward_saves = seed % 5 == 0;
      run.segment = form == FW_FORM_CHUNK ? -1 : 0;
      run.device_seqlens = seed % 5 == 2 && !named.rule.general_erase();
      if (run.device_seqlens) run.spare_tokens = 70;
      expect_checkpoints(problem, run, 64);
    }
  }
}

// A chunk short, whole and one token longer: which are checkpoints.
TEST(DeviceCheckpoints, OfLengthsAroundAChunk) {
  for (const int64_t length : {0, 1, 63, 64, 65, 127, 128, 129, 130}) {
    ProblemOptions options;
    options.sequences = SeqLayout({0, length, length, length + 64});
    options.K = options.V = 64;
    options.seed = static_cast<uint64_t>(length) + 1;
    for (const char* rule : {"precond_gated_deltanet", "mamba2", "kda"}) {
      const Problem problem = of_bf16_numbers(random_problem(preset(rule).rule, options));
      HeaderRun run = device_run(FW_FORM_CHUNK);
      run.pool = length % 2 == 1;
      expect_checkpoints(problem, run, length % 3 == 0 ? 128 : 64);
    }
  }
  // one chunk, not packed: the preconditioner is one kernel
  for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(2, 64);
    options.K = options.V = 64;
    expect_checkpoints(of_bf16_numbers(random_problem(preset("precond_gated_deltanet").rule, options)),
                       device_run(form), 64);
  }
}

// Of sequences that are cut, those where a segment begins: a call that starts there has the same segments. The others
// are what they are without a cut but for rounding.
TEST(DeviceCheckpoints, OfSequencesThatAreCut) {
  for (const char* name : {"gated_deltanet", "kda", "mamba2", "kda_neg"}) {
    for (const bool packed : {false, true}) {
      ProblemOptions options;
      options.sequences = packed ? SeqLayout({0, 200, 200, 456}) : SeqLayout::uniform(2, 256);
      options.K = options.V = 64;
      options.initial_state = packed;
      options.seed = 9;
      const Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
      HeaderRun run = device_run(FW_FORM_CHUNK);
      run.segment = 128;
      run.pool = packed;
      run.bf16 = HeaderRun::Bf16Tensors::kAll;
      SCOPED_TRACE(name);
      expect_checkpoints(problem, run, 64, 128, false);
      const HeaderCheckpoints cut = header_checkpoints(problem, run, 64);
      run.segment = -1;
      const HeaderCheckpoints whole = header_checkpoints(problem, run, 64);
      ASSERT_EQ(cut.all.size(), whole.all.size());
      for (size_t i = 0; i < cut.all.size(); ++i)
        EXPECT_LT(relative_error(cut.all[i].state, whole.all[i].state), ChunkBounds{}.output);
    }
  }
}

TEST(DeviceCheckpoints, OfBf16AreRoundedOnce) {
  for (const char* name : {"gated_deltanet", "mamba2"}) {
    for (const fw_form form : {FW_FORM_CHUNK, FW_FORM_TOKEN}) {
      ProblemOptions options;
      options.sequences = SeqLayout::uniform(2, 130);
      options.K = options.V = 64;
      options.seed = 10;
      Problem problem = of_bf16_numbers(random_problem(preset(name).rule, options));
      round_states(problem);
      HeaderRun run = device_run(form);
      run.bf16_states = true;
      expect_checkpoints(problem, run, 64);
    }
  }
}

}  // namespace
}  // namespace fw::testing
