// Two kernels. For bf16 rows at multiples of 16 bytes tensor cores take up to eight rows of x at the price of one: a block has 16 rows of W, its
// warps share their columns, and a lane asks for 16 bytes of row g = lane / 4 and of row g + 8 and of row g of x. The order of the columns inside
// a product is free as long as both operands have the same, so the four words of such a packet are the operands of two products as they
// come: word 0 and 1 of the first, 2 and 3 of the second. The weight is read at the speed of memory only if enough of it is on its
// way: eight turns a warp ask for 64 KB a block at once, a whole 2048 x 2048 weight over 132 multiprocessors. The warps' sums meet in shared memory
// and are added in their order.
// Behind a norm the columns of x are multiplied by its weight as they are loaded, and the row's 1 / rms, which is of all columns, multiplies the sums at the
// end: the warps' squares meet where their sums do, so it costs no barrier. The norm's weight is fetched in front of the wait as W is. With SwiGLU a block's 16
// rows are eight of W's upper half and the eight that belong to them of the lower.
// Otherwise each warp has a row of W, and lane l takes the packets l, l + 32, ... of it against all rows of x.
// The weight does not change while a token is decoded, so a block asks for its first packets before the kernel in front of it is over.
#include <type_traits>

#include "ops/cuda/few_rows.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/normed_linear.h"
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
  const float* norm = nullptr;  // [in], kNorm
  float eps = 0;
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

// kHalves: `out` is half of W's rows, whose upper and lower halves are the two factors of SwiGLU.
template <class T, int kWarps, bool kNorm, bool kHalves>
__global__ void __launch_bounds__(kWarps * 32, kWarps <= 8 ? 16 / kWarps : 1) few_rows_tile_kernel(const FewRowsArgs<T> a) {
  constexpr int N = 8, kOutputs = kHalves ? kTileRows / 2 : kTileRows;
  const int64_t first = int64_t{block_index_x()} * kOutputs;
  const int warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index());
  const int group = lane / 4;
  const int64_t column = int64_t{lane % 4} * N;
  const auto row_of = [&](int64_t o) { return o < a.out ? o : a.out - 1; };
  const T* upper = a.weight + row_of(first + group) * a.weight_stride;
  const T* lower = a.weight + (kHalves ? a.out + row_of(first + group) : row_of(first + group + 8)) * a.weight_stride;
  const T* x = a.x + (group < a.rows ? group : a.rows - 1) * a.x_stride;  // columns of the product without a row are not stored
  // [warps][16 rows of W][8 rows of x], and behind a norm [warps][8] sums of squares and [warps][kTurns][kTurnCols] of its weight.
  float* const parts = reinterpret_cast<float*>(shared_memory());
  float* const squares = parts + kWarps * kTileRows * 8;
  float* const norm = squares + kWarps * 8 + warp * kTurns * kTurnCols;

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
    if constexpr (kNorm) {
      sync_warp();  // the turns before have read theirs
      // Lane group g brings turn g's.
      const int64_t c = place(begin + group * kWarps + warp);
      float w[N] = {};
      if (c < a.in) load_floats(a.norm + c, w);
      FW_UNROLL for (int k = 0; k < N; ++k) norm[group * kTurnCols + column + k] = w[k];
      sync_warp();
    }
  };
  load_weights(0);
  grid_dependency_wait();
  grid_dependency_launch();
  float sums[4] = {}, square = 0;
  const int64_t turns = (a.in + kTurnCols - 1) / kTurnCols;
  for (int64_t begin = 0; begin < turns; begin += kTurns * kWarps) {
    if (begin > 0) load_weights(begin);
    FW_UNROLL for (int u = 0; u < kTurns; ++u) {
      const int64_t c = place(begin + u * kWarps + warp);
      xs[u] = {};
      if (c < a.in) xs[u].load(x + c);
    }
    FW_UNROLL for (int u = 0; u < kTurns; ++u) {
      if constexpr (kNorm) {
        float v[N], w[N];
        xs[u].get(v);
        load_floats(norm + u * kTurnCols + column, w);
        FW_UNROLL for (int k = 0; k < N; ++k) {
          square += v[k] * v[k];
          v[k] *= w[k];
        }
        xs[u].set(v);
      }
      const uint32_t(&w)[4] = uppers[u].words, (&v)[4] = lowers[u].words, (&b)[4] = xs[u].words;
      mma_bf16(sums, {w[0], v[0], w[1], v[1]}, b[0], b[1]);
      mma_bf16(sums, {w[2], v[2], w[3], v[3]}, b[2], b[3]);
    }
  }
  float* mine = parts + warp * kTileRows * 8 + group * 8 + lane % 4 * 2;
  mine[0] = sums[0], mine[1] = sums[1], mine[64] = sums[2], mine[65] = sums[3];
  if constexpr (kNorm) {
    square += shuffle_xor(square, 1);
    square += shuffle_xor(square, 2);
    if (lane % 4 == 0) squares[warp * 8 + group] = square;
  }
  sync_threads();
  for (int i = static_cast<int>(thread_index()); i < kOutputs * a.rows; i += kWarps * 32) {
    const int r = i % kOutputs, m = i / kOutputs;
    if (first + r >= a.out) continue;
    const auto sum_of = [&](int row) {
      float sum = 0;
      FW_UNROLL for (int w = 0; w < kWarps; ++w) sum += parts[(w * kTileRows + row) * 8 + m];
      return sum;
    };
    float rstd = 1;
    if constexpr (kNorm) {
      float all = 0;
      FW_UNROLL for (int w = 0; w < kWarps; ++w) all += squares[w * 8 + m];
      rstd = 1.0f / sqrtf(all / static_cast<float>(a.in) + a.eps);
    }
    float sum = rstd * sum_of(r);
    if constexpr (kHalves) sum = sum * sigmoid(sum) * (rstd * sum_of(r + 8));
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

template <class T, int kWarps, bool kNorm, bool kHalves>
void launch_tiles(const FewRowsArgs<T>& a, void* stream) {
  constexpr int kOutputs = kHalves ? kTileRows / 2 : kTileRows;
  constexpr size_t kFloats = kWarps * kTileRows * 8 + (kNorm ? kWarps * (8 + kTurns * kTurnCols) : 0);
  launch_overlapped(few_rows_tile_kernel<T, kWarps, kNorm, kHalves>, Dim3{static_cast<unsigned>((a.out + kOutputs - 1) / kOutputs)}, kWarps * 32,
                    sizeof(float) * kFloats, stream, a);
}

// As many warps as keep a row on its way at once; by the width alone, so that a row's bits are the same with others beside it.
template <class T, bool kNorm, bool kHalves>
void launch_tiles_for(const FewRowsArgs<T>& a, void* stream) {
  if (a.in <= kTurnCols * kTurns) return launch_tiles<T, 1, kNorm, kHalves>(a, stream);
  if (a.in <= 4 * kTurnCols * kTurns) return launch_tiles<T, 4, kNorm, kHalves>(a, stream);
  if (a.in <= 8 * kTurnCols * kTurns) return launch_tiles<T, 8, kNorm, kHalves>(a, stream);
  launch_tiles<T, 16, kNorm, kHalves>(a, stream);
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
    launch_tiles_for<T, false, false>(a, stream);
  } else {
    launch_rows<T, kPacket<T>>(a, stream);
  }
}

