#include "cli/ranks.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

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
  for (const auto& [rank, size] : {std::pair{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, std::pair{"PMI_RANK", "PMI_SIZE"}}) {
    if (std::getenv(rank) != nullptr) return {number_in(rank, 0), number_in(size, 1)};
  }
  if (std::getenv("PMIX_RANK") != nullptr) return {number_in("PMIX_RANK", 0), number_in("SLURM_STEP_NUM_TASKS", 1)};
  return {};
}

}  // namespace fw::cli
