// Parameters of a head as gates of every token on the device, and means over a head's columns.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/math.cuh"

namespace fw::cuda {
namespace {

// The head's number for every column, or its sigmoid.
template <bool kSigmoid>
struct HeadNumber {
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

struct HeadScale : HeadNumber<true> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = f.of[k] * in[0][k];
  }
};

// in: dy, x, dx
struct HeadScaleBackward : HeadNumber<true> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&in)[I][N], float (&out)[O][N], float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      out[0][k] = in[2][k] + f.of[k] * in[0][k];
      sums[0][k] += in[0][k] * in[1][k] * (f.of[k] * (1.0f - f.of[k]));
    }
  }
};

struct HeadConstant : HeadNumber<false> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = f.of[k];
  }
};

struct HeadConstantBackward : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&)[O][N], float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) sums[0][k] += in[0][k];
  }
};

// in: x, y;  kSign 1 or -1
template <int kSign>
struct HeadSum : HeadNumber<false> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[1][k] + kSign * f.of[k] * in[0][k];
  }
};

// in: dy, x, dx
template <int kSign>
struct HeadSumBackward : HeadNumber<false> {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const GroupValues<N>& f, int64_t, const float (&in)[I][N], float (&out)[O][N], float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      out[0][k] = in[2][k] + kSign * f.of[k] * in[0][k];
      sums[0][k] += kSign * in[0][k] * in[1][k];
    }
  }
};

struct Zero : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = 0;
  }
};

// in: dx
template <class T>
struct GroupMeanBackward {
  const T* dy;
  int64_t stride, group;

  // Which head each column is of.
  template <int N>
  struct Heads {
    int of[N];
  };
  template <int N>
  FW_DEVICE Heads<N> columns(int64_t c) const {
    Heads<N> heads;
    FW_UNROLL for (int k = 0; k < N; ++k) heads.of[k] = static_cast<int>(static_cast<unsigned>(c + k) / static_cast<unsigned>(group));
    return heads;
  }
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Heads<N>& heads, int64_t row, const float (&in)[I][N], float (&out)[O][N]) const {
    const T* from = dy + row * stride;
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[0][k] + number(from[heads.of[k]]) / static_cast<float>(group);
  }
};

constexpr int kMeanThreads = 256;

// `lanes` neighbouring threads have a mean.
template <class T, int N>
__global__ void __launch_bounds__(kMeanThreads)
    group_mean_kernel(const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t rows, int heads, int group, int lanes) {
  const int64_t index = (int64_t{block_index_x()} * kMeanThreads + thread_index()) / lanes, row = index / heads;
  const int lane = static_cast<int>(thread_index()) % lanes, head = static_cast<int>(index % heads);
  float sum = 0;
  if (row < rows) {
    const T* from = x + row * x_stride + int64_t{head} * group;
    for (int c = lane * N; c < group; c += lanes * N) {
      Packet<T, N> packet;
      packet.load(from + c);
      float v[N];
      packet.get(v);
      FW_UNROLL for (int k = 0; k < N; ++k) sum += v[k];
    }
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (row < rows && lane == 0) y[row * y_stride + head] = stored<T>(sum / static_cast<float>(group));
}

template <class T, int N>
void launch_group_mean(Mat<const T> x, Mat<T> y, void* stream) {
  const int64_t group = x.cols / y.cols;
  int lanes = 1;
  while (lanes < 32 && lanes * N < group) lanes *= 2;
  const int64_t blocks = (y.rows * y.cols * lanes + kMeanThreads - 1) / kMeanThreads;
  launch(group_mean_kernel<T, N>, Dim3{static_cast<unsigned>(blocks)}, kMeanThreads, 0, stream, x.data, x.stride, y.data, y.stride, y.rows,
         static_cast<int>(y.cols), static_cast<int>(group), lanes);
}

}  // namespace

namespace ops {

template <class T>
void head_scale_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> y) {
  elementwise<4>(HeadScale{{s, group}}, x.rows, x.cols, operands(x), operands(y), exec.device.stream());
}

