// The scan on the device after the C header, on checked arguments: queues the kernels of a call. Linked is scan.cpp, or
// no_cuda/scan.cpp where there is no CUDA.
#pragma once

#include "scan/cuda/device_plan.h"
#include "scan/cuda/require_device.h"
#include "scan/plan.h"
#include "scan/tensors.h"

namespace fw::cuda {

// Gates that the kernels form of logits in `in`; nothing: all are values.
struct CallForms {
  FusedGates gates;
  float* parts = nullptr;  // GradientArgs::form_parts
  bool made_last = false;  // gate_values() is the kernel before the call's
};

// device: make_device_plan() of the plan. saved: its saved bytes, or null.
void scan_forward(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
                  const Outputs<float>& out, void* saved, void* workspace);

// In front of a forward call: what lies in rings into the states that it starts from, in place.
void fold_ring(const Plan& plan, const Inputs<float>& in, const Outputs<float>& out);

// saved: as scan_forward left it, or null: then it is made again at the start of the workspace (backward_alone_bytes).
void scan_backward(const Plan& plan, const DevicePlan& device, const Inputs<float>& in, const CallForms& forms,
                   const Outputs<float>& d, const Inputs<float>& grads, const void* saved, void* workspace);

}  // namespace fw::cuda
