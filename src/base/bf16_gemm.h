// Products of bfloat16 operands with float accumulation: oneDNN's bf16 matrix product, which runs on AMX or AVX-512
// where the machine has them.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "base/gemm.h"
#include "base/local_scratch.h"

namespace fw {

// Whether oneDNN multiplies bf16 on this machine, and right: the first call tries every form at a few small shapes
// (bf16_check.h). Where it does not, round_to_bf16_values and float products take its place: the same numbers up to the
// order of the sums.
bool bf16_products_supported();
// Whether oneDNN has such products here at all, right or wrong.
bool bf16_products_exist();

// The right operand op(B) [k, n] of several products, in the layout that oneDNN prefers. The memory is the scratch's.
struct Bf16Packed {
  const void* data = nullptr;
  int64_t n = 0, k = 0;
};
Bf16Packed pack_bf16(Trans tb, int64_t n, int64_t k, const Bf16* b, int64_t ldb, LocalScratch& scratch);

// C [m, n] = A [m, k] op(B), added to C when accumulate; on the calling thread, inside a task. C's values do not depend
// on what else is computed.
void bf16_gemm_packed(int64_t m, const Bf16* a, int64_t lda, const Bf16Packed& b, bool accumulate, float* c,
                      int64_t ldc);
// The same for C = op(A) op(B) without packing.
void bf16_gemm(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, const Bf16* a, int64_t lda, const Bf16* b,
               int64_t ldb, bool accumulate, float* c, int64_t ldc);

}  // namespace fw
