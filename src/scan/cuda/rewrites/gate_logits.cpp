#include "scan/cuda/rewrites/gate_logits.h"

#include <algorithm>

#include "base/error.h"
#include "scan/cuda/pipeline.h"
#include "scan/cuda/token_arg.h"
#include "scan/cuda/token_cut.h"

namespace fw::cuda {
namespace {

const TokenTensor<float>& tensor_of(const Inputs<float>& in, const GateSpec& spec) {
  return in.*kInputTokens<float>[spec.token];
}

// What a log-decay has besides its logits; nothing for other gates.
DecayParameters<float> parameters_of(const Inputs<float>& in, const GateSpec& spec) {
  if (!spec.decay) return {};
  return spec.token == static_cast<size_t>(TokenIndex::g) ? in.decay : in.precond_decay;
}
HeadArg head_arg(const HeadTensor<float>& t) { return {t.data, t.stride_h, t.stride_k}; }

char* at(void* workspace, const Region& region) { return static_cast<char*>(workspace) + region.offset; }

// All tokens of a packed batch are one row of it.
GateTokens tokens_of(const Plan& plan) {
  return {plan.tokens(), plan.packed ? plan.tokens() : plan.T, token_end(plan)};
}

// Where FusedGates has a gate's law and the address of its values; null: kernels never form it themselves.
struct FusedMembers {
  GateLaw<float> FusedGates::*law = nullptr;
  float* FusedGates::Numbers::*values = nullptr;
};
FusedMembers members_of(const GateSpec& spec) {
  using Gates = FusedGates;
  switch (static_cast<TokenIndex>(spec.token)) {
    case TokenIndex::g:
      return {&Gates::g, &Gates::Numbers::g};
    case TokenIndex::erase_gate:
      return {&Gates::erase_gate, &Gates::Numbers::erase_gate};
    case TokenIndex::write_gate:
      return {&Gates::write_gate, &Gates::Numbers::write_gate};
    case TokenIndex::beta:
      return {&Gates::beta, &Gates::Numbers::beta};
    case TokenIndex::lambda:
      return {&Gates::lambda, &Gates::Numbers::lambda};
    default:
      return {};
  }
}
template <class Fused>
auto* law_in(Fused& fused, const GateSpec& spec) {
  const FusedMembers members = members_of(spec);
  return members.law != nullptr ? &(fused.*members.law) : nullptr;
}

// Of the token form: any but those of preconditioners and of other numbers, or means of channels, which other kernels
// and the buffers read.
FusedGates token_activations(const Plan& plan) {
  FusedGates fused;
  if (!plan.bits_of_steps && !few_tokens(plan.packed, plan.T, plan.slots.tokens != nullptr, plan.slots.own != nullptr))
    return fused;
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    if (!spec.logits() || !token_specs(plan.rule)[spec.token].used) continue;
    GateLaw<float>* const law = law_in(fused, spec);
    if (law == nullptr || law == &fused.lambda || plan.rule.erase == fw::Gate::kAveraged ||
        plan.rule.write == fw::Gate::kAveraged)
      return {};
    *law = gate_law<float>(spec);
  }
  return fused;
}

// Of the chunk form: of channels, in bf16 ...
FusedGates channel_activations(const Plan& plan) {
  FusedGates fused;
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    GateLaw<float>* const law = law_in(fused, spec);
    if (law == nullptr || !token_specs(plan.rule)[spec.token].used || token_specs(plan.rule)[spec.token].one())
      continue;
    if (!spec.logits() || !bf16_values(plan, true, spec)) return {};
    *law = gate_law<float>(spec);
  }
  return fused;
}
// ... and of one number, of which the slope follows from the value alone.
FusedGates scalar_activations(const Plan& plan) {
  FusedGates fused;
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    const TokenSpec token = token_specs(plan.rule)[spec.token];
    if (!spec.logits() || !token.used || !token.one()) continue;
    GateLaw<float>* const law = law_in(fused, spec);
    if (law == nullptr || spec.given == GateActivation::kLowerBound) return {};
    *law = gate_law<float>(spec);
  }
  return fused;
}
// The laws of the gates that are of numbers, or not.
FusedGates only(const Plan& plan, const FusedGates& all, bool numbers) {
  FusedGates some = all;
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    GateLaw<float>* const law = law_in(some, spec);
    if (law != nullptr && token_specs(plan.rule)[spec.token].one() != numbers) *law = {};
  }
  return some;
}

// Whether a gate is one of them.
bool is_fused(const FusedGates& fused, const GateSpec& gate) {
  const GateLaw<float>* law = law_in(fused, gate);
  return law != nullptr && law->given != GateActivation::kValue;
}

