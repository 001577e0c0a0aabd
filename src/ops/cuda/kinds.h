// Kinds of layers (FW_LAYER_OP of ops.def) whose operations the CUDA device has, and so a plan for it.
#pragma once

namespace fw::cuda::kinds {

inline constexpr bool mesa = true, layernorm = true, channel_mix = true, rwkv7 = true, mamba3 = false;

}  // namespace fw::cuda::kinds
