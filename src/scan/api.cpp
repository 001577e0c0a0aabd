// The C header on top of plan, tensors and scan: sizes, statuses, messages.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "base/threads.h"
#include "fastweight/fastweight.h"
#include "rule/rule.h"
#include "scan/cpu/kernels.h"
#include "scan/cuda/call/plan.h"
#include "scan/cuda/call/scan.h"
#include "scan/scan.h"

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

void check_buffer(const char* name, const void* p, size_t bytes, size_t needed) {
  if (needed == 0) return;
  if (p == nullptr || bytes < needed) {
    throw WorkspaceError(
        fmt::format("{}: expected at least {} bytes (fw_workspace_query), got {}", name, needed, p == nullptr ? "NULL" : std::to_string(bytes)));
  }
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) throw WorkspaceError(fmt::format("{}: expected an address aligned to 64 bytes, got {}", name, p));
}

// A call's plan and, on a device, what it does there: made once.
struct Call {
  fw::Plan plan;
  fw::cuda::DevicePlan device;
  explicit Call(const fw_desc& desc) : plan(fw::make_plan(desc)) {
    if (plan.cuda) device = fw::cuda::make_device_plan(plan, fw::cuda::multiprocessors());
  }
  size_t forward_bytes() const { return plan.cuda ? device.forward.bytes : plan.forward_bytes(); }
  size_t backward_bytes() const { return plan.cuda ? device.backward.bytes : plan.backward_bytes(); }
  size_t saved_bytes() const { return plan.cuda ? device.saved.bytes : plan.saved_bytes(); }
  // backward_bytes and room for the saved buffer in front of it.
  size_t backward_alone_bytes() const {
    if (plan.cuda) return device.backward_alone_bytes();
    return plan.backward_bytes() + static_cast<size_t>(fw::padded(plan.saved_elements())) * plan.element();
  }
};

template <class T>
void forward_as(const Call& call, const fw_inputs& in, const fw_outputs& out, void* saved, void* workspace) {
  const fw::Plan& plan = call.plan;
  const fw::Inputs<T> inputs = fw::check_inputs<T>(plan, in, fw::TensorRole::kInput);
  const fw::Outputs<T> outputs = fw::check_outputs<T>(plan, out, fw::TensorRole::kInput);
  if constexpr (std::is_same_v<T, float>) {
    if (plan.cuda) {
      fw::cuda::scan_forward(plan, call.device, inputs, outputs, saved, workspace);
      return;
    }
  }
  fw::cpu::scan_forward<T>(plan, inputs, outputs, static_cast<T*>(saved), static_cast<T*>(workspace));
}

void check_slots(const fw::Plan& plan) {
  if (plan.slots != nullptr && plan.form != FW_FORM_TOKEN) fw::fail_usage("descriptor: slots: expected NULL in a call other than fw_step, got an address");
}

void forward(const fw_desc& desc, const fw_inputs& in, const fw_outputs& out, void* saved, size_t saved_bytes, void* workspace, size_t workspace_bytes) {
  const Call call(desc);
  check_slots(call.plan);
  check_buffer("workspace", workspace, workspace_bytes, call.forward_bytes());
  if (saved != nullptr) check_buffer("saved", saved, saved_bytes, call.saved_bytes());
  if (call.plan.dtype == FW_F32) {
    forward_as<float>(call, in, out, saved, workspace);
  } else {
    forward_as<double>(call, in, out, saved, workspace);
  }
}

template <class T>
void backward_as(const Call& call, const fw_inputs& in, const fw_outputs& d, const fw_inputs& grads, const void* saved, void* workspace) {
  const fw::Plan& plan = call.plan;
  const fw::Inputs<T> inputs = fw::check_inputs<T>(plan, in, fw::TensorRole::kInput);
  const fw::Outputs<T> cotangents = fw::check_outputs<T>(plan, d, fw::TensorRole::kGradient);
  const fw::Inputs<T> gradients = fw::check_inputs<T>(plan, grads, fw::TensorRole::kGradient);
  if constexpr (std::is_same_v<T, float>) {
    if (plan.cuda) {
      fw::cuda::scan_backward(plan, call.device, inputs, cotangents, gradients, saved, workspace);
      return;
    }
  }
  T* space = static_cast<T*>(workspace);
  const T* kept = static_cast<const T*>(saved);
  if (kept == nullptr) {
    T* recomputed = space;
    space += fw::padded(plan.saved_elements());
    fw::cpu::scan_forward<T>(plan, inputs, fw::Outputs<T>{}, recomputed, space);
    kept = recomputed;
  }
  fw::cpu::scan_backward<T>(plan, inputs, cotangents, gradients, kept, space);
}

}  // namespace

