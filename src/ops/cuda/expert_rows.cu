// Rows of experts on the device: the sum of a token's rows, and rows times a number each. A token's rows are added in
// the order in which it chose them, in float32, so that the same rows have the same bits in every run.
#include "ops/cuda/elementwise.cuh"

namespace fw::cuda {
namespace {

template <class T>
struct SumRowsArgs {
  const T* from;
  T* to;
  const int32_t* row_of;
  int64_t from_stride, to_stride;
  int chosen;
  bool accumulate;
};

// A thread has a packet of a token.
template <class T, int N>
__global__ void __launch_bounds__(kElementThreads) sum_expert_rows_kernel(const SumRowsArgs<T> a, const Cut cut) {
  follow();
  constexpr int kAhead = 4;
  const PacketCoord coord(cut);
  const int64_t t = coord.block * (kElementThreads >> cut.log_across) + coord.row, c = coord.packet * N;
  if (coord.packet >= cut.packets || t >= cut.rows) return;
  const int32_t* const rows = a.row_of + t * a.chosen;
  Packet<T, N> packet;
  float sum[N] = {}, x[N];
  if (a.accumulate) {
    packet.load(a.to + t * a.to_stride + c);
    packet.get(sum);
  }
  for (int first = 0; first < a.chosen; first += kAhead) {
    Packet<T, N> packets[kAhead];
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (first + i < a.chosen) packets[i].load(a.from + rows[first + i] * a.from_stride + c);
    }
    FW_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (first + i >= a.chosen) break;
      packets[i].get(x);
      FW_UNROLL for (int k = 0; k < N; ++k) sum[k] += x[k];
    }
  }
  packet.set(sum);
  packet.store(a.to + t * a.to_stride + c);
}

// in: x
template <class T>
struct ScaleRow : Plain {
  const T* factor;
  int64_t stride;
  ScaleRow(const T* s, int64_t s_stride) : factor(s), stride(s_stride) {}
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t row, const float (&in)[I][N], float (&out)[O][N]) const {
    const float s = number(factor[row * stride]);
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = s * in[0][k];
  }
};

template <class T>
struct ScaleRowsBackwardArgs {
  const T *dy, *x, *s;
  T *dx, *ds;
  int64_t dy_stride, x_stride, s_stride, dx_stride, ds_stride;
  int64_t rows, cols;
};

// A warp has a row.
template <class T, int N>
__global__ void __launch_bounds__(kElementThreads) scale_rows_backward_kernel(const ScaleRowsBackwardArgs<T> a) {
  follow();
  const int64_t r = int64_t{block_index_x()} * (kElementThreads / 32) + warp_index();
  if (r >= a.rows) return;
  const int lane = static_cast<int>(lane_index());
  const float s = number(a.s[r * a.s_stride]);
  float sum = 0;
  for (int64_t c = int64_t{lane} * N; c < a.cols; c += 32 * N) {
    Packet<T, N> packet;
    float dy[N], x[N];
    packet.load(a.x + r * a.x_stride + c);
    packet.get(x);
    packet.load(a.dy + r * a.dy_stride + c);
    packet.get(dy);
    FW_UNROLL for (int k = 0; k < N; ++k) {
      sum += dy[k] * x[k];
      dy[k] *= s;
    }
    packet.set(dy);
    packet.store(a.dx + r * a.dx_stride + c);
  }
  sum = warp_sum(sum);
  if (lane == 0) a.ds[r * a.ds_stride] = stored<T>(sum);
}

template <class... Mats>
bool rows_in_packets(int64_t cols, const Mats&... matrices) {
  return ((cols % kPacket<std::remove_const_t<std::remove_pointer_t<decltype(matrices.data)>>> == 0) && ...) &&
         (in_packets<std::remove_const_t<std::remove_pointer_t<decltype(matrices.data)>>>(matrices.data,
                                                                                          matrices.stride) &&
          ...);
}

}  // namespace

namespace ops {

template <class T>
void sum_expert_rows(const Exec<T>& exec, Mat<const T> from, const ExpertRows& rows, Mat<T> to, Write write) {
  if (to.rows == 0 || to.cols == 0) return;
  const SumRowsArgs<T> a{from.data,
                         to.data,
                         rows.row_of,
                         from.stride,
                         to.stride,
                         static_cast<int>(rows.chosen),
                         write == Write::kAccumulate};
  const auto run = [&]<int N>() {
    const Cut cut(to.rows, to.cols / N, 8);
    launch_following(from.rows, sum_expert_rows_kernel<T, N>,
                     Dim3{static_cast<unsigned>(cut.row_blocks(cut.down()) * cut.column_blocks)}, kElementThreads, 0,
                     exec.device.stream(), a, cut);
  };
  if (rows_in_packets(to.cols, from, to)) {
    run.template operator()<kPacket<T>>();
  } else {
    run.template operator()<1>();
  }
}

template <class T>
void scale_rows_forward(const Exec<T>& exec, Mat<const T> x, Mat<const T> s, Mat<T> y) {
  elementwise<4>(ScaleRow<T>(s.data, s.stride), x.rows, x.cols, operands(x), operands(y), exec.device.stream());
}

template <class T>
void scale_rows_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, Mat<const T> s, Mat<T> dx, Mat<T> ds) {
  const ScaleRowsBackwardArgs<T> a{dy.data,  x.data,   s.data,    dx.data,   ds.data, dy.stride,
                                   x.stride, s.stride, dx.stride, ds.stride, x.rows,  x.cols};
  const auto run = [&]<int N>() {
    launch_following(x.rows, scale_rows_backward_kernel<T, N>,
                     Dim3{static_cast<unsigned>(parts_of(x.rows, kElementThreads / 32))}, kElementThreads, 0,
                     exec.device.stream(), a);
  };
  if (rows_in_packets(x.cols, dy, x, dx)) {
    run.template operator()<kPacket<T>>();
  } else {
    run.template operator()<1>();
  }
}

#define FW_INSTANTIATE(T)                                                                           \
  template void sum_expert_rows<T>(const Exec<T>&, Mat<const T>, const ExpertRows&, Mat<T>, Write); \
  template void scale_rows_forward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<T>);          \
  template void scale_rows_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, Mat<const T>, Mat<T>, Mat<T>);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
