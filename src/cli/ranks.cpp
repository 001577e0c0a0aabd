#include "cli/ranks.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/gpus.h"

namespace fw::cli {
namespace {

// The whole number in a variable of the environment, or `standard`.
int number_in(const char* variable, int standard) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return standard;
  int number = standard;
  const char* const end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, number);
  return error == std::errc() && rest == end ? number : standard;
}

}  // namespace

Launch launched() {
  // OpenMPI's mpirun; MPICH's, and srun with its own PMI; srun with PMIx, which tells the rank alone.
  for (const auto& [rank, size] :
       {std::pair{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, std::pair{"PMI_RANK", "PMI_SIZE"}}) {
    if (std::getenv(rank) != nullptr) return {number_in(rank, 0), number_in(size, 1)};
  }
  if (std::getenv("PMIX_RANK") != nullptr) return {number_in("PMIX_RANK", 0), number_in("SLURM_STEP_NUM_TASKS", 1)};
  return {};
}

namespace {

// A GPU and the machine that it is in, of a size that ranks can tell each other.
struct Taken {
  int machine = 0;
  char address[60] = "";
};

}  // namespace

void take_gpu(Communicator& ranks, const LocalRank& local, const std::string& device) {
  const int gpus = cuda_device_count();
  if (device != "cuda") {
    device_named(device);
  } else if (gpus > 1 || local.size == 1) {
    if (gpus < local.size) {
      fail_usage(
          "device: expected a GPU for each of the {} ranks on this machine, found {}: start at most {} here (mpirun -n "
          "{}), or on more machines",
          local.size, gpus, gpus, gpus);
    }
    select_cuda_device(local.rank);
  }
  std::vector<Taken> all(static_cast<size_t>(ranks.size()));
  Taken& mine = all[static_cast<size_t>(ranks.rank())];
  mine.machine = local.machine;
  cuda_device_address().copy(mine.address, sizeof(mine.address) - 1);
  std::vector<Part> parts;
  parts.reserve(all.size());
  for (Taken& one : all) parts.push_back(part_of(std::span<Taken>(&one, 1)));
  ranks.all_gather(parts);
  for (size_t other = 0; other < static_cast<size_t>(ranks.rank()); ++other) {
    if (all[other].machine != mine.machine || std::strcmp(all[other].address, mine.address) != 0) continue;
    fail_usage(
        "device: expected a GPU for each of the {} ranks on this machine, found {}; ranks {} and {} would share GPU "
        "{}: start fewer here (mpirun -n {})",
        local.size, gpus, other, ranks.rank(), mine.address, gpus);
  }
}

}  // namespace fw::cli
