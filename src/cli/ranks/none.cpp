// A build without MPI trains on one rank.
#include "base/error.h"
#include "cli/ranks.h"

namespace fw::cli {

std::string ranks_library() { return "none: one process (built without MPI)"; }

Communicator& open_ranks() {
  if (const Launch launch = launched(); launch.size > 1) {
    fail_usage(
        "started as rank {} of {}: expected one process, as this build has no MPI. Build it where MPI is (Debian: "
        "apt-get install libopenmpi-dev openmpi-bin) "
        "with cmake -DFW_MPI=ON, or start it without mpirun",
        launch.rank, launch.size);
  }
  return one_rank();
}

LocalRank rank_on_machine() { return {}; }
void close_ranks() {}
void end_all_ranks(int) {}

}  // namespace fw::cli
