// The C header on top of plan, tensors and scan: sizes, statuses, messages.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/threads.h"
#include "fastweight/fastweight.h"
#include "rule/enum_names.h"
#include "rule/rule.h"
#include "scan/backend.h"
#include "scan/cpu/kernels.h"
#include "scan/status.h"
#include "scan/struct_size.h"

namespace {

using fw::guarded;
using fw::not_null;

// Bytes of the structs in version 0.2.0 (tests/abi/0.2.0/layout.inc). A field that is added later lies after them.
template <class Struct>
constexpr size_t kFirstBytes = 0;
template <>
constexpr size_t kFirstBytes<fw_desc> = 584;
template <>
constexpr size_t kFirstBytes<fw_rule> = 192;
template <>
constexpr size_t kFirstBytes<fw_inputs> = 1608;
template <>
constexpr size_t kFirstBytes<fw_outputs> = 408;
template <>
constexpr size_t kFirstBytes<fw_sizes> = 48;
static_assert(kFirstBytes<fw_rule> == sizeof(fw_rule),
              "fw_rule lies inside fw_desc and may not grow: a new field takes the place of reserved ones");

template <class Struct>
Struct defaults() {
  Struct all;
  std::memset(&all, 0, sizeof(all));
  all.size = sizeof(all);
  return all;
}
template <>
fw_rule defaults<fw_rule>() {
  return fw::to_c(fw::Rule());
}
template <>
fw_desc defaults<fw_desc>() {
  fw_desc desc;
  std::memset(&desc, 0, sizeof(desc));
  desc.size = sizeof(desc);
  desc.rule = defaults<fw_rule>();
  desc.gates = fw::to_c(fw::Gates());
  desc.dtype = FW_F32;
  desc.device_number = -1;
  desc.seqlens.bits = 64;
  return desc;
}

// The caller's struct with the fields that its version of the header lacks.
template <class Struct>
Struct complete(const Struct* p, const char* name, const char* type) {
  return fw::complete_struct(not_null(p, name), defaults<Struct>(), kFirstBytes<Struct>, name, type);
}
fw_desc descriptor(const fw_desc* p) { return complete(p, "descriptor", "fw_desc"); }
fw_inputs inputs(const fw_inputs* p, const char* name) { return complete(p, name, "fw_inputs"); }
fw_outputs outputs(const fw_outputs* p, const char* name) { return complete(p, name, "fw_outputs"); }

void check_buffer(const char* name, const void* p, size_t bytes, size_t needed) {
  fw::check_buffer(name, p, bytes, needed, "fw_workspace_query");
}

std::unique_ptr<const fw::Call> make_call(const fw_desc& desc, bool step = false) {
  fw::Plan plan = fw::make_plan(desc, step);
  const fw::Backend& backend = *plan.backend;
  return backend.call(std::move(plan));
}

void forward(const fw::Call& call, const fw_inputs& in, const fw_outputs& out, void* saved, size_t saved_bytes,
             void* workspace, size_t workspace_bytes) {
  const fw::Slots& slots = call.plan().slots;
  if (slots.tokens != nullptr && !slots.skips)
    fw::fail_usage("descriptor: speculation.token_slots: expected NULL in a call other than fw_step, got an address");
  if (slots && saved != nullptr)
    fw::fail_usage("saved: expected NULL with slots, of which there is no backward, got {}", saved);
  if (call.plan().ring && saved != nullptr)
    fw::fail_usage("saved: expected NULL with ring.tokens, of which there is no backward, got {}", saved);
  check_buffer("workspace", workspace, workspace_bytes,
               saved != nullptr ? call.forward_saving_bytes() : call.forward_bytes());
  if (saved != nullptr) check_buffer("saved", saved, saved_bytes, call.saved_bytes());
  call.forward(in, out, saved, workspace);
}

void backward(const fw::Call& call, const fw_inputs& in, const fw_outputs& d, const fw_inputs& grads, const void* saved,
              size_t saved_bytes, void* workspace, size_t workspace_bytes) {
  if (call.plan().slots) fw::fail_usage("descriptor: state_pool.slots: expected NULL in fw_backward, got an address");
  if (call.plan().ring)
    fw::fail_usage("descriptor: ring.tokens: expected 0 in fw_backward, got {}", call.plan().ring.tokens);
  check_buffer("workspace", workspace, workspace_bytes,
               saved != nullptr ? call.backward_bytes() : call.backward_alone_bytes());
  if (saved != nullptr) check_buffer("saved", saved, saved_bytes, call.saved_bytes());
  call.backward(in, d, grads, saved, workspace);
}

// step_bytes: what a step of the same descriptor wants.
void fill(const fw::Call& call, size_t step_bytes, fw_sizes* sizes) {
  const size_t size = not_null(sizes, "sizes").size;
  fw::check_struct_size<fw_sizes>(size, kFirstBytes<fw_sizes>, "sizes", "fw_sizes");
  fw_sizes all = defaults<fw_sizes>();
  all.forward = std::max(call.forward_bytes(), step_bytes);
  all.forward_saving = call.forward_saving_bytes();
  all.backward = call.backward_bytes();
  all.backward_alone = call.backward_alone_bytes();
  all.saved = call.saved_bytes();
  all.size = size;
  std::memcpy(sizes, &all, size);
}

// As much of the text as there is room for, with a final zero; the whole length.
size_t copy_text(const std::string& text, char* buffer, size_t bytes) {
  if (buffer != nullptr && bytes > 0) {
    const size_t count = std::min(bytes - 1, text.size());
    std::memcpy(buffer, text.data(), count);
    buffer[count] = 0;
  }
  return text.size();
}

fw_desc step_of(fw_desc desc) {
  desc.form = FW_FORM_TOKEN;
  return desc;
}

// What a step wants, which may be more than the call does: float32 rows of float16 tensors, say. Nothing where fw_step
// refuses the descriptor.
size_t step_bytes(const fw_desc& desc) {
  try {
    return make_call(step_of(desc), true)->forward_bytes();
  } catch (const fw::Error& error) {
    if (error.kind() != fw::ErrorKind::kUsage) throw;
    return 0;
  }
}

}  // namespace

