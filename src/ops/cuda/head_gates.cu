// Parameters of a head as gates of every token on the device.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/head_lanes.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

// The head's number for every column, or its sigmoid.
template <bool kSigmoid>
struct HeadScalar {
  const float* s;
  int64_t group;

  template <int N>
  FW_DEVICE GroupValues<N> columns(int64_t c) const {
    GroupValues<N> of = group_values<N>(s, group, c);
    if constexpr (kSigmoid) {
      FW_UNROLL for (int k = 0; k < N; ++k) of.of[k] = sigmoid(of.of[k]);
    }
    return of;
  }
};

struct HeadScale : HeadScalar<true> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = f.of[k] * in[0][k];
  }
};

// in: dy, x, dx
struct HeadScaleBackward : HeadScalar<true> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&in)[I][N], float (&out)[O][N],
                            float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      out[0][k] = in[2][k] + f.of[k] * in[0][k];
      sums[0][k] += in[0][k] * in[1][k] * (f.of[k] * (1.0f - f.of[k]));
    }
  }
};

struct HeadConstant : HeadScalar<false> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = f.of[k];
  }
};

// in: x, y;  kSign 1 or -1
template <int kSign>
struct HeadSum : HeadScalar<false> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[1][k] + kSign * f.of[k] * in[0][k];
  }
};

// in: dy, x, dx
template <int kSign>
struct HeadSumBackward : HeadScalar<false> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&in)[I][N], float (&out)[O][N],
                            float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      out[0][k] = in[2][k] + kSign * f.of[k] * in[0][k];
      sums[0][k] += kSign * in[0][k] * in[1][k];
    }
  }
};

// partial [blocks of rows, heads]. kConstantRows rows of a thread are on their way at all times, and the sums of a
// head's columns meet in the block: what is left to add is small.
constexpr int kConstantRows = kHeadConstantRows / 8;  // in a block of 8 threads below each other or more

// A thread has its columns of turns kConstantRows rows.
template <class T, int N, bool kProducts>
__global__ void __launch_bounds__(kElementThreads, kProducts ? 4 : 3)
    head_constant_backward_kernel(const T* dy, int64_t stride, const HeadCut cut, int rotations, float* partial) {
  follow();
  float* shared = reinterpret_cast<float*>(shared_memory());  // [rows side by side, heads of the block]
  const PacketCoord coord(cut.cut);
  const int head = static_cast<int>(coord.packet >> cut.log_lanes), lanes = 1 << cut.log_lanes,
            lane = static_cast<int>(coord.packet) & (lanes - 1);
  const int log_heads = cut.cut.log_across - cut.log_lanes, down = kElementThreads >> cut.cut.log_across;
  float sum = 0, products[2][4] = {};
  for (int left = 0; left < cut.group; left += N << cut.log_lanes) {
    const int c = left + lane * N;
    int64_t next = coord.block * down * kConstantRows * rotations + coord.row;  // the row to ask for
    const T* from = dy + next * stride + int64_t{head} * cut.group + c;
    const int64_t end = head < cut.heads && c < cut.group ? cut.cut.rows : 0;
    Packet<T, N> packets[kConstantRows];
    const auto load_next = [&](Packet<T, N>& packet) {
      packet = {};
      if (next < end) packet.load(from);
      next += down, from += down * stride;
    };
    FW_UNROLL for (int i = 0; i < kConstantRows; ++i) load_next(packets[i]);
    for (int rotation = 1; rotation <= rotations; ++rotation) {
      FW_UNROLL for (int i = 0; i < kConstantRows; i += 2) {
        const Packet<T, N> first = packets[i], second = packets[i + 1];
        if (rotation < rotations) load_next(packets[i]), load_next(packets[i + 1]);
        if constexpr (kProducts) {
          add_products(products[i / 2 % 2], first, second);
        } else {
          float v[N], w[N];
          first.get(v);
          second.get(w);
          FW_UNROLL for (int k = 0; k < N; ++k) sum += v[k] + w[k];
        }
      }
    }
  }
  if constexpr (kProducts) sum = (products[0][0] + products[0][2]) + (products[1][0] + products[1][2]);
  for (int mask = lanes / 2; mask > (kProducts ? kProductLanes / 2 : 0); mask /= 2) sum += shuffle_xor(sum, mask);
  const int thread = static_cast<int>(thread_index());
  if (lane == 0) shared[thread >> cut.log_lanes] = sum;
  sync_threads();
  if (thread >> log_heads != 0) return;
  sum = shared[thread];
  for (int i = 1; i < down; ++i) sum += shared[(i << log_heads) + thread];
  const int first_head = static_cast<int>(coord.packet - thread) >> cut.log_lanes;
  if (first_head + thread < cut.heads) partial[coord.block * cut.heads + first_head + thread] = sum;
}

}  // namespace

