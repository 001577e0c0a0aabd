// What carries the tensors of several ranks that lie in the memory of their devices.
#pragma once

#include <memory>
#include <string>

#include "base/communicator.h"
#include "base/device.h"

namespace fw {

struct DeviceRanks {
  std::unique_ptr<Communicator> tensors;  // of the device's memory; null where `host` carries that itself
  std::string name;                       // its name, for people; "" with null
};

// Called by all ranks of `host`, which carries host memory, each with its device; both outlive the result.
DeviceRanks device_ranks(Communicator& host, Device& device);

}  // namespace fw
