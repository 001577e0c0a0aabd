// The softmax part of cross-entropy on the device, on a slice of logits.
#pragma once

#include "ops/exec.h"

namespace fw::cuda {

// For every row t of logits with targets[t] >= 0: nll[t] = log(sum exp logits) - logits[target]; else 0. With
// `gradient` the row becomes grad_scale (softmax - one-hot), zeros where it is not scored.
template <class T>
void softmax_cross_entropy_rows(const Exec<T>& exec, Mat<T> logits, const int32_t* targets, bool gradient,
                                float grad_scale, float* nll);

// sum->nll += nll[t] in double in the order of the rows, sum->count += the rows with targets[t] >= 0.
void add_loss(const float* nll, const int32_t* targets, int64_t rows, LossSum* sum, void* stream);

}  // namespace fw::cuda
