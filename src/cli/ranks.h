// The ranks of a command that mpirun, or srun through PMI, started several times: one Communicator for all of them, of
// host memory. One of ranks/mpi.cpp (a build with MPI) and ranks/none.cpp (without) is linked.
#pragma once

#include <string>

#include "base/communicator.h"

namespace fw::cli {

// What a launcher says in the environment of each process that it starts, before MPI is asked; rank 0 of 1 where there
// is none.
struct Launch {
  int rank = 0, size = 1;
};
Launch launched();

// Joins the others, once; one_rank() where nothing launched more. Throws Error(kUsage) in a build without MPI and when
// MPI knows other ranks than the launcher.
Communicator& open_ranks();
// What several processes talk through in this build, for people.
std::string ranks_library();
// Of a process that has joined: its number among those of its machine, how many these are, and the machine's number
// (the lowest rank on it).
struct LocalRank {
  int rank = 0, size = 1, machine = 0;
};
LocalRank rank_on_machine();
// Gives each of several ranks the GPU of its number on its machine, before the first use of one; `device` is --device,
// of which cuda:N takes that one. A process that sees a single GPU takes it: launchers that give each process its own
// show it no other. Throws Error(kUsage) where there are fewer GPUs than ranks on a machine, and where two ranks would
// share one. All ranks call it, and one that throws leaves the others waiting (end_all_ranks).
void take_gpu(Communicator& ranks, const LocalRank& local, const std::string& device);
// Before a process that has joined ends as all do; waits for them.
void close_ranks();
// Before a process that has joined ends alone: ends all others, as one that waited for it would never. Does nothing
// where there are none, else does not return.
void end_all_ranks(int code);

}  // namespace fw::cli
