// Calls of the C header as a caller with memory of its own makes them (header_run.h): tensors in any layout, guarded
// bytes, pools of states.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string>

#include "base/bf16.h"
#include "base/device.h"
#include "base/error.h"
#include "base/f16.h"
#include "reference/fields.h"
#include "reference/header_run.h"
#include "reference/header_tensors.h"

namespace fw::header {

template <class Struct, size_t N>
fw_tensor& tensor_of(Struct& c, const NamedTensor<Struct> (&list)[N], const char* name) {
  for (const auto& entry : list) {
    if (std::strcmp(entry.name, name) == 0) return c.*entry.tensor;
  }
  fail_internal("header run: the C header has no tensor {}", name);
}

// Memory aligned as the header asks, NaN at first, with a guard after it.
class GuardedBytes {
 public:
  GuardedBytes(size_t bytes, fw_device device) : bytes_(bytes) {
    const size_t total = (bytes + kGuard + 63) / 64 * 64;
    data_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, total)));
    if (!data_) fail_internal("header run: out of memory for {} bytes", total);
    std::memset(data_.get(), 0xff, total);
    if (device != FW_DEVICE_CUDA) return;
    device_.emplace(total);
    device_->fill(0xff);
  }
  void* data() const { return device_ ? device_->data() : data_.get(); }
  size_t size() const { return bytes_; }
  void check(const char* what) const {
    if (device_) device_->to_host(data_.get(), bytes_ + kGuard);
    for (size_t i = 0; i < kGuard; ++i) {
      if (data_.get()[bytes_ + i] != 0xff)
        fail_internal("header run: {} of {} bytes: byte {} past its end was written", what, bytes_, i);
    }
  }

 private:
  static constexpr size_t kGuard = 256;
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<unsigned char, Free> data_;
  std::optional<DeviceMemory> device_;
};

// One tensor in the caller's layout: `dims` rows with padding between them, in T, bf16 or float16. Elements that are
// not the tensor's are NaN.
template <class T>
class Tensor {
 public:
  // spare: of dims[1], rows at the end that are not the tensor's. multiple: of all strides but the last.
  Tensor(const std::vector<int64_t>& dims, int64_t row_padding, int64_t spare, fw_dtype dtype, fw_device device,
         int64_t multiple = 1)
      : spare_(spare) {
    desc_.dtype = dtype;
    const bool narrow = dtype == FW_BF16 || dtype == FW_F16;
    desc_.rank = static_cast<int32_t>(dims.size());
    int64_t stride = 1;
    for (size_t i = dims.size(); i-- > 0;) {
      desc_.shape[i] = dims[i];
      desc_.stride[i] = stride;
      stride = (stride * dims[i] + row_padding + multiple - 1) / multiple * multiple;
    }
    const size_t count = static_cast<size_t>(std::max<int64_t>(stride, 1));
    if (narrow) {
      bits_.assign(count, 0x7fff);  // of both NaN
    } else {
      values_.assign(count, std::numeric_limits<T>::quiet_NaN());
    }
    desc_.data = host();
    if (device != FW_DEVICE_CUDA) return;
    device_.emplace(bytes());
    device_->from_host(host(), bytes());
    desc_.data = device_->data();
  }

  const fw_tensor& desc() const { return desc_; }

