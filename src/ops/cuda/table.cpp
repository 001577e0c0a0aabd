// The CUDA device's table, as far as there are kernels: a model needs all of it (ops/backend.cpp refuses one that is not complete).
#include "ops/backend.h"
#include "ops/cuda/operations.h"

namespace fw {

template <class T>
const Ops<T>& cuda_ops() {
  static constexpr Ops<T> kTable = [] {
    Ops<T> ops;
#define FW_CUDA_OP(name) ops.name = &cuda::ops::name<T>;
    FW_CUDA_OP(rmsnorm_forward)
    FW_CUDA_OP(add_rmsnorm_forward)
    FW_CUDA_OP(rmsnorm_backward)
    FW_CUDA_OP(short_conv_forward)
    FW_CUDA_OP(short_conv_backward)
#undef FW_CUDA_OP
    return ops;
  }();
  return kTable;
}

template const Ops<float>& cuda_ops<float>();
template const Ops<Bf16>& cuda_ops<Bf16>();

}  // namespace fw
