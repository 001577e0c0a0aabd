// The CPU's scan as a backend.
#include "scan/backend.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/error.h"
#include "base/threads.h"
#include "scan/cpu/scan.h"
#include "scan/tensors.h"

namespace fw {
namespace {

template <class T>
class CpuCall final : public Call {
 public:
  using Call::Call;

  size_t forward_bytes() const override { return cpu::forward_elements<T>(plan()) * sizeof(T); }
  size_t backward_bytes() const override { return cpu::backward_elements<T>(plan()) * sizeof(T); }
  size_t saved_bytes() const override { return static_cast<size_t>(plan().saved_elements()) * sizeof(T); }
  size_t backward_alone_bytes() const override {
    return std::max(forward_bytes(), backward_bytes()) +
           static_cast<size_t>(padded(plan().saved_elements())) * sizeof(T);
  }

  std::string text() const override {
    const Plan& p = plan();
    const char* form = p.form == FW_FORM_TOKEN    ? "token"
                       : p.form == FW_FORM_CHUNK  ? "chunk"
                       : p.form == FW_FORM_DECODE ? "decode: forward by the token form, backward in chunks"
                                                  : "chunk, sequences of one token by the token form";
    const std::string checkpoints =
        p.checkpoints.interval > 0 ? fmt::format("checkpoints: every {} tokens\n", p.checkpoints.interval) : "";
    return fmt::format(
        "rule: {}\nsequences: {} of at most {} tokens, {} in all\nform: {}\nchunks: {} of {} tokens\n{}{}threads: "
        "{}\nworkspace forward: {} bytes\n"
        "workspace backward: {} bytes\nsaved: {} bytes\n",
        to_string(p.rule), p.N, p.longest, p.tokens(), form, p.total_chunks(), p.chunk, checkpoints, ring_text(p),
        p.threads, forward_bytes(), backward_bytes(), saved_bytes());
  }

  void forward(const fw_inputs& in, const fw_outputs& out, void* saved, void* workspace) const override {
    const ThreadsOfCall threads(plan().threads);  // every thread has its part of the workspace
    const Inputs<T> inputs = check_inputs<T>(plan(), in, TensorRole::kInput);
    const Outputs<T> outputs = check_outputs<T>(plan(), out, TensorRole::kInput);
    check_ring_tensors<T>(plan(), inputs, outputs);
    cpu::scan_forward<T>(plan(), inputs, outputs, static_cast<T*>(saved), static_cast<T*>(workspace));
  }

  void backward(const fw_inputs& in, const fw_outputs& d, const fw_inputs& grads, const void* saved,
                void* workspace) const override {
    const ThreadsOfCall threads(plan().threads);  // every thread has its part of the workspace
    const Inputs<T> inputs = check_inputs<T>(plan(), in, TensorRole::kInput);
    const Outputs<T> cotangents = check_outputs<T>(plan(), d, TensorRole::kGradient);
    const Inputs<T> gradients = check_gradients<T>(plan(), grads, inputs);
    T* space = static_cast<T*>(workspace);
    const T* kept = static_cast<const T*>(saved);
    if (kept == nullptr) {
      T* recomputed = space;
      space += padded(plan().saved_elements());
      cpu::scan_forward<T>(plan(), inputs, Outputs<T>{}, recomputed, space);
      kept = recomputed;
    }
    cpu::scan_backward<T>(plan(), inputs, cotangents, gradients, kept, space);
  }
};

std::unique_ptr<Call> call(Plan plan) {
  if (plan.dtype == FW_F64) return std::make_unique<CpuCall<double>>(std::move(plan));
  return std::make_unique<CpuCall<float>>(std::move(plan));
}

}  // namespace

const Backend& cpu_backend() {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  static constexpr Backend kBackend = {
      "the CPU", true,  kAny,
      kAny,      kAny,  0,
      false,     false, [](const Rule&, int64_t, int64_t) -> const char* { return nullptr; },
      [] {},     call};
  return kBackend;
}

}  // namespace fw
