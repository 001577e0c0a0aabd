// A token beside the one before it: y_j[t] = x[t] + (x[t-1] - x[t]) m_j over packed sequences.
//   dx[t] = sum_j dy_j[t] (1 - m_j) + dy_j[t+1] m_j     dm_j = sum_t dy_j[t] (x[t-1] - x[t])
// The row before a sequence is its tail's, or zeros.
#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

namespace fw::cpu {
namespace {

// body(t, sequence, whether t is its first token) for the tokens of [begin, end).
template <class Body>
void for_tokens(const SeqLayout& layout, int64_t begin, int64_t end, const Body& body) {
  const std::vector<int64_t>& offsets = layout.offsets();
  int64_t n = std::upper_bound(offsets.begin(), offsets.end(), begin) - offsets.begin() - 1;
  for (int64_t t = begin; t < end; ++t) {
    while (t >= layout.end(n)) ++n;  // empty ones own no token
    body(t, n, t == layout.begin(n));
  }
}

}  // namespace

template <class T>
void token_shift_forward(const Exec<T>&, Mat<const T> x, const T* mix, int64_t count, const PassLayout& layout,
                         const T* tail_in, T* tail_out, Mat<T> y) {
  const int64_t d = x.cols;
  const std::vector<T> zeros(static_cast<size_t>(tail_in == nullptr ? d : 0));
  for_row_blocks(RowBlocks::cut(x.rows, d * count), [&](int64_t, int64_t begin, int64_t end) {
    for_tokens(layout.host, begin, end, [&](int64_t t, int64_t n, bool first) {
      const T* here = x.row(t);
      const T* before = !first ? x.row(t - 1) : tail_in == nullptr ? zeros.data() : tail_in + n * d;
      for (int64_t j = 0; j < count; ++j) {
        T* out = y.row(t) + j * d;
        const T* m = mix + j * d;
        for (int64_t c = 0; c < d; ++c) out[c] = here[c] + (before[c] - here[c]) * m[c];
      }
    });
  });
  if (tail_out == nullptr) return;
  for (int64_t n = 0; n < layout.host.count(); ++n) {  // after all of them have been read
    T* to = tail_out + n * d;
    if (layout.host.length(n) > 0) {
      std::memcpy(to, x.row(layout.host.end(n) - 1), static_cast<size_t>(d) * sizeof(T));
    } else if (tail_in == nullptr) {
      std::fill_n(to, d, T(0));
    } else if (to != tail_in + n * d) {
      std::memcpy(to, tail_in + n * d, static_cast<size_t>(d) * sizeof(T));
    }
  }
}

template <class T>
void token_shift_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, const T* mix, int64_t count,
                          const PassLayout& layout, const T* tail_in, Mat<T> dx, T* dmix) {
  const int64_t d = x.cols;
  const std::vector<T> zeros(static_cast<size_t>(tail_in == nullptr ? d : 0));
  const RowBlocks blocks = RowBlocks::cut(x.rows, d * count);
  PartialSums<T> partial(blocks.count(), d * count);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    for_tokens(layout.host, begin, end, [&](int64_t t, int64_t n, bool first) {
      const T* here = x.row(t);
      const T* before = !first ? x.row(t - 1) : tail_in == nullptr ? zeros.data() : tail_in + n * d;
      const bool last = t + 1 == layout.host.end(n);
      T* out = dx.row(t);
      for (int64_t j = 0; j < count; ++j) {
        const T* grad = dy.row(t) + j * d;
        const T* m = mix + j * d;
        T* dm = partial.block(block) + j * d;
        for (int64_t c = 0; c < d; ++c) {
          const T own = grad[c] * (T(1) - m[c]);
          out[c] = j == 0 ? own : out[c] + own;
          dm[c] += grad[c] * (before[c] - here[c]);
        }
        if (last) continue;
        const T* next = dy.row(t + 1) + j * d;
        for (int64_t c = 0; c < d; ++c) out[c] += next[c] * m[c];
      }
    });
  });
  partial.add_to(dmix);
}

#define FW_INSTANTIATE(T)                                                                                            \
  template void token_shift_forward<T>(const Exec<T>&, Mat<const T>, const T*, int64_t, const PassLayout&, const T*, \
                                       T*, Mat<T>);                                                                  \
  template void token_shift_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const T*, int64_t,               \
                                        const PassLayout&, const T*, Mat<T>, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

}  // namespace fw::cpu
