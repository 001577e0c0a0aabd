// Data parallel training with a sharded optimiser: a step's batches are computed by several ranks, each of which updates its part of the parameters.
//
// Batch b of a step is computed by rank b mod N, its gradient from zero. Round by round (N batches) each rank sends every other that one's part of the gradient
// (all-to-all, float32) and adds what it receives in the order of the batches; the norm is the sum of fixed groups of the parameters' pieces, in order; AdamW
// runs on the rank's own part, whose moments no other rank has; then all gather the values. So the bits of a step do not depend on N: N ranks have those of one
// rank with the same batches (train.sums = "apart"). Of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) this is stage 1 with the sums' order fixed.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/communicator.h"
#include "train/step.h"

namespace fw {

template <class T>
class DataParallel {
 public:
  using W = Wide<T>;
  static constexpr int kMostRanks = 128;

  // `values` tells numbers of the host, `tensors` carries memory of the parameters' device; both have the same ranks, on the CPU they are one. The parameters
  // are the same on all ranks, and stay it. Throws Error(kUsage) for more ranks than kMostRanks.
  DataParallel(Communicator& values, Communicator& tensors, const AdamWConfig& config, const Params<W>& params);

  BasicAdamW<T>& optimizer() { return optimizer_; }  // of this rank's part

  // As train_step; every rank gives the same batches and gets the same result.
  StepResult step(LanguageModel<T>& model, std::span<const Batch> batches, double lr, double clip);

  // The moments of all parts, on rank 0; nothing on the others.
  std::optional<BasicAdamW<T>> whole(const Params<W>& params);

 private:
  void add_round(LanguageModel<T>& model, size_t first, size_t batches);
  double square_norm(LanguageModel<T>& model);
  template <class Moment>
  void gather(const Buffer<Moment>& mine, Buffer<Moment>* all);
  const ParamRange& mine() const { return ranges_[static_cast<size_t>(values_.rank())]; }

  Communicator& values_;
  Communicator& tensors_;
  std::vector<ParamRange> groups_, ranges_;  // of the norm's sums; of the ranks
  int first_group_ = 0, last_group_ = 0;     // of this rank
  BasicAdamW<T> optimizer_;
  Buffer<W> sum_;       // this rank's part of the gradient
  Buffer<W> received_;  // of the other ranks, one part each; none on one rank
  Buffer<double> squares_;
};

}  // namespace fw
