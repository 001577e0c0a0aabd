// Two kernels. For bf16 rows at multiples of 16 bytes tensor cores take up to eight rows of x at the price of one. A
// block has 16 rows of W and its warps share their columns. A lane (g = lane / 4) asks for 16 bytes of row g, of row g
// + 8 and of row g of x. The order of the columns inside a product is free as long as both operands have the same. So
// the four words of such a packet are the operands of two products as they come: word 0 and 1 of the first, 2 and 3 of
// the second. The weight is read at the speed of memory only if enough of it is on its way: eight turns a warp ask for
// 64 KB a block at once, a whole 2048 x 2048 weight over 132 SMs. Of wider weights each turn asks for its next packets
// as soon as its product has read those before. The warps' sums meet in shared memory and are added
// in their order. After a norm the columns of x are multiplied by its weight as they are loaded. The row's 1 / rms,
// which is of all columns, multiplies the sums at the end. The warps' squares meet where their sums do, so it costs no
// barrier. The norm's weight is fetched before the wait as W is. With SwiGLU a block's 16 rows are eight of W's upper
// half and the eight that belong to them of the lower. After a gated norm of heads x is made as that operation by
// itself makes and rounds it, in shared memory, by all threads of each block. A kernel of its own takes as long as the
// product, most of it the way from one to the other. What a result is added to is asked for with x, not after the sums.
// Two products of ranks, which are over before they have begun, are one launch. Otherwise each warp has a row of W, and
// lane l takes the packets l, l + 32, ... of it against all rows of x. The weight does not change while a token is
// decoded, so a block asks for its first packets before the kernel before it is over.
#include <algorithm>
#include <type_traits>

#include "gpu/device.h"
#include "gpu/launch.h"
#include "ops/cuda/gate_kind.cuh"
#include "ops/cuda/gemm_m64.h"
#include "ops/cuda/gemm_m8.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"

namespace fw::cuda {
namespace {

template <class T>
struct GemmM8Args {
  const T* x = nullptr;
  const T* weight = nullptr;
  const float* bias = nullptr;
  T* y = nullptr;
  int64_t x_stride = 0, weight_stride = 0, y_stride = 0;
  int64_t in = 0, out = 0;
  int rows = 0;  // of x
  bool accumulate = false;
  const float* norm = nullptr;  // kNorm: [in]; kGatedHeads: [head_dim]
  float eps = 0;
  const T* gate = nullptr;  // as x, kGatedHeads; null: none
  int64_t gate_stride = 0;
  int head_dim = 0;  // packets of a head are a power of two, at most a warp's lanes
  GateKind kind = GateKind::kNone;
  int64_t gates_begin = 0, gates_end = 0;  // kNorm: columns of y that become gate_scale times their sigmoids
  float gate_scale = 0;
};

// What stands before the product.
enum class Front { kNone, kNorm, kGatedHeads };

// What the sum of row m and column o is added to. After a norm nothing accumulates.
template <Front kFront = Front::kNone, class T>
FW_DEVICE float before_sum(const GemmM8Args<T>& a, int m, int64_t o) {
  const float bias = a.bias != nullptr ? a.bias[o] : 0.0f;
  if constexpr (kFront == Front::kNorm) return bias;
  return a.accumulate ? bias + number(a.y[m * a.y_stride + o]) : bias;
}

constexpr int kTileRows = 16;        // rows of W of a block
constexpr int64_t kRotaryCols = 32;  // columns of a warp's turn: four lanes of eight
constexpr int kTurns = 8;            // on their way at once
constexpr int kMostWarps = 8;        // an SM has room for two such blocks, of which one ends as the other reads

// Of a norm's weight, what a warp has of it: its turns of all columns.
constexpr int64_t norm_floats(int64_t in, int warps) {
  const int64_t step = kTurns * kRotaryCols * warps;
  return (in + step - 1) / step * kTurns * kRotaryCols;
}

// x after a gated norm of heads, in shared memory, by all threads of a block: a packet of a few rows at a time, since
// registers are short alongside those of the weight. Rows lie so far apart that two meet no bank.
constexpr int kRowGap = 32;     // numbers
constexpr int kGatedAhead = 2;  // rows
// Bytes of a block with eight rows in front of the product; wider ones run as separate operations.
constexpr int64_t kMostShared = kSm80SharedBytes;
template <class T, int kThreads>
struct GatedRows {
  static constexpr int N = 8;
  const GemmM8Args<T>& a;
  T* rows;  // [a.rows] of a.in + kRowGap
  // of the thread's packet: a parameter, so it is asked for ahead of the wait. All its packets stand there in their
  // heads
  float weight[N];

