// Triangular solves, sums of rows and products of them, copies between tensors and tiles. See kernels.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_rows.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "scan/cpu/kernels.h"
#include "scan/cpu/rows-inl.h"
#include "scan/cpu/simd_table.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Row r of x minus sum over rows s in [begin, end) of coefficient(s) * x[s], a panel of columns at a time so that the
// sums stay in registers. coefs points at the coefficient of row `begin`, the next one is `step` further.
template <class T>
void eliminate_row(int64_t r, int64_t begin, int64_t end, const T* coefs, int64_t step, T* x, int64_t ldx,
                   int64_t cols) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  for (; j + 4 * lanes <= cols; j += 4 * lanes) {
    T* xr = x + r * ldx + j;
    auto a0 = hn::LoadU(d, xr), a1 = hn::LoadU(d, xr + lanes), a2 = hn::LoadU(d, xr + 2 * lanes),
         a3 = hn::LoadU(d, xr + 3 * lanes);
    const T* c = coefs;
    const T* xs = x + begin * ldx + j;
    for (int64_t s = begin; s < end; ++s, c += step, xs += ldx) {
      const auto f = hn::Set(d, *c);
      a0 = hn::NegMulAdd(f, hn::LoadU(d, xs), a0);
      a1 = hn::NegMulAdd(f, hn::LoadU(d, xs + lanes), a1);
      a2 = hn::NegMulAdd(f, hn::LoadU(d, xs + 2 * lanes), a2);
      a3 = hn::NegMulAdd(f, hn::LoadU(d, xs + 3 * lanes), a3);
    }
    hn::StoreU(a0, d, xr);
    hn::StoreU(a1, d, xr + lanes);
    hn::StoreU(a2, d, xr + 2 * lanes);
    hn::StoreU(a3, d, xr + 3 * lanes);
  }
  for (; j < cols; j += lanes) {
    auto a = hn::LoadU(d, x + r * ldx + j);
    const T* c = coefs;
    for (int64_t s = begin; s < end; ++s, c += step)
      a = hn::NegMulAdd(hn::Set(d, *c), hn::LoadU(d, x + s * ldx + j), a);
    hn::StoreU(a, d, x + r * ldx + j);
  }
}

template <class T>
void solve(int64_t L, const T* tri, int64_t ld, T* x, int64_t ldx, int64_t cols) {
  for (int64_t r = 1; r < L; ++r) eliminate_row(r, int64_t{0}, r, tri + r * ld, int64_t{1}, x, ldx, cols);
}

template <class T>
void solve_transposed(int64_t L, const T* tri, int64_t ld, T* x, int64_t ldx, int64_t cols) {
  for (int64_t s = L - 2; s >= 0; --s) eliminate_row(s, s + 1, L, tri + (s + 1) * ld + s, ld, x, ldx, cols);
}

template <class T>
void subtract_rows(int64_t rows, int64_t cols, const T* factor, const T* y, int64_t ldy, T* x, int64_t ldx) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < rows; ++i) {
    const auto f = hn::Set(d, factor != nullptr ? factor[i] : T(1));
    for (int64_t j = 0; j < cols; j += lanes) {
      hn::StoreU(hn::NegMulAdd(f, hn::LoadU(d, y + i * ldy + j), hn::LoadU(d, x + i * ldx + j)), d, x + i * ldx + j);
    }
  }
}

template <class T>
void add_rows(int64_t n, const T* y, T* x) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j = 0; j < n; j += lanes) hn::StoreU(hn::Add(hn::LoadU(d, x + j), hn::LoadU(d, y + j)), d, x + j);
}

template <class T>
void row_dots(int64_t rows, int64_t cols, const T* a, const T* b, T* out) {
  for (int64_t i = 0; i < rows; ++i) out[i] = row_dot(cols, a + i * cols, b + i * cols);
}

template <class T>
void decay_terms(int64_t L, int64_t nb, int64_t lag, int64_t nk, int64_t cols, const T* x, const T* dx, int64_t block,
                 const T* w, const T* dw, T* out) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < L * cols; i += lanes) {
    auto sum = hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, dx + i));
    const int64_t erase = i + lag * cols;  // past the last row: of the chunk that follows
    if (nb == 2 && erase < L * cols)
      sum = hn::MulAdd(hn::LoadU(d, x + block + erase), hn::LoadU(d, dx + block + erase), sum);
    if (nk == 2) sum = hn::NegMulAdd(hn::LoadU(d, w + block + i), hn::LoadU(d, dw + block + i), sum);
    hn::StoreU(hn::NegMulAdd(hn::LoadU(d, w + i), hn::LoadU(d, dw + i), sum), d, out + i);
  }
}

template <class T>
void channel_dg(int64_t L, int64_t cols, int64_t ld, const T* terms, const T* alpha, T* head, RowView<T> dg, bool add) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  PadBuffer<T> buffer(ld);
  for (int64_t r = 0; r < L; ++r) {
    T* out = buffer.open(dg, r, cols, add);
    for (int64_t j = 0; j < ld; j += lanes) {
      const auto cut = hn::Eq(hn::LoadU(d, alpha + r * ld + j), hn::Zero(d));
      const auto sum = hn::IfThenZeroElse(cut, hn::LoadU(d, head + j));
      if (out != nullptr) store_or_add(d, sum, out + j, add);
      hn::StoreU(hn::Sub(sum, hn::LoadU(d, terms + r * ld + j)), d, head + j);
    }
    buffer.close();
  }
}

template <class T>
void add_diagonal(int64_t L, int64_t cols, const T* diag, const T* x, const T* w, T* dx, T* dw) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t t = 0; t < L; ++t) {
    const auto f = hn::Set(d, diag[t]);
    for (int64_t j = t * cols; j < (t + 1) * cols; j += lanes) {
      hn::StoreU(hn::MulAdd(f, hn::LoadU(d, w + j), hn::LoadU(d, dx + j)), d, dx + j);
      hn::StoreU(hn::MulAdd(f, hn::LoadU(d, x + j), hn::LoadU(d, dw + j)), d, dw + j);
    }
  }
}

template <class T>
void load_rows(int64_t rows, int64_t cols, RowView<const T> src, T* dst, int64_t ld, T factor) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* s = src.row(i);
    T* t = dst + i * ld;
    for (int64_t j = 0; j < cols; ++j) t[j] = factor * s[j];
    for (int64_t j = cols; j < ld; ++j) t[j] = 0;
  }
}

template <class T>
void store_rows(int64_t rows, int64_t cols, const T* src, int64_t ld, RowView<T> dst) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(dst.row(i), src + i * ld, sizeof(T) * static_cast<size_t>(cols));
}

template <class T>
void row_sums(int64_t rows, int64_t cols, const T* x, double* out) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < rows; ++i) {
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j < cols; j += lanes) sum = hn::Add(sum, hn::LoadU(d, x + i * cols + j));
    out[i] = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }
}

template <class T>
const RowKernels<T>& table_of() {
  static const RowKernels<T> table = {&solve<T>,     &solve_transposed<T>, &subtract_rows<T>, &add_rows<T>,
                                      &row_dots<T>,  &decay_terms<T>,      &channel_dg<T>,    &add_diagonal<T>,
                                      &load_rows<T>, &store_rows<T>,       &row_sums<T>};
  return table;
}

FW_SIMD_MAKE(RowKernels)

}  // namespace fw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw::cpu {

FW_SIMD_EXPORT(RowKernels, row_kernels)

}  // namespace fw::cpu
#endif
