// A trial of a library's bf16 products. Which of its kernels runs depends on the machine (AMX, AVX-512 with and without
// bf16 of its own), and releases of oneDNN have had wrong ones. A wrong product of a training step shows as a loss
// curve that is a little worse, if it shows at all.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "base/gemm.h"

namespace fw {

// C [m, n] = op(A) [m, k] op(B) [k, n], added to C when accumulate; leading dimensions as in gemm.h.
using Bf16Product = void (*)(Trans ta, Trans tb, int64_t m, int64_t n, int64_t k, const Bf16* a, int64_t lda,
                             const Bf16* b, int64_t ldb, bool accumulate, float* c, int64_t ldc);

// Whether both products give what three loops give, in each of the eight forms (A, B transposed or not, added or not).
// The shapes fill no tile, one, and some, with and without gaps between rows. Operands are small integers, so that
// every order of the sums is exact and the comparison is of equality.
bool bf16_products_are_right(Bf16Product plain, Bf16Product packed);

}  // namespace fw
