#include "scan/cuda/rewrites/split_k.h"

#include "scan/cuda/call/run.h"
#include "scan/cuda/token_arg.h"

namespace fw::cuda {
namespace {

// to[t, h, :] = the sum of both halves' rows. half: any of the two; space: its workspace, where the tables of packed
// sequences are.
void add_halves(const Plan& plan, const DevicePlan& half, const CommonRegions& regions, const Inputs<float>& in,
                void* rows, const TokenTensor<float>& to, const Space& space) {
  if (!to) return;
  Problem pairs = problem_of(plan, half, in, {}, regions, space);
  pairs.H = pairs.HV, pairs.HV = 2 * pairs.H, pairs.group = 2;
  TokenArg from;
  from.data = rows;
  sum_groups(pairs, from, static_cast<int32_t>(to.dim), token_arg(plan, to), plan.stream);
}

}  // namespace

void forward_of_split_k(const Plan& plan, const SplitK& halves, const Inputs<float>& in, const Outputs<float>& out,
                        void* saved, void* workspace) {
  char* const space = static_cast<char*>(workspace);
  void* const o = space + halves.o.offset;
  for (int i = 0; i < 2; ++i) {
    Outputs<float> own = half_of(plan, out, i);
    own.o = half_rows(plan, out.o, o, i);
    scan_forward(halves.plans[i], halves.devices[i], half_of(plan, in, i), {}, own,
                 saved == nullptr ? nullptr : static_cast<char*>(saved) + halves.saved[i], space + halves.forward_at);
  }
  add_halves(plan, halves.devices[1], halves.devices[1].forward.common, in, o, out.o, Space(space + halves.forward_at));
}

void backward_of_split_k(const Plan& plan, const SplitK& halves, const Inputs<float>& in, const Outputs<float>& d,
                         const Inputs<float>& grads, const void* saved, void* workspace) {
  char* const space = static_cast<char*>(workspace);
  void *const d_v = space + halves.d_v.offset, *const d_beta = space + halves.d_beta.offset;
  for (int i = 0; i < 2; ++i) {
    Inputs<float> own = half_of(plan, grads, i);
    own.v = half_rows(plan, grads.v, d_v, i);
    own.beta = half_rows(plan, grads.beta, d_beta, i);
    scan_backward(halves.plans[i], halves.devices[i], half_of(plan, in, i), {}, half_of(plan, d, i), own,
                  static_cast<const char*>(saved) + halves.saved[i], space + halves.backward_at);
  }
  const DevicePlan& half = halves.devices[1];
  const Space tables(space + halves.backward_at);
  add_halves(plan, half, half.backward.common, in, d_v, grads.v, tables);
  add_halves(plan, half, half.backward.common, in, d_beta, grads.beta, tables);
}

}  // namespace fw::cuda
