// Tensors of float16 or float32 as rows of bf16 or float32 before a call's kernels, and back after them. See
// rewrites/staged_rows_kernels.h.
//
// Roles, 256 threads: a block of the grid's second dimension has one tensor. A thread has eight neighbouring channels
// of a row at a time, or, of rows that are not 16-byte vectors (token scalars: the heads), one number. Nothing is
// shared.
#include <algorithm>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "scan/cuda/common/tokens.cuh"
#include "scan/cuda/rewrites/staged_rows_kernels.h"

#ifdef FW_CUDA_EMULATION
#include "base/f16.h"
#endif

namespace fw::cuda {
namespace {

constexpr int kThreads = 256;

#ifdef FW_CUDA_EMULATION
float half_value(uint16_t bits) {
  const F16 x{bits};
  float value = 0;
  widen_f16(1, &x, &value);
  return value;
}
uint16_t half_bits(float x) {
  F16 y{};
  round_to_f16(1, &x, &y);
  return y.bits;
}
#else
FW_DEVICE float half_value(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
FW_DEVICE uint16_t half_bits(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif
FW_DEVICE uint32_t half_pair(float low, float high) {
  return half_bits(low) | static_cast<uint32_t>(half_bits(high)) << 16;
}

// A task as kernels have it.
struct Task {
  StageTask tensors;
  int32_t pieces;  // of a row: dim / 8, or dim where a number is taken at a time
};
struct Tasks {
  Task of[kTokenTensors];
  StageTokens tokens;
};

template <int kN>
FW_DEVICE void load_f16(const uint16_t* from, float (&x)[kN]) {
  if constexpr (kN == 8) {
    const uint4 a = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      x[2 * j] = half_value(static_cast<uint16_t>(words[j] & 0xffff)),
            x[2 * j + 1] = half_value(static_cast<uint16_t>(words[j] >> 16));
  } else {
    x[0] = half_value(*from);
  }
}
template <int kN>
FW_DEVICE void store_f16(uint16_t* to, const float (&x)[kN]) {
  if constexpr (kN == 8) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]), half_pair(x[6], x[7]));
  } else {
    *to = half_bits(x[0]);
  }
}

template <int kN>
FW_DEVICE void load_caller(const char* from, int32_t f32, float (&x)[kN]) {
  if (f32 == 0) return load_f16(reinterpret_cast<const uint16_t*>(from), x);
  if constexpr (kN == 8) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], c = reinterpret_cast<const float4*>(from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = c.x, x[5] = c.y, x[6] = c.z, x[7] = c.w;
  } else {
    x[0] = *reinterpret_cast<const float*>(from);
  }
}
template <int kN>
FW_DEVICE void store_caller(char* to, int32_t f32, const float (&x)[kN]) {
  if (f32 == 0) return store_f16(reinterpret_cast<uint16_t*>(to), x);
  if constexpr (kN == 8) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
    *reinterpret_cast<float*>(to) = x[0];
  }
}

enum class Staging { kIn, kBack };  // from the caller's rows, to them

template <Staging kStaging, int kN>
FW_DEVICE void convert_rows(const StageTask& x, int pieces, const StageTokens& tokens) {
  const int64_t all = tokens_before(tokens.end, tokens.all) * x.heads * pieces,
                step = int64_t{grid_size_x()} * kThreads;
  FW_NO_UNROLL
  for (int64_t i = int64_t{block_index_x()} * kThreads + thread_index(); i < all; i += step) {
    const int64_t row = i / pieces, token = row / x.heads, b = token / tokens.batch, t = token - b * tokens.batch;
    const int channel = static_cast<int>(i - row * pieces) * kN, head = static_cast<int>(row - token * x.heads);
    const int64_t caller_at = b * x.caller.stride_b + t * x.caller.stride_t + head * x.caller.stride_h + channel;
    char* const caller = static_cast<char*>(x.caller.data) + caller_at * (x.caller_f32 != 0 ? 4 : 2);
    const int64_t at = b * x.rows.stride_b + t * x.rows.stride_t + head * x.rows.stride_h;
    const Rows rows{static_cast<char*>(x.rows.data) + at * (x.rows.bf16 != 0 ? 2 : 4), 0, x.rows.bf16};
    float values[kN];
    if constexpr (kStaging == Staging::kBack) {
      load_channels(rows, 0, channel, x.dim, values);
      store_caller(caller, x.caller_f32, values);
    } else {
      load_caller(caller, x.caller_f32, values);
      store_channels(rows, 0, channel, x.dim, values);
    }
  }
}

template <Staging kStaging>
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ Tasks tasks) {
  grid_dependency_wait();
  grid_dependency_launch();
  const Task& task = tasks.of[block_index_y()];
  if (task.pieces < task.tensors.dim) {
    convert_rows<kStaging, 8>(task.tensors, task.pieces, tasks.tokens);
  } else {
    convert_rows<kStaging, 1>(task.tensors, task.pieces, tasks.tokens);
  }
}

// Rows of 16-byte vectors wherever a head begins (contiguous ones of the workspace are, if dim is a multiple of 8).
bool whole(const StageTask& x) {
  const uint64_t strides = static_cast<uint64_t>(x.caller.stride_b | x.caller.stride_t | x.caller.stride_h);
  return x.dim % 8 == 0 && strides % (x.caller_f32 != 0 ? 4 : 8) == 0 &&
         (reinterpret_cast<uintptr_t>(x.caller.data) & 15) == 0;
}

template <Staging kStaging>
void convert(const StageArgs& args, const StageTokens& tokens, void* stream) {
  if (args.count == 0 || tokens.all == 0) return;
  Tasks tasks;
  tasks.tokens = tokens;
  int64_t most = 1;
  for (int i = 0; i < args.count; ++i) {
    const StageTask& task = args.tasks[i];
    tasks.of[i] = {task, whole(task) ? task.dim / 8 : task.dim};
    most = std::max(most, tokens.all * task.heads * tasks.of[i].pieces);
  }
  const int64_t blocks = std::min((most + kThreads - 1) / kThreads, 8 * int64_t{sm_count()});
  launch_overlapped(stage_kernel<kStaging>, Dim3{static_cast<unsigned>(blocks), static_cast<unsigned>(args.count)},
                    kThreads, 0, stream, tasks);
}

}  // namespace

void stage_rows(const StageArgs& args, const StageTokens& tokens, void* stream) {
  convert<Staging::kIn>(args, tokens, stream);
}
void unstage_rows(const StageArgs& args, const StageTokens& tokens, void* stream) {
  convert<Staging::kBack>(args, tokens, stream);
}

}  // namespace fw::cuda
