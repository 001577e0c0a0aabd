// Causal depthwise convolution and SiLU over packed sequences. With the pre-activation p[t] = sum_j w_j x[t-j] + b
// (w_j = weight[c, W-1-j]; inputs before a sequence come from its tail, or are zero; no b where there is no bias):
//   y[t] = silu(p[t])     dp[t] = dy[t] silu'(p[t])     dx[t] = sum_j w_j dp[t+j]     dw_j = sum_t dp[t] x[t-j]     db = sum_t dp[t]
// dp is recomputed row by row into a ring of W rows, so no array of the size of x is needed.
#include "ops/short_conv.h"

#include <vector>

#include "ops/cpu/operations.h"
#include "ops/cpu/row_blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/short_conv.cpp"
#include "hwy/foreach_target.h"
#include "ops/cpu/simd-inl.h"

#ifndef FW_OPS_CPU_SHORT_CONV_KERNELS
#define FW_OPS_CPU_SHORT_CONV_KERNELS
namespace fw {
template <class T>
struct ShortConvKernels {
  cpu::Kernel<&cpu::short_conv_forward<T>> forward;
  cpu::Kernel<&cpu::short_conv_backward<T>> backward;
};

// Where the inputs x[t], x[t-1] ... x[t-W+1] of a token lie: rows of x, of the tail, or zeros.
template <class T>
class ConvInputs {
 public:
  ConvInputs(Mat<const T> x, int64_t width, const SeqLayout& layout, const T* tail, const T* zeros)
      : x_(x), width_(width), layout_(layout), tail_(tail), zeros_(zeros) {}

  void of(int64_t sequence, int64_t t, const T** rows) const {
    const int64_t position = t - layout_.begin(sequence);
    for (int64_t j = 0; j < width_; ++j) {
      if (j <= position) {
        rows[j] = x_.row(t - j);
      } else {
        rows[j] = tail_ == nullptr ? zeros_ : tail_ + ((sequence + 1) * (width_ - 1) + position - j) * x_.cols;
      }
    }
  }

 private:
  Mat<const T> x_;
  int64_t width_;
  const SeqLayout& layout_;
  const T* tail_;
  const T* zeros_;
};

// The sequence that token t belongs to (empty ones own no token).
inline int64_t sequence_of(const SeqLayout& layout, int64_t t) {
  const std::vector<int64_t>& offsets = layout.offsets();
  return std::upper_bound(offsets.begin(), offsets.end(), t) - offsets.begin() - 1;
}

// taps[j, c] = weight[c, W-1-j]
template <class T>
const T* conv_taps(const T* weight, int64_t width, int64_t channels, LocalScratch& scratch) {
  T* taps = scratch.alloc<T>(width * channels);
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t j = 0; j < width; ++j) taps[j * channels + c] = weight[c * width + width - 1 - j];
  }
  return taps;
}

// The last W-1 inputs of every sequence; a sequence shorter than that keeps the end of its old tail. In order, so that
// tail_in may be the same memory.
template <class T>
void store_tails(Mat<const T> x, int64_t width, const SeqLayout& layout, const T* tail_in, T* tail_out) {
  const int64_t kept = width - 1;
  for (int64_t s = 0; s < layout.count(); ++s) {
    for (int64_t i = 0; i < kept; ++i) {
      T* to = tail_out + (s * kept + i) * x.cols;
      const int64_t position = layout.length(s) - kept + i;
      if (position >= 0) {
        std::copy_n(x.row(layout.begin(s) + position), x.cols, to);
      } else if (tail_in != nullptr) {
        const T* from = tail_in + (s * kept + i + layout.length(s)) * x.cols;
        if (from != to) std::copy_n(from, x.cols, to);
      } else {
        std::fill_n(to, x.cols, T(0));
      }
    }
  }
}
}  // namespace fw
#endif

