// The ranks of MPI. The standard's C interface alone: point-to-point messages in pieces, since a count is an int.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "base/error.h"
#include "cli/ranks.h"

namespace fw::cli {
namespace {

constexpr size_t kPiece = size_t{1} << 30;

void check(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail_io("{}: MPI says: {}", what, std::string(text, static_cast<size_t>(length)));
}

// call(first byte, bytes) for each piece.
template <class Call>
void in_pieces(size_t bytes, const Call& call) {
  for (size_t at = 0; at < bytes; at += kPiece) call(at, static_cast<int>(std::min(kPiece, bytes - at)));
}

class MpiRanks : public Communicator {
 public:
  MpiRanks() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_to_all(std::span<const ConstPart> send, std::span<const Part> receive) override {
    std::vector<MPI_Request> requests;
    std::vector<int> expected;  // bytes of each request that receives; -1 of one that sends
    // The next rank first, so that not all send to the same one at first.
    for (int step = 0; step < size_; ++step) {
      const int from = (rank_ + size_ - step) % size_, to = (rank_ + step) % size_;
      const Part& in = receive[static_cast<size_t>(from)];
      in_pieces(in.bytes, [&](size_t at, int bytes) {
        check(MPI_Irecv(static_cast<char*>(in.data) + at, bytes, MPI_BYTE, from, 0, MPI_COMM_WORLD,
                        &requests.emplace_back()),
              "all-to-all");
        expected.push_back(bytes);
      });
      const ConstPart& out = send[static_cast<size_t>(to)];
      in_pieces(out.bytes, [&](size_t at, int bytes) {
        check(MPI_Isend(static_cast<const char*>(out.data) + at, bytes, MPI_BYTE, to, 0, MPI_COMM_WORLD,
                        &requests.emplace_back()),
              "all-to-all");
        expected.push_back(-1);
      });
    }
    std::vector<MPI_Status> statuses(requests.size());
    check(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), statuses.data()), "all-to-all");
    for (size_t i = 0; i < statuses.size(); ++i) {
      int received = 0;
      if (expected[i] < 0) continue;
      check(MPI_Get_count(&statuses[i], MPI_BYTE, &received), "all-to-all");
      if (received != expected[i])
        fail_io("all-to-all: expected {} bytes of rank {}, got {}: the ranks do not agree", expected[i],
                statuses[i].MPI_SOURCE, received);
    }
  }

  void all_gather(std::span<const Part> parts) override {
    for (int from = 0; from < size_; ++from) broadcast(parts[static_cast<size_t>(from)], from);
  }

  void broadcast(Part data, int from) override {
    in_pieces(data.bytes, [&](size_t at, int bytes) {
      check(MPI_Bcast(static_cast<char*>(data.data) + at, bytes, MPI_BYTE, from, MPI_COMM_WORLD), "broadcast");
    });
  }

  void barrier() override { check(MPI_Barrier(MPI_COMM_WORLD), "barrier"); }

 private:
  int rank_ = 0, size_ = 1;
};

std::unique_ptr<MpiRanks>& ranks() {
  static std::unique_ptr<MpiRanks> ranks;
  return ranks;
}

}  // namespace

std::string ranks_library() {
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  if (MPI_Get_library_version(version, &length) != MPI_SUCCESS) return "MPI";
  const std::string text(version, static_cast<size_t>(length));
  return text.substr(0, text.find_first_of(",\n"));
}

Communicator& open_ranks() {
  const Launch launch = launched();
  if (launch.size == 1) return one_rank();
  if (!ranks()) {
    int provided = 0;
    // One thread of the program calls MPI, which is not the one that main() began on.
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS)
      fail_io("MPI cannot be begun");
    ranks() = std::make_unique<MpiRanks>();
  }
  if (ranks()->size() != launch.size) {
    fail_usage(
        "MPI knows {} ranks, what started this process {}: with Slurm expected srun --mpi=pmix (srun --mpi=list says "
        "what there is), or mpirun",
        ranks()->size(), launch.size);
  }
  return *ranks();
}

LocalRank rank_on_machine() {
  LocalRank local;
  if (!ranks()) return local;
  MPI_Comm here = MPI_COMM_NULL;
  check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, ranks()->rank(), MPI_INFO_NULL, &here),
        "the ranks of this machine");
  MPI_Comm_rank(here, &local.rank);
  MPI_Comm_size(here, &local.size);
  local.machine = ranks()->rank();
  check(MPI_Bcast(&local.machine, 1, MPI_INT, 0, here), "the ranks of this machine");
  MPI_Comm_free(&here);
  return local;
}

void close_ranks() {
  if (!ranks()) return;
  ranks().reset();
  MPI_Finalize();
}

void end_all_ranks(int code) {
  if (ranks()) MPI_Abort(MPI_COMM_WORLD, code);
}

}  // namespace fw::cli
