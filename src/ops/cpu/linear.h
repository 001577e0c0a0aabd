// What linear and cross-entropy share: the three products of a linear layer, in the precision asked for.
#pragma once

#include <cstdint>

#include "ops/cpu/bf16_linear.h"
#include "ops/ops.h"

namespace fw {

// A weight matrix [out, in] and what is prepared of it once for several products. Holds scratch memory of the calling
// thread until it ends: scratch taken later must be given back earlier.
template <class T>
class LinearProducts {
 public:
  // Precision::kBf16 holds for float; double is always native.
  LinearProducts(Weight<T> weight, Precision precision);

  // y [T, out] = x [T, in] W^T (+ y)
  void forward(Mat<const T> x, Mat<T> y, Write write);
  // dx [T, in] = dy W (+ dx), unless dx.data is null; dweight [out, in] += dy^T x, unless its data is null.
  void backward(Mat<const T> dy, Mat<const T> x, Mat<T> dx, Mat<T> dweight, Write write);

 private:
  // How bf16 products run: not at all, by oneDNN, or as float products of rounded values where oneDNN cannot.
  enum class Bf16Way { kOff, kLibrary, kRoundedValues };

  LocalScratch scratch_;
  Bf16Way way_ = Bf16Way::kOff;
  Mat<const T> values_;      // W, or its rounded values; no data where it is kept in bf16 alone
  Mat<const Bf16> rounded_;  // W in bf16
  Bf16Tiles tiles_;          // of W and of W^T
  Bf16Tiles tiles_trans_;
};

}  // namespace fw
