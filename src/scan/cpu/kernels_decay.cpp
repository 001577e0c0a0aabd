// Decays inside a chunk (recurrence.md sections 4 to 6): every factor is a product of exp(g) <= 1. See kernels.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "scan/cpu/kernels_decay.cpp"
// The per-target includes must come after foreach_target.h.
// clang-format off
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include "scan/cpu/kernels.h"
#include "scan/cpu/rows-inl.h"
#include "scan/cpu/simd_table.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
void decay_scalar(int64_t L, const T* alpha, T* prefix, T* suffix, T* ratio, int64_t ld) {
  T product = 1;
  for (int64_t r = 0; r < L; ++r) prefix[r] = product *= alpha[r];
  product = 1;
  for (int64_t s = L - 1; s >= 0; --s) {
    suffix[s] = product;
    product *= alpha[s];
  }
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t r = 0; r < L; ++r) {
    T* row = ratio + r * ld;
    if (r > 0) {
      const auto a = hn::Set(d, alpha[r]);
      for (int64_t s = 0; s < r; s += lanes) hn::StoreU(hn::Mul(a, hn::LoadU(d, row - ld + s)), d, row + s);
    }
    row[r] = 1;
    for (int64_t s = r + 1; s < ld; ++s) row[s] = 0;
  }
}

template <class T>
void decay_mask(int64_t L, int64_t nb, int64_t lag, T* tri, int64_t ld, const T* ratio, int64_t ld_ratio) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t b = 0; b < nb; ++b) {
    for (int64_t r = 0; r < L; ++r) {
      T* row = tri + (b * L + r) * ld;
      const int64_t keep = b == 0 ? r + 1 : r;
      if (ratio != nullptr) {
        const T* factor = ratio + (r - (b == 1 && keep > 0 ? lag : 0)) * ld_ratio;
        for (int64_t s = 0; s < keep; s += lanes)
          hn::StoreU(hn::Mul(hn::LoadU(d, row + s), hn::LoadU(d, factor + s)), d, row + s);
      }
      for (int64_t s = keep; s < ld; ++s) row[s] = 0;
    }
  }
}

template <class T>
void scale_rows(int64_t rows, int64_t cols, const T* factor, const T* src, int64_t ld_src, T* dst, int64_t ld_dst) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < rows; ++i) {
    const auto f = hn::Set(d, factor[i]);
    for (int64_t j = 0; j < cols; j += lanes)
      hn::StoreU(hn::Mul(f, hn::LoadU(d, src + i * ld_src + j)), d, dst + i * ld_dst + j);
  }
}

template <class T>
void exp_rows(int64_t rows, int64_t cols, RowView<const T> g, T* alpha, int64_t ld) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto low = hn::Set(d, kLowestLog<T>);
  PadBuffer<T> buffer(ld);
  for (int64_t i = 0; i < rows; ++i) {
    const T* src = buffer.load(g.row(i), cols);
    T* dst = alpha + i * ld;
    for (int64_t j = 0; j < ld; j += lanes) hn::StoreU(hn::Exp(d, hn::Max(low, hn::LoadU(d, src + j))), d, dst + j);
  }
}

template <class T>
void channel_prefix(int64_t L, int64_t nb, int64_t cols, int64_t first, int64_t lag, const T* alpha, const T* src,
                    int64_t block_src, T* dst, int64_t block_dst, T* total) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j = 0; j < cols; j += lanes) {
    auto product = hn::Set(d, T(1));
    for (int64_t r = 0; r < L; ++r) {
      const auto before = product;
      if (r >= first) product = hn::Mul(product, hn::LoadU(d, alpha + r * cols + j));
      for (int64_t b = 0; b < nb; ++b) {
        const auto factor = b == 1 && lag > 0 ? before : product;
        hn::StoreU(hn::Mul(factor, hn::LoadU(d, src + b * block_src + r * cols + j)), d,
                   dst + b * block_dst + r * cols + j);
      }
    }
    if (total != nullptr) hn::StoreU(product, d, total + j);
  }
}

template <class T>
void anchor(int64_t mid, int64_t rows, int64_t to, int64_t lag, int64_t cols, const T* alpha, const T* src, const T* w,
            T* dst) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* fresh = w != nullptr ? w : src;
  for (int64_t j = 0; j < cols; j += lanes) {
    // product = prod alpha[s+1..to] while s walks down from the last row.
    auto product = hn::Set(d, T(1));
    for (int64_t i = to; i >= rows; --i) product = hn::Mul(product, hn::LoadU(d, alpha + i * cols + j));
    for (int64_t s = rows - 1; s >= mid; --s) {
      hn::StoreU(hn::Mul(product, hn::LoadU(d, fresh + s * cols + j)), d, dst + s * cols + j);
      // The anchor itself is row mid - lag: rows before it are already multiplied up to and including its alpha.
      if (s > mid - lag) product = hn::Mul(product, hn::LoadU(d, alpha + s * cols + j));
    }
    for (int64_t s = 0; s < mid; ++s)
      hn::StoreU(hn::Mul(product, hn::LoadU(d, src + s * cols + j)), d, dst + s * cols + j);
  }
}

