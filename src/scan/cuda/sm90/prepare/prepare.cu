// prepare: from the raw inputs of a rule to the chunk tiles that the scans read (tiles.h). See kernels.h.
#include "gpu/launch.h"
#include "scan/cuda/sm90/prepare/kernels.h"

namespace fw::cuda {
namespace {

// Of a rule that has them. Rests of e and k may be missing where those are the raw keys.
void check_hi_lo_tiles(const PrepareArgs& args) {
  const HiLoTiles &forward = args.forward_lo, &backward = args.backward_lo;
  const bool both = args.backward != nullptr,
             chunk_tiles = forward.chunk_tiles != nullptr && (!both || backward.chunk_tiles != nullptr);
  const bool lo_parts = forward.lo_parts != nullptr || args.problem.rule.decay != Decay::kChannel,
             same = (forward.lo_parts == nullptr) == (backward.lo_parts == nullptr);
  if (chunk_tiles && lo_parts && (!both || same)) return;
  const auto text = [](const void* at) { return at != nullptr ? "there" : "null"; };
  fail_internal(
      "prepare: a rule with a gain above 1 needs the places of its lo tiles, and lo parts of both directions or "
      "(without channel decay) of none, got forward "
      "tiles {}, lo parts {}, backward tiles {}, lo parts {}{}",
      text(forward.chunk_tiles), text(forward.lo_parts), text(backward.chunk_tiles), text(backward.lo_parts),
      both ? "" : " (forward alone)");
}

}  // namespace

void prepare(const PrepareArgs& args, int key, int64_t chunks, void* stream) {
  if (chunks > 0 && uses_hi_lo(args.problem.rule)) check_hi_lo_tiles(args);
  const bool rows = reverse_takes_rows(args.problem.rule);
  if ((rows ? args.backward : args.numbers) != nullptr) {
    fail_internal("prepare: of this rule expected {}, if anything, for the reverse scan, got {}",
                  rows ? "scales" : "backward tiles", rows ? "backward tiles" : "scales");
  }
  if (chunks > 0 && stores_k_hat(args.problem.rule) &&
      (args.solved == nullptr || args.backward != nullptr || (args.keys == nullptr) != (args.pairs == nullptr))) {
    const auto text = [](const void* at) { return at != nullptr ? "there" : "null"; };
    fail_internal(
        "prepare: of this rule expected a place for X and M, none for backward tiles, keys with A and P; got {}, {}, "
        "{}, {}",
        text(args.solved), text(args.backward), text(args.keys), text(args.pairs));
  }
  const PrepareChoice choice = select_prepare(args, key);
  switch (choice.kernel) {
    case PrepareKernel::kScalar:
      return prepare_scalar(args, choice, key, chunks, stream);
    case PrepareKernel::kSums:
      return prepare_sums(args, key, chunks, stream);
    case PrepareKernel::kPrecond:
      return prepare_precond(args, key, chunks, stream);
    case PrepareKernel::kChannel:
      return prepare_channel(args, choice, key, chunks, stream);
    case PrepareKernel::kChannelPlain:
      return prepare_channel_plain(args, key, chunks, stream);
    case PrepareKernel::kChannelHiLo:
      return prepare_channel_hi_lo(args, choice, key, chunks, stream);
  }
}

}  // namespace fw::cuda
