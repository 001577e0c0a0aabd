#include "nn/params.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "base/error.h"
#include "base/plan_device.h"
#include "base/threads.h"
#include "nn/init_random.h"
#include "nn/param_pieces.h"
#include "ops/split_value.h"

namespace fw {
namespace {

constexpr int64_t kAlignBytes = 64;
// Large enough that a task costs more than its start, small enough that two threads end together.
constexpr int64_t kPiece = 16384;

constexpr int64_t aligned(int64_t elements, int64_t size) {
  const int64_t align = kAlignBytes / size;
  return (elements + align - 1) / align * align;
}

// body(begin, end) for parts of n values.
template <class Body>
void for_parts(int64_t n, const Body& body) {
  parallel_for((n + kPiece - 1) / kPiece, [&](int64_t i) { body(i * kPiece, std::min(n, (i + 1) * kPiece)); });
}

// Offsets of the parameters that are no operands, one after the other, by their offset; returns the size of all.
template <class T>
int64_t assign_numbers(const std::vector<ParamSpec>& specs, std::unordered_map<int64_t, int64_t>& at) {
  int64_t numbers = 0;
  for (const ParamSpec& spec : specs) {
    if (spec.operand()) continue;
    if (!spec.continues) numbers = aligned(numbers, sizeof(T));
    at[spec.offset] = numbers;
    numbers += spec.size();
  }
  return numbers;
}

}  // namespace

int64_t ParamSpec::size() const {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

std::vector<ParamPiece> pieces_of(const std::vector<ParamSpec>& specs) {
  std::vector<ParamPiece> pieces;
  for (const ParamSpec& spec : specs) {
    for (int64_t begin = 0; begin < spec.size(); begin += kPiece) {
      pieces.push_back({spec.offset + begin, static_cast<int32_t>(std::min(kPiece, spec.size() - begin)),
                        spec.weight_decay ? 1 : 0, -1});
    }
  }
  return pieces;
}

template <class T>
int Params<T>::declare(ParamSpec spec) {
  if (device_ != nullptr) fail_internal("parameter '{}': declared after the parameters were allocated", spec.name);
  if (!names_.insert(spec.name).second) fail_internal("parameter '{}': declared twice", spec.name);
  spec.offset = spec.continues ? extent_ : aligned(extent_, sizeof(T));
  size_ += spec.size();
  extent_ = spec.offset + spec.size();
  specs_.push_back(std::move(spec));
  return static_cast<int>(specs_.size()) - 1;
}

template <class T>
int Params<T>::find(std::string_view name) const {
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (specs_[i].name == name) return static_cast<int>(i);
  }
  fail_internal("parameter '{}': not declared", name);
}

template <class T>
void Params<T>::allocate(Device& device, MasterFormat master_format) {
  device_ = &device;
  master_format_ = master_format;
  allocate_scales();
  if (!split()) {
    values_ = like();
    return write_pieces();
  }
  if (!std::is_same_v<T, float>) fail_internal("parameters: expected floats to split");
  const int64_t numbers = assign_numbers<T>(specs_, number_at_);
  rounded_ = Buffer<Bf16>(device, extent_);
  if (master_format == MasterFormat::kBf16PlusLow) low_ = Buffer<uint16_t>(device, extent_);
  numbers_ = Buffer<T>(device, numbers);
  rounded_is_old_ = false;
  write_pieces();
}

template <class T>
void Params<T>::allocate_scales() {
  int64_t count = 0;
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (!specs_[i].zero_centered) continue;
    scale_at_.emplace_back(static_cast<int>(i), count);
    count = aligned(count + specs_[i].size(), sizeof(T));
  }
  if (count == 0) return;
  scales_ = Buffer<T>(*device_, count);
  ones_ = Buffer<T>(*device_, count);
  ones_.write(0, std::vector<T>(static_cast<size_t>(count), T(1)));
}

template <class T>
const T* Params<T>::scale(int index) const {
  if (!spec_of(index).zero_centered) return value(index);
  const auto at = std::ranges::lower_bound(scale_at_, index, {}, &std::pair<int, int64_t>::first);
  return scales_.data() + at->second;
}

template <class T>
void Params<T>::freeze() {
  if (has_grads()) fail_internal("parameters: frozen after they had gradients");
  frozen_ = true;
}

template <class T>
T* Params<T>::unread_grad(int index) {
  const auto found = unread_at_.find(spec_of(index).offset);
  return found == unread_at_.end() ? nullptr : unread_grads_.data() + found->second;
}

template <class T>
void Params<T>::add_low_rank(int first, Weight<T>& weight) const {
  const auto found = low_rank_.find(first);
  if (found == low_rank_.end()) return;
  weight.low_rank = found->second.data();
  for (const LowRank<T>& of : found->second) weight.low_ranks += of.first < weight.values.rows ? 1 : 0;
}

template <class T>
void Params<T>::require_whole() const {
  if (split())
    fail_internal("parameters: their values are split; expected host_values(), write_values() or all_values()");
}

template <class T>
const T* Params<T>::number(int index) const {
  const auto found = number_at_.find(spec_of(index).offset);
  if (found == number_at_.end())
    fail_internal("parameter '{}': an operand of products, whose values are split, is read as float32",
                  spec_of(index).name);
  return numbers_.data() + found->second;
}

template <class T>
ParamValues<T> Params<T>::all_values(int64_t from) {
  scales_are_old_ = true;
  if (split()) return {nullptr, rounded_.data() + from, low_.data() + from, numbers_.data()};
  rounded_is_old_ = true;
  return {values_.data() + from};
}

