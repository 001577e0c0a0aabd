// Products in the emulation: what ops/cuda/library/cublaslt.cpp has a library do, by the host's products on operands
// that are widened first.
#include "ops/cuda/products.h"

#include <vector>

#include "base/bf16.h"
#include "base/gemm.h"
#include "emulation/gpu.h"
#include "emulation/memory.h"

namespace fw::cuda {
namespace {

std::vector<float> widened(const void* data, fw_dtype dtype, int64_t rows, int64_t cols, int64_t stride) {
  std::vector<float> out(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    float* row = out.data() + r * cols;
    if (dtype == FW_BF16) {
      widen_bf16(cols, static_cast<const Bf16*>(data) + r * stride, row);
    } else {
      const float* from = static_cast<const float*>(data) + r * stride;
      std::copy(from, from + cols, row);
    }
  }
  return out;
}

}  // namespace

void multiply(const Product& p, void* /*stream*/) {
  emulation::finish();
  const emulation::Open open;
  const int64_t a_cols = p.a_transposed ? p.m : p.k, b_cols = p.b_transposed ? p.k : p.n;
  const std::vector<float> a = widened(p.a, p.operands, p.a_transposed ? p.k : p.m, a_cols, p.a_stride);
  const std::vector<float> b = widened(p.b, p.operands, p.b_transposed ? p.n : p.k, b_cols, p.b_stride);
  std::vector<float> c(static_cast<size_t>(p.m * p.n));
  if (p.addend != nullptr) c = widened(p.addend, p.result, p.m, p.n, p.addend_stride);
  gemm_parallel(p.a_transposed ? Trans::kYes : Trans::kNo, p.b_transposed ? Trans::kYes : Trans::kNo, p.m, p.n, p.k,
                1.0F, a.data(), a_cols, b.data(), b_cols, p.addend != nullptr ? 1.0F : 0.0F, c.data(), p.n);
  for (int64_t r = 0; r < p.m; ++r) {
    const float* row = c.data() + r * p.n;
    if (p.result == FW_BF16) {
      round_to_bf16(p.n, row, static_cast<Bf16*>(p.c) + r * p.c_stride);
    } else {
      std::copy(row, row + p.n, static_cast<float*>(p.c) + r * p.c_stride);
    }
  }
}

void require_products() {}

}  // namespace fw::cuda
