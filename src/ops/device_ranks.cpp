#include "ops/device_ranks.h"

#include <cstdlib>

#include "base/error.h"
#include "base/staged_ranks.h"
#include "ops/nccl.h"

namespace fw {

DeviceRanks device_ranks(Communicator& host, Device& device) {
  if (device.host_memory() || host.size() == 1) return {};
  const char* const given = std::getenv("FASTWEIGHT_NCCL");
  const std::string wish = given != nullptr ? given : "";
  if (!wish.empty() && wish != "on" && wish != "off") fail_usage("FASTWEIGHT_NCCL: expected on or off, got '{}'", wish);
  nccl::Functions functions;
  std::string why = device_info().emulated ? "the device is emulated" : "FASTWEIGHT_NCCL=off";
  const bool found = wish != "off" && !device_info().emulated && nccl::open_functions(functions, why);
  if (!found && wish == "on") throw DeviceError(fmt::format("FASTWEIGHT_NCCL=on: {}", why));
  // What switches add up or copy for NCCL is not called here, and setting it up takes memory of every GPU.
  if (found) ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  // All or none.
  if (!any_rank(host, !found))
    return {nccl::make_ranks(functions, host, device), "NCCL " + nccl::version_of(functions)};
  return {std::make_unique<StagedRanks>(host, device),
          fmt::format("the host's memory and MPI ({})", found ? "another rank has no NCCL" : why)};
}

}  // namespace fw
