#include "scan/cuda/rewrites/split_k.h"

#include "scan/cuda/call/run.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {

void add_split_k_rows(const Plan& plan, const DevicePlan& call, const CommonRegions& regions, const Inputs<float>& in,
                      void* rows, const TokenTensor<float>& to, void* workspace) {
  if (!to || plan.N == 0) return;
  Problem pairs = problem_of(plan, call, in, {}, regions, Space(workspace));
  pairs.H = pairs.HV, pairs.HV = 2 * pairs.H, pairs.group = 2;
  TokenArg from;
  from.data = rows;
  sum_groups(pairs, from, static_cast<int32_t>(to.dim), token_arg(plan, to), plan.stream);
}

}  // namespace fw::cuda
