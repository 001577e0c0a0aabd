// The C header on top of plan, tensors and scan: sizes, statuses, messages.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/threads.h"
#include "fastweight/fastweight.h"
#include "rule/rule.h"
#include "scan/backend.h"
#include "scan/cpu/kernels.h"

namespace {

thread_local std::string t_error;

fw_status failed(fw_status status, const std::string& message) {
  t_error = message;
  return status;
}

class WorkspaceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs body; whatever it throws becomes a status and a message.
template <class Body>
fw_status guarded(const Body& body) {
  try {
    body();
    return FW_OK;
  } catch (const WorkspaceError& e) {
    return failed(FW_ERROR_WORKSPACE, e.what());
  } catch (const fw::DeviceError& e) {
    return failed(FW_ERROR_DEVICE, e.what());
  } catch (const fw::Error& e) {
    // What the system refuses (a thread) is no wrong argument.
    if (e.kind() == fw::ErrorKind::kIo) return failed(FW_ERROR_MEMORY, e.what());
    return failed(e.kind() == fw::ErrorKind::kInternal ? FW_ERROR_INTERNAL : FW_ERROR_ARGUMENT, e.what());
  } catch (const std::bad_alloc&) {
    return failed(FW_ERROR_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return failed(FW_ERROR_INTERNAL, e.what());
  }
}

template <class Struct>
const Struct& not_null(const Struct* p, const char* name) {
  if (p == nullptr) fw::fail_usage("{}: expected a struct, got NULL", name);
  return *p;
}

// Bytes of the structs of version 0.1 of the header. What has been added since lies behind; fw_init_struct knows a
// struct by its size.
template <class Struct>
constexpr size_t kFirstBytes = sizeof(Struct);
template <>
constexpr size_t kFirstBytes<fw_desc> = offsetof(fw_desc, gates);
template <>
constexpr size_t kFirstBytes<fw_inputs> = offsetof(fw_inputs, a_log);
template <>
constexpr size_t kFirstBytes<fw_outputs> = offsetof(fw_outputs, checkpoints);
template <>
constexpr size_t kFirstBytes<fw_sizes> = offsetof(fw_sizes, forward_saving);

// Of all versions of the descriptor, the only struct besides fw_rule that has defaults: fw_init_struct knows it by
// these, which no other struct may have.
constexpr size_t kDescBytes[] = {
    kFirstBytes<fw_desc>,           offsetof(fw_desc, max_seqlen),          offsetof(fw_desc, token_slots),
    offsetof(fw_desc, final_slots), offsetof(fw_desc, checkpoint_interval), sizeof(fw_desc)};
template <class... Other>
constexpr bool kOtherBytes =
    ((std::find(std::begin(kDescBytes), std::end(kDescBytes), sizeof(Other)) == std::end(kDescBytes)) && ...);
static_assert(kOtherBytes<fw_rule, fw_gates, fw_tensor, fw_inputs, fw_outputs, fw_sizes>);

fw_desc default_desc() {
  fw_desc desc;
  std::memset(&desc, 0, sizeof(desc));
  desc.size = sizeof(desc);
  desc.rule = fw::to_c(fw::Rule());
  desc.dtype = FW_F32;
  desc.seqlens_dtype = 64;
  desc.gates = fw::to_c(fw::Gates());
  desc.device_number = -1;
  return desc;
}
template <class Struct>
Struct defaults() {
  if constexpr (std::is_same_v<Struct, fw_desc>) {
    return default_desc();
  } else {
    Struct all;
    std::memset(&all, 0, sizeof(all));
    return all;
  }
}

// Whether a struct of this size is of a version of the header: fw_desc grew five times, inputs and outputs by whole
// tensors, sizes by whole numbers.
template <class Struct>
bool is_a_version(size_t size) {
  if constexpr (std::is_same_v<Struct, fw_desc>) {
    return std::find(std::begin(kDescBytes), std::end(kDescBytes), size) != std::end(kDescBytes);
  } else {
    constexpr size_t kStep = std::is_same_v<Struct, fw_sizes> ? sizeof(size_t) : sizeof(fw_tensor);
    return size >= kFirstBytes<Struct> && size <= sizeof(Struct) && (sizeof(Struct) - size) % kStep == 0;
  }
}

// The caller's struct with the fields that its version of the header has not.
template <class Struct>
Struct complete(const Struct* p, const char* name, const char* type) {
  const size_t size = not_null(p, name).size;
  if (!is_a_version<Struct>(size)) {
    fw::fail_usage("{}: size: expected {} (sizeof({}); use FW_INIT), got {}", name, sizeof(Struct), type, size);
  }
  Struct all = defaults<Struct>();
  std::memcpy(&all, p, size);
  all.size = sizeof(all);
  return all;
}
fw_desc descriptor(const fw_desc* p) { return complete(p, "descriptor", "fw_desc"); }
fw_inputs inputs(const fw_inputs* p, const char* name) { return complete(p, name, "fw_inputs"); }
fw_outputs outputs(const fw_outputs* p, const char* name) { return complete(p, name, "fw_outputs"); }

void check_buffer(const char* name, const void* p, size_t bytes, size_t needed) {
  if (needed == 0) return;
  if (p == nullptr || bytes < needed) {
    throw WorkspaceError(fmt::format("{}: expected at least {} bytes (fw_workspace_query), got {}", name, needed,
                                     p == nullptr ? "NULL" : std::to_string(bytes)));
  }
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0)
    throw WorkspaceError(fmt::format("{}: expected an address aligned to 64 bytes, got {}", name, p));
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
    fw::fail_usage("descriptor: token_slots: expected NULL in a call other than fw_step, got an address");
  if (slots && saved != nullptr)
    fw::fail_usage("saved: expected NULL with slots, of which there is no backward, got {}", saved);
  check_buffer("workspace", workspace, workspace_bytes,
               saved != nullptr ? call.forward_saving_bytes() : call.forward_bytes());
  if (saved != nullptr) check_buffer("saved", saved, saved_bytes, call.saved_bytes());
  call.forward(in, out, saved, workspace);
}

void backward(const fw::Call& call, const fw_inputs& in, const fw_outputs& d, const fw_inputs& grads, const void* saved,
              size_t saved_bytes, void* workspace, size_t workspace_bytes) {
  if (call.plan().slots) fw::fail_usage("descriptor: slots: expected NULL in fw_backward, got an address");
  check_buffer("workspace", workspace, workspace_bytes,
               saved != nullptr ? call.backward_bytes() : call.backward_alone_bytes());
  if (saved != nullptr) check_buffer("saved", saved, saved_bytes, call.saved_bytes());
  call.backward(in, d, grads, saved, workspace);
}

void fill(const fw::Call& call, fw_sizes* sizes) {
  if (sizes == nullptr) fw::fail_usage("sizes: expected a struct, got NULL");
  if (sizes->size != sizeof(fw_sizes) && sizes->size != kFirstBytes<fw_sizes>) {
    fw::fail_usage("sizes: size: expected {} (sizeof(fw_sizes); use FW_INIT), got {}", sizeof(fw_sizes), sizes->size);
  }
  sizes->forward = call.forward_bytes();
  sizes->backward = call.backward_bytes();
  sizes->saved = call.saved_bytes();
  sizes->backward_alone = call.backward_alone_bytes();
  if (sizes->size > kFirstBytes<fw_sizes>) sizes->forward_saving = call.forward_saving_bytes();
}

fw_desc step_of(fw_desc desc) {
  desc.form = FW_FORM_TOKEN;
  return desc;
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

void fw_init_struct(void* pointer, size_t size) {
  if (pointer == nullptr || size < sizeof(size_t)) return;
  std::memset(pointer, 0, size);
  std::memcpy(pointer, &size, sizeof(size));
  if (size == sizeof(fw_rule)) *static_cast<fw_rule*>(pointer) = fw::to_c(fw::Rule());
  if (std::find(std::begin(kDescBytes), std::end(kDescBytes), size) != std::end(kDescBytes)) {
    const fw_desc desc = default_desc();
    std::memcpy(static_cast<char*>(pointer) + sizeof(size), reinterpret_cast<const char*>(&desc) + sizeof(size),
                size - sizeof(size));
  }
}

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
    if (name == nullptr || rule == nullptr) fw::fail_usage("fw_rule_preset: expected a name and a struct, got NULL");
    *rule = fw::to_c(fw::preset(name).rule);
  });
}

