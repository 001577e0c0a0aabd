// A build without oneDNN has no products of bf16 numbers: callers round to bf16 and multiply floats instead
// (bf16_gemm.h).
#include "base/bf16_gemm.h"

#include "base/error.h"

namespace fw {

bool bf16_products_supported() { return false; }
bool bf16_products_exist() { return false; }

void bf16_gemm(Trans, Trans, int64_t, int64_t, int64_t, const Bf16*, int64_t, const Bf16*, int64_t, bool, float*,
               int64_t) {
  fail_internal("bf16_gemm: this build has no oneDNN");
}

}  // namespace fw
