// fw_step on the device: in place, several tokens a call, states of bf16 values, slots.
#include <gtest/gtest.h>

#include <cstring>

#include "base/f16.h"
#include "cuda/device_runs.h"
#include "reference/header_tensors.h"

namespace fw::testing {
namespace {

TEST(Step, InPlaceEqualsTheWholeSequence) {
  for (const Rule& rule : all_rules()) {
    if (rule.general_erase() || lacks(rule)) continue;
    const uint64_t seed = rule_seed(rule, 1);
    if (emulated() && seed % 3 != 0) continue;
    ProblemOptions options;
    options.sequences = SeqLayout::uniform(3, 9);
    options.H = 2;
    options.HV = 4;
    options.K = 24;
    options.V = 40;
    options.seed = seed;
    const Problem problem = random_problem(rule, options);
    for (const fw_state_layout layout : {FW_STATE_K_FIRST, FW_STATE_V_FIRST}) {
      HeaderRun run = device_run(FW_FORM_TOKEN);
      run.state_layout = layout;
      EXPECT_TRUE(close(header_steps(problem, run, seed % 2 == 0 ? 1 : 4), problem.forward(), kTokenBound, kTokenFloor))
          << describe(problem);
    }
  }
}

fw_tensor device_tensor(const DeviceMemory& memory, fw_dtype dtype, std::vector<int64_t> shape) {
  return fw_tensor_of(memory.data(), dtype, static_cast<int>(shape.size()), shape.data());
}

template <class T>
DeviceMemory on_device(const std::vector<T>& values) {
  DeviceMemory memory(values.size() * sizeof(T));
  memory.from_host(values.data(), values.size() * sizeof(T));
  return memory;
}

std::vector<float> floats(const std::vector<double>& x) { return {x.begin(), x.end()}; }

std::vector<Bf16> bf16(const std::vector<double>& x) {
  const std::vector<float> wide = floats(x);
  std::vector<Bf16> bits(wide.size());
  round_to_bf16(static_cast<int64_t>(wide.size()), wide.data(), bits.data());
  return bits;
}

// Three sequences whose states lie at slots 4, none (skipped) and 1 of five: what belongs to nobody does not change.
TEST(Step, SlotsAndStatesOfBf16) {
  ProblemOptions options;
  options.sequences = SeqLayout::uniform(3, 2);
  options.H = options.HV = 2;
  options.K = 64;
  options.V = 32;
  options.seed = 5;
  const Problem p = of_bf16_numbers(random_problem(preset("kda").rule, options));
  const ReferenceOutputs expected = p.forward();
  const size_t state = 2 * 64 * 32;
  for (const bool narrow : {false, true}) {
    std::vector<double> pool(5 * state, 0.25);
    const std::vector<int32_t> slots = {4, -1, 1};
    for (size_t n = 0; n < 3; ++n) {
      if (slots[n] < 0) continue;
      std::copy_n(p.in.initial_state.begin() + static_cast<std::ptrdiff_t>(n * state), state,
                  pool.begin() + static_cast<std::ptrdiff_t>(slots[n] * state));
    }
    const DeviceMemory states = narrow ? on_device(bf16(pool)) : on_device(floats(pool));
    const DeviceMemory q = on_device(bf16(p.in.q)), k = on_device(bf16(p.in.k)), v = on_device(bf16(p.in.v)),
                       g = on_device(floats(p.in.g)), beta = on_device(floats(p.in.beta)),
                       slot_memory = on_device(slots);
    const DeviceMemory o = on_device(std::vector<float>(3 * 2 * 2 * 32, 7.0f));
    fw_desc desc;
    fw_desc_init(&desc);
    desc.rule = to_c(p.rule);
    desc.device = FW_DEVICE_CUDA;
    desc.io_dtype = FW_BF16;
    desc.B = 3;
    desc.T = 2;
    desc.H = desc.HV = 2;
    desc.K = 64;
    desc.V = 32;
    desc.state_pool.slots = static_cast<const int32_t*>(slot_memory.data());
    desc.state_pool.num_slots = 5;
    fw_inputs in;
    fw_outputs out;
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    in.q = device_tensor(q, FW_BF16, {3, 2, 2, 64});
    in.k = device_tensor(k, FW_BF16, {3, 2, 2, 64});
    in.v = device_tensor(v, FW_BF16, {3, 2, 2, 32});
    in.g = device_tensor(g, FW_F32, {3, 2, 2, 64});
    in.beta = device_tensor(beta, FW_F32, {3, 2, 2});
    in.initial_state = out.final_state = device_tensor(states, narrow ? FW_BF16 : FW_F32, {5, 2, 64, 32});
    out.o = device_tensor(o, FW_F32, {3, 2, 2, 32});
    ASSERT_EQ(fw_step(&desc, &in, &out, nullptr, 0), FW_OK) << fw_last_error();

    std::vector<float> got(3 * 2 * 2 * 32);
    o.to_host(got.data(), got.size() * sizeof(float));
    std::vector<double> mine, theirs;
    for (size_t i = 0; i < got.size(); ++i) {
      if (i / (2 * 2 * 32) == 1) {
        EXPECT_EQ(got[i], 7.0f) << "the skipped sequence's output " << i;
      } else {
        mine.push_back(static_cast<double>(got[i]));
        theirs.push_back(expected.o[i]);
      }
    }
    EXPECT_LE(relative_error(mine, theirs), narrow ? 4e-3 : kTokenBound);
    std::vector<double> after(5 * state);
    if (narrow) {
      std::vector<Bf16> bits(after.size());
      states.to_host(bits.data(), bits.size() * sizeof(Bf16));
      std::vector<float> wide(after.size());
      widen_bf16(static_cast<int64_t>(wide.size()), bits.data(), wide.data());
      after.assign(wide.begin(), wide.end());
    } else {
      std::vector<float> wide(after.size());
      states.to_host(wide.data(), wide.size() * sizeof(float));
      after.assign(wide.begin(), wide.end());
    }
    for (const size_t slot : {0, 2, 3}) {
      for (size_t i = slot * state; i < (slot + 1) * state; ++i) ASSERT_EQ(after[i], 0.25) << "slot " << slot;
    }
    for (const size_t n : {0, 2}) {
      const auto from = static_cast<std::ptrdiff_t>(static_cast<size_t>(slots[n]) * state),
                 of = static_cast<std::ptrdiff_t>(n * state);
      const auto length = static_cast<std::ptrdiff_t>(state);
      EXPECT_LE(relative_error(
                    std::vector<double>(after.begin() + from, after.begin() + from + length),
                    std::vector<double>(expected.final_state.begin() + of, expected.final_state.begin() + of + length)),
                narrow ? 4e-3 : kTokenBound);
    }
  }
}

// Where rewrites give kernels another tensor in place of o, that one has what it was: of float16, of two rows a token.
TEST(Step, OutputsOfSkippedSequencesStay) {
  const struct {
    const char* rule;
    fw_dtype dtype;
  } calls[] = {{"kda", FW_F32}, {"kda", FW_F16}, {"dplr", FW_F32}, {"dplr", FW_BF16}, {"comba", FW_F16}};
  for (const auto& call : calls) {
    for (const int64_t T : {1, 2}) {
      SCOPED_TRACE(fmt::format("{} {} T {}", call.rule, static_cast<int>(call.dtype), T));
      ProblemOptions options;
      options.sequences = SeqLayout::uniform(3, T);
      options.H = options.HV = 2;
      options.K = 64, options.V = 32;
      options.seed = 6;
      const Problem p = of_bf16_numbers(random_problem(preset(call.rule).rule, options));
      const auto bits = [&](const std::vector<double>& x) {
        if (call.dtype == FW_F32) return on_device(floats(x));
        if (call.dtype == FW_BF16) return on_device(bf16(x));
        const std::vector<float> wide = floats(x);
        std::vector<F16> narrow(wide.size());
        round_to_f16(static_cast<int64_t>(wide.size()), wide.data(), narrow.data());
        return on_device(narrow);
      };
      fw_inputs in;
      fw_outputs out;
      fw_inputs_init(&in);
      fw_outputs_init(&out);
      std::vector<DeviceMemory> memory;
      for (const auto& field : reference_input_fields()) {
        const std::vector<double>& values = p.in.*field.values;
        if (values.empty() || std::string(field.name) == "initial_state") continue;
        memory.push_back(bits(values));
        std::vector<int64_t> shape = field.shape(p.rule, p.shape);  // [tokens, ...]
        shape.front() = T;
        shape.insert(shape.begin(), 3);
        for (const auto& named : kInputTensors) {
          if (std::string(named.name) == field.name) in.*named.tensor = device_tensor(memory.back(), call.dtype, shape);
        }
      }
      const size_t state = 2 * 64 * 32, row = static_cast<size_t>(T) * 2 * 32;
      const DeviceMemory states = on_device(std::vector<float>(2 * state, 0.25f)),
                         slots = on_device(std::vector<int32_t>{1, -1, 0}), o = bits(std::vector<double>(3 * row, 7)),
                         untouched = bits(std::vector<double>(row, 7));
      in.initial_state = out.final_state = device_tensor(states, FW_F32, {2, 2, 64, 32});
      out.o = device_tensor(o, call.dtype, {3, T, 2, 32});
      fw_desc desc;
      fw_desc_init(&desc);
      desc.rule = to_c(p.rule);
      desc.device = FW_DEVICE_CUDA;
      desc.io_dtype = call.dtype;
      desc.B = 3, desc.T = T, desc.H = desc.HV = 2, desc.K = 64, desc.V = 32;
      desc.state_pool.slots = static_cast<const int32_t*>(slots.data());
      desc.state_pool.num_slots = 2;
      fw_sizes sizes;
      fw_sizes_init(&sizes);
      ASSERT_EQ(fw_workspace_query(&desc, &sizes), FW_OK) << fw_last_error();
      const DeviceMemory workspace = on_device(std::vector<uint8_t>(sizes.forward + 1, 0xff));
      ASSERT_EQ(fw_step(&desc, &in, &out, workspace.data(), sizes.forward), FW_OK) << fw_last_error();
      const size_t bytes = row * (call.dtype == FW_F32 ? 4 : 2);
      std::vector<uint8_t> got(3 * bytes), kept(bytes);
      o.to_host(got.data(), got.size());
      untouched.to_host(kept.data(), bytes);
      const auto stayed = [&](size_t n) { return std::memcmp(got.data() + n * bytes, kept.data(), bytes) == 0; };
      EXPECT_FALSE(stayed(0));
      EXPECT_TRUE(stayed(1));
      EXPECT_FALSE(stayed(2));
    }
  }
}

}  // namespace
}  // namespace fw::testing
