// The launchers that prepare() chooses from, one file each.
#pragma once

#include "scan/cuda/kernels.h"

namespace fw::cuda {

void prepare_scalar(const PrepareArgs& args, PrepareKernel kernel, int k_tile, int64_t chunks, void* stream);
// heads: of a block.
void prepare_grouped(const PrepareArgs& args, int k_tile, int heads, int64_t chunks, void* stream);
void prepare_sums(const PrepareArgs& args, int k_tile, int64_t chunks, void* stream);
void prepare_precond(const PrepareArgs& args, int k_tile, int64_t chunks, void* stream);
void prepare_channel(const PrepareArgs& args, PrepareKernel kernel, int k_tile, int64_t chunks, void* stream);
// copied: rows of q and k (pipeline.h).
void prepare_channel_hi_lo(const PrepareArgs& args, bool copied, int k_tile, int64_t chunks, void* stream);
void prepare_channel_plain(const PrepareArgs& args, int k_tile, int64_t chunks, void* stream);

}  // namespace fw::cuda
