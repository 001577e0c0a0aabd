// The short convolution's kernels without a model's context, for the operations (ops.def: short_conv) and for the C
// header (short_conv_api.cpp). Shapes and contract are those of ops.def.
#pragma once

#include <cstdint>

#include "ops/ops.h"

namespace fw {

// T is float or double.
template <class T>
void host_conv_forward(Mat<const T> x, const T* weight, const T* bias, int64_t width, const PassLayout& layout,
                       const T* tail_in, T* tail_out, Mat<T> y);
template <class T>
void host_conv_backward(Mat<const T> dy, Mat<const T> x, const T* weight, const T* bias, int64_t width,
                        const PassLayout& layout, const T* tail_in, Mat<T> dx, T* dweight, T* dbias);

namespace cuda {

inline constexpr int64_t kMostConvWidth = 8;

// T is float or Bf16; work is queued on the stream. A build without CUDA throws DeviceError.
template <class T>
void conv_forward(Mat<const T> x, const float* weight, const float* bias, int64_t width, const PassLayout& layout,
                  const T* tail_in, T* tail_out, Mat<T> y, void* stream);
// partial [runs, D width], partial_bias [runs, D] with a bias: scratch; runs = ceil(tokens / kConvRun) (scratch.h).
template <class T>
void conv_backward(Mat<const T> dy, Mat<const T> x, const float* weight, const float* bias, int64_t width,
                   const PassLayout& layout, const T* tail_in, Mat<T> dx, float* dweight, float* dbias, float* partial,
                   float* partial_bias, void* stream);

// The offsets of `count` sequences of `tokens` tokens in device memory, made [count + 1], from those of the host.
void upload_conv_offsets(const int64_t* offsets, int64_t count, int64_t* made, void* stream);
// From offsets that the host does not know (64 bits if wide): they do not decrease there, and the last is `tokens`.
// scratch [2 (count + 1)].
void make_conv_offsets(const void* offsets, bool wide, int64_t count, int64_t longest, int64_t tokens, int32_t* scratch,
                       int64_t* made, void* stream);
void clear_floats(float* to, int64_t count, void* stream);

}  // namespace cuda
}  // namespace fw
