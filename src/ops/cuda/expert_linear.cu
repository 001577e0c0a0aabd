// Linear layers of experts on the device: rows sorted by expert, each with its own expert's weight W_e [out, in].
//   y = x W_e^T     dx = dy W_e     dW_e += the sum over its rows of dy^T x
// Few rows are gemm_m8.h's. Of more rows one kernel has the products of all experts, in bf16 with widths that are
// multiples of 8. It makes tiles of C [kM, 128] on tensor cores, 32 of the summed dimension at a time, in a pipeline of
// four stages that threads copy ahead. How many rows an expert has is known on the device alone. So the grid has a tile
// more for each expert than all rows need, and a block finds its expert and its rows in the offsets; blocks without any
// end. A row's sums have one order, whatever kM is. Other types and widths have kernels of a thread for each result.
#include <algorithm>
#include <type_traits>

#include "gpu/launch.h"
#include "ops/cuda/gemm_m8.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kN = 128, kDepth = 32, kStages = 4;

// One operand in shared memory: kRows rows of the result (or columns) by kDepth of the summed dimension. kAcross: the
// summed dimension lies across the rows of the tensor, [depth, rows]. The gap lets eight rows meet no bank.
template <int kRows, bool kAcross>
struct OperandTile {
  static constexpr int kLines = kAcross ? kDepth : kRows, kLine = kAcross ? kRows : kDepth, kStride = kLine + 8;
  static constexpr int kBytes = kLines * kStride * 2;
  static constexpr int kPackets = kLine / 8;  // of a line

  // Rows from `rows` on and depths from `depth` on do not exist, and become zeros.
  FW_DEVICE static void load(uint32_t to, const Bf16* from, int64_t stride, int rows, int depth) {
    for (int i = static_cast<int>(thread_index()); i < kLines * kPackets; i += kThreads) {
      const int line = i / kPackets, column = i % kPackets * 8;
      const bool valid = kAcross ? line < depth && column < rows : line < rows && column < depth;
      cp_async_16(to + static_cast<uint32_t>(line * kStride + column) * 2, valid ? from + line * stride + column : from,
                  valid);
    }
  }
  // The left operand of a product: 16 rows from `row` on, 16 depths from `depth` on.
  FW_DEVICE static void left(uint32_t (&a)[4], uint32_t tile, int row, int depth) {
    const int lane = static_cast<int>(lane_index()), r = lane % 8, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    if constexpr (kAcross) {
      ldmatrix_x4_trans(a, tile + static_cast<uint32_t>((depth + high + r) * kStride + row + low) * 2);
    } else {
      ldmatrix_x4(a, tile + static_cast<uint32_t>((row + low + r) * kStride + depth + high) * 2);
    }
  }
  // The right operands of two products: 16 columns.
  FW_DEVICE static void right(uint32_t (&b)[4], uint32_t tile, int column, int depth) {
    const int lane = static_cast<int>(lane_index()), r = lane % 8, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    if constexpr (kAcross) {
      ldmatrix_x4_trans(b, tile + static_cast<uint32_t>((depth + low + r) * kStride + column + high) * 2);
    } else {
      ldmatrix_x4(b, tile + static_cast<uint32_t>((column + high + r) * kStride + depth + low) * 2);
    }
  }
};

// C [m, n] of a block as sums of its warps, kM x kN: store(row, column, two neighbouring sums).
template <int kM, bool kLeftAcross, bool kRightAcross>
struct BlockProduct {
  using Left = OperandTile<kM, kLeftAcross>;
  using Right = OperandTile<kN, kRightAcross>;
  static constexpr int kWarpsDown = kM >= 64 ? 2 : 1, kWarpsAcross = kWarps / kWarpsDown;
  static constexpr int kRowTiles = kM / kWarpsDown / 16, kColumnTiles = kN / kWarpsAcross / 8;
  static constexpr int kStageBytes = Left::kBytes + Right::kBytes;
  static constexpr size_t kShared = size_t{kStages} * kStageBytes;
  static_assert(kColumnTiles % 2 == 0);

  float sums[kRowTiles][kColumnTiles][4] = {};

