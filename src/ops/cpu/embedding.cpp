// Embedding: rows of a table. The backward pass adds rows of equal ids in the order of the tokens. A task owns a slice
// of the columns. So no two tasks write the same element and the sums do not depend on the threads.
#include <cstring>
#include <type_traits>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw {
namespace {

constexpr int64_t kColumns = 32;  // two cache lines of floats

}  // namespace

namespace cpu {

template <class T>
void embedding_forward(const Exec<T>&, const int32_t* ids, Weight<T> weight, Mat<T> out) {
  for_row_blocks(RowBlocks::cut(out.rows, out.cols), [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if constexpr (std::is_same_v<T, float>) {
        if (weight.values.data == nullptr) {
          widen_bf16(out.cols, weight.rounded.row(ids[t]), out.row(t));
          continue;
        }
      }
      std::memcpy(out.row(t), weight.values.row(ids[t]), sizeof(T) * static_cast<size_t>(out.cols));
    }
  });
}

template <class T>
void embedding_backward(const Exec<T>&, const int32_t* ids, Mat<const T> dout, Mat<T> dweight) {
  const int64_t slices = (dout.cols + kColumns - 1) / kColumns;
  parallel_for(slices, [&](int64_t slice) {
    const int64_t first = slice * kColumns;
    const int64_t n = std::min(kColumns, dout.cols - first);
    for (int64_t t = 0; t < dout.rows; ++t) {
      const T* from = dout.row(t) + first;
      T* to = dweight.row(ids[t]) + first;
      for (int64_t c = 0; c < n; ++c) to[c] += from[c];
    }
  });
}

template void embedding_forward(const Exec<float>&, const int32_t*, Weight<float>, Mat<float>);
template void embedding_forward(const Exec<double>&, const int32_t*, Weight<double>, Mat<double>);
template void embedding_backward(const Exec<float>&, const int32_t*, Mat<const float>, Mat<float>);
template void embedding_backward(const Exec<double>&, const int32_t*, Mat<const double>, Mat<double>);

}  // namespace cpu
}  // namespace fw
