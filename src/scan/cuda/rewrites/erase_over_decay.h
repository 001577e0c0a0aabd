// Rules that erase before a decay of one number (Rule::can_divide_erase_gate) on kernels that erase after it:
//     S = alpha S' - b w (S'^T p)^T + w z^T,  Sbar = alpha S'    =>    S = Sbar - (b / alpha) w (Sbar^T p)^T + w z^T
// The kernels take b / alpha as a scalar erase gate, also where the erase is tied to the gain. The quotient is a number
// also where alpha = 0: such a log-decay counts as -40 in the token form and as -9 in the chunk form, whose kernels
// bound decays of single tokens. That leaves 4e-18 and 1.2e-4 of a state where nothing should be left.
#pragma once

#include <cstddef>

#include "scan/cuda/rewrites/rewrite.h"

namespace fw::cuda {

class EraseOverDecay final : public Rewrite {
 public:
  explicit EraseOverDecay(const RewriteContext& context);
  size_t forward_bytes() const override { return 2 * row_bytes_; }
  size_t backward_bytes() const override { return 5 * row_bytes_; }
  ForwardTensors open(const ForwardTensors& front, int i, void* workspace) const override;
  BackwardTensors open(const BackwardTensors& front, int i, void* workspace) const override;
  void close(const ForwardTensors&, const ForwardTensors&, void*) const override {}
  void close(const BackwardTensors& front, const BackwardTensors& behind, void* workspace) const override;
  std::string before(bool) const override { return "erase_over_decay -> "; }
  std::string after(bool backward) const override { return backward ? " -> erase_over_decay" : ""; }

 private:
  Inputs<float> inputs(const Inputs<float>& in, void* workspace) const;
  TokenTensor<float> rows(void* workspace, int index) const;  // float32, of a call's tokens and value heads

  const Plan& plan_;
  bool tied_ = false;       // the erase is tied to the gain
  bool uses_beta_ = false;  // the kernels have a gain too
  float least_ = 0;         // log-decay
  size_t row_bytes_ = 0;
};
extern const RewriteLine kEraseOverDecayRewrite;

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
