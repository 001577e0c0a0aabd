// The fused forward (scan/cuda/sm90/fused) against the recurrence token by token in double, from the same inputs.
// Lengths around a chunk's end, packed sequences, grouped heads and states. Every step and norm that it takes, and
// decays from none to 0.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "scan/cuda/kernels.h"
#include "test_numbers.h"

namespace fw::cuda {
namespace {

using testing::from_bf16;
using testing::kNan;
using testing::Random;
using testing::to_bf16;

constexpr int kDim = 128;
int failures = 0;

struct FusedCase {
  std::string name;
  std::vector<int> lengths;
  bool packed = false;
  int H = 1, HV = 1;
  bool has_initial = true, has_final = true, state_bf16 = false, value_first = true;
  Norm norm = Norm::kL2;
  double norm_eps = 1e-6;
  Gain gain = Gain::kGate;
  bool has_decay = true;
  double decay = 1;           // factor of the log-decays
  int resets = 0;             // every so many tokens the decay is 0; 0: never
  double alike = 1;           // how far keys are from one; 0: they are all the same
  bool bf16_numbers = false;  // g and beta
  bool damaged = false;       // every second sequence has no numbers in its rows
  double bound = 6e-3;
};

std::vector<FusedCase> fused_cases() {
  const std::vector<int> mixed = {0, 130, 64, 0, 1, 63, 65, 0};
  std::vector<FusedCase> all;
  const auto add = [&](const std::string& name, std::vector<int> lengths, auto change) {
    FusedCase c{name, std::move(lengths)};
    change(c);
    all.push_back(c);
  };
  const auto nothing = [](FusedCase&) {};
  for (const int length : {1, 63, 64, 65, 130}) add("length " + std::to_string(length), {length}, nothing);
  add("no tokens", {0, 0}, nothing);
  add("9 chunks", {570}, nothing);
  add("batch", {130, 130}, [](FusedCase& c) { c.HV = 2, c.H = 2; });
  add("packed", mixed, [](FusedCase& c) { c.packed = true, c.HV = c.H = 2; });
  add("packed, K first, bf16 states", mixed,
      [](FusedCase& c) { c.packed = c.state_bf16 = true, c.value_first = false; });
  add("packed, neighbours of no numbers", {70, 3, 64, 130, 1, 65}, [](FusedCase& c) { c.packed = c.damaged = true; });
  add("grouped heads", {130, 130}, [](FusedCase& c) { c.H = 2, c.HV = 4; });
  add("packed, grouped heads", {70, 3}, [](FusedCase& c) { c.packed = true, c.HV = 4; });
  add("no states", {130}, [](FusedCase& c) { c.has_initial = c.has_final = false; });
  add("no decay", {130}, [](FusedCase& c) { c.has_decay = false; });
  add("weak decay", {193}, [](FusedCase& c) { c.decay = 0.01; });
  add("strong decay", {193}, [](FusedCase& c) { c.decay = 20; });
  add("decays of 0", {193}, [](FusedCase& c) { c.resets = 37; });
  add("decays of 0 at chunk ends", {193}, [](FusedCase& c) { c.resets = 32; });
  add("every decay 0", {130}, [](FusedCase& c) { c.resets = 1; });
  add("equal keys", {193}, [](FusedCase& c) { c.alike = 0, c.decay = 0.01, c.bound = 3e-2; });
  add("nearly equal keys", {193}, [](FusedCase& c) { c.alike = 1e-2, c.decay = 0.01, c.bound = 3e-2; });
  add("bf16 gates", {130}, [](FusedCase& c) { c.bf16_numbers = true; });
  add("eps 0", {65}, [](FusedCase& c) { c.norm_eps = 0; });
  add("kaczmarz", {130}, [](FusedCase& c) { c.norm = Norm::kRaw, c.gain = Gain::kKaczmarz; });
  add("kaczmarz, unit keys", {130}, [](FusedCase& c) { c.gain = Gain::kKaczmarz; });
  add("longhorn", {130}, [](FusedCase& c) { c.norm = Norm::kRaw, c.gain = Gain::kLonghorn; });
  add("gain one", {130}, [](FusedCase& c) { c.gain = Gain::kOne; });
  return all;
}

// Tensors of a case on the host. Rows of a damaged sequence are no numbers.
struct FusedInputs {
  int N, tokens = 0;
  std::vector<int32_t> offsets{0}, chunk_base{0};
  std::vector<uint16_t> q, k, v;
  std::vector<float> g, step, initial;
  FusedInputs(const FusedCase& c, uint64_t seed) : N(static_cast<int>(c.lengths.size())) {
    for (const int length : c.lengths) {
      offsets.push_back(tokens += length);
      chunk_base.push_back(chunk_base.back() + (length + 63) / 64);
    }
    Random random{seed};
    const auto rows = [&](int heads) {
      std::vector<uint16_t> x(static_cast<size_t>(tokens) * heads * kDim);
      for (uint16_t& y : x) y = to_bf16(random(1.5));
      return x;
    };
    q = rows(c.H), k = rows(c.H), v = rows(c.HV);
    const double size = c.norm == Norm::kRaw ? 0.1 : 1;  // keys that are not normalised are near 1 in length
    for (size_t i = 0; i < k.size(); ++i) {
      const double common = from_bf16(k[i % (static_cast<size_t>(c.H) * kDim)]);
      k[i] = to_bf16(size * (c.alike == 1 ? from_bf16(k[i]) : common + c.alike * random(1)));
    }
    for (int i = 0; i < tokens * c.HV; ++i) {
      double log_decay = -c.decay * std::log1p(std::exp(random(2)));
      if (c.resets > 0 && (i / c.HV + 1) % c.resets == 0) log_decay = -std::numeric_limits<double>::infinity();
      double gate = 0.5 + random(0.5);
      if (c.bf16_numbers) log_decay = from_bf16(to_bf16(log_decay)), gate = from_bf16(to_bf16(gate));
      g.push_back(static_cast<float>(log_decay)), step.push_back(static_cast<float>(gate));
    }
    for (size_t i = 0; i < static_cast<size_t>(N) * c.HV * kDim * kDim; ++i) {
      const double x = random(0.5);
      initial.push_back(static_cast<float>(c.state_bf16 ? from_bf16(to_bf16(x)) : x));
    }
    for (int n = 1; c.damaged && n < N; n += 2) {
      for (int t = offsets[n]; t < offsets[n + 1]; ++t) {
        std::fill_n(q.begin() + static_cast<int64_t>(t) * c.H * kDim, c.H * kDim, uint16_t{0x7fc0});
        std::fill_n(k.begin() + static_cast<int64_t>(t) * c.H * kDim, c.H * kDim, uint16_t{0x7fc0});
        std::fill_n(v.begin() + static_cast<int64_t>(t) * c.HV * kDim, c.HV * kDim, uint16_t{0x7fc0});
        std::fill_n(g.begin() + static_cast<int64_t>(t) * c.HV, c.HV, kNan);
        std::fill_n(step.begin() + static_cast<int64_t>(t) * c.HV, c.HV, kNan);
      }
    }
  }
};

struct FusedOutputs {
  std::vector<uint16_t> o;
  std::vector<float> final_state;
  std::vector<uint16_t> final_bf16;
};

size_t fused_state_at(const FusedCase& c, int n, int hv, int k, int v) {
  return (static_cast<size_t>(n) * c.HV + hv) * kDim * kDim + (c.value_first ? v * kDim + k : k * kDim + v);
}

FusedOutputs run_fused(const FusedCase& c, const FusedInputs& in) {
  DeviceBuffer<uint16_t> q(in.q), k(in.k), v(in.v), o(in.v.size());
  DeviceBuffer<int32_t> offsets(in.offsets), chunk_base(in.chunk_base);
  const auto narrow = [](const std::vector<float>& x) {
    std::vector<uint16_t> y;
    for (const float f : x) y.push_back(to_bf16(f));
    return y;
  };
  DeviceBuffer<float> g(in.g), step(in.step), initial(in.initial), final_state(in.initial.size());
  DeviceBuffer<uint16_t> g16(narrow(in.g)), step16(narrow(in.step)), initial16(narrow(in.initial)),
      final16(in.initial.size());
  FusedForwardArgs args;
  Problem& x = args.problem;
  x.rule.decay = c.has_decay ? Decay::kScalar : Decay::kNone;
  x.rule.gain = c.gain;
  x.rule.q_norm = x.rule.k_norm = c.norm;
  x.rule.norm_eps = c.norm_eps;
  x.scale = 0.125f;
  x.B = c.packed ? 1 : in.N, x.T = c.packed ? in.tokens : c.lengths[0];
  x.H = c.H, x.HV = c.HV, x.K = x.V = kDim, x.group = c.HV / c.H, x.tokens = in.tokens;
  x.sequences.N = in.N, x.sequences.T = x.T, x.sequences.chunks = (x.T + 63) / 64;
  if (c.packed) x.sequences.offsets = offsets.data(), x.sequences.chunk_base = chunk_base.data();
  const auto tensor = [&](void* data, int heads, int dim, bool bf16) {
    return TokenArg{data, int64_t{x.T} * heads * dim, int64_t{heads} * dim, dim, bf16 ? 1 : 0, c.HV / heads};
  };
  x.in.q = tensor(q.data(), c.H, kDim, true), x.in.k = tensor(k.data(), c.H, kDim, true);
  x.in.v = tensor(v.data(), c.HV, kDim, true), args.o = tensor(o.data(), c.HV, kDim, true);
  const auto number = [&](DeviceBuffer<float>& wide, DeviceBuffer<uint16_t>& half) {
    return tensor(c.bf16_numbers ? static_cast<void*>(half.data()) : wide.data(), c.HV, 1, c.bf16_numbers);
  };
  if (c.has_decay) x.in.g = number(g, g16);
  if (c.gain != Gain::kOne) x.in.beta = number(step, step16);
  const auto state = [&](DeviceBuffer<float>& wide, DeviceBuffer<uint16_t>& half) {
    const int64_t head = kDim * kDim;
    return StateArg{c.state_bf16 ? static_cast<void*>(half.data()) : wide.data(),
                    c.HV * head,
                    head,
                    c.value_first ? 1 : kDim,
                    c.value_first ? kDim : 1,
                    c.state_bf16 ? 1 : 0};
  };
  if (c.has_initial) args.initial_state = state(initial, initial16);
  if (c.has_final) args.final_state = state(final_state, final16);
  args.shape = {x.B, x.T};
  fused_forward(args, nullptr);
  return {o.download(), final_state.download(), final16.download()};
}

struct Difference {
  double square = 0, of = 0;
  bool finite = true;
  void add(double got, double expected) {
    if (!std::isfinite(got)) finite = false;
    square += (got - expected) * (got - expected), of += expected * expected;
  }
  double relative() const { return !finite ? HUGE_VAL : of > 0 ? std::sqrt(square / of) : std::sqrt(square); }
};

// One head of a sequence by the recurrence: the worst of o and of the final state.
void compare_head(const FusedCase& c, const FusedInputs& in, const FusedOutputs& got, int n, int hv, double& of_o,
                  double& of_state) {
  std::vector<double> S(kDim * kDim, 0.0), k(kDim), q(kDim);
  for (int i = 0; i < kDim && c.has_initial; ++i)
    for (int v = 0; v < kDim; ++v) S[i * kDim + v] = in.initial[fused_state_at(c, n, hv, i, v)];
  Difference o, last;
  const int h = hv / (c.HV / c.H);
  for (int t = in.offsets[n]; t < in.offsets[n + 1]; ++t) {
    double k2 = 0, q2 = 0;
    for (int i = 0; i < kDim; ++i) {
      const size_t at = (static_cast<size_t>(t) * c.H + h) * kDim + i;
      k[i] = from_bf16(in.k[at]), q[i] = from_bf16(in.q[at]), k2 += k[i] * k[i], q2 += q[i] * q[i];
    }
    const bool l2 = c.norm == Norm::kL2;
    const double kn = l2 ? 1 / std::sqrt(k2 + c.norm_eps) : 1, qn = 0.125 * (l2 ? 1 / std::sqrt(q2 + c.norm_eps) : 1);
    k2 *= kn * kn;
    const double gate = in.step[static_cast<size_t>(t) * c.HV + hv];
    const double step = c.gain == Gain::kOne        ? 1
                        : c.gain == Gain::kKaczmarz ? gate / (k2 + 1e-6)
                        : c.gain == Gain::kLonghorn ? gate / (1 + gate * k2)
                                                    : gate;
    const double decay = c.has_decay ? std::exp(static_cast<double>(in.g[static_cast<size_t>(t) * c.HV + hv])) : 1;
    for (int v = 0; v < kDim; ++v) {
      double u = 0, out = 0;
      for (int i = 0; i < kDim; ++i) u += (S[i * kDim + v] *= decay) * k[i] * kn;
      const size_t at = (static_cast<size_t>(t) * c.HV + hv) * kDim + v;
      u = step * (from_bf16(in.v[at]) - u);
      for (int i = 0; i < kDim; ++i) out += (S[i * kDim + v] += k[i] * kn * u) * q[i] * qn;
      o.add(from_bf16(got.o[at]), out);
    }
  }
  for (int i = 0; i < kDim && c.has_final; ++i) {
    for (int v = 0; v < kDim; ++v) {
      const size_t at = fused_state_at(c, n, hv, i, v);
      last.add(c.state_bf16 ? from_bf16(got.final_bf16[at]) : got.final_state[at], S[i * kDim + v]);
    }
  }
  of_o = std::max(of_o, o.relative()), of_state = std::max(of_state, last.relative());
}

void test_fused(const FusedCase& c, uint64_t seed) {
  const FusedInputs in(c, seed);
  const FusedOutputs got = run_fused(c, in), again = run_fused(c, in);
  double o = 0, state = 0;
  for (int n = 0; n < in.N; ++n) {
    if (c.damaged && n % 2 == 1) continue;
    for (int hv = 0; hv < c.HV; ++hv) compare_head(c, in, got, n, hv, o, state);
  }
  const bool same = got.o == again.o && got.final_bf16 == again.final_bf16 &&
                    std::equal(got.final_state.begin(), got.final_state.end(), again.final_state.begin(),
                               [](float a, float b) { return a == b || (a != a && b != b); });
  const bool good = o <= c.bound && state <= c.bound && same;
  if (!good) ++failures;
  std::printf("%-34s o %.1e  state %.1e%s%s\n", c.name.c_str(), o, state, same ? "" : "  OTHER BITS",
              good ? "" : "  FAILED");
  std::fflush(stdout);
}

}  // namespace
}  // namespace fw::cuda

int main(int argc, char** argv) {
  if (!fw::cuda::hopper()) return fw::cuda::kNotRun;
  uint64_t index = 0;
  for (const fw::cuda::FusedCase& c : fw::cuda::fused_cases()) {
    ++index;
    if (!fw::cuda::testing::in_share(index - 1)) continue;
    if (argc > 1 && c.name.find(argv[1]) == std::string::npos) continue;
    fw::cuda::test_fused(c, index);
  }
  std::printf(fw::cuda::failures == 0 ? "all good\n" : "%d FAILED\n", fw::cuda::failures);
  return fw::cuda::failures == 0 ? 0 : 1;
}
