// Means over a head's columns on the device: y[t, h] = mean of x[t, h group ...], and backward dx += dy / group.
// Forward reads x alone, backward reads and writes dx. Memory limits both as long as a packet costs few instructions.
// So a thread keeps its columns over several rows, and a packet that lies within one head takes one number of dy. The
// sums of bf16 values are products with ones.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/head_lanes.cuh"

namespace fw::cuda {
namespace {

constexpr int kMeanRows = 4;  // of a thread, backward

struct Zero : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = 0;
  }
};

// What a thread has of its head in its rows, of which the next are `down` further: all are asked for before the first
// is used. All threads of a warp call it.
template <int N, int kRows, bool kProducts, class T>
FW_DEVICE void row_sums(const T* x, int64_t stride, const HeadCut& cut, int head, int lane, int64_t first, int64_t down,
                        float (&sums)[kRows]) {
  float of_pairs[kRows / 2][4] = {};
  for (int left = 0; left < cut.group; left += N << cut.log_lanes) {
    const int c = left + lane * N;
    const bool has = head < cut.heads && c < cut.group;
    const T* from = x + first * stride + int64_t{head} * cut.group + c;
    Packet<T, N> packets[kRows];
    FW_UNROLL for (int i = 0; i < kRows; ++i) {
      if (has && first + i * down < cut.cut.rows) packets[i].load(from + i * down * stride);
    }
    if constexpr (kProducts) {
      FW_UNROLL for (int i = 0; i < kRows; i += 2) add_products(of_pairs[i / 2], packets[i], packets[i + 1]);
    } else {
      FW_UNROLL for (int i = 0; i < kRows; ++i) {
        float v[N];
        packets[i].get(v);
        FW_UNROLL for (int k = 0; k < N; ++k) sums[i] += v[k];
      }
    }
  }
  if constexpr (kProducts) {
    FW_UNROLL for (int i = 0; i < kRows; ++i) sums[i] = of_pairs[i / 2][i % 2 * 2];
  }
}

// As many lanes of a head as there are rows share them: each exchange takes away half of what a lane has, and a lane
// divides and stores one row's mean.
template <class T, int N, int kRows, bool kProducts>
__global__ void __launch_bounds__(kElementThreads, kProducts ? kRows == 8 ? 4 : 6 : 3)
    group_mean_kernel(const T* x, int64_t x_stride, T* y, int64_t y_stride, const HeadCut cut) {
  follow();
  const PacketCoord coord(cut.cut);
  const int head = static_cast<int>(coord.packet >> cut.log_lanes), lanes = 1 << cut.log_lanes,
            lane = static_cast<int>(coord.packet) & (lanes - 1);
  const int64_t down = kElementThreads >> cut.cut.log_across, first = coord.block * down * kRows + coord.row;
  float sums[kRows] = {};
  // those without a head take part in the exchanges
  row_sums<N, kRows, kProducts>(x, x_stride, cut, head, lane, first, down, sums);
  const auto store = [&](int i, float sum) {
    const int64_t row = first + i * down;
    if (head < cut.heads && row < cut.cut.rows)
      y[row * y_stride + head] = stored<T>(sum / static_cast<float>(cut.group));
  };
  if (lanes < kRows) {
    for (int mask = lanes / 2; mask > (kProducts ? kProductLanes / 2 : 0); mask /= 2) {
      FW_UNROLL for (int i = 0; i < kRows; ++i) sums[i] += shuffle_xor(sums[i], mask);
    }
    if (lane != 0) return;
    FW_UNROLL for (int i = 0; i < kRows; ++i) store(i, sums[i]);
    return;
  }
  int row = 0, mask = 1;
  FW_UNROLL for (int half = kRows / 2; half > 0; half /= 2, mask *= 2) {
    const bool upper = (lane & mask) != 0;
    row += upper ? half : 0;
    FW_UNROLL for (int i = 0; i < half; ++i) {
      const float low = sums[i], high = sums[i + half];
      if (kProducts && mask < kProductLanes) {  // the four lanes have the same sums
        sums[i] = upper ? high : low;
      } else {
        sums[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, mask);
      }
    }
  }
  for (; mask < lanes; mask *= 2) sums[0] += shuffle_xor(sums[0], mask);
  if (lane < kRows) store(row, sums[0]);
}

