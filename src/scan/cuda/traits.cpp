#include "scan/cuda/traits.h"

#include "base/error.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

uint64_t address(const void* p) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p)); }

// Strides of rows whose offsets in a chunk are 32-bit numbers.
bool near_rows(int64_t stride_t) { return stride_t >= 0 && stride_t < (int64_t{1} << 31) / (4 * kChunk); }

// at: the address; strides: all of them, joined by "or".
TensorTraits traits_of(uint64_t at, uint64_t strides, int64_t stride_t, int64_t dim, bool bf16, bool shared) {
  TensorTraits t;
  t.present = true, t.bf16 = bf16, t.shared = shared;
  t.aligned = ((strides * (bf16 ? 2 : 4) | at) & 15) == 0;
  t.vec16 = bf16 && ((strides | static_cast<uint64_t>(dim)) & 7) == 0 && (at & 15) == 0;
  t.vec2 = ((strides | static_cast<uint64_t>(dim)) & 1) == 0 && (at & (bf16 ? 3 : 7)) == 0;
  t.near = near_rows(stride_t);
  return t;
}

StateTraits state_traits(const StateArg& a, int K, int V) {
  StateTraits s;
  s.present = a.data != nullptr;
  if (!s.present) return s;
  s.bf16 = a.bf16 != 0;
  s.by_channels = state_access(a, K, V, token_channels(K), V) == StateAccess::kChannels;
  s.whole_heads = s.by_channels && a.stride_v == K && (address(a.data) & 15) == 0 &&
                  ((a.stride_n | a.stride_h) * (s.bf16 ? 2 : 4)) % 16 == 0;
  return s;
}
// Of a contiguous state where cudaMalloc puts it.
StateTraits contiguous_state(const Plan& plan) {
  StateTraits s;
  s.present = true;
  s.by_channels = plan.state_layout != FW_STATE_K_FIRST && plan.K % token_channels(static_cast<int>(plan.K)) == 0;
  s.whole_heads = s.by_channels && (plan.K * plan.V * 4) % 16 == 0;
  return s;
}

constexpr TokenArg TokenArgs::*kTokenArgs[] = {
#define FW_TOKEN(name, heads, width, used) &TokenArgs::name,
#include "rule/tokens.def"
};

}  // namespace

TensorTraits tensor_traits(const TokenArg& a, int64_t dim) {
  if (a.data == nullptr) return {};
  return traits_of(address(a.data), static_cast<uint64_t>(a.stride_b | a.stride_t | a.stride_h), a.stride_t, dim,
                   a.bf16 != 0, a.divisor != 1);
}
TensorTraits contiguous_traits(int64_t T, int64_t heads, int64_t HV, int64_t dim, bool bf16) {
  const int64_t stride_t = heads * dim;
  return traits_of(0, static_cast<uint64_t>(dim | stride_t | T * stride_t), stride_t, dim, bf16, heads != HV);
}
TokenTraits token_traits(const Rule& rule, int64_t K, int64_t V, const TokenArgs& tensors) {
  TokenTraits all;
  const auto specs = token_specs(rule);
  for (size_t i = 0; i < kTokenTensors; ++i) all[i] = tensor_traits(tensors.*kTokenArgs[i], specs[i].channels(K, V));
  return all;
}

Problem problem_shape(const Plan& plan) {
  Problem x;
  x.rule = plan.rule;
  x.scale = static_cast<float>(plan.scale);
  x.B = static_cast<int32_t>(plan.B);
  x.T = static_cast<int32_t>(plan.T);
  x.H = static_cast<int32_t>(plan.H);
  x.HV = static_cast<int32_t>(plan.HV);
  x.K = static_cast<int32_t>(plan.K);
  x.V = static_cast<int32_t>(plan.V);
  x.group = static_cast<int32_t>(plan.group());
  x.tokens = plan.tokens();
  x.sequences.N = static_cast<int32_t>(plan.N);
  x.sequences.T = x.T;
  return x;
}
CallTraits problem_traits(const Problem& x, int k_tile, int64_t chunks, int sm_count) {
  CallTraits t;
  t.rule = x.rule;
  t.K = x.K, t.V = x.V, t.k_tile = k_tile, t.group = x.group;
  t.N = x.sequences.N, t.T = x.sequences.T, t.HV = x.HV, t.chunks = chunks;
  t.sm_count = sm_count;
  t.packed = x.sequences.offsets != nullptr;
  t.precond_rows = x.precond_rows != nullptr;
  t.fused = x.fused.any();
  t.in = token_traits(x.rule, x.K, x.V, x.in);
  t.has_m = x.m != nullptr;
  return t;
}
CallTraits call_traits(const Problem& x, const DevicePlan& device) {
  CallTraits t = problem_traits(x, device.k_tile, device.chunks, device.sm_count);
  t.gpu = device.arch;
  t.raw = device.direct;
  t.cut = device.cut;
  t.z = device.z_tile;
  t.lo_parts = device.forward.hi_lo.lo_parts.bytes > 0;
  t.precond_rows = device.saved.precond_rows.bytes > 0;
  return t;
}
bool fuses_forward(const Problem& x, const DevicePlan& device, const TokenShape& shape, const TokenArg& o) {
  const auto takes = [&](const TokenArg& a, int64_t dim) {
    return tma_compatible(a, shape.B, shape.T, x.HV / a.divisor, dim);
  };
  return device.fused_forward && !x.fused.any() && takes(x.in.q, x.K) && takes(x.in.k, x.K) && takes(x.in.v, x.V) &&
         takes(o, x.V);
}
void add_gradients(const GradientArgs& args, CallTraits& traits) {
  traits.d = token_traits(traits.rule, traits.K, traits.V, args.grads.d);
  traits.d_o = tensor_traits(args.d_o, traits.V);
}
void add_states(const TokenForwardArgs& args, CallTraits& traits) {
  traits.token_slots = args.slots.tokens != nullptr;
  traits.starts = args.slots.own != nullptr && args.slots.skips == 0;
  traits.ring = args.ring.data != nullptr;
  traits.initial_state = state_traits(args.problem.initial_state, traits.K, traits.V);
  traits.final_state = state_traits(args.final_state, traits.K, traits.V);
}