struct fw_plan {
  std::unique_ptr<const fw::Call> call;
  bool step;
};

namespace {

// The plan's call, which must be of that kind.
const fw::Call& call_of(const fw_plan* plan, bool step) {
  if (plan == nullptr) fw::fail_usage("plan: expected one of fw_plan_create, got NULL");
  if (plan->step != step) {
    fw::fail_usage("plan: expected one that was created {} `step`, got one {}", step ? "with" : "without",
                   step ? "without" : "with");
  }
  return *plan->call;
}

}  // namespace

extern "C" {

void fw_desc_init_sized(fw_desc* desc, size_t size) { fw::init_struct(desc, size, defaults<fw_desc>()); }
void fw_rule_init_sized(fw_rule* rule, size_t size) { fw::init_struct(rule, size, defaults<fw_rule>()); }
void fw_inputs_init_sized(fw_inputs* inputs, size_t size) { fw::init_struct(inputs, size, defaults<fw_inputs>()); }
void fw_outputs_init_sized(fw_outputs* outputs, size_t size) { fw::init_struct(outputs, size, defaults<fw_outputs>()); }
void fw_sizes_init_sized(fw_sizes* sizes, size_t size) { fw::init_struct(sizes, size, defaults<fw_sizes>()); }

fw_tensor fw_tensor_of(void* data, fw_dtype dtype, int rank, const int64_t* shape) {
  fw_tensor tensor;
  std::memset(&tensor, 0, sizeof(tensor));
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = rank;
  int64_t stride = 1;
  for (int i = (rank < 4 ? rank : 4) - 1; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.stride[i] = stride;
    stride *= shape[i];
  }
  return tensor;
}

fw_status fw_rule_preset(const char* name, fw_rule* rule) {
  return guarded([&] {
    if (name == nullptr) fw::fail_usage("name: expected a preset's name, got NULL");
    if (rule == nullptr) fw::fail_usage("rule: expected a struct, got NULL");
    *rule = fw::to_c(fw::preset(name).rule);
  });
}

fw_status fw_rule_parse(const char* text, fw_rule* rule) {
  return guarded([&] {
    if (text == nullptr) fw::fail_usage("text: expected a preset's name or axis=value ..., got NULL");
    if (rule == nullptr) fw::fail_usage("rule: expected a struct, got NULL");
    *rule = fw::to_c(fw::parse_rule(text));
  });
}

size_t fw_rule_format(const fw_rule* rule, char* buffer, size_t bytes) {
  std::string text;
  const fw_status status = guarded([&] { text = fw::to_string(fw::from_c(not_null(rule, "rule"))); });
  return status == FW_OK ? copy_text(text, buffer, bytes) : 0;
}

const char* fw_rule_name(int index) {
  const auto list = fw::presets();
  return index >= 0 && static_cast<size_t>(index) < list.size() ? list[static_cast<size_t>(index)].name.data()
                                                                : nullptr;
}

void* fw_alloc(size_t bytes) {
  void* memory = nullptr;
  // C's aligned_alloc wants a multiple of the alignment.
  const size_t whole = bytes > SIZE_MAX - FW_ALIGNMENT
                           ? 0
                           : (std::max<size_t>(bytes, 1) + FW_ALIGNMENT - 1) / FW_ALIGNMENT * FW_ALIGNMENT;
  if (whole != 0) memory = std::aligned_alloc(FW_ALIGNMENT, whole);
  if (memory == nullptr)
    fw::failed(
        FW_ERROR_MEMORY,
        fmt::format("fw_alloc: expected {} bytes of memory, got none: free memory, or make a smaller call", bytes));
  return memory;
}

void fw_free(void* memory) { std::free(memory); }

fw_status fw_workspace_query(const fw_desc* desc, fw_sizes* sizes) {
  return guarded([&] {
    const fw_desc all = descriptor(desc);
    fill(*make_call(all), step_bytes(all), sizes);
  });
}

fw_status fw_device_check(int32_t device) {
  return guarded([&] {
    const fw::Backend* backend = fw::backend_of(device);
    if (backend == nullptr)
      fw::fail_usage("device: expected FW_DEVICE_CPU or FW_DEVICE_CUDA, got {}", fw::enum_text<fw_device>(device));
    backend->require();
  });
}

size_t fw_plan_text(const fw_desc* desc, char* buffer, size_t bytes) {
  std::string text;
  const fw_status status = guarded([&] { text = make_call(descriptor(desc))->text(); });
  return status == FW_OK ? copy_text(text, buffer, bytes) : 0;
}

fw_status fw_forward(const fw_desc* desc, const fw_inputs* in, const fw_outputs* out, void* saved, size_t saved_bytes,
                     void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    const auto call = make_call(descriptor(desc));
    forward(*call, inputs(in, "inputs"), outputs(out, "outputs"), saved, saved_bytes, workspace, workspace_bytes);
  });
}

