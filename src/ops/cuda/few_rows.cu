// Each warp has rows of W: lane l takes the packets l, l + 32, ... of a row and all of the rows of x against them, and the lanes' sums are added
// in a fixed order. With one row of x the weight is read at the speed of memory only if enough of it is on its way: eight packets of 16 bytes a
// lane, 1,024 lanes or more a multiprocessor, ask for 128 KB of it at once, a whole 2048 x 2048 weight of bf16 over 132 of them. x stays in
// the first-level cache, where every warp finds it; with more rows of x two rows of W share what is read of it.
// The weight does not change while a token is decoded, so a block asks for its first packets before the kernel in front of it is over.
#include "ops/cuda/few_rows.h"
#include "ops/cuda/packets.cuh"
#include "scan/cuda/call/launch.h"

namespace fw::cuda {
namespace {

constexpr int kWarps = 4;

template <class T>
struct FewRowsArgs {
  const T* x = nullptr;
  const T* weight = nullptr;
  const float* bias = nullptr;
  T* y = nullptr;
  int64_t x_stride = 0, weight_stride = 0, y_stride = 0;
  int64_t in = 0, out = 0;
  int rows = 0;  // of x, at most M
};

// M: rows of x (those beyond a.rows are computed from the last and not stored); R: rows of W a warp has; U: packets of a row on their way.
template <class T, int N, int M, int R, int U, bool kAccumulate>
__global__ void __launch_bounds__(kWarps * 32) few_rows_kernel(const FewRowsArgs<T> a) {
  const int64_t first = (int64_t{block_index_x()} * kWarps + warp_index()) * R;
  const int lane = static_cast<int>(lane_index());
  const T* w[R];
  FW_UNROLL for (int r = 0; r < R; ++r) w[r] = a.weight + (first + r < a.out ? first + r : a.out - 1) * a.weight_stride;
  const T* x[M];
  FW_UNROLL for (int m = 0; m < M; ++m) x[m] = a.x + (m < a.rows ? m : a.rows - 1) * a.x_stride;

  constexpr int64_t kTurn = 32 * N * U;
  Packet<T, N> packets[R][U];
  const auto load = [&](int64_t begin) {
    FW_UNROLL for (int u = 0; u < U; ++u) {
      const int64_t c = begin + (u * 32 + lane) * N;
      FW_UNROLL for (int r = 0; r < R; ++r) {
        if (c < a.in) packets[r][u].load(w[r] + c);
      }
    }
  };
  load(0);
  grid_dependency_wait();
  grid_dependency_launch();
  float sums[R][M] = {};
  for (int64_t begin = 0; begin < a.in; begin += kTurn) {
    if (begin > 0) load(begin);
    FW_UNROLL for (int u = 0; u < U; ++u) {
      const int64_t c = begin + (u * 32 + lane) * N;
      if (c >= a.in) continue;
      float weights[R][N];
      FW_UNROLL for (int r = 0; r < R; ++r) packets[r][u].get(weights[r]);
      FW_UNROLL for (int m = 0; m < M; ++m) {
        Packet<T, N> packet;
        packet.load(x[m] + c);
        float values[N];
        packet.get(values);
        FW_UNROLL for (int r = 0; r < R; ++r) { FW_UNROLL for (int k = 0; k < N; ++k) sums[r][m] += weights[r][k] * values[k]; }
      }
    }
  }
  FW_UNROLL for (int r = 0; r < R; ++r) {
    FW_UNROLL for (int m = 0; m < M; ++m) {
      float sum = warp_sum(sums[r][m]);
      if (lane != m || m >= a.rows || first + r >= a.out) continue;
      T* y = a.y + m * a.y_stride + first + r;
      if (a.bias != nullptr) sum += a.bias[first + r];
      if constexpr (kAccumulate) sum += number(*y);
      *y = stored<T>(sum);
    }
  }
}

template <class T, int N, int M, int R, int U>
void launch_rows(const FewRowsArgs<T>& a, Write write, void* stream) {
  const Dim3 grid{static_cast<unsigned>((a.out + kWarps * R - 1) / (kWarps * R))};
  if (write == Write::kAccumulate) {
    launch_overlapped(few_rows_kernel<T, N, M, R, U, true>, grid, kWarps * 32, 0, stream, a);
  } else {
    launch_overlapped(few_rows_kernel<T, N, M, R, U, false>, grid, kWarps * 32, 0, stream, a);
  }
}

template <class T, int N>
void launch_form(const FewRowsArgs<T>& a, Write write, void* stream) {
  if (a.rows == 1) return launch_rows<T, N, 1, 1, 8>(a, write, stream);
  if (a.rows <= 4) return launch_rows<T, N, 4, 2, 4>(a, write, stream);
  launch_rows<T, N, 8, 2, 4>(a, write, stream);
}

}  // namespace

template <class T>
void few_rows_linear(Mat<const T> x, Mat<const T> weight, const float* bias, Mat<T> y, Write write, void* stream) {
  if (x.rows == 0 || weight.rows == 0) return;
  const FewRowsArgs<T> a{x.data, weight.data, bias, y.data, x.stride, weight.stride, y.stride, x.cols, weight.rows, static_cast<int>(x.rows)};
  constexpr int kN = kPacket<T>;
  if (x.cols % kN == 0 && in_packets<T>(x.data, x.stride) && in_packets<T>(weight.data, weight.stride)) {
    launch_form<T, kN>(a, write, stream);
  } else {
    launch_form<T, 1>(a, write, stream);
  }
}

template void few_rows_linear<float>(Mat<const float>, Mat<const float>, const float*, Mat<float>, Write, void*);
template void few_rows_linear<Bf16>(Mat<const Bf16>, Mat<const Bf16>, const float*, Mat<Bf16>, Write, void*);

}  // namespace fw::cuda
