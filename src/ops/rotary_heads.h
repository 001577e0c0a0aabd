// Rotary position embedding of what attention takes or leaves, by the operations that do not rotate heads themselves.
#pragma once

#include "base/mat.h"

namespace fw {

// rotary(x) of queries and keys, or of their gradients: once for both where they lie side by side.
template <class T, class Rotary>
void rotary_heads(Mat<T> q, Mat<T> k, const Rotary& rotary) {
  if (k.data == q.data + q.cols && k.stride == q.stride)
    return rotary(Mat<T>(q.data, q.rows, q.cols + k.cols, q.stride));
  rotary(q);
  rotary(k);
}

}  // namespace fw
