// ModelState: what a model remembers of N sequences: per layer the matrix state S [N, HV, K, V], the preconditioner's
// state A [N, H, K] where the rule has one, and the convolution's tail of q, k, v; and the number of tokens that each sequence
// has seen, which is the position of its next token. An object: create, copy (fork), save,
// load. Its file is a safetensors file whose metadata says layout, dtype, rule and the hash of the model's parameters;
// loading into another model is an error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/safetensors.h"
#include "base/seq_layout.h"
#include "model/config.h"

namespace fw {

template <class T>
class ModelState {
 public:
  struct Layer {
    std::vector<T> s;     // [N, HV, K, V], K-first
    std::vector<T> a;     // [N, H, K] or empty
    std::vector<T> tail;  // [N, W-1, 2 H K + HV V]: the last inputs of the convolution, q | k | v, oldest first; or empty
  };

  ModelState(const ModelConfig& config, int64_t sequences);  // all zero
  int64_t sequences() const { return sequences_; }
  Layer& layer(int64_t i) { return layers_[static_cast<size_t>(i)]; }
  const Layer& layer(int64_t i) const { return layers_[static_cast<size_t>(i)]; }
  // Tokens seen by each sequence [N]. The model calls advance() once after a pass, when all its layers have read them.
  const std::vector<int64_t>& positions() const { return positions_; }
  void advance(const SeqLayout& layout);
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }
  size_t bytes() const;
  void reset();

  // A file of its own: atomic, exact (load refuses tensors that are not a state's).
  void save(const std::string& path, const std::string& rule, const std::string& model_hash) const;
  void load(const std::string& path, const std::string& rule, const std::string& model_hash);

  // The same as a part of a larger file (a session keeps logits and a generator beside it): tensors "state.*" and the
  // metadata keys state_layout, state_dtype, state_rule, state_model. The state's memory must live until writer.write().
  // read_from throws Error(kUsage) and leaves the state as it was when anything differs.
  void add_to(SafetensorsWriter& writer, const std::string& rule, const std::string& model_hash) const;
  void read_from(const SafetensorsReader& reader, const std::string& path, const std::string& rule, const std::string& model_hash);

 private:
  int64_t sequences_ = 0;
  int64_t heads_ = 0, v_heads_ = 0, key_dim_ = 0, value_dim_ = 0, tail_rows_ = 0, tail_cols_ = 0;
  bool precond_ = false;
  std::vector<Layer> layers_;
  std::vector<int64_t> positions_;
};

}  // namespace fw