// Laws, without their parameters, of the logits that kernels may take as they are: log-decays and gates of channels in
// bf16, all or none, and those of one number a token, all or none. In the token form any, or none: of few_tokens()
// (token_cut.h), and where bits are those of steps.
FusedGates fused_activations(const Plan& plan, bool chunk_form) {
  FusedGates fused;
  if (plan.f32_gates) return fused;  // their logits are float32 rows
  if (!chunk_form) return token_activations(plan);
  fused = channel_activations(plan);
  const FusedGates numbers = scalar_activations(plan);
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    if (is_fused(numbers, spec)) *law_in(fused, spec) = *law_in(numbers, spec);
  }
  return fused;
}

// Of these the ones that they do take. traits: of the call, with the logits in place of values (backward: and the
// buffers of gradients).
FusedGates fused_in_kernels(const Plan& plan, const DevicePlan& device, const FusedGates& laws,
                            const CallTraits& traits, bool backward, bool made) {
  if (!laws.any()) return {};
  if (!device.chunk_form) return backward ? FusedGates{} : laws;
  if (device.k256) return {};
  FusedGates fused = only(plan, laws, false);
  if (fused.any() && (device.direct || !prepare_fuses_gates(traits) || (backward && !gradients_fuse_gates(traits)))) {
    fused = {};
  }
  // Numbers, if no other gate wants the kernels in front and after anyhow.
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    const TokenSpec token = token_specs(plan.rule)[spec.token];
    if (spec.logits() && token.used && !is_fused(token.one() ? laws : fused, spec)) return fused;
  }
  // The kernel in front makes the values of direct_rule(), for the warps that would are what that scan waits for, and
  // where value heads share a block of prepare, which has no registers for it.
  if (!made && (device.direct || !prepare_fuses_scalars(traits))) return fused;
  if (backward && !device.direct && !gradients_fuse_scalars(traits)) return fused;
  return laws;
}

// ---- Of fw_plan_text

// Whether logits of numbers (or of channels) are among them.
bool fuses_any(const Plan& plan, const FusedGates& fused, bool numbers) {
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    if (spec.logits() && is_fused(fused, spec) && token_specs(plan.rule)[spec.token].one() == numbers) return true;
  }
  return false;
}
// Whether gates are left that are logits and that they do not.
bool stores_gates(const Plan& plan, const FusedGates& fused) {
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    if (spec.logits() && !is_fused(fused, spec)) return true;
  }
  return false;
}
// Whether backward makes values of logits once more: forward saves those of numbers, in the chunk form.
bool makes_gates_again(const Plan& plan, bool chunk_form, const FusedGates& fused) {
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    const bool saved = chunk_form && token_specs(plan.rule)[spec.token].one();
    if (spec.logits() && !saved && !is_fused(fused, spec)) return true;
  }
  return false;
}
// Whether there are log-decays that are logits, whose a_log and dt_bias may want sums after backward.
bool has_decay_logits(const Plan& plan) {
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    if (spec.logits() && spec.decay) return true;
  }
  return false;
}

}  // namespace

const RewriteLine kGateLogitsRewrite = {
    [](const Plan& plan) {
      const auto specs = gate_specs(plan.rule, plan.gates);
      return std::any_of(specs.begin(), specs.end(), [](const GateSpec& spec) { return spec.logits(); });
    },
    nullptr, 1,
    [](const RewriteContext& context) -> std::unique_ptr<Rewrite> { return std::make_unique<GateLogits>(context); }};

GateLogits::GateLogits(const RewriteContext& context)
    : plan_(context.plan),
      device_(context.kernels.front().device),
      last_(context.last),
      kernels_bytes_(context.saved_bytes),
      laws_(fused_activations(plan_, device_.chunk_form)) {
  const Plan& plan = plan_;
  const bool chunk_form = device_.chunk_form;
  constexpr size_t kAlign = 1024;
  const auto take = [](size_t& used, int64_t bytes) {
    const Region region{used, static_cast<size_t>(bytes)};
    used += (region.bytes + kAlign - 1) / kAlign * kAlign;
    return region;
  };
  const auto tokens = token_specs(plan.rule);
  const auto specs = gate_specs(plan.rule, plan.gates);
  const auto numbers = [&](const GateSpec& spec) {  // of all tokens, with the most heads that the tensor may have
    const TokenSpec& token = tokens[spec.token];
    return plan.tokens() * (token.heads == TokenHeads::kKey ? plan.H : plan.HV) * token.channels(plan.K, plan.V);
  };
  constexpr int64_t kFloat = sizeof(float);
  for (size_t i = 0; i < kGates; ++i) {
    Gate& gate = gates_[i];
    gate.spec = specs[i];
    if (!gate.spec.logits()) continue;
    gate.bf16 = bf16_values(plan, chunk_form, gate.spec);
    gate.apart = gate.spec.decay || tokens[gate.spec.token].one();
    gate.values = take(forward_bytes_, numbers(gate.spec) * (gate.bf16 ? 2 : kFloat));
    if (chunk_form && tokens[gate.spec.token].one()) gate.saved = take(saved_bytes_, numbers(gate.spec) * kFloat);
  }
  backward_bytes_ = forward_bytes_;
  for (Gate& gate : gates_) {
    if (!gate.spec.logits()) continue;
    if (gate.apart) gate.grads = take(backward_bytes_, numbers(gate.spec) * (gate.bf16 ? 2 : kFloat));
    const TokenSpec& token = tokens[gate.spec.token];
    if (!gate.spec.decay) continue;
    const int64_t heads = token.heads == TokenHeads::kKey ? plan.H : plan.HV, channels = token.channels(plan.K, plan.V);
    const int64_t fused = is_fused(laws_, gate.spec) ? device_.chunks * heads * 2 * channels * kFloat : 0;
    gate.parts = take(backward_bytes_, std::max(gate_parts_bytes(heads, channels), fused));
  }
}

