// Parameters: one declaration each (name, shape, initialisation, weight decay or not), values and gradients in two flat
// buffers of a device in order of declaration. Each begins at a multiple of 64 bytes, with zeros before it that nobody
// writes, but one that `continues` the parameter before it: those are also one taller matrix (the mixer's projections
// run as one product).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/mat.h"
#include "base/random.h"
#include "ops/ops.h"

namespace fw {

struct ParamSpec {
  std::string name;  // as flash-linear-attention's checkpoints have it
  std::vector<int64_t> shape;
  // Fills `values` (double, shape order) when a model is initialised.
  std::function<void(std::span<double> values, Random& random)> init;
  bool weight_decay = false;
  bool continues = false;   // lies right after the one declared before it
  int64_t offset = 0;       // elements from the start of the flat buffers, set by declare()
  bool fp32_param = false;  // of two dimensions, and yet read as float32 values, not by matrix products
  bool stacked = false;     // of three: matrices of products, one after the other
  bool buffer = false;      // has no gradient and no weight decay: what it is read with stays
  // Of a zero-centered norm: operations multiply with 1 + w (Params::scale()), files have w.
  bool zero_centered = false;
  int64_t size() const;
  // Whether operations take its bf16 copy where activations are bf16: a matrix of products, or the embedding's table.
  bool operand() const { return (shape.size() == 2 || stacked) && !fp32_param; }
};

// How the values are kept: as they are, or (float only) split into the bf16 that products read and what that leaves out
// (ops/split_value.h). The two together are the float to the bit and take 4 bytes a value. The few values that are no
// operands have float copies.
// Of parameters that are not trained, kBf16 drops that: 2 bytes a value.
enum class MasterFormat { kFp32, kBf16PlusLow, kBf16 };

template <class T>
class Params {
 public:
  // Returns the index. Throws Error(kInternal) for a repeated name or after allocate().
  int declare(ParamSpec spec);
  void allocate(Device& device = host_device(), MasterFormat master_format = MasterFormat::kFp32);
  // None is trained from here on; called before zero_grads(). Operands have no gradients: their grad() and
  // grad_matrix() have no data. Those of the others go where nobody reads them.
  void freeze();
  void decay_all();           // weight decay for every parameter that is trained, as some papers' runs have it
  void decay_matrices();      // for those of two or more dimensions and no others
  void init(Random& random);  // every parameter in order of declaration

  int find(std::string_view name) const;  // throws Error(kInternal) where none has the name.

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int64_t size() const { return size_; }  // values of all parameters
  Device& device() const { return *device_; }

  bool split() const { return master_format_ != MasterFormat::kFp32; }
  bool frozen() const { return frozen_; }

  // Device memory. The flat buffers are longer than size() by the gaps between parameters. Where values are split,
  // value() is that of parameters that are no operands alone, and values() of none: Error(kInternal).
  const T* value(int index) const {
    return split() ? number(index) : values_.data() + specs_[static_cast<size_t>(index)].offset;
  }
  // What a norm multiplies with: the value, or 1 + the value of a zero-centered one, in memory of the device that keeps
  // its place. refresh_scales() must have run since the values changed.
  const T* scale(int index) const;
  // Computes 1 + w of the zero-centered parameters, if they may have changed: in host memory always, since a span of
  // values() writes there unseen. add(from, n, to): to += from on the device.
  template <class Add>
  void refresh_scales(const Add& add) {
    if (ones_.size() == 0 || !(scales_are_old_ || device_->host_memory())) return;
    device_->copy(scales_.data(), ones_.data(), static_cast<size_t>(ones_.size()) * sizeof(T));
    for (const auto& [index, at] : scale_at_) add(value(index), spec_of(index).size(), scales_.data() + at);
    scales_are_old_ = false;
  }
  T* grad(int index) { return frozen_ ? unread_grad(index) : grads_.data() + spec_of(index).offset; }
  std::span<T> values() {
    require_whole();
    rounded_is_old_ = scales_are_old_ = true;  // the caller may change them
    return values_.span();
  }
  std::span<const T> values() const {
    require_whole();
    return values_.span();
  }
  // For the optimiser, which changes them: as they are kept, from element `from` of the flat buffers on.
  ParamValues<T> all_values(int64_t from = 0);
  // The bf16 of every value where they are split, laid out as the flat buffers.
  const Bf16* split_rounded() const { return split() ? rounded_.data() : nullptr; }
  std::span<T> grads() { return grads_.span(); }
  std::span<const T> grads() const { return grads_.span(); }
  bool has_grads() const { return grads_.size() > 0 || unread_grads_.size() > 0 || (device_ != nullptr && size_ == 0); }
  void zero_grads();  // the first allocates them: inference never pays for it
  // A buffer as long as the flat ones and laid out like them, zero.
  Buffer<T> like() const { return Buffer<T>(*device_, extent_); }
  int64_t extent() const { return extent_; }  // elements of a flat buffer
  // The parameters in pieces, for what runs over all of them (ops.def, optimiser).
  ParamPieces pieces() const { return {pieces_.data(), pieces_.size()}; }
  std::vector<ParamPiece> host_pieces() const { return pieces_.to_vector(); }