template <class T>
HostView<T> Params<T>::host_values(const ParamSpec& spec) const {
  if (!split()) return values_.host(spec.offset, spec.size());
  // A number is read as the float that it is.
  if (low_.size() == 0 && !spec.operand()) return numbers_.host(number_at_.at(spec.offset), spec.size());
  const HostView<Bf16> rounded = rounded_.host(spec.offset, spec.size());
  const HostView<uint16_t> low = low_.size() > 0
                                     ? low_.host(spec.offset, spec.size())
                                     : HostView<uint16_t>(std::vector<uint16_t>(static_cast<size_t>(spec.size())));
  std::vector<T> values(static_cast<size_t>(spec.size()));
  if constexpr (std::is_same_v<T, float>) {
    for_parts(spec.size(), [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
        values[i] = std::bit_cast<float>(join_value({rounded.span()[i].bits, low.span()[i]}));
    });
  }
  return HostView<T>(std::move(values));
}

template <class T>
void Params<T>::write_part(const ParamSpec& spec, int64_t at, std::span<const T> values) {
  scales_are_old_ = true;
  if (!split()) {
    rounded_is_old_ = true;
    return values_.write(spec.offset + at, values);
  }
  std::vector<Bf16> rounded(values.size());
  std::vector<uint16_t> low(values.size());
  if constexpr (std::is_same_v<T, float>) {
    for_parts(static_cast<int64_t>(values.size()), [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        const SplitValue split = split_value(std::bit_cast<uint32_t>(values[i]));
        rounded[i] = {split.rounded};
        low[i] = split.low;
      }
    });
  }
  rounded_.write(spec.offset + at, rounded);
  if (low_.size() > 0) low_.write(spec.offset + at, low);
  if (!spec.operand()) numbers_.write(number_at_.at(spec.offset) + at, values);
}

template <class T>
std::span<T> Params<T>::values_in_place(const ParamSpec& spec) {
  if (split() || !device_->host_memory()) return {};
  return values().subspan(static_cast<size_t>(spec.offset), static_cast<size_t>(spec.size()));
}

template <class T>
void Params<T>::write_bf16(const ParamSpec& spec, int64_t at, std::span<const std::byte> numbers) {
  if (!takes_bf16(spec)) fail_internal("parameter '{}': bf16 numbers for values that are not split", spec.name);
  const int64_t first = spec.offset + at;
  device_->from_host(rounded_.data() + first, numbers.data(), numbers.size());
  if (low_.size() > 0) device_->fill(low_.data() + first, 0, numbers.size());
}

template <class T>
void Params<T>::decay_all() {
  for (ParamSpec& spec : specs_) spec.weight_decay = !spec.buffer;
  if (device_ != nullptr) write_pieces();
}

template <class T>
void Params<T>::decay_matrices() {
  for (ParamSpec& spec : specs_) spec.weight_decay = spec.shape.size() > 1 && !spec.buffer;
  if (device_ != nullptr) write_pieces();
}

template <class T>
void Params<T>::write_pieces() {
  std::vector<ParamPiece> pieces = pieces_of(specs_);
  size_t next = 0;
  for (const ParamSpec& spec : specs_) {
    const auto number = number_at_.find(spec.offset);
    for (int64_t begin = 0; begin < spec.size(); begin += kPiece, ++next) {
      if (number != number_at_.end()) pieces[next].numbers = number->second + begin;
    }
  }
  pieces_ = Buffer<ParamPiece>(*device_, static_cast<int64_t>(pieces.size()));
  pieces_.write(0, pieces);
}

template <class T>
void Params<T>::init(Random& random) {
  if (device_ == nullptr) fail_internal("parameters: init() before allocate()");
  const auto write = [this](const ParamSpec& spec, int64_t at, std::span<const T> values) {
    write_part(spec, at, values);
  };
  if constexpr (std::is_same_v<T, float>) {
    if (device_->kind() == FW_DEVICE_CUDA && !only_plans(*device_) && master_format_ != MasterFormat::kBf16) {
      const auto numbers_of = [this](const ParamSpec& spec) {
        const auto found = number_at_.find(spec.offset);
        return found == number_at_.end() ? int64_t{-1} : found->second;
      };
      if (init_random_on_cuda(specs_, random, *device_, all_values(), numbers_of, write, init_on_device_from)) return;
    }
  }
  init_random<T>(specs_, random, write);
}

template <class T>
void Params<T>::zero_grads() {
  if (frozen_) {
    if (unread_at_.empty()) unread_grads_ = Buffer<T>(*device_, assign_numbers<T>(specs_, unread_at_));
    return unread_grads_.zero();
  }
  if (grads_.size() == extent_) return grads_.zero();
  grads_ = like();
}

template <class T>
Bf16* Params<T>::old_rounded() {
  if (!rounded_is_old_) return nullptr;  // and of split values always
  if (rounded_.size() != extent_) rounded_ = Buffer<Bf16>(*device_, extent_);
  rounded_is_old_ = false;
  return rounded_.data();
}

template <class T>
int Params<T>::checked(int first, int64_t count) const {
  size_t next = static_cast<size_t>(first);
  int64_t found = specs_[next].size();
  while (found < count && ++next < specs_.size() && specs_[next].continues) found += specs_[next].size();
  if (found < count)
    fail_internal("parameter '{}': {} values lie in a row from it on, a matrix of {} was asked for",
                  specs_[static_cast<size_t>(first)].name, found, count);
  return first;
}

template class Params<float>;
template class Params<double>;

}  // namespace fw
