// The sum of squares of all parameters' gradients: a piece a task, the pieces' sums in order.
#include <bit>
#include <type_traits>

#include "base/local_scratch.h"
#include "base/threads.h"
#include "ops/cpu/operations.h"

namespace fw {
namespace {

template <class X>
double number(X x) {
  if constexpr (std::is_same_v<X, Bf16>) {
    return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16));
  } else {
    return static_cast<double>(x);
  }
}

// In eight lanes whose order is fixed; squares of floats are exact in double.
template <class X>
double piece_sum(const X* x, int64_t count) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; ++j) {
      const double value = number(x[i + j]);
      lanes[j] += value * value;
    }
  }
  for (; i < count; ++i) lanes[i % 8] += number(x[i]) * number(x[i]);
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

template <class X>
void sum_squares(const X* x, ParamPieces pieces, double* sum) {
  LocalScratch scratch;
  double* sums = scratch.alloc<double>(pieces.count);
  parallel_for(pieces.count, [&](int64_t i) { sums[i] = piece_sum(x + pieces.data[i].begin, pieces.data[i].count); });
  double total = 0;
  for (int64_t i = 0; i < pieces.count; ++i) total += sums[i];
  *sum = total;
}

}  // namespace

namespace cpu {

template <class T>
void square_sum(const Exec<T>&, const T* x, ParamPieces pieces, double* sum) {
  sum_squares(x, pieces, sum);
}
template <class T>
void bf16_square_sum(const Exec<T>&, const Bf16* x, ParamPieces pieces, double* sum) {
  sum_squares(x, pieces, sum);
}

template void square_sum(const Exec<float>&, const float*, ParamPieces, double*);
template void square_sum(const Exec<double>&, const double*, ParamPieces, double*);
template void bf16_square_sum(const Exec<float>&, const Bf16*, ParamPieces, double*);
template void bf16_square_sum(const Exec<double>&, const Bf16*, ParamPieces, double*);

}  // namespace cpu
}  // namespace fw
