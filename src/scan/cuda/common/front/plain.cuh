// The front of rules whose gain is 1 or a gate and that have nothing else but channel gates and an elementwise
// preconditioner: most of them. Written as front.h with the other traits of the rule constant, so that the compiler
// drops it.
#pragma once

#include "scan/cuda/common/front/rows.cuh"
#include "scan/cuda/rule_traits.h"

namespace fw::cuda {

// kStreams: of plain_streams().
template <bool kStreams>
FW_DEVICE Rule reduced_rule(const Rule& r) {
  Rule plain;
  plain.gain = Gain::kGate;  // beta is 1 where there is none
  if (!kStreams) plain.erase = r.erase, plain.write = r.write;
  plain.q_norm = r.q_norm, plain.k_norm = r.k_norm;
  plain.norm_eps = r.norm_eps;
  return plain;
}

// Of linear_streams().
FW_DEVICE Rule linear_rule(const Rule& r) {
  Rule linear;
  linear.gain = r.gain;
  linear.erase = r.erase, linear.write = r.write;
  linear.q_norm = r.q_norm, linear.k_norm = r.k_norm;
  linear.norm_eps = r.norm_eps, linear.gain_eps = r.gain_eps;
  return linear;
}

}  // namespace fw::cuda
