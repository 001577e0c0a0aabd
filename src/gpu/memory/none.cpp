// A build without CUDA: there is no device.
#include "base/device.h"
#include "base/error.h"
#include "base/gpus.h"

namespace fw {
namespace {

[[noreturn]] void no_device() {
  throw DeviceError(
      "device: this build of fastweight has no device code (`make gpu` builds it); expected --device cpu");
}

}  // namespace

Device& cuda_device() { no_device(); }
void select_cuda_device(int) { no_device(); }

int cuda_device_count() { no_device(); }
std::string cuda_device_address() { no_device(); }
std::shared_ptr<std::byte> cuda_staging(size_t) { no_device(); }

DeviceInfo device_info() { no_device(); }
std::string device_code() { return {}; }

DeviceMemory::DeviceMemory(size_t) { no_device(); }
DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept : bytes_(other.bytes_), data_(other.data_) {}
DeviceMemory::~DeviceMemory() {}  // NOLINT(modernize-use-equals-default): other builds' is not trivial
void DeviceMemory::from_host(const void*, size_t) const { no_device(); }
void DeviceMemory::to_host(void*, size_t) const { no_device(); }
void DeviceMemory::fill(int) const { no_device(); }

void device_copy(void*, const void*, size_t, void*) { no_device(); }

void device_synchronize() { no_device(); }

std::vector<double> device_times(int, int, const std::function<void(int, void*)>&) { no_device(); }
std::vector<double> device_graph_times(int, int, int, const std::function<void(int, void*)>&) { no_device(); }

}  // namespace fw