  FW_DEVICE void ask() { load_floats(a.norm + static_cast<int>(thread_index()) * N % a.head_dim, weight); }
  FW_DEVICE void make() const {
    const int in = static_cast<int>(a.in);
    const int rotations = (in + kThreads * N - 1) / (kThreads * N);
    FW_NO_UNROLL
    for (int rotation = 0; rotation < rotations * a.rows; rotation += kGatedAhead) {
      // Turns of rows, one row after the other.
      const auto row_of = [&](int i) { return (rotation + i) / rotations; };
      const auto column_of = [&](int i) {
        return ((rotation + i) % rotations * kThreads + static_cast<int>(thread_index())) * N;
      };
      Packet<T, N> xs[kGatedAhead], gates[kGatedAhead];
      FW_UNROLL for (int i = 0; i < kGatedAhead; ++i) {
        const int m = row_of(i), c = column_of(i);
        if (m >= a.rows || c >= in) continue;
        xs[i].load(a.x + m * a.x_stride + c);
        if (a.kind != GateKind::kNone) gates[i].load(a.gate + m * a.gate_stride + c);
      }
      FW_UNROLL for (int i = 0; i < kGatedAhead; ++i) {
        const int m = row_of(i), c = column_of(i);
        if (m >= a.rows) break;
        float v[N], g[N], sum = 0;
        xs[i].get(v);
        gates[i].get(g);
        FW_UNROLL for (int k = 0; k < N; ++k) sum += v[k] * v[k];
        for (int mask = a.head_dim / N / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        const float rstd = 1.0f / sqrtf(sum / static_cast<float>(a.head_dim) + a.eps);
        FW_UNROLL for (int k = 0; k < N; ++k) v[k] = v[k] * rstd * weight[k] * gate_of(a.kind, g[k]).act;
        xs[i].set(v);
        if (c < in) xs[i].store(rows + m * (in + kRowGap) + c);  // threads without a packet have taken part in the sums
      }
    }
  }
};

// kSwiglu: `out` is half of W's rows, of which each half is a factor of SwiGLU.
template <class T, int kWarps, Front kFront, bool kSwiglu>
FW_DEVICE void few_rows_tile(const GemmM8Args<T>& a) {
  constexpr bool kNorm = kFront == Front::kNorm, kGated = kFront == Front::kGatedHeads;
  constexpr int N = 8, kOutputs = kSwiglu ? kTileRows / 2 : kTileRows;
  const int64_t first = int64_t{block_index_x()} * kOutputs;
  const int warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index());
  const int group = lane / 4;
  const int64_t column = int64_t{lane % 4} * N;
  const auto row_of = [&](int64_t o) { return o < a.out ? o : a.out - 1; };
  const T* upper = a.weight + row_of(first + group) * a.weight_stride;
  const T* lower = a.weight + (kSwiglu ? a.out + row_of(first + group) : row_of(first + group + 8)) * a.weight_stride;
  // [warps][16 rows of W][8 rows of x], and after a norm [warps][8] sums of squares and of each warp's columns, turn by
  // turn, its weight, or x after a gated norm.
  float* const parts = reinterpret_cast<float*>(shared_memory());
  float* const squares = parts + kWarps * kTileRows * 8;
  const int64_t rotations = (a.in + kRotaryCols - 1) / kRotaryCols, step = kTurns * kWarps;
  float* const norm = squares + kWarps * 8 + warp * norm_floats(a.in, kWarps);
  GatedRows<T, kWarps * 32> gated{a, reinterpret_cast<T*>(squares), {}};
  const int x_row = group < a.rows ? group : a.rows - 1;  // columns of the product without a row are not stored
  const T* x = kGated ? gated.rows + x_row * (a.in + kRowGap) : a.x + x_row * a.x_stride;

