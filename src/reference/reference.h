// The reference: every rule in double precision, token by token, straight from recurrence.md sections 1 to 3, with its
// own adjoint (a reverse sweep over the stored states). It shares no code with rule/front.h and src/scan, so that an
// error in one cannot hide in the other; only tests and `fastweight selftest` link it. Slow and plain on purpose.
//
// Layouts are contiguous. Tokens of all sequences lie one after the other (SeqLayout), T tokens and N sequences in all;
// states are K-first. A vector that a rule does not use is empty.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/seq_layout.h"
#include "rule/gates.h"
#include "rule/rule.h"

namespace fw {

struct ReferenceShape {
  SeqLayout sequences;
  int64_t H = 1, HV = 1, K = 1, V = 1;  // HV a multiple of H; value head h reads key head h / (HV / H)
  int64_t g_heads = 0;                  // heads of a channel decay: H or HV (H where k comes from it); 0: H
  int64_t erase_heads = 0;              // heads of the erase gate: H or HV; 0: H
  double scale = 0;                     // of the read vector; 0: K^-1/2
  Gates gates = {};                     // which gates are logits
  bool rate_per_channel = false;        // a_log of a channel decay has a number a channel
};

// Tensors of tokens, with their heads and widths, are those of rule/tokens.def: q, k [T, H, K], v [T, HV, V], .... G:
// log-decay <= 0, -inf allowed; of g and the erase gate heads are g_heads and erase_heads where they may be either.
struct ReferenceInputs {
#define FW_TOKEN(name, heads, width, used) std::vector<double> name;
#include "rule/tokens.def"
  std::vector<double> precond_center;   // [H]
  std::vector<double> initial_state;    // [N, HV, K, V]; empty: zero
  std::vector<double> initial_precond;  // [N, H, K]; empty: zero
  // Of log-decays given as logits; empty: zero.
  std::vector<double> a_log;                           // [heads of g] or [heads of g, K]
  std::vector<double> dt_bias;                         // [heads of g] or, channel decay, [heads of g, K]
  std::vector<double> precond_a_log, precond_dt_bias;  // [H]
};

struct ReferenceOutputs {
  std::vector<double> o;              // [T, HV, V]
  std::vector<double> final_state;    // [N, HV, K, V]
  std::vector<double> final_precond;  // [N, H, K]; empty without preconditioner
};

// One input or output: what tests, packers and generators loop over. The names are those of fw_inputs and fw_outputs.
template <class Struct>
struct ReferenceField {
  const char* name;
  std::vector<double> Struct::*values;
  std::vector<int64_t> (*shape)(const Rule&, const ReferenceShape&);  // empty: the rule does not use it
  bool optional;                                                      // an empty vector is legal and means zero

  int64_t count(const Rule& rule, const ReferenceShape& s) const {
    const std::vector<int64_t> dims = shape(rule, s);
    int64_t n = dims.empty() ? 0 : 1;
    for (int64_t dim : dims) n *= dim;
    return n;
  }
};
std::span<const ReferenceField<ReferenceInputs>> reference_input_fields();
std::span<const ReferenceField<ReferenceOutputs>> reference_output_fields();

// o and the final states. Throws Error(kUsage) naming the input whose size does not fit the rule and the shape.
ReferenceOutputs reference_forward(const Rule& rule, const ReferenceShape& shape, const ReferenceInputs& in);

// Gradients of sum(o * d.o) + sum(final_state * d.final_state) + sum(final_precond * d.final_precond), each of the size
// of its input (an initial state that is absent gets no gradient). A cotangent that is empty is zero. Where exp(g) is 0
// the gradient of g is 0.
ReferenceInputs reference_backward(const Rule& rule, const ReferenceShape& shape, const ReferenceInputs& in,
                                   const ReferenceOutputs& d);

}  // namespace fw
