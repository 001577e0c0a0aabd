// What a call does on the device: which kernels in which form, and where everything lies in workspace and saved buffer. A plain
// function of the checked descriptor (scan/plan.h), without CUDA types: it is printed and tested where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "scan/cuda/args.h"
#include "scan/plan.h"

namespace fw::cuda {

// Bytes at an offset of a buffer; bytes 0: not there.
struct Region {
  size_t offset = 0, bytes = 0;
};

// What both directions have in the workspace: tables of packed sequences, the preconditioner's rows.
struct CommonRegions {
  Region offsets, chunk_base;  // int32 [N + 1]
  Region m;                    // float [tokens, H, K]
  Region boundaries, scratch;  // of the preconditioner (kernels.h)
};

struct ForwardRegions {
  CommonRegions common;
  Region images;  // ForwardImage [chunks, HV]
  Region z;       // panels [chunks, HV, value blocks]: rules whose write gate has a value a channel
  size_t bytes = 0;
};

// Forward leaves these for backward.
struct SavedRegions {
  Region images;  // BackwardImage [chunks, HV]
  Region pairs;   // PairImage [chunks, HV]
  Region states;  // S^T [chunks, HV, value blocks]
  Region w;       // panels [chunks, HV, value blocks]
  size_t bytes = 0;
};

struct BackwardRegions {
  CommonRegions common;
  Region d_states, v;  // as states and w
  // Gradients per value head, float [tokens, HV, K], where the caller's tensor has fewer heads (or, of k, the preconditioner adds to it).
  Region q, k, erase_key, erase_gate, g, dm;
  Region dalpha_p, dbeta_p;  // float [tokens, HV]
  Region dcenter;            // float [chunks, H]
  Region token;              // of token_backward
  size_t bytes = 0;
};

struct DevicePlan {
  bool chunk_form = false;
  int key = 0;           // 64 or 128: K padded, chunk form
  int value_blocks = 0;  // of 64 columns, chunk form
  bool z_image = false;
  int64_t chunks = 0;  // of all sequences
  ForwardRegions forward;
  SavedRegions saved;
  BackwardRegions backward;
  // Without a saved buffer backward makes one at the start of its workspace; forward's own regions follow it and are used up
  // before backward's, which lie over them.
  size_t backward_alone_bytes() const;
};

// Throws Error(kUsage) for a chunk form that the device has not.
DevicePlan make_device_plan(const Plan& plan);

// Lines "name: value" for people.
std::string to_text(const Plan& plan, const DevicePlan& device);

}  // namespace fw::cuda