  // visit(index in memory) in the order of a contiguous tensor.
  template <class Visit>
  void for_each(Visit&& visit) const {
    const int64_t* n = desc_.shape;
    int64_t sizes[4] = {1, 1, 1, 1}, strides[4] = {0, 0, 0, 0};
    for (int i = 0; i < desc_.rank; ++i) {
      sizes[4 - desc_.rank + i] = n[i];
      strides[4 - desc_.rank + i] = desc_.stride[i];
    }
    if (desc_.rank > 1) sizes[5 - desc_.rank] -= spare_;
    for (int64_t a = 0; a < sizes[0]; ++a) {
      for (int64_t b = 0; b < sizes[1]; ++b) {
        for (int64_t c = 0; c < sizes[2]; ++c) {
          for (int64_t d = 0; d < sizes[3]; ++d)
            visit(static_cast<size_t>(a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]));
        }
      }
    }
  }

  void set(const std::vector<double>& x) {
    size_t i = 0;
    for_each([&](size_t at) {
      const float value = static_cast<float>(x[i]);
      if (bits_.empty()) {
        values_[at] = static_cast<T>(x[i]);
      } else {
        if (desc_.dtype == FW_F16) {
          F16 half{};
          round_to_f16(1, &value, &half);
          bits_[at] = half.bits;
        } else {
          Bf16 half{};
          round_to_bf16(1, &value, &half);
          bits_[at] = half.bits;
        }
      }
      ++i;
    });
    if (device_) device_->from_host(host(), bytes());
  }
  // After a call: brings what it wrote.
  void fetch() {
    if (device_) device_->to_host(host(), bytes());
  }
  std::vector<double> get() const {
    std::vector<double> x;
    for_each([&](size_t at) { x.push_back(value(at)); });
    return x;
  }
  // Fails when an element between the rows is no longer NaN.
  void check(const char* name) const {
    std::vector<bool> own(std::max(values_.size(), bits_.size()), false);
    for_each([&](size_t at) { own[at] = true; });
    for (size_t i = 0; i < own.size(); ++i) {
      if (!own[i] && !std::isnan(value(i)))
        fail_internal("header run: {}: element {} lies between the rows and was written", name, i);
    }
  }

 private:
  double value(size_t at) const {
    if (bits_.empty()) return static_cast<double>(values_[at]);
    float wide = 0;
    if (desc_.dtype == FW_F16) {
      const F16 half{bits_[at]};
      widen_f16(1, &half, &wide);
    } else {
      const Bf16 half{bits_[at]};
      widen_bf16(1, &half, &wide);
    }
    return static_cast<double>(wide);
  }

  void* host() { return bits_.empty() ? static_cast<void*>(values_.data()) : static_cast<void*>(bits_.data()); }
  size_t bytes() const { return bits_.empty() ? values_.size() * sizeof(T) : bits_.size() * sizeof(uint16_t); }

  fw_tensor desc_{};
  int64_t spare_ = 0;
  std::vector<T> values_;
  std::vector<uint16_t> bits_;  // instead of values_
  std::optional<DeviceMemory> device_;
};

// [.., a, b] from [.., b, a] for n matrices.
inline std::vector<double> transposed(const std::vector<double>& x, int64_t rows, int64_t cols) {
  std::vector<double> y(x.size());
  const int64_t matrix = rows * cols;
  for (int64_t at = 0; at < static_cast<int64_t>(x.size()); at += matrix) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) y[at + j * rows + i] = x[at + i * cols + j];
    }
  }
  return y;
}

// A problem laid out for the C header: descriptor, and the tensors of any number of fw_inputs and fw_outputs.
template <class T>
class Layout {
 public:
  Layout(const ReferenceProblem& problem, const HeaderRun& run) : p_(problem), run_(run) {
    const SeqLayout& seqs = p_.shape.sequences;
    bool equal = true;
    for (int64_t n = 0; n < seqs.count(); ++n) equal = equal && seqs.length(n) == seqs.length(0);
    packed_ = run.seqlens != 0 || run.device_seqlens || !equal;
    fw_desc_init(&desc_);
    desc_.rule = to_c(p_.rule);
    desc_.dtype = sizeof(T) == 4 ? FW_F32 : FW_F64;
    if (run.bf16 != HeaderRun::Bf16Tensors::kNone) desc_.io_dtype = run.float16 ? FW_F16 : FW_BF16;
    if (run.bf16_operands) desc_.operands = FW_BF16;
    desc_.device = run.device;
    desc_.form = run.form;
    desc_.B = packed_ ? 1 : seqs.count();
    desc_.T = packed_ ? seqs.tokens() : (seqs.count() > 0 ? seqs.length(0) : 0);
    desc_.H = p_.shape.H;
    desc_.HV = p_.shape.HV;
    desc_.K = p_.shape.K;
    desc_.V = p_.shape.V;
    desc_.scale = p_.shape.scale;
    desc_.chunk = run.chunk;
    desc_.segment = run.segment;
    desc_.state_layout = run.state_layout;
    desc_.gates = to_c(p_.shape.gates);
    if (!packed_) return;
    offsets32_.assign(seqs.offsets().begin(), seqs.offsets().end());
    desc_.seqlens.bits = run.seqlens == 32 ? 32 : 64;
    desc_.seqlens.cu_seqlens = run.seqlens == 32 ? static_cast<const void*>(offsets32_.data())
                                                 : static_cast<const void*>(seqs.offsets().data());
    desc_.seqlens.num_sequences = seqs.count();
    if (!run.device_seqlens) return;
    const size_t bytes =
        static_cast<size_t>(seqs.count() + 1) * (desc_.seqlens.bits == 32 ? sizeof(int32_t) : sizeof(int64_t));
    device_offsets_.emplace(bytes);
    device_offsets_->from_host(desc_.seqlens.cu_seqlens, bytes);
    desc_.seqlens.cu_seqlens = device_offsets_->data();
    desc_.seqlens.memory = FW_SEQLENS_DEVICE;
    desc_.T += run.spare_tokens;
  }

