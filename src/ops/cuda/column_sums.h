// Gradients of parameters on the device: kernels leave partial sums, row by row, which are added up here in the order
// of the rows.
#pragma once

#include <cstdint>

#include "base/arena.h"

namespace fw::cuda {

// to[c] += sum over r of partial[r, c];  partial [rows, cols] in device memory, contiguous.
void add_column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream);
void set_column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream);  // = in place of +=
// Of a convolution: dweight[c, taps-1-j] += sum over r of weights[r, j, c], dbias[c] += sum over r of biases[r, c].
void add_tap_sums(const float* weights, const float* biases, int64_t rows, int64_t cols, int64_t taps, float* dweight,
                  float* dbias, void* stream);
// to[c / group] += sum over r and the group's columns c, with scratch from the arena.
void add_group_sums(const float* partial, int64_t rows, int64_t cols, int64_t group, float* to, Arena& arena,
                    void* stream);

}  // namespace fw::cuda
