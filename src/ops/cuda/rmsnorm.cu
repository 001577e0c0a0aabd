// RMSNorm on the device, with the addition of the residual stream before it or without.
//   with n = x rstd and h = dy weight:   dx = rstd (h - n mean(h n))     dweight = sum over rows of dy n
// Forward reads x (and delta) and writes y (and x) once, backward reads dy and x (dx to add to) and writes dx once:
// what limits them is memory alone. In forward a warp has a row, so that a row needs no barrier, and keeps it in
// registers, up to eight packets a lane (2,048 bf16 numbers). Wider rows, few rows, and in backward all but the
// narrowest, take a block of eight warps, and those that are wider still (16,384) or not aligned are read twice.
// x after an addition is rounded as it is stored, and the norm is that of the rounded row: backward sees the same.
#include <algorithm>
#include <type_traits>

#include "gpu/launch.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/overlap.cuh"
#include "ops/cuda/packets.cuh"
#include "ops/cuda/scratch.h"

namespace fw::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;

template <class T>
struct NormArgs {
  int64_t rows = 0, cols = 0;
  T* x = nullptr;            // written where delta is added
  const T* delta = nullptr;  // dy in backward
  T* y = nullptr;            // dx in backward
  int64_t x_stride = 0, delta_stride = 0, y_stride = 0;
  const float* weight = nullptr;
  float* rstd = nullptr;
  float eps = 0;
  float* partial = nullptr;  // backward: [blocks, cols]
};

// The sum over a row's threads, the same in all of them. `scratch`: [kWarps] in shared memory, free again after the
// block's next barrier.
template <int kRowWarps>
FW_DEVICE float row_sum(float x, float* scratch) {
  x = warp_sum(x);
  if constexpr (kRowWarps > 1) {
    if (lane_index() == 0) scratch[warp_index()] = x;
    sync_threads();
    x = 0;
    FW_UNROLL for (int w = 0; w < kRowWarps; ++w) x += scratch[w];
  }
  return x;
}

// Packets of a row that are a thread's own: in_row, in_row + step, ... body(i, column) for the i-th; kVectors 0: as
// many as there are.
template <int kVectors, class Body>
FW_DEVICE void for_packets(int in_row, int step, int64_t packets, int width, const Body& body) {
  if constexpr (kVectors > 0) {
    FW_UNROLL for (int i = 0; i < kVectors; ++i) {
      const int64_t p = in_row + int64_t{i} * step;
      if (p < packets) body(i, p * width);
    }
  } else {
    for (int64_t p = in_row; p < packets; p += step) body(0, p * width);
  }
}

