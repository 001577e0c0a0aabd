#include "scan/tensors.h"

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "rule/enum_names.h"
#include "scan/status.h"

namespace fw {
namespace {

std::string shape_text(const int64_t* shape, int rank) {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", shape[i]);
  return text + "]";
}

// A tensor's name in messages.
struct TensorName {
  std::string_view prefix, name;

  TensorName(std::string_view whole) : name(whole) {}
  TensorName(const char* whole) : name(whole) {}
  TensorName(std::string_view before, std::string_view after) : prefix(before), name(after) {}
  std::string text() const { return std::string(prefix).append(name); }
};

// An expected shape. A call checks twenty tensors of a header's struct and more, so what is checked and found good
// allocates nothing.
struct Dims {
  std::array<int64_t, 4> size = {};
  int rank = 0;

  Dims(std::initializer_list<int64_t> sizes) {
    for (int64_t s : sizes) push_back(s);
  }
  void push_back(int64_t s) { size[static_cast<size_t>(rank++)] = s; }
};

template <class T>
class Checker {
 public:
  // written: tensors that a call writes must not overlap themselves (stride 0).
  Checker(const Plan& plan, TensorRole role, bool written)
      : plan_(plan),
        prefix_(role == TensorRole::kGradient ? "gradient of " : ""),
        input_(role == TensorRole::kInput),
        written_(written) {}

  // dims: the expected shape; a negative entry -1 - i means "H or HV".
  // narrow: another type that it may have, FW_BF16 or FW_F16; 0: none.
  // The stride of a dimension of one element or of an empty tensor says nothing: what comes back has that of a tensor
  // without gaps, so that no backend meets such a stride.
  std::optional<fw_tensor> check(TensorName name, const fw_tensor& t, const Dims& dims, bool allowed, bool required,
                                 int32_t narrow = 0) const {
    if (t.data == nullptr) {
      if (required && plan_.tokens() > 0)
        fail_usage("{}{}: expected a tensor, since the rule ({}) uses it, got none", prefix_, name.text(),
                   to_string(plan_.rule));
      return std::nullopt;
    }
    if (!allowed)
      fail_usage("{}{}: expected none, since the rule ({}) does not use it, got a tensor", prefix_, name.text(),
                 to_string(plan_.rule));
    constexpr int32_t kType = std::is_same_v<T, float> ? FW_F32 : FW_F64;
    if (t.dtype != kType && (narrow == 0 || t.dtype != narrow)) {
      fail_usage("{}{}: dtype: expected {}{} as the descriptor says, got {}", prefix_, name.text(),
                 enum_text<fw_dtype>(kType), narrow != 0 ? " or " + enum_text<fw_dtype>(narrow) : "",
                 enum_text<fw_dtype>(t.dtype));
    }
    const int rank = dims.rank;
    if (t.rank != rank) fail_usage("{}{}: rank: expected {}, got {}", prefix_, name.text(), rank, t.rank);
    bool empty = false;
    for (int i = 0; i < rank; ++i) empty = empty || dims.size[static_cast<size_t>(i)] == 0;
    for (int i = 0; i < rank; ++i) {
      const int64_t want = dims.size[static_cast<size_t>(i)];
      const bool good = want >= 0 ? t.shape[i] == want : t.shape[i] == plan_.H || t.shape[i] == plan_.HV;
      if (!good) {
        Dims shown = dims;
        for (int64_t& d : shown.size) d = d < 0 ? plan_.HV : d;
        fail_usage("{}{}: shape: expected {}{}, got {}", prefix_, name.text(), shape_text(shown.size.data(), rank),
                   shown.size == dims.size ? "" : fmt::format(" or with {} heads", plan_.H), shape_text(t.shape, rank));
      }
      const int64_t least = written_ && !empty && t.shape[i] > 1 ? 1 : 0;
      if (t.stride[i] < least)
        fail_usage("{}{}: stride[{}]: expected {} or more elements, got {}", prefix_, name.text(), i, least,
                   t.stride[i]);
    }
    if (rank == 4 && !empty && t.shape[rank - 1] > 1 && t.stride[rank - 1] != 1) {
      fail_usage("{}{}: stride[{}]: expected 1 (the last dimension is contiguous), got {}", prefix_, name.text(),
                 rank - 1, t.stride[rank - 1]);
    }
    return with_plain_strides(name, t, empty);
  }

