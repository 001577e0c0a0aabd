// Rows that move as they are: copies, the last row of each sequence, rows into pages, rows by their numbers, tokens to
// their experts. And sums of rows and of two flat ranges.
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/linear.h"
#include "ops/cuda/sequences.cuh"

namespace fw::cuda {
namespace {

// Where row r comes from and goes to. A null `to`: nowhere.
template <class T>
struct Move {
  const T* from;
  T* to;
};

template <class T>
struct CopyRows {
  Mat<const T> from;
  Mat<T> to;
  FW_DEVICE Move<T> row(int64_t r) const { return {from.data + r * from.stride, to.data + r * to.stride}; }
};

template <class T>
struct LastRows {
  Mat<const T> from;
  Mat<T> to;
  const int64_t* offsets;
  FW_DEVICE Move<T> row(int64_t n) const {
    return {from.data + (offsets[n + 1] - 1) * from.stride, to.data + n * to.stride};
  }
};

template <class T>
struct StoreRows {
  Mat<const T> from;
  PassSequences sequences;
  Pages<T> pages;
  FW_DEVICE Move<T> row(int64_t t) const {
    const int64_t n = sequences.sequence_of(t), begin = sequences.begin_of(n),
                  length = sequences.begin_of(n + 1) - begin;
    // a later token takes its place
    if (t - begin < length - pages.per_sequence * pages.rows) return {nullptr, nullptr};
    return {from.data + t * from.stride, page_row(pages, n, sequences.before(n) + t - begin)};
  }
};

template <class T>
struct GatherRows {
  Mat<const T> from;
  const int32_t* rows;
  Mat<T> to;
  FW_DEVICE Move<T> row(int64_t i) const { return {from.data + rows[i] * from.stride, to.data + i * to.stride}; }
};

template <class T>
struct ScatterRows {
  Mat<const T> from;
  const int32_t* rows;
  Mat<T> to;
  FW_DEVICE Move<T> row(int64_t i) const { return {from.data + i * from.stride, to.data + rows[i] * to.stride}; }
};

template <class T>
struct RowsOfExperts {
  Mat<const T> from;
  Mat<T> to;
  const int32_t* source;
  int chosen;
  FW_DEVICE Move<T> row(int64_t r) const {
    return {from.data + source[r] / chosen * from.stride, to.data + r * to.stride};
  }
};

template <class T, int N, class Rows>
__global__ void __launch_bounds__(kElementThreads) move_rows_kernel(const Rows rows, const Cut cut) {
  follow();
  constexpr int kAhead = 4;
  const PacketCoord coord(cut);
  if (coord.packet >= cut.packets) return;
  const int64_t c = coord.packet * N, down = kElementThreads >> cut.log_across,
                first = coord.block * down * kAhead + coord.row;
  Packet<T, N> packets[kAhead];
  T* to[kAhead] = {};
  FW_UNROLL for (int i = 0; i < kAhead; ++i) {
    if (first + i * down >= cut.rows) continue;
    const Move<T> one = rows.row(first + i * down);
    to[i] = one.to;
    if (one.to != nullptr) packets[i].load(one.from + c);
  }
  FW_UNROLL for (int i = 0; i < kAhead; ++i) {
    if (to[i] != nullptr) packets[i].store(to[i] + c);
  }
}

template <class T, class Rows>
void move_rows(const Rows& rows, int64_t count, int64_t cols, bool aligned, void* stream) {
  if (count == 0 || cols == 0) return;
  constexpr int kN = kPacket<T>;
  const auto run = [&]<int N>() {
    const Cut cut(count, cols / N, 8);
    launch_following(count, move_rows_kernel<T, N, Rows>,
                     Dim3{static_cast<unsigned>(cut.row_blocks(int64_t{4} * cut.down()) * cut.column_blocks)},
                     kElementThreads, 0, stream, rows, cut);
  };
  if (aligned && cols % kN == 0) {
    run.template operator()<kN>();
  } else {
    run.template operator()<1>();
  }
}

template <class T>
bool aligned(Mat<T> x) {
  return in_packets<std::remove_const_t<T>>(x.data, x.stride);
}

// in: from, to
template <int kSign>
struct Sum : Plain {
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Nothing&, int64_t, const float (&in)[I][N], float (&out)[O][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) out[0][k] = in[1][k] + static_cast<float>(kSign) * in[0][k];
  }
};

}  // namespace

