// Decode with a ring (scan/ring.h): steps that read the state and write the ring, and the fold of the ring into the
// state. Each queues its kernels on the stream.
#pragma once

#include "scan/cuda/kernels.h"

namespace fw::cuda {

// args.ring is there; choice: kRingHeads or kRing.
void token_ring(const TokenForwardArgs& args, const TokenChoice& choice, void* stream);

struct RingFoldArgs {
  int32_t N = 0, HV = 0, K = 0, V = 0;
  Rule rule;
  SlotArg slots;
  StateArg state;  // read and written
  RingArg ring;
};
void fold_ring(const RingFoldArgs& args, void* stream);

}  // namespace fw::cuda
