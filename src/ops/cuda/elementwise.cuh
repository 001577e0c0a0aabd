// Operations that take each number by itself: out = f(in) over rows of any width and stride, and the same with sums
// over the rows of every column.
//
// f is what the operation computes, for N neighbouring row scales:
//   f.columns<N>(c)                      what it needs of the columns c, c + 1, ... and keeps over rows (struct Plain: nothing)
//   f(columns, row, in, out)             in[i][k], out[o][k]: number k of the i-th input and the o-th output, as floats
//   f(columns, row, in, out, sums)       sums[s][k] += what the row adds to the s-th sum of its column
// A thread has the same columns of several rows, which are all asked for before the first is used. All of a row's
// inputs are read before its outputs are written, so that an output may lie where an input does. Sums have an order of
// the shape alone: a thread's rows, a block's threads, the blocks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gpu/launch.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {

// Matrices of one shape: where their rows begin.
template <class... Ts>
struct Operands {
  static constexpr int kCount = 0;
  static constexpr int kWidest = 8;
  bool in_packets(int /*numbers*/) const { return true; }
};
template <class T, class... Ts>
struct Operands<T, Ts...> {
  static constexpr int kCount = 1 + static_cast<int>(sizeof...(Ts));
  // Numbers of a packet: 16 bytes of the widest type.
  static constexpr int kWidest = std::min(16 / static_cast<int>(sizeof(T)), Operands<Ts...>::kWidest);
  T* data;
  int64_t stride;
  Operands<Ts...> tail;

  explicit Operands(Mat<T> first, Mat<Ts>... others) : data(first.data), stride(first.stride), tail(others...) {}
  bool in_packets(int numbers) const {
    return reinterpret_cast<uintptr_t>(data) % (sizeof(T) * static_cast<size_t>(numbers)) == 0 &&
           stride % numbers == 0 && tail.in_packets(numbers);
  }
};

template <class... Ts>
Operands<Ts...> operands(Mat<Ts>... matrices) {
  return Operands<Ts...>(matrices...);
}

// A packet of each.
template <int N, class Of>
struct Held {
  FW_DEVICE void load(const Operands<>&, int64_t, int64_t) {}
  template <int At, int K>
  FW_DEVICE void get(float (&)[K][N]) const {}
};
template <int N, class T, class... Ts>
struct Held<N, Operands<T, Ts...>> {
  Packet<std::remove_const_t<T>, N> first;
  Held<N, Operands<Ts...>> tail;

  FW_DEVICE void load(const Operands<T, Ts...>& from, int64_t row, int64_t c) {
    first.load(from.data + row * from.stride + c);
    tail.load(from.tail, row, c);
  }
  template <int At, int K>
  FW_DEVICE void get(float (&x)[K][N]) const {
    first.get(x[At]);
    tail.template get<At + 1>(x);
  }
};

template <int At, int N, int K>
FW_DEVICE void store_row(const Operands<>&, int64_t, int64_t, const float (&)[K][N]) {}
template <int At, int N, int K, class T, class... Ts>
FW_DEVICE void store_row(const Operands<T, Ts...>& to, int64_t row, int64_t c, const float (&x)[K][N]) {
  Packet<T, N> packet;
  packet.set(x[At]);
  packet.store(to.data + row * to.stride + c);
  store_row<At + 1>(to.tail, row, c, x);
}

struct Nothing {};
struct Plain {
  template <int N>
  FW_DEVICE Nothing columns(int64_t) const {
    return {};
  }
};

inline constexpr int kElementThreads = 256;

// How threads lie over a matrix: 2^log_across packets side by side, the others below them; blocks from left to right,
// then down.
struct Cut {
  int64_t rows = 0;
  int packets = 0;  // of a row
  int log_across = 0;
  int column_blocks = 0;

  // As wide as leaves few threads without a packet.
  Cut(int64_t all_rows, int64_t row_packets, int most_across_log, int least_across_log = 0)
      : rows(all_rows), packets(static_cast<int>(row_packets)), log_across(most_across_log) {
    const auto blocks = [&] { return (row_packets + (1 << log_across) - 1) >> log_across; };
    while (log_across > least_across_log && ((blocks() << log_across) - row_packets) * 8 > row_packets) --log_across;
    column_blocks = static_cast<int>(blocks());
  }
  int down() const { return kElementThreads >> log_across; }
  int64_t row_blocks(int64_t rows_of_block) const { return (rows + rows_of_block - 1) / rows_of_block; }
};

struct PacketCoord {
  int64_t block, packet, row;  // block: of rows; row: of the block's
  FW_DEVICE explicit PacketCoord(const Cut& cut) {
    const unsigned of = block_index_x() / static_cast<unsigned>(cut.column_blocks), thread = thread_index();
    block = of;
    packet = (int64_t{block_index_x() - of * static_cast<unsigned>(cut.column_blocks)} << cut.log_across) +
             (thread & ((1u << cut.log_across) - 1));
    row = thread >> cut.log_across;
  }
};

template <int N, int kAhead, class F, class In, class Out>
__global__ void __launch_bounds__(kElementThreads)
    elementwise_kernel(const F f, const In in, const Out out, const Cut cut) {
  follow();
  const PacketCoord coord(cut);
  if (coord.packet >= cut.packets) return;
  const int64_t c = coord.packet * N, down = kElementThreads >> cut.log_across,
                first = coord.block * down * kAhead + coord.row;
  Held<N, In> held[kAhead];
  FW_UNROLL for (int i = 0; i < kAhead; ++i) {
    if (first + i * down < cut.rows) held[i].load(in, first + i * down, c);
  }
  const auto columns = f.template columns<N>(c);
  FW_UNROLL for (int i = 0; i < kAhead; ++i) {
    const int64_t row = first + i * down;
    if (row >= cut.rows) continue;
    float x[In::kCount + 1][N], y[Out::kCount][N];
    held[i].template get<0>(x);
    f(columns, row, x, y);
    store_row<0>(out, row, c, y);
  }
}