  // `dim` 0: rank 3 [B, T, heads].
  TokenTensor<T> token(TensorName name, const fw_tensor& t, int64_t heads, int64_t dim, bool allowed,
                       bool required) const {
    Dims dims = {plan_.B, plan_.T, heads};
    if (dim > 0) dims.push_back(dim);
    const std::optional<fw_tensor> x = check(name, t, dims, allowed, required,
                                             plan_.bf16_io  ? FW_BF16
                                             : plan_.f16_io ? FW_F16
                                                            : 0);
    if (!x) return {};
    TokenTensor<T> tensor;
    if (x->dtype == FW_BF16) {
      tensor.bf16 = static_cast<Bf16*>(x->data);
    } else if (x->dtype == FW_F16) {
      tensor.f16 = static_cast<F16*>(x->data);
    } else {
      tensor.data = static_cast<T*>(x->data);
    }
    tensor.heads = x->shape[2];
    tensor.dim = dim > 0 ? dim : 1;
    tensor.stride_b = x->stride[0];
    tensor.stride_t = x->stride[1];
    tensor.stride_h = x->stride[2];
    return tensor;
  }

  // states: how many there are.
  StateTensor<T> state(TensorName name, const fw_tensor& t, int64_t states) const {
    const bool k_first = plan_.state_layout == FW_STATE_K_FIRST;
    const std::optional<fw_tensor> x =
        check(name, t, {states, plan_.HV, k_first ? plan_.K : plan_.V, k_first ? plan_.V : plan_.K}, true, false,
              input_ && plan_.dtype == FW_F32 ? FW_BF16 : 0);
    if (!x) return {};
    if (x->dtype == FW_BF16) return {nullptr, static_cast<Bf16*>(x->data), x->stride[0], x->stride[1], x->stride[2]};
    return {static_cast<T*>(x->data), nullptr, x->stride[0], x->stride[1], x->stride[2]};
  }

  StateTensor<T> precond_state(TensorName name, const fw_tensor& t, int64_t states) const {
    const std::optional<fw_tensor> x = check(name, t, {states, plan_.H, plan_.K}, plan_.rule.uses_precond(), false);
    if (!x) return {};
    if (plan_.K > 1 && x->stride[2] != 1)
      fail_usage("{}{}: stride[2]: expected 1 (the last dimension is contiguous), got {}", prefix_, name.text(),
                 x->stride[2]);
    return {static_cast<T*>(x->data), nullptr, x->stride[0], x->stride[1], plan_.K};
  }

  StateTensor<T> ring(const fw_tensor& t) const {
    const std::optional<fw_tensor> x =
        check("ring", t, {plan_.states, plan_.HV, plan_.ring.rows, plan_.ring_width()}, true, false);
    if (!x) return {};
    return {static_cast<T*>(x->data), nullptr, x->stride[0], x->stride[1], x->stride[2]};
  }

  // channels: of a decay with a value a channel, or 0. Parameters of a log-decay that is given as a value must be
  // absent.
  DecayParameters<T> decay_parameters(std::string_view prefix, GateActivation given, const fw_tensor& a_log,
                                      const fw_tensor& dt_bias, int64_t heads, int64_t channels) const {
    return {parameter({prefix, "a_log"}, a_log, given, has_rate(given), heads, a_log.rank == 2 ? channels : 0),
            parameter({prefix, "dt_bias"}, dt_bias, given, given != GateActivation::kValue, heads, channels)};
  }

 private:
  std::optional<fw_tensor> with_plain_strides(TensorName name, const fw_tensor& t, bool empty) const {
    fw_tensor plain = t;
    int64_t extent = 1;  // elements from the first to after the last of the inner dimensions
    for (int i = t.rank - 1; i >= 0; --i) {
      if (empty || t.shape[i] <= 1) {
        plain.stride[i] = extent;
        continue;
      }
      int64_t way = 0;
      if (__builtin_mul_overflow(plain.stride[i], t.shape[i] - 1, &way) ||
          __builtin_add_overflow(extent, way, &extent) || extent > kMostExtent) {
        fail_usage("{}{}: stride[{}]: expected strides that reach at most {} elements, got {} for {} elements", prefix_,
                   name.text(), i, kMostExtent, t.stride[i], t.shape[i]);
      }
    }
    return plain;
  }