GateArg GateLogits::gate_arg(const Gate& gate, const Inputs<float>& in) const {
  const TokenTensor<float>& x = tensor_of(in, gate.spec);
  const DecayParameters<float> parameters = parameters_of(in, gate.spec);
  GateArg arg;
  arg.law = gate_law<float>(gate.spec);
  arg.heads = static_cast<int32_t>(x.heads);
  arg.channels = static_cast<int32_t>(x.dim);
  arg.x = token_arg(plan_, x);
  arg.a_log = head_arg(parameters.a_log);
  arg.dt_bias = head_arg(parameters.dt_bias);
  return arg;
}

char* GateLogits::saved_gates(const void* saved) const {
  if (saved == nullptr || kernels_bytes_ == 0) return nullptr;
  return static_cast<char*>(const_cast<void*>(saved)) + saved_from(kernels_bytes_);
}

FusedGates GateLogits::fused(const Inputs<float>& in, const Inputs<float>* grads, bool saves) const {
  if (!last_) return {};
  FusedGates laws = laws_;
  laws.a_log = head_arg(in.decay.a_log);
  laws.dt_bias = head_arg(in.decay.dt_bias);
  CallTraits traits = call_traits(problem_shape(plan_), device_);
  traits.in = token_traits(plan_.rule, plan_.K, plan_.V, token_args(plan_, in));
  traits.one_kernel = grads == nullptr && !saves && device_.fused_forward;
  if (grads != nullptr) traits.d = token_traits(plan_.rule, plan_.K, plan_.V, token_args(plan_, *grads));
  return fused_in_kernels(plan_, device_, laws, traits, grads != nullptr, grads != nullptr && saves);
}

FusedGates GateLogits::expected(bool backward) const {
  if (!last_) return {};
  CallTraits traits = expected_traits(plan_, device_);
  traits.one_kernel = traits.one_kernel && !backward;
  return fused_in_kernels(plan_, device_, laws_, traits, backward, backward && device_.saved.bytes > 0);
}

float* GateLogits::fused_parts(const FusedGates& fused, const Inputs<float>& grads, void* workspace) const {
  for (const Gate& gate : gates_) {
    if (gate.spec.decay && is_fused(fused, gate.spec) && parameters_of(grads, gate.spec))
      return reinterpret_cast<float*>(at(workspace, gate.parts));
  }
  return nullptr;
}

bool GateLogits::takes_values(const Gate& gate, const Inputs<float>& in, const FusedGates& fused) {
  return gate.spec.logits() && tensor_of(in, gate.spec) && !is_fused(fused, gate.spec);
}

FusedGates GateLogits::with_value_buffers(const FusedGates& fused, const Inputs<float>& in, void* workspace,
                                          char* saved) const {
  FusedGates buffered = fused;
  for (const Gate& gate : gates_) {
    if (!is_fused(fused, gate.spec) || gate.saved.bytes == 0 || !tensor_of(in, gate.spec)) continue;
    buffered.numbers.*members_of(gate.spec).values =
        reinterpret_cast<float*>(saved != nullptr ? at(saved, gate.saved) : at(workspace, gate.values));
  }
  return buffered;
}

Inputs<float> with_fused_scalars(const Plan& plan, const FusedGates& fused, const Inputs<float>& in) {
  Inputs<float> given = in;
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    const FusedMembers members = members_of(spec);
    float* const values = members.values != nullptr ? fused.numbers.*members.values : nullptr;
    TokenTensor<float>& tensor = given.*kInputTokens<float>[spec.token];
    if (values != nullptr) tensor = contiguous_rows(tensor, plan.T, values, false);
  }
  return given;
}

