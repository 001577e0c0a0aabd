// Functions in place of NCCL's, for ranks that are threads with one device (support/thread_ranks.h, in turns): a
// group's messages are copied within the device's memory once all ranks have come to its end. They hold the caller to
// what NCCL demands: calls in groups, sizes that agree, a message for each that is awaited.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "base/device.h"
#include "ops/nccl.h"

namespace fw::testing {

class FakeNccl {
 public:
  explicit FakeNccl(int ranks) : calls_(static_cast<size_t>(ranks)) {}

  // Of a rank: what it calls from here on, on its thread.
  nccl::Functions join(Communicator& host) {
    world = this;
    here = &host;
    nccl::Functions f;
    f.GetVersion = [](int* version) {
      *version = 22809;
      return nccl::kSuccess;
    };
    f.GetUniqueId = [](nccl::UniqueId* id) {
      id->bytes[5] = 77;
      return nccl::kSuccess;
    };
    f.CommInitRank = [](nccl::Comm* comm, int ranks, nccl::UniqueId id, int rank) {
      EXPECT_EQ(ranks, here->size());
      EXPECT_EQ(rank, here->rank());
      EXPECT_EQ(id.bytes[5], 77) << "the id of rank 0";
      *comm = reinterpret_cast<nccl::Comm>(here);
      return nccl::kSuccess;
    };
    f.CommDestroy = f.CommAbort = [](nccl::Comm comm) {
      EXPECT_EQ(comm, reinterpret_cast<nccl::Comm>(here));
      return nccl::kSuccess;
    };
    f.CommGetAsyncError = [](nccl::Comm, nccl::Result* error) {
      *error = nccl::kSuccess;
      return nccl::kSuccess;
    };
    f.GetErrorString = [](nccl::Result) { return "invalid usage"; };
    f.GroupStart = []() {
      EXPECT_FALSE(grouped);
      grouped = true;
      return nccl::kSuccess;
    };
    f.GroupEnd = []() { return world->end_group(); };
    f.Send = [](const void* data, size_t count, int, int to, nccl::Comm, void*) {
      return note({Kind::kSend, to, const_cast<void*>(data), count});
    };
    f.Recv = [](void* data, size_t count, int, int from, nccl::Comm, void*) {
      return note({Kind::kReceive, from, data, count});
    };
    f.Broadcast = [](const void* from, void* to, size_t count, int, int root, nccl::Comm, void*) {
      EXPECT_EQ(from, to);
      return note({Kind::kBroadcast, root, to, count});
    };
    return f;
  }

 private:
  enum class Kind { kSend, kReceive, kBroadcast };
  struct Call {
    Kind kind;
    int other;  // the other rank of a message; the root of a broadcast
    void* data;
    size_t bytes;
  };

  static nccl::Result note(const Call& call) {
    EXPECT_TRUE(grouped);
    EXPECT_GT(call.bytes, 0U);
    world->calls_[static_cast<size_t>(here->rank())].push_back(call);
    return nccl::kSuccess;
  }

  // The n-th of a rank's calls of such a kind.
  const Call* find(int rank, Kind kind, int other, int n) const {
    for (const Call& call : calls_[static_cast<size_t>(rank)]) {
      if (call.kind == kind && call.other == other && n-- == 0) return &call;
    }
    return nullptr;
  }

  nccl::Result end_group() {
    const int me = here->rank();
    here->barrier();
    std::vector<int> taken(calls_.size()), roots(calls_.size());
    size_t awaited = 0;
    for (const Call& call : calls_[static_cast<size_t>(me)]) {
      if (call.kind == Kind::kSend) continue;
      const auto other = static_cast<size_t>(call.other);
      const Call* const sent = call.kind == Kind::kReceive
                                   ? find(call.other, Kind::kSend, me, taken[other]++)
                                   : find(call.other, Kind::kBroadcast, call.other, roots[other]++);
      awaited += call.kind == Kind::kReceive ? 1 : 0;
      EXPECT_TRUE(sent != nullptr && sent->bytes == call.bytes) << "rank " << call.other << " to rank " << me;
      if (sent == nullptr || sent->bytes != call.bytes) continue;
      if (sent->data != call.data) cuda_device().copy(call.data, sent->data, call.bytes);
    }
    size_t sent = 0;
    for (const std::vector<Call>& calls : calls_) {
      for (const Call& call : calls) sent += call.kind == Kind::kSend && call.other == me ? 1 : 0;
    }
    EXPECT_EQ(sent, awaited) << "of messages to rank " << me;
    cuda_device().synchronise();
    here->barrier();
    calls_[static_cast<size_t>(me)].clear();
    grouped = false;
    return nccl::kSuccess;
  }

  static inline thread_local FakeNccl* world = nullptr;
  static inline thread_local Communicator* here = nullptr;
  static inline thread_local bool grouped = false;
  std::vector<std::vector<Call>> calls_;  // of a group, by rank
};

}  // namespace fw::testing