  const fw_desc* desc() const { return &desc_; }
  fw_desc& options() { return desc_; }
  // Of the states that are placed from here on.
  void have_bf16_states(bool have) { bf16_states_ = have; }

  fw_sizes sizes() const {
    fw_sizes s;
    fw_sizes_init(&s);
    expect_ok(fw_workspace_query(&desc_, &s), "fw_workspace_query");
    if (run_.plan_text != nullptr) {
      run_.plan_text->resize(fw_plan_text(&desc_, nullptr, 0) + 1);
      run_.plan_text->resize(fw_plan_text(&desc_, run_.plan_text->data(), run_.plan_text->size()));
    }
    return s;
  }

  // Points `tensor` at a new tensor of the field's shape, with the values (NaN if none are given).
  Tensor<T>& add(const char* name, std::vector<int64_t> shape, const std::vector<double>* values, fw_tensor& tensor) {
    const bool state = is_matrix_state(name);
    const bool tokens = of_tokens(name);
    if (tokens) {
      shape[0] = desc_.T;
      shape.insert(shape.begin(), desc_.B);
    }
    if (state && run_.state_layout == FW_STATE_V_FIRST) std::swap(shape[2], shape[3]);
    tensors_.push_back(
        {name, std::make_unique<Tensor<T>>(shape, tokens ? run_.row_padding : 0, tokens ? spare() : 0,
                                           tokens || state ? type_of(name) : kWide, run_.device,
                                           std::string_view(name) == "ring" && run_.row_padding > 0 ? 4 : 1)});
    Tensor<T>& t = *tensors_.back().tensor;
    if (values != nullptr)
      t.set(state && run_.state_layout == FW_STATE_V_FIRST ? transposed(*values, p_.shape.K, p_.shape.V) : *values);
    tensor = t.desc();
    return t;
  }

  std::vector<double> read(const char* name, const Tensor<T>& t) const {
    const std::vector<double> x = t.get();
    return is_matrix_state(name) && run_.state_layout == FW_STATE_V_FIRST ? transposed(x, p_.shape.V, p_.shape.K) : x;
  }

  // Every field that the rule uses and `x` has, with its values.
  template <class C, class Struct, size_t N>
  void give(C& c, const NamedTensor<C> (&list)[N], std::span<const ReferenceField<Struct>> fields, const Struct& x) {
    for (const auto& field : fields) {
      const std::vector<int64_t> shape = field.shape(p_.rule, p_.shape);
      if (shape.empty() || (x.*field.values).size() != static_cast<size_t>(field.count(p_.rule, p_.shape))) continue;
      add(field.name, shape, &(x.*field.values), tensor_of(c, list, field.name));
    }
  }

  void check() const {
    for (const auto& named : tensors_) {
      named.tensor->fetch();
      named.tensor->check(named.name.c_str());
    }
  }

  Tensor<T>* find(const fw_tensor& tensor) {
    for (const auto& named : tensors_) {
      if (named.tensor->desc().data == tensor.data) return named.tensor.get();
    }
    return nullptr;
  }

  static void expect_ok(fw_status status, const char* call) {
    if (status == FW_ERROR_MEMORY) fail_io("{}: {}", call, fw_last_error());
    if (status != FW_OK) fail_internal("{}: status {}: {}", call, static_cast<int>(status), fw_last_error());
  }

