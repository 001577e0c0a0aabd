// Buffer: memory of a device that one object owns, zero at first. The host reaches it through read(), write() and
// host(); data() and span() are the device's memory, which only its kernels (and, of a device with host memory, the
// host) may touch.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/device.h"

namespace fw {

// Values of a buffer as the host reads them: the memory itself where the host can, else a copy.
template <class T>
class HostView {
 public:
  explicit HostView(std::span<const T> values) : values_(values) {}
  explicit HostView(std::vector<T> copy) : copy_(std::move(copy)), values_(copy_) {}
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;
  HostView(HostView&&) noexcept = default;  // a moved vector keeps its memory
  std::span<const T> span() const { return values_; }

 private:
  std::vector<T> copy_;
  std::span<const T> values_;
};

template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  Buffer(Device& device, int64_t count) : device_(&device), count_(count) {
    if (count == 0) return;
    data_ = static_cast<T*>(device.allocate(bytes(count)));
    zero();
  }
  // Memory of its own with the same values.
  Buffer clone() const {
    Buffer other;
    other.device_ = device_;
    if (count_ > 0) other.data_ = static_cast<T*>(device_->allocate(bytes(count_)));
    other.count_ = count_;
    if (count_ > 0) device_->copy(other.data_, data_, bytes(count_));
    return other;
  }
  Buffer(Buffer&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) device_->release(data_);
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return count_; }
  std::span<T> span() { return {data_, static_cast<size_t>(count_)}; }
  std::span<const T> span() const { return {data_, static_cast<size_t>(count_)}; }

  void zero() {
    if (count_ > 0) device_->fill(data_, 0, bytes(count_));
  }
  // Values from `at` on.
  void write(int64_t at, std::span<const T> values) {
    if (!values.empty()) device_->from_host(data_ + at, values.data(), values.size_bytes());
  }
  void read(int64_t at, std::span<T> values) const {
    if (!values.empty()) device_->to_host(values.data(), data_ + at, values.size_bytes());
  }
  std::vector<T> to_vector() const {
    std::vector<T> values(static_cast<size_t>(count_));
    read(0, values);
    return values;
  }
  HostView<T> host(int64_t at, int64_t count) const {
    if (count == 0 || device_->host_memory())
      return HostView<T>(span().subspan(static_cast<size_t>(at), static_cast<size_t>(count)));
    std::vector<T> copy(static_cast<size_t>(count));
    read(at, copy);
    return HostView<T>(std::move(copy));
  }

 private:
  static size_t bytes(int64_t count) {
    return static_cast<size_t>(count) * sizeof(T);  // NOLINT(bugprone-sizeof-expression): T may be a pointer
  }

  Device* device_ = nullptr;
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace fw