Inputs<float> GateLogits::values(const Inputs<float>& in, const FusedGates& fused, void* workspace, char* saved,
                                 bool made) const {
  Inputs<float> given = in;
  GateValuesArgs args;
  for (const Gate& gate : gates_) {
    if (!takes_values(gate, in, fused)) continue;
    const bool kept = saved != nullptr && gate.saved.bytes > 0;
    const TokenTensor<float> values = contiguous_rows(
        tensor_of(in, gate.spec), plan_.T, kept ? at(saved, gate.saved) : at(workspace, gate.values), gate.bf16);
    given.*kInputTokens<float>[gate.spec.token] = values;
    if (kept && made) continue;
    args.gates[args.count] = gate_arg(gate, in);
    args.values[args.count++] = token_arg(plan_, values);
  }
  if (args.count > 0) gate_values(args, tokens_of(plan_), plan_.stream);
  return given;
}

Inputs<float> GateLogits::gradients(const Inputs<float>& in, const FusedGates& fused, const Inputs<float>& grads,
                                    void* workspace) const {
  Inputs<float> opened = grads;
  for (const Gate& gate : gates_) {
    if (!gate.spec.logits() || !gate.apart || is_fused(fused, gate.spec) ||
        !(tensor_of(grads, gate.spec) || parameters_of(grads, gate.spec)))
      continue;
    opened.*kInputTokens<float>[gate.spec.token] =
        contiguous_rows(tensor_of(in, gate.spec), plan_.T, at(workspace, gate.grads), gate.bf16);
  }
  return opened;
}

ForwardTensors GateLogits::open(const ForwardTensors& front, int, void* workspace) const {
  char* const saved = saved_gates(front.saved);
  const FusedGates gates = fused(front.in, nullptr, front.saved != nullptr);
  ForwardTensors behind = front;
  behind.forms.made_last = last_ && std::any_of(gates_.begin(), gates_.end(),
                                                [&](const Gate& gate) { return takes_values(gate, front.in, gates); });
  behind.in = values(front.in, gates, workspace, saved, false);
  behind.forms.gates = with_value_buffers(gates, front.in, workspace, saved);
  return behind;
}

BackwardTensors GateLogits::open(const BackwardTensors& front, int, void* workspace) const {
  char* const saved = saved_gates(front.saved);
  const FusedGates gates = fused(front.in, &front.grads, saved != nullptr);
  BackwardTensors behind = front;
  behind.forms.parts = fused_parts(gates, front.grads, workspace);
  behind.in = values(front.in, gates, workspace, saved, saved != nullptr);
  behind.forms.gates = with_value_buffers(gates, front.in, workspace, saved);
  behind.grads = gradients(front.in, gates, front.grads, workspace);
  return behind;
}

void GateLogits::close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const {
  const Inputs<float>&in = front.in, &grads = front.grads, &opened = behind.grads;
  const FusedGates& fused = behind.forms.gates;
  GateGradientsArgs args;
  for (const Gate& gate : gates_) {
    const DecayParameters<float> parameters = parameters_of(grads, gate.spec);
    const bool by_kernels = is_fused(fused, gate.spec);
    if (!gate.spec.logits() || (by_kernels ? !parameters : !tensor_of(opened, gate.spec))) continue;
    GateGradient& gradient = args.gates[args.count++];
    gradient.gate = gate_arg(gate, in);
    gradient.d_values = token_arg(plan_, tensor_of(opened, gate.spec));
    gradient.d_x = token_arg(plan_, tensor_of(grads, gate.spec));
    gradient.d_a_log = head_arg(parameters.a_log);
    gradient.d_dt_bias = head_arg(parameters.dt_bias);
    if (by_kernels) gradient.fused_parts = device_.chunks;
    if (parameters) gradient.parts = reinterpret_cast<float*>(at(workspace, gate.parts));
  }
  if (args.count > 0) gate_gradients(args, tokens_of(plan_), plan_.stream);
}

std::string GateLogits::lines() const {
  const FusedGates fused = expected(false), fused_backward = expected(true);
  std::string text;
  if (!device_.chunk_form) return fused.any() ? "logits: values made with the token\n" : "";
  if (fuses_any(plan_, fused, false))
    text += fmt::format("logits of channels: values made in prepare{}\n",
                        fuses_any(plan_, fused_backward, false) ? ", values and gradients in gradients" : "");
  if (fuses_any(plan_, fused_backward, true))
    text += fmt::format("logits of token scalars: {}gradients made in gradients\n",
                        fuses_any(plan_, fused, true) ? "values made in prepare, " : "");
  return text;
}

std::string GateLogits::before(bool backward) const {
  const FusedGates fused = expected(backward);
  const bool makes = backward ? makes_gates_again(plan_, device_.chunk_form, fused) : stores_gates(plan_, fused);
  return makes ? "gates -> " : "";
}

std::string GateLogits::after(bool backward) const {
  return backward && (stores_gates(plan_, expected(true)) || has_decay_logits(plan_)) ? " -> gates" : "";
}

}  // namespace fw::cuda