template <class T>
void launch_group_mean(Mat<const T> x, Mat<T> y, void* stream) {
  const int64_t group = x.cols / y.cols;
  const auto run = [&]<int N, int kRows, bool kProducts>(const HeadCut& cut) {
    launch_following(y.rows, group_mean_kernel<T, N, kRows, kProducts>,
                     Dim3{static_cast<unsigned>(cut.blocks(cut.cut.row_blocks(cut.cut.down() * kRows)))},
                     kElementThreads, 0, stream, x.data, x.stride, y.data, y.stride, cut);
  };
  if (group % kPacket<T> == 0 && in_packets<T>(x.data, x.stride)) {
    constexpr int kN = kPacket<T>;
    const HeadCut cut(y.rows, y.cols, group, kN, 8);
    if constexpr (kHasProductSums<T, kN>) {
      if (1 << cut.log_lanes >= kProductLanes) return run.template operator()<kN, 8, true>(cut);
    }
    run.template operator()<kN, 8, false>(cut);
  } else {
    run.template operator()<1, 8, false>(HeadCut(y.rows, y.cols, group, 1, 8));
  }
}

// kHeads: of a packet, 1 or N.
template <class T, int N, int kHeads>
__global__ void __launch_bounds__(kElementThreads)
    group_mean_backward_kernel(const T* dy, int64_t dy_stride, T* dx, int64_t dx_stride, int group, const Cut cut) {
  follow();
  const PacketCoord coord(cut);
  if (coord.packet >= cut.packets) return;
  const int64_t c = coord.packet * N, down = kElementThreads >> cut.log_across,
                first = coord.block * down * kMeanRows + coord.row;
  int heads[kHeads];
  FW_UNROLL for (int k = 0; k < kHeads; ++k) heads[k] =
      static_cast<int>(static_cast<unsigned>(c + k) / static_cast<unsigned>(group));
  Packet<T, N> held[kMeanRows];
  T gradients[kMeanRows][kHeads] = {};
  FW_UNROLL for (int i = 0; i < kMeanRows; ++i) {
    const int64_t row = first + i * down;
    if (row >= cut.rows) continue;
    held[i].load(dx + row * dx_stride + c);
    FW_UNROLL for (int k = 0; k < kHeads; ++k) gradients[i][k] = dy[row * dy_stride + heads[k]];
  }
  FW_UNROLL for (int i = 0; i < kMeanRows; ++i) {
    const int64_t row = first + i * down;
    if (row >= cut.rows) continue;
    float x[N], add[kHeads];
    held[i].get(x);
    FW_UNROLL for (int k = 0; k < kHeads; ++k) add[k] = number(gradients[i][k]) / static_cast<float>(group);
    FW_UNROLL for (int k = 0; k < N; ++k) x[k] += add[kHeads == 1 ? 0 : k];
    held[i].set(x);
    held[i].store(dx + row * dx_stride + c);
  }
}

template <class T, int N, int kHeads>
void launch_group_mean_backward(Mat<const T> dy, Mat<T> dx, void* stream) {
  const Cut cut(dx.rows, dx.cols / N, 8);
  launch_following(dx.rows, group_mean_backward_kernel<T, N, kHeads>,
                   Dim3{static_cast<unsigned>(cut.row_blocks(cut.down() * kMeanRows) * cut.column_blocks)},
                   kElementThreads, 0, stream, dy.data, dy.stride, dx.data, dx.stride,
                   static_cast<int>(dx.cols / dy.cols), cut);
}

}  // namespace

namespace ops {

template <class T>
void group_mean_forward(const Exec<T>& exec, Mat<const T> x, Mat<T> y) {
  void* stream = exec.device.stream();
  if (y.rows == 0 || y.cols == 0) return;
  if (x.data == nullptr) return elementwise<4>(Zero{}, y.rows, y.cols, operands(), operands(y), stream);
  launch_group_mean(x, y, stream);
}

template <class T>
void group_mean_backward(const Exec<T>& exec, Mat<const T> dy, Mat<T> dx) {
  if (dx.data == nullptr || dy.cols == 0) return;
  if (dx.cols == dy.cols) return add_rows(exec, dy, dx);
  constexpr int kN = kPacket<T>;
  void* stream = exec.device.stream();
  if (dx.cols % kN != 0 || !in_packets<T>(dx.data, dx.stride))
    return launch_group_mean_backward<T, 1, 1>(dy, dx, stream);
  dx.cols / dy.cols % kN == 0 ? launch_group_mean_backward<T, kN, 1>(dy, dx, stream)
                              : launch_group_mean_backward<T, kN, kN>(dy, dx, stream);
}

#define FW_INSTANTIATE(T)                                                    \
  template void group_mean_forward<T>(const Exec<T>&, Mat<const T>, Mat<T>); \
  template void group_mean_backward<T>(const Exec<T>&, Mat<const T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