template <class T>
void diagonal(int64_t n, int64_t nb, int64_t lag, int64_t cols, const T* alpha, const T* x, int64_t block_x, const T* w,
              T* tri, int64_t ld, int64_t block_tri) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t b = 0; b < nb; ++b) {
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t s = 0; s < n; ++s) tri[b * block_tri + r * ld + s] = 0;
    }
  }
  // A panel of columns at a time: the decayed key stays in registers while it walks down the rows.
  const int64_t panel = 8 * lanes;
  HWY_ALIGN T key[8 * HWY_MAX_BYTES / sizeof(T)];
  for (int64_t j0 = 0; j0 < cols; j0 += panel) {
    const int64_t width = HWY_MIN(panel, cols - j0);
    for (int64_t s = 0; s < n; ++s) {
      for (int64_t j = 0; j < width; j += lanes) hn::Store(hn::LoadU(d, w + s * cols + j0 + j), d, key + j);
      for (int64_t r = s; r < n; ++r) {
        const T* a = alpha + r * cols + j0;
        const T* x0 = x + r * cols + j0;
        const T* x1 = x0 + block_x;
        auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
        for (int64_t j = 0; j < width; j += lanes) {
          auto kv = hn::Load(d, key + j);
          const auto before = kv;
          if (r > s) {
            kv = hn::Mul(kv, hn::LoadU(d, a + j));
            hn::Store(kv, d, key + j);
          }
          sum0 = hn::MulAdd(kv, hn::LoadU(d, x0 + j), sum0);
          if (nb == 2) sum1 = hn::MulAdd(lag > 0 ? before : kv, hn::LoadU(d, x1 + j), sum1);
        }
        tri[r * ld + s] += hn::GetLane(hn::SumOfLanes(d, sum0));
        if (nb == 2 && r > s) tri[block_tri + r * ld + s] += hn::GetLane(hn::SumOfLanes(d, sum1));
      }
    }
  }
}

template <class T>
void diagonal_backward(int64_t n, int64_t nb, int64_t lag, int64_t cols, const T* alpha, const T* x, int64_t block_x,
                       const T* w, const T* dtri, int64_t ld, int64_t block_tri, T* dx, int64_t block_dx, T* dw) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j = 0; j < cols; j += lanes) {
    for (int64_t s = 0; s < n; ++s) {
      const auto ws = hn::LoadU(d, w + s * cols + j);
      auto product = hn::Set(d, T(1));
      auto dws = hn::Zero(d);
      for (int64_t r = s + 1; r < n; ++r) {
        const auto before = product;
        product = hn::Mul(product, hn::LoadU(d, alpha + r * cols + j));
        const auto key = hn::Mul(product, ws);
        const auto d0 = hn::Set(d, dtri[r * ld + s]);
        T* dx0 = dx + r * cols + j;
        hn::StoreU(hn::MulAdd(d0, key, hn::LoadU(d, dx0)), d, dx0);
        auto sum = hn::Mul(d0, hn::LoadU(d, x + r * cols + j));
        if (nb == 2) {
          const auto d1 = hn::Set(d, dtri[block_tri + r * ld + s]);
          T* dx1 = dx0 + block_dx;
          const auto x1 = hn::LoadU(d, x + block_x + r * cols + j);
          if (lag > 0) {
            hn::StoreU(hn::MulAdd(d1, hn::Mul(before, ws), hn::LoadU(d, dx1)), d, dx1);
            dws = hn::MulAdd(before, hn::Mul(d1, x1), dws);
          } else {
            hn::StoreU(hn::MulAdd(d1, key, hn::LoadU(d, dx1)), d, dx1);
            sum = hn::MulAdd(d1, x1, sum);
          }
        }
        dws = hn::MulAdd(product, sum, dws);
      }
      hn::StoreU(hn::Add(dws, hn::LoadU(d, dw + s * cols + j)), d, dw + s * cols + j);
    }
  }
}

template <class T>
const DecayKernels<T>& table_of() {
  static const DecayKernels<T> table = {&decay_scalar<T>,   &decay_mask<T>, &scale_rows<T>, &exp_rows<T>,
                                        &channel_prefix<T>, &anchor<T>,     &diagonal<T>,   &diagonal_backward<T>};
  return table;
}

FW_SIMD_MAKE(DecayKernels)

}  // namespace fw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw::cpu {

FW_SIMD_EXPORT(DecayKernels, decay_kernels)

}  // namespace fw::cpu
#endif