HWY_BEFORE_NAMESPACE();
namespace fw {
namespace HWY_NAMESPACE {

// sum_j taps[j] rows[j] at column i; kWidth is 0 when the width is known only at run time.
template <int kWidth, class D, class T, class Access>
HWY_INLINE hn::Vec<D> convolve(D d, Access m, const T* const* rows, const T* taps, int64_t width, int64_t channels,
                               int64_t i) {
  const int64_t n = kWidth > 0 ? kWidth : width;
  auto p = hn::Mul(m.load(d, rows[0] + i), m.load(d, taps + i));
  for (int64_t j = 1; j < n; ++j) p = hn::MulAdd(m.load(d, rows[j] + i), m.load(d, taps + j * channels + i), p);
  return p;
}

// The same and the bias, where there is one.
template <int kWidth, class D, class T, class Access>
HWY_INLINE hn::Vec<D> pre_activation(D d, Access m, const T* const* rows, const T* taps, const T* bias, int64_t width,
                                     int64_t channels, int64_t i) {
  const auto p = convolve<kWidth>(d, m, rows, taps, width, channels, i);
  return bias == nullptr ? p : hn::Add(p, m.load(d, bias + i));
}

template <int kWidth, class T>
void conv_forward_rows(Mat<const T> x, const T* weight, const T* bias, int64_t width, const PassLayout& pass_layout,
                       const T* tail_in, Mat<T> y) {
  const SeqLayout& layout = pass_layout.host;
  const int64_t channels = x.cols;
  LocalScratch scratch;
  const T* taps = conv_taps(weight, width, channels, scratch);
  const ConvInputs<T> inputs(x, width, layout, tail_in, scratch.alloc_zero<T>(channels));
  for_row_blocks(RowBlocks::cut(x.rows, channels), [&](int64_t, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    LocalScratch local;
    const T** rows = local.alloc<const T*>(width);
    int64_t sequence = sequence_of(layout, begin);
    for (int64_t t = begin; t < end; ++t) {
      while (t >= layout.end(sequence)) ++sequence;
      inputs.of(sequence, t, rows);
      T* out = y.row(t);
      for_lanes(d, channels, [&](auto m, int64_t i) HWY_ATTR {
        const auto p = pre_activation<kWidth>(d, m, rows, taps, bias, width, channels, i);
        m.store(d, hn::Mul(p, sigmoid(d, p)), out + i);
      });
    }
  });
}

template <int kWidth, class T>
void conv_backward_rows(Mat<const T> dy, Mat<const T> x, const T* weight, const T* bias, int64_t width,
                        const PassLayout& pass_layout, const T* tail_in, Mat<T> dx, T* dweight, T* dbias) {
  const SeqLayout& layout = pass_layout.host;
  const int64_t channels = x.cols;
  LocalScratch scratch;
  const T* taps = conv_taps(weight, width, channels, scratch);
  const T* zeros = scratch.alloc_zero<T>(channels);
  const ConvInputs<T> inputs(x, width, layout, tail_in, zeros);
  const RowBlocks blocks = RowBlocks::cut(x.rows, channels);
  // of the taps, then of the bias
  PartialSums<T> partial(blocks.count(), (bias == nullptr ? width : width + 1) * channels);
  for_row_blocks(blocks, [&](int64_t block, int64_t begin, int64_t end) HWY_ATTR {
    const hn::ScalableTag<T> d;
    const int64_t n = kWidth > 0 ? kWidth : width;
    T* dtaps = partial.block(block);
    LocalScratch local;
    const T** rows = local.alloc<const T*>(width);
    const T** later = local.alloc<const T*>(width);  // dp[t], dp[t+1] ...
    T* ring = local.alloc<T>(width * channels);      // dp[t] lies at row t mod W
    const auto ring_row = [&](int64_t t) { return ring + t % n * channels; };

    int64_t sequence = sequence_of(layout, begin);
    for (int64_t first = begin; first < end; ++sequence) {
      const int64_t own_end = std::min(end, layout.end(sequence));
      const int64_t halo_end = std::min(layout.end(sequence), own_end + n - 1);
      // Step t computes dp[t] and then dx[t-W+1], whose W values of dp are known by then.
      for (int64_t t = first; t < own_end + n - 1; ++t) {
        if (t < halo_end) {
          inputs.of(sequence, t, rows);
          const T* grad = dy.row(t);
          T* dp_row = ring_row(t);
          const bool own = t < own_end;
          for_lanes(d, channels, [&](auto m, int64_t i) HWY_ATTR {
            const auto p = pre_activation<kWidth>(d, m, rows, taps, bias, width, channels, i);
            const auto dp = hn::Mul(m.load(d, grad + i), silu_slope(d, p, sigmoid(d, p)));
            m.store(d, dp, dp_row + i);
            if (own) {
              for (int64_t j = 0; j < n; ++j) {
                T* sum = dtaps + j * channels + i;
                m.store(d, hn::MulAdd(dp, m.load(d, rows[j] + i), m.load(d, sum)), sum);
              }
              T* sum = dtaps + n * channels + i;
              if (bias != nullptr) m.store(d, hn::Add(dp, m.load(d, sum)), sum);
            }
          });
        }
        const int64_t done = t - n + 1;
        if (done >= first) {
          for (int64_t j = 0; j < n; ++j) later[j] = done + j < halo_end ? ring_row(done + j) : zeros;
          T* out = dx.row(done);
          for_lanes(d, channels, [&](auto m, int64_t i) HWY_ATTR {
            m.store(d, convolve<kWidth>(d, m, later, taps, width, channels, i), out + i);
          });
        }
      }
      first = own_end;
    }
  });
  if (blocks.count() == 0) return;
  const T* total = partial.total();
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t j = 0; j < width; ++j) dweight[c * width + width - 1 - j] += total[j * channels + c];
    if (bias != nullptr) dbias[c] += total[width * channels + c];
  }
}

