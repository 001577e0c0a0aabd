// What convolutions over packed sequences keep in a thread's registers: the last W rows of its N columns, so that each
// row is read once.
#pragma once

#include "ops/cuda/packets.cuh"

namespace fw::cuda {

template <int N, int W>
struct Columns {
  float v[W][N];  // [j]: of j tokens ago

  FW_DEVICE void push(const float (&x)[N]) {
    FW_UNROLL for (int j = W - 1; j > 0; --j) { FW_UNROLL for (int i = 0; i < N; ++i) v[j][i] = v[j - 1][i]; }
    FW_UNROLL for (int i = 0; i < N; ++i) v[0][i] = x[i];
  }
};

// taps[j] = w_j of the thread's columns.
template <int N, int W>
FW_DEVICE void load_taps(const float* weight, float (&taps)[W][N]) {
  FW_UNROLL for (int i = 0; i < N; ++i) {
    FW_UNROLL for (int j = 0; j < W; ++j) taps[j][i] = weight[i * W + W - 1 - j];
  }
}

// The W-1 inputs before token t of sequence n, which begins at `begin`; the newest in v[0]. x [T, cols]; tail [N, W-1,
// cols], or null: zeros.
template <class T, int N, int W>
FW_DEVICE void load_history(const T* x, int64_t stride, const T* tail, int64_t cols, int64_t column, int64_t n,
                            int64_t begin, int64_t t, Columns<N, W>& window) {
  FW_UNROLL for (int j = 0; j < W; ++j) { FW_UNROLL for (int i = 0; i < N; ++i) window.v[j][i] = 0; }
  FW_UNROLL for (int j = 0; j < W - 1; ++j) {
    const int64_t position = t - 1 - j - begin;
    Packet<T, N> packet;
    if (position >= 0) {
      packet.load(x + (begin + position) * stride + column);
    } else if (tail != nullptr) {
      packet.load(tail + (n * (W - 1) + W - 1 + position) * cols + column);
    }
    packet.get(window.v[j]);
  }
}

}  // namespace fw::cuda