template void few_rows_linear<float>(Mat<const float>, Mat<const float>, const float*, Mat<float>, Write, void*);
template void few_rows_linear<Bf16>(Mat<const Bf16>, Mat<const Bf16>, const float*, Mat<Bf16>, Write, void*);

}  // namespace fw::cuda

namespace fw {

static_assert(kFewestRows == cuda::kFewRows);

bool normed_linear_on_cuda(const Exec<Bf16>& exec, Mat<const Bf16> x, const float* norm, float eps, const Weight<float>& weight, const float* bias, bool swiglu,
                           Mat<Bf16> y) {
  using namespace cuda;
  const Mat<const Bf16> w = operand<Bf16>(weight);
  if (x.rows > kFewRows || x.cols % kPacket<Bf16> != 0 || !in_packets<Bf16>(x.data, x.stride) || !in_packets<Bf16>(w.data, w.stride)) return false;
  if (x.rows == 0 || y.cols == 0) return true;
  FewRowsArgs<Bf16> a{x.data, w.data, bias, y.data, x.stride, w.stride, y.stride, x.cols, y.cols, static_cast<int>(x.rows), false};
  a.norm = norm;
  a.eps = eps;
  void* const stream = exec.device.stream();
  swiglu ? launch_tiles_for<Bf16, true, true>(a, stream) : launch_tiles_for<Bf16, true, false>(a, stream);
  return true;
}

}  // namespace fw
