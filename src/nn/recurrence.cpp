#include "nn/recurrence.h"

#include <algorithm>
#include <new>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/plan_device.h"
#include "base/threads.h"
#include "nn/recurrence_cost.h"
#include "ops/profile.h"

namespace fw {
namespace {

template <class T>
constexpr fw_dtype kDtype = std::is_same_v<T, double>  ? FW_F64
                            : std::is_same_v<T, float> ? FW_F32
                                                       : FW_BF16;

// The modules check shapes before they call, so an argument error here is a defect of ours.
void check(fw_status status, const char* what) {
  if (status == FW_OK) return;
  if (status == FW_ERROR_MEMORY && std::string_view(fw_last_error()) == "out of memory") throw std::bad_alloc();
  if (status == FW_ERROR_MEMORY) fail_io("{}: {}", what, fw_last_error());
  fail_internal("{}: {}", what, fw_last_error());
}

// All but sequences, tokens and ring.
template <class T>
fw_desc make_desc(const RecurrenceShape& shape, const Device& device) {
  fw_desc desc;
  fw_desc_init(&desc);
  desc.rule = to_c(shape.rule);
  desc.gates = to_c(shape.gates);
  desc.dtype = kDtype<Wide<T>>;
  if (std::is_same_v<T, Bf16>) desc.io_dtype = desc.operands = FW_BF16;
  desc.device = device.kind();
  desc.stream = device.stream();
  desc.form = shape.form;
  desc.scale = shape.scale;
  desc.H = shape.heads;
  desc.HV = shape.v_heads;
  desc.K = shape.key_dim;
  desc.V = shape.value_dim;
  desc.state_layout = shape.v_first ? FW_STATE_V_FIRST : FW_STATE_K_FIRST;
  return desc;
}

// A batch of `sequences` with `tokens` each.
fw_desc of_batch(fw_desc desc, int64_t sequences, int64_t tokens, const StepRing& ring, const StepSlots& slots = {}) {
  desc.B = sequences;
  desc.T = tokens;
  desc.seqlens.num_sequences = 0;
  desc.ring.tokens = desc.ring.rows = ring.tokens;
  desc.ring.positions = ring.positions;
  if (slots.tokens > 0) {
    desc.state_pool.slots = slots.from;
    desc.speculation.token_slots = slots.to;
    desc.speculation.columns = slots.tokens;
    desc.state_pool.num_slots = desc.speculation.num_slots = sequences * slots.per_sequence;
  }
  return desc;
}

}  // namespace

template <class T>
Recurrence<T>::Recurrence(const RecurrenceShape& shape, const SeqLayout& layout, const Device& device)
    : desc_(make_desc<T>(shape, device)),
      ring_(shape.ring.tokens),
      ring_width_(ring_width(shape)),
      step_tokens_(std::max<int64_t>(shape.slots.tokens, 1)),
      sequences_(layout.count() / step_tokens_),
      states_(sequences_ * std::max<int64_t>(shape.slots.per_sequence, 1)),
      specs_(token_specs(shape.rule)),
      single_tokens_(layout.single_tokens()) {
  desc_.B = 1;
  desc_.T = layout.tokens();
  desc_.seqlens.bits = 64;
  desc_.seqlens.cu_seqlens = layout.offsets().data();
  desc_.seqlens.num_sequences = layout.count();
  plan_ = make_plan_handle(desc_, false, sizes_);
  desc_.seqlens.cu_seqlens = nullptr;  // the plan has its own
  if (!single_tokens_ || layout.count() == 0) return;
  // A batch of one token each, so that no table of the sequences goes to the device with every step.
  step_plan_ = make_plan_handle(of_batch(desc_, sequences_, step_tokens_, shape.ring, shape.slots), true, step_sizes_);
}

template <class T>
auto Recurrence<T>::make_plan_handle(const fw_desc& desc, bool step, fw_sizes& sizes) -> PlanHandle {
  fw_plan* plan = nullptr;
  check(fw_plan_create(&desc, step ? 1 : 0, &plan), "recurrence plan");
  PlanHandle handle(plan);
  fw_sizes_init(&sizes);
  check(fw_plan_sizes(plan, &sizes), "recurrence workspace");
  return handle;
}

namespace {

// [T, heads * dim] as [1, T, heads, dim], or of a step with so many tokens a sequence as [T / tokens, tokens, heads,
// dim]. step: these tokens, or 0.
template <class T>
fw_tensor heads_tensor(Mat<T> m, int64_t heads, int64_t step) {
  fw_tensor t{};
  t.dtype = kDtype<T>;
  if (m.data == nullptr) return t;
  t.data = m.data;
  t.rank = 4;
  const int64_t tokens = step > 0 ? step : m.rows;
  const int64_t shape[4] = {step > 0 ? m.rows / step : 1, tokens, heads, m.cols / heads};
  const int64_t stride[4] = {tokens * m.stride, m.stride, m.cols / heads, 1};
  for (int i = 0; i < 4; ++i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride[i];
  }
  return t;
}

// [T, n] as [1, T, n], or [T / tokens, tokens, n].
template <class T>
fw_tensor scalars_tensor(Mat<T> m, int64_t step) {
  fw_tensor t{};
  t.dtype = kDtype<T>;
  if (m.data == nullptr) return t;
  t.data = m.data;
  t.rank = 3;
  const int64_t tokens = step > 0 ? step : m.rows;
  const int64_t shape[3] = {step > 0 ? m.rows / step : 1, tokens, m.cols};
  const int64_t stride[3] = {tokens * m.stride, m.stride, 1};
  for (int i = 0; i < 3; ++i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride[i];
  }
  return t;
}

template <class T>
fw_tensor contiguous(T* data, std::initializer_list<int64_t> shape) {
  if (data == nullptr) return fw_tensor{};
  return fw_tensor_of(data, kDtype<T>, static_cast<int>(shape.size()), shape.begin());
}
template <class T>
fw_tensor contiguous(T* data, const std::array<int64_t, 4>& shape) {
  if (data == nullptr) return fw_tensor{};
  return fw_tensor_of(data, kDtype<T>, static_cast<int>(shape.size()), shape.data());
}

}  // namespace

template <class T>
std::array<int64_t, 4> Recurrence<T>::state_shape() const {
  const bool v_first = desc_.state_layout == FW_STATE_V_FIRST;
  return {states_, desc_.HV, v_first ? desc_.V : desc_.K, v_first ? desc_.K : desc_.V};
}

template <class T>
fw_inputs Recurrence<T>::inputs(const RecurrenceInputs<T>& in, bool of_step) const {
  const fw_desc& d = desc_;
  const int64_t step = of_step ? step_tokens_ : 0;
  fw_inputs c;
  fw_inputs_init(&c);
  size_t i = 0;
  const auto pack = [&](auto m) {
    const TokenSpec& spec = specs_[i++];
    return spec.one() ? scalars_tensor(m, step) : heads_tensor(m, m.cols / spec.channels(d.K, d.V), step);
  };
#define FW_TOKEN(name, heads, width, used) c.name = pack(in.name);
#include "rule/tokens.def"
  if (in.g_logits.data != nullptr) {
    const int64_t width = specs_[static_cast<size_t>(TokenIndex::g)].channels(d.K, d.V),
                  heads = in.g_logits.cols / width;
    c.g = width == 1 ? scalars_tensor(in.g_logits, step) : heads_tensor(in.g_logits, heads, step);
    c.dt_bias = width == 1 ? contiguous(in.dt_bias, {heads}) : contiguous(in.dt_bias, {heads, width});
    c.a_log = contiguous(in.a_log, {heads});
  }
  c.precond_center = contiguous(in.precond_center, {d.H});
  c.initial_state = contiguous(in.s, state_shape());
  c.initial_precond = contiguous(in.a, {states_, d.H, d.K});
  return c;
}

namespace {

// The tensors of the tokens, each once.
template <class T>
double token_bytes(const RecurrenceInputs<T>& in) {
  double bytes = 0;
  const auto add = [&](auto m) {
    if (m.data != nullptr) bytes += static_cast<double>(m.rows * m.cols) * sizeof(*m.data);
  };
#define FW_TOKEN(name, heads, width, used) add(in.name);
#include "rule/tokens.def"
  add(in.g_logits);
  return bytes;
}
double forward_flops(const fw_desc& d) {
  return Profile::current() == nullptr ? 0
                                       : static_cast<double>(d.T * d.HV) * recurrence_flops(from_c(d.rule), d.K, d.V);
}
// Bytes of the output (or its gradient) and of the saved buffer.
template <class X>
double moved(const Mat<X>& o, const void* saved, size_t saved_bytes) {
  return static_cast<double>(o.rows * o.cols) * sizeof(X) + (saved == nullptr ? 0 : static_cast<double>(saved_bytes));
}

}  // namespace

template <class T>
void Recurrence<T>::forward(const RecurrenceInputs<T>& in, Mat<T> o, Wide<T>* final_s, Wide<T>* final_a, void* saved,
                            Arena& arena, Wide<T>* ring) const {
  const bool step = single_tokens_ && saved == nullptr && sequences_ > 0;
  const size_t workspace_bytes = step ? step_sizes_.forward : saved != nullptr ? sizes_.forward_saving : sizes_.forward;
  const Arena::Mark mark = arena.mark();
  std::byte* workspace = arena.alloc<std::byte>(static_cast<int64_t>(workspace_bytes));
  if (only_plans(arena.device())) {
    arena.rewind(mark);
    return;
  }
  const ProfiledCall profiled("recurrence_forward", arena.device(), token_bytes(in) + moved(o, saved, sizes_.saved),
                              forward_flops(desc_));
  const fw_inputs c_in = inputs(in, step);
  fw_outputs c_out;
  fw_outputs_init(&c_out);
  c_out.o = heads_tensor(o, desc_.HV, step ? step_tokens_ : 0);
  c_out.final_state = contiguous(final_s, state_shape());
  c_out.final_precond = contiguous(final_a, {states_, desc_.H, desc_.K});
  c_out.ring = contiguous(ring, {sequences_, desc_.HV, ring_, ring_width_});
  if (step) {
    check(fw_plan_step(step_plan_.get(), &c_in, &c_out, workspace, workspace_bytes), "recurrence step");
  } else {
    check(fw_plan_forward(plan_.get(), &c_in, &c_out, saved, saved == nullptr ? 0 : sizes_.saved, workspace,
                          workspace_bytes),
          "recurrence forward");
  }
  arena.rewind(mark);
}

template <class T>
void Recurrence<T>::backward(const RecurrenceInputs<T>& in, Mat<const T> d_o, Wide<T>* d_final_s,
                             const RecurrenceInputs<T>& grads, const void* saved, Arena& arena) const {
  const size_t workspace_bytes = saved == nullptr ? sizes_.backward_alone : sizes_.backward;
  const Arena::Mark mark = arena.mark();
  std::byte* workspace = arena.alloc<std::byte>(static_cast<int64_t>(workspace_bytes));
  if (only_plans(arena.device())) {
    arena.rewind(mark);
    return;
  }
  const ProfiledCall profiled("recurrence_backward", arena.device(),
                              2 * token_bytes(in) + moved(d_o, saved, sizes_.saved), 2 * forward_flops(desc_));
  const fw_inputs c_in = inputs(in, false);
  const fw_inputs c_grads = inputs(grads, false);
  fw_outputs c_d;
  fw_outputs_init(&c_d);
  c_d.o = heads_tensor(Mat<T>(const_cast<T*>(d_o.data), d_o.rows, d_o.cols, d_o.stride), desc_.HV, 0);
  c_d.final_state = contiguous(d_final_s, state_shape());
  check(fw_plan_backward(plan_.get(), &c_in, &c_d, &c_grads, saved, saved == nullptr ? 0 : sizes_.saved, workspace,
                         workspace_bytes),
        "recurrence backward");
  arena.rewind(mark);
}

template <class W>
void fold_rings(const RecurrenceShape& shape, int64_t sequences, W* states, W* rings, Device& device) {
  if (only_plans(device) || sequences == 0) return;
  fw_desc desc = of_batch(make_desc<W>(shape, device), sequences, 0, shape.ring);
  desc.form = FW_FORM_TOKEN;
  fw_inputs in;
  fw_inputs_init(&in);
  const bool v_first = shape.v_first;
  in.initial_state = contiguous(states, {sequences, shape.v_heads, v_first ? shape.value_dim : shape.key_dim,
                                         v_first ? shape.key_dim : shape.value_dim});
  fw_outputs out;
  fw_outputs_init(&out);
  out.final_state = in.initial_state;
  out.ring = contiguous(rings, {sequences, shape.v_heads, shape.ring.tokens, ring_width(shape)});
  fw_sizes sizes;
  fw_sizes_init(&sizes);
  check(fw_workspace_query(&desc, &sizes), "workspace of a fold");
  Buffer<std::byte> workspace(device, static_cast<int64_t>(sizes.forward));
  check(fw_forward(&desc, &in, &out, nullptr, 0, workspace.data(), sizes.forward), "fold of rings");
}

namespace {

void require_step(const fw_desc& desc, const std::string& what) {
  fw_plan* plan = nullptr;
  const fw_status status = fw_plan_create(&desc, 1, &plan);
  fw_plan_destroy(plan);
  if (status == FW_ERROR_ARGUMENT) fail_usage("{}: {}", what, fw_last_error());
  check(status, what.c_str());
}

}  // namespace

template <class T>
void require_ring(const RecurrenceShape& shape, int64_t sequences, const Device& device) {
  require_step(of_batch(make_desc<T>(shape, device), sequences, 1, shape.ring), "decode ring");
}

template <class T>
void require_slots(const RecurrenceShape& shape, int64_t tokens, const Device& device, const std::string& what) {
  const std::vector<int32_t> slots(static_cast<size_t>(tokens));  // a plan does not read them
  require_step(of_batch(make_desc<T>(shape, device), 1, tokens, {}, {tokens, tokens, slots.data(), slots.data()}),
               what);
}

namespace {

// With several rows a token.
SeqLayout stretched(const SeqLayout& layout, int64_t rows) {
  std::vector<int64_t> offsets = layout.offsets();
  for (int64_t& offset : offsets) offset *= rows;
  return SeqLayout(std::move(offsets));
}

}  // namespace

template <class T>
const Recurrence<T>& Recurrences<T>::of(const RecurrenceShape& shape, const SeqLayout& layout) {
  const int threads = num_threads();
  if (threads_ != threads || layout_.offsets() != layout.offsets()) {
    planned_.clear();
    layout_ = layout;
    threads_ = threads;
  }
  for (const Planned& p : planned_) {
    if (p.shape == shape) return p.recurrence;
  }
  planned_.push_back({shape, Recurrence<T>(shape, stretched(layout_, shape.rows), device_)});
  return planned_.back().recurrence;
}

template class Recurrence<float>;
template class Recurrence<double>;
template class Recurrence<Bf16>;
template class Recurrences<float>;
template class Recurrences<double>;
template class Recurrences<Bf16>;
template void fold_rings(const RecurrenceShape&, int64_t, float*, float*, Device&);
template void fold_rings(const RecurrenceShape&, int64_t, double*, double*, Device&);
template void require_ring<float>(const RecurrenceShape&, int64_t, const Device&);
template void require_ring<double>(const RecurrenceShape&, int64_t, const Device&);
template void require_ring<Bf16>(const RecurrenceShape&, int64_t, const Device&);
template void require_slots<float>(const RecurrenceShape&, int64_t, const Device&, const std::string&);
template void require_slots<double>(const RecurrenceShape&, int64_t, const Device&, const std::string&);
template void require_slots<Bf16>(const RecurrenceShape&, int64_t, const Device&, const std::string&);

}  // namespace fw
