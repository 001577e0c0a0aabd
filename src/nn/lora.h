// LoRA (Hu et al. 2021, arXiv:2106.09685): adapters of a model whose own parameters are frozen. A projection computes
// x (W + scale B A)^T with A [rank, in] and B [out, rank], in float32 beside a W of any format. Products of several
// stacked projections (Params::matrix) have an adapter for each of them. ops/low_rank.cpp computes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "nn/params.h"

namespace fw {

struct LoraConfig {
  int64_t rank = 0;
  double alpha = 0;
  bool rank_stabilized = false;  // scale = alpha / sqrt(rank) (rsLoRA), not alpha / rank
  // The last parts of projections' names, such as q_proj or attn.q_proj; empty: all.
  std::vector<std::string> modules;
  double scale() const;
};

// A projection that can have an adapter: one parameter, or several that are rows of one tensor of another program.
struct LoraTarget {
  struct Part {
    int parameter;
    int64_t first;  // row of the projection that the parameter's first row is
  };
  std::string module;              // the name of its tensor without .weight; PEFT's name of the wrapper for experts'
  std::vector<std::string> names;  // all that it goes by, in this program and in the one that the model came from
  int64_t in = 0, out = 0;
  std::vector<Part> parts;
  int64_t experts = 0;  // whose matrices [out, in] lie one after the other; 0: it is one matrix
  // The row of the tensor that each row is, where the parts do not lie in it one after the other; else empty.
  std::vector<int64_t> file_rows;
};

template <class W>
class Lora {
 public:
  // Adapters of `targets` beside the parameters `base`, on their device. A is uniform within 1 / sqrt(in) and B zero
  // once they are initialised.
  Lora(std::vector<LoraTarget> targets, int64_t rank, double scale, const Params<W>& base);

  // A of target i is parameter 2 i, MODULE.lora_A.weight; B the one after it. Those of experts are [E rank, in] and
  // [E out, rank].
  Params<W>& params() { return params_; }
  const Params<W>& params() const { return params_; }
  const std::vector<LoraTarget>& targets() const { return targets_; }

  // Products of `base` compute the adapters as they are from here on; before every pass, since memory of gradients and
  // of bf16 copies is taken late.
  void attach(Params<W>& base);

  // base += scale B A, for good.
  void merge_into(Params<W>& base) const;

 private:
  LowRank<W> low_rank(size_t target, const LoraTarget::Part& part, int64_t row, int64_t rows);

  std::vector<LoraTarget> targets_;
  double scale_;
  Params<W> params_;
  Buffer<W> scale_there_;
  const void *attached_rounded_ = nullptr, *attached_grads_ = nullptr;
  bool attached_ = false;
};

}  // namespace fw
