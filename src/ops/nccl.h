// NCCL, NVIDIA's library that carries tensors between GPUs, as it is called here: opened at run time, so that nothing
// of it is needed to build. Types and functions are those of its documentation (NVIDIA Collective Communication
// Library, "Collective Communication Functions", "Point To Point Communication Functions" and "Types",
// docs.nvidia.com/deeplearning/nccl), which has kept them since version 2.7.
//
// Only what copies is called: NCCL's sums have an order that its algorithm and the machine choose, so sums are made by
// operations of our own.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/communicator.h"
#include "base/device.h"

namespace fw::nccl {

using Comm = struct ncclComm*;
struct UniqueId {
  char bytes[128];
};
using Result = int;  // an enumeration of C
inline constexpr Result kSuccess = 0, kInProgress = 7;
inline constexpr int kInt8 = 0;  // of the data types: counts are bytes

struct Functions {
  Result (*GetVersion)(int* version) = nullptr;
  Result (*GetUniqueId)(UniqueId* id) = nullptr;
  Result (*CommInitRank)(Comm* comm, int ranks, UniqueId id, int rank) = nullptr;
  Result (*CommDestroy)(Comm comm) = nullptr;
  Result (*CommAbort)(Comm comm) = nullptr;
  Result (*CommGetAsyncError)(Comm comm, Result* error) = nullptr;
  const char* (*GetErrorString)(Result result) = nullptr;
  const char* (*GetLastError)(Comm comm) = nullptr;  // since 2.13; null before
  Result (*GroupStart)() = nullptr;
  Result (*GroupEnd)() = nullptr;
  Result (*Send)(const void* data, size_t count, int type, int to, Comm comm, void* stream) = nullptr;
  Result (*Recv)(void* data, size_t count, int type, int from, Comm comm, void* stream) = nullptr;
  Result (*Broadcast)(const void* from, void* to, size_t count, int type, int root, Comm comm, void* stream) = nullptr;
};

// Those of the library (libnccl.so.2, base/cuda_library.h), or nothing and *why says what is missing.
bool open_functions(Functions& functions, std::string& why);
std::string version_of(const Functions& functions);  // "2.28.9"

// The ranks of `host` for the memory of `device`, in the order of its stream: a call is queued, and what is received is
// there for what is queued after it. All ranks call it, each with another GPU. Throws Error(kIo) with what NCCL says.
std::unique_ptr<Communicator> make_ranks(const Functions& functions, Communicator& host, Device& device);

}  // namespace fw::nccl
