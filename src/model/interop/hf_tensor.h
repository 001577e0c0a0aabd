// Where a Hugging Face file has a parameter of ours: a tensor of its own, or rows of one that several share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "nn/params.h"

namespace fw {

struct HfTensor {
  std::string name;
  int64_t first = 0;  // row of the tensor that the parameter begins at
  int64_t rows = 0;   // of the tensor; 0: it is the parameter's alone
  // Runs of `block` rows that begin `stride` rows apart, as heads with several parts lie; 0: one run.
  int64_t block = 0, stride = 0;
  std::vector<int64_t> shape = {};  // of a tensor with other dimensions of 1 than the parameter; else empty

  int64_t row(int64_t r) const { return first + (block > 0 ? r / block * stride + r % block : r); }
};

// The shape of a tensor that has a parameter.
inline std::vector<int64_t> whole_shape(const HfTensor& tensor, const ParamSpec& spec) {
  if (!tensor.shape.empty()) return tensor.shape;
  std::vector<int64_t> shape = spec.shape;
  if (tensor.rows > 0) shape[0] = tensor.rows;
  return shape;
}

// visit(value of the parameter, value of the tensor, how many) for runs of rows that lie together.
template <class Visit>
void for_runs(const HfTensor& tensor, const ParamSpec& spec, const Visit& visit) {
  const int64_t rows = spec.shape.empty() ? 1 : spec.shape[0], width = rows > 0 ? spec.size() / rows : 0;
  const int64_t run = tensor.block > 0 ? tensor.block : rows;
  for (int64_t r = 0; r < rows; r += run)
    visit(static_cast<size_t>(r * width), static_cast<size_t>(tensor.row(r) * width),
          static_cast<size_t>(std::min(run, rows - r) * width));
}

// Folders that were published before transformers 5 have a tensor for each expert's matrix, here where it lies in the
// parameter of all (`tensor` is that one's name). Kimi Linear's have Mixtral's names for them.
struct HfPart {
  std::string name;
  std::vector<int64_t> shape;
  int64_t first = 0;  // value of the parameter
};
inline std::vector<HfPart> single_experts(const std::string& tensor, const ParamSpec& spec) {
  const size_t end = tensor.rfind('.') + 1;
  const std::string experts = tensor.substr(0, end);
  const int64_t rows = spec.shape[1], cols = spec.shape[2];
  const bool mixtral = tensor.find(".block_sparse_moe.") != std::string::npos;
  std::vector<HfPart> parts;
  const auto add = [&](int64_t expert, const char* name, int64_t from, int64_t count) {
    parts.push_back({experts + std::to_string(expert) + name, {count, cols}, (expert * rows + from) * cols});
  };
  for (int64_t e = 0; e < spec.shape[0]; ++e) {
    if (tensor.compare(end, std::string::npos, "gate_up_proj") == 0) {
      add(e, mixtral ? ".w1.weight" : ".gate_proj.weight", 0, rows / 2);
      add(e, mixtral ? ".w3.weight" : ".up_proj.weight", rows / 2, rows / 2);
    } else {
      add(e, mixtral ? ".w2.weight" : ".down_proj.weight", 0, rows);
    }
  }
  return parts;
}

// The parameter's values of the whole tensor's, and back.
template <class T>
std::vector<T> part_of(const HfTensor& tensor, const ParamSpec& spec, std::span<const T> whole) {
  std::vector<T> part(static_cast<size_t>(spec.size()));
  for_runs(tensor, spec, [&](size_t to, size_t from, size_t n) {
    std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(from), n, part.begin() + static_cast<std::ptrdiff_t>(to));
  });
  return part;
}
template <class T>
void put_part(const HfTensor& tensor, const ParamSpec& spec, std::span<const T> part, std::span<T> whole) {
  for_runs(tensor, spec, [&](size_t from, size_t to, size_t n) {
    std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(from), n, whole.begin() + static_cast<std::ptrdiff_t>(to));
  });
}

}  // namespace fw
