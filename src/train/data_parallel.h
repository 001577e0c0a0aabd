// Data parallel training with a sharded optimiser: a step's batches are computed by several ranks, each of which
// updates its part of the parameters.
//
// Batch b of a step is computed by rank b mod N, its gradient from zero. Round by round (N batches) each rank sends
// every other that one's part of the gradient (all-to-all, float32) and adds what it receives in the order of the
// batches. The norm is the sum of fixed groups of the parameters' pieces, in order; AdamW runs on the rank's own part,
// whose moments no other rank has; then all gather the values. So the bits of a step do not depend on N: N ranks have
// those of one rank with the same batches (train.sums = "apart"). Of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054)
// this is stage 1 with the sums' order fixed.
//
// With train.sums = "local" the gradients of a rank's batches run on into each other, and the ranks send theirs once a
// step: the bits depend on N, and on nothing else.
//
// Where a device splits the values (Params::split), what passes read is gathered in every step: the bf16 half, and the
// float copies. The other half, which only the update of the rank that has it reads, is gathered when somebody wants
// whole values: complete().
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/communicator.h"
#include "train/step.h"

namespace fw {

enum class GradientSums { kApart, kLocal };

// The parts of the parameters that `ranks` ranks have. Throws Error(kUsage) for more ranks than there may be.
inline constexpr int kMostRanks = 128;
template <class W>
std::vector<ParamRange> rank_ranges(const Params<W>& params, int ranks);

template <class T>
class DataParallel {
 public:
  using W = Wide<T>;

  // `values` tells numbers of the host, `tensors` carries memory of the parameters' device; both have the same ranks,
  // on the CPU they are one. The parameters are the same on all ranks, and stay it. Throws Error(kUsage) for more ranks
  // than kMostRanks.
  DataParallel(Communicator& values, Communicator& tensors, const AdamWConfig& config, const Params<W>& params,
               GradientSums sums = GradientSums::kApart);

  BasicAdamW<T>& optimizer() { return optimizer_; }  // of this rank's part

  // As train_step; every rank gives the same batches and gets the same result.
  StepResult step(LanguageModel<T>& model, std::span<const Batch> batches, double lr, double clip);

  // The moments of all parts, on rank 0, in the host's memory; nothing on the others.
  std::optional<BasicAdamW<T>> whole(const Params<W>& params);

  // Makes the parameters whole on this rank (above): before the host reads their values. All ranks call it; it sends
  // nothing where nothing is missing.
  void complete(Params<W>& params);

 private:
  void add_round(LanguageModel<T>& model, size_t first, size_t batches);
  double square_norm(LanguageModel<T>& model);
  void share_values(Params<W>& params);
  template <class Value>
  void all_gather(Value* whole, const std::vector<ParamRange>& ranges);
  template <class Moment>
  void gather(const Buffer<Moment>& mine, Buffer<Moment>* all);
  const ParamRange& mine() const { return ranges_[static_cast<size_t>(values_.rank())]; }

  Communicator& values_;
  Communicator& tensors_;
  GradientSums sums_;
  std::vector<ParamRange> groups_, ranges_;  // of the norm's sums; of the ranks
  std::vector<ParamRange> numbers_;          // of the ranks: what lies where among the float copies of split values
  bool incomplete_ = false;                  // low parts of values are missing here that other ranks have
  int first_group_ = 0, last_group_ = 0;     // of this rank
  BasicAdamW<T> optimizer_;
  Buffer<W> sum_;       // this rank's part of the gradient
  Buffer<W> received_;  // of the other ranks, one part each; none on one rank
  Buffer<double> squares_;
};

}  // namespace fw