template <class T, int N, int kVectors, int kRowWarps, bool kAdd>
__global__ void __launch_bounds__(kThreads) rmsnorm_forward_kernel(const NormArgs<T> a) {
  constexpr int kStep = kRowWarps * 32;
  // The few rows of decoded tokens have a block each. Their weight, a parameter, is here before the kernel in front is
  // over, and so ahead of the weights that the product after this kernel asks for.
  constexpr bool kWeightFirst = kRowWarps > 1 && kVectors > 0 && kVectors <= 2;
  const int in_row = static_cast<int>(thread_index()) % kStep;
  const int64_t row = int64_t{block_index_x()} * (kWarps / kRowWarps) + thread_index() / kStep;
  if constexpr (!kWeightFirst) follow();
  if (row >= a.rows) return;  // a whole warp, or a whole block
  T* x = a.x + row * a.x_stride;
  const T* delta = a.delta + row * a.delta_stride;
  T* y = a.y + row * a.y_stride;
  const int64_t packets = a.cols / N;
  float* scratch = reinterpret_cast<float*>(shared_memory());
  float weights[kWeightFirst ? kVectors : 1][N];
  if constexpr (kWeightFirst) {
    for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) { load_floats(a.weight + c, weights[i]); });
    follow();
  }

  constexpr int kKept = kVectors > 0 ? kVectors : 1;
  Packet<T, N> kept[kKept], added[kKept];
  float squares = 0;
  if constexpr (kVectors > 0) {
    for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) {
      kept[i].load(x + c);
      if constexpr (kAdd) added[i].load(delta + c);
    });
  }
  for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) {
    if constexpr (kVectors == 0) kept[0].load(x + c);
    float v[N];
    kept[i].get(v);
    if constexpr (kAdd) {
      if constexpr (kVectors == 0) added[0].load(delta + c);
      float d[N];
      added[i].get(d);
      FW_UNROLL for (int k = 0; k < N; ++k) v[k] += d[k];
      kept[i].set(v);
      kept[i].store(x + c);
      kept[i].get(v);
    }
    FW_UNROLL for (int k = 0; k < N; ++k) squares += v[k] * v[k];
  });
  const float rstd = 1.0f / sqrtf(row_sum<kRowWarps>(squares, scratch) / static_cast<float>(a.cols) + a.eps);
  if (in_row == 0) a.rstd[row] = rstd;
  for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) {
    if constexpr (kVectors == 0) kept[0].load(x + c);  // its own stores, if there were any
    float v[N], w[N];
    kept[i].get(v);
    if constexpr (kWeightFirst) {
      FW_UNROLL for (int k = 0; k < N; ++k) w[k] = weights[i][k];
    } else {
      load_floats(a.weight + c, w);
    }
    FW_UNROLL for (int k = 0; k < N; ++k) v[k] = v[k] * rstd * w[k];
    Packet<T, N> out;
    out.set(v);
    out.store(y + c);
  });
}

// A warp (block) has the rows slot, slot + slots, ... and sums its share of dweight over them; a block's warps add
// theirs in order. Rows of few packets a thread are asked for kAhead rows before they are used, their rstd too: a block
// has few warps to hide it after.
template <class T, int N, int kVectors, int kRowWarps, bool kAccumulate, int kAhead>
__global__ void __launch_bounds__(kThreads) rmsnorm_backward_kernel(const NormArgs<T> a) {
  follow();  // for the kernel that adds the sums
  constexpr int kStep = kRowWarps * 32, kSlots = kWarps / kRowWarps;
  const int in_row = static_cast<int>(thread_index()) % kStep, slot = static_cast<int>(thread_index()) / kStep;
  const int64_t packets = a.cols / N;
  // [2, kWarps], a row's and the next one's; then [cols] sums of the block where packets are kept
  float* scratch = reinterpret_cast<float*>(shared_memory());
  float* sums = scratch + 2 * kWarps;
  float* partial = a.partial + int64_t{block_index_x()} * a.cols;

  constexpr int kKept = kVectors > 0 ? kVectors : 1;
  float dweight[kKept][N] = {};
  if constexpr (kVectors == 0) {
    for_packets<0>(in_row, kStep, packets, N,
                   [&](int, int64_t c) { FW_UNROLL for (int k = 0; k < N; ++k) partial[c + k] = 0; });
  }
  struct Row {
    Packet<T, N> x[kKept], dy[kKept];
    float rstd = 0;
  };
  Row rows[kAhead + 1];  // this one, and those after it
  const int64_t first = int64_t{block_index_x()} * kSlots + slot, step = int64_t{grid_size_x()} * kSlots;
  const auto load_row = [&](int64_t row, Row& to) {
    if (row >= a.rows) return;
    to.rstd = a.rstd[row];
    if constexpr (kVectors > 0) {
      for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) {
        to.x[i].load(a.x + row * a.x_stride + c);
        to.dy[i].load(a.delta + row * a.delta_stride + c);
      });
    }
  };
  FW_UNROLL for (int i = 0; i < kAhead; ++i) load_row(first + i * step, rows[i]);
  int half = 0;
  for (int64_t row = first; row < a.rows; row += step, half ^= 1) {
    load_row(row + kAhead * step, rows[kAhead]);
    Row& now = rows[0];
    const T* x = a.x + row * a.x_stride;
    const T* dy = a.delta + row * a.delta_stride;
    T* dx = a.y + row * a.y_stride;
    const float rstd = now.rstd;
    Packet<T, N> before[kKept];
    if constexpr (kVectors > 0 && kAccumulate) {
      for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) { before[i].load(dx + c); });
    }
    float dot = 0;
    for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) {
      if constexpr (kVectors == 0) {
        now.x[0].load(x + c);
        now.dy[0].load(dy + c);
      }
      float n[N], h[N], w[N];
      now.x[i].get(n);
      now.dy[i].get(h);
      load_floats(a.weight + c, w);
      FW_UNROLL for (int k = 0; k < N; ++k) {
        n[k] *= rstd;
        if constexpr (kVectors > 0) {
          dweight[i][k] += h[k] * n[k];
        } else {
          partial[c + k] += h[k] * n[k];
        }
        dot += h[k] * w[k] * n[k];
      }
    });
    const float mean = row_sum<kRowWarps>(dot, scratch + half * kWarps) / static_cast<float>(a.cols);
    for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) {
      if constexpr (kVectors == 0) {
        now.x[0].load(x + c);
        now.dy[0].load(dy + c);
        if constexpr (kAccumulate) before[0].load(dx + c);
      }
      float n[N], h[N], w[N], out[N];
      now.x[i].get(n);
      now.dy[i].get(h);
      load_floats(a.weight + c, w);
      FW_UNROLL for (int k = 0; k < N; ++k) out[k] = rstd * (h[k] * w[k] - n[k] * rstd * mean);
      if constexpr (kAccumulate) {
        float old[N];
        before[i].get(old);
        FW_UNROLL for (int k = 0; k < N; ++k) out[k] += old[k];
      }
      Packet<T, N> packet;
      packet.set(out);
      packet.store(dx + c);
    });
    FW_UNROLL for (int i = 0; i < kAhead; ++i) rows[i] = rows[i + 1];
  }
  if constexpr (kVectors > 0) {
    for (int rotation = 0; rotation < kSlots; ++rotation) {
      if (rotation == slot) {
        for_packets<kVectors>(in_row, kStep, packets, N, [&](int i, int64_t c) {
          FW_UNROLL for (int k = 0; k < N; ++k) {
            const float sum = (rotation == 0 ? 0.0f : sums[c + k]) + dweight[i][k];
            if (rotation == kSlots - 1) {
              partial[c + k] = sum;
            } else {
              sums[c + k] = sum;
            }
          }
        });
      }
      sync_threads();
    }
  }
}

