// How much memory there is still to take, so that work which cannot fit is refused before it begins: a system that runs out kills, and
// takes its time to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fw {

// Bytes that this process can still take: the least of what the system gives without swapping (MemAvailable), what the limits of its
// control groups leave (version 1 or 2, of every group above it too) and what its own limit of address space (ulimit -v) leaves.
// Nothing: none of them says.
std::optional<uint64_t> available_memory();

// The same without the limit of address space, from these folders in place of /proc and /sys/fs/cgroup.
std::optional<uint64_t> available_memory(const std::string& proc, const std::string& cgroups);

// Error(kUsage) if `bytes` are more than can be taken: "WHAT takes so much memory, so much is available: ADVICE".
// allow_too_much_memory() makes it pass.
void require_memory(double bytes, const std::string& what, const std::string& advice);
void allow_too_much_memory(bool allow);
bool memory_is_checked();

}  // namespace fw
