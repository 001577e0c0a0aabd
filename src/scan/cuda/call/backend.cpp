// The scan on CUDA devices as a backend. Built everywhere: sizes and texts need no device, and calls without one say so (no_cuda/scan.cpp).
#include "scan/backend.h"

#include "scan/cuda/call/device.h"
#include "scan/cuda/call/plan.h"
#include "scan/cuda/call/scan.h"

namespace fw {
namespace {

constexpr int64_t kMostKey = 256;                                   // registers of the token kernels
constexpr int64_t kMostHeads = 65535;                               // of a grid's second and third dimension
constexpr int64_t kMostTokens = (int64_t{1} << 31) - cuda::kChunk;  // rows are 32-bit numbers, a chunk beyond the end too

class CudaCall final : public Call {
 public:
  explicit CudaCall(Plan plan) : Call(std::move(plan)), device_(make_device_plan()) {}

  size_t forward_bytes() const override { return device_.forward.bytes; }
  size_t backward_bytes() const override { return device_.backward.bytes; }
  size_t saved_bytes() const override { return device_.saved.bytes; }
  size_t backward_alone_bytes() const override { return device_.backward_alone_bytes(); }
  std::string text() const override { return cuda::to_text(plan(), device_); }

  void forward(const fw_inputs& in, const fw_outputs& out, void* saved, void* workspace) const override {
    const cuda::DeviceScope scope(plan().device_number);
    const Inputs<float> inputs = check_inputs<float>(plan(), in, TensorRole::kInput);
    cuda::scan_forward(plan(), device_, inputs, check_outputs<float>(plan(), out, TensorRole::kInput), saved, workspace);
  }
  void backward(const fw_inputs& in, const fw_outputs& d, const fw_inputs& grads, const void* saved, void* workspace) const override {
    const cuda::DeviceScope scope(plan().device_number);
    const Inputs<float> inputs = check_inputs<float>(plan(), in, TensorRole::kInput);
    const Outputs<float> cotangents = check_outputs<float>(plan(), d, TensorRole::kGradient);
    cuda::scan_backward(plan(), device_, inputs, cotangents, check_gradients<float>(plan(), grads, inputs), saved, workspace);
  }

 private:
  cuda::DevicePlan make_device_plan() const {
    // A plan can be made where there is no device.
    if (plan().device_number < 0) return cuda::make_device_plan(plan(), cuda::multiprocessors());
    const cuda::DeviceScope scope(plan().device_number);
    return cuda::make_device_plan(plan(), cuda::multiprocessors());
  }

  cuda::DevicePlan device_;
};

}  // namespace

const Backend& cuda_backend() {
  static constexpr Backend kBackend = {"CUDA",
                                       false,
                                       kMostKey,
                                       kMostHeads,
                                       kMostTokens,
                                       cuda::kChunk,
                                       true,
                                       true,
                                       true,
                                       [] { cuda::require_device(true); },
                                       [](Plan plan) -> std::unique_ptr<Call> { return std::make_unique<CudaCall>(std::move(plan)); }};
  return kBackend;
}

}  // namespace fw
