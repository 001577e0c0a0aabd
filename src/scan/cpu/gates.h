// Gates given as logits. Their values are made before the heads run and their gradients taken back to the logits after
// them, each in rows of all heads of a token. So neither kernels nor stage know how a gate was given. A call without
// logits takes no room here and copies nothing.
#pragma once

#include <array>

#include "rule/gates.h"
#include "scan/cpu/head_scan.h"
#include "scan/plan.h"
#include "scan/tensors.h"

namespace fw::cpu {

template <class T>
class GatePass {
 public:
  // backward: also room for gradients. With a null base the bump only counts.
  GatePass(const Plan& plan, bool backward, Bump<T>& bump);

  // The inputs with values where the caller has logits.
  Inputs<T> values(const Inputs<T>& in) const;
  // The gradients that the heads are to write: those of values where the caller has logits, and for sums over them
  // where he asks for those alone.
  Inputs<T> open(const Inputs<T>& in, const Inputs<T>& grads) const;
  // From `opened` to what the caller asks for: logits, a_log, dt_bias. Sums over tokens are taken in blocks of a fixed
  // number, in order.
  void close(const Inputs<T>& in, const Inputs<T>& opened, const Inputs<T>& grads) const;

 private:
  static constexpr int64_t kBlock = 256;  // tokens of a task

  struct Gate {
    GateSpec spec;
    T *values = nullptr, *grads = nullptr;  // [tokens, heads, channels]
    T* parts = nullptr;                     // [blocks, 2, padded row]: sums over the tokens of a block
  };
  // Numbers a row has in all heads of a token.
  static int64_t row(const TokenTensor<T>& x) { return x.heads * x.dim; }
  int64_t blocks() const { return (plan_.tokens() + kBlock - 1) / kBlock; }
  TokenTensor<T> rows_of(const TokenTensor<T>& like, T* data) const;
  // body(first token, last token) for every block, side by side.
  template <class Body>
  void for_blocks(Body&& body) const;

  const Plan& plan_;
  std::array<Gate, kGates> gates_{};
};

}  // namespace fw::cpu
