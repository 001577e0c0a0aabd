// The biases of linear layers on the device.
#pragma once

#include "ops/exec.h"

namespace fw::cuda {

// y[t] += bias
template <class T>
void add_bias(const Exec<T>& exec, const float* bias, Mat<T> y);
// dbias += the sum of dy's rows, in an order of the shape alone; scratch from the arena.
template <class T>
void add_bias_gradient(const Exec<T>& exec, Mat<const T> dy, float* dbias);

}  // namespace fw::cuda