template <class T>
void head_scale_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> dx, Wide<T>* ds) {
  elementwise_sums<1, 2>(exec, HeadScaleBackward{{s, group}}, x.rows, x.cols, operands(dy, x, dx), operands(dx),
                         [&](const float* partial, int64_t blocks) { add_group_sums(partial, blocks, x.cols, group, ds, exec.arena, exec.device.stream()); });
}

template <class T>
void head_constant_forward(const Exec<T>& exec, const Wide<T>* s, int64_t group, Mat<T> y) {
  elementwise<4>(HeadConstant{{s, group}}, y.rows, y.cols, operands(), operands(y), exec.device.stream());
}

template <class T>
void head_constant_backward(const Exec<T>& exec, Mat<const T> dy, int64_t group, Wide<T>* ds) {
  elementwise_sums<1, 4>(exec, HeadConstantBackward{}, dy.rows, dy.cols, operands(dy), operands(),
                         [&](const float* partial, int64_t blocks) { add_group_sums(partial, blocks, dy.cols, group, ds, exec.arena, exec.device.stream()); });
}

template <class T>
void head_subtract_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> y) {
  elementwise<2>(HeadSum<-1>{{s, group}}, x.rows, x.cols, operands(x, y), operands(y), exec.device.stream());
}

template <class T>
void head_subtract_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> dx, Wide<T>* ds) {
  elementwise_sums<1, 2>(exec, HeadSumBackward<-1>{{s, group}}, x.rows, x.cols, operands(dy, x, dx), operands(dx),
                         [&](const float* partial, int64_t blocks) { add_group_sums(partial, blocks, x.cols, group, ds, exec.arena, exec.device.stream()); });
}

template <class T>
void head_add_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> y) {
  elementwise<2>(HeadSum<1>{{s, group}}, x.rows, x.cols, operands(x, y), operands(y), exec.device.stream());
}

template <class T>
void head_add_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* s, int64_t group, Mat<T> dx, Wide<T>* ds) {
  elementwise_sums<1, 2>(exec, HeadSumBackward<1>{{s, group}}, x.rows, x.cols, operands(dy, x, dx), operands(dx),
                         [&](const float* partial, int64_t blocks) { add_group_sums(partial, blocks, x.cols, group, ds, exec.arena, exec.device.stream()); });
}

template <class T>
void group_mean_forward(const Exec<T>& exec, Mat<const T> x, Mat<T> y) {
  void* stream = exec.device.stream();
  if (y.rows == 0 || y.cols == 0) return;
  if (x.data == nullptr) return elementwise<4>(Zero{}, y.rows, y.cols, operands(), operands(y), stream);
  if (x.cols / y.cols % kPacket<T> == 0 && in_packets<T>(x.data, x.stride)) return launch_group_mean<T, kPacket<T>>(x, y, stream);
  launch_group_mean<T, 1>(x, y, stream);
}

template <class T>
void group_mean_backward(const Exec<T>& exec, Mat<const T> dy, Mat<T> dx) {
  if (dx.data == nullptr || dy.cols == 0) return;
  elementwise<4>(GroupMeanBackward<T>{dy.data, dy.stride, dx.cols / dy.cols}, dx.rows, dx.cols, operands(dx), operands(dx), exec.device.stream());
}

#define FW_INSTANTIATE(T)                                                                                                     \
  template void head_scale_forward<T>(const Exec<T>&, Mat<const T>, const float*, int64_t, Mat<T>);                           \
  template void head_scale_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, int64_t, Mat<T>, float*);    \
  template void head_constant_forward<T>(const Exec<T>&, const float*, int64_t, Mat<T>);                                      \
  template void head_constant_backward<T>(const Exec<T>&, Mat<const T>, int64_t, float*);                                     \
  template void head_subtract_forward<T>(const Exec<T>&, Mat<const T>, const float*, int64_t, Mat<T>);                        \
  template void head_subtract_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, int64_t, Mat<T>, float*); \
  template void head_add_forward<T>(const Exec<T>&, Mat<const T>, const float*, int64_t, Mat<T>);                             \
  template void head_add_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, int64_t, Mat<T>, float*);      \
  template void group_mean_forward<T>(const Exec<T>&, Mat<const T>, Mat<T>);                                                  \
  template void group_mean_backward<T>(const Exec<T>&, Mat<const T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
