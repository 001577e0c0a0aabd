// How far one step of a rule can stretch the state: the eigenvalue 1 - e.w of the transition I - w e^T (its others are
// 1, and no decay is above 1). Of an erase that looks before the decay, those of Diag(decay) - w e^T. While it stays in
// [-1, 1] a step does not let the state grow along its eigenvector; what it depends on is what a rule's gains, norms
// and normaliser promise of their inputs.
#pragma once

#include <string>

#include "rule/axes.h"

namespace fw {

struct StepBound {
  bool bounded = true;       // the eigenvalue stays in [-1, 1] for all inputs that `inputs` allows
  double low = 1, high = 1;  // where it stays when bounded
  // bounded: what the inputs must keep to, "" when nothing; otherwise what would keep it bounded
  std::string inputs;
  std::string reason;  // not bounded: what can grow
  // w and e are parallel: the step's norm is its largest eigenvalue; otherwise the norm can exceed it
  bool symmetric = true;
  // The norm of a step is at most its largest decay: it is bounded, symmetric, and erases after the decay. The decay
  // cutoff of cut sequences on a GPU (scan/cuda/sm90/scan/decay_cutoff.cuh) relies on it.
  bool shrinks_by_decay = false;
};

StepBound step_bound(const Rule& rule);

// In words, one line for each of what there is to say, without a line break at the end.
std::string describe(const StepBound& bound);

}  // namespace fw
