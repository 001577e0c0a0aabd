// How much memory there is still to take, so that work which cannot fit is refused before it begins: a system that runs
// out kills, and takes its time to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fw {

// Bytes that this process can still take, the least of:
// - what the system gives without swapping (MemAvailable),
// - what the limits of its control groups leave (version 1 or 2, of every group above it too),
// - what its own limit of address space (ulimit -v) leaves.
//
// Nothing: none of them says.
std::optional<uint64_t> available_memory();

// The same without the limit of address space, from these folders in place of /proc and /sys/fs/cgroup.
std::optional<uint64_t> available_memory(const std::string& proc, const std::string& cgroups);

// Bytes that the process's limit of address space (ulimit -v) leaves; nothing: there is none.
std::optional<uint64_t> available_address_space();

// A size as users write it: 22G, 22GiB (2^30), 22GB (10^9), also K, M and T, or bytes; a fraction may stand before a
// unit. Nothing for other text, for less than a byte and for what 64 bits do not hold.
std::optional<uint64_t> parse_bytes(const std::string& text);

// Error(kUsage) if `bytes` are more than can be taken: "WHAT takes so much memory, so much is available: ADVICE".
// allow_too_much_memory() makes it pass.
void require_memory(double bytes, const std::string& what, const std::string& advice);
void allow_too_much_memory(bool allow);
bool memory_is_checked();

}  // namespace fw
