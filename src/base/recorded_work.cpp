// Recorded work and copies to the host of a device whose calls are over when they return: the work itself, and a copy
// at once.
#include <vector>

#include "base/device.h"

namespace fw {
namespace {

class CalledAnew final : public RecordedWork {
 public:
  explicit CalledAnew(std::function<void()> work) : work_(std::move(work)) {}
  void queue() override { work_(); }

 private:
  std::function<void()> work_;
};

class CopiedAtOnce final : public ReadBack {
 public:
  CopiedAtOnce(Device& device, size_t bytes) : device_(device), bytes_(bytes) {}
  void queue(const void* from) override { device_.to_host(bytes_.data(), from, bytes_.size()); }
  const void* wait() override { return bytes_.data(); }

 private:
  Device& device_;
  std::vector<std::byte> bytes_;
};

}  // namespace

std::unique_ptr<RecordedWork> Device::record(const std::function<void()>& work) {
  return std::make_unique<CalledAnew>(work);
}
std::unique_ptr<ReadBack> Device::read_back(size_t bytes) { return std::make_unique<CopiedAtOnce>(*this, bytes); }

}  // namespace fw
