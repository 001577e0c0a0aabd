// Two kernels. For bf16 rows at multiples of 16 bytes tensor cores take up to eight rows of x at the price of one: a block has 16 rows of W, its
// warps share their columns, and a lane asks for 16 bytes of row g = lane / 4 and of row g + 8 and of row g of x. The order of the columns inside
// a product is free as long as both operands have the same, so the four words of such a packet are the operands of two products as they
// come: word 0 and 1 of the first, 2 and 3 of the second. The weight is read at the speed of memory only if enough of it is on its
// way: eight turns a warp ask for 64 KB a block at once, a whole 2048 x 2048 weight over 132 multiprocessors. The warps' sums meet in shared memory
// and are added in their order.
// Otherwise each warp has a row of W, and lane l takes the packets l, l + 32, ... of it against all rows of x.
// The weight does not change while a token is decoded, so a block asks for its first packets before the kernel in front of it is over.
#include <type_traits>

#include "ops/cuda/few_rows.h"
#include "ops/cuda/packets.cuh"
#include "scan/cuda/call/launch.h"

namespace fw::cuda {
namespace {

template <class T>
struct FewRowsArgs {
  const T* x = nullptr;
  const T* weight = nullptr;
  const float* bias = nullptr;
  T* y = nullptr;
  int64_t x_stride = 0, weight_stride = 0, y_stride = 0;
  int64_t in = 0, out = 0;
  int rows = 0;  // of x
  bool accumulate = false;
};

template <class T>
FW_DEVICE void store_sum(const FewRowsArgs<T>& a, int m, int64_t o, float sum) {
  T* y = a.y + m * a.y_stride + o;
  if (a.bias != nullptr) sum += a.bias[o];
  if (a.accumulate) sum += number(*y);
  *y = stored<T>(sum);
}

constexpr int kTileRows = 16;      // rows of W of a block
constexpr int64_t kTurnCols = 32;  // columns of a warp's turn: four lanes of eight
constexpr int kTurns = 8;          // on their way at once

template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarps <= 8 ? 16 / kWarps : 1) few_rows_tile_kernel(const FewRowsArgs<T> a) {
  constexpr int N = 8;
  const int64_t first = int64_t{block_index_x()} * kTileRows;
  const int warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index());
  const int group = lane / 4;
  const int64_t column = int64_t{lane % 4} * N;
  const T* upper = a.weight + (first + group < a.out ? first + group : a.out - 1) * a.weight_stride;
  const T* lower = a.weight + (first + group + 8 < a.out ? first + group + 8 : a.out - 1) * a.weight_stride;
  const T* x = a.x + (group < a.rows ? group : a.rows - 1) * a.x_stride;  // columns of the product without a row are not stored

  Packet<T, N> uppers[kTurns], lowers[kTurns], xs[kTurns];
  const auto place = [&](int64_t turn) { return turn * kTurnCols + column; };
  const auto load_weights = [&](int64_t begin) {
    FW_UNROLL for (int u = 0; u < kTurns; ++u) {
      const int64_t c = place(begin + u * kWarps + warp);
      if (c < a.in) {
        uppers[u].load(upper + c);
        lowers[u].load(lower + c);
      } else {
        uppers[u] = lowers[u] = {};
      }
    }
  };
  load_weights(0);
  grid_dependency_wait();
  grid_dependency_launch();
  float sums[4] = {};
  const int64_t turns = (a.in + kTurnCols - 1) / kTurnCols;
  for (int64_t begin = 0; begin < turns; begin += kTurns * kWarps) {
    if (begin > 0) load_weights(begin);
    FW_UNROLL for (int u = 0; u < kTurns; ++u) {
      const int64_t c = place(begin + u * kWarps + warp);
      xs[u] = {};
      if (c < a.in) xs[u].load(x + c);
    }
    FW_UNROLL for (int u = 0; u < kTurns; ++u) {
      const uint32_t(&w)[4] = uppers[u].words, (&v)[4] = lowers[u].words, (&b)[4] = xs[u].words;
      mma_bf16(sums, {w[0], v[0], w[1], v[1]}, b[0], b[1]);
      mma_bf16(sums, {w[2], v[2], w[3], v[3]}, b[2], b[3]);
    }
  }
  // [warps][16 rows of W][8 rows of x]
  float* parts = reinterpret_cast<float*>(shared_memory());
  float* mine = parts + warp * kTileRows * 8 + group * 8 + lane % 4 * 2;
  mine[0] = sums[0], mine[1] = sums[1], mine[64] = sums[2], mine[65] = sums[3];
  sync_threads();
  for (int i = static_cast<int>(thread_index()); i < kTileRows * a.rows; i += kWarps * 32) {
    const int r = i % kTileRows, m = i / kTileRows;
    if (first + r >= a.out) continue;
    float sum = 0;
    FW_UNROLL for (int w = 0; w < kWarps; ++w) sum += parts[(w * kTileRows + r) * 8 + m];
    store_sum(a, m, first + r, sum);
  }
}