  HeadTensor<T> parameter(TensorName name, const fw_tensor& t, GateActivation given, bool allowed, int64_t heads,
                          int64_t channels) const {
    if (t.data == nullptr) return {};
    if (!allowed) {
      fail_usage("{}{}: expected none, since the log-decay is given as {} (fw_gates), got a tensor", prefix_,
                 name.text(), given == GateActivation::kValue ? "its value" : "a logsigmoid");
    }
    Dims dims = {heads};
    if (channels > 0) dims.push_back(channels);
    const std::optional<fw_tensor> x = check(name, t, dims, true, false);
    return {static_cast<T*>(x->data), x->shape[0], x->stride[0], channels > 0 ? x->stride[1] : 0};
  }

  const Plan& plan_;
  std::string_view prefix_;
  bool input_, written_;
};

constexpr int64_t kEitherHeads = -1;

constexpr fw_tensor fw_inputs::*kHeaderTokens[] = {
#define FW_TOKEN(name, heads, width, used) &fw_inputs::name,
#include "rule/tokens.def"
};
// Of the header's tensors the list has all but the two states and the parameters: the preconditioner's center, and two
// of each log-decay.
static_assert(sizeof(fw_inputs) == sizeof(size_t) + (kTokenTensors + 7) * sizeof(fw_tensor));

}  // namespace

template <class T>
Inputs<T> check_inputs(const Plan& plan, const fw_inputs& in, TensorRole role) {
  const Checker<T> checker(plan, role, role == TensorRole::kGradient);
  const Rule& rule = plan.rule;
  const bool need = role == TensorRole::kInput;
  Inputs<T> x;
  const auto specs = token_specs(rule);
  for (size_t i = 0; i < kTokenTensors; ++i) {
    const TokenSpec& spec = specs[i];
    const int64_t heads = spec.heads == TokenHeads::kEither ? kEitherHeads
                          : spec.heads == TokenHeads::kKey  ? plan.H
                                                            : plan.HV;
    x.*kInputTokens<T>[i] = checker.token(spec.name, in.*kHeaderTokens[i], heads,
                                          spec.one() ? 0 : spec.channels(plan.K, plan.V), spec.used, need && spec.used);
  }
  if (const std::optional<fw_tensor> center =
          checker.check("precond_center", in.precond_center, {plan.H}, rule.uses_precond_center(),
                        need && rule.uses_precond_center())) {
    x.precond_center = static_cast<T*>(center->data);
    x.center_stride = center->stride[0];
  }
  // Those of g have its heads; gradients may be without that of g, whose heads are then as theirs.
  const bool channel = rule.decay == Decay::kChannel;
  x.decay = checker.decay_parameters("", plan.gates.g, in.a_log, in.dt_bias,
                                     !channel ? plan.HV
                                     : x.g    ? x.g.heads
                                              : kEitherHeads,
                                     channel ? plan.K : 0);
  x.precond_decay =
      checker.decay_parameters("precond_", plan.gates.precond_g, in.precond_a_log, in.precond_dt_bias, plan.H, 0);
  x.initial_state = checker.state("initial_state", in.initial_state, plan.states);
  x.initial_precond = checker.precond_state("initial_precond", in.initial_precond, plan.states);
  return x;
}

template <class T>
Inputs<T> check_gradients(const Plan& plan, const fw_inputs& grads, const Inputs<T>& in) {
  const Inputs<T> d = check_inputs<T>(plan, grads, TensorRole::kGradient);
  const auto same = [](TensorName name, int64_t got, int64_t expected) {
    if (got != expected)
      fail_usage("gradient of {}: shape: expected {} heads as the logits have, got {}", name.text(), expected, got);
  };
  const auto same_parameters = [&](std::string_view prefix, const DecayParameters<T>& of,
                                   const DecayParameters<T>& from, int64_t heads) {
    if (of.a_log) same({prefix, "a_log"}, of.a_log.heads, heads);
    if (of.dt_bias) same({prefix, "dt_bias"}, of.dt_bias.heads, heads);
    if (of.a_log && from.a_log && (of.a_log.stride_k != 0) != (from.a_log.stride_k != 0)) {
      fail_usage("gradient of {}a_log: rank: expected {} as a_log has, got {}", prefix,
                 from.a_log.stride_k != 0 ? 2 : 1, of.a_log.stride_k != 0 ? 2 : 1);
    }
  };
  for (const GateSpec& spec : gate_specs(plan.rule, plan.gates)) {
    const TokenTensor<T>& of = d.*kInputTokens<T>[spec.token];
    if (spec.logits() && of) same(spec.name, of.heads, (in.*kInputTokens<T>[spec.token]).heads);
  }
  same_parameters("", d.decay, in.decay, in.g.heads);
  same_parameters("precond_", d.precond_decay, in.precond_decay, in.precond_g.heads);
  return d;
}

template <class T>
Outputs<T> check_outputs(const Plan& plan, const fw_outputs& out, TensorRole role) {
  const Checker<T> checker(plan, role, role == TensorRole::kInput);
  Outputs<T> x;
  x.o = checker.token("o", out.o, plan.HV, plan.V, true, role == TensorRole::kInput);
  x.final_state = checker.state("final_state", out.final_state, plan.final_states);
  x.final_precond = checker.precond_state("final_precond", out.final_precond, plan.final_states);
  for (const auto& [name, tensor] :
       {std::pair("checkpoints", &out.checkpoints), std::pair("precond_checkpoints", &out.precond_checkpoints)}) {
    if (tensor->data == nullptr) continue;
    if (role == TensorRole::kGradient)
      fail_usage("gradient of {}: expected none, since checkpoints have no gradient, got a tensor", name);
    if (plan.checkpoints.interval == 0)
      fail_usage("{}: expected none without checkpoints.interval, got a tensor", name);
  }
  x.checkpoints = checker.state("checkpoints", out.checkpoints, plan.checkpoints.count);
  x.precond_checkpoints = checker.precond_state("precond_checkpoints", out.precond_checkpoints, plan.checkpoints.count);
  if (out.ring.data != nullptr && (role == TensorRole::kGradient || !plan.ring)) {
    fail_usage("{}ring: expected none{}, got a tensor", role == TensorRole::kGradient ? "gradient of " : "",
               role == TensorRole::kGradient ? ", since a ring has no gradient" : " without ring.tokens");
  }
  if (plan.ring) x.ring = checker.ring(out.ring);
  return x;
}

template <class T>
void check_ring_tensors(const Plan& plan, const Inputs<T>& in, const Outputs<T>& out) {
  if (!plan.ring) return;
  if (!out.ring) fail_usage("ring: expected a tensor with ring.tokens {}, got none", plan.ring.tokens);
  if (!in.initial_state) fail_usage("initial_state: expected a tensor with ring.tokens {}, got none", plan.ring.tokens);
  if (!plan.slots.skips) return;
  const StateTensor<T>&from = in.initial_state, &to = out.final_state;
  if (from.data == to.data && from.bf16 == to.bf16 && from.stride_n == to.stride_n && from.stride_h == to.stride_h &&
      from.stride_r == to.stride_r)
    return;
  fail_usage(
      "final_state: expected the memory and strides of initial_state with ring.tokens {}, since a state stays where it "
      "is until a fold, got {}",
      plan.ring.tokens, to ? "others" : "none");
}

template Inputs<float> check_inputs<float>(const Plan&, const fw_inputs&, TensorRole);
template Inputs<double> check_inputs<double>(const Plan&, const fw_inputs&, TensorRole);
template Inputs<float> check_gradients<float>(const Plan&, const fw_inputs&, const Inputs<float>&);
template Inputs<double> check_gradients<double>(const Plan&, const fw_inputs&, const Inputs<double>&);
template Outputs<float> check_outputs<float>(const Plan&, const fw_outputs&, TensorRole);
template Outputs<double> check_outputs<double>(const Plan&, const fw_outputs&, TensorRole);
template void check_ring_tensors<float>(const Plan&, const Inputs<float>&, const Outputs<float>&);
template void check_ring_tensors<double>(const Plan&, const Inputs<double>&, const Outputs<double>&);

}  // namespace fw