 private:
  struct Named {
    std::string name;
    std::unique_ptr<Tensor<T>> tensor;
  };
  int64_t spare() const { return run_.device_seqlens ? run_.spare_tokens : 0; }
  static constexpr fw_dtype kWide = sizeof(T) == 4 ? FW_F32 : FW_F64;
  fw_dtype type_of(const std::string& name) const {
    if (is_matrix_state(name.c_str())) return bf16_states_ ? FW_BF16 : kWide;
    const bool stream =
        name == "q" || name == "k" || name == "erase_key" || name == "erase_write" || name == "v" || name == "o";
    const bool narrow =
        run_.bf16 == HeaderRun::Bf16Tensors::kAll || (run_.bf16 == HeaderRun::Bf16Tensors::kStreams && stream);
    return !narrow ? kWide : run_.float16 ? FW_F16 : FW_BF16;
  }
  static bool is_matrix_state(const char* name) {
    return std::any_of(std::begin(kStates), std::end(kStates),
                       [&](const char* state) { return std::strcmp(name, state) == 0; });
  }
  static constexpr const char* kStates[] = {"initial_state", "final_state", "checkpoints"};

  const ReferenceProblem& p_;
  const HeaderRun& run_;
  fw_desc desc_;
  bool packed_ = false, bf16_states_ = false;
  std::vector<int32_t> offsets32_;
  std::optional<DeviceMemory> device_offsets_;
  std::vector<Named> tensors_;
};

enum class Call { kForward, kStep };

// Numbers where a call on the device reads them.
class DeviceNumbers {
 public:
  DeviceNumbers(std::vector<int32_t> values, fw_device device) : values_(std::move(values)) {
    if (device != FW_DEVICE_CUDA) return;
    device_.emplace(values_.size() * sizeof(int32_t));
    device_->from_host(values_.data(), values_.size() * sizeof(int32_t));
  }
  const int32_t* data() const { return device_ ? static_cast<const int32_t*>(device_->data()) : values_.data(); }

 private:
  std::vector<int32_t> values_;
  std::optional<DeviceMemory> device_;
};

// A pool of states of one field: each sequence has slot 2 n + 1 if its state is not 0, and its final state goes to slot
// 2 n, or to the same. All others are NaN and must stay so.
class FieldPool {
 public:
  // bf16: the pool's numbers.
  FieldPool(const std::vector<double>& initial, size_t state, int64_t sequences, bool in_place, bool bf16)
      : state_(state), values_(static_cast<size_t>(2 * sequences + 1) * state, std::nan("")) {
    for (size_t n = 0; n < static_cast<size_t>(sequences); ++n) {
      const auto from = initial.begin() + static_cast<std::ptrdiff_t>(initial.empty() ? 0 : n * state);
      const bool there = !initial.empty() &&
                         std::any_of(from, from + static_cast<std::ptrdiff_t>(state), [](double x) { return x != 0; });
      starts.push_back(there ? static_cast<int32_t>(2 * n + 1) : -1);
      ends.push_back(in_place && there ? starts.back() : static_cast<int32_t>(2 * n));
      if (there) std::copy_n(from, state, at(values_, starts.back()));
    }
    for (double& x : values_) {
      const float wide = static_cast<float>(x);
      float value = wide;
      if (bf16) round_to_bf16_values(1, &wide, &value);
      x = static_cast<double>(value);
    }
  }
  const std::vector<double>& values() const { return values_; }
  int64_t slots() const { return static_cast<int64_t>(values_.size() / state_); }
  // What the call has left: the final states.
  std::vector<double> finals(std::vector<double> after) const {
    std::vector<double> found;
    for (const int32_t slot : ends) {
      found.insert(found.end(), at(after, slot), at(after, slot) + static_cast<std::ptrdiff_t>(state_));
      std::copy_n(values_.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(slot) * state_), state_,
                  at(after, slot));
    }
    for (size_t i = 0; i < after.size(); ++i) {
      if (std::isnan(values_[i]) ? !std::isnan(after[i]) : after[i] != values_[i])
        fail_internal("header run: slot {} of a pool was written", i / state_);
    }
    return found;
  }
  std::vector<int32_t> starts, ends;

 private:
  std::vector<double>::iterator at(std::vector<double>& values, int32_t slot) const {
    return values.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(slot) * state_);
  }
  size_t state_;
  std::vector<double> values_;
};

}  // namespace fw::header
