// Linear layers: y = x W^T + bias, dx = dy W, dW += dy^T x, db += sum of dy. The products are the library's (base/gemm.h,
// bf16.h); here is how they are cut into tasks, by shape only: row blocks for y and dx, tiles of W for dW, whose sum over
// the tokens runs in order inside its task.
#include "ops/cpu/linear.h"

#include <type_traits>

#include "base/gemm.h"
#include "ops/cpu/few_rows.h"

namespace fw {
namespace {

constexpr int64_t kTileCols = 1024;   // columns of y or dx in one task
constexpr int64_t kTokenChunk = 512;  // tokens added to a tile of dW by one product: both operands stay in L2

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// 256 rows keep operands and result in L2; fewer when there would be fewer than four tasks.
RowBlocks product_blocks(int64_t rows) { return {rows, rows >= 1024 ? 256 : std::max<int64_t>(32, round_up((rows + 3) / 4, 16))}; }

Mat<Bf16> rounded_copy(Mat<const float> x, LocalScratch& scratch) {
  const Mat<Bf16> out(scratch.alloc<Bf16>(x.rows * x.cols), x.rows, x.cols);
  for_row_blocks(RowBlocks::cut(x.rows, x.cols),
                 [&](int64_t, int64_t begin, int64_t end) { round_to_bf16(x.row_range(begin, end - begin), out.row_range(begin, end - begin)); });
  return out;
}

Mat<float> rounded_values(Mat<const float> x, LocalScratch& scratch) {
  const Mat<float> out(scratch.alloc<float>(x.rows * x.cols), x.rows, x.cols);
  for_row_blocks(RowBlocks::cut(x.rows, x.cols),
                 [&](int64_t, int64_t begin, int64_t end) { round_to_bf16_values(x.row_range(begin, end - begin), out.row_range(begin, end - begin)); });
  return out;
}

template <class T>
T beta_of(Write write) {
  return write == Write::kAccumulate ? T(1) : T(0);
}

template <class T>
void add_bias(const T* bias, Mat<T> y) {
  for_row_blocks(RowBlocks::cut(y.rows, y.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* row = y.row(t);
      for (int64_t c = 0; c < y.cols; ++c) row[c] += bias[c];
    }
  });
}

template <class T>
void add_column_sums(Mat<const T> dy, T* dbias) {
  const RowBlocks blocks = RowBlocks::cut(dy.rows, dy.cols);
  PartialSums<T> partial(blocks.count(), dy.cols);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    T* sums = partial.block(block);
    for (int64_t t = begin; t < end; ++t) {
      const T* row = dy.row(t);
      for (int64_t c = 0; c < dy.cols; ++c) sums[c] += row[c];
    }
  });
  partial.add_to(dbias);
}

// C [T, n] = (C +) A op(B), A rounded here unless it already is: rows by tiles of columns.
void bf16_rows_product(Mat<const float> a, Mat<Bf16> a_rounded, const std::vector<Bf16Packed>& b, Mat<float> c, Write write) {
  const RowBlocks blocks = product_blocks(a.rows);
  const int64_t tiles = static_cast<int64_t>(b.size());
  parallel_for(blocks.count() * tiles, [&](int64_t task) {
    const int64_t begin = blocks.begin(task / tiles);
    const int64_t count = blocks.end(task / tiles) - begin;
    const int64_t tile = task % tiles;
    LocalScratch scratch;
    Mat<Bf16> rows;
    if (a_rounded.data == nullptr || tiles == 1) {
      rows = a_rounded.data == nullptr ? Mat<Bf16>(scratch.alloc<Bf16>(count * a.cols), count, a.cols) : a_rounded.row_range(begin, count);
      round_to_bf16(a.row_range(begin, count), rows);
    } else {
      rows = a_rounded.row_range(begin, count);
    }
    bf16_gemm_packed(count, rows.data, rows.stride, b[static_cast<size_t>(tile)], write == Write::kAccumulate, c.row(begin) + tile * kTileCols, c.stride);
  });
}

// dW += dY^T X
void bf16_weight_gradient(Mat<const Bf16> dy, Mat<const Bf16> x, Mat<float> dweight) {
  const int64_t tile_m = std::clamp<int64_t>(round_up((dweight.rows + 3) / 4, 16), 32, 128);
  const int64_t tiles_m = (dweight.rows + tile_m - 1) / tile_m;
  const int64_t tile_n = std::min<int64_t>(dweight.cols, 512);
  const int64_t tiles_n = (dweight.cols + tile_n - 1) / tile_n;
  parallel_for(tiles_m * tiles_n, [&](int64_t task) {
    const int64_t i = task / tiles_n * tile_m;
    const int64_t j = task % tiles_n * tile_n;
    const int64_t m = std::min(tile_m, dweight.rows - i);
    const int64_t n = std::min(tile_n, dweight.cols - j);
    for (int64_t t = 0; t < x.rows; t += kTokenChunk) {
      const int64_t k = std::min(kTokenChunk, x.rows - t);
      bf16_gemm(Trans::kYes, Trans::kNo, m, n, k, dy.row(t) + i, dy.stride, x.row(t) + j, x.stride, true, dweight.row(i) + j, dweight.stride);
    }
  });
}

}  // namespace

template <class T>
LinearProducts<T>::LinearProducts(Mat<const T> weight, Precision precision) : weight_(weight), way_(Bf16Way::kOff), values_(weight) {
  if (!std::is_same_v<T, float> || precision == Precision::kNative) return;
  way_ = bf16_products_supported() ? Bf16Way::kLibrary : Bf16Way::kRoundedValues;
  if constexpr (std::is_same_v<T, float>) {
    if (way_ == Bf16Way::kLibrary) {
      const Mat<Bf16> rounded = rounded_copy(weight, scratch_);
      rounded_ = rounded;
    } else {
      values_ = rounded_values(weight, scratch_);
    }
  }
}