// Calls run(N, vectors, warps of a row) with numbers of the compiler. Backward, which keeps three numbers where forward
// keeps one, spreads a row over a block early.
template <class T, bool kRowsOfWarps, class Run>
void with_form(bool aligned, int64_t cols, const Run& run) {
  constexpr int kN = kPacket<T>;
  const auto number = [](auto n) { return n; };
  const auto of = [&]<int n>() { return number(std::integral_constant<int, n>{}); };
  const int64_t packets = cols / kN;
  if (!aligned || cols % kN != 0 || packets > kThreads * 8)
    return run(of.template operator()<1>(), of.template operator()<0>(), of.template operator()<kWarps>());
  const auto n = of.template operator()<kN>();
  if (packets <= 64) return run(n, of.template operator()<2>(), of.template operator()<1>());
  if constexpr (kRowsOfWarps) {
    if (packets <= 128) return run(n, of.template operator()<4>(), of.template operator()<1>());
    if (packets <= 256) return run(n, of.template operator()<8>(), of.template operator()<1>());
  } else {
    if (packets <= 256) return run(n, of.template operator()<1>(), of.template operator()<kWarps>());
    if (packets <= 512) return run(n, of.template operator()<2>(), of.template operator()<kWarps>());
  }
  if (packets <= 1024) return run(n, of.template operator()<4>(), of.template operator()<kWarps>());
  run(n, of.template operator()<8>(), of.template operator()<kWarps>());
}

template <class T>
bool aligned(const NormArgs<T>& a) {
  return in_packets<T>(a.x, a.x_stride) && in_packets<T>(a.y, a.y_stride) &&
         (a.delta == nullptr || in_packets<T>(a.delta, a.delta_stride)) && in_packets<float>(a.weight, 0);
}

