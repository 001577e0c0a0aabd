// Which functions run on which device: the one file that knows all backends.
#pragma once

#include <string_view>

#include "base/device.h"
#include "ops/exec.h"

namespace fw {

// The CUDA device's operations, T float or Bf16; those without a kernel are null, in a build without CUDA all.
template <class T>
const Ops<T>& cuda_ops();

// Throws DeviceError where a library is missing that they call.
void require_cuda_libraries();

// The functions that there are for the device, some of which may be null; while there is a profile (ops/profile.h),
// those that it times.
template <class T>
const Ops<T>& table_of(const Device& device);
template <class T>
const Ops<T>& plain_table_of(const Device& device);  // these themselves
template <class T>
const Ops<T>& profiled_ops();

// All of them, for a model. Throws Error(kUsage) if the device lacks one that is not of one kind of layers.
template <class T>
const Ops<T>& ops_of(const Device& device);

// Throws Error(kUsage) if the device lacks an operation of a kind of layers (FW_LAYER_OP of ops.def), by its name in a
// configuration's list.
template <class T>
void require_layer(std::string_view kind, const Device& device);

// What a device's kernels hold of a layer, as large as int64_t goes where nothing bounds it.
struct LayerLimits {
  int64_t attention_dim;  // channels of an attention head
  int64_t mesa_key;       // channels of a Mesa layer's key head
  int64_t mamba3_sums;    // (2 mimo_rank + 1) head_dim of a Mamba-3 layer with several rows a token
  int64_t experts;        // of a layer
};
LayerLimits layer_limits(const Device& device);

// Up to how many rows a layer takes a route of fused operations. A plan takes the route of the device that it is of.
struct RowLimits {
  int64_t decode;  // a product costs the reading of its weight, however few they are; norms and gates run in it
  int64_t swiglu;  // a product and the SwiGLU after it are one kernel
};
RowLimits row_limits(const Device& device);

// Bytes of an arena's blocks: on a GPU, where each costs a call that waits, more than all but the largest activations
// take. The plan of a GPU has one block without an end: what a pass uses of it is what the GPU's arena is to reserve.
size_t arena_block(const Device& device);

// The same context for tensors of the type of statistics.
template <class T>
Exec<Wide<T>> wide_exec(const Exec<T>& exec) {
  return {table_of<Wide<T>>(exec.device), exec.device, exec.arena, exec.contexts, exec.precision, exec.libraries};
}

// Those of a PlanDevice (base/plan_device.h): they only allocate what the host's (T float or double) or the CUDA
// device's (float or Bf16) would.
template <class T>
const Ops<T>& planned_ops();
template <class T>
const Ops<T>& planned_cuda_ops();

// Bytes of the device's memory that its libraries take besides.
size_t library_bytes(const Device& device);

}  // namespace fw