constexpr int kRowWarps = 4;

// The rows of x: a.rows of them.
template <class T, int N>
__global__ void __launch_bounds__(kRowWarps * 32) few_rows_kernel(const FewRowsArgs<T> a) {
  const int64_t o = int64_t{block_index_x()} * kRowWarps + warp_index();
  const int lane = static_cast<int>(lane_index());
  grid_dependency_wait();
  grid_dependency_launch();
  if (o >= a.out) return;
  float sums[kFewRows] = {};
  for (int64_t c = int64_t{lane} * N; c < a.in; c += 32 * N) {
    Packet<T, N> packet;
    packet.load(a.weight + o * a.weight_stride + c);
    float weights[N];
    packet.get(weights);
    FW_UNROLL for (int m = 0; m < kFewRows; ++m) {
      if (m >= a.rows) break;
      float values[N];
      packet.load(a.x + m * a.x_stride + c);
      packet.get(values);
      FW_UNROLL for (int k = 0; k < N; ++k) sums[m] += weights[k] * values[k];
    }
  }
  FW_UNROLL for (int m = 0; m < kFewRows; ++m) {
    const float sum = warp_sum(sums[m]);
    if (lane == m && m < a.rows) store_sum(a, m, o, sum);
  }
}

template <class T, int kWarps>
void launch_tiles(const FewRowsArgs<T>& a, void* stream) {
  launch_overlapped(few_rows_tile_kernel<T, kWarps>, Dim3{static_cast<unsigned>((a.out + kTileRows - 1) / kTileRows)}, kWarps * 32,
                    sizeof(float) * kWarps * kTileRows * 8, stream, a);
}

template <class T, int N>
void launch_rows(const FewRowsArgs<T>& a, void* stream) {
  launch_overlapped(few_rows_kernel<T, N>, Dim3{static_cast<unsigned>((a.out + kRowWarps - 1) / kRowWarps)}, kRowWarps * 32, 0, stream, a);
}

}  // namespace

template <class T>
void few_rows_linear(Mat<const T> x, Mat<const T> weight, const float* bias, Mat<T> y, Write write, void* stream) {
  if (x.rows == 0 || weight.rows == 0) return;
  const FewRowsArgs<T> a{
      x.data, weight.data, bias, y.data, x.stride, weight.stride, y.stride, x.cols, weight.rows, static_cast<int>(x.rows), write == Write::kAccumulate};
  const bool packets = x.cols % kPacket<T> == 0 && in_packets<T>(x.data, x.stride) && in_packets<T>(weight.data, weight.stride);
  if (!packets) return launch_rows<T, 1>(a, stream);
  if constexpr (std::is_same_v<T, Bf16>) {
    // As many warps as keep a row on its way at once; by the width alone, so that a row's bits are the same with others beside it.
    if (x.cols <= kTurnCols * kTurns) return launch_tiles<T, 1>(a, stream);
    if (x.cols <= 4 * kTurnCols * kTurns) return launch_tiles<T, 4>(a, stream);
    if (x.cols <= 8 * kTurnCols * kTurns) return launch_tiles<T, 8>(a, stream);
    launch_tiles<T, 16>(a, stream);
  } else {
    launch_rows<T, kPacket<T>>(a, stream);
  }
}

template void few_rows_linear<float>(Mat<const float>, Mat<const float>, const float*, Mat<float>, Write, void*);
template void few_rows_linear<Bf16>(Mat<const Bf16>, Mat<const Bf16>, const float*, Mat<Bf16>, Write, void*);

}  // namespace fw::cuda
