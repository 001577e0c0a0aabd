// A block has a row. Up to four packets a thread (32,768 bf16 logits) stay in registers between the sum of exponentials
// and the gradient, which is written where they were read: a row goes through the memory once each way. Wider and
// unaligned rows are read twice. Exponentials are those of the row's distance from its own largest number, summed in
// float32: a thread's in order, then a warp's, then the block's.
#include "gpu/launch.h"
#include "ops/cuda/cross_entropy.h"
#include "ops/cuda/packets.cuh"

namespace fw::cuda {
namespace {

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * 32;

template <class T>
struct RowArgs {
  T* logits = nullptr;
  int64_t stride = 0, cols = 0;
  const int32_t* targets = nullptr;
  float grad_scale = 0;
  float* nll = nullptr;
};

// Over the block, the same in all threads; `scratch` [kWarps] in shared memory, free again after the next barrier.
template <bool kMax>
FW_DEVICE float over_block(float x, float* scratch) {
  x = kMax ? warp_max(x) : warp_sum(x);
  if (lane_index() == 0) scratch[warp_index()] = x;
  sync_threads();
  x = scratch[lane_index()];
  x = kMax ? warp_max(x) : warp_sum(x);
  sync_threads();
  return x;
}

template <class T, int N, int kKept, bool kGradient>
__global__ void __launch_bounds__(kThreads) cross_entropy_rows_kernel(const RowArgs<T> a) {
  float* scratch = reinterpret_cast<float*>(shared_memory());
  const int64_t row = block_index_x(), packets = a.cols / N;
  T* logits = a.logits + row * a.stride;
  const int32_t target = a.targets[row];
  Packet<T, N> kept[kKept > 0 ? kKept : 1];
  const auto for_packets = [&](const auto& body) {
    if constexpr (kKept > 0) {
      FW_UNROLL for (int i = 0; i < kKept; ++i) {
        const int64_t p = thread_index() + int64_t{i} * kThreads;
        if (p < packets) body(i, p * N);
      }
    } else {
      for (int64_t p = thread_index(); p < packets; p += kThreads) body(0, p * N);
    }
  };
  if (target < 0) {  // the whole block
    if (thread_index() == 0) a.nll[row] = 0;
    if constexpr (kGradient) {
      for_packets([&](int, int64_t c) {
        const float zeros[N] = {};
        Packet<T, N> out;
        out.set(zeros);
        out.store(logits + c);
      });
    }
    return;
  }
  if constexpr (kKept > 0) for_packets([&](int i, int64_t c) { kept[i].load(logits + c); });
  float largest = -bits_float(0x7f800000u);
  for_packets([&](int i, int64_t c) {
    if constexpr (kKept == 0) kept[0].load(logits + c);
    float x[N];
    kept[i].get(x);
    FW_UNROLL for (int k = 0; k < N; ++k) largest = fmaxf(largest, x[k]);
  });
  largest = over_block<true>(largest, scratch);
  float sum = 0;
  for_packets([&](int i, int64_t c) {
    if constexpr (kKept == 0) kept[0].load(logits + c);
    float x[N];
    kept[i].get(x);
    FW_UNROLL for (int k = 0; k < N; ++k) sum += exp2_fast((x[k] - largest) * kLog2E);
  });
  sum = over_block<false>(sum, scratch);
  if (thread_index() == 0) a.nll[row] = logf(sum) + (largest - number(logits[target]));
  if constexpr (kGradient) {
    sync_threads();  // the target's logit has been read
    const float scale = a.grad_scale / sum;
    for_packets([&](int i, int64_t c) {
      if constexpr (kKept == 0) kept[0].load(logits + c);
      float x[N];
      kept[i].get(x);
      FW_UNROLL for (int k = 0; k < N; ++k) x[k] =
          scale * exp2_fast((x[k] - largest) * kLog2E) - (c + k == target ? a.grad_scale : 0.0f);
      kept[i].set(x);
      kept[i].store(logits + c);
    });
  }
}

template <class T, bool kGradient>
void launch_rows(const RowArgs<T>& a, int64_t rows, void* stream) {
  constexpr int kN = kPacket<T>;
  const auto run = [&](auto kernel) {
    launch(kernel, Dim3{static_cast<unsigned>(rows)}, kThreads, kWarps * sizeof(float), stream, a);
  };
  if (!in_packets<T>(a.logits, a.stride) || a.cols % kN != 0) return run(cross_entropy_rows_kernel<T, 1, 0, kGradient>);
  const int64_t packets = a.cols / kN;
  if (packets <= kThreads) return run(cross_entropy_rows_kernel<T, kN, 1, kGradient>);
  if (packets <= 4 * kThreads) return run(cross_entropy_rows_kernel<T, kN, 4, kGradient>);
  run(cross_entropy_rows_kernel<T, kN, 0, kGradient>);
}

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads)
    add_loss_kernel(const float* nll, const int32_t* targets, int64_t rows, LossSum* sum) {
  float* values = reinterpret_cast<float*>(shared_memory());           // [kSumThreads]
  int32_t* scored = reinterpret_cast<int32_t*>(values) + kSumThreads;  // [kSumThreads]
  double total = 0;
  int64_t count = 0;
  for (int64_t first = 0; first < rows; first += kSumThreads) {
    const int64_t t = first + thread_index();
    const bool counts = t < rows && targets[t] >= 0;
    values[thread_index()] = counts ? nll[t] : 0.0f;
    scored[thread_index()] = counts ? 1 : 0;
    sync_threads();
    if (thread_index() == 0) {
      for (int i = 0; i < kSumThreads; ++i) {
        total += static_cast<double>(values[i]);
        count += scored[i];
      }
    }
    sync_threads();
  }
  if (thread_index() == 0) {
    sum->nll += total;
    sum->count += count;
  }
}

}  // namespace

template <class T>
void softmax_cross_entropy_rows(const Exec<T>& exec, Mat<T> logits, const int32_t* targets, bool gradient,
                                float grad_scale, float* nll) {
  const RowArgs<T> a{logits.data, logits.stride, logits.cols, targets, grad_scale, nll};
  gradient ? launch_rows<T, true>(a, logits.rows, exec.device.stream())
           : launch_rows<T, false>(a, logits.rows, exec.device.stream());
}
template void softmax_cross_entropy_rows(const Exec<float>&, Mat<float>, const int32_t*, bool, float, float*);
template void softmax_cross_entropy_rows(const Exec<Bf16>&, Mat<Bf16>, const int32_t*, bool, float, float*);

void add_loss(const float* nll, const int32_t* targets, int64_t rows, LossSum* sum, void* stream) {
  launch(add_loss_kernel, Dim3{1}, kSumThreads, 2 * kSumThreads * sizeof(float), stream, nll, targets, rows, sum);
}

}  // namespace fw::cuda
