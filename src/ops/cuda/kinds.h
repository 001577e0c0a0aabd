// Kinds of layers (FW_LAYER_OP of ops.def) whose operations the CUDA device has, and so a plan for it, and what bounds
// them.
#pragma once

namespace fw::cuda::kinds {

inline constexpr bool mesa = true, layernorm = true, channel_mix = true, rwkv7 = true, mamba3 = true, experts = true;

// Channels of a Mesa layer's key head: two triangles of so many rows fit into shared memory (mesa_solve.cu).
inline constexpr int kMostMesaKey = 160;

// Numbers that a head of a Mamba-3 layer of rank R sums over tokens, (2 R + 1) P, which fit there too (mamba3_gate.cu).
inline constexpr int kMostMamba3Sums = 58112;

// Experts of a layer: a token's scores, their order and those of groups fit there (route.cu).
inline constexpr int kMostExperts = 8192;

// Channels of an attention head (attention_rows.cuh): latents of published models have 576.
inline constexpr int kMostAttentionDim = 768;

}  // namespace fw::cuda::kinds