  // m, n: rows and columns that there are; depth: of the sum.
  FW_DEVICE void multiply(const Bf16* left, int64_t left_stride, int m, const Bf16* right, int64_t right_stride, int n,
                          int64_t depth) {
    const uint32_t shared = shared_address(shared_memory());
    const int warp = static_cast<int>(warp_index()), row = warp / kWarpsAcross * (kM / kWarpsDown),
              column = warp % kWarpsAcross * (kN / kWarpsAcross);
    const int64_t steps = (depth + kDepth - 1) / kDepth;
    const auto load = [&](int64_t step) {
      if (step < steps) {
        const uint32_t stage = shared + static_cast<uint32_t>(step % kStages) * kStageBytes;
        const int64_t at = step * kDepth;
        const int remaining = static_cast<int>(min(int64_t{kDepth}, depth - at));
        Left::load(stage, left + (kLeftAcross ? at * left_stride : at), left_stride, m, remaining);
        Right::load(stage + Left::kBytes, right + (kRightAcross ? at * right_stride : at), right_stride, n, remaining);
      }
      cp_async_commit();  // also of nothing, so that stages are counted
    };
    for (int64_t step = 0; step < kStages - 1; ++step) load(step);
    for (int64_t step = 0; step < steps; ++step) {
      cp_async_wait<kStages - 2>();
      sync_threads();
      load(step + kStages - 1);  // where the step before was
      const uint32_t stage = shared + static_cast<uint32_t>(step % kStages) * kStageBytes;
      FW_UNROLL for (int k = 0; k < kDepth; k += 16) {
        uint32_t a[kRowTiles][4], b[kColumnTiles / 2][4];
        FW_UNROLL for (int i = 0; i < kRowTiles; ++i) Left::left(a[i], stage, row + 16 * i, k);
        FW_UNROLL for (int j = 0; j < kColumnTiles / 2; ++j) {
          Right::right(b[j], stage + Left::kBytes, column + 16 * j, k);
        }
        FW_UNROLL for (int i = 0; i < kRowTiles; ++i) {
          FW_UNROLL for (int j = 0; j < kColumnTiles; ++j) {
            mma_bf16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
    }
  }

  template <class Store>
  FW_DEVICE void store(int m, int n, const Store& store_pair) const {
    const int warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index());
    const int row = warp / kWarpsAcross * (kM / kWarpsDown) + lane / 4,
              column = warp % kWarpsAcross * (kN / kWarpsAcross) + lane % 4 * 2;
    FW_UNROLL for (int i = 0; i < kRowTiles; ++i) {
      FW_UNROLL for (int j = 0; j < kColumnTiles; ++j) {
        if (column + 8 * j >= n) continue;
        if (row + 16 * i < m) store_pair(row + 16 * i, column + 8 * j, sums[i][j][0], sums[i][j][1]);
        if (row + 16 * i + 8 < m) store_pair(row + 16 * i + 8, column + 8 * j, sums[i][j][2], sums[i][j][3]);
      }
    }
  }
};

// The rows of a tile.
struct TileRows {
  int expert, first, count;  // count 0: no tile
};

// Tile `tile` of those that have at most `of_tile` rows of one expert. All threads take part; found: shared memory.
FW_DEVICE TileRows find_tile(const int32_t* offsets, int experts, int of_tile, int tile, int* found) {
  const int thread = static_cast<int>(thread_index()), lane = static_cast<int>(lane_index()),
            warp = static_cast<int>(warp_index());
  const int share = (experts + kThreads - 1) / kThreads, begin = thread * share, end = min(begin + share, experts);
  const auto tiles_of = [&](int e) { return (offsets[e + 1] - offsets[e] + of_tile - 1) / of_tile; };
  int own = 0;
  for (int e = begin; e < end; ++e) own += tiles_of(e);
  int up_to = own;
  for (int delta = 1; delta < 32; delta *= 2) {
    const int below = shuffle_up(up_to, delta);
    if (lane >= delta) up_to += below;
  }
  if (lane == 31) found[3 + warp] = up_to;
  if (thread == 0) found[2] = 0;
  sync_threads();
  for (int w = 0; w < warp; ++w) up_to += found[3 + w];
  int before = up_to - own;
  if (before <= tile && tile < up_to) {
    int e = begin;
    while (tile >= before + tiles_of(e)) before += tiles_of(e++);
    found[0] = e;
    found[1] = offsets[e] + (tile - before) * of_tile;
    found[2] = min(of_tile, offsets[e + 1] - found[1]);
  }
  sync_threads();
  const TileRows rows{found[0], found[1], found[2]};
  sync_threads();  // the pipeline takes this memory
  return rows;
}

struct ProductArgs {
  const Bf16 *x, *weight;
  Bf16* y;
  int64_t x_stride, weight_stride, y_stride;
  const int32_t* offsets;
  int experts, in, out;  // of a row of x and of y
  int64_t weight_rows;   // of an expert
  int column_tiles;
};

// y = x W_e^T, with kBackward x W_e.
template <int kM, bool kBackward>
__global__ void __launch_bounds__(kThreads, 2) expert_rows_kernel(const ProductArgs a) {
  const int tile = static_cast<int>(block_index_x()) / a.column_tiles,
            column = static_cast<int>(block_index_x()) % a.column_tiles * kN;
  const TileRows rows = find_tile(a.offsets, a.experts, kM, tile, reinterpret_cast<int*>(shared_memory()));
  if (rows.count == 0) return;
  const Bf16* const weight =
      a.weight + rows.expert * a.weight_rows * a.weight_stride + (kBackward ? column : column * a.weight_stride);
  BlockProduct<kM, false, kBackward> product;
  const int columns = min(kN, a.out - column);
  product.multiply(a.x + rows.first * a.x_stride, a.x_stride, rows.count, weight, a.weight_stride, columns, a.in);
  product.store(rows.count, columns, [&](int row, int c, float first, float second) {
    *reinterpret_cast<uint32_t*>(a.y + (rows.first + row) * a.y_stride + column + c) = pack_bf16(first, second);
  });
}

struct GradientArgs {
  const Bf16 *dy, *x;
  float* dweight;
  int64_t dy_stride, x_stride, dweight_stride;
  const int32_t* offsets;
  int in, out, column_tiles;
};

// An expert in y.
template <int kM>
__global__ void __launch_bounds__(kThreads, 2) expert_weight_kernel(const GradientArgs a) {
  const auto expert = static_cast<int>(block_index_y());
  const int begin = a.offsets[expert], count = a.offsets[expert + 1] - begin;
  if (count == 0) return;
  const int row = static_cast<int>(block_index_x()) / a.column_tiles * kM,
            column = static_cast<int>(block_index_x()) % a.column_tiles * kN;
  const int rows = min(kM, a.out - row), columns = min(kN, a.in - column);
  BlockProduct<kM, true, true> product;
  product.multiply(a.dy + begin * a.dy_stride + row, a.dy_stride, rows, a.x + begin * a.x_stride + column, a.x_stride,
                   columns, count);
  float* const dweight = a.dweight + (int64_t{expert} * a.out + row) * a.dweight_stride + column;
  product.store(rows, columns, [&](int r, int c, float first, float second) {
    float2* const at = reinterpret_cast<float2*>(dweight + r * a.dweight_stride + c);
    const float2 before = *at;
    *at = make_float2(before.x + first, before.y + second);
  });
}

// ---- a thread for each result -----------------------------------------------------------------------------------------

template <class T>
struct PlainArgs {
  const T *x, *weight;
  T* y;
  int64_t x_stride, weight_stride, y_stride;
  const int32_t* expert;
  int64_t in, out, weight_rows;
};
template <class T, bool kBackward>
__global__ void __launch_bounds__(kThreads) plain_rows_kernel(const PlainArgs<T> a) {
  const int64_t column = int64_t{block_index_x()} * kThreads + thread_index(), row = block_index_y();
  if (column >= a.out) return;
  const T* const weight = a.weight + a.expert[row] * a.weight_rows * a.weight_stride;
  const T* const x = a.x + row * a.x_stride;
  float sum = 0;
  for (int64_t c = 0; c < a.in; ++c)
    sum +=
        number(x[c]) * number(kBackward ? weight[c * a.weight_stride + column] : weight[column * a.weight_stride + c]);
  a.y[row * a.y_stride + column] = stored<T>(sum);
}

template <class T>
struct PlainGradientArgs {
  const T *dy, *x;
  float* dweight;
  int64_t dy_stride, x_stride, dweight_stride;
  const int32_t* offsets;
  int64_t in, out;
};
// A row of the weights' gradient in y, with all experts'.
template <class T>
__global__ void __launch_bounds__(kThreads) plain_weight_kernel(const PlainGradientArgs<T> a, int64_t first_row) {
  const int64_t column = int64_t{block_index_x()} * kThreads + thread_index(), row = first_row + block_index_y();
  if (column >= a.in) return;
  const int64_t expert = row / a.out, end = a.offsets[expert + 1];
  float sum = 0;
  for (int64_t r = a.offsets[expert]; r < end; ++r)
    sum += number(a.dy[r * a.dy_stride + row % a.out]) * number(a.x[r * a.x_stride + column]);
  a.dweight[row * a.dweight_stride + column] += sum;
}

constexpr int64_t kMostGridRows = 65535;
unsigned columns_of_threads(int64_t columns) { return static_cast<unsigned>(parts_of(columns, kThreads)); }

// ---- which of them ----------------------------------------------------------------------------------------------------

bool in_eights(int64_t cols, const void* data, int64_t stride) {
  return cols % 8 == 0 && in_packets<Bf16>(data, stride);
}

// y = x W_e^T or x W_e.
template <class T, bool kBackward>
void multiply_rows(const Exec<T>& exec, Mat<const T> x, const ExpertRows& rows, Mat<const T> weight, Mat<T> y) {
  if (x.rows == 0 || y.cols == 0) return;
  void* const stream = exec.device.stream();
  const int64_t weight_rows = weight.rows / rows.experts;
  if constexpr (std::is_same_v<T, Bf16>) {
    if (in_eights(x.cols, x.data, x.stride) && in_eights(y.cols, y.data, y.stride) &&
        in_packets<Bf16>(weight.data, weight.stride)) {
      const ProductArgs a{x.data,
                          weight.data,
                          y.data,
                          x.stride,
                          weight.stride,
                          y.stride,
                          rows.offsets,
                          static_cast<int>(rows.experts),
                          static_cast<int>(x.cols),
                          static_cast<int>(y.cols),
                          weight_rows,
                          static_cast<int>(parts_of(y.cols, kN))};
      const auto run = [&]<int kM>() {
        const int64_t tiles = x.rows / kM + std::min(rows.experts, x.rows);
        launch(expert_rows_kernel<kM, kBackward>, Dim3{static_cast<unsigned>(tiles * a.column_tiles)}, kThreads,
               BlockProduct<kM, false, kBackward>::kShared, stream, a);
      };
      const int64_t mean = x.rows / rows.experts;
      if (mean < 48) return run.template operator()<32>();
      if (mean < 256) return run.template operator()<64>();
      return run.template operator()<128>();
    }
  }
  for (int64_t first = 0; first < x.rows; first += kMostGridRows) {
    const int64_t count = std::min(kMostGridRows, x.rows - first);
    const PlainArgs<T> a{x.row(first), weight.data,         y.row(first), x.stride, weight.stride,
                         y.stride,     rows.expert + first, x.cols,       y.cols,   weight_rows};
    launch(plain_rows_kernel<T, kBackward>, Dim3{columns_of_threads(y.cols), static_cast<unsigned>(count)}, kThreads, 0,
           stream, a);
  }
}

template <class T>
void add_weight_gradients(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const ExpertRows& rows,
                          Mat<float> dweight) {
  if (x.rows == 0 || x.cols == 0 || dy.cols == 0) return;
  void* const stream = exec.device.stream();
  if constexpr (std::is_same_v<T, Bf16>) {
    if (in_eights(x.cols, x.data, x.stride) && in_eights(dy.cols, dy.data, dy.stride) &&
        in_packets<float>(dweight.data, dweight.stride) && rows.experts <= kMostGridRows) {
      constexpr int kM = 128;
      const GradientArgs a{dy.data,
                           x.data,
                           dweight.data,
                           dy.stride,
                           x.stride,
                           dweight.stride,
                           rows.offsets,
                           static_cast<int>(x.cols),
                           static_cast<int>(dy.cols),
                           static_cast<int>(parts_of(x.cols, kN))};
      const int64_t tiles = parts_of(dy.cols, kM) * a.column_tiles;
      return launch(expert_weight_kernel<kM>, Dim3{static_cast<unsigned>(tiles), static_cast<unsigned>(rows.experts)},
                    kThreads, BlockProduct<kM, true, true>::kShared, stream, a);
    }
  }
  const PlainGradientArgs<T> a{dy.data,        x.data,       dweight.data, dy.stride, x.stride,
                               dweight.stride, rows.offsets, x.cols,       dy.cols};
  for (int64_t first = 0; first < dweight.rows; first += kMostGridRows) {
    const int64_t count = std::min(kMostGridRows, dweight.rows - first);
    launch(plain_weight_kernel<T>, Dim3{columns_of_threads(x.cols), static_cast<unsigned>(count)}, kThreads, 0, stream,
           a, first);
  }
}

}  // namespace

namespace ops {

template <class T>
void expert_linear_forward(const Exec<T>& exec, Mat<const T> x, const ExpertRows& rows, Weight<Wide<T>> weight,
                           Mat<T> y) {
  if (takes_gemm_m8_experts(rows, x.rows))
    return gemm_m8_experts<T>(x, rows, operand<T>(weight), y, exec.device.stream());
  multiply_rows<T, false>(exec, x, rows, operand<T>(weight), y);
}

template <class T>
void expert_linear_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const ExpertRows& rows,
                            Weight<Wide<T>> weight, Mat<T> dx, Mat<Wide<T>> dweight) {
  multiply_rows<T, true>(exec, dy, rows, operand<T>(weight), dx);
  if (dweight.data != nullptr) add_weight_gradients<T>(exec, dy, x, rows, dweight);
}

#define FW_INSTANTIATE(T)                                                                                         \
  template void expert_linear_forward<T>(const Exec<T>&, Mat<const T>, const ExpertRows&, Weight<float>, Mat<T>); \
  template void expert_linear_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const ExpertRows&,          \
                                          Weight<float>, Mat<T>, Mat<float>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