CallTraits expected_traits(const Plan& plan, const DevicePlan& device) {
  CallTraits t = call_traits(problem_shape(plan), device);
  t.packed = plan.packed;
  const auto specs = token_specs(plan.rule);
  const auto gates = gate_specs(plan.rule, plan.gates);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenSpec& spec = specs[i];
    if (!spec.used) continue;
    const bool key_row = spec.heads == TokenHeads::kKey && !spec.one();
    const int64_t heads = spec.heads == TokenHeads::kKey ? plan.H : plan.HV, dim = spec.channels(plan.K, plan.V);
    bool bf16 = plan.bf16_io && !spec.one() && !(plan.f32_gates && i == static_cast<size_t>(TokenIndex::g)),
         d_bf16 = bf16 && (!key_row || plan.H == plan.HV);
    // Values made of logits, and what becomes gradients of logits.
    for (const GateSpec& gate : gates) {
      if (gate.logits() && gate.token == i) bf16 = d_bf16 = bf16_values(plan, device.chunk_form, gate);
    }
    t.in[i] = contiguous_traits(plan.T, heads, plan.HV, dim, bf16);
    t.d[i] = contiguous_traits(plan.T, key_row ? plan.HV : heads, plan.HV, dim, d_bf16);
  }
  t.d_o = t.input(TokenIndex::v);
  t.one_kernel = device.fused_forward && plan.bf16_io;
  t.token_slots = plan.slots.tokens != nullptr;
  t.starts = plan.slots.own != nullptr && !plan.slots.skips;
  t.ring = plan.ring && plan.slots.skips;
  t.initial_state = t.final_state = contiguous_state(plan);
  return t;
}

bool bf16_values(const Plan& plan, bool chunk_form, const GateSpec& gate) {
  return chunk_form && plan.bf16_io && !token_specs(plan.rule)[gate.token].one();
}

std::string to_string(const CallTraits& traits) {
  constexpr const char* kNames[] = {
#define FW_TOKEN(name, heads, width, used) #name,
#include "rule/tokens.def"
  };
  std::string text =
      fmt::format("{}; K {} V {} K tile {} group {} N {} T {} HV {} chunks {}", to_string(traits.rule), traits.K,
                  traits.V, traits.k_tile, traits.group, traits.N, traits.T, traits.HV, traits.chunks);
  const auto flag = [&](bool is, const char* name) {
    if (is) text += fmt::format(" {}", name);
  };
  const auto tensor = [&](const char* name, const TensorTraits& t) {
    if (!t.present) return;
    text += fmt::format("; {} {}", name, t.bf16 ? "bf16" : "float32");
    flag(t.shared, "shared"), flag(t.aligned, "aligned"), flag(t.vec16, "vec16"), flag(t.vec2, "vec2");
    flag(!t.near, "far");
  };
  flag(traits.packed, "packed"), flag(traits.raw, "raw"), flag(traits.cut, "cut"), flag(traits.z, "z"),
      flag(traits.lo_parts, "lo_parts");
  flag(traits.precond_rows, "precond_rows"), flag(traits.fused, "fused"), flag(traits.has_m, "m");
  flag(traits.ring, "ring");
  flag(traits.one_kernel, "one_kernel");
  for (size_t i = 0; i < kTokenTensors; ++i) tensor(kNames[i], traits.in[i]);
  for (size_t i = 0; i < kTokenTensors; ++i) tensor(fmt::format("d_{}", kNames[i]).c_str(), traits.d[i]);
  tensor("d_o", traits.d_o);
  return text;
}

StateAccess state_access(const StateArg& a, int K, int V, int channels, int tile) {
  if (a.data == nullptr) return StateAccess::kAbsent;
  const int64_t size = a.bf16 != 0 ? 2 : 4, vector = channels * size < 16 ? channels * size : 16;
  const int64_t base = static_cast<int64_t>(address(a.data)) | (a.stride_n | a.stride_h) * size;
  if (a.stride_k == 1 && K % channels == 0 && ((base | a.stride_v * size) & (vector - 1)) == 0)
    return StateAccess::kChannels;
  if (a.stride_v == 1 && tile * size >= 16 && V * size % 16 == 0 && ((base | a.stride_k * size) & 15) == 0)
    return StateAccess::kStaged;
  return StateAccess::kElements;
}

}  // namespace fw::cuda
