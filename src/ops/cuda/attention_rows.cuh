// What attention on single rows is made of, for prefill and training (plain_attention.cu) and for decoding
// (decode_attention.cu):
// - a row of a head spread over the lanes of a group of threads,
// - groups that take keys in turn,
// - the position of a query among its keys.
#pragma once

#include <type_traits>

#include "gpu/launch.h"
#include "ops/cuda/kinds.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/sequences.cuh"
#include "ops/rotary_heads.h"

namespace fw::cuda {

inline constexpr int kRowThreads = 128;

template <class T>
struct PlainArgs {
  Mat<const T> q, k, v, o = {}, d_o = {};
  Mat<T> out = {}, dk = {}, dv = {};  // out: o, or dq
  Pages<T> past_k, past_v;
  PassSequences sequences;
  int heads = 0, group = 0, dim = 0, lanes = 0;
  int64_t window = 0;
  float scale = 0;
  Mat<float> lse = {};
  float* delta = nullptr;  // [T, H]
};

// A row of a head as the lanes of a group have it: packet i of lane l from column (l + i lanes) N on.
template <int N, int kVectors>
struct RowPart {
  float of[kVectors][N];
  FW_DEVICE void clear() {
    FW_UNROLL for (int i = 0; i < kVectors; ++i) { FW_UNROLL for (int k = 0; k < N; ++k) of[i][k] = 0; }
  }
  template <class T>
  FW_DEVICE void load(const T* row, int lane, int lanes, int dim) {
    FW_UNROLL for (int i = 0; i < kVectors; ++i) {
      Packet<T, N> packet;
      const int c = (lane + i * lanes) * N;
      if (c < dim) packet.load(row + c);
      packet.get(of[i]);
    }
  }
  FW_DEVICE float dot(const RowPart& other, int lanes) const {
    float sum = 0;
    FW_UNROLL for (int i = 0; i < kVectors; ++i) {
      FW_UNROLL for (int k = 0; k < N; ++k) sum += of[i][k] * other.of[i][k];
    }
    for (int mask = lanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    return sum;
  }
  FW_DEVICE void add(float factor, const RowPart& other) {
    FW_UNROLL for (int i = 0; i < kVectors; ++i) {
      FW_UNROLL for (int k = 0; k < N; ++k) of[i][k] += factor * other.of[i][k];
    }
  }
  FW_DEVICE void put(float* row, int lane, int lanes, int dim) const {
    FW_UNROLL for (int i = 0; i < kVectors; ++i) {
      const int c = (lane + i * lanes) * N;
      if (c >= dim) continue;
      FW_UNROLL for (int k = 0; k < N; ++k) row[c + k] = of[i][k];
    }
  }
};

struct Group {
  int lane, index, count;
  FW_DEVICE explicit Group(int lanes)
      : lane(static_cast<int>(thread_index()) % lanes),
        index(static_cast<int>(thread_index()) / lanes),
        count(kRowThreads / lanes) {}
};

// Token t in its sequence: `past` keys lie in pages, then come those of the pass.
struct Stand {
  int64_t n, begin, end, past, last, first;  // first: the first key that t sees
  template <class T>
  FW_DEVICE Stand(const PlainArgs<T>& a, int64_t t) {
    n = a.sequences.sequence_of(t);
    begin = a.sequences.offsets[n], end = a.sequences.offsets[n + 1];
    past = a.past_k.rows > 0 ? a.sequences.before(n) : 0;
    last = past + t - begin;
    first = a.window > 0 ? max(int64_t{0}, last - a.window + 1) : 0;
  }
  template <class T>
  FW_DEVICE const T* row(const Mat<const T>& now, const Pages<T>& pages, int64_t position, int column) const {
    return (position >= past ? now.data + (begin + position - past) * now.stride : page_row(pages, n, position)) +
           column;
  }
};

// The sum over the groups of rows [count, dim] in shared memory, in order, times factor.
template <class T>
FW_DEVICE void leave_sum(const float* rows, int count, int dim, const float* weights, float factor, T* to) {
  for (int c = static_cast<int>(thread_index()); c < dim; c += kRowThreads) {
    float sum = 0;
    for (int g = 0; g < count; ++g) sum += rows[g * dim + c] * (weights == nullptr ? 1.0f : weights[g]);
    to[c] = stored<T>(sum * factor);
  }
}

// Rotary position embedding of what no kernel of attention turns itself: queries and keys, or their gradients.
template <class T>
void rotary_heads(const Exec<T>& exec, Mat<T> q, Mat<T> k, const AttentionShape& shape, const PassLayout& layout,
                  Rotation rotation) {
  fw::rotary_heads(q, k,
                   [&](Mat<T> x) { ops::rotary(exec, x, shape.dim, shape.rotated, shape.theta, layout, rotation); });
}

inline constexpr int kMostDim = kinds::kMostAttentionDim;
// Of heads that are not wide: a thread has 8 numbers of a row, and 24 of a wide one.
inline constexpr int kNarrowDim = 256;

// Calls run(N, vectors) with numbers of the compiler, once the lanes are known. aligned: every row of a head begins at
// a multiple of 16 bytes.
template <class T, class Run>
void with_form(PlainArgs<T>& a, bool aligned, const Run& run) {
  if (a.dim > kMostDim) fail_usage("head_dim: expected at most {} for attention on CUDA, got {}", kMostDim, a.dim);
  const auto with_lanes = [&]<int N, int kVectors>() {
    a.lanes = 1;
    while (a.lanes < 32 && a.lanes * N < a.dim) a.lanes *= 2;
    run.template operator()<N, kVectors>();
  };
  const auto with_packets = [&]<int kDim>() {
    if (aligned && a.dim % kPacket<T> == 0) return with_lanes.template operator()<kPacket<T>, kDim / 32 / kPacket<T>>();
    with_lanes.template operator()<1, kDim / 32>();
  };
  a.dim <= kNarrowDim ? with_packets.template operator()<kNarrowDim>() : with_packets.template operator()<kMostDim>();
}

template <class T>
bool aligned(Mat<T> x) {
  return in_packets<std::remove_const_t<T>>(x.data, x.stride);
}
// Of a table the host cannot see where pages lie: it is told.
template <class T>
bool aligned(const Pages<T>& pages) {
  return !pages || ((pages.table != nullptr ? pages.aligned && pages.width % kPacket<T> == 0
                                            : in_packets<T>(pages.first, pages.width)));
}

}  // namespace fw::cuda