  Packet<T, N> uppers[kTurns], lowers[kTurns], xs[kTurns];
  const auto column_of = [&](int64_t begin, int u) { return (begin + u * kWarps + warp) * kRotaryCols + column; };
  const auto load_weights = [&](int64_t begin, int u) {
    const int64_t c = column_of(begin, u);
    if (c < a.in) {
      uppers[u].load(upper + c);
      lowers[u].load(lower + c);
    } else {
      uppers[u] = lowers[u] = {};
    }
  };
  const auto load_x = [&](int64_t begin, int u) {
    const int64_t c = column_of(begin, u);
    xs[u] = {};
    if (c < a.in) xs[u].load(x + c);
  };
  FW_UNROLL for (int u = 0; u < kTurns; ++u) load_weights(0, u);
  if constexpr (kNorm) {
    for (int64_t begin = 0; begin < rotations; begin += step) {
      // Lane group g loads turn g's.
      const int64_t c = column_of(begin, group);
      float w[N] = {};
      if (c < a.in) load_floats(a.norm + c, w);
      FW_UNROLL for (int k = 0; k < N; ++k) norm[begin / kWarps * kRotaryCols + group * kRotaryCols + column + k] =
          w[k];
    }
    sync_warp();
  }
  if constexpr (kGated) gated.ask();
  grid_dependency_wait();
  grid_dependency_launch();
  const int thread = static_cast<int>(thread_index());
  const bool stores = thread < kOutputs * a.rows && first + thread % kOutputs < a.out;  // the thread's first result
  const float before = stores ? before_sum<kFront>(a, thread / kOutputs, first + thread % kOutputs) : 0.0f;
  if constexpr (kGated) {
    gated.make();
    sync_threads();
  }
  float sums[4] = {}, square = 0;
  FW_UNROLL for (int u = 0; u < kTurns; ++u) load_x(0, u);
  FW_NO_UNROLL
  for (int64_t begin = 0; begin < rotations; begin += step) {
    FW_UNROLL for (int u = 0; u < kTurns; ++u) {
      if constexpr (kNorm) {
        float v[N], w[N];
        xs[u].get(v);
        load_floats(norm + begin / kWarps * kRotaryCols + u * kRotaryCols + column, w);
        FW_UNROLL for (int k = 0; k < N; ++k) {
          square += v[k] * v[k];
          v[k] *= w[k];
        }
        xs[u].set(v);
      }
      const uint32_t(&w)[4] = uppers[u].words, (&v)[4] = lowers[u].words, (&b)[4] = xs[u].words;
      mma_bf16(sums, {w[0], v[0], w[1], v[1]}, b[0], b[1]);
      mma_bf16(sums, {w[2], v[2], w[3], v[3]}, b[2], b[3]);
      if (kMostWarps == kWarps && begin + step < rotations) {  // fewer warps have all in one pass
        load_weights(begin + step, u);
        load_x(begin + step, u);
      }
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
  for (int i = thread; i < kOutputs * a.rows; i += kWarps * 32) {
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
    if constexpr (kSwiglu) sum = sum * sigmoid(sum) * (rstd * sum_of(r + 8));
    T value = stored<T>(sum + (i == thread ? before : before_sum<kFront>(a, m, first + r)));
    if constexpr (kNorm && !kSwiglu) {
      if (first + r >= a.gates_begin && first + r < a.gates_end)
        value = stored<T>(a.gate_scale * sigmoid(number(value)));
    }
    a.y[m * a.y_stride + first + r] = value;
  }
}

template <class T, int kWarps, Front kFront, bool kSwiglu>
__global__ void __launch_bounds__(kWarps * 32, 16 / kWarps) few_rows_tile_kernel(const GemmM8Args<T> a) {
  few_rows_tile<T, kWarps, kFront, kSwiglu>(a);
}
// Two products of one width, one in y 0 and one in y 1.
template <class T>
struct GemmM8Pair {
  GemmM8Args<T> of[2];
};
template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 16 / kWarps)
    few_rows_pair_kernel(const __grid_constant__ GemmM8Pair<T> pair) {
  const GemmM8Args<T>& a = pair.of[block_index_y()];
  if (int64_t{block_index_x()} * kTileRows < a.out) few_rows_tile<T, kWarps, Front::kNone, false>(a);
}

// Rows sorted by expert. A block of y = r has up to kGemmM8MaxM rows from r on, if those in front of r of its expert
// are whole blocks'; else none.
template <class T>
struct GemmM8Experts {
  GemmM8Args<T> all;  // `out` rows of the weight are an expert's
  const int32_t *offsets, *expert;
};
template <class T>
FW_DEVICE bool own_rows(const GemmM8Experts<T>& a, GemmM8Args<T>& own) {
  constexpr int kMost = static_cast<int>(kGemmM8MaxM);
  const int row = static_cast<int>(block_index_y()), expert = a.expert[row], begin = a.offsets[expert],
            end = a.offsets[expert + 1];
  if ((row - begin) % kMost != 0) return false;
  own = a.all;
  own.x += row * own.x_stride;
  own.y += row * own.y_stride;
  own.weight += expert * own.out * own.weight_stride;
  own.rows = min(end - row, kMost);
  return true;
}
template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 16 / kWarps) few_rows_experts_kernel(const GemmM8Experts<T> a) {
  GemmM8Args<T> own;
  if (own_rows(a, own)) few_rows_tile<T, kWarps, Front::kNone, false>(own);
}

constexpr int kRowWarps = 4;

// The rows of x: a.rows of them.
template <class T, int N>
FW_DEVICE void few_rows(const GemmM8Args<T>& a) {
  const int64_t o = int64_t{block_index_x()} * kRowWarps + warp_index();
  const int lane = static_cast<int>(lane_index());
  grid_dependency_wait();
  grid_dependency_launch();
  if (o >= a.out) return;
  float sums[kGemmM8MaxM] = {};
  for (int64_t c = int64_t{lane} * N; c < a.in; c += 32 * N) {
    Packet<T, N> packet;
    packet.load(a.weight + o * a.weight_stride + c);
    float weights[N];
    packet.get(weights);
    FW_UNROLL for (int m = 0; m < kGemmM8MaxM; ++m) {
      if (m >= a.rows) break;
      float values[N];
      packet.load(a.x + m * a.x_stride + c);
      packet.get(values);
      FW_UNROLL for (int k = 0; k < N; ++k) sums[m] += weights[k] * values[k];
    }
  }
  FW_UNROLL for (int m = 0; m < kGemmM8MaxM; ++m) {
    const float sum = warp_sum(sums[m]);
    if (lane == m && m < a.rows) a.y[m * a.y_stride + o] = stored<T>(sum + before_sum(a, m, o));
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kRowWarps * 32) few_rows_kernel(const GemmM8Args<T> a) {
  few_rows<T, N>(a);
}
template <class T, int N>
__global__ void __launch_bounds__(kRowWarps * 32) few_rows_experts_row_kernel(const GemmM8Experts<T> a) {
  GemmM8Args<T> own;
  if (own_rows(a, own)) few_rows<T, N>(own);
}

// Bytes of shared memory of a block.
int64_t shared_of(int warps, Front front, int64_t rows, int64_t in) {
  const int64_t floats = warps * (kTileRows * 8 + (front == Front::kNorm ? 8 + norm_floats(in, warps) : 0));
  return static_cast<int64_t>(sizeof(float)) * floats +
         (front == Front::kGatedHeads ? static_cast<int64_t>(sizeof(Bf16)) * rows * (in + kRowGap) : 0);
}

template <class T, int kWarps, Front kFront, bool kSwiglu>
void launch_tiles(const GemmM8Args<T>& a, void* stream) {
  constexpr int kOutputs = kSwiglu ? kTileRows / 2 : kTileRows;
  launch_overlapped(few_rows_tile_kernel<T, kWarps, kFront, kSwiglu>,
                    Dim3{static_cast<unsigned>((a.out + kOutputs - 1) / kOutputs)}, kWarps * 32,
                    static_cast<size_t>(shared_of(kWarps, kFront, a.rows, a.in)), stream, a);
}

// As many warps as keep a row on its way at once, up to kMostWarps; by the width alone, so that a row's bits are the
// same with others alongside it.
int warps_for(int64_t in) { return in <= kRotaryCols * kTurns ? 1 : in <= 4 * kRotaryCols * kTurns ? 4 : kMostWarps; }
template <class T, Front kFront, bool kSwiglu>
void launch_tiles_for(const GemmM8Args<T>& a, void* stream) {
  const int warps = warps_for(a.in);
  if (warps == 1) return launch_tiles<T, 1, kFront, kSwiglu>(a, stream);
  if (warps == 4) return launch_tiles<T, 4, kFront, kSwiglu>(a, stream);
  launch_tiles<T, kMostWarps, kFront, kSwiglu>(a, stream);
}

// The ranks of projections: one warp; wider pairs are two kernels.
constexpr int kPairWarps = 1;
void launch_pair(const GemmM8Pair<Bf16>& pair, void* stream) {
  const GemmM8Args<Bf16>& a = pair.of[0];
  const int64_t out = std::max(a.out, pair.of[1].out);
  launch_overlapped(few_rows_pair_kernel<Bf16, kPairWarps>,
                    Dim3{static_cast<unsigned>((out + kTileRows - 1) / kTileRows), 2}, kPairWarps * 32,
                    static_cast<size_t>(shared_of(kPairWarps, Front::kNone, a.rows, a.in)), stream, pair);
}

template <class T, int N>
void launch_rows(const GemmM8Args<T>& a, void* stream) {
  launch_overlapped(few_rows_kernel<T, N>, Dim3{static_cast<unsigned>((a.out + kRowWarps - 1) / kRowWarps)},
                    kRowWarps * 32, 0, stream, a);
}

}  // namespace

template <class T>
void gemm_m8_linear(Mat<const T> x, Mat<const T> weight, const float* bias, Mat<T> y, Write write, void* stream) {
  if (x.rows == 0 || weight.rows == 0) return;
  const GemmM8Args<T> a{x.data,
                        weight.data,
                        bias,
                        y.data,
                        x.stride,
                        weight.stride,
                        y.stride,
                        x.cols,
                        weight.rows,
                        static_cast<int>(x.rows),
                        write == Write::kAccumulate};
  const bool packets =
      x.cols % kPacket<T> == 0 && in_packets<T>(x.data, x.stride) && in_packets<T>(weight.data, weight.stride);
  if (!packets) return launch_rows<T, 1>(a, stream);
  if constexpr (std::is_same_v<T, Bf16>) {
    launch_tiles_for<T, Front::kNone, false>(a, stream);
  } else {
    launch_rows<T, kPacket<T>>(a, stream);
  }
}

template <class T>
void gemm_m8_experts(Mat<const T> x, const ExpertRows& rows, Mat<const T> weight, Mat<T> y, void* stream) {
  if (x.rows == 0 || y.cols == 0) return;
  const GemmM8Experts<T> a{{x.data, weight.data, nullptr, y.data, x.stride, weight.stride, y.stride, x.cols, y.cols},
                           rows.offsets,
                           rows.expert};
  const auto count = static_cast<unsigned>(x.rows);
  const auto blocks_of = [&](int64_t outputs) { return static_cast<unsigned>((y.cols + outputs - 1) / outputs); };
  const bool packets =
      x.cols % kPacket<T> == 0 && in_packets<T>(x.data, x.stride) && in_packets<T>(weight.data, weight.stride);
  const auto rows_of = [&]<int N>() {
    launch_overlapped(few_rows_experts_row_kernel<T, N>, Dim3{blocks_of(kRowWarps), count}, kRowWarps * 32, 0, stream,
                      a);
  };
  if (!packets) return rows_of.template operator()<1>();
  if constexpr (std::is_same_v<T, Bf16>) {
    const auto tiles = [&]<int kWarps>() {
      launch_overlapped(few_rows_experts_kernel<T, kWarps>, Dim3{blocks_of(kTileRows), count}, kWarps * 32,
                        static_cast<size_t>(shared_of(kWarps, Front::kNone, kGemmM8MaxM, x.cols)), stream, a);
    };
    const int warps = warps_for(x.cols);
    if (warps == 1) return tiles.template operator()<1>();
    if (warps == 4) return tiles.template operator()<4>();
    tiles.template operator()<kMostWarps>();
  } else {
    rows_of.template operator()<kPacket<T>>();
  }
}

template void gemm_m8_experts<float>(Mat<const float>, const ExpertRows&, Mat<const float>, Mat<float>, void*);
template void gemm_m8_experts<Bf16>(Mat<const Bf16>, const ExpertRows&, Mat<const Bf16>, Mat<Bf16>, void*);
template void gemm_m8_linear<float>(Mat<const float>, Mat<const float>, const float*, Mat<float>, Write, void*);
template void gemm_m8_linear<Bf16>(Mat<const Bf16>, Mat<const Bf16>, const float*, Mat<Bf16>, Write, void*);

namespace ops {

template <>
bool normed_linear_forward(const Exec<Bf16>& exec, Mat<const Bf16> x, const float* norm, float eps,
                           Weight<float> weight, const float* bias, bool swiglu, const SigmoidColumns& gates,
                           Mat<Bf16> y) {
  const Mat<const Bf16> w = operand<Bf16>(weight);
  if (x.rows > kGemmM8MaxM || x.cols % kPacket<Bf16> != 0 || !in_packets<Bf16>(x.data, x.stride) ||
      !in_packets<Bf16>(w.data, w.stride))
    return false;
  if (shared_of(warps_for(x.cols), Front::kNorm, kGemmM8MaxM, x.cols) > kMostShared)
    return false;  // by the width alone
  if (x.rows == 0 || y.cols == 0) return true;
  GemmM8Args<Bf16> a{
      x.data, w.data, bias, y.data, x.stride, w.stride, y.stride, x.cols, y.cols, static_cast<int>(x.rows), false};
  a.norm = norm;
  a.eps = eps;
  a.gates_begin = gates.begin, a.gates_end = gates.begin + gates.size;
  a.gate_scale = static_cast<float>(gates.scale);
  void* const stream = exec.device.stream();
  swiglu ? launch_tiles_for<Bf16, Front::kNorm, true>(a, stream)
         : launch_tiles_for<Bf16, Front::kNorm, false>(a, stream);
  return true;
}

template <>
bool linear_pair_forward(const Exec<Bf16>& exec, const LinearPart<Bf16>& first, const LinearPart<Bf16>& second) {
  if (first.x.rows != second.x.rows || first.x.cols != second.x.cols) return false;
  const Mat<const Bf16> weights[2] = {operand<Bf16>(first.weight), operand<Bf16>(second.weight)};
  if (first.x.rows > kGemmM8MaxM) return gemm_m64_pair(first, second, exec.device.stream());
  if (first.x.cols % kPacket<Bf16> != 0 || warps_for(first.x.cols) != kPairWarps || first.x.rows == 0) return false;
  GemmM8Pair<Bf16> pair;
  for (int i = 0; i < 2; ++i) {
    const LinearPart<Bf16>& of = i == 0 ? first : second;
    const Mat<const Bf16>& w = weights[i];
    if (!in_packets<Bf16>(of.x.data, of.x.stride) || !in_packets<Bf16>(w.data, w.stride) || w.rows == 0) return false;
    pair.of[i] = {of.x.data, w.data,      of.bias,   of.y.data, of.x.stride,
                  w.stride,  of.y.stride, of.x.cols, w.rows,    static_cast<int>(of.x.rows),
                  false};
  }
  launch_pair(pair, exec.device.stream());
  return true;
}

template <>
bool gated_linear_forward(const Exec<Bf16>& exec, Mat<Bf16> o, Mat<const Bf16> gate, const float* norm, float eps,
                          int64_t head_dim, GateKind kind, Weight<float> weight, Mat<Bf16> y, Write write) {
  const Mat<const Bf16> w = operand<Bf16>(weight);
  const int64_t packets = head_dim / kPacket<Bf16>;
  if (head_dim % kPacket<Bf16> != 0 || packets > 32 || 32 % packets != 0 || o.cols % head_dim != 0 ||
      o.rows > kGemmM8MaxM)
    return false;
  // by the width alone, as a row's bits are
  if (shared_of(kMostWarps, Front::kGatedHeads, kGemmM8MaxM, o.cols) > kMostShared) return false;
  if (!in_packets<Bf16>(o.data, o.stride) || !in_packets<Bf16>(w.data, w.stride) || !in_packets<float>(norm, 0))
    return false;
  if (kind != GateKind::kNone && !in_packets<Bf16>(gate.data, gate.stride)) return false;
  if (o.rows == 0 || y.cols == 0) return true;
  GemmM8Args<Bf16> a{o.data,
                     w.data,
                     nullptr,
                     y.data,
                     o.stride,
                     w.stride,
                     y.stride,
                     o.cols,
                     y.cols,
                     static_cast<int>(o.rows),
                     write == Write::kAccumulate};
  a.norm = norm, a.eps = eps;
  a.gate = gate.data, a.gate_stride = gate.stride, a.head_dim = static_cast<int>(head_dim), a.kind = kind;
  launch_tiles_for<Bf16, Front::kGatedHeads, false>(a, exec.device.stream());
  return true;
}

}  // namespace ops
}  // namespace fw::cuda
