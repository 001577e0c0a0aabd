// The CUDA device's table.
#include <type_traits>

#include "ops/backend.h"
#include "ops/cuda/kinds.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/products.h"

namespace fw {

template <class T>
const Ops<T>& cuda_ops() {
  static constexpr Ops<T> kTable = [] {
    Ops<T> ops;
#define FW_LAYER_OP(kind, name, args) \
  if constexpr (cuda::kinds::kind) ops.name = &cuda::ops::name<T>;
#define FW_FUSED_OP(name, args) \
  if constexpr (std::is_same_v<T, Bf16>) ops.name = &cuda::ops::name<T>;
#define FW_OP(name, args) ops.name = &cuda::ops::name<T>;
#include "ops/ops.def"
#undef FW_OP
    return ops;
  }();
  return kTable;
}

void require_cuda_libraries() { cuda::require_products(); }

template const Ops<float>& cuda_ops<float>();
template const Ops<Bf16>& cuda_ops<Bf16>();

}  // namespace fw
