#include "ops/nccl.h"

#include <exception>
#include <type_traits>

#include "base/cuda_library.h"
#include "base/error.h"

namespace fw::nccl {
namespace {

class Ranks final : public Communicator {
 public:
  Ranks(const Functions& functions, Communicator& host, Device& device)
      : call_(functions), host_(host), device_(device) {
    UniqueId id = {};
    // What goes wrong on rank 0 alone must not leave the others waiting for an id.
    Result got = rank() == 0 ? call_.GetUniqueId(&id) : kSuccess;
    broadcast_value(host_, got);
    check(got, "the id of the ranks");
    broadcast_value(host_, id);
    check(call_.CommInitRank(&comm_, size(), id, rank()), "joining the ranks");
  }
  ~Ranks() override {
    if (comm_ == nullptr) return;
    // While an error ends this rank the others may never come to where it waits for them.
    if (std::uncaught_exceptions() > exceptions_) {
      call_.CommAbort(comm_);
    } else {
      call_.CommDestroy(comm_);
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }

  void all_to_all(std::span<const ConstPart> send, std::span<const Part> receive) override {
    const int me = rank(), ranks = size();
    const auto own = static_cast<size_t>(me);
    if (send[own].bytes > 0) device_.copy(receive[own].data, send[own].data, send[own].bytes);
    group("all-to-all", [&] {
      for (int step = 1; step < ranks; ++step) {
        const int to = (me + step) % ranks, from = (me + ranks - step) % ranks;
        const ConstPart& out = send[static_cast<size_t>(to)];
        const Part& in = receive[static_cast<size_t>(from)];
        if (out.bytes > 0) check(call_.Send(out.data, out.bytes, kInt8, to, comm_, device_.stream()), "all-to-all");
        if (in.bytes > 0) check(call_.Recv(in.data, in.bytes, kInt8, from, comm_, device_.stream()), "all-to-all");
      }
    });
  }

  void all_gather(std::span<const Part> parts) override {
    group("all-gather", [&] {
      for (int from = 0; from < size(); ++from) send_all(parts[static_cast<size_t>(from)], from);
    });
  }

  void broadcast(Part data, int from) override {
    group("broadcast", [&] { send_all(data, from); });
  }

  void barrier() override {
    device_.synchronise();
    host_.barrier();
  }

 private:
  void check(Result result, const char* what) const {
    if (result == kSuccess || result == kInProgress) return;
    const char* const more = call_.GetLastError != nullptr ? call_.GetLastError(comm_) : nullptr;
    fail_io(
        "{}: NCCL says: {}{}{}. NCCL_DEBUG=WARN says more; FASTWEIGHT_NCCL=off goes without it, through the host's "
        "memory",
        what, call_.GetErrorString(result), more != nullptr && *more != '\0' ? ": " : "", more != nullptr ? more : "");
  }

  // What `calls` asks for, begun together.
  template <class Calls>
  void group(const char* what, const Calls& calls) {
    Result before = kSuccess;
    check(call_.CommGetAsyncError(comm_, &before), what);
    check(before, what);
    check(call_.GroupStart(), what);
    calls();
    check(call_.GroupEnd(), what);
  }

  void send_all(const Part& data, int from) {
    if (data.bytes > 0)
      check(call_.Broadcast(data.data, data.data, data.bytes, kInt8, from, comm_, device_.stream()), "broadcast");
  }

  const Functions call_;
  Communicator& host_;
  Device& device_;
  const int exceptions_ = std::uncaught_exceptions();
  Comm comm_ = nullptr;
};

}  // namespace

bool open_functions(Functions& functions, std::string& why) {
  void* const library = open_cuda_library({"libnccl.so.2"}, false);
  if (library == nullptr) {
    why =
        "NCCL (libnccl.so.2) was not found: pip install nvidia-nccl-cu13, or say with FW_CUDA_LIBS in which folders it "
        "and cuBLASLt lie";
    return false;
  }
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(function_of(library, name));
    if (function == nullptr && missing == nullptr) missing = name;
  };
  find(functions.GetVersion, "ncclGetVersion");
  find(functions.GetUniqueId, "ncclGetUniqueId");
  find(functions.CommInitRank, "ncclCommInitRank");
  find(functions.CommDestroy, "ncclCommDestroy");
  find(functions.CommAbort, "ncclCommAbort");
  find(functions.CommGetAsyncError, "ncclCommGetAsyncError");
  find(functions.GetErrorString, "ncclGetErrorString");
  find(functions.GroupStart, "ncclGroupStart");
  find(functions.GroupEnd, "ncclGroupEnd");
  find(functions.Send, "ncclSend");
  find(functions.Recv, "ncclRecv");
  find(functions.Broadcast, "ncclBroadcast");
  if (missing != nullptr) {
    why = fmt::format("the NCCL that was found has no function {}: expected version 2.7 or newer", missing);
    return false;
  }
  functions.GetLastError = reinterpret_cast<const char* (*)(Comm)>(function_of(library, "ncclGetLastError"));
  return true;
}

// 2.9 and newer count 10000 a major version and 100 a minor one, those before 1000 a major one.
std::string version_of(const Functions& functions) {
  int code = 0;
  if (functions.GetVersion(&code) != kSuccess) return "of unknown version";
  const int major = code >= 10000 ? code / 10000 : code / 1000;
  return fmt::format("{}.{}.{}", major, (code >= 10000 ? code % 10000 : code % 1000) / 100, code % 100);
}

std::unique_ptr<Communicator> make_ranks(const Functions& functions, Communicator& host, Device& device) {
  return std::make_unique<Ranks>(functions, host, device);
}

}  // namespace fw::nccl