extern "C" {

void fw_init_struct(void* pointer, size_t size) {
  if (pointer == nullptr || size < sizeof(size_t)) return;
  std::memset(pointer, 0, size);
  std::memcpy(pointer, &size, sizeof(size));
  if (size == sizeof(fw_rule)) *static_cast<fw_rule*>(pointer) = fw::to_c(fw::Rule());
  if (size == sizeof(fw_desc)) {
    fw_desc* desc = static_cast<fw_desc*>(pointer);
    desc->rule = fw::to_c(fw::Rule());
    desc->dtype = FW_F32;
    desc->seqlens_dtype = 64;
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
  return index >= 0 && static_cast<size_t>(index) < list.size() ? list[static_cast<size_t>(index)].name.data() : nullptr;
}

fw_status fw_workspace_query(const fw_desc* desc, fw_sizes* sizes) {
  return guarded([&] {
    const Call call(not_null(desc, "descriptor"));
    if (sizes == nullptr) fw::fail_usage("sizes: expected a struct, got NULL");
    if (sizes->size != sizeof(fw_sizes)) fw::fail_usage("sizes: size: expected {} (sizeof(fw_sizes); use FW_INIT), got {}", sizeof(fw_sizes), sizes->size);
    sizes->forward = call.forward_bytes();
    sizes->backward = call.backward_bytes();
    sizes->saved = call.saved_bytes();
    sizes->backward_alone = call.backward_alone_bytes();
  });
}

fw_status fw_device_check(int32_t device) {
  return guarded([&] {
    if (device != FW_DEVICE_CPU && device != FW_DEVICE_CUDA) fw::fail_usage("device: expected FW_DEVICE_CPU or FW_DEVICE_CUDA, got {}", device);
    if (device == FW_DEVICE_CUDA) fw::cuda::require_device(true);
  });
}

size_t fw_plan_text(const fw_desc* desc, char* buffer, size_t bytes) {
  std::string text;
  const fw_status status = guarded([&] {
    const Call call(not_null(desc, "descriptor"));
    text = call.plan.cuda ? fw::cuda::to_text(call.plan, call.device) : fw::to_text(call.plan);
  });
  if (status != FW_OK) return 0;
  if (buffer != nullptr && bytes > 0) {
    const size_t count = std::min(bytes - 1, text.size());
    std::memcpy(buffer, text.data(), count);
    buffer[count] = 0;
  }
  return text.size();
}

fw_status fw_forward(const fw_desc* desc, const fw_inputs* in, const fw_outputs* out, void* saved, size_t saved_bytes, void* workspace,
                     size_t workspace_bytes) {
  return guarded(
      [&] { forward(not_null(desc, "descriptor"), not_null(in, "inputs"), not_null(out, "outputs"), saved, saved_bytes, workspace, workspace_bytes); });
}

fw_status fw_backward(const fw_desc* desc, const fw_inputs* in, const fw_outputs* d, const fw_inputs* grads, const void* saved, size_t saved_bytes,
                      void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    const Call call(not_null(desc, "descriptor"));
    if (call.plan.slots != nullptr) fw::fail_usage("descriptor: slots: expected NULL in fw_backward, got an address");
    check_buffer("workspace", workspace, workspace_bytes, saved != nullptr ? call.backward_bytes() : call.backward_alone_bytes());
    if (saved != nullptr) check_buffer("saved", saved, saved_bytes, call.saved_bytes());
    const fw_inputs& inputs = not_null(in, "inputs");
    const fw_outputs& cotangents = not_null(d, "cotangents");
    const fw_inputs& gradients = not_null(grads, "gradients");
    if (call.plan.dtype == FW_F32) {
      backward_as<float>(call, inputs, cotangents, gradients, saved, workspace);
    } else {
      backward_as<double>(call, inputs, cotangents, gradients, saved, workspace);
    }
  });
}

fw_status fw_step(const fw_desc* desc, const fw_inputs* in, const fw_outputs* out, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    fw_desc step = not_null(desc, "descriptor");
    step.form = FW_FORM_TOKEN;
    forward(step, not_null(in, "inputs"), not_null(out, "outputs"), nullptr, 0, workspace, workspace_bytes);
  });
}

const char* fw_last_error(void) { return t_error.c_str(); }

const char* fw_version(void) { return "0.1.0"; }

void fw_set_threads(int threads) { fw::set_num_threads(threads); }

int fw_get_threads(void) { return fw::num_threads(); }

const char* fw_simd_target(void) { return fw::cpu::simd_target_name(); }

}  // extern "C"
