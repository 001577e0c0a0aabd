// Calls that nobody listed, drawn at random: what must not change bits does not, whatever else a call has. On the CPU
// and on the device.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/random.h"
#include "cuda/device_runs.h"
#include "rule/rule.h"

namespace fw::testing {
namespace {

class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}
  bool once_in(uint64_t n) { return random_.below(n) == 0; }
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_.below(static_cast<uint64_t>(high - low + 1)));
  }
  template <class T, size_t N>
  T of(const T (&list)[N]) {
    return list[random_.below(N)];
  }

 private:
  Random random_;
};

Problem draw_problem(const Rule& rule, uint64_t seed, Draws& draws) {
  ProblemOptions options;
  if (draws.once_in(2)) {
    options.sequences = SeqLayout::uniform(draws.between(1, 3), draws.between(1, 70));
  } else {
    std::vector<int64_t> offsets = {0};
    for (int64_t n = draws.between(1, 4); n > 0; --n)
      offsets.push_back(offsets.back() + (draws.once_in(3) ? 0 : draws.between(1, 70)));
    if (offsets.back() == 0) offsets.back() = 1;
    options.sequences = SeqLayout(std::move(offsets));
  }
  options.H = draws.between(1, 2);
  options.HV = options.H * (rule.general_erase() ? 1 : draws.between(1, 2));
  options.K = draws.once_in(2) ? 64 : draws.between(1, 80);
  options.V = draws.once_in(2) ? 32 : draws.between(1, 70);
  options.gates_per_value_head = draws.once_in(2);
  options.initial_state = !draws.once_in(3);
  options.rate_per_channel = draws.once_in(2);
  if (draws.once_in(2)) options.gates = logits_of(rule, draws.of(kDecayActivations));
  options.seed = seed;
  Problem problem = of_bf16_numbers(random_problem(rule, options));
  if (draws.once_in(4) && options.initial_state) problem = with_states_of_some(problem);
  return problem;
}

HeaderRun draw_run(fw_device device, Problem& problem, Draws& draws) {
  HeaderRun run;
  run.device = device;
  run.dtype = FW_F32;
  constexpr HeaderRun::Bf16Tensors kTensors[] = {HeaderRun::Bf16Tensors::kNone, HeaderRun::Bf16Tensors::kStreams,
                                                 HeaderRun::Bf16Tensors::kAll};
  run.bf16 = draws.of(kTensors);
  run.float16 = run.bf16 != HeaderRun::Bf16Tensors::kNone && draws.once_in(2);
  run.bf16_operands = draws.once_in(2);
  run.state_layout = draws.once_in(2) ? FW_STATE_V_FIRST : FW_STATE_K_FIRST;
  run.bf16_states = draws.once_in(3);
  if (run.bf16_states) round_states(problem);
  return run;
}

// Where tensors and states lie, and what else has no say in what they become.
HeaderRun elsewhere(const HeaderRun& base, const Problem& problem, Draws& draws) {
  HeaderRun run = base;
  // Of the device's kernels of chunks some take aligned rows alone.
  const bool token_form = run.form == FW_FORM_DECODE || !run.bf16_operands;
  if (run.device == FW_DEVICE_CPU || token_form) run.row_padding = draws.once_in(2) ? draws.between(1, 9) : 0;
  run.pool = draws.once_in(2);
  run.state_in_place = draws.once_in(2);
  run.forward_saves = !run.pool && draws.once_in(2);
  run.device_seqlens = run.device == FW_DEVICE_CUDA && !problem.rule.general_erase() && draws.once_in(2);
  if (run.device_seqlens) run.spare_tokens = draws.between(0, 9);
  return run;
}

void expect_bits(fw_device device, const Rule& rule, uint64_t seed) {
  Draws draws(seed);
  Problem problem = draw_problem(rule, seed, draws);
  HeaderRun run = draw_run(device, problem, draws);
  SCOPED_TRACE(fmt::format("device {} seed {} bf16 {} f16 {} operands {} V first {} bf16 states {}: {}",
                           static_cast<int>(device), seed, static_cast<int>(run.bf16), run.float16, run.bf16_operands,
                           run.state_layout == FW_STATE_V_FIRST, run.bf16_states, describe(problem)));
  const ReferenceOutputs forward = header_forward(problem, run);
  EXPECT_TRUE(close(forward, problem.forward(), 2e-2, kChunkFloor));
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(close(header_forward(problem, elsewhere(run, problem, draws)), forward, 0));

  HeaderRun decode = run;
  decode.bf16_states = false;  // else each call rounds them
  const ReferenceOutputs steps = header_steps(problem, decode);
  EXPECT_TRUE(close(header_steps(problem, decode, draws.between(2, 9)), steps, 0)) << "several tokens a call";
  EXPECT_TRUE(close(header_speculation(problem, decode, draws.between(1, 5)), steps, 0)) << "drafts";
  if (!rule.general_erase()) {
    HeaderRing ring;
    ring.tokens = 1;
    EXPECT_TRUE(close(header_ring(problem, decode, ring), steps, 0)) << "a ring of one token";
  }
  decode.form = FW_FORM_DECODE;
  EXPECT_TRUE(close(header_forward(problem, elsewhere(decode, problem, draws)), steps, 0)) << "FW_FORM_DECODE";
}

TEST(RandomCalls, BitsDoNotDependOnTheRest) {
  for (const fw_device device : {FW_DEVICE_CPU, FW_DEVICE_CUDA}) {
    uint64_t seed = 20261130;
    for (int turn = 0; turn < (emulated() ? 1 : 4); ++turn) {
      for (const Preset& named : presets()) {
        if (device == FW_DEVICE_CUDA && lacks(named.rule)) continue;
        expect_bits(device, named.rule, ++seed);
      }
    }
  }
}

}  // namespace
}  // namespace fw::testing