template <class T, bool kAdd>
void launch_forward(const NormArgs<T>& a, void* stream) {
  const auto run = [&](auto n, auto vectors, auto warps) {
    const int64_t rows = kWarps / warps.value;  // of a block
    launch_following(a.rows, rmsnorm_forward_kernel<T, n.value, vectors.value, warps.value, kAdd>,
                     Dim3{static_cast<unsigned>((a.rows + rows - 1) / rows)}, kThreads, kWarps * sizeof(float), stream,
                     a);
  };
  a.rows <= kOverlappedRows ? with_form<T, false>(aligned(a), a.cols, run)
                            : with_form<T, true>(aligned(a), a.cols, run);
}

template <class T, bool kAccumulate>
void launch_backward(NormArgs<T> a, float* dweight, const Exec<T>& exec) {
  const Arena::Mark mark = exec.arena.mark();
  void* stream = exec.device.stream();
  with_form<T, false>(aligned(a), a.cols, [&](auto n, auto vectors, auto warps) {
    const int64_t rows = kWarps / warps.value;
    const int64_t blocks = std::min(kNormBlocks, (a.rows + rows - 1) / rows);
    a.partial = partial_sums(exec.arena, norm_sums(a.rows), a.cols);
    const size_t shared =
        sizeof(float) * (2 * kWarps + (vectors.value > 0 && warps.value == 1 ? static_cast<size_t>(a.cols) : 0));
    constexpr int kAhead = vectors.value == 1 ? 2 : vectors.value == 2 ? 1 : 0;
    launch(rmsnorm_backward_kernel<T, n.value, vectors.value, warps.value, kAccumulate, kAhead>,
           Dim3{static_cast<unsigned>(blocks)}, kThreads, shared, stream, a);
    add_column_sums(a.partial, blocks, a.cols, dweight, stream);
  });
  exec.arena.rewind(mark);
}

}  // namespace

namespace ops {

template <class T>
void rmsnorm_forward(const Exec<T>& exec, Mat<const T> x, const Wide<T>* weight, Wide<T> eps, Mat<T> y, Wide<T>* rstd) {
  if (x.rows == 0) return;
  // x is only read
  NormArgs<T> a{x.rows, x.cols, const_cast<T*>(x.data), nullptr, y.data, x.stride, 0, y.stride, weight, rstd, eps};
  launch_forward<T, false>(a, exec.device.stream());
}

template <class T>
void add_rmsnorm_forward(const Exec<T>& exec, Mat<T> x, Mat<const T> delta, const Wide<T>* weight, Wide<T> eps,
                         Mat<T> y, Wide<T>* rstd) {
  if (x.rows == 0) return;
  launch_forward<T, true>(
      {x.rows, x.cols, x.data, delta.data, y.data, x.stride, delta.stride, y.stride, weight, rstd, eps},
      exec.device.stream());
}

template <class T>
void rmsnorm_backward(const Exec<T>& exec, Mat<const T> dy, Mat<const T> x, const Wide<T>* weight, const Wide<T>* rstd,
                      Mat<T> dx, Wide<T>* dweight, Write write) {
  if (x.rows == 0) return;
  const NormArgs<T> a{x.rows,    x.cols, const_cast<T*>(x.data),  dy.data, dx.data, x.stride, dy.stride,
                      dx.stride, weight, const_cast<float*>(rstd)};  // both only read
  write == Write::kAccumulate ? launch_backward<T, true>(a, dweight, exec)
                              : launch_backward<T, false>(a, dweight, exec);
}

#define FW_INSTANTIATE(T)                                                                                           \
  template void rmsnorm_forward<T>(const Exec<T>&, Mat<const T>, const float*, float, Mat<T>, float*);              \
  template void add_rmsnorm_forward<T>(const Exec<T>&, Mat<T>, Mat<const T>, const float*, float, Mat<T>, float*);  \
  template void rmsnorm_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, const float*, Mat<T>, \
                                    float*, Write);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