const char* fw_rule_name(int index) {
  const auto list = fw::presets();
  return index >= 0 && static_cast<size_t>(index) < list.size() ? list[static_cast<size_t>(index)].name.data()
                                                                : nullptr;
}

fw_status fw_workspace_query(const fw_desc* desc, fw_sizes* sizes) {
  return guarded([&] { fill(*make_call(descriptor(desc)), sizes); });
}

fw_status fw_device_check(int32_t device) {
  return guarded([&] {
    const fw::Backend* backend = fw::backend_of(device);
    if (backend == nullptr) fw::fail_usage("device: expected FW_DEVICE_CPU or FW_DEVICE_CUDA, got {}", device);
    backend->require();
  });
}

size_t fw_plan_text(const fw_desc* desc, char* buffer, size_t bytes) {
  std::string text;
  const fw_status status = guarded([&] { text = make_call(descriptor(desc))->text(); });
  if (status != FW_OK) return 0;
  if (buffer != nullptr && bytes > 0) {
    const size_t count = std::min(bytes - 1, text.size());
    std::memcpy(buffer, text.data(), count);
    buffer[count] = 0;
  }
  return text.size();
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
  return guarded([&] { fill(call_of(plan, plan != nullptr && plan->step), sizes); });
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

const char* fw_last_error(void) { return t_error.c_str(); }

const char* fw_version(void) { return "0.1.0"; }

void fw_set_threads(int threads) { fw::set_num_threads(threads); }

int fw_get_threads(void) { return fw::num_threads(); }

const char* fw_simd_target(void) { return fw::cpu::simd_target_name(); }

}  // extern "C"