  // A parameter of two dimensions as it is.
  Mat<const T> rows(int index) const { return {value(index), spec_of(index).shape[0], spec_of(index).shape[1]}; }
  Mat<T> grad_rows(int index) { return {grad(index), spec_of(index).shape[0], spec_of(index).shape[1]}; }

  // The parameters as the host sees them.
  HostView<T> host_values(const ParamSpec& spec) const;
  HostView<T> host_grads(const ParamSpec& spec) const { return grads_.host(spec.offset, spec.size()); }
  void write_values(const ParamSpec& spec, std::span<const T> values) { write_part(spec, 0, values); }
  // The parameter's values themselves, to be filled; empty where the host cannot reach them or they are split.
  std::span<T> values_in_place(const ParamSpec& spec);
  // From bf16 numbers, of any alignment, from value `at` of an operand on, where values are split.
  bool takes_bf16(const ParamSpec& spec) const { return split() && spec.operand(); }
  void write_bf16(const ParamSpec& spec, int64_t at, std::span<const std::byte> numbers);

  // The weights declared from `first` on, `rows` rows of `cols` columns together, as one matrix. Throws
  // Error(kInternal) unless each continues the one before.
  Mat<const T> matrix(int first, int64_t rows, int64_t cols) const {
    return {value(checked(first, rows * cols)), rows, cols};
  }
  // The same for products, with its part of the bf16 copy where that is there and not old; that alone where values are
  // split.
  Weight<T> weight(int first, int64_t rows, int64_t cols) const {
    const int64_t offset = spec_of(checked(first, rows * cols)).offset;
    const T* values = split() ? nullptr : values_.data() + offset;
    const Bf16* rounded = rounded_is_old_ ? nullptr : rounded_.data() + offset;
    Weight<T> weight{Mat<const T>(values, rows, cols), {rounded, rows, cols}};
    if (!low_rank_.empty()) add_low_rank(first, weight);
    return weight;
  }
  // What weight() adds to the matrices that begin with parameter `first`, by rows.
  void set_low_rank(int first, std::vector<LowRank<T>> additions) { low_rank_[first] = std::move(additions); }
  void clear_low_rank() { low_rank_.clear(); }
  // The bf16 copy of all values, laid out like them, if it is to be made again because they may have changed since it
  // was; else (and of split values, whose half it is) null. The caller fills it from values() before products run
  // (ops.def: round_values): once an update, not once a product.
  Bf16* old_rounded();
  Mat<T> grad_matrix(int first, int64_t rows, int64_t cols) { return {grad(checked(first, rows * cols)), rows, cols}; }

 private:
  const ParamSpec& spec_of(int index) const { return specs_[static_cast<size_t>(index)]; }
  int checked(int first, int64_t count) const;
  void write_pieces();
  void allocate_scales();
  void write_part(const ParamSpec& spec, int64_t at, std::span<const T> values);
  void require_whole() const;
  const T* number(int index) const;
  T* unread_grad(int index);
  void add_low_rank(int first, Weight<T>& weight) const;

  std::vector<ParamSpec> specs_;
  MasterFormat master_format_ = MasterFormat::kFp32;
  // of split values: the offsets in numbers_ of those that have one, by the parameter's offset
  std::unordered_map<int64_t, int64_t> number_at_;
  std::unordered_map<int, std::vector<LowRank<T>>> low_rank_;  // by the first parameter
  bool frozen_ = false;
  std::unordered_set<std::string> names_;
  int64_t size_ = 0, extent_ = 0;
  Device* device_ = nullptr;  // once allocated
  Buffer<T> values_, grads_;
  Buffer<Bf16> rounded_;  // empty until it is asked for, or half of the values
  Buffer<uint16_t> low_;
  Buffer<T> numbers_;
  Buffer<T> unread_grads_;  // of a frozen model's parameters that are no operands
  std::unordered_map<int64_t, int64_t> unread_at_;
  bool rounded_is_old_ = true;
  // 1 + w of the zero-centered parameters, in order: where each begins; and as many ones
  std::vector<std::pair<int, int64_t>> scale_at_;
  Buffer<T> scales_, ones_;
  bool scales_are_old_ = true;
  Buffer<ParamPiece> pieces_;
};

}  // namespace fw