fw_status fw_backward(const fw_desc* desc, const fw_inputs* in, const fw_outputs* d, const fw_inputs* grads,
                      const void* saved, size_t saved_bytes, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    backward(*make_call(descriptor(desc)), inputs(in, "inputs"), outputs(d, "cotangents"), inputs(grads, "gradients"),
             saved, saved_bytes, workspace, workspace_bytes);
  });
}

fw_status fw_step(const fw_desc* desc, const fw_inputs* in, const fw_outputs* out, void* workspace,
                  size_t workspace_bytes) {
  return guarded([&] {
    forward(*make_call(step_of(descriptor(desc)), true), inputs(in, "inputs"), outputs(out, "outputs"), nullptr, 0,
            workspace, workspace_bytes);
  });
}

fw_status fw_plan_create(const fw_desc* desc, int step, fw_plan** plan) {
  return guarded([&] {
    if (plan == nullptr) fw::fail_usage("plan: expected an address for it, got NULL");
    *plan = nullptr;
    const fw_desc all = descriptor(desc);
    *plan = new fw_plan{make_call(step != 0 ? step_of(all) : all, step != 0), step != 0};
  });
}

void fw_plan_destroy(fw_plan* plan) { delete plan; }

fw_status fw_plan_sizes(const fw_plan* plan, fw_sizes* sizes) {
  return guarded([&] { fill(call_of(plan, plan != nullptr && plan->step), 0, sizes); });
}

fw_status fw_plan_forward(const fw_plan* plan, const fw_inputs* in, const fw_outputs* out, void* saved,
                          size_t saved_bytes, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    forward(call_of(plan, false), inputs(in, "inputs"), outputs(out, "outputs"), saved, saved_bytes, workspace,
            workspace_bytes);
  });
}

fw_status fw_plan_backward(const fw_plan* plan, const fw_inputs* in, const fw_outputs* d, const fw_inputs* grads,
                           const void* saved, size_t saved_bytes, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    backward(call_of(plan, false), inputs(in, "inputs"), outputs(d, "cotangents"), inputs(grads, "gradients"), saved,
             saved_bytes, workspace, workspace_bytes);
  });
}

fw_status fw_plan_step(const fw_plan* plan, const fw_inputs* in, const fw_outputs* out, void* workspace,
                       size_t workspace_bytes) {
  return guarded([&] {
    forward(call_of(plan, true), inputs(in, "inputs"), outputs(out, "outputs"), nullptr, 0, workspace, workspace_bytes);
  });
}

const char* fw_status_name(fw_status status) {
  int number = 0;  // a caller's number need not be one of the enum
  std::memcpy(&number, &status, sizeof(number));
  const char* name = fw::enum_name(FW_OK, number);
  return name != nullptr ? name : "unknown status";
}

#define FW_TEXT(x) #x
#define FW_DOTTED(major, minor, patch) FW_TEXT(major) "." FW_TEXT(minor) "." FW_TEXT(patch)
const char* fw_version(void) { return FW_DOTTED(FW_VERSION_MAJOR, FW_VERSION_MINOR, FW_VERSION_PATCH); }
#undef FW_DOTTED
#undef FW_TEXT

void fw_set_threads(int threads) { fw::set_num_threads(threads); }

int fw_get_threads(void) { return fw::num_threads(); }

const char* fw_simd_target(void) { return fw::cpu::simd_target_name(); }

}  // extern "C"
