// Gradients of parameters on the device: kernels leave partial sums, row by row, which are added up here in the order of the rows.
#pragma once

#include <cstdint>

namespace fw::cuda {

// to[c] += sum over r of partial[r, c];  partial [rows, cols] in device memory, contiguous.
void add_column_sums(const float* partial, int64_t rows, int64_t cols, float* to, void* stream);

}  // namespace fw::cuda
