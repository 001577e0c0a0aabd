// The tensors of a model folder: model.safetensors, or the shards that model.safetensors.index.json names. Nothing is
// joined or copied: the files are mapped.
#pragma once

#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/safetensors.h"

namespace fw {

class ModelFiles {
 public:
  // Throws Error(kUsage) that says what is missing and what to do: an index whose shards are not all there, a folder
  // with weights in another form only.
  explicit ModelFiles(const std::string& folder);

  // Of all files; a tensor that two shards have is an error.
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  // Of the one file; of shards those of the first.
  const std::map<std::string, std::string>& metadata() const { return files_.front().metadata(); }
  // What messages call it: the file, or the index.
  const std::string& name() const { return name_; }
  // As SafetensorsReader::read(); the file's memory is free again.
  template <class T>
  void read(const std::string& name, std::span<const int64_t> shape, std::span<T> out) const {
    const SafetensorsReader& file = file_with(name);
    file.read<T>(name, shape, out);
    file.forget(tensors_.at(name).bytes);
  }
  // The bytes of a tensor of this type and shape; null where it has another. forget() them.
  const std::byte* bytes_of(const std::string& name, const std::string& dtype, std::span<const int64_t> shape) const;
  void forget(const std::string& name) const { file_with(name).forget(tensors_.at(name).bytes); }

 private:
  const SafetensorsReader& file_with(const std::string& name) const {
    const auto file = file_of_.find(name);
    if (file == file_of_.end() && files_.size() > 1) fail_missing(name);
    return file == file_of_.end() ? files_.front() : *file->second;
  }
  [[noreturn]] void fail_missing(const std::string& name) const;
  std::string name_;
  std::deque<SafetensorsReader> files_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, const SafetensorsReader*> file_of_;
};

// The files that a model folder's tensors lie in, for what must not be overwritten: empty where there are none.
std::vector<std::string> model_file_names(const std::string& folder);

}  // namespace fw
