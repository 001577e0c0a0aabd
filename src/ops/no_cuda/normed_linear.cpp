// A build without CUDA has no kernel for it.
#include "ops/normed_linear.h"

namespace fw {

bool gated_linear_on_cuda(const Exec<Bf16>&, Mat<const Bf16>, Mat<const Bf16>, const float*, float, int64_t, GateKind,
                          const Weight<float>&, Mat<Bf16>, Write) {
  return false;
}
bool normed_linear_on_cuda(const Exec<Bf16>&, Mat<const Bf16>, const float*, float, const Weight<float>&, const float*,
                           bool, Mat<Bf16>) {
  return false;
}
bool linear_pair_on_cuda(const Exec<Bf16>&, const LinearPart<Bf16>&, const LinearPart<Bf16>&) { return false; }
bool swiglu_linear_on_cuda(const Exec<Bf16>&, Mat<const Bf16>, const Weight<float>&, Mat<Bf16>) { return false; }

}  // namespace fw