// partial [kSums, blocks of rows, columns]
template <int N, int kSums, int kAhead, class F, class In, class Out>
__global__ void __launch_bounds__(kElementThreads)
    elementwise_sums_kernel(const F f, const In in, const Out out, const Cut cut, int64_t row_blocks, float* partial) {
  follow();                                                   // for the kernel that adds the sums
  float* shared = reinterpret_cast<float*>(shared_memory());  // [kSums, rows side by side, packets, N]
  const PacketCoord coord(cut);
  const int64_t c = coord.packet * N, down = kElementThreads >> cut.log_across, rows = max(int64_t{kSumRows}, down);
  const int64_t end = min(cut.rows, (coord.block + 1) * rows);
  const bool has_columns = coord.packet < cut.packets;
  float sums[kSums][N] = {};
  if (has_columns) {
    const auto columns = f.template columns<N>(c);
    for (int64_t first = coord.block * rows + coord.row; first < end; first += kAhead * down) {
      Held<N, In> held[kAhead];
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        if (first + i * down < end) held[i].load(in, first + i * down, c);
      }
      FW_UNROLL for (int i = 0; i < kAhead; ++i) {
        const int64_t row = first + i * down;
        if (row >= end) continue;
        float x[In::kCount + 1][N], y[Out::kCount + 1][N];
        held[i].template get<0>(x);
        f(columns, row, x, y, sums);
        store_row<0>(out, row, c, y);
      }
    }
  }
  const int thread = static_cast<int>(thread_index());
  FW_UNROLL for (int s = 0; s < kSums; ++s) {
    FW_UNROLL for (int k = 0; k < N; ++k) shared[(s * N + k) * kElementThreads + thread] = sums[s][k];
  }
  sync_threads();
  if (!has_columns || coord.row != 0) return;
  FW_UNROLL for (int s = 0; s < kSums; ++s) {
    FW_UNROLL for (int k = 0; k < N; ++k) {
      float sum = sums[s][k];
      for (int i = 1; i < down; ++i) sum += shared[(s * N + k) * kElementThreads + thread + (i << cut.log_across)];
      partial[(s * row_blocks + coord.block) * cut.packets * N + c + k] = sum;
    }
  }
}

// kAhead: rows of a thread.
template <int kAhead, class F, class In, class Out>
void elementwise(const F& f, int64_t rows, int64_t cols, const In& in, const Out& out, void* stream) {
  constexpr int kN = std::min(In::kWidest, Out::kWidest);
  const auto run = [&]<int N>() {
    const Cut cut(rows, cols / N, 8);
    launch_following(rows, elementwise_kernel<N, kAhead, F, In, Out>,
                     Dim3{static_cast<unsigned>(cut.row_blocks(cut.down() * kAhead) * cut.column_blocks)},
                     kElementThreads, 0, stream, f, in, out, cut);
  };
  if (cols % kN == 0 && in.in_packets(kN) && out.in_packets(kN)) {
    run.template operator()<kN>();
  } else {
    run.template operator()<1>();
  }
}

// The same, and the sums: add(partial, row blocks) is called with partial [kSums, row blocks, cols].
template <int kSums, int kAhead, class T, class F, class In, class Out, class Add>
void elementwise_sums(const Exec<T>& exec, const F& f, int64_t rows, int64_t cols, const In& in, const Out& out,
                      const Add& add) {
  if (rows == 0 || cols == 0) return;
  constexpr int kN = std::min(In::kWidest, Out::kWidest);
  const Arena::Mark mark = exec.arena.mark();
  const auto run = [&]<int N>() {
    const Cut cut(rows, cols / N, 5);
    const int64_t blocks = cut.row_blocks(std::max(kSumRows, cut.down()));
    float* partial = partial_sums(exec.arena, kSums * elementwise_sum_rows(rows), cols);
    launch(elementwise_sums_kernel<N, kSums, kAhead, F, In, Out>,
           Dim3{static_cast<unsigned>(blocks * cut.column_blocks)}, kElementThreads,
           sizeof(float) * kSums * N * kElementThreads, exec.device.stream(), f, in, out, cut, blocks, partial);
    add(partial, blocks);
  };
  if (cols % kN == 0 && in.in_packets(kN) && out.in_packets(kN)) {
    run.template operator()<kN>();
  } else {
    run.template operator()<1>();
  }
  exec.arena.rewind(mark);
}

// Numbers that neighbouring columns share: of[k] = from[(c + k) / group].
template <int N>
struct GroupValues {
  float of[N];
};
template <int N>
FW_DEVICE GroupValues<N> group_values(const float* from, int64_t group, int64_t c) {
  GroupValues<N> values;
  const unsigned size = static_cast<unsigned>(group);
  unsigned at = static_cast<unsigned>(c) / size, offset = static_cast<unsigned>(c) - at * size;
  FW_UNROLL for (int k = 0; k < N; ++k) {
    values.of[k] = from[at];
    if (++offset == size) offset = 0, ++at;
  }
  return values;
}

}  // namespace fw::cuda
