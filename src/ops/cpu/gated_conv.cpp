// y = x + (conv(x) + bias) gate over packed sequences, conv causal and depthwise: c[t] = sum_j w_j x[t-j], w_j =
// weight[., W-1-j], inputs before a sequence from its tail or zero. With dc = dy gate:
//   dx[t] = dy[t] + sum_j w_j dc[t+j]     dgate = dy (c + bias)     dw_j = sum_t dc[t] x[t-j]     dbias = sum_t dc[t]
// A task has some columns of all tokens, so sums over tokens are one task's.
#include <algorithm>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw {
namespace {

constexpr int64_t kColumns = 64;

template <class Body>
void for_columns(int64_t cols, const Body& body) {
  parallel_for((cols + kColumns - 1) / kColumns,
               [&](int64_t i) { body(i * kColumns, std::min(cols, (i + 1) * kColumns)); });
}

// The input of sequence n at a position that may lie before its first token; null: zero.
template <class T>
const T* input_at(Mat<const T> x, const SeqLayout& layout, const T* tail, int64_t width, int64_t n, int64_t position) {
  if (position >= 0) return x.row(layout.begin(n) + position);
  return tail == nullptr ? nullptr : tail + (n * (width - 1) + width - 1 + position) * x.cols;
}

// sums[c - begin] = bias + sum_j w_j x[t-j]
template <class T>
void convolve(Mat<const T> x, const T* weight, const T* bias, int64_t width, const SeqLayout& layout, const T* tail,
              int64_t n, int64_t position, int64_t begin, int64_t end, T* sums) {
  std::copy(bias + begin, bias + end, sums);
  for (int64_t j = 0; j < width; ++j) {
    const T* in = input_at(x, layout, tail, width, n, position - j);
    if (in == nullptr) continue;
    for (int64_t c = begin; c < end; ++c) sums[c - begin] += weight[c * width + width - 1 - j] * in[c];
  }
}

}  // namespace

namespace cpu {

template <class T>
void gated_conv_forward(const Exec<T>&, Mat<const T> x, Mat<const T> gate, const T* weight, const T* bias,
                        int64_t width, const PassLayout& layout, const T* tail_in, T* tail_out, Mat<T> y) {
  for_columns(x.cols, [&](int64_t begin, int64_t end) {
    T sums[kColumns];
    for (int64_t n = 0; n < layout.host.count(); ++n) {
      const int64_t length = layout.host.length(n), first = layout.host.begin(n);
      for (int64_t position = 0; position < length; ++position) {
        convolve(x, weight, bias, width, layout.host, tail_in, n, position, begin, end, sums);
        const T *in = x.row(first + position), *factor = gate.row(first + position);
        T* out = y.row(first + position);
        for (int64_t c = begin; c < end; ++c) out[c] = in[c] + sums[c - begin] * factor[c];
      }
      if (tail_out == nullptr) continue;
      // From the oldest on, so that a tail in place is read before it is written.
      for (int64_t i = 0; i < width - 1; ++i) {
        const T* in = input_at(x, layout.host, tail_in, width, n, length - (width - 1) + i);
        T* out = tail_out + (n * (width - 1) + i) * x.cols;
        for (int64_t c = begin; c < end; ++c) out[c] = in == nullptr ? T(0) : in[c];
      }
    }
  });
}

template <class T>
void gated_conv_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, Mat<const T> gate, const T* weight,
                         const T* bias, int64_t width, const PassLayout& layout, const T* tail_in, Mat<T> dx,
                         Mat<T> dgate, T* dweight, T* dbias) {
  for_columns(x.cols, [&](int64_t begin, int64_t end) {
    T sums[kColumns];
    for (int64_t n = 0; n < layout.host.count(); ++n) {
      const int64_t length = layout.host.length(n), first = layout.host.begin(n);
      for (int64_t position = 0; position < length; ++position)
        std::copy(dy.row(first + position) + begin, dy.row(first + position) + end, dx.row(first + position) + begin);
      for (int64_t position = 0; position < length; ++position) {
        convolve(x, weight, bias, width, layout.host, tail_in, n, position, begin, end, sums);
        const T *grad = dy.row(first + position), *factor = gate.row(first + position);
        T* to_gate = dgate.row(first + position);
        for (int64_t c = begin; c < end; ++c) {
          to_gate[c] = grad[c] * sums[c - begin];
          sums[c - begin] = grad[c] * factor[c];  // dc from here on
          dbias[c] += sums[c - begin];
        }
        for (int64_t j = 0; j < width; ++j) {
          const T* in = input_at(x, layout.host, tail_in, width, n, position - j);
          if (in == nullptr) continue;
          for (int64_t c = begin; c < end; ++c) dweight[c * width + width - 1 - j] += sums[c - begin] * in[c];
          if (position < j) continue;  // gradients do not flow into the tail
          T* out = dx.row(first + position - j);
          for (int64_t c = begin; c < end; ++c) out[c] += weight[c * width + width - 1 - j] * sums[c - begin];
        }
      }
    }
  });
}

#define FW_INSTANTIATE(T)                                                                                         \
  template void gated_conv_forward(const Exec<T>&, Mat<const T>, Mat<const T>, const T*, const T*, int64_t,       \
                                   const PassLayout&, const T*, T*, Mat<T>);                                      \
  template void gated_conv_backward(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, const T*, const T*, \
                                    int64_t, const PassLayout&, const T*, Mat<T>, Mat<T>, T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace cpu
}  // namespace fw
