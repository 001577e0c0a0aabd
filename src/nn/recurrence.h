// The recurrence as the modules see it: views in, the C header (fastweight.h) behind. One object is one call's shape.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/arena.h"
#include "base/mat.h"
#include "base/seq_layout.h"
#include "fastweight/fastweight.h"
#include "rule/rule.h"

namespace fw {

// Views of packed tokens; data null: absent. Which the rule needs: rule.h. The gradients have the same type.
template <class T>
struct RecurrenceInputs {
  Mat<T> q, k;                     // [T, H K]
  Mat<T> v;                        // [T, HV V]
  Mat<T> g;                        // [T, HV] (scalar decay) or [T, H K] or [T, HV K]
  Mat<T> beta, lambda;             // [T, HV]
  Mat<T> erase;                    // [T, H K]; scalar: [T, HV]
  Mat<T> write;                    // [T, HV V]; scalar: [T, HV]
  Mat<T> erase_key;                // [T, H K]
  Mat<T> read_correction;          // [T, HV]
  Mat<T> precond_g, precond_beta;  // [T, H]
  T* precond_center = nullptr;     // [H]
  T* s = nullptr;                  // initial state [N, HV, K, V]
  T* a = nullptr;                  // initial preconditioner state [N, H, K]
};

template <class T>
class Recurrence {
 public:
  // The layout must outlive the object.
  Recurrence(const Rule& rule, const SeqLayout& layout, int64_t heads, int64_t v_heads, int64_t key_dim, int64_t value_dim, fw_form form = FW_FORM_AUTO);
  size_t saved_bytes() const { return sizes_.saved; }
  // o [T, HV V] is overwritten; final_s, final_a may be null or the initial ones. saved (saved_bytes(), 64-byte aligned) or
  // null. Workspace comes from the arena and goes back to it. Without saved, sequences of one token each take the decode step.
  void forward(const RecurrenceInputs<T>& in, Mat<T> o, T* final_s, T* final_a, void* saved, Arena& arena) const;
  // Overwrites what grads names.
  void backward(const RecurrenceInputs<T>& in, Mat<const T> d_o, const RecurrenceInputs<T>& grads, const void* saved, Arena& arena) const;

 private:
  fw_tensor heads_tensor(Mat<T> m, int64_t heads) const;
  fw_inputs inputs(const RecurrenceInputs<T>& in) const;

  fw_desc desc_;
  fw_sizes sizes_;
  int64_t sequences_;
  bool decay_per_channel_, scalar_erase_, scalar_write_;
  bool single_tokens_;
};

}  // namespace fw