namespace ops {

template <class T>
void copy_rows(const Exec<T>& exec, Mat<const T> from, Mat<T> to) {
  move_rows<T>(CopyRows<T>{from, to}, from.rows, from.cols, aligned(from) && aligned(to), exec.device.stream());
}

template <class T>
void add_rows(const Exec<T>& exec, Mat<const T> from, Mat<T> to) {
  elementwise<4>(Sum<1>{}, from.rows, from.cols, operands(from, Mat<const T>(to)), operands(to), exec.device.stream());
}

template <class T>
void subtract_rows(const Exec<T>& exec, Mat<const T> from, Mat<T> to) {
  elementwise<4>(Sum<-1>{}, from.rows, from.cols, operands(from, Mat<const T>(to)), operands(to), exec.device.stream());
}

template <class T>
void last_rows(const Exec<T>& exec, Mat<const T> from, const PassLayout& layout, Mat<T> to) {
  move_rows<T>(LastRows<T>{from, to, layout.offsets}, layout.host.count(), from.cols, aligned(from) && aligned(to),
               exec.device.stream());
}

// The pages of a table may lie anywhere, as the host cannot tell: a number at a time.
template <class T>
void store_rows(const Exec<T>& exec, Mat<const T> x, const PassLayout& layout, Pages<T> pages) {
  const bool packets = aligned(x) && pages.table == nullptr && in_packets<T>(pages.first, pages.width);
  move_rows<T>(StoreRows<T>{x, PassSequences(layout), pages}, x.rows, x.cols, packets, exec.device.stream());
}

template <class T>
void gather_rows(const Exec<T>& exec, Mat<const T> from, const int32_t* rows, Mat<T> to) {
  move_rows<T>(GatherRows<T>{from, rows, to}, to.rows, to.cols, aligned(from) && aligned(to), exec.device.stream());
}

template <class T>
void scatter_rows(const Exec<T>& exec, Mat<const T> from, const int32_t* rows, Mat<T> to) {
  move_rows<T>(ScatterRows<T>{from, rows, to}, from.rows, from.cols, aligned(from) && aligned(to),
               exec.device.stream());
}

template <class T>
void embedding_forward(const Exec<T>& exec, const int32_t* ids, Weight<Wide<T>> weight, Mat<T> out) {
  gather_rows<T>(exec, operand<T>(weight), ids, out);
}

template <class T>
void gather_expert_rows(const Exec<T>& exec, Mat<const T> x, const ExpertRows& rows, Mat<T> to) {
  move_rows<T>(RowsOfExperts<T>{x, to, rows.source, static_cast<int>(rows.chosen)}, to.rows, to.cols,
               aligned(x) && aligned(to), exec.device.stream());
}

// In rows of 4,096 numbers, so that the blocks' numbers stay small, and what is left of them.
template <class T>
void add_values(const Exec<T>& exec, const Wide<T>* from, int64_t n, Wide<T>* to) {
  constexpr int64_t kRow = 4096;
  const int64_t whole = n / kRow * kRow;
  const auto add = [&](int64_t begin, int64_t rows, int64_t cols) {
    if (rows == 0 || cols == 0) return;
    const Mat<const float> in(from + begin, rows, cols);
    const Mat<float> out(to + begin, rows, cols);
    elementwise<4>(Sum<1>{}, rows, cols, operands(in, out), operands(out), exec.device.stream());
  };
  add(0, n / kRow, kRow);
  add(whole, 1, n - whole);
}

#define FW_INSTANTIATE(T)                                                                       \
  template void copy_rows<T>(const Exec<T>&, Mat<const T>, Mat<T>);                             \
  template void add_rows<T>(const Exec<T>&, Mat<const T>, Mat<T>);                              \
  template void gather_expert_rows<T>(const Exec<T>&, Mat<const T>, const ExpertRows&, Mat<T>); \
  template void subtract_rows<T>(const Exec<T>&, Mat<const T>, Mat<T>);                         \
  template void last_rows<T>(const Exec<T>&, Mat<const T>, const PassLayout&, Mat<T>);          \
  template void gather_rows<T>(const Exec<T>&, Mat<const T>, const int32_t*, Mat<T>);           \
  template void scatter_rows<T>(const Exec<T>&, Mat<const T>, const int32_t*, Mat<T>);          \
  template void store_rows<T>(const Exec<T>&, Mat<const T>, const PassLayout&, Pages<T>);       \
  template void embedding_forward<T>(const Exec<T>&, const int32_t*, Weight<float>, Mat<T>);    \
  template void add_values<T>(const Exec<T>&, const float*, int64_t, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
