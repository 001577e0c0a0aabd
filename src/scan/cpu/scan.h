// The scan of the CPU behind its backend (scan/backend.h), on checked arguments. A task is one value head (forward: and
// one block of value columns) or one key head with its group of value heads (backward) of one sequence; tasks share
// nothing that they write.
#pragma once

#include <cstddef>

#include "scan/plan.h"
#include "scan/tensors.h"

namespace fw::cpu {

// Elements of workspace for a plan.
template <class T>
size_t forward_elements(const Plan& plan);
template <class T>
size_t backward_elements(const Plan& plan);

// saved: plan.saved_elements() or null; workspace: forward_elements(plan).
template <class T>
void scan_forward(const Plan& plan, const Inputs<T>& in, const Outputs<T>& out, T* saved, T* workspace);

// saved: as scan_forward left it. grads: tensors without data are not computed. workspace: backward_elements(plan).
template <class T>
void scan_backward(const Plan& plan, const Inputs<T>& in, const Outputs<T>& d, const Inputs<T>& grads, const T* saved,
                   T* workspace);

}  // namespace fw::cpu
