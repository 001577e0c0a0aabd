// The launchers that prepare() chooses from (select.h), one file each.
#pragma once

#include "scan/cuda/select.h"

namespace fw::cuda {

void prepare_scalar(const PrepareArgs& args, const PrepareChoice& choice, int key, int64_t chunks, void* stream);
// heads > 1: grouped_heads().
void prepare_grouped(const PrepareArgs& args, int key, int heads, int64_t chunks, void* stream);
void prepare_sums(const PrepareArgs& args, int key, int64_t chunks, void* stream);
void prepare_precond(const PrepareArgs& args, int key, int64_t chunks, void* stream);
void prepare_channel(const PrepareArgs& args, const PrepareChoice& choice, int key, int64_t chunks, void* stream);
void prepare_channel_hi_lo(const PrepareArgs& args, const PrepareChoice& choice, int key, int64_t chunks, void* stream);
void prepare_channel_plain(const PrepareArgs& args, int key, int64_t chunks, void* stream);

}  // namespace fw::cuda
