// The recurrence as the modules see it: views in, the C header (fastweight.h) behind. One object is one call's shape.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <type_traits>

#include "base/arena.h"
#include "base/device.h"
#include "base/mat.h"
#include "base/seq_layout.h"
#include "fastweight/fastweight.h"
#include "nn/recurrence_shape.h"
#include "ops/ops.h"
#include "rule/tokens.h"

namespace fw {

// Views of packed tokens, the tensors of rule/tokens.def as [T, heads * width]; data null: absent. The gradients have
// the same type. Log-decays, whose digits add up over a sequence, and states have the type of statistics.
template <class T>
struct RecurrenceInputs {
#define FW_TOKEN(name, heads, width, used) Mat<std::conditional_t<is_log_decay(#name), Wide<T>, T>> name;
#include "rule/tokens.def"
  // Where the shape's log-decays are logits: these in place of g, with a_log [heads of g] (absent: 0) and dt_bias
  // [heads of g, width]. Other gates that are logits lie in place of their values.
  Mat<T> g_logits;
  Wide<T>*a_log = nullptr, *dt_bias = nullptr;
  Wide<T>* precond_center = nullptr;  // [H]
  Wide<T>* s = nullptr;               // initial state [N, HV, K, V], or [N, HV, V, K] (RecurrenceShape::v_first)
  Wide<T>* a = nullptr;               // initial preconditioner state [N, H, K]
};

template <class T>
class Recurrence {
 public:
  // Calls run on the device, in its order, with as many threads as there are now.
  Recurrence(const RecurrenceShape& shape, const SeqLayout& layout, const Device& device);
  size_t saved_bytes() const { return sizes_.saved; }
  // o [T, HV V] is overwritten; final_s, final_a may be null or the initial ones. saved (saved_bytes(), 64-byte
  // aligned) or null. Workspace comes from the arena and goes back to it. Without saved, sequences of one token each
  // take the decode step. ring [N, HV, ring tokens, ring_width()]: of a shape with one, whose final_s is in.s. States
  // of a shape with slots are the pool, and the final ones the initial ones.
  void forward(const RecurrenceInputs<T>& in, Mat<T> o, Wide<T>* final_s, Wide<T>* final_a, void* saved, Arena& arena,
               Wide<T>* ring = nullptr) const;
  // Overwrites what grads names. Without saved the forward pass is run again.
  void backward(const RecurrenceInputs<T>& in, Mat<const T> d_o, const RecurrenceInputs<T>& grads, const void* saved,
                Arena& arena) const {
    backward(in, d_o, nullptr, grads, saved, arena);
  }
  // With a gradient of the final state, or null.
  void backward(const RecurrenceInputs<T>& in, Mat<const T> d_o, Wide<T>* d_final_s, const RecurrenceInputs<T>& grads,
                const void* saved, Arena& arena) const;

 private:
  // Tokens as those of one packed sequence, or (a step) as one of each sequence.
  std::array<int64_t, 4> state_shape() const;
  fw_inputs inputs(const RecurrenceInputs<T>& in, bool step) const;

  struct DestroyPlan {
    void operator()(fw_plan* plan) const { fw_plan_destroy(plan); }
  };
  using PlanHandle = std::unique_ptr<fw_plan, DestroyPlan>;
  // Of a descriptor; its sizes.
  static PlanHandle make_plan_handle(const fw_desc& desc, bool step, fw_sizes& sizes);

  fw_desc desc_;
  int64_t ring_, ring_width_;    // rows of the steps' ring (0: none), numbers of each
  int64_t step_tokens_;          // of a sequence in a step
  PlanHandle plan_, step_plan_;  // step: of sequences of one token each, else null
  fw_sizes sizes_, step_sizes_;
  int64_t sequences_;
  int64_t states_;  // of the initial and final ones: sequences, or slots
  std::array<TokenSpec, kTokenTensors> specs_;
  bool single_tokens_;
};

// What lies in the rings of N sequences goes into their states [N, HV, K, V] (or [N, HV, V, K]), in place. shape.ring
// has the positions of the next tokens. A device that only plans does nothing.
template <class W>
void fold_rings(const RecurrenceShape& shape, int64_t sequences, W* states, W* rings, Device& device);

// Throws Error(kUsage) where the library has no such ring for a step on the device, with its reason.
template <class T>
void require_ring(const RecurrenceShape& shape, int64_t sequences, const Device& device);

// The same of slots for `tokens` tokens of a sequence. what: begins the reason.
template <class T>
void require_slots(const RecurrenceShape& shape, int64_t tokens, const Device& device, const std::string& what);

// The recurrences of a model's layers on its device, planned once as long as the sequences stay the same. Layers of one
// shape share one, forward and backward, and so do the passes of a run.
template <class T>
class Recurrences {
 public:
  explicit Recurrences(const Device& device) : device_(device) {}
  // Valid until it is asked for another layout.
  const Recurrence<T>& of(const RecurrenceShape& shape, const SeqLayout& layout);

 private:
  struct Planned {
    RecurrenceShape shape;
    Recurrence<T> recurrence;
  };
  const Device& device_;
  int threads_ = 0;   // a plan's workspace depends on their number
  SeqLayout layout_;  // that all are planned for
  std::deque<Planned> planned_;
};

}  // namespace fw
