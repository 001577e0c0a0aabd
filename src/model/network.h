// Network: the layers of a model and the way of a pass through them. The passes of an engine and those of a decoder
// share it; arenas are the caller's. T: the type of activations.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "model/config.h"
#include "model/state.h"
#include "nn/block.h"
#include "nn/head.h"
#include "nn/lora.h"
#include "nn/mixer.h"
#include "nn/recompute_layers.h"

namespace fw {

template <class T>
class Network {
 public:
  using W = Wide<T>;

  // Declares the model's parameters.
  Network(const ModelConfig& config, Params<W>& params);
  // Memory besides that of the parameters, which are there.
  void allocate(Device& device);

  const ModelConfig& config() const { return config_; }
  Params<W>& params() const { return params_; }
  Head<T>& head() { return head_; }
  // exec: with an arena for what backward recomputes.
  void set_recompute(RecomputeLayers what, const Exec<T>& exec) { recompute_ = what, recompute_exec_ = &exec; }
  const RecomputeLayers& recompute() const { return recompute_; }
  void adapt(Lora<W>* lora) { lora_ = lora; }

  // What passes read beside the values themselves, made again where those may have changed.
  void refresh_parameters(const Exec<T>& exec);
  // Where the first layer of RWKV-7 leaves its values for those after it.
  void share_first_value(Pass<T>& pass, FirstValue<T>& value) const;
  // The residual stream after all blocks.
  Residual<T> forward(const Pass<T>& pass, const int32_t* ids, ModelState<W>* state);
  // After a forward pass that keeps: dx [T, d] is the gradient of what it returned, and is used up.
  void backward(const Pass<T>& pass, const int32_t* ids, Mat<T> dx);

  int64_t layers_with_experts() const { return config_.num_hidden_layers - config_.dense_layers(); }
  // Rows that every expert of every such layer has had in training since the last call.
  std::vector<int64_t> take_expert_load();

 private:
  Pass<T> pass_of(const Pass<T>& pass, size_t layer);

  const ModelConfig config_;
  Params<W>& params_;
  const NormSpec norm_;
  Embedding<T> embedding_;
  std::vector<Block<T>> blocks_;
  Head<T> head_;
  std::vector<typename Block<T>::Context> contexts_;
  RecomputeLayers recompute_;
  const Exec<T>* recompute_exec_ = nullptr;
  Buffer<int64_t> expert_load_;  // [layers with experts, E]
  Lora<W>* lora_ = nullptr;
};

}  // namespace fw
