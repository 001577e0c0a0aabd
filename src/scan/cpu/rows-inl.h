// Rows of callers' tensors (any length) seen as padded rows, and reductions; shared by the kernels_*.cpp of one target.
#if defined(FW_SCAN_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FW_SCAN_CPU_ROWS_INL_H_
#undef FW_SCAN_CPU_ROWS_INL_H_
#else
#define FW_SCAN_CPU_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>
#include <vector>

#include "scan/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace fw::cpu::HWY_NAMESPACE {

// Below this exp is 0 in both types; the library's exp and expm1 are not defined for -inf.
template <class T>
inline constexpr T kLowestLog = T(-1e4);

// A row of n values as one of padded length: the caller's memory itself when n needs no padding, else a copy.
template <class T>
class PadBuffer {
 public:
  explicit PadBuffer(int64_t padded_size) : size_(padded_size) {}

  const T* load(const T* src, int64_t n) {
    if (n == size_) return src;
    std::memcpy(space(), src, sizeof(T) * static_cast<size_t>(n));
    return buffer_.data();
  }

  // For writing (or adding to) row i of `view`: where to put the padded row; close() copies it out. Null if absent.
  T* open(const RowView<T>& view, int64_t i, int64_t n, bool add) {
    target_ = view ? view.row(i) : nullptr;
    n_ = n;
    if (target_ == nullptr || n == size_) return target_;
    space();
    if (add) std::memcpy(buffer_.data(), target_, sizeof(T) * static_cast<size_t>(n));
    return buffer_.data();
  }
  void close() {
    if (target_ != nullptr && n_ != size_) std::memcpy(target_, buffer_.data(), sizeof(T) * static_cast<size_t>(n_));
  }

 private:
  T* space() {
    if (buffer_.empty()) buffer_.assign(static_cast<size_t>(size_), T(0));
    return buffer_.data();
  }

  int64_t size_;
  int64_t n_ = 0;
  T* target_ = nullptr;
  std::vector<T> buffer_;
};

template <class T>
T row_dot(int64_t n, const T* a, const T* b) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  for (int64_t j = 0; j < n; j += lanes) sum = hn::MulAdd(hn::LoadU(d, a + j), hn::LoadU(d, b + j), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

template <class D, class V, class T>
void store_or_add(D d, V value, T* p, bool add) {
  namespace hn = hwy::HWY_NAMESPACE;
  hn::StoreU(add ? hn::Add(hn::LoadU(d, p), value) : value, d, p);
}

}  // namespace fw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FW_SCAN_CPU_ROWS_INL_H_
