// Rules that erase before a decay of one number (Rule::can_divide_erase_gate) on kernels that erase after it:
//     S = alpha S' - b w (S'^T p)^T + w z^T,  Sbar = alpha S'    =>    S = Sbar - (b / alpha) w (Sbar^T p)^T + w z^T
// The kernels take b / alpha as a scalar erase gate, also where the erase is tied to the gain. The quotient is a number
// also where alpha = 0: such a log-decay counts as -40 in the token form and as -9 in the chunk form, whose kernels
// bound decays of single tokens. That leaves 4e-18 and 1.2e-4 of a state where nothing should be left.
#pragma once

#include <cstddef>

#include "scan/cuda/device_plan.h"
#include "scan/tensors.h"

namespace fw::cuda {

// What the kernels know of a call: its erase gate is a scalar. Other rules remain as they are.
Plan with_divided_erase_gate(Plan plan);

// The float32 rows of a call's tokens and value heads, in the workspace.
class EraseOverDecay {
 public:
  // plan: of the call; it outlives this.
  explicit EraseOverDecay(const Plan& plan);
  // Bytes of the workspace. Both are 0, and what follows does nothing, for other rules.
  size_t forward_bytes() const { return 2 * row_bytes_; }
  size_t backward_bytes() const { return 5 * row_bytes_; }

  // Queues the making of gates and log-decays: the inputs with them.
  Inputs<float> inputs(const Inputs<float>& in, void* workspace) const;
  // Where the kernels leave their gradients, and the way from there to what the caller asks for.
  Inputs<float> open(const Inputs<float>& wanted, void* workspace) const;
  void close(const Inputs<float>& in, const Inputs<float>& opened, const Inputs<float>& wanted) const;

 private:
  TokenTensor<float> rows(void* workspace, int index) const;

  const Plan& plan_;
  bool tied_ = false;  // the erase is tied to the gain
  float least_ = 0;    // log-decay
  size_t row_bytes_ = 0;
};

// Of every token and value head; tensors without data: gate 1, gradients 0 or not asked for.
struct EraseOverDecayArgs {
  TokenArg gate, g;
  TokenArg divided, decay;      // gate / exp(max(g, least)) and max(g, least)
  TokenArg d_divided, d_decay;  // gradients that the kernels leave of these
  TokenArg d_beta;              // and of a gain that the gate is, besides
  TokenArg d_gate, d_g;         // what the caller asks for
  float least = 0;
};
// Fills divided and decay.
void divide_erase_gate(const Plan& plan, const EraseOverDecayArgs& args);
// d_gate = d_beta + d_divided / exp(decay), d_g = d_decay - d_divided divided, which is 0 below `least`.
void divide_erase_gate_backward(const Plan& plan, const EraseOverDecayArgs& args);

}  // namespace fw::cuda
