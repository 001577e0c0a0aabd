// What a call costs alongside its kernels on a GPU, by the C header alone: the host's time of a call through a plan,
// checkpoints of the states, float16 tensors in place of bf16 ones. call_bench [rule]: medians; device times by events
// over three sets of tensors in turn, 16 heads, K = V = 128.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <vector>

#include "base/bf16.h"
#include "base/device.h"
#include "base/f16.h"
#include "fastweight/fastweight.h"

namespace {

using fw::DeviceMemory;

constexpr int64_t kHeads = 16, kDim = 128;

void check(fw_status status) {
  if (status == FW_OK) return;
  std::fprintf(stderr, "%s\n", fw_last_error());
  std::exit(1);
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Tensors of a rule with a scalar or a channel decay and a gain that is a gate, or without either.
class Set {
 public:
  Set(const char* rule, int64_t B, int64_t T, fw_dtype type) {
    fw_desc_init(&desc);
    check(fw_rule_preset(rule, &desc.rule));
    desc.device = FW_DEVICE_CUDA;
    desc.io_dtype = type;
    desc.operands = FW_BF16;
    desc.B = B, desc.T = T, desc.H = desc.HV = kHeads, desc.K = desc.V = kDim;
    desc.state_layout = FW_STATE_V_FIRST;
    fw_inputs_init(&in);
    fw_outputs_init(&out);
    fw_inputs_init(&grads);
    fw_outputs_init(&d);
    const bool channel = desc.rule.decay == FW_DECAY_CHANNEL;
    in.q = rows(type, -1, 1), in.k = rows(type, -1, 1), in.v = rows(type, -1, 1);
    if (desc.rule.decay >= FW_DECAY_SCALAR) in.g = channel ? rows(type, -0.1F, 0) : numbers(-0.1F, 0);
    if (desc.rule.gain == FW_GAIN_GATE) in.beta = numbers(0, 1);
    grads.q = rows(type, 0, 0), grads.k = rows(type, 0, 0), grads.v = rows(type, 0, 0);
    if (in.g.data != nullptr) grads.g = channel ? rows(type, 0, 0) : numbers(0, 0);
    if (in.beta.data != nullptr) grads.beta = numbers(0, 0);
    out.o = rows(type, 0, 0), d.o = rows(type, -1, 1);
  }
  fw_tensor states(int64_t count) { return make(FW_F32, {count, kHeads, kDim, kDim}, 4, 0, 0); }

  fw_desc desc;
  fw_inputs in, grads;
  fw_outputs out, d;

 private:
  fw_tensor rows(fw_dtype type, float low, float high) {
    return make(type, {desc.B, desc.T, kHeads, kDim}, 4, low, high);
  }
  fw_tensor numbers(float low, float high) { return make(FW_F32, {desc.B, desc.T, kHeads, 0}, 3, low, high); }
  fw_tensor make(fw_dtype type, const int64_t (&shape)[4], int rank, float low, float high) {
    size_t count = 1;
    for (int i = 0; i < rank; ++i) count *= static_cast<size_t>(shape[i]);
    const size_t some = std::min<size_t>(count, 1 << 20), size = type == FW_F32 ? 4 : 2;
    std::vector<float> wide(some);
    for (float& x : wide) {
      seed_ = seed_ * 1664525U + 1013904223U;
      x = low + (high - low) * static_cast<float>(seed_ >> 8) * 0x1p-24F;
    }
    std::vector<uint16_t> narrow(size == 2 ? some : 0);
    for (size_t i = 0; i < narrow.size(); ++i) {
      if (type == FW_BF16) {
        fw::Bf16 y{};
        fw::round_to_bf16(1, &wide[i], &y);
        narrow[i] = y.bits;
      } else {
        fw::F16 y{};
        fw::round_to_f16(1, &wide[i], &y);
        narrow[i] = y.bits;
      }
    }
    const DeviceMemory& memory = memory_.emplace_back(count * size);
    const DeviceMemory pattern(some * size);
    pattern.from_host(size == 2 ? static_cast<const void*>(narrow.data()) : static_cast<const void*>(wide.data()),
                      some * size);
    for (size_t at = 0; at < count; at += some) {
      fw::device_copy(static_cast<char*>(memory.data()) + at * size, pattern.data(), std::min(some, count - at) * size,
                      nullptr);
    }
    fw::device_synchronize();
    return fw_tensor_of(memory.data(), type, rank, shape);
  }

  uint32_t seed_ = 7;
  std::deque<DeviceMemory> memory_;
};

// Device times of forward, and of both directions, with `change` made to each set.
void device_row(const char* what, const char* rule, int64_t B, int64_t T, fw_dtype type, bool backward,
                const std::function<void(Set&)>& change) {
  std::deque<Set> sets;
  for (int i = 0; i < 3; ++i) {
    sets.emplace_back(rule, B, T, type);
    change(sets.back());
  }
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  check(fw_workspace_query(&sets[0].desc, &sizes));
  const DeviceMemory space(std::max(sizes.forward, sizes.backward)), saved(backward ? sizes.saved : 1);
  const std::vector<double> forward = fw::device_times(5, 30, [&](int i, void* stream) {
    Set& s = sets[static_cast<size_t>(i % 3)];
    s.desc.stream = stream;
    check(fw_forward(&s.desc, &s.in, &s.out, nullptr, 0, space.data(), space.size()));
  });
  std::printf("%-44s %-16s %lldx%lldx%lld forward %.4f ms", what, rule, static_cast<long long>(B),
              static_cast<long long>(T), static_cast<long long>(kHeads), median(forward));
  if (backward) {
    const std::vector<double> both = fw::device_times(5, 30, [&](int i, void* stream) {
      Set& s = sets[static_cast<size_t>(i % 3)];
      s.desc.stream = stream;
      check(fw_forward(&s.desc, &s.in, &s.out, saved.data(), saved.size(), space.data(), space.size()));
      check(fw_backward(&s.desc, &s.in, &s.d, &s.grads, saved.data(), saved.size(), space.data(), space.size()));
    });
    std::printf(", forward + backward %.4f ms", median(both));
  }
  std::printf("\n");
}

// Microseconds of the calling thread for `body`, of which `calls` are queued between two waits.
double host_time(int calls, const std::function<void()>& body) {
  std::vector<double> rounds;
  for (int round = 0; round < 21; ++round) {
    fw::device_synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) body();
    rounds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() /
                     calls);
  }
  fw::device_synchronize();
  return median(rounds);
}

