// A build without CUDA: its table has no operation, as there is no such device.
#include "ops/backend.h"

namespace fw {

template <class T>
const Ops<T>& cuda_ops() {
  static constexpr Ops<T> kTable;
  return kTable;
}

void require_cuda_libraries() {}

template const Ops<float>& cuda_ops<float>();
template const Ops<Bf16>& cuda_ops<Bf16>();

}  // namespace fw
