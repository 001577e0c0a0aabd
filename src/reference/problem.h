// A whole recurrence problem (rule, shape, inputs, cotangents) as one value: random ones for tests and selftest, and
// slices of them. Every value of a random problem is a float, so that float and double runs start from the same
// numbers.
#pragma once

#include "reference/reference.h"

namespace fw {

struct ReferenceProblem {
  Rule rule;
  ReferenceShape shape;
  ReferenceInputs in;
  ReferenceOutputs d;  // cotangents

  ReferenceOutputs forward() const { return reference_forward(rule, shape, in); }
  ReferenceInputs backward() const { return reference_backward(rule, shape, in, d); }
};

struct ProblemOptions {
  SeqLayout sequences = SeqLayout::uniform(1, 16);
  int64_t H = 1, HV = 1, K = 8, V = 8;
  bool gates_per_value_head = false;  // channel decay and erase gate have HV heads instead of H
  bool initial_state = true;          // and initial_precond; false: absent
  bool edge_decays = false;           // about a third of g and precond_g is 0, -1e4 or -inf
  double scale = 0;
  uint64_t seed = 1;
  Gates gates = {};               // which gates are logits, with every parameter that they have
  bool rate_per_channel = false;  // a_log of a channel decay
};

// All gates of the rule as logits; log-decays as `decay`.
Gates logits_of(const Rule& rule, GateActivation decay);

// Stable and realistic: q and k of size 1 (Kaczmarz keys between 0.1 and 3), gates in (0, bound), g = -softplus of a
// normal. Cotangents are normal for o and every final state.
ReferenceProblem random_problem(const Rule& rule, const ProblemOptions& options);

// Tokens [begin, end) of every sequence (fewer where a sequence is shorter), with the same initial states and
// cotangents of final states: set those to carry a state from slice to slice.
ReferenceProblem slice_tokens(const ReferenceProblem& problem, int64_t begin, int64_t end);

// The same with another beginning in each sequence, at most `count` tokens.
ReferenceProblem slice_tokens(const ReferenceProblem& problem, const std::vector<int64_t>& begins, int64_t count);

// One sequence on its own.
ReferenceProblem slice_sequence(const ReferenceProblem& problem, int64_t n);

}  // namespace fw
