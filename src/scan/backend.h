// The scan on a device. The C functions and the plan ask the descriptor's backend and know no device themselves: what
// it takes of a descriptor, and how a call runs on it. A new device is one of these (cpu/backend.cpp,
// cuda/call/backend.cpp) and its line in backend_of().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "fastweight/fastweight.h"
#include "scan/plan.h"

namespace fw {

// One call: a checked descriptor and what the device makes of it.
class Call {
 public:
  explicit Call(Plan plan) : plan_(std::move(plan)) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  virtual ~Call() = default;
  const Plan& plan() const { return plan_; }

  // Bytes of workspace, and of what forward saves; backward_alone: with room for the saved buffer, where the caller has
  // none.
  virtual size_t forward_bytes() const = 0;
  virtual size_t forward_saving_bytes() const { return forward_bytes(); }  // with a saved buffer
  virtual size_t backward_bytes() const = 0;
  virtual size_t saved_bytes() const = 0;
  virtual size_t backward_alone_bytes() const = 0;
  // Lines "name: value" for people.
  virtual std::string text() const = 0;

  // Both check the tensors and throw Error(kUsage) naming the one that is wrong. saved may be null, workspace has the
  // bytes above.
  virtual void forward(const fw_inputs& in, const fw_outputs& out, void* saved, void* workspace) const = 0;
  virtual void backward(const fw_inputs& in, const fw_outputs& d, const fw_inputs& grads, const void* saved,
                        void* workspace) const = 0;

 private:
  Plan plan_;
};

struct Backend {
  const char* name;     // in messages: "on CUDA"
  bool doubles;         // dtype FW_F64
  int64_t most_key;     // K
  int64_t most_heads;   // HV
  int64_t most_tokens;  // of all sequences
  int64_t chunk;        // the one size of a chunk that it has; 0: any
  bool segments;        // whether a long sequence may be cut, at multiples of that size
  bool device_seqlens;  // FW_SEQLENS_DEVICE
  // What it expects instead of a rule with H key and HV value heads that it lacks; null: nothing.
  const char* (*lacks)(const Rule& rule, int64_t H, int64_t HV);
  void (*require)();  // throws DeviceError unless this machine has such a device
  std::unique_ptr<Call> (*call)(Plan plan);
};

const Backend& cpu_backend();
const Backend& cuda_backend();

// By fw_device; null for another number.
const Backend* backend_of(int32_t device);

}  // namespace fw
