// ModelState: what a model remembers of N sequences: per layer the matrix state S [N, HV, K, V], the preconditioner's
// state A [N, H, K] where the rule has one, and the convolution tails of q, k, v. An object: create, copy (fork), save,
// load. Its file is a safetensors file whose metadata says layout, dtype, rule and the hash of the model's parameters;
// loading into another model is an error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"

namespace fw {

template <class T>
class ModelState {
 public:
  struct Layer {
    std::vector<T> s;                    // [N, HV, K, V], K-first
    std::vector<T> a;                    // [N, H, K] or empty
    std::vector<T> q_tail, k_tail, v_tail;  // [N, W-1, H*K], [N, W-1, H*K], [N, W-1, HV*V] or empty
  };

  ModelState(const ModelConfig& config, int64_t sequences);  // all zero
  int64_t sequences() const { return sequences_; }
  Layer& layer(int64_t i) { return layers_[static_cast<size_t>(i)]; }
  const Layer& layer(int64_t i) const { return layers_[static_cast<size_t>(i)]; }
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }
  size_t bytes() const;
  void reset();

  // tokens_seen and extra text (e.g. pending bytes) travel in the metadata.
  void save(const std::string& path, const std::string& rule, const std::string& model_hash) const;
  void load(const std::string& path, const std::string& rule, const std::string& model_hash);

 private:
  int64_t sequences_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace fw
