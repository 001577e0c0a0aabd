// The launchers that prepare() chooses from: one file for a kind of decay.
#pragma once

#include "scan/cuda/call/kernels.h"

namespace fw::cuda {

// No decay, one that is a constant of the head, or a scalar of a token and head.
void prepare_scalar(const PrepareArgs& args, int key, int64_t chunks, void* stream);
bool prepare_scalar_makes_m(const Problem& problem, int key);
bool prepare_scalar_leaves_rows(const Problem& problem, int key);
// Of those, rules whose r or e is a sum of q and k, without an erase gate of channels or a preconditioner, at a gain of at most 1, from whole rows.
bool prepares_sums(const Problem& problem, int key);
void prepare_sums(const PrepareArgs& args, int key, int64_t chunks, void* stream);
// Of those, plain rules but for M of the preconditioner, made there, at a gain of at most 1, from whole rows.
bool prepares_precond(const Problem& problem, int key);
void prepare_precond(const PrepareArgs& args, int key, int64_t chunks, void* stream);
// One decay for each channel.
void prepare_channel(const PrepareArgs& args, int key, int64_t chunks, void* stream);
// Of those, rules with fine images.
void prepare_channel_fine(const PrepareArgs& args, int key, int64_t chunks, void* stream);
// Of the others, whole bf16 rows and streams that are q and k times numbers a row (w: times M, made there).
bool prepare_channel_makes_m(const Problem& problem, int key);
bool prepare_channel_takes_plain(const PrepareArgs& args, int key);
void prepare_channel_plain(const PrepareArgs& args, int key, int64_t chunks, void* stream);

}  // namespace fw::cuda
