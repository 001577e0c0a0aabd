// prepare: from the raw inputs of a rule to the chunk tiles that the scans read (tiles.h). See kernels.h.
#include "base/error.h"
#include "scan/cuda/sm90/prepare/kernels.h"

namespace fw::cuda {

void prepare(const PrepareArgs& args, const PrepareChoice& choice, int k_tile, int64_t chunks, void* stream) {
  switch (choice.kernel) {
    case PrepareKernel::kScalarRows:
    case PrepareKernel::kScalarStreams:
    case PrepareKernel::kScalarRead:
      return prepare_scalar(args, choice.kernel, k_tile, chunks, stream);
    case PrepareKernel::kGrouped:
      return prepare_grouped(args, k_tile, choice.heads, chunks, stream);
    case PrepareKernel::kSums:
      return prepare_sums(args, k_tile, chunks, stream);
    case PrepareKernel::kPrecond:
      return prepare_precond(args, k_tile, chunks, stream);
    case PrepareKernel::kChannelRows:
    case PrepareKernel::kChannelStreams:
    case PrepareKernel::kChannelRead:
      return prepare_channel(args, choice.kernel, k_tile, chunks, stream);
    case PrepareKernel::kChannelPlain:
      return prepare_channel_plain(args, k_tile, chunks, stream);
    case PrepareKernel::kChannelHiLo:
    case PrepareKernel::kChannelHiLoRead:
      return prepare_channel_hi_lo(args, choice.kernel == PrepareKernel::kChannelHiLo, k_tile, chunks, stream);
    case PrepareKernel::kK256:
    case PrepareKernel::kK256Sums:
    case PrepareKernel::kK256Keys:
      fail_internal("prepare: expected a kernel of K up to 128; k256_prepare() has the others");
  }
}

}  // namespace fw::cuda
