// The host as a device: its memory is the host's and its work is done when a call returns.
#include <sys/mman.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/device.h"
#include "base/error.h"

namespace fw {
namespace {

constexpr size_t kAlignment = 64;  // a cache line, the longest vector
// Of large pages, which memory of two and more is asked to lie in: a step walks through more pages of 4 KB than the
// processor remembers.
constexpr size_t kLargePage = size_t{2} << 20;

class HostDevice final : public Device {
 public:
  fw_device kind() const override { return FW_DEVICE_CPU; }
  size_t alignment() const override { return kAlignment; }
  bool host_memory() const override { return true; }

  void* allocate(size_t bytes) override {
    const bool large = bytes >= 2 * kLargePage;
    void* memory =
        std::aligned_alloc(large ? kLargePage : kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (memory == nullptr) throw std::bad_alloc();
    if (large) ::madvise(memory, bytes, MADV_HUGEPAGE);  // where the system has none, nothing changes
    return memory;
  }
  void release(void* memory) noexcept override { std::free(memory); }
  void from_host(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void to_host(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void fill(void* to, int byte, size_t bytes) override {
    if (bytes > 0) std::memset(to, byte, bytes);
  }
  void synchronise() override {}
};

}  // namespace

Device& host_device() {
  static HostDevice instance;
  return instance;
}

namespace {

// N of "cuda:N", -1 for "cuda", -2 for another name.
int cuda_number(const std::string& name) {
  const std::string prefix = "cuda:";
  if (name == "cuda") return -1;
  if (!name.starts_with(prefix)) return -2;
  int number = 0;
  const char* end = name.data() + name.size();
  const auto [read, error] = std::from_chars(name.data() + prefix.size(), end, number);
  return error == std::errc() && read == end && number >= 0 ? number : -2;
}

}  // namespace

bool is_device_name(const std::string& name) { return name == "cpu" || cuda_number(name) > -2; }

Device& device_named(const std::string& name) {
  if (name == "cpu") return host_device();
  const int number = cuda_number(name);
  if (number < -1) fail_usage("device: expected cpu, cuda or cuda:N, got '{}'", name);
  if (number >= 0) select_cuda_device(number);
  return cuda_device();
}

}  // namespace fw