// Tiles of W^T [in, out] (kYes) or W [out, in] (kNo) as right operands.
template <class T>
void LinearProducts<T>::prepare(Trans trans, std::vector<Bf16Packed>& packed) {
  if (!packed.empty()) return;
  const int64_t k = trans == Trans::kYes ? rounded_.cols : rounded_.rows;
  const int64_t n = trans == Trans::kYes ? rounded_.rows : rounded_.cols;
  for (int64_t j = 0; j < n; j += kTileCols) {
    const Bf16* tile = trans == Trans::kYes ? rounded_.row(j) : rounded_.data + j;
    packed.push_back(pack_bf16(trans, std::min(kTileCols, n - j), k, tile, rounded_.stride, scratch_));
  }
}

template <class T>
void LinearProducts<T>::forward_library(Mat<const T> x, Mat<T> y, Write write) {
  if constexpr (std::is_same_v<T, float>) {
    prepare(Trans::kYes, packed_trans_);
    LocalScratch scratch;
    const Mat<Bf16> rounded = packed_trans_.size() == 1 ? Mat<Bf16>() : rounded_copy(x, scratch);
    bf16_rows_product(x, rounded, packed_trans_, y, write);
  }
}

template <class T>
void LinearProducts<T>::backward_library(Mat<const T> dy, Mat<const T> x, Mat<T> dx, Mat<T> dweight, Write write) {
  if constexpr (std::is_same_v<T, float>) {
    if (dx.data != nullptr) prepare(Trans::kNo, packed_plain_);
    LocalScratch scratch;
    Mat<Bf16> dy_rounded;
    if (dx.data == nullptr || packed_plain_.size() > 1) {
      dy_rounded = rounded_copy(dy, scratch);
    } else if (dweight.data != nullptr) {
      dy_rounded = Mat<Bf16>(scratch.alloc<Bf16>(dy.rows * dy.cols), dy.rows, dy.cols);  // filled by the product for dx
    }
    if (dx.data != nullptr) bf16_rows_product(dy, dy_rounded, packed_plain_, dx, write);
    if (dweight.data != nullptr) bf16_weight_gradient(dy_rounded, rounded_copy(x, scratch), dweight);
  }
}

template <class T>
void LinearProducts<T>::forward(Mat<const T> x, Mat<T> y, Write write) {
  if (x.rows == 0) return;
  if (way_ == Bf16Way::kLibrary) return forward_library(x, y, write);
  LocalScratch scratch;
  if constexpr (std::is_same_v<T, float>) {
    if (way_ == Bf16Way::kRoundedValues) x = rounded_values(x, scratch);
  }
  gemm_parallel(Trans::kNo, Trans::kYes, x.rows, values_.rows, x.cols, T(1), x.data, x.stride, values_.data, values_.stride, beta_of<T>(write), y.data,
                y.stride);
}

template <class T>
void LinearProducts<T>::backward(Mat<const T> dy, Mat<const T> x, Mat<T> dx, Mat<T> dweight, Write write) {
  if (dy.rows == 0) return;
  if (way_ == Bf16Way::kLibrary) return backward_library(dy, x, dx, dweight, write);
  LocalScratch scratch;
  if constexpr (std::is_same_v<T, float>) {
    if (way_ == Bf16Way::kRoundedValues) {
      dy = rounded_values(dy, scratch);
      if (dweight.data != nullptr) x = rounded_values(x, scratch);
    }
  }
  if (dx.data != nullptr) {
    gemm_parallel(Trans::kNo, Trans::kNo, dy.rows, values_.cols, dy.cols, T(1), dy.data, dy.stride, values_.data, values_.stride, beta_of<T>(write), dx.data,
                  dx.stride);
  }
  if (dweight.data != nullptr) {
    gemm_parallel(Trans::kYes, Trans::kNo, dweight.rows, dweight.cols, dy.rows, T(1), dy.data, dy.stride, x.data, x.stride, T(1), dweight.data, dweight.stride);
  }
}

template <class T>
void linear_forward(Mat<const T> x, Mat<const T> weight, const T* bias, Mat<T> y, Precision precision, Write write) {
  if (x.rows == 0) return;
  if (x.rows <= kFewRows) {
    few_rows_product(x, weight, y, precision, write == Write::kAccumulate);
  } else {
    LinearProducts<T>(weight, precision).forward(x, y, write);
  }
  if (bias != nullptr) add_bias(bias, y);
}

template <class T>
void linear_backward(Mat<const T> dy, Mat<const T> x, Mat<const T> weight, Mat<T> dx, Mat<T> dweight, T* dbias, Precision precision, Write write) {
  if (dx.data != nullptr || dweight.data != nullptr) LinearProducts<T>(weight, precision).backward(dy, x, dx, dweight, write);
  if (dbias != nullptr) add_column_sums(dy, dbias);
}

template class LinearProducts<float>;
template class LinearProducts<double>;
template void linear_forward(Mat<const float>, Mat<const float>, const float*, Mat<float>, Precision, Write);
template void linear_forward(Mat<const double>, Mat<const double>, const double*, Mat<double>, Precision, Write);
template void linear_backward(Mat<const float>, Mat<const float>, Mat<const float>, Mat<float>, Mat<float>, float*, Precision, Write);
template void linear_backward(Mat<const double>, Mat<const double>, Mat<const double>, Mat<double>, Mat<double>, double*, Precision, Write);

}  // namespace fw
