// Matrix products on the device: NVIDIA's cuBLASLt, which is opened at run time (library/cublaslt.cpp), or in the
// emulation host arithmetic in its place (tests/emulation/products.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "fastweight/fastweight.h"

namespace fw::cuda {

// C [m, n] = op(A) op(B) (+ the addend); row-major, rows at any stride. A and B have one type, bf16 or float32, C
// either; sums are float32, products of float32 are not rounded to fewer digits. m, n, k > 0.
struct Product {
  int64_t m = 0, n = 0, k = 0;
  fw_dtype operands = FW_BF16, result = FW_BF16;
  const void* a = nullptr;  // [m, k], transposed [k, m]
  int64_t a_stride = 0;
  bool a_transposed = false;
  const void* b = nullptr;  // [k, n], transposed [n, k]
  int64_t b_stride = 0;
  bool b_transposed = false;
  void* c = nullptr;
  int64_t c_stride = 0;
  const void* addend = nullptr;  // [m, n] of the result's type: C itself, or apart from it; null: none
  int64_t addend_stride = 0;
};

inline constexpr size_t kProductsWorkspace = size_t{64} << 20;  // of the device's memory, taken by the first product

// Queued on the stream. The same product has the same bits: which of the library's algorithms runs is chosen once for a
// shape, and none of them adds up in the order of its arrival or in bf16. Throws DeviceError where the library is
// missing, saying what loads it.
void multiply(const Product& product, void* stream);

// Called with each product of an operation, before it is queued: for who listens (ops/product_record.h).
void note_product(const Product& product);

// Throws DeviceError where the library is missing: before a model's parameters are read.
void require_products();

}  // namespace fw::cuda