namespace ops {

template <class T>
void head_scale_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> y) {
  elementwise<4>(HeadScale{{s, group}}, x.rows, x.cols, operands(x), operands(y), exec.device.stream());
}

template <class T>
void head_scale_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* s, int64_t group,
                         Mat<T> dx, Wide<T>* ds) {
  elementwise_sums<1, 2>(exec, HeadScaleBackward{{s, group}}, x.rows, x.cols, operands(dy, x, dx), operands(dx),
                         [&](const float* partial, int64_t blocks) {
                           add_group_sums(partial, blocks, x.cols, group, ds, exec.arena, exec.device.stream());
                         });
}

template <class T>
void head_constant_forward(const Exec<T>& exec, const Wide<T>* s, int64_t group, Mat<T> y) {
  elementwise<4>(HeadConstant{{s, group}}, y.rows, y.cols, operands(), operands(y), exec.device.stream());
}

template <class T>
void head_constant_backward(const Exec<T>& exec, Mat<const T> dy, int64_t group, Wide<T>* ds) {
  if (dy.rows == 0 || dy.cols == 0) return;
  const ArenaMark mark(exec.arena);
  void* stream = exec.device.stream();
  const int64_t heads = dy.cols / group;
  float* partial = head_constant_sums(exec.arena, dy.rows, heads);
  const auto run = [&]<int N, bool kProducts>(const HeadCut& cut) {
    const int rotations = dy.rows >= 16384 ? 4 : dy.rows >= 8192 ? 2 : 1;
    const int64_t row_blocks = cut.cut.row_blocks(cut.cut.down() * kConstantRows * rotations);
    launch(head_constant_backward_kernel<T, N, kProducts>, Dim3{static_cast<unsigned>(cut.blocks(row_blocks))},
           kElementThreads, sizeof(float) * kElementThreads, stream, dy.data, dy.stride, cut, rotations, partial);
    add_column_sums(partial, row_blocks, heads, ds, stream);
  };
  if (group % kPacket<T> == 0 && in_packets<T>(dy.data, dy.stride)) {
    constexpr int kN = kPacket<T>;
    const HeadCut cut(dy.rows, heads, group, kN, 5);
    if constexpr (kHasProductSums<T, kN>) {
      if (1 << cut.log_lanes >= kProductLanes) return run.template operator()<kN, true>(cut);
    }
    run.template operator()<kN, false>(cut);
  } else {
    run.template operator()<1, false>(HeadCut(dy.rows, heads, group, 1, 5));
  }
}

template <class T>
void head_subtract_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> y) {
  elementwise<2>(HeadSum<-1>{{s, group}}, x.rows, x.cols, operands(x, y), operands(y), exec.device.stream());
}

template <class T>
void head_subtract_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* s, int64_t group,
                            Mat<T> dx, Wide<T>* ds) {
  elementwise_sums<1, 2>(exec, HeadSumBackward<-1>{{s, group}}, x.rows, x.cols, operands(dy, x, dx), operands(dx),
                         [&](const float* partial, int64_t blocks) {
                           add_group_sums(partial, blocks, x.cols, group, ds, exec.arena, exec.device.stream());
                         });
}

template <class T>
void head_add_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> y) {
  elementwise<2>(HeadSum<1>{{s, group}}, x.rows, x.cols, operands(x, y), operands(y), exec.device.stream());
}

template <class T>
void head_add_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> dx,
                       Wide<T>* ds) {
  elementwise_sums<1, 2>(exec, HeadSumBackward<1>{{s, group}}, x.rows, x.cols, operands(dy, x, dx), operands(dx),
                         [&](const float* partial, int64_t blocks) {
                           add_group_sums(partial, blocks, x.cols, group, ds, exec.arena, exec.device.stream());
                         });
}

#define FW_INSTANTIATE(T)                                                                                            \
  template void head_scale_forward<T>(const Exec<T>&, Mat<const T>, const float*, int64_t, Mat<T>);                  \
  template void head_scale_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, int64_t, Mat<T>,    \
                                       float*);                                                                      \
  template void head_constant_forward<T>(const Exec<T>&, const float*, int64_t, Mat<T>);                             \
  template void head_constant_backward<T>(const Exec<T>&, Mat<const T>, int64_t, float*);                            \
  template void head_subtract_forward<T>(const Exec<T>&, Mat<const T>, const float*, int64_t, Mat<T>);               \
  template void head_subtract_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, int64_t, Mat<T>, \
                                          float*);                                                                   \
  template void head_add_forward<T>(const Exec<T>&, Mat<const T>, const float*, int64_t, Mat<T>);                    \
  template void head_add_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, int64_t, Mat<T>, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