void host_rows(const char* rule) {
  constexpr int kCalls = 100;  // fewer than a stream holds, so that queueing does not wait
  Set s(rule, 1, 64, FW_BF16), t(rule, 1, 1, FW_BF16);
  t.in.initial_state = t.out.final_state = t.states(1);
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  check(fw_workspace_query(&s.desc, &sizes));
  const DeviceMemory space(std::max(sizes.forward, sizes.backward) + 64), saved(sizes.saved);
  fw_plan *plan = nullptr, *step = nullptr;
  check(fw_plan_create(&s.desc, 0, &plan));
  check(fw_plan_create(&t.desc, 1, &step));
  const auto row = [&](const char* what, const std::function<void()>& body) {
    std::printf("host %-44s %-16s %.2f us\n", what, rule, host_time(kCalls, body));
  };
  row("fw_plan_step", [&] { check(fw_plan_step(step, &t.in, &t.out, space.data(), space.size())); });
  row("fw_step, without a plan", [&] { check(fw_step(&t.desc, &t.in, &t.out, space.data(), space.size())); });
  row("fw_plan_forward, 64 tokens",
      [&] { check(fw_plan_forward(plan, &s.in, &s.out, nullptr, 0, space.data(), space.size())); });
  row("fw_forward, without a plan",
      [&] { check(fw_forward(&s.desc, &s.in, &s.out, nullptr, 0, space.data(), space.size())); });
  row("fw_plan_forward that saves, fw_plan_backward", [&] {
    check(fw_plan_forward(plan, &s.in, &s.out, saved.data(), saved.size(), space.data(), space.size()));
    check(fw_plan_backward(plan, &s.in, &s.d, &s.grads, saved.data(), saved.size(), space.data(), space.size()));
  });
  fw_plan_destroy(plan);
  fw_plan_destroy(step);
}

}  // namespace

int main(int argc, char** argv) {
  const char* const rule = argc > 1 ? argv[1] : "gated_deltanet";
  host_rows(rule);
  device_row("bf16", rule, 4, 4096, FW_BF16, true, [](Set&) {});
  device_row("float16", rule, 4, 4096, FW_F16, true, [](Set&) {});
  for (const int64_t interval : {int64_t{64}, int64_t{256}, int64_t{1024}}) {
    char what[64];
    std::snprintf(what, sizeof(what), "bf16, a checkpoint every %lld tokens", static_cast<long long>(interval));
    device_row(what, rule, 4, 4096, FW_BF16, false, [&](Set& s) {
      s.desc.checkpoints.interval = interval;
      s.out.checkpoints = s.states(4 * 4096 / interval);
    });
  }
  device_row("bf16", rule, 1, 32768, FW_BF16, false, [](Set&) {});
  device_row("bf16, a checkpoint every 1024 tokens", rule, 1, 32768, FW_BF16, false, [](Set& s) {
    s.desc.checkpoints.interval = 1024;
    s.out.checkpoints = s.states(32);
  });
  return 0;
}
