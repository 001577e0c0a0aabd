// Tensors of a released folder that are no part of the text model: a vision tower, layers that predict further tokens.
// Nothing here computes with them. They go with a model that came from such a folder, in a file of their own, and into
// what is exported of it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/safetensors.h"

namespace fw {

class ModelFiles;

class OtherTensors {
 public:
  // Those of a model folder, of Hugging Face's or of ours; none is no error.
  explicit OtherTensors(const std::string& folder);
  ~OtherTensors();
  OtherTensors(OtherTensors&&) noexcept;

  bool empty() const { return tensors_.empty(); }
  // For people: "model.visual. (153 tensors), mtp. (15 tensors)"; "" without any.
  std::string description() const;
  // Their bytes stay this object's until the writer has written.
  void add_to(SafetensorsWriter& writer) const;
  // Into a folder of ours, which has none yet; without any nothing is written.
  void save(const std::string& folder) const;

 private:
  std::unique_ptr<ModelFiles> source_;  // whose memory the tensors are, or of own_
  std::unique_ptr<SafetensorsReader> own_;
  std::map<std::string, TensorInfo> tensors_;
};

}  // namespace fw
