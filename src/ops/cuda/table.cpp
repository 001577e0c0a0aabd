// The CUDA device's table, as far as there are kernels: a model needs all of it (ops/backend.cpp refuses one that is not complete).
#include "ops/backend.h"
#include "ops/cuda/operations.h"

namespace fw {

template <class T>
const Ops<T>& cuda_ops() {
  static constexpr Ops<T> kTable = [] {
    Ops<T> ops;
#define FW_CUDA_OP(name) ops.name = &cuda::ops::name<T>;
    FW_CUDA_OP(embedding_forward)
    FW_CUDA_OP(embedding_backward)
    FW_CUDA_OP(rmsnorm_forward)
    FW_CUDA_OP(add_rmsnorm_forward)
    FW_CUDA_OP(rmsnorm_backward)
    FW_CUDA_OP(gated_rmsnorm_forward)
    FW_CUDA_OP(gated_rmsnorm_backward)
    FW_CUDA_OP(short_conv_forward)
    FW_CUDA_OP(short_conv_backward)
    FW_CUDA_OP(gated_conv_forward)
    FW_CUDA_OP(gated_conv_backward)
    FW_CUDA_OP(sigmoid_gate_forward)
    FW_CUDA_OP(sigmoid_gate_backward)
    FW_CUDA_OP(decay_gate_forward)
    FW_CUDA_OP(decay_gate_backward)
    FW_CUDA_OP(log_sigmoid_decay_forward)
    FW_CUDA_OP(log_sigmoid_decay_backward)
    FW_CUDA_OP(learned_gate_forward)
    FW_CUDA_OP(place_factor)
    FW_CUDA_OP(single_gate_decay_forward)
    FW_CUDA_OP(single_gate_decay_backward)
    FW_CUDA_OP(feature_map_forward)
    FW_CUDA_OP(feature_map_backward)
    FW_CUDA_OP(product_forward)
    FW_CUDA_OP(product_backward)
    FW_CUDA_OP(rotary)
    FW_CUDA_OP(attention_forward)
    FW_CUDA_OP(attention_backward)
    FW_CUDA_OP(store_rows)
    FW_CUDA_OP(head_scale_forward)
    FW_CUDA_OP(head_scale_backward)
    FW_CUDA_OP(head_constant_forward)
    FW_CUDA_OP(head_constant_backward)
    FW_CUDA_OP(head_subtract_forward)
    FW_CUDA_OP(head_subtract_backward)
    FW_CUDA_OP(group_mean_forward)
    FW_CUDA_OP(group_mean_backward)
    FW_CUDA_OP(swiglu_forward)
    FW_CUDA_OP(swiglu_backward)
    FW_CUDA_OP(copy_rows)
    FW_CUDA_OP(last_rows)
    FW_CUDA_OP(add_values)
    FW_CUDA_OP(square_sum)
    FW_CUDA_OP(adamw)
#undef FW_CUDA_OP
    return ops;
  }();
  return kTable;
}

template const Ops<float>& cuda_ops<float>();
template const Ops<Bf16>& cuda_ops<Bf16>();

}  // namespace fw
