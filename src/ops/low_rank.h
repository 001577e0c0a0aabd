// Exec's linear operations of experts with the low-rank additions of their weight (LowRank in ops.h). Of E experts an
// addition has A [E rank, in] and B [E out, rank], those of each expert one after the other.
#pragma once

#include "ops/exec.h"

namespace fw {

template <class T>
void expert_product_forward(const Exec<T>& exec, Mat<const T> x, const ExpertRows& rows, Weight<Wide<T>> weight,
                            Mat<T> y);
template <class T>
void expert_product_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const ExpertRows& rows,
                             Weight<Wide<T>> weight, Mat<T> dx, Mat<Wide<T>> dweight);

}  // namespace fw
