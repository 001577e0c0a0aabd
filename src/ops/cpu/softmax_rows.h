// The softmax part of the cross-entropy, on a slice of logits.
#pragma once

#include <cstdint>

#include "base/mat.h"

namespace fw {

// For every row t of logits [T, vocab] with targets[t] >= 0: nll[t] = log(sum exp logits) - logits[target], computed
// from the maximum so that nothing overflows; 0 in other rows. With kGradient the row becomes grad_scale (softmax -
// one-hot), zeros where not scored.
template <class T>
void softmax_nll(Mat<T> logits, const int32_t* targets, T* nll);
template <class T>
void softmax_nll_gradient(Mat<T> logits, const int32_t* targets, T grad_scale, T* nll);

}  // namespace fw
