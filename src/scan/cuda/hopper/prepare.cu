// prepare: from the raw inputs of a rule to the images that the scans read (tiles.h, kernels.md 4.2). See kernels.h.
#include "scan/cuda/prepare_kernels.h"

namespace fw::cuda {

void prepare(const PrepareArgs& args, int key, int64_t chunks, void* stream) {
  if (args.problem.rule.decay == Decay::kChannel) {
    prepare_channel(args, key, chunks, stream);
  } else if (prepares_sums(args.problem, key)) {
    prepare_sums(args, key, chunks, stream);
  } else if (prepares_precond(args.problem, key)) {
    prepare_precond(args, key, chunks, stream);
  } else {
    prepare_scalar(args, key, chunks, stream);
  }
}

bool prepare_makes_m(const Problem& problem, int key) {
  return problem.rule.decay == Decay::kChannel ? prepare_channel_makes_m(problem, key) : prepare_scalar_makes_m(problem, key);
}

}  // namespace fw::cuda