template <class T>
void conv_forward(Mat<const T> x, const T* weight, const T* bias, int64_t width, const PassLayout& layout,
                  const T* tail_in, T* tail_out, Mat<T> y) {
  if (width == 4) {
    conv_forward_rows<4>(x, weight, bias, width, layout, tail_in, y);
  } else {
    conv_forward_rows<0>(x, weight, bias, width, layout, tail_in, y);
  }
  if (tail_out != nullptr) store_tails(x, width, layout.host, tail_in, tail_out);
}

template <class T>
void conv_backward(Mat<const T> dy, Mat<const T> x, const T* weight, const T* bias, int64_t width,
                   const PassLayout& layout, const T* tail_in, Mat<T> dx, T* dweight, T* dbias) {
  if (width == 4) {
    conv_backward_rows<4>(dy, x, weight, bias, width, layout, tail_in, dx, dweight, dbias);
  } else {
    conv_backward_rows<0>(dy, x, weight, bias, width, layout, tail_in, dx, dweight, dbias);
  }
}

ShortConvKernels<float> short_conv_kernels_f32() { return {conv_forward<float>, conv_backward<float>}; }
ShortConvKernels<double> short_conv_kernels_f64() { return {conv_forward<double>, conv_backward<double>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace fw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fw {
namespace {

HWY_EXPORT(short_conv_kernels_f32);
HWY_EXPORT(short_conv_kernels_f64);

template <class T>
auto kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return HWY_DYNAMIC_DISPATCH(short_conv_kernels_f32)();
  } else {
    return HWY_DYNAMIC_DISPATCH(short_conv_kernels_f64)();
  }
}

}  // namespace

template <class T>
void host_conv_forward(Mat<const T> x, const T* weight, const T* bias, int64_t width, const PassLayout& layout,
                       const T* tail_in, T* tail_out, Mat<T> y) {
  kernels<T>().forward(x, weight, bias, width, layout, tail_in, tail_out, y);
}

template <class T>
void host_conv_backward(Mat<const T> dy, Mat<const T> x, const T* weight, const T* bias, int64_t width,
                        const PassLayout& layout, const T* tail_in, Mat<T> dx, T* dweight, T* dbias) {
  kernels<T>().backward(dy, x, weight, bias, width, layout, tail_in, dx, dweight, dbias);
}

#define FW_INSTANTIATE(T)                                                                                         \
  template void host_conv_forward<T>(Mat<const T>, const T*, const T*, int64_t, const PassLayout&, const T*, T*,  \
                                     Mat<T>);                                                                     \
  template void host_conv_backward<T>(Mat<const T>, Mat<const T>, const T*, const T*, int64_t, const PassLayout&, \
                                      const T*, Mat<T>, T*, T*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(double)
#undef FW_INSTANTIATE

namespace cpu {

template <class T>
void short_conv_forward(const Exec<T>&, Mat<const T> x, const T* weight, const T* bias, int64_t width,
                        const PassLayout& layout, const T* tail_in, T* tail_out, Mat<T> y) {
  host_conv_forward(x, weight, bias, width, layout, tail_in, tail_out, y);
}

template <class T>
void short_conv_backward(const Exec<T>&, Mat<const T> dy, Mat<const T> x, const T* weight, const T* bias, int64_t width,
                         const PassLayout& layout, const T* tail_in, Mat<T> dx, T* dweight, T* dbias) {
  host_conv_backward(dy, x, weight, bias, width, layout, tail_in, dx, dweight, dbias);
}

template void short_conv_forward(const Exec<float>&, Mat<const float>, const float*, const float*, int64_t,
                                 const PassLayout&, const float*, float*, Mat<float>);
template void short_conv_forward(const Exec<double>&, Mat<const double>, const double*, const double*, int64_t,
                                 const PassLayout&, const double*, double*, Mat<double>);
template void short_conv_backward(const Exec<float>&, Mat<const float>, Mat<const float>, const float*, const float*,
                                  int64_t, const PassLayout&, const float*, Mat<float>, float*, float*);
template void short_conv_backward(const Exec<double>&, Mat<const double>, Mat<const double>, const double*,
                                  const double*, int64_t, const PassLayout&, const double*, Mat<double>, double*,
                                  double*);

}  // namespace cpu
}  // namespace fw
#endif
