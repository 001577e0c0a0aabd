// A rewrite lets kernels serve a call that they do not take as it is. It gives what is behind it another call: tensors
// of another type, another rule, or two calls in place of one. A call passes the rewrites that it needs one after the
// other (rewrites(), in order), then its kernels, and the rewrites again in reverse order. Each rewrite has a part of
// the workspace for its tensors.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "scan/cuda/device_plan.h"
#include "scan/cuda/scan.h"
#include "scan/plan.h"
#include "scan/tensors.h"

namespace fw::cuda {

// A call's tensors in front of a rewrite and behind it.
struct ForwardTensors {
  Inputs<float> in;
  Outputs<float> out;
  CallForms forms;
  void* saved = nullptr;  // null: nothing is saved
};
struct BackwardTensors {
  Inputs<float> in;
  Outputs<float> d;
  Inputs<float> grads;
  CallForms forms;
  const void* saved = nullptr;  // null: forward has saved nothing
};

// Kernels are queued on the plan's stream. Calls do not change a rewrite, so that several threads may run one call,
// each with its own workspace.
class Rewrite {
 public:
  virtual ~Rewrite() = default;

  // Bytes of the workspace, a multiple of 64.
  virtual size_t forward_bytes() const = 0;
  virtual size_t backward_bytes() const = 0;
  // Bytes that are saved for backward, where `behind` are by what follows (0: nothing is saved).
  virtual size_t saved_bytes(size_t behind) const { return behind; }
  // Calls that one becomes. Of more than one the rewrite is the last.
  virtual int calls() const { return 1; }

  // Queues what makes the tensors behind the rewrite, of its call i.
  virtual ForwardTensors open(const ForwardTensors& front, int i, void* workspace) const = 0;
  virtual BackwardTensors open(const BackwardTensors& front, int i, void* workspace) const = 0;
  // Queues the conversion of the results in behind, which open() returned for the last call, to those of front.
  virtual void close(const ForwardTensors& front, const ForwardTensors& behind, void* workspace) const = 0;
  virtual void close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const = 0;

  // For fw_plan_text: lines "name: value", and the kernels before and after those behind, with their separators.
  virtual std::string lines() const { return {}; }
  virtual std::string before(bool backward) const = 0;
  virtual std::string after(bool backward) const = 0;
  // Whether kernels take some logits as they are.
  virtual bool fuses(bool) const { return false; }
};

// A call as its kernels know it.
struct KernelCall {
  std::shared_ptr<const Plan> plan;
  DevicePlan device;
};

// What a rewrite is made from. All of it outlives the rewrite.
struct RewriteContext {
  const Plan& plan;                     // of the call in front
  std::span<const KernelCall> kernels;  // behind it: one, or Rewrite::calls()
  bool last = false;                    // kernels are right behind it
  size_t saved_bytes = 0;               // by what is behind it
};

struct RewriteLine {
  // Whether a call needs it. plan: of the call in front.
  bool (*takes)(const Plan& plan);
  // The call behind it, i of Rewrite::calls(); null: as in front. Throws Error(kUsage) for what the rewrite cannot
  // serve.
  Plan (*plan)(const Plan& front, int i);
  int calls;
  std::unique_ptr<Rewrite> (*make)(const RewriteContext& context);
};
// All, in the order in which a call passes them.
std::span<const RewriteLine> rewrites();

// A call with its rewrites.
class RewrittenCall {
 public:
  // plan: of the caller's call; it outlives this. Others: of make_device_plan(). Throws Error(kUsage).
  RewrittenCall(const Plan& plan, int sm_count, Arch arch = Arch::kSm90);
  RewrittenCall(const RewrittenCall&) = delete;
  RewrittenCall& operator=(const RewrittenCall&) = delete;

  size_t forward_bytes() const;
  size_t forward_saving_bytes() const;  // with a saved buffer
  size_t backward_bytes() const;
  size_t backward_alone_bytes() const;  // without one
  size_t saved_bytes() const { return saved_bytes_; }

  const Plan& plan() const { return plan_; }
  std::span<const KernelCall> kernels() const { return kernels_; }
  bool chunk_form() const { return kernels_.front().device.chunk_form; }
  std::span<const std::unique_ptr<Rewrite>> rewrites() const { return rewrites_; }

  void forward(const ForwardTensors& tensors, void* workspace) const { forward_from(0, 0, tensors, workspace); }
  void backward(const BackwardTensors& tensors, void* workspace) const { backward_from(0, 0, tensors, workspace); }

 private:
  void forward_from(size_t step, size_t call, const ForwardTensors& tensors, void* workspace) const;
  void backward_from(size_t step, size_t call, const BackwardTensors& tensors, void* workspace) const;

  const Plan& plan_;
  std::vector<KernelCall> kernels_;
  std::vector<std::shared_ptr<const Plan>> plans_;  // in front of each rewrite
  std::vector<std::unique_ptr<Rewrite>> rewrites_;
  size_t saved_bytes_ = 0;
};

// Of a call of FW_FORM_DECODE `token` is what makes its outputs; null: call does.
// Bytes of forward's workspace.
size_t forward_bytes(const RewrittenCall& call, const RewrittenCall* token);
// Lines "name: value" for people (call/text.cpp).
std::string to_text(const RewrittenCall& call, const RewrittenCall* token = nullptr);

}  // namespace fw::cuda
