// The three products of a linear layer on the device, which cross-entropy has too. Activations of bf16 meet the bf16
// copy of the weight, those of float its values; gradients of weights are added up in float32.
#pragma once

#include "ops/exec.h"

namespace fw::cuda {

// The weight as an operand alongside activations of type T. Throws Error(kInternal) where it lacks that copy.
template <class T>
Mat<const T> operand(const Weight<float>& weight);

// y = x W^T (+ y)
template <class T>
void linear_product(const Exec<T>& exec, Mat<const T> x, const Weight<float>& weight, Mat<T> y, Write write);
// dx = dy W (+ dx) unless dx.data is null; dweight += dy^T x unless dweight.data is null.
template <class T>
void linear_gradients(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Weight<float>& weight, Mat<T> dx,
                      Mat<float> dweight, Write write);

}  // namespace fw::cuda
